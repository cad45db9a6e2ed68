"""Reads what the runs of a study left into its `summary.json`: runs, statistics over seeds, comparisons, machine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlvr.config import difference, read
from rlvr.config.build_config import add_defaults
from rlvr.core.machine import describe_machine
from rlvr.core.types import mean
from rlvr.core.weights_place import SETTINGS
from rlvr.runs.run_folder import CONNECTION_KEYS
from rlvr.studies.run_log import read_failure
from rlvr.studies.seed_statistics import compare_pairs, spread
from rlvr.studies.study_folder import log_file
from rlvr.studies.study_plan import StudyPlan, StudyRun
from rlvr.tracking import MetricsLog
from rlvr.tracking.run_report import stored_summary
from rlvr.training.metric_values import get_values, select_rl_rows
from rlvr.training.monitor import StallWatch
from rlvr.training.run_diagnosis import diagnose_run, read_form, stored_groups

PACKAGES = ("rlvr", "torch", "transformers", "numpy")
LAST_STEPS = 5  # of which the entropy at the end is the mean
SHARES = (0.0, 1.0)  # the bounds of a pass rate
RUN_KEYS = ("tasks", "samples", "control", "steps", "stopped", "seconds", "weights_sha256", "machine")


def is_finished(plan: StudyPlan, run: StudyRun) -> bool:
    """Whether a run has a whole summary."""
    folder = plan.folder / run.name
    try:
        return (folder / "summary.json").exists() and bool(stored_summary(folder))
    except ValueError:
        return False  # `rlvr train` says what is wrong


def summarize(plan: StudyPlan) -> dict[str, Any]:
    """The content of `summary.json`."""
    runs = [read_run(plan, run) for run in plan.runs]
    variants = [_describe_variant(v.name, [run for run in runs if run["variant"] == v.name]) for v in plan.variants]
    return {
        "study": plan.folder.name,
        "seeds": list(plan.seeds),
        "machine": describe_machine(PACKAGES),
        "variants": [
            {**result, "overrides": list(variant.overrides), "environment": variant.environment}
            for variant, result in zip(plan.variants, variants, strict=True)
        ],
        "comparisons": [_compare_variants(runs, plan.variants[0].name, other.name) for other in plan.variants[1:]],
        "runs": runs,
    }


def read_run(plan: StudyPlan, run: StudyRun) -> dict[str, Any]:
    """One run: seed, variant and state, and of a finished one what its summary and its metrics say.

    `machine` is what the run computed with (processor, instructions, versions), None for a run of an older version.
    """
    record: dict[str, Any] = {"run": run.name, "seed": run.seed, "variant": run.variant.name}
    folder = plan.folder / run.name
    if not is_finished(plan, run):
        failure = read_failure(log_file(plan.folder, run.name))
        return {**record, "state": "failed", "reason": failure} if failure else {**record, "state": "not finished"}
    if changed := find_changes(plan, run):
        reason = f"it was made with another config than the study's ({', '.join(changed[:6])}); delete {folder}"
        return {**record, "state": "failed", "reason": reason}
    summary = stored_summary(folder)
    try:
        rows = MetricsLog(folder / "metrics.jsonl").rows()
    except ValueError as error:
        return {**record, "state": "failed", "reason": str(error)}
    return {
        **record,
        "state": "finished",
        "before": summary["baseline"]["pass@1"],
        "after": summary["final"]["pass@1"],
        "pass@k": _read_pass_at_k(summary),
        "change": summary.get("change"),
        "entropy": _read_entropy(rows),
        "by_level": {
            level: {"before": both["baseline"]["pass@1"]["value"], "after": both["final"]["pass@1"]["value"]}
            for level, both in (summary.get("by_level") or {}).items()
        },
        "watched": {
            name.removeprefix("watched/"): {"before": estimate["value"], "after": summary["final"][name]["value"]}
            for name, estimate in summary["baseline"].items()
            if name.startswith("watched/") and name in summary["final"]
        },
        **{key: summary.get(key) for key in RUN_KEYS},
        "alarms": find_alarms(folder, rows),
    }


def describe_versions(runs: Iterable[str | None]) -> str:
    """A sentence if runs were made by several versions of the code (None: an older one, unknown); '' if by one."""
    versions = sorted({version or "unknown" for version in runs})
    if len(versions) < 2:
        return ""
    return f"The runs are of several versions of rlvr ({', '.join(versions)}), so a difference may be the code's."


def _read_pass_at_k(summary: Mapping[str, Any]) -> dict[str, float]:
    """Before and after, of the largest k that the run reports."""
    name = max((n for n in summary["final"] if n.startswith("pass@")), key=lambda n: int(n.removeprefix("pass@")))
    found = {side: summary[stored][name]["value"] for side, stored in (("before", "baseline"), ("after", "final"))}
    return {side: math.nan if value is None else value for side, value in found.items()}


def _read_entropy(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The mean entropy of the last steps of reinforcement learning; None without any."""
    values = get_values(select_rl_rows(rows)[-LAST_STEPS:], "entropy")
    return mean(values) if values else None


