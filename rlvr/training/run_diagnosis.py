"""Diagnoses a run from its folder: the findings of `diagnosis`, and what its failing tasks have in common.

    diagnosis = diagnose_run(Path("runs/arithmetic"))

`rlvr doctor`, the dashboard and the end of `rlvr train` show the same diagnosis. Tasks are grouped by the final
evaluation, or, while there is none, by the completions that the last steps stored. A folder may be damaged or come from
anywhere: what cannot be read is left out.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlvr.core.files import read_json
from rlvr.core.types import Outcome, mean
from rlvr.training.answer_form import AnswerForm
from rlvr.training.diagnosis import SOLVED, diagnose_steps, name_rates
from rlvr.training.evaluate import Evaluation, stored_evaluation
from rlvr.training.failure_groups import LENGTH, FailureGroup, TaskOutcome, find_failure_groups, split_words
from rlvr.training.finding import Finding, format_percent
from rlvr.training.metric_values import Rows, is_given, select_rl_rows

STORED_STEPS = 40  # newest files of completions that are grouped: one file has few tasks
UNCLEAR = 0.1  # a gain that the interval of a change may still hold: then the tasks were too few
SIGNIFICANT = 0.05  # p-value below which the change of a run is taken for real
STORED_BYTES = 16 << 20  # bytes of such files together; what is larger is left out


@dataclass(frozen=True)
class RunDiagnosis:
    """Findings, groups of failing tasks, and the tasks that were grouped, in words ("" if there are none)."""

    findings: list[Finding]
    groups: list[FailureGroup]
    basis: str


def diagnose_run(folder: Path, rows: Rows | None = None) -> RunDiagnosis:
    """Diagnose a run; `rows` are those of its metrics.jsonl, read from the folder by default."""
    rows = read_rows(folder / "metrics.jsonl")[0] if rows is None else rows
    final = _read_evaluation(folder, "final")
    outcomes, rate = list[TaskOutcome](), 0.0
    if final is not None and final.results:
        outcomes = [
            TaskOutcome({"level": r.level, **r.features} if r.level else r.features, r.passed / r.judged)
            for r in final.results
        ]
        rate = mean([outcome.rate for outcome in outcomes])
        if select_rl_rows(rows[-1:]):  # the last word on the held-out tasks
            rows = [*rows[:-1], {**rows[-1], "test/env/all/correct": rate}]
    groups, basis = find_failure_groups(outcomes), f"the {len(outcomes):,} held-out tasks of the final evaluation"
    if groups and final is not None and (first := _read_evaluation(folder, "baseline")) is not None:
        rates = {r.id: r.passed / r.judged for r in first.results}
        groups = [replace(g, rate_before=_rate_before([final.results[i].id for i in g.members], rates)) for g in groups]
    if (
        not groups and rate < SOLVED and not is_given(select_rl_rows(rows))
    ):  # stored completions also have the words of their prompts
        outcomes = _stored_outcomes(folder)
        groups, basis = find_failure_groups(outcomes), f"{len(outcomes):,} tasks with stored completions"
    results = diagnose_steps(rows, groups, read_form(folder))
    if all(finding.severity == "note" for finding in results):
        results = [*name_rates(list(_outcome_findings(folder)), select_rl_rows(rows)), *results]
    return RunDiagnosis(results, groups, basis if outcomes else "")


def read_form(folder: Path) -> AnswerForm | None:
    """The form of the failed completions before training, None if it was not examined."""
    baseline = _read_evaluation(folder, "baseline")
    return baseline.form if baseline else None


def stored_groups(folder: Path, step: int) -> list[FailureGroup]:
    """The groups of failing tasks in the completions that a run stored up to a step."""
    return find_failure_groups(_stored_outcomes(folder, step))


def format_groups(diagnosis: RunDiagnosis) -> str:
    """The groups as lines of text."""
    return "\n".join(
        f"  {g.name}: {format_percent(g.rate)} of {g.tasks:,} tasks pass, {format_percent(g.rate_of_others)} of the "
        f"others (p {'< 0.0001' if g.p_value < 1e-4 else f'= {g.p_value:.4f}'})"
        for g in diagnosis.groups
    )


def closing_remark(folder: Path, summary: Mapping[str, Any]) -> str:
    """One line for the end of a run that gained nothing or never solves one kind of task, with the next command."""
    if summary.get("steps") == 0:  # nothing was trained
        return ""
    worth = [finding for finding in diagnose_run(folder).findings if finding.severity != "note"]
    main = f"{worth[0].fact}; `rlvr doctor {folder}` says more" if worth else ""
    if has_gained(summary):
        return main if worth and worth[0].code == "unsolved_kind" else ""
    measured = "the pass rate fell" if has_lost(summary) else "no gain was measured"
    if not has_lost(summary) and _has_higher_reward(summary):
        before, after = (summary[side]["mean_reward"]["value"] for side in ("baseline", "final"))
        measured = f"the mean reward rose from {before:.3g} to {after:.3g}, the pass rate did not"
    why = f": {main}" if main else f"; `rlvr doctor {folder}` shows completions that fail"
    return f"{measured} (p = {summary['p_value']:.2g}){why}"


def has_gained(summary: Mapping[str, Any]) -> bool:
    """Whether the paired test and the interval of the change both say that more held-out tasks pass."""
    return summary["p_value"] < SIGNIFICANT and summary["change"]["low"] > 0


def has_lost(summary: Mapping[str, Any]) -> bool:
    """Whether both say that fewer pass."""
    return summary["p_value"] < SIGNIFICANT and summary["change"]["high"] < 0


def _has_higher_reward(summary: Mapping[str, Any]) -> bool:
    """Whether the intervals of the mean reward say that it rose."""
    low, high = summary["final"]["mean_reward"]["low"], summary["baseline"]["mean_reward"]["high"]
    return low is not None and high is not None and low > high  # one task has no interval


def _outcome_findings(folder: Path) -> Iterator[Finding]:
    """A finished run that gained nothing, has tasks left to learn, and shows no other reason."""
    try:
        summary = read_json(folder / "summary.json", "the summary of a finished run")
        if summary.get("steps") == 0:  # nothing was trained
            return
        before, after = (summary[side]["pass@1"]["value"] for side in ("baseline", "final"))
        gained, lost, is_solved = has_gained(summary), has_lost(summary), after >= SOLVED
        low, high = summary["change"]["low"], summary["change"]["high"]
        reward = [summary[side]["mean_reward"] for side in ("baseline", "final")]
        has_higher_reward = _has_higher_reward(summary)
        evaluated = summary.get("tasks", 0) + summary.get("incomplete", 0)
        is_exhausted = evaluated < summary.get("max_tasks", 0)  # older runs have no such number
        rates = f"{format_percent(before)}, then {format_percent(after)}"
        change = f"{rates}; change {100 * low:+.1f} to {100 * high:+.1f} points"
    except (ValueError, KeyError, TypeError):  # not finished, or damaged
        return
    if lost:
        yield Finding(
            "hint",
            "lost",
            f"held-out tasks pass less often ({rates})",
            "a lower training.optimizer.learning_rate, or fewer training.steps",
        )
    elif not gained and not is_solved and has_higher_reward:
        yield Finding(
            "hint",
            "reward_only",
            f"held-out completions earn more ({reward[0]['value']:.3g}, then {reward[1]['value']:.3g}) and do not pass "
            f"more often ({change}): the policy may please the reward without solving tasks",
            "read completions of rollouts/ with a high reward that fail; give correctness more weight (reward.kwargs)",
        )
    elif not gained and not is_solved:
        yield Finding(
            "hint",
            "no_gain",
            f"the held-out pass rate did not clearly change ({change})"
            + (": too few tasks to tell" if high >= UNCLEAR else ": the steps may be too small or too few"),
            _remedy_of_few(evaluated, is_exhausted)
            if high >= UNCLEAR
            else "a higher training.optimizer.learning_rate or more training.steps",
        )


def _remedy_of_few(evaluated: int, is_exhausted: bool) -> str:
    """How to measure a gain that the interval does not exclude; `is_exhausted`: there are no more held-out tasks."""
    if not is_exhausted:
        return "more tasks, to measure such a gain (evaluation.tasks)"
    return (
        f"more held-out tasks, to measure such a gain: all {evaluated:,} there are were evaluated (of rows, hold out "
        "more by env.kwargs.heldout_fraction or heldout_path), or more completions of each (evaluation.samples)"
    )


def read_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The JSON objects of a file that may be damaged, and the number of whole lines without one."""
    try:
        lines = path.read_bytes().split(b"\n") if path.is_file() else []  # a device or a pipe would be read for ever
    except OSError:
        return [], 0
    rows, broken = list[dict[str, Any]](), 0
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif number < len(lines):  # what follows the last newline is being written right now
            broken += 1
    return rows, broken


