"""Makes the runs of a study in this process, one after another: those of functions that no other process can import.

A run's output goes into its log, as that of a process does. Left out on purpose: several at a time, and variables of
the environment, which are read when a process begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import IO, Any

from rlvr.config.build_config import build_config
from rlvr.core.registry import show_names
from rlvr.runs.train import train_config
from rlvr.studies.run_log import begin_attempt, record_failure
from rlvr.studies.study_folder import log_file
from rlvr.studies.study_plan import StudyPlan, StudyRun
from rlvr.studies.study_summary import is_finished
from rlvr.tracking import RunConsole
from rlvr.tracking.run_report import duration, format_rate, stored_summary


class RunLogConsole(RunConsole):
    """Writes what a run prints into its log, and tells the console of its study how far it is."""

    def __init__(self, log: IO[str], name: str, study: RunConsole, done: int) -> None:
        super().__init__(log, live=False)
        self._name, self._study, self._runs_done = name, study, done

    def step(self, metrics: Mapping[str, Any], done: int) -> None:
        super().step(metrics, done)
        self._study.show_activity({self._name: f"{self._phase} {done}/{self._total}"}, self._runs_done)


def make_runs_here(plan: StudyPlan, console: RunConsole, on_end: Callable[[], None]) -> bool:
    """Make the runs of a plan that are not finished; whether Ctrl-C ended that. `on_end` is called after each."""
    waiting = [run for run in plan.runs if not is_finished(plan, run)]
    total = len(plan.runs)
    if waiting:
        console.phase("study", total, total - len(waiting), unit="runs")
    for number, run in enumerate(waiting, total - len(waiting)):
        log = log_file(plan.folder, run.name)
        begin_attempt(log, run.name)
        try:
            with open(log, "a", encoding="utf-8") as file:
                loaded = plan.load(run)
                train_config(loaded, build_config(loaded), RunLogConsole(file, run.name, console, number))
            console.note(describe_result(plan, run))
        except KeyboardInterrupt:
            console.note(f"{run.name}: stopped")
            return True
        except Exception as error:
            reason = show_names(str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
            record_failure(log, " ... ".join(dict.fromkeys((reason.splitlines()[0], reason.splitlines()[-1]))))
            console.warn(f"{run.name} failed: {reason} (log: {log})")
        console.show_activity({}, number + 1)
        on_end()
    return False


def describe_result(plan: StudyPlan, run: StudyRun) -> str:
    """What a finished run measured, in a line."""
    summary = stored_summary(plan.folder / run.name)
    before, after = (format_rate(summary[side]["pass@1"]) for side in ("baseline", "final"))
    return f"{run.name}: {before}, then {after} in {duration(summary['seconds'])}"
