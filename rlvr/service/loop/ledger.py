"""How sessions reach the store: tried again while it is away, never twice, and what is owed is paid when it is back.

A write is whole or not at all, and repeating it changes nothing (an experience is known by its session, sample and
iteration), so trying again is always right. A session waits `PATIENCE_S` for a store that is away; then it fails as
`store_down`, and what it owes is kept in memory and written with a later heartbeat. Exercised by
tests/test_sessions_failures.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from rlvr.service.logs import logger
from rlvr.service.loop import answers
from rlvr.service.loop.live import Live
from rlvr.store import Store, StoreDown
from rlvr.store.records import Status

T = TypeVar("T")

HEARTBEAT_S = 5.0
SILENT_S = 60.0  # after which another instance's sessions are taken for lost
PATIENCE_S = 30.0
OPEN = (Status.QUEUED, Status.RUNNING)
THREADS = 8  # of the store's own: a judge that hangs must not keep this process from saying that it lives

log = logger("rlvr.service.loop.sessions")


class Ledger:
    """One process's hand on the store. With `closing` nothing waits for it any more."""

    def __init__(self, store: Store, instance: str, patience_s: float = PATIENCE_S) -> None:
        self.store, self.instance = store, instance
        self.closing = False
        self._patience_s = patience_s
        self._owed: list[Live] = []
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="store")

    async def ask(self, work: Callable[[], T]) -> T:
        """In a thread that nothing but the store is waited for in."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def write(self, work: Callable[[], T], patience_s: float | None = None) -> T:
        """In a thread, again and again while the store is away; StoreDown in the end."""
        patience_s = self._patience_s if patience_s is None else patience_s
        until, pause = time.monotonic() + patience_s, 0.1
        while True:
            try:
                return await self.ask(work)
            except StoreDown:
                if time.monotonic() + pause > until or self.closing:
                    raise
            await asyncio.sleep(pause)
            pause = min(2.0, 2 * pause)

    async def save(self, live: Live) -> None:
        """What the store has not got of a session that is under way."""
        await self.write(lambda: self._save(live))

    async def finish(self, live: Live) -> None:
        """The row of a session that is over. Never raises: what cannot be written now is owed."""
        try:
            await self.write(lambda: self._close(live), None if live.away is None else 0.0)
        except (StoreDown, asyncio.CancelledError):
            self._owed.append(live)
        except Exception as error:  # an answer that no table takes: the session ends all the same, without it
            log.error("answers could not be written", session_id=live.session.id, exc_info=error)
            live.unsaved.clear()
            with contextlib.suppress(Exception):
                await self.write(lambda: self._close(live))

    def _save(self, live: Live) -> None:
        session, new = live.session, list(live.unsaved)
        for e, number in zip(new, self.store.add_experiences(new), strict=True):
            e.id = number
        live.unsaved = [e for e in live.unsaved if e.id is None]
        there = answers.standing([e for e in live.experiences if e.id is not None])
        still = self.store.update_session(session.id, expect=Status.RUNNING, **there)
        if not still and not session.status.final:  # ended by another instance
            live.stop = live.stop or "cancelled"

    def _close(self, live: Live) -> None:
        if live.unsaved:
            self._save(live)
        kept = ("id", "created", "instance", "heartbeat")
        row = {name: value for name, value in vars(live.session).items() if name not in kept}
        self.store.update_session(live.session.id, expect=OPEN, **row)

    async def pay(self) -> None:
        """Write what sessions that are over still owe."""
        for live in list(self._owed):
            try:
                await self.ask(partial(self._close, live))
            except StoreDown as error:
                log.warning("sessions wait for the database", sessions=len(self._owed), reason=str(error))
                return
            except Exception as error:  # it will not be written another time either
                log.error("a session could not be written", session_id=live.session.id, exc_info=error)
            self._owed.remove(live)

    async def beat(self) -> None:
        """Be alive, pay what is owed, and notice whose process is not; until cancelled."""
        number = 0
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            number += 1
            with contextlib.suppress(StoreDown):
                await self.ask(partial(self.store.heartbeat, self.instance))
                await self.pay()
                if number % int(SILENT_S / HEARTBEAT_S / 2) == 0:
                    await self.interrupt_lost()

    async def interrupt_lost(self) -> None:
        lost = await self.ask(partial(self.store.interrupt_lost, self.instance, SILENT_S))
        if lost:
            log.warning("sessions whose process is gone were marked interrupted", sessions=lost)
