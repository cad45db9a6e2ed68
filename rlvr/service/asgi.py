"""What the doors of both services share: the types of ASGI, who a request says it is, and bodies that are refused.

Exercised by tests/test_service_door.py and tests/test_tinker_http.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
DRAINED = 1 << 30  # bytes of a refused body that are read and dropped, so that its sender lives to read why


def headers_of(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


def host_name(host: str) -> str:
    """Without the port; an IPv6 address keeps its brackets."""
    return host.rpartition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]


def declared_length(headers: dict[str, str]) -> int:
    """What a body says it has; 0 where it does not say, or says nonsense (it is counted while it arrives anyway)."""
    declared = headers.get("content-length", "0")
    return int(declared) if declared.isascii() and declared.isdecimal() and len(declared) < 20 else 0


async def drain(receive: Receive, most: int = DRAINED) -> None:
    """Read what is left of a body. A connection that is closed while its client still sends shows it a broken pipe,
    which clients take for a network error and repeat."""
    dropped = 0
    while dropped < most:
        message = await receive()
        dropped += len(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body", False):
            return
