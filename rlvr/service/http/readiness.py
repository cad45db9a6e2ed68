"""Whether a session could run now: each thing that it needs is tried, not asked about.

- database: a session's row is written and deleted, and there is room for more (`check_writable` of the store)
- generator: an endpoint answers; a model in this process is loaded
- verifiers: the sandbox judges a program

A result is shared by all requests and is at most a few seconds old. A check that takes long is not waited for: its last
result counts, until it is late.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

from rlvr.core.fair_queue import become_owner
from rlvr.sandbox import NoTier, shared_sandbox
from rlvr.store import ExperienceStore, StoreDown
from rlvr.web.logs import get_logger

FRESH_S, FAILED_FRESH_S = 5.0, 1.0  # how old a result may be: a good one, and one of a failure
WAIT_S = 1.5  # how long a request waits for a check
DATABASE_LATE_S, GENERATOR_LATE_S = 3.0, 12.0
SANDBOX_LATE_S = 60.0  # a busy pool lets the check wait for a program of each worker, as it does a session
PROGRAM = {"solution": "def f(): return 1", "tests": ["assert f() == 1"]}

log = get_logger("rlvr.service.readiness")


class PartCheck:
    """Runs `check`, which returns why a part cannot be used or '', once for any number of callers. `result` is the
    result until there is one."""

    def __init__(self, check: Callable[[], Awaitable[str]], late_s: float, result: str) -> None:
        self._check, self._late_s, self.result = check, late_s, result
        self._task: asyncio.Task[None] | None = None
        self._began = self._ended = -math.inf

    async def __call__(self) -> str:
        fresh_s = FAILED_FRESH_S if self.result else FRESH_S
        if self._task is None or (self._task.done() and time.monotonic() - self._ended > fresh_s):
            self._began = time.monotonic()
            self._task = asyncio.create_task(self._run())
        await asyncio.wait((self._task,), timeout=WAIT_S)
        took = time.monotonic() - self._began
        return f"no answer for {took:.0f} s" if not self._task.done() and took > self._late_s else self.result

    async def _run(self) -> None:
        become_owner("")  # of all its callers: none of their turns
        try:
            self.result = await self._check()
        except Exception as error:  # a health check must not fail
            log.error("a health check failed", exc_info=error)
            self.result = f"the check failed ({type(error).__name__})"
        self._ended = time.monotonic()


class Readiness:
    def __init__(self, store: ExperienceStore, generator: Any, run_blocking: Callable[..., Awaitable[Any]]) -> None:
        self._store, self._generator, self._run_blocking = store, generator, run_blocking
        self.database = PartCheck(self._check_database, DATABASE_LATE_S, "no answer yet")
        self.generator = PartCheck(self._check_generator, GENERATOR_LATE_S, "no answer yet")
        self.verifiers = PartCheck(self._check_verifiers, SANDBOX_LATE_S, "")
        self.has_sandbox = True

    async def __call__(self) -> dict[str, str]:
        """Why each part cannot be used, '' for one that can; without hosts, paths and secrets, which the log has."""
        parts = {"database": self.database, "generator": self.generator, "verifiers": self.verifiers}
        return dict(zip(parts, await asyncio.gather(*(check() for check in parts.values())), strict=True))

    async def _check_database(self) -> str:
        try:
            await self._run_blocking(self._store.check_writable)
        except StoreDown as error:
            if not self.database.result:
                log.warning("the database cannot be written", reason=str(error))
            return error.reason
        return ""

    async def _check_generator(self) -> str:
        await self._generator.check()  # `health` then has the result
        return ""

    async def _check_verifiers(self) -> str:
        """A machine without a sandbox runs no programs, and can still judge by other verifiers."""
        try:
            sandbox = await asyncio.to_thread(shared_sandbox)
        except (NoTier, OSError) as error:
            if self.has_sandbox:
                log.warning("no sandbox works here: programs cannot be judged", reason=str(error))
            self.has_sandbox = False
            return ""
        verdict = await sandbox.averify(**PROGRAM)
        return "" if verdict.passed else f"the sandbox failed ({verdict.reason})"
