"""Ctrl-C and SIGTERM end a loop after the step in progress, which is saved; a second one ends it at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType


class StopRequest:
    """Whether the user asked to stop: `is_set` while a block of `handle_signals` runs."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        self.is_set = False
        self._announce = announce

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Take the process's signals in this block: the first one sets the request, a second one interrupts.

        A signal that is ignored (of a program in the background, Ctrl-C is for another) stays ignored. Outside the main
        thread no signals are taken: the caller there stops by other means.
        """
        self.is_set = False
        with ExitStack() as stack:
            try:
                for number in (signal.SIGINT, signal.SIGTERM):
                    if (before := signal.getsignal(number)) is not signal.SIG_IGN:
                        signal.signal(number, self._receive)
                        stack.callback(signal.signal, number, before)
            except ValueError:  # not the main thread
                pass
            yield

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True
        self._announce("stopping after this step (press Ctrl-C again to stop at once)")
