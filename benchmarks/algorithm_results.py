"""The results of `benchmarks.algorithm_study` as one small file: `results.json`, with a line for each run.

    {"study": ..., "seeds": [1, 2], "machine": ..., "tasks": {"arithmetic": {"overrides": {"grpo": [...], ...},
     "k": 8, "completions": 7680, "tasks": 200, "samples": 8, "start_seconds": [41.2], "runs": [
    {"variant": "grpo", "seed": 1, "state": "finished", "pass@1": [0.31, 0.72], "pass@k": [0.8, 0.97], ...}, ...]}}}

Lists of two are before and after training; runs that have not ended are left out. The tables are computed from this
file alone. `weights_sha256` names the weights that a run ended with; runs of older versions lack it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlvr.core.files import read_json
from rlvr.core.machine import describe_machine
from rlvr.studies.study_plan import StudyPlan, StudyRun
from rlvr.studies.study_summary import PACKAGES, is_finished, read_run

FORMAT = 1
# Alarms of a policy that diverges. The other alarms mean that a run has little signal, or has converged.
BROKEN = ("entropy_up", "entropy_gone", "gap", "large_update")


def describe_task(start: StudyPlan, variants: StudyPlan) -> dict[str, Any]:
    """The entry of one task in `results.json`."""
    training, evaluation = (variants.variants[0].config[section] for section in ("training", "evaluation"))
    begun = {run.seed: read_run(start, run) for run in start.runs if is_finished(start, run)}
    weights = {seed: run.get("weights_sha256") for seed, run in begun.items()}
    return {
        "overrides": {variant.name: list(variant.overrides) for variant in variants.variants},
        "completions": training["steps"] * training["prompts_per_step"] * training["group_size"],
        "tasks": evaluation["tasks"],
        "samples": evaluation["samples"],
        "k": evaluation["k"] or evaluation["samples"],
        "start_seconds": [_round(run["seconds"]) for run in begun.values() if run["state"] == "finished"],
        "runs": [
            run for run in (_describe_run(variants, r, weights.get(r.seed)) for r in variants.runs) if run is not None
        ],
    }


def _describe_run(plan: StudyPlan, run: StudyRun, start: str | None) -> dict[str, Any] | None:
    """One run that ended, None for others.

    `has_moved`: its weights are no longer those it started from. `is_diverged`: it ended in numbers that are not
    finite, with an alarm of `BROKEN`, or with a pass rate below the start, beyond the interval over tasks.
    """
    found = read_run(plan, run)
    named = {"variant": run.variant.name, "seed": run.seed, "state": found["state"]}
    if found["state"] == "not finished":
        return None
    if found["state"] == "failed":
        is_infinite = any((plan.folder / run.name).glob("failed-batch-*"))
        return {**named, "reason": found["reason"], "is_diverged": is_infinite}
    alarms = list(dict.fromkeys(alarm["code"] for alarm in found["alarms"]))
    return {
        **named,
        "pass@1": [_round(found[side]["value"]) for side in ("before", "after")],
        "pass@k": [_round(found["pass@k"][side]) for side in ("before", "after")],
        "entropy": _round(found["entropy"]),
        "seconds": _round(found["seconds"]),
        "weights_sha256": found["weights_sha256"],
        "has_moved": found["weights_sha256"] != start,
        "is_diverged": (found["change"]["high"] or 0.0) < 0 or any(code in BROKEN for code in alarms),
        "alarms": alarms,
        "code": (found["machine"] or {}).get("rlvr"),
    }


def make_results(study: str, seeds: tuple[int, ...], tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The content of `results.json`; `tasks` are entries by `describe_task`."""
    return {
        "format": FORMAT,
        "study": study,
        "seeds": list(seeds),
        "machine": describe_machine(PACKAGES),
        "tasks": dict(tasks),
    }


def dump_results(results: Mapping[str, Any]) -> str:
    """The results as JSON with a line for each run."""
    return json.dumps(results).replace('{"variant"', '\n{"variant"') + "\n"


def load_results(path: Path) -> dict[str, Any]:
    """Read what `dump_results` wrote; ValueError for a damaged file or one of another version."""
    results = read_json(path, "the results of an algorithm study", "the same command writes it again")
    if results.get("format") != FORMAT:
        raise ValueError(
            f"{path} has the format {results.get('format')}, expected {FORMAT}: another version of rlvr wrote it; the "
            "same command writes it again"
        )
    return results


def _round(value: float) -> float:
    return float(f"{value:.6g}")
