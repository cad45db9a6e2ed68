"""How sessions reach the store: writes are retried while the store is down, and never applied twice.

A write is whole or not at all, and repeating it changes nothing (an experience is identified by its session, sample and
iteration). A session waits `PATIENCE_S` for a store that is down, then fails as `store_down`; what it could not write
stays in memory and is written with a later heartbeat. Writes block: an answer is written by the thread that judged it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import Any, TypeVar

from rlvr.core.fair_queue import current_owner
from rlvr.core.fair_slots import FairSlots
from rlvr.service.sessions import session_results
from rlvr.service.sessions.live_session import LiveSession, Phase
from rlvr.store import ExperienceStore, StoreDown
from rlvr.store.connections import NOT_REACHABLE
from rlvr.store.records import Status
from rlvr.web.logs import get_logger

T = TypeVar("T")

HEARTBEAT_S = 5.0
SILENT_S = 60.0  # an instance without a heartbeat for so long has lost its sessions
PATIENCE_S = 30.0
OPEN = (Status.QUEUED, Status.RUNNING)
WRITERS = 8  # writes of sessions at once: a thread each, and with PostgreSQL a connection
READERS, READERS_SHARE = 8, 4  # reads at once for those who watch sessions: of all, and of one owner
FIXED_COLUMNS = ("id", "created", "instance", "heartbeat")  # never changed when a session ends

log = get_logger("rlvr.service.sessions.sessions")


class SessionWriter:
    """This process's writes to the store. Once `closing` is set, nothing is retried."""

    def __init__(self, store: ExperienceStore, instance: str, patience_s: float = PATIENCE_S) -> None:
        self.store, self.instance = store, instance
        self.closing = threading.Event()
        self._away_since: float | None = None  # when the database was first not reached
        self._patience_s = patience_s
        self._pending: list[LiveSession] = []
        self._pending_turn = threading.Lock()  # at the end of the service the last heartbeat may still write
        self._writers = threading.BoundedSemaphore(WRITERS)
        self._read_slots = FairSlots(READERS, READERS_SHARE)

    async def read(self, call: Callable[[], T]) -> T:
        """Run a call of the store that only reads, in its owner's turn: thousands may watch a session, and no write and
        no heartbeat waits for them."""
        return await self._read_slots.run(current_owner(), call)

    def write_once(self, call: Callable[[], T]) -> T:
        """Run a write of a session. Blocks, as all that writes."""
        with self._writers:
            return call()

    def write(
        self, call: Callable[[], T], patience_s: float | None = None, is_needless: Callable[[], bool] = lambda: False
    ) -> T:
        """Run a write, and repeat it while the store is down; StoreDown after `patience_s`, or once `is_needless`."""
        patience_s = self._patience_s if patience_s is None else patience_s
        deadline, pause = time.monotonic() + patience_s, 0.1
        while True:
            try:
                return self.write_once(call)
            except StoreDown:
                if time.monotonic() + pause > deadline or is_needless() or self.closing.wait(pause):
                    raise
            pause = min(2.0, 2 * pause)

    async def wait_out(self, call: Callable[[], Awaitable[T]]) -> T:
        """The result of a call of the store, repeated while the database restarts: for `patience_s` since it was last
        reached, so that callers wait for a restart, and are told at once of a long outage."""
        pause = 0.1
        while True:
            try:
                result = await call()
            except StoreDown as error:
                now = time.monotonic()
                self._away_since = now if self._away_since is None else self._away_since
                is_late = now + pause > self._away_since + self._patience_s
                if error.reason != NOT_REACHABLE or self.closing.is_set() or is_late:
                    raise
            else:
                self._away_since = None
                return result
            await asyncio.sleep(pause)
            pause = min(2.0, 2 * pause)

    def save(self, live: LiveSession) -> None:
        """Write the new answers of a running session."""
        self.write(lambda: self._save(live), is_needless=lambda: live.phase >= Phase.ENDING)

    def finish(self, live: LiveSession) -> None:
        """Write the row of a session that ended. Never raises: what cannot be written now stays pending."""
        try:
            self.write(lambda: self._close(live), None if live.store_error is None else 0.0)
        except StoreDown:
            self._pending.append(live)
        except Exception as error:  # the tables refuse an answer: end the session without it
            log.error("answers could not be written", session_id=live.session.id, exc_info=error)
            live.unsaved.clear()
            with contextlib.suppress(Exception):
                self.write(lambda: self._close(live))

    def _save(self, live: LiveSession) -> None:
        if not self._record(live, Status.RUNNING) and live.phase < Phase.ENDING:
            live.request_stop(Status.CANCELLED)  # another instance ended it

    def _close(self, live: LiveSession) -> None:
        row = {name: value for name, value in vars(live.session).items() if name not in FIXED_COLUMNS}
        self._record(live, OPEN, **row)

    def _record(self, live: LiveSession, expect: Status | Collection[Status], **ending: Any) -> bool:
        """Write the new answers and their session's row; return whether the session was as expected."""
        with live.saving:
            new = list(live.unsaved)
            progress = session_results.session_progress([*(e for e in live.experiences if e.id is not None), *new])
            ids, was_expected = self.store.record_answers(live.session.id, new, progress, expect, **ending)
            for e, id in zip(new, ids, strict=True):
                e.id = id
            live.unsaved = [e for e in live.unsaved if e.id is None]
            return was_expected

    def write_pending(self) -> None:
        """Write the ended sessions whose rows could not be written before."""
        with self._pending_turn:
            for live in list(self._pending):
                try:
                    self.write_once(partial(self._close, live))
                except StoreDown as error:
                    log.warning("sessions wait for the database", sessions=len(self._pending), reason=str(error))
                    return
                except Exception as error:  # another attempt would fail too
                    log.error("a session could not be written", session_id=live.session.id, exc_info=error)
                self._pending.remove(live)

    async def run_heartbeat(self) -> None:
        """Until cancelled: send heartbeats, write what is pending, and find sessions of dead instances."""
        number = 0
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            number += 1
            with contextlib.suppress(StoreDown):
                await asyncio.to_thread(self._beat, number % int(SILENT_S / HEARTBEAT_S / 2) == 0)

    def _beat(self, looks_for_lost: bool) -> None:
        self.store.heartbeat(self.instance)
        self.write_pending()
        if looks_for_lost:
            self.interrupt_lost()

    def interrupt_lost(self) -> None:
        lost = self.store.interrupt_lost(self.instance, SILENT_S)
        if lost:
            log.warning("sessions whose process is gone were marked interrupted", sessions=lost)
