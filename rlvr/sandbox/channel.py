"""The checker's end of the channel to an answer: frames, with a deadline and a cap on everything that is read.

The checker sends `marshal` data, which the solver can trust; the solver sends lists as JSON. The solver's side is
hostile: it may send anything, flood, or never read, and can cost no more than the deadline. Standard library only.
"""

from __future__ import annotations

import marshal
import os
import select
import time
from typing import Any

from rlvr.sandbox.protocol import FrameTooLarge, frame, take_frame, unpack

NO_FRAME = "the answer's process sent an invalid message"


class ExchangeEnd(BaseException):
    """The exchange with the answer's process is over. `reason` is lost, output, opaque, ...

    A `BaseException`, so that no `except Exception` of a test catches it.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


class Channel:
    """`has_sent` tells whether anything was sent; `ended` is set once nothing more can come.

    `seconds`: how long the answer may take in all. Only the time until its replies counts: the rest is the test's.

    Without a descriptor there is no answer, and the first request ends the exchange with reason `reached`.
    """

    def __init__(self, descriptor: int | None, seconds: float, output: int) -> None:
        self.descriptor, self.output, self.output_left = descriptor, output, output
        self.seconds = self.seconds_left = seconds
        self.ended: ExchangeEnd | None = None
        self.has_sent = False
        self.received = 0
        self.buffer = bytearray()
        self.poller = select.poll()
        if descriptor is not None:
            os.set_blocking(descriptor, False)
            self.poller.register(descriptor, select.POLLIN)

    def end(self, reason: str, detail: str = "") -> ExchangeEnd:
        """Mark the channel as ended; returns an exception for the caller to raise.

        Not the one stored in `ended`: raised, it would keep its traceback and so make a reference cycle.
        """
        self.ended = ExchangeEnd(reason, detail)
        return ExchangeEnd(reason, detail)

    def end_output(self) -> ExchangeEnd:
        return self.end(
            "output", f"more came back than limits.output={self.output:,} bytes; raise it or test a smaller case"
        )

    def raise_if_ended(self) -> None:
        if self.ended:
            raise ExchangeEnd(self.ended.reason, self.ended.detail)

    def wait(self, events: int) -> None:
        assert self.descriptor is not None
        self.poller.modify(self.descriptor, events)
        start = time.monotonic()
        ready = self.poller.poll(max(0.0, self.seconds_left) * 1000)
        self.seconds_left -= time.monotonic() - start
        if not ready:
            raise self.end("timeout")

    def write(self, message: Any) -> None:
        self.has_sent = True
        self.raise_if_ended()
        if self.descriptor is None:
            raise self.end("reached")
        data = memoryview(frame(marshal.dumps(message)))
        while data:
            try:
                data = data[os.write(self.descriptor, data) :]
            except BlockingIOError:
                self.wait(select.POLLOUT)
            except OSError:
                raise self.end("lost") from None

    def read_some(self) -> bytes:
        """The next bytes; empty at the end."""
        assert self.descriptor is not None
        self.wait(select.POLLIN)
        try:
            data = os.read(self.descriptor, 1 << 16)
        except OSError:
            data = b""
        self.output_left -= len(data)
        self.received += len(data)
        if self.output_left < 0:
            raise self.end_output()
        return data

    def require_silence(self) -> None:
        """End the exchange if more came than was asked for."""
        assert self.descriptor is not None
        self.poller.modify(self.descriptor, select.POLLIN)
        if self.buffer or any(
            events & select.POLLIN and not events & select.POLLHUP for _, events in self.poller.poll(0)
        ):
            raise self.end("opaque", NO_FRAME)

    def read(self) -> list[Any]:
        """The next message."""
        self.raise_if_ended()
        try:
            while (body := take_frame(self.buffer, self.output_left + len(self.buffer) - 4)) is None:
                data = self.read_some()
                if not data:
                    raise self.end("lost")
                self.buffer += data
        except FrameTooLarge:
            raise self.end_output() from None
        try:
            message = unpack(body)
        except (ValueError, RecursionError):
            raise self.end("opaque", NO_FRAME) from None
        if type(message) is not list or not message:
            raise self.end("opaque", NO_FRAME)
        return message
