"""`Sandbox`: runs code that a model wrote against tests, several at a time, in processes that it cannot escape.

    with Sandbox() as sandbox:
        verdict = sandbox.verify("def add(a, b): return a + b", ["assert add(1, 2) == 3"])

The process that runs the answer never holds an expected value or a verdict: it returns data, which another sandboxed
process, the checker, compares (`rlvr.sandbox.solver`, `rlvr.sandbox.checker`). This module chooses the tier, assigns
workers to threads, and combines the reports of the two processes into a `Verdict`. Whatever goes wrong while an answer
runs is the answer's failure, unless it also goes wrong without the answer: a test that hangs or breaks the checker is
tried once more with no answer at all, and only if that goes the same way is the test to blame (`invalid`). The time of
an answer's calls and that of the tests' own code are limited apart, by `timeout_s` each.

Left out on purpose: other languages, third-party packages inside, Windows and macOS.
"""

from __future__ import annotations

import asyncio
import marshal
import os
import platform
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from typing import Any

from rlvr.core.cancellation import poll_interval, raise_if_cancelled
from rlvr.core.cpu_budget import default_workers
from rlvr.sandbox.processes import Pair, ZygoteLost, ZygoteStartError
from rlvr.sandbox.protocol import NO_PROGRAM, OUT_OF_MEMORY
from rlvr.sandbox.verdict import Limits, TestResult, Verdict
from rlvr.sandbox.verification_job import Judgement, TestFault, VerificationJob
from rlvr.sandbox.worker_pool import VerificationPool, WorkerPool

TIERS = ("namespaces", "landlock")
UNSAFE = "unsafe"  # the tier of answers that run without any protection, where that is allowed
SIGXCPU, SIGKILL = 24, 9
SLOW_TESTS = 1_000  # of which a worker remembers whether they are
LOST_IN_A_ROW = 3  # tests that, run alone, ended the answer's process: the rest is not tried


class NoTier(RuntimeError):
    """None of the requested tiers works here; the message gives the reason of each."""