def _read_evaluation(folder: Path, name: str) -> Evaluation | None:
    try:
        return stored_evaluation(folder / "evaluations" / f"{name}.json")
    except ValueError:
        return None


def _rate_before(tasks: Sequence[str], rates: Mapping[str, float]) -> float | None:
    known = [rates[task] for task in tasks if task in rates]
    return mean(known) if known else None


def _stored_outcomes(folder: Path, step: int | None = None) -> list[TaskOutcome]:
    """The tasks of the completions stored by the last `STORED_STEPS` steps up to `step`, with their pass rates."""
    files = sorted((folder / "rollouts").glob("rl-*.jsonl"))
    chosen = [file for file in files if step is None or file.stem <= f"rl-{step:06d}"][-STORED_STEPS:]
    by_task: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    words, features = dict[str, frozenset[str]](), dict[str, dict[str, str]]()
    for number, row in _read_newest(chosen):
        task = f"{row.get('level')}/{row.get('task_id')}"
        # What a rewritten history adds to a prompt is not the task's: only words of every prompt count.
        seen = split_words(str(row.get("prompt")))
        words[task] = words.get(task, seen) & seen
        features.setdefault(task, _read_features(row))
        by_task[task][f"{number}/{row.get('rollout_id')}"] = row  # the last trajectory of a rollout was judged
    outcomes: list[TaskOutcome] = []
    for task, rollouts in by_task.items():
        passes = [passed for row in rollouts.values() if (passed := _verdict_value(row)) is not None]
        if passes:
            outcomes.append(TaskOutcome(features[task], mean(passes), words[task]))
    return outcomes


