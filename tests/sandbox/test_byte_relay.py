"""The relay passes every byte both ways, and the ends of both directions, to many connections at a time."""

from __future__ import annotations

import hashlib
import os
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from rlvr.sandbox.byte_relay import Relay

MOST = 4


class Running:
    """A relay on a thread of its own, in front of a server that answers each connection with a digest and an echo."""

    def __init__(self, path: str) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.address = self.listening.getsockname()
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(path)
        self.server.listen()
        self.poller, self.rounds = select.poll(), 0
        self.stops, self.stop = os.pipe()
        self.poller.register(self.stops, select.POLLIN)
        self.relay = Relay(self.poller, self.listening, path, MOST)
        self.threads = [threading.Thread(target=run, daemon=True) for run in (self._relay, self._serve)]
        for thread in self.threads:
            thread.start()

    def _relay(self) -> None:
        while True:
            self.rounds += 1
            for descriptor, _ in self.poller.poll():
                if descriptor == self.stops:
                    return self.relay.close()
                self.relay.handle(descriptor)

    def _serve(self) -> None:
        while True:
            try:
                made, _ = self.server.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(made,), daemon=True).start()

    def _answer(self, made: socket.socket) -> None:
        with made, suppress(OSError):  # a client that is gone
            data = read_all(made)
            made.sendall(hashlib.sha256(data).digest() + data)


def read_all(made: socket.socket) -> bytes:
    got = bytearray()
    while piece := made.recv(1 << 16):
        got += piece
    return bytes(got)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    made = Running(str(tmp_path / "s"))
    yield made
    os.write(made.stop, b"x")
    made.threads[0].join()
    made.server.shutdown(socket.SHUT_RDWR)
    made.server.close()
    made.listening.close()
    os.close(made.stop)
    os.close(made.stops)


def test_every_byte_goes_both_ways_and_so_do_the_ends(running: Running) -> None:
    data = os.urandom(3 << 20)
    with socket.create_connection(running.address) as made:
        made.sendall(data)
        made.shutdown(socket.SHUT_WR)
        assert read_all(made) == hashlib.sha256(data).digest() + data


def test_more_connections_than_it_takes_wait_their_turn(running: Running) -> None:
    kept = [socket.create_connection(running.address) for _ in range(3 * MOST)]
    for number, made in enumerate(kept):  # in order: the first ones are closed before the last are taken
        made.sendall(b"%d" % number)
        made.shutdown(socket.SHUT_WR)
    for number, made in enumerate(kept):
        assert read_all(made)[32:] == b"%d" % number
        made.close()


def test_a_side_that_is_gone_costs_no_processor_time(running: Running) -> None:
    """A client that resets while nothing is passed, and one that waits: the relay sleeps."""
    waiting = socket.create_connection(running.address)
    waiting.sendall(b"x")
    gone = socket.create_connection(running.address)
    gone.sendall(b"y")
    gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    gone.close()
    with socket.create_connection(running.address) as made:
        made.shutdown(socket.SHUT_WR)
        assert len(read_all(made)) == 32
    before = running.rounds
    threading.Event().wait(0.2)
    assert running.rounds - before <= 4
    waiting.close()