def find_changes(plan: StudyPlan, run: StudyRun) -> list[str]:
    """The keys in which a run's own config differs from its variant's: a config file may change while a study runs."""
    stored = add_defaults(read(plan.folder / run.name / SETTINGS))
    expected = run.variant.config
    if start := plan.find_start(run.seed):
        expected = {**expected, "model": {**expected["model"], "start_from": start}}
    return difference(expected, stored, ignore=["seed", "run", "tracking", "callbacks", *CONNECTION_KEYS])


def find_alarms(folder: Path, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The warning that learning levels off, with its step, and the problems that `rlvr doctor` finds in the run.

    The warning is printed and not stored, so the rows are watched again.
    """
    watch = StallWatch((), lambda step: stored_groups(folder, step), lambda: read_form(folder))
    alarms = [
        {"code": "stall", "step": row["step"], "fact": f"learning levelled off at step {row['step']}"}
        for row in rows
        if watch.add(row)
    ]
    problems = [finding for finding in diagnose_run(folder, rows).findings if finding.severity == "problem"]
    return alarms + [{"code": finding.code, "fact": finding.fact} for finding in problems]


def _describe_variant(name: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    finished = [run for run in runs if run["state"] == "finished"]

    def spread_each(group: str) -> dict[str, Any]:
        """`spread` of each name in `run[group]`, before and after, over the runs that have it."""
        names = list(dict.fromkeys(name for run in finished for name in run[group]))
        return {
            name: {
                side: spread([run[group][name][side] for run in finished if name in run[group]], SHARES)
                for side in ("before", "after")
            }
            for name in names
        }

    return {
        "variant": name,
        "runs": len(runs),
        "finished": len(finished),
        **{side: spread([run[side]["value"] for run in finished], SHARES) for side in ("before", "after")},
        "gain": compare_pairs(*({run["seed"]: run[side]["value"] for run in finished} for side in ("before", "after"))),
        "by_level": spread_each("by_level"),
        "watched": spread_each("watched"),
        "seconds": spread([run["seconds"] for run in finished]),
        "runs_with_alarms": sum(bool(run["alarms"]) for run in finished),
    }


def _compare_variants(runs: Sequence[Mapping[str, Any]], reference: str, other: str) -> dict[str, Any]:
    """`compare_pairs` of pass@1 before and after, seed by seed."""

    def by_seed(variant: str, side: str) -> dict[int, float]:
        return {r["seed"]: r[side]["value"] for r in runs if r["variant"] == variant and r["state"] == "finished"}

    sides = {side: compare_pairs(by_seed(reference, side), by_seed(other, side)) for side in ("before", "after")}
    return {"variant": other, "reference": reference, **sides}
