"""A server on a thread of its own ends wherever its end is asked for."""

import threading

from rlvr.web.server import BackgroundServer, bind_socket


async def app(scope: object, receive: object, send: object) -> None:
    raise AssertionError("nothing asks it")


def test_the_servers_own_thread_can_end_it() -> None:
    """As garbage collection does, which runs finalizers on the thread that happens to allocate."""
    failures: list[BaseException] = []
    tried = threading.Event()

    def stop(server: BackgroundServer) -> None:
        try:
            server.stop(at_once=True)
        except BaseException as error:
            failures.append(error)
        tried.set()

    with bind_socket("127.0.0.1", 0) as listening, BackgroundServer(app, listening) as server:
        server.call_soon(stop, server)
        assert tried.wait(10)
        server.wait(lambda: None)
    assert failures == []
