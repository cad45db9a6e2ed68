"""How much a JSON body holds, found before it is parsed: while the parser runs, an event loop stands still.

Exercised by tests/test_tinker_event_loop.py and tests/test_service_attacks.py.
"""

from __future__ import annotations

_PARTS = (b"[", b"{", b":")
_STEP = 64 << 10  # bytes that are looked at in one call into C, which keeps other threads waiting


def has_more_parts(raw: bytes, parts: int, values: int) -> bool:
    """Whether a JSON text has more than `parts` lists, objects and fields, or more than `values` commas; what its
    strings hold does not count."""
    if sum(map(raw.count, _PARTS)) <= parts and raw.count(b",") <= values:
        return False
    place, is_text = 0, False
    while place < len(raw):
        piece = raw[place : place + _STEP]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # it ends within an escape
            piece = raw[place : place + _STEP + 1]
        place += len(piece)
        texts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(texts[is_text::2])
        is_text ^= len(texts) % 2 == 0
        parts -= sum(map(outside.count, _PARTS))
        values -= outside.count(b",")
        if parts < 0 or values < 0:
            return True
    return False