def _read_newest(files: Sequence[Path]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of the last files that have `STORED_BYTES` together, the oldest first, each with its file's number."""
    left, chosen = STORED_BYTES, list[Path]()
    for file in reversed(files):
        with suppress(OSError):
            left -= file.stat().st_size
            chosen.append(file)
        if left < 0:
            break
    used = chosen if left >= 0 else chosen[:-1]
    yield from ((number, row) for number, file in enumerate(reversed(used)) for row in read_rows(file)[0])


def _verdict_value(row: Mapping[str, Any]) -> float | None:
    """1.0 or 0.0 by the run's own reward, which stands first; None without a verdict."""
    scores = row.get("scores")
    score = next(iter(scores.values()), None) if isinstance(scores, dict) else None
    if not isinstance(score, dict) or score.get("outcome") in (Outcome.ERROR.value, Outcome.INVALID.value):
        return None
    return float(score.get("outcome") == Outcome.PASSED.value)


def _read_features(row: Mapping[str, Any]) -> dict[str, str]:
    stored = row.get("features")
    features = {str(k): str(v) for k, v in stored.items()} if isinstance(stored, dict) else {}
    level = {"level": str(row["level"])} if row.get("level") else {}
    return {**level, LENGTH: str(len(str(row.get("prompt")).split())), **features}
