"""JSON of clients: how much it holds, found before it is parsed, and a parser that lets other threads run. json's own
is one call into C, and while it runs an event loop stands still.
"""

from __future__ import annotations

import json
from typing import Any

_PARTS = (b"[", b"{", b":")
_STEP = 64 << 10  # bytes that are looked at in one call into C, which keeps other threads waiting
_SHORT = 64 << 10  # bytes that json's own parser reads in 3 ms at most


def read_json(raw: bytes | str) -> Any:
    """What `json.loads` returns. Of a long text each number is read by a function in Python, which passes the
    interpreter on; without it a million numbers keep it for 300 ms."""
    if len(raw) <= _SHORT:
        return json.loads(raw)
    return json.loads(raw, parse_int=_read_int, parse_float=_read_float)


def _read_int(text: str) -> int:
    return int(text)


def _read_float(text: str) -> float:
    return float(text)


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