class Sandbox:
    """Verifies answers on `workers` workers at once (None: one for each free core), by the first of `tiers` that works.

    `allow_unsafe=True` runs answers unprotected if no tier works; every verdict then says so.
    """

    def __init__(
        self,
        tiers: Sequence[str] = TIERS,
        workers: int | None = None,
        limits: Limits | None = None,
        *,
        allow_unsafe: bool = False,
    ) -> None:
        self.limits = limits if limits is not None else Limits()
        check_sandbox(tiers, workers, self.limits, allow_unsafe)
        self.workers = workers or default_workers()
        self.tier, first = _choose_tier(tiers, self.limits, allow_unsafe)
        self._pairs = [first, *(Pair(self.tier, self.limits) for _ in range(self.workers - 1))]
        self._pool: VerificationPool = WorkerPool(self._pairs, self._judge)
        weakref.finalize(self, _stop, self._pairs)  # also when this process ends
        live_sandboxes.add(self)

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
        answer_names: Sequence[str] = (),
        self_reports: bool = False,
    ) -> Verdict:
        """Judge one answer. Any thread may call it; it waits for a worker in turn, and the clock starts then.

        `tests` are assert statements, a text that defines `check(candidate)` (with `entry_point`), or dicts with
        `input` and `output` for a program (`output` None compares with nothing). `imports` run before the answer,
        `setup` after it. `answer_names` are the names that answers define, if that is known: a test that uses another
        one is invalid. `self_reports` accepts tests that only ask the answer about itself (`callable`, `isinstance`,
        `is`, its own `==`), which it can answer as it likes; the verdict's detail says so. `path="weak"` runs the tests
        in the answer's own process: an answer can then fake its verdict.

        The same answer sees the same order of sets each time (a fixed hash seed), but new random numbers. `timeout_s`
        is wall time of the answer's calls, and as much again is the tests' own: on a busy machine an answer that
        computes for seconds needs more of it.
        """
        given = (solution, tests, timeout_s, setup, imports, entry_point, path, answer_names, self_reports)
        job = VerificationJob(self.limits, *given)
        return self._verify_all([job])[0]

    def verify_many(self, jobs: Sequence[dict[str, Any]]) -> list[Verdict]:
        """Judge many answers on all workers; returns a verdict per job (a dict of `verify`'s arguments), in order."""
        return self._verify_all([VerificationJob(self.limits, **job) for job in jobs])

    def _verify_all(self, jobs: Sequence[VerificationJob]) -> list[Verdict]:
        queued = self._pool.submit(jobs)
        unfinished = {one.future for one in queued}
        try:
            while unfinished:
                done, unfinished = wait(unfinished, poll_interval(), FIRST_EXCEPTION)
                for future in done:
                    future.result()
                raise_if_cancelled()
        except BaseException:
            self._pool.cancel(queued)
            wait(one.future for one in queued)
            raise
        return [one.future.result() for one in queued]

    async def averify(self, *args: Any, **keywords: Any) -> Verdict:
        """`verify` for an event loop, without blocking it. A cancelled call kills its program."""
        queued = self._pool.submit([VerificationJob(self.limits, *args, **keywords)])
        try:
            return await asyncio.wrap_future(queued[0].future)
        except asyncio.CancelledError:
            self._pool.cancel(queued)
            raise

    def close(self) -> None:
        """End all processes; verifications that wait or run end with outcome `error`."""
        if not self._pool.closed:
            self._pool.close()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The current child processes; each is the keeper of one sandbox."""
        return [pid for pair in self._pairs for pid in pair.pids]

    @property
    def running(self) -> int:
        """How many programs run now."""
        return self._pool.running

    def _forget(self) -> None:
        """In a forked copy of this process: let go of the processes, which belong to the original."""
        for pair in self._pairs:
            pair.forget()
        self._pool.renew()

    def _judge(self, pair: Pair, job: VerificationJob) -> Verdict:
        start = time.perf_counter()
        if (refusal := job.refusal()) is not None:
            return job.verdict(Judgement(job.all_failed(*refusal)), self.tier, start)
        try:
            pair.start()
            judgement = self._run_tests(pair, job, pair.clock() + job.seconds)
        except ZygoteStartError as error:
            return job.error("no_tier", str(error), self.tier, start)
        except ZygoteLost as lost:
            why = "the sandbox was closed" if self._pool.closed else f"the {lost.role} process was lost ({lost.cause})"
            return job.error("sandbox", why, self.tier, start)
        return job.verdict(judgement, self.tier, start)

    def _run_tests(self, pair: Pair, job: VerificationJob, deadline: float) -> Judgement:
        results: list[TestResult] = []
        if job.stdio:
            for index in range(len(job.tests)):
                alone = self._run_answer(pair, job, [index], deadline)
                if alone.fault is not None:
                    return Judgement([], "stdio", alone.fault)
                results += alone.results
            return Judgement(results, "stdio")
        judgement = self._run_answer(pair, job, list(range(len(job.tests))), deadline)
        results = judgement.results
        if judgement.fault or len(results) == 1 or judgement.path != "split":  # others may need earlier tests
            return judgement
        in_a_row = 0
        for index, result in enumerate(results):  # an answer that crashed in one test may pass the others
            may_pass = result.reason in ("crashed", "exited", "memory") and result.detail == _LOST
            if may_pass and in_a_row < LOST_IN_A_ROW:
                if pair.clock() >= deadline:
                    break
                alone = self._run_answer(pair, job, [index], deadline)
                if alone.fault is None:
                    results[index] = alone.results[0]
                in_a_row = in_a_row + 1 if results[index].detail == _LOST else 0
        return judgement

    def _run_answer(
        self, pair: Pair, job: VerificationJob, indices: list[int], deadline: float, objects: bool = False
    ) -> Judgement:
        """Run these tests in one fork of the answer; once more if the checker fails through no fault of the tests."""
        answer, tests = job.frames(indices, objects)
        late = Judgement([TestResult(False, "timeout") for _ in indices])
        for attempt in range(2):
            seconds = deadline - pair.clock()
            if seconds <= 0:
                return late
            try:
                report, ending = pair.run(answer, tests, seconds, must_end=job.stdio)
            except ZygoteLost as lost:
                if self._pool.closed or pair.interrupted:
                    raise
                report, ending = {"failed": "timeout" if lost.cause == "late" else "died"}, {}
            if report.get("needs_objects") and not objects:
                return self._run_answer(pair, job, indices, deadline, objects=True)
            if "failed" not in report:
                if report.get("invalid"):
                    return Judgement([], report["path"], TestFault(report["invalid"], report.get("detail", "")))
                results = [_explain(TestResult(bool(row[0]), row[1], row[2]), ending) for row in report["tests"]]
                if job.stdio:
                    results = _require_clean_exit(results, ending)
                if report.get("own_part") and (fault := self._find_slow_test(pair, job, indices)):
                    return Judgement([], report["path"], fault)
                return Judgement(results, report["path"], self_report=report.get("self_report", ""))
            failed = report["failed"]
            fault = self._find_fault(pair, tests, job.seconds, failed)
            if pair.interrupted:
                raise ZygoteLost("solver", "interrupted")
            if fault is None and failed == "timeout" and not job.stdio:
                fault = self._find_slow_test(pair, job, indices)
            if fault is not None:
                return Judgement([], "", fault)
            if failed == "timeout":
                return late
            if attempt:
                break
        return Judgement([TestResult(False, "crashed", report.get("detail", "")) for _ in indices])

    def _find_fault(self, pair: Pair, tests: bytes, seconds: float, failed: str) -> TestFault | None:
        """The tests' fault, if they fail the checker in the same way with no answer at all; else None.

        This takes a new checker: what answers may have left in the old one is not the tests' fault.
        """
        pair.stop()
        try:
            report = pair.run(None, tests, seconds).checker
        except ZygoteLost as lost:
            report = {"failed": "timeout" if lost.cause == "late" else "died"}
        if report.get("invalid"):
            return TestFault(report["invalid"], report.get("detail", ""))
        if report.get("failed") != failed:
            return None
        if failed == "timeout":
            return SLOW_TEST
        return TestFault(
            "bad_test", f"the test's own code ends its process ({report.get('detail', failed)}), even without an answer"
        )

    def _find_slow_test(self, pair: Pair, job: VerificationJob, indices: list[int]) -> TestFault | None:
        """The tests' fault, if what of them does not depend on any answer takes more than their time; else None.

        It is asked for every answer that fails and tried once, so that it does not depend on the answer.
        """
        key = marshal.dumps((job.frames(indices, own_part=True)[1], job.seconds))
        if key not in pair.slow_tests:
            try:
                report = pair.run(None, job.frames(indices, own_part=True)[1], job.seconds).checker
            except ZygoteLost as lost:
                if self._pool.closed or pair.interrupted:
                    raise
                report = {"failed": "timeout" if lost.cause == "late" else "died"}
            if len(pair.slow_tests) >= SLOW_TESTS:
                pair.slow_tests.clear()
            pair.slow_tests[key] = report.get("failed") == "timeout"
        return SLOW_TEST if pair.slow_tests[key] else None


SLOW_TEST = TestFault(
    "test_timeout",
    "the test's own code does not end in time, even without an answer; shorten it or raise timeout_s",
)
_LOST = "the answer's process ended"


def _explain(result: TestResult, ending: dict[str, Any]) -> TestResult:
    """Replace the reason `lost` of a test without a value by how the answer's process ended."""
    if result.reason != "lost":
        return result
    status, code = ending.get("status"), ending.get("code", 0)
    if status == "timeout" or (status == "signal" and code in (SIGXCPU, SIGKILL)):
        return TestResult(False, "timeout")
    if status == "exited":
        return TestResult(False, "memory" if code == OUT_OF_MEMORY else "exited", _LOST)
    return TestResult(False, "crashed", _LOST)


