"""The checker's end of the channel to an answer: frames, with a deadline and a cap on all that is read.

A frame is four bytes of length (big-endian) and a list: JSON from there, `marshal` data from here, which is trusted.
The other end is hostile: it may send anything, flood, or never read; it costs at most the deadline. Standard library
only; used by `rlvr.sandbox.checker`, and exercised by `python -m pytest tests/test_sandbox_solver.py`.
"""

from __future__ import annotations

import json
import marshal
import os
import select
import time
from typing import Any

NO_FRAME = "what came back is no frame"


class Ended(BaseException):
    """Nothing more can be learned: `reason` is lost, output, opaque, ... No `except Exception` of a test sees it."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


class Line:
    """`asked` says whether anything went over; `ended` is set once nothing more can come."""

    def __init__(self, channel: int | None, seconds: float, output: int) -> None:
        self.channel, self.output = channel, output
        self.deadline = time.monotonic() + seconds
        self.ended: Ended | None = None
        self.asked = False
        self.came = 0
        self.buffer = bytearray()
        self.poller = select.poll()
        if channel is not None:
            os.set_blocking(channel, False)
            self.poller.register(channel, select.POLLIN)

    def end(self, reason: str, detail: str = "") -> Ended:
        """What to raise. What is kept is another one: a traceback would tie both to this object, and be garbage."""
        self.ended = Ended(reason, detail)
        return Ended(reason, detail)

    def wait(self, events: int) -> None:
        assert self.channel is not None
        self.poller.modify(self.channel, events)
        if not self.poller.poll(max(0.0, self.deadline - time.monotonic()) * 1000):
            raise self.end("lost", "no time left")

    def write(self, message: Any) -> None:
        self.asked = True
        if self.ended:
            raise Ended(self.ended.reason, self.ended.detail)
        if self.channel is None:
            raise self.end("reached")
        body = marshal.dumps(message)
        data = memoryview(len(body).to_bytes(4, "big") + body)
        while data:
            try:
                data = data[os.write(self.channel, data) :]
            except BlockingIOError:
                self.wait(select.POLLOUT)
            except OSError:
                raise self.end("lost") from None

    def some(self) -> bytes:
        """What has come, empty at the end."""
        assert self.channel is not None
        self.wait(select.POLLIN)
        try:
            data = os.read(self.channel, 1 << 16)
        except OSError:
            data = b""
        self.output -= len(data)
        self.came += len(data)
        if self.output < 0:
            raise self.end("output", "more came back than the cap on output")
        return data

    def read(self) -> list[Any]:
        if self.ended:
            raise Ended(self.ended.reason, self.ended.detail)
        while len(self.buffer) < 4 or len(self.buffer) < self.size():
            if len(self.buffer) >= 4 and self.size() > self.output + len(self.buffer):
                raise self.end("output", "more came back than the cap on output")
            more = self.some()
            if not more:
                raise self.end("lost")
            self.buffer += more
        size = self.size()
        body = bytes(self.buffer[4:size])
        del self.buffer[:size]
        try:
            message = json.loads(body)
        except (ValueError, RecursionError):
            raise self.end("opaque", NO_FRAME) from None
        if type(message) is not list or not message:
            raise self.end("opaque", NO_FRAME)
        return message

    def size(self) -> int:
        return 4 + int.from_bytes(self.buffer[:4], "big")
