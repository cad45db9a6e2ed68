"""How much a JSON body holds, found before it is parsed: while the parser runs, an event loop stands still.

Exercised by tests/test_tinker_event_loop.py and tests/test_service_attacks.py.
"""

from __future__ import annotations

_SIGNS = (b"[", b"{", b":")


def has_more_parts(raw: bytes, limit: int) -> bool:
    """Whether a JSON text has more than `limit` lists, objects and fields; what its strings hold does not count."""
    if sum(map(raw.count, _SIGNS)) <= limit:
        return False
    outside = raw.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2]  # without what is escaped, and strings
    return sum(map(b"".join(outside).count, _SIGNS)) > limit