def _require_clean_exit(results: list[TestResult], ending: dict[str, Any]) -> list[TestResult]:
    """Fail a program that printed the right output but did not end, or not with exit status 0."""
    if (ending.get("status"), ending.get("code")) == ("exited", 0):
        return results
    failure = _explain(TestResult(False, "lost"), ending)
    if failure.reason == "exited" and ending.get("code") == NO_PROGRAM:  # a program that fakes it only fails, too
        failure = TestResult(False, "syntax_error", "the program does not compile")
    elif failure.reason == "exited":
        failure = TestResult(False, "exception", f"the program ended with exit status {ending.get('code')}")
    return [failure if result.passed or result.reason == "wrong_output" else result for result in results]


def check_sandbox(tiers: Sequence[str], workers: int | None, limits: Limits, allow_unsafe: bool) -> None:
    """Raise ValueError for arguments with which no sandbox can be made."""
    unknown = [tier for tier in tiers if tier not in TIERS]
    if isinstance(tiers, str) or unknown or not (tiers or allow_unsafe):
        raise ValueError(f"tiers={tiers!r}: give some of {TIERS}, in the order in which to try them")
    if workers is not None and workers < 1:
        raise ValueError(f"workers={workers}: at least 1 is needed; None starts one for each free core")
    for name, least in (("memory", 64 << 20), ("source", 1), ("output", 1), ("scratch", 4096), ("files", 1)):
        if getattr(limits, name) < least:
            raise ValueError(f"limits.{name}={getattr(limits, name)}: at least {least} is needed")
    if not 0 < limits.timeout_s < float("inf") or limits.threads < 0:
        raise ValueError(
            f"timeout_s={limits.timeout_s}, threads={limits.threads}: both must be finite and not negative"
        )


