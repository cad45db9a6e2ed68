"""Tells open pages when their source has something new, as server-sent events. One check serves all pages.

A page names the state that it shows; the stream sends another one's name as soon as there is one, and the browser then
asks for the page again (`assets/dashboard.js`).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator

from rlvr.service.dashboard.dashboard_data import Source

REFRESH_S = 2.0  # between two checks for changes
ALIVE_S = 15.0  # between two signs of life: a browser that has gone is noticed by sending to it


class PageChanges:
    def __init__(self, source: Source) -> None:
        self._source = source
        self._now = ""  # the state at the last check
        self._open = self._failures = 0
        self._is_over = False
        self._news = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def read(self) -> str:
        """A name of the state of the source; always another one where it cannot be read, since pages are to retry.
        Blocks."""
        try:
            return hashlib.sha256(repr(self._source.revision()).encode("utf-8", "replace")).hexdigest()[:16]
        except Exception:  # the page itself says what is wrong
            self._failures += 1
            return f"failure-{self._failures}"

    async def stream(self, seen: str) -> AsyncGenerator[str]:
        """An event stream for a page that shows the state `seen`."""
        self._open += 1
        self._loop = asyncio.get_running_loop()
        if self._watching is None:
            self._watching = self._loop.create_task(self._watch())
        try:
            yield f"retry: {1000 * REFRESH_S:.0f}\n\n"
            while not self._is_over:
                news = self._news
                if self._now not in ("", seen):
                    seen = self._now
                    yield f"data: {seen}\n\n"
                    continue
                try:
                    async with asyncio.timeout(ALIVE_S):
                        await news.wait()
                except TimeoutError:
                    yield ":\n\n"
        finally:
            self._open -= 1

    async def _watch(self) -> None:
        try:
            while self._open:
                now = await asyncio.to_thread(self.read)
                if now != self._now:
                    self._now = now
                    self._wake()
                await asyncio.sleep(REFRESH_S)
        finally:
            self._watching = None

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def end(self) -> None:
        """End all streams, which a server waits for when it stops. A thread or a signal handler may call it."""
        self._is_over = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)
            if self._watching is not None:
                self._loop.call_soon_threadsafe(self._watching.cancel)
