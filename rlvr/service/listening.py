"""Where a server listens: the socket, who may reach it, how many may come, and how it stops.

Both services use this. Exercised by tests/test_service_starts.py and tests/test_tinker_serve.py.
"""

from __future__ import annotations

import ipaddress
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rlvr.service.keys import VARIABLE, Keys

FILES = 65_536  # open at a time: every client that waits holds a connection
HEAD_BYTES = 512 << 10  # of a request's head, with what came in one piece behind it
HEAD_SECONDS = 30.0  # that a connection may take until a head is complete


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError as error:
        raise ValueError(f"--host {host!r}: expected an IP address of this machine, or localhost") from error


def check_exposure(host: str, keys: Keys, prefix: str = "") -> None:
    """Without keys anybody who reaches the port may train and read: this machine only."""
    if not is_loopback(host) and not keys:
        each = f", each beginning with {prefix}" if prefix else ""
        raise ValueError(
            f"--host {host} can be reached from other machines, and no API key is set: everybody could train and read "
            f"here. Give --keys FILE (one key a line{each}) or {VARIABLE}, or listen on 127.0.0.1"
        )


def bound(host: str, port: int) -> socket.socket:
    """The listening socket, before anything is loaded: a port that is taken is said at once. Port 0: any free one."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise ValueError(
            f"cannot listen on {host}:{port} ({getattr(error, 'strerror', None) or error}); give another --port "
            "(0 takes any that is free)"
        ) from error
    return listening


def url_of(listening: socket.socket) -> str:
    """Where a listening socket is reached, e.g. http://127.0.0.1:3035."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def most_connections() -> int:
    """As many as there may be files open, less what the server itself opens: a save must not fail by a crowd."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(64, min(FILES, FILES if soft == resource.RLIM_INFINITY else soft) - 256)


def server_class(uvicorn: Any) -> Any:
    """uvicorn's server: says when it answers, lets held requests go when it stops, leaves the exit code to us."""

    class Server(uvicorn.Server):
        def __init__(self, config: Any, begun: Callable[[], None], release: Callable[[], None]) -> None:
            super().__init__(config)
            self.begun, self.release = begun, release

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            self.begun()

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            def stop(number: int, frame: Any) -> None:
                self.release()
                self.handle_exit(number, frame)  # a second Ctrl-C does not wait for connections

            before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

    return Server


def protocol_class() -> Any:
    """uvicorn's HTTP on httptools, with the bounds that are missing there: a head that never ends would fill memory,
    and one that drips would hold its connection for good. Where httptools is absent h11 has bounds of its own."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "auto"

    class Bounded(HttpToolsProtocol):
        _head, _late = 0, None  # bytes of the head that is being read, None between two; the timer that ends it

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            self._done()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._late is not None:
                self._head += len(data)
                if self._head > HEAD_BYTES:
                    self._end()
                    return
            super().data_received(data)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            if self._late is None:  # the first request's time runs since the connection was made
                self._wait()

        def on_headers_complete(self) -> None:
            self._done()
            super().on_headers_complete()

        def _wait(self) -> None:
            self._head, self._late = 0, self.loop.call_later(HEAD_SECONDS, self._end)

        def _done(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

        def _end(self) -> None:
            self._done()
            if not self.transport.is_closing():
                self.transport.abort()

    return Bounded