def _choose_tier(tiers: Sequence[str], limits: Limits, allow_unsafe: bool) -> tuple[str, Pair]:
    """The first tier that works, with a started worker."""
    if sys.platform != "linux":
        raise NoTier(
            f"no sandbox works on {platform.system()}: namespaces and Landlock, which isolate code of a model, are "
            "parts of Linux. Use Linux, in a container or a virtual machine for example (allow_unsafe needs it too)"
        )
    refusals: list[str] = []
    for tier in tiers:
        pair = Pair(tier, limits)
        try:
            pair.start()
            return tier, pair
        except ZygoteStartError as error:
            pair.stop()
            refusals.append(f"{tier}: {error}")
    if not allow_unsafe:
        raise NoTier(
            f"no sandbox works here ({'; '.join(refusals)}). Allow unprivileged user namespaces or use a kernel with "
            "Landlock (5.13 or newer); allow_unsafe=True runs answers without any protection"
        )
    warnings.warn(f"answers run WITHOUT a sandbox ({'; '.join(refusals)})", RuntimeWarning, stacklevel=3)
    pair = Pair(UNSAFE, limits)
    pair.start()
    return UNSAFE, pair


def shared_sandbox() -> Sandbox:
    """This process's one Sandbox with defaults, made by the first call and closed at exit."""
    global _shared
    with _lock:
        if _shared is None or _shared._pool.closed:
            _shared = Sandbox()
        return _shared


_shared: Sandbox | None = None
_lock = threading.Lock()
live_sandboxes: weakref.WeakSet[Sandbox] = weakref.WeakSet()


def _stop(pairs: list[Pair]) -> None:
    for pair in pairs:
        pair.interrupt()
    for pair in pairs:
        pair.stop()


def _forget_all() -> None:
    global _lock
    _lock = threading.Lock()
    for sandbox in list(live_sandboxes):
        sandbox._forget()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_all)
