"""Runs `rlvr train` for every run of a study, several at a time, each in a process of its own.

    summary = run_study(plan, plan.jobs, console)

A run's process survives a kill of the study. It locks its run folder, so the same command waits for it instead of
starting the run twice, and begins where it ends. Ctrl-C is passed on once, so that every run saves its state; the
processes are in sessions of their own, or a terminal would send it to them too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rlvr.core.cpu_budget import available_cores
from rlvr.core.files import lock_file
from rlvr.runs.user_messages import mask_secrets
from rlvr.studies.run_log import begin_attempt, describe_error, read_last_lines, record_failure
from rlvr.studies.runs_here import describe_result, make_runs_here
from rlvr.studies.study_folder import log_file, open_study
from rlvr.studies.study_plan import StudyPlan, StudyRun
from rlvr.studies.study_report import study_table, write_report
from rlvr.studies.study_summary import is_finished, summarize
from rlvr.tracking import RunConsole

POLL_SECONDS = 0.2
REFUSED = 2  # the exit code of `rlvr train` for what the user has to change, a locked folder too
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StudyInterruptedError(KeyboardInterrupt):
    """Ctrl-C or SIGTERM ended a study; its runs have saved their last step, and its console has said so."""


def run_study(
    plan: StudyPlan, jobs: int | None, console: RunConsole, own: str = "", again: str = "command"
) -> dict[str, Any]:
    """Make the runs of a plan, or go on with them, `jobs` at a time: the content of `summary.json`.

    `own`: what no other process could import, so that the runs are made in this one. `again`: what the user repeats to
    go on. StudyInterruptedError where the
    study was stopped. Runs that failed raise nothing: the summary has them.
    """
    at_once = 1 if own else jobs or plan.jobs
    with open_study(plan), console:
        how = f"one after another in this process: no other can import {own}" if own else f"{at_once} at a time"
        console.plan(
            {
                "study": str(plan.folder),
                "variants": "; ".join(variant.name for variant in plan.variants),
                "runs": f"{len(plan.seeds)} seeds x {len(plan.variants)} variants, {how}",
            }
        )
        if at_once > 1 and at_once * plan.threads > available_cores():
            console.warn(
                f"jobs: {at_once} runs at a time with {plan.threads} threads each share {available_cores()} cores; "
                "give fewer jobs, or a lower engine.threads"
            )

        def write() -> None:
            write_report(plan.folder, summarize(plan))

        if own:
            is_stopped = make_runs_here(plan, console, write)
        else:
            runner = StudyRunner(plan, at_once, console, write)
            runner.run()
            is_stopped = runner.stop_requests > 0
        summary = summarize(plan)
        write_report(plan.folder, summary)
        console.close()
        console.note(mask_secrets(study_table(summary)))
        console.note(f"table.md, summary.json, study.png, run folders and logs are in {plan.folder}")
        if is_stopped:
            console.note(f"stopped; the same {again} goes on from here")
            raise StudyInterruptedError(f"the study is stopped; the same {again} goes on from here ({plan.folder})")
    return summary


class StudyRunner:
    """Makes the runs of a plan that are not finished, `jobs` at a time, each in a process of its own.

    `on_end` is called when a run has ended. The log of a run that failed has the reason.
    """

    def __init__(self, plan: StudyPlan, jobs: int, console: RunConsole, on_end: Callable[[], None]) -> None:
        self.plan, self.jobs, self.console, self.on_end = plan, jobs, console, on_end
        self.stop_requests = 0
        self._active: list[_RunProcess] = []

    def run(self) -> None:
        """Return when every run has finished or failed, or when the user stopped the study."""
        waiting = [run for run in self.plan.runs if not is_finished(self.plan, run)]
        total = len(self.plan.runs)
        if not waiting:
            return
        self.console.phase("study", total, total - len(waiting), unit="runs")
        shared = _share_import_path()
        with self._handle_signals():
            try:
                while self._active or (waiting and not self.stop_requests):
                    while waiting and len(self._active) < self.jobs and not self.stop_requests:
                        self._active.append(_RunProcess(self.plan, waiting.pop(0), shared))
                    time.sleep(POLL_SECONDS)
                    self._pass_on_stop()
                    for process in [process for process in self._active if process.has_ended()]:
                        self._active.remove(process)
                        self._report_end(process)
                    under_way = {process.run.name: process.last_line() for process in self._active}
                    self.console.show_activity(under_way, total - len(waiting) - len(under_way))
            except BaseException:  # of the study itself, such as a full disk: let the runs save first
                self.stop_requests += 1
                while not all(process.has_ended() for process in self._active):
                    self._pass_on_stop()
                    time.sleep(POLL_SECONDS)
                raise

    def _report_end(self, process: _RunProcess) -> None:
        """Say how a run ended."""
        name = process.run.name
        if is_finished(self.plan, process.run):
            self.console.note(describe_result(self.plan, process.run))
        elif self.stop_requests:
            self.console.note(f"{name}: {'still running in another process' if process.is_foreign else 'stopped'}")
        else:
            reason = process.reason()
            record_failure(process.log, reason)
            self.console.warn(f"{name} failed: {reason} (log: {process.log})")
        self.on_end()

    def _pass_on_stop(self) -> None:
        for process in self._active:
            process.interrupt(self.stop_requests)

    @contextmanager
    def _handle_signals(self) -> Iterator[None]:
        """Stop the runs at the first signal after their step, at the second one at once.

        A SIGINT that was ignored (a background job) stays without effect, and the runs, to which the study sends it,
        heed it.
        """

        def request_stop(number: int, frame: FrameType | None) -> None:
            self.stop_requests += 1
            if self.stop_requests == 1:
                self.console.note("stopping: each run ends after its step (press Ctrl-C again to stop at once)")

        if threading.current_thread() is not threading.main_thread():  # no other may handle signals
            yield
            return
        before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        for number, handler in before.items():
            ignored = handler is signal.SIG_IGN
            signal.signal(number, (lambda number, frame: None) if ignored else request_stop)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _share_import_path() -> dict[str, str]:
    """The variable by which a run finds the modules that this process finds: a script's folder is on its path alone.

    What any process of this Python has is left out: programs of another one that a run starts get the variable too.
    """
    fresh = subprocess.run(
        [sys.executable, "-c", "import sys; print(*sys.path, sep='\\n')"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    own = [place for place in sys.path if place not in fresh and os.path.abspath(place) != os.getcwd()]
    before = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join([*map(os.path.abspath, own), *filter(None, [before])])} if own else {}


class _RunProcess:
    """The process of a run, with the `shared` variables of all.

    `process` is None while the process of a study that was killed works in its folder.
    """

    def __init__(self, plan: StudyPlan, run: StudyRun, shared: Mapping[str, str]) -> None:
        self.plan, self.run, self._shared = plan, run, shared
        self.log = log_file(plan.folder, run.name)
        self._interrupts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._start = 0
        if not self._is_locked():
            self._begin()

    def _begin(self) -> None:
        self._start = begin_attempt(self.log, self.run.name)
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rlvr", *self.plan.command(self.run)],
                env={**os.environ, **self._shared, **self.run.variant.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def has_ended(self) -> bool:
        """Whether no process works at the run any more. Waits for another study's process, then begins the run."""
        if self._process is not None:
            if self._process.poll() is None:
                return False
            if self._process.returncode != REFUSED or not self._is_locked():
                return True
            self._process = None  # another process had locked the folder first
            return False
        if self._interrupts:
            return True
        if self._is_locked():
            return False
        if is_finished(self.plan, self.run):
            return True
        self._begin()
        return False

    @property
    def is_foreign(self) -> bool:
        """Whether a process that this study did not start works at the run."""
        return self._process is None

    def _is_locked(self) -> bool:
        path = self.plan.folder / self.run.name / ".lock"
        if not path.exists():
            return False
        lock = lock_file(path)
        if lock is None:
            return True
        lock.close()
        return False

    def interrupt(self, requests: int) -> None:
        """Send SIGINT until the process got as many as there were requests."""
        while self._interrupts < requests:
            self._interrupts += 1
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(signal.SIGINT)

    def last_line(self) -> str:
        """The newest line of the run's log, which says how far the run is."""
        if self.is_foreign:
            return "running in another process; waiting for it to end"
        lines = reversed(read_last_lines(self.log, self._start))
        return next((line for line in lines if not line.startswith("sampled ")), "starting")

    def reason(self) -> str:
        """Why the run failed: the signal that killed it, or what is at the end of its log."""
        code = self._process.returncode if self._process else 0
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        lines = read_last_lines(self.log, self._start) or [f"exit code {code} without a message"]
        return describe_error(lines) or lines[-1]
