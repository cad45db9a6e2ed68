"""Passes bytes between a TCP port and a Unix socket: the only way out of a sandboxed command. Standard library only.

It understands nothing of what it passes, so nothing can be smuggled through it. It never waits: `poll` says what is
ready, each direction holds `PIECE` bytes at most, and at `most` connections new ones wait in the kernel's queue.
"""

from __future__ import annotations

import select
import socket
from contextlib import suppress

PIECE = 64 << 10
PORT = 8377  # of the recorder, in the sandbox, where no other program listens
MAX_RESULT = 1 << 20  # bytes of the result file, and of the output's end
BACKLOG = 128


class _Half:
    """One direction: what was read from `source` and `target` has not taken yet."""

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self.source, self.target = source, target
        self.held = bytearray()
        self.is_over = self.is_passed_on = False  # the source has ended; the target knows

    def read(self) -> None:
        if self.is_over or self.held:
            return
        try:
            data = self.source.recv(PIECE)
        except BlockingIOError:
            return
        self.held += data
        self.is_over = not data

    def write(self) -> None:
        with suppress(BlockingIOError):
            while self.held:
                del self.held[: self.target.send(self.held)]
        if self.is_over and not self.held and not self.is_passed_on:
            self.is_passed_on = True
            with suppress(OSError):
                self.target.shutdown(socket.SHUT_WR)


class Relay:
    """Connections from `listening` to the socket at `path`. Call `handle` for each event of `poller` that is its."""

    def __init__(self, poller: select.poll, listening: socket.socket, path: str, most: int) -> None:
        self._poller, self._listening, self._path, self._most = poller, listening, path, most
        listening.setblocking(False)
        self._halves: dict[int, tuple[_Half, _Half]] = {}  # by descriptor: what it gives, what it takes
        poller.register(listening, select.POLLIN)

    def handle(self, descriptor: int) -> None:
        if descriptor == self._listening.fileno():
            self._accept()
        elif (pair := self._halves.get(descriptor)) is not None:
            gives, takes = pair
            try:
                for half in pair:
                    half.read()
                    half.write()
            except OSError:
                self._close(gives)
                return
            if gives.is_passed_on and takes.is_passed_on:
                self._close(gives)
            else:
                self._watch(gives, takes)

    def _accept(self) -> None:
        try:
            inside, _ = self._listening.accept()
        except OSError:
            return
        outside = socket.socket(socket.AF_UNIX)
        try:
            outside.setblocking(False)
            outside.connect(self._path)
        except OSError:  # the recorder has gone, or its queue is full
            inside.close()
            outside.close()
            return
        inside.setblocking(False)
        up, down = _Half(inside, outside), _Half(outside, inside)
        self._halves[inside.fileno()], self._halves[outside.fileno()] = (up, down), (down, up)
        self._watch(up, down)
        if len(self._halves) >= 2 * self._most:
            self._poller.unregister(self._listening)

    def _watch(self, gives: _Half, takes: _Half) -> None:
        for here, there in ((gives, takes), (takes, gives)):
            wanted = select.POLLIN if not here.is_over and not here.held else 0
            wanted |= select.POLLOUT if there.held else 0
            if wanted:
                self._poller.register(here.source, wanted)
            else:  # `poll` would go on to report that the other side is gone
                self._unregister(here.source)

    def _unregister(self, end: socket.socket) -> None:
        with suppress(KeyError):
            self._poller.unregister(end)

    def close(self) -> None:
        """Close every connection; the listening socket is the caller's."""
        while self._halves:
            self._close(next(iter(self._halves.values()))[0])

    def _close(self, half: _Half) -> None:
        if len(self._halves) >= 2 * self._most:
            self._poller.register(self._listening, select.POLLIN)
        for end in (half.source, half.target):
            self._unregister(end)
            del self._halves[end.fileno()]
            end.close()
