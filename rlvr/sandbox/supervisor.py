"""`Sandbox`: run code that a model wrote against tests, several at a time, in processes that it cannot get out of.

    with Sandbox() as sandbox:
        verdict = sandbox.verify("def add(a, b): return a + b", ["assert add(1, 2) == 3"])

The process that runs the answer never holds an expected value or a verdict: it returns data, which another sandboxed
process, the checker, compares (`rlvr.sandbox.solver`, `rlvr.sandbox.checker`). This module chooses the tier, hands out
workers to threads, and combines what the two processes report into a `Verdict`. Whatever goes wrong while an answer
runs is the answer's failure, unless it goes wrong without the answer as well: a test that hangs or breaks the checker
is tried once more with no answer at all, and only if that goes the same way is the test to blame (`invalid`).

Left out on purpose: other languages, third-party packages inside, Windows and macOS.
`python -m pytest tests/test_sandbox_pool.py` exercises it.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
import warnings
import weakref
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

from rlvr.cores import workers as default_workers
from rlvr.halt import look, nap
from rlvr.sandbox.job import Job, Rows
from rlvr.sandbox.pool import Lost, Pair, Refused
from rlvr.sandbox.verdict import Limits, Verdict

TIERS = ("namespaces", "landlock")
SIGXCPU, SIGKILL, OUT_OF_MEMORY, NO_PROGRAM = 24, 9, 77, 78
LOST_IN_A_ROW = 3  # tests run alone that ended the answer's process: the rest will, too


class NoTier(RuntimeError):
    """None of the tiers asked for works here; the message names what each said."""


class Sandbox:
    """`tiers` are tried in this order; `workers` run at the same time (None: the cores that are left for them).

    `allow_unsafe=True` runs answers unprotected where no tier works: every verdict then says so.
    """

    def __init__(
        self,
        tiers: Sequence[str] = TIERS,
        workers: int | None = None,
        limits: Limits | None = None,
        *,
        allow_unsafe: bool = False,
    ) -> None:
        unknown = [tier for tier in tiers if tier not in TIERS]
        if isinstance(tiers, str) or unknown or not (tiers or allow_unsafe):
            raise ValueError(f"tiers={tiers!r}: give some of {TIERS}, in the order in which to try them")
        if workers is not None and workers < 1:
            raise ValueError(f"workers={workers}: at least 1 is needed; None means the cores that are left")
        self.limits = limits if limits is not None else Limits()
        _check_limits(self.limits)
        self.workers = workers or default_workers()
        self._closed = False
        self.tier, first = _choose(tiers, self.limits, allow_unsafe)
        self._pairs = [first, *(Pair(self.tier, self.limits) for _ in range(self.workers - 1))]
        self._make_free()
        weakref.finalize(self, _stop, self._pairs)  # also when this process ends
        _sandboxes.add(self)

    def _make_free(self) -> None:
        self._free: queue.LifoQueue[Pair] = queue.LifoQueue()  # the last used has the warmest caches
        for pair in reversed(self._pairs):
            self._free.put(pair)
        self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="sandbox")
        self._at_work: dict[int, Pair] = {}  # by thread
        self._hand = threading.Lock()  # over who is at work

    def verify(
        self,
        solution: str,
        tests: Any,
        timeout_s: float | None = None,
        setup: str = "",
        imports: Sequence[str] = (),
        *,
        entry_point: str | None = None,
        path: str = "auto",
    ) -> Verdict:
        """Judge one answer. From any thread; it waits for a worker, and `timeout_s` counts from then on.

        `tests` are assert statements, a text that defines `check(candidate)` (with `entry_point`), or dicts with
        `input` and `output` for a program. `imports` run before the answer, `setup` after it. `path="weak"` runs the
        tests in the answer's own process: an answer can then fake its verdict.

        The same answer sees the same order of sets each time (a fixed hash seed), but other random draws.
        `timeout_s` is wall time, of which a busy machine gives an answer less: what computes for seconds needs more.
        """
        job = Job(self.limits, solution, tests, timeout_s, setup, imports, entry_point, path)
        if self._closed:
            raise ValueError("this Sandbox is closed: make another")
        start = time.perf_counter()
        early = job.refusal()
        if early is not None:
            return job.verdict([[False, *early] for _ in job.tests], "", self.tier, start)
        pair, me = self._free.get(), threading.get_ident()
        try:
            with self._hand:
                self._at_work[me], pair.interrupted = pair, self._closed
            return self._judge(pair, job)
        finally:
            with self._hand:
                self._at_work.pop(me, None)
            if self._closed:
                pair.stop()
            self._free.put(pair)

    def verify_many(self, jobs: Sequence[dict[str, Any]]) -> list[Verdict]:
        """One verdict per job (a dict of `verify`'s arguments), in order, all workers at once; Ctrl-C ends all."""
        verdicts: list[Verdict | None] = [None] * len(jobs)
        turn = iter(range(len(jobs)))
        threads: set[int] = set()

        def work() -> None:
            threads.add(threading.get_ident())
            try:
                for index in turn:
                    verdicts[index] = self.verify(**jobs[index])
            finally:
                threads.discard(threading.get_ident())

        shares = [self._threads.submit(work) for _ in range(min(self.workers, len(jobs)))]
        try:
            under_way = set(shares)
            while under_way:
                done, under_way = wait(under_way, nap(), FIRST_COMPLETED)
                for share in done:
                    share.result()
                look()
        except BaseException:
            list(turn)  # nothing is left to begin
            while wait([share for share in shares if not share.cancel()], timeout=0.05).not_done:
                with self._hand:  # each time: one may have been about to begin
                    for thread in threads & self._at_work.keys():
                        self._at_work[thread].interrupt()
            raise
        return [verdict for verdict in verdicts if verdict is not None]

    async def averify(self, *args: Any, **keywords: Any) -> Verdict:
        """`verify` for an event loop, which is not held up."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: self.verify(*args, **keywords))

    def close(self) -> None:
        """End all processes; verifications under way end with outcome `error`."""
        if self._closed:
            return
        self._closed = True
        for pair in self._pairs:
            pair.interrupt()
        for _ in self._pairs:
            self._free.get().stop()
        self._threads.shutdown(wait=False)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Our child processes at this moment; each keeps one sandbox."""
        return [pid for pair in self._pairs for pid in pair.pids]

    def _forget(self) -> None:
        """In a forked copy: the processes belong to the original."""
        for pair in self._pairs:
            pair.forget()
        self._make_free()

    def _judge(self, pair: Pair, job: Job) -> Verdict:
        start = time.perf_counter()
        try:
            pair.start()
            deadline = pair.clock() + job.seconds
            rows, path, blame = self._rows(pair, job, deadline)
        except Refused as refused:
            return job.broken("no_tier", str(refused), self.tier, start)
        except Lost as lost:
            why = "the sandbox was closed" if self._closed else f"the {lost.args[0]} process was lost ({lost.args[1]})"
            return job.broken("sandbox", why, self.tier, start)
        return job.verdict(rows, path, self.tier, start, blame)

    def _rows(self, pair: Pair, job: Job, deadline: float) -> tuple[Rows, str, tuple[str, str]]:
        """(one row per test, the path, (reason, detail) of what is wrong with the tests)."""
        if job.stdio:
            rows: Rows = []
            for index in range(len(job.tests)):
                row, _, blame = self._exchange(pair, job, [index], deadline)
                if blame[0]:
                    return [], "stdio", blame
                rows += row
            return rows, "stdio", ("", "")
        rows, path, blame = self._exchange(pair, job, list(range(len(job.tests))), deadline)
        if blame[0] or len(rows) == 1 or path != "split":  # tests of other paths may build on one another
            return rows, path, blame
        in_a_row = 0
        for index, row in enumerate(rows):  # an answer that crashed in one test may pass the others
            if row[1] in ("crashed", "exited", "memory") and row[-1] == _LOST and in_a_row < LOST_IN_A_ROW:
                if pair.clock() >= deadline:
                    break
                alone, _, blame = self._exchange(pair, job, [index], deadline)
                if not blame[0]:
                    rows[index] = alone[0]
                in_a_row = in_a_row + 1 if rows[index][-1] == _LOST else 0
        return rows, path, ("", "")

    def _exchange(self, pair: Pair, job: Job, indices: list[int], deadline: float) -> tuple[Rows, str, tuple[str, str]]:
        """Run these tests in one fork of the answer."""
        answer, tests = job.frames(indices)
        late = [[False, "timeout", ""] for _ in indices]
        for attempt in range(2):
            seconds = deadline - pair.clock()
            if seconds <= 0:
                return late, "", ("", "")
            try:
                report, ending = pair.run(answer, tests, seconds, ending=job.stdio)
            except Lost as lost:
                if self._closed or pair.interrupted:
                    raise
                report, ending = {"failed": "timeout" if lost.args[1] == "late" else "died", "by": lost.args[0]}, {}
            if "failed" not in report:
                if report.get("invalid"):
                    return [], report["path"], (report["invalid"], report.get("detail", ""))
                rows = _fill(report["tests"], ending)
                return _fail_program(rows, ending) if job.stdio else rows, report["path"], ("", "")
            failed = report["failed"]
            blame = self._without_answer(pair, tests, min(job.seconds, self.limits.timeout_s), failed)
            if pair.interrupted:
                raise Lost("solver", "interrupted")
            if blame[0]:
                return [], "", blame
            if failed == "timeout":
                return late, "", ("", "")
            if attempt:
                break
        return [[False, "crashed", report.get("detail", "")] for _ in indices], "", ("", "")

    def _without_answer(self, pair: Pair, tests: bytes, seconds: float, failed: str) -> tuple[str, str]:
        """What is wrong with the tests if they fail the checker in this way with no answer at all; "" if nothing is.

        A new checker says so: what answers may have left in the old one is not the tests' fault.
        """
        pair.stop()
        try:
            report, _ = pair.run(None, tests, seconds)
        except Lost as lost:
            report = {"failed": "timeout" if lost.args[1] == "late" else "died"}
        if report.get("invalid"):
            return report["invalid"], report.get("detail", "")
        if report.get("failed") != failed:
            return "", ""
        if failed == "timeout":
            return "test_timeout", "the test's own part did not end, with no answer at all"
        return "bad_test", f"the test ends the checker ({report.get('detail', failed)}), with no answer at all"


_LOST = "the answer's process ended"


def _fill(rows: Rows, ending: dict[str, Any]) -> Rows:
    """Give the tests for which no value came the reason why not."""
    status, code = ending.get("status"), ending.get("code", 0)
    if status == "timeout" or (status == "signal" and code in (SIGXCPU, SIGKILL)):
        reason, detail = "timeout", ""
    elif status == "exited":
        reason, detail = "memory" if code == OUT_OF_MEMORY else "exited", _LOST
    else:
        reason, detail = "crashed", _LOST
    return [[False, reason, detail] if row[1] == "lost" else row for row in rows]


def _fail_program(rows: Rows, ending: dict[str, Any]) -> Rows:
    """The right output is not enough: the program also has to end, and well."""
    if (ending.get("status"), ending.get("code")) == ("exited", 0):
        return rows
    lost = _fill([[False, "lost", ""]], ending)[0]
    if lost[1] == "exited" and ending.get("code") == NO_PROGRAM:  # one that says so of itself earns no more by it
        lost = [False, "syntax_error", "the program does not compile"]
    elif lost[1] == "exited":
        lost = [False, "exception", f"the program ended with exit status {ending.get('code')}"]
    return [lost if row[0] or row[1] == "wrong_output" else row for row in rows]


def _check_limits(limits: Limits) -> None:
    for name, least in (("memory", 64 << 20), ("source", 1), ("output", 1), ("scratch", 4096), ("files", 1)):
        if getattr(limits, name) < least:
            raise ValueError(f"limits.{name}={getattr(limits, name)}: at least {least} is needed")
    if not 0 < limits.timeout_s < float("inf") or limits.threads < 0:
        raise ValueError(
            f"timeout_s={limits.timeout_s}, threads={limits.threads}: both must be finite and not negative"
        )


def _choose(tiers: Sequence[str], limits: Limits, allow_unsafe: bool) -> tuple[str, Pair]:
    """The first tier that proves itself, with a worker that runs."""
    said: list[str] = []
    for tier in tiers:
        pair = Pair(tier, limits)
        try:
            pair.start()
            return tier, pair
        except Refused as refused:
            pair.stop()
            said.append(f"{tier}: {refused}")
    if not allow_unsafe:
        raise NoTier(
            f"no sandbox works here ({'; '.join(said)}). Allow unprivileged user namespaces or use a kernel with "
            "Landlock (5.13 or newer); allow_unsafe=True runs answers without any protection"
        )
    warnings.warn(f"answers run WITHOUT a sandbox ({'; '.join(said)})", RuntimeWarning, stacklevel=3)
    pair = Pair("unsafe", limits)
    pair.start()
    return "unsafe", pair


def shared() -> Sandbox:
    """The one Sandbox with defaults of this process, made by the first call and closed at exit."""
    global _shared
    with _lock:
        if _shared is None or _shared._closed:
            _shared = Sandbox()
        return _shared


_shared: Sandbox | None = None
_lock = threading.Lock()
_sandboxes: weakref.WeakSet[Sandbox] = weakref.WeakSet()


def _stop(pairs: list[Pair]) -> None:
    for pair in pairs:
        pair.interrupt()
    for pair in pairs:
        pair.stop()


def _forget_all() -> None:
    global _lock
    _lock = threading.Lock()
    for sandbox in list(_sandboxes):
        sandbox._forget()


os.register_at_fork(after_in_child=_forget_all)
