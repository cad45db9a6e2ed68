"""How both servers listen: the socket, who may reach it, how many connections, and a graceful stop.

    with bind_socket(host, port) as listening:
        run_server(app, listening, on_ready=lambda: print(server_url(listening)), on_stop=release)

    with bind_socket(host, port) as listening, BackgroundServer(app, listening) as server:
        load_the_model()       # requests are answered meanwhile
        server.wait(release)

Left out on purpose: TLS, which a proxy in front of the server does better (see docs/tinker/server.md).
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Self

from rlvr.web.auth import KEYS_VARIABLE, ApiKeys

MAX_OPEN_FILES = 65_536  # every client that waits holds a connection
BACKLOG = 2_048  # connections that wait to be accepted
MAX_HEAD_BYTES = 512 << 10  # of a request's head, with what arrived in one piece behind it
HEAD_SECONDS = 30.0  # within which a connection's next head must be complete, once it has begun
REST_SECONDS = 30.0  # within which a body must be complete that was answered before it was
AT_ONCE_SECONDS = 1.0  # to close connections where the process ends with an error


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError as error:
        raise ValueError(f"--host {host!r}: expected an IP address of this machine, or localhost") from error


def check_exposure(host: str, keys: ApiKeys, prefix: str = "") -> None:
    """Refuse an address that other machines can reach if there are no keys."""
    if not is_loopback(host) and not keys:
        each = f", each beginning with {prefix}" if prefix else ""
        raise ValueError(
            f"--host {host} can be reached from other machines, and no API key is set: anyone could train and read "
            f"here. Give --keys FILE (one key a line{each}) or {KEYS_VARIABLE}, or listen on 127.0.0.1"
        )


def bind_socket(host: str, port: int) -> socket.socket:
    """A listening socket, made before anything is loaded so that a taken port is reported at once. Port 0: any free
    one. Connections wait in its queue until they are answered."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listening.close()
        raise ValueError(
            f"cannot listen on {host}:{port} ({getattr(error, 'strerror', None) or error}); give another --port "
            "(0 takes any that is free)"
        ) from error
    return listening


def bind_unix_socket(path: str) -> socket.socket:
    """A listening Unix socket that this user alone may connect to."""
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(path)
        os.chmod(path, 0o600)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise ValueError(
            f"cannot listen on the socket {path} ({error}); its path may have at most 107 bytes: set TMPDIR to a "
            "shorter folder"
        ) from error
    return listening


def server_url(listening: socket.socket) -> str:
    """The address of a socket, e.g. http://127.0.0.1:3035."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def max_connections() -> int:
    """The limit of open files, less what the server itself opens: a save must not fail because of many clients."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # some systems allow less than their hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(64, min(MAX_OPEN_FILES, MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft) - 256)


def run_server(
    app: Any,
    listening: socket.socket,
    *,
    on_ready: Callable[[], None],
    on_stop: Callable[[], None] = lambda: None,
    **options: Any,
) -> None:
    """Serve with uvicorn until SIGINT or SIGTERM; `options` are uvicorn's.

    `on_ready` is called once requests are answered, `on_stop` in the signal handler: it ends requests that are held.
    """
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            on_ready()

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Unlike uvicorn's own, leaves the exit code to the caller."""

            def stop(number: int, frame: Any) -> None:
                on_stop()
                self.handle_exit(number, frame)  # a second Ctrl-C does not wait for connections

            with handle_signals(stop):
                yield

    Server(server_config(app, **options)).run(sockets=[listening])


