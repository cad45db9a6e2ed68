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