class BackgroundServer:
    """uvicorn on a thread of its own, as a context: the main thread can load a model while requests are answered."""

    def __init__(self, app: Any, listening: socket.socket, **options: Any) -> None:
        import uvicorn

        started = self._started = threading.Event()

        class LoopServer(uvicorn.Server):
            loop: asyncio.AbstractEventLoop

            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                self.loop = asyncio.get_running_loop()
                await super().startup(sockets)
                started.set()

        self._server = LoopServer(server_config(app, **{"lifespan": "off", **options}))
        run = partial(self._server.run, sockets=[listening])
        self._thread = threading.Thread(target=run, name="http", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *failure: Any) -> None:
        self.stop(at_once=failure[0] is not None)

    def call_soon(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function on the event loop."""
        self._server.loop.call_soon_threadsafe(function, *args)

    def wait(self, on_stop: Callable[[], None]) -> None:
        """Wait for SIGINT or SIGTERM and until every request is answered; `on_stop` runs on the event loop.

        A second Ctrl-C does not wait for requests.
        """

        def stop(number: int, frame: Any) -> None:
            self.call_soon(on_stop)
            self._server.handle_exit(number, frame)

        with handle_signals(stop):
            self._thread.join()

    def stop(self, *, at_once: bool = False) -> None:
        """Finish the requests that are being answered, unless `at_once`, and end. On the server's own thread, where
        garbage collection may call it as a finalizer, it does not wait for the end."""
        self._server.should_exit = True
        self._server.force_exit |= at_once
        if self._thread is not threading.current_thread():
            self._thread.join(AT_ONCE_SECONDS if at_once else None)


@contextmanager
def handle_signals(stop: Callable[[int, Any], None]) -> Iterator[None]:
    """Call `stop` at SIGINT and SIGTERM."""
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def server_config(app: Any, **options: Any) -> Any:
    import uvicorn

    defaults = {
        "http": protocol_class(), "log_config": None, "access_log": False, "timeout_keep_alive": 75,
        "limit_concurrency": max_connections(),
    }  # fmt: skip
    return uvicorn.Config(app, **{**defaults, **options})


def protocol_class() -> Any:
    """uvicorn's HTTP on httptools, with bounds on a request's head: in bytes, which would fill memory, and in time,
    since a slow one would hold its connection forever. So would a body that is still arriving after its answer, which
    has `REST_SECONDS`. At `limit_concurrency` connections, a new one closes the one that has been without a request the
    longest; if all have one, its request gets 503. Without httptools, h11 has bounds of its own."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "auto"

    idle: dict[Any, None] = {}  # connections whose next head is not complete, the oldest first

    class BoundedHttpProtocol(HttpToolsProtocol):
        _is_complete, _rest = True, None  # whether the last message has arrived; the timer of one with an answer
        _head_bytes, _timer = 0, None  # of the head that is being read; the timer is None between two heads

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._start_timer()
            idle[self] = None
            oldest = next(iter(idle))
            if oldest is not self and len(self.connections) >= (self.limit_concurrency or math.inf):
                oldest._abort()

        def connection_lost(self, exc: Exception | None) -> None:
            idle.pop(self, None)
            self._stop_timer()
            if self._rest is not None:
                self._rest.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._timer is not None:
                self._head_bytes += len(data)
                if self._head_bytes > MAX_HEAD_BYTES:
                    self._abort()
                    return
            super().data_received(data)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._is_complete = False
            if self._timer is None:  # the first request's timer starts with the connection
                self._start_timer()

        def on_headers_complete(self) -> None:
            idle.pop(self, None)
            self._stop_timer()
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self._is_complete = True
            if self._rest is not None:
                self._rest.cancel()
                self._rest = None

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.transport.is_closing():
                return
            if self.cycle.response_complete:  # no other request waits behind it
                idle[self] = None
                self.cycle.body = bytearray()  # of which the application did not take everything
            if not self._is_complete:
                self._rest = self.loop.call_later(REST_SECONDS, self._abort)

        def _start_timer(self) -> None:
            self._head_bytes, self._timer = 0, self.loop.call_later(HEAD_SECONDS, self._abort)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _abort(self) -> None:
            idle.pop(self, None)
            self._stop_timer()
            if not self.transport.is_closing():
                self.transport.abort()

    return BoundedHttpProtocol
