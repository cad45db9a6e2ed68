"""Which algorithm gains most for its time on a pretrained model? The report of a study that measured processor time.

    rlvr study --config-name=smollm seeds=1..5 "algorithm={name: grpo},{name: raft}" evaluation.every=5 \\
        evaluation.interim_tasks=null "callbacks=[benchmarks.processor_time:ProcessorTime]" --name smollm-algorithms
    python -m benchmarks.pretrained_algorithms runs/smollm-algorithms

Prints tables and writes `results.json` into the study's folder. The first variant is the reference. A run is measured
before its first step, at its interim evaluations and at its end, on the same held-out tasks; its gain is divided by the
processor minutes of its training steps, without evaluations and loading.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.algorithm_report import (
    SHARES,
    PairedComparison,
    correct_p_values,
    format_p_value,
    format_points,
    format_share,
)
from benchmarks.algorithm_results import dump_results
from rlvr.cli import main as cli
from rlvr.core.files import read_json, write_atomic
from rlvr.core.machine import describe_machine
from rlvr.core.types import mean
from rlvr.studies.seed_statistics import spread
from rlvr.studies.study_summary import PACKAGES, describe_versions
from rlvr.tracking import MetricsLog
from rlvr.tracking.run_report import stored_summary
from rlvr.training.interim import read_interim_results

SECONDS = "processor/training"
SIDES = ("baseline", "final")
Run = Mapping[str, Any]


def collect_results(folder: Path) -> dict[str, Any]:
    """The content of `results.json`: a line for each finished run of the study in `folder`."""
    study = read_json(folder / "study.json", "a study", "give the folder of one")
    runs = [
        _describe_run(run, variant, seed)
        for seed in study["seeds"]
        for variant in study["variants"]
        if (run := folder / f"{variant['folder']}seed-{seed}") and (run / "summary.json").exists()
    ]
    config = study["variants"][0]["config"]
    training, evaluation = config["training"], config["evaluation"]
    return {
        "study": folder.name,
        "machine": describe_machine(PACKAGES),
        "overrides": {_name(variant): variant["overrides"] for variant in study["variants"]},
        "learning_rate": training["optimizer"]["learning_rate"],
        "step": training["prompts_per_step"] * training["group_size"],
        "tasks": evaluation["tasks"],
        "samples": evaluation["samples"],
        "runs": runs,
    }


def _name(variant: Mapping[str, Any]) -> str:
    return variant["config"]["algorithm"]["name"]


def _describe_run(folder: Path, variant: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """`pass@1`, `steps` and `processor_seconds` are lists: at the start, at each interim evaluation, at the end."""
    summary, rows = stored_summary(folder), MetricsLog(folder / "metrics.jsonl").rows()
    seconds = {row["step"] + 1: row[SECONDS] for row in rows if SECONDS in row}
    if not seconds:
        raise ValueError(
            f"{folder}: its metrics have no {SECONDS}; train with callbacks=[benchmarks.processor_time:ProcessorTime]"
        )
    last = max(seconds)
    start, end = (summary[side]["pass@1"]["value"] for side in SIDES)
    interim = {result.step: result.pass_rate.value for result in read_interim_results(rows) if result.step < last}
    rates = {0: start, **interim, last: end}
    families = summary.get("by_family") or {}
    return {
        "variant": _name(variant),
        "seed": seed,
        "steps": list(rates),
        "pass@1": [_round(rate) for rate in rates.values()],
        "processor_seconds": [_round(seconds.get(step, 0.0)) for step in rates],
        "families": {
            name: [_round(both[side]["pass@1"]["value"]) for side in SIDES] for name, both in families.items()
        },
        "tokens_trained": round(sum(row.get("tokens_trained", 0) for row in rows)),
        "rewards": [_round(row["reward"]) for row in rows if "reward" in row],
        "seconds": _round(summary["seconds"]),
        "weights_sha256": summary["weights_sha256"],
        "code": (summary.get("machine") or {}).get("rlvr"),
    }


def _round(value: float) -> float:
    return float(f"{value:.6g}")


def gain(run: Run, place: int = -1) -> float:
    """The share of right completions at `place` of the run's evaluations, less that before the first step."""
    return run["pass@1"][place] - run["pass@1"][0]


def gain_per_minute(run: Run, place: int = -1) -> float:
    """The same for each processor minute of the steps until then."""
    return gain(run, place) / (run["processor_seconds"][place] / 60)


def format_results(results: Mapping[str, Any]) -> str:
    """What was compared, a table for each evaluation after the first, and the rates of each family, as Markdown."""
    runs = results["runs"]
    if not runs:
        return "No run is finished."
    parts = [
        f"{len(runs)} runs of {len({run['seed'] for run in runs})} seeds; a step has {results['step']} completions, "
        f"AdamW at {results['learning_rate']:g}. pass@1 of the same {results['tasks']} held-out tasks x "
        f"{results['samples']}; before the first step it is {format_share(spread(_starts(runs), SHARES))}."
    ]
    parts += [format_comparison(results, place) for place in range(1, min(len(run["steps"]) for run in runs))]
    if any(run["families"] for run in runs):
        parts.append(_format_families(results))
    if versions := describe_versions(run["code"] for run in runs):
        parts.append(versions)
    return "\n\n".join(parts)


def _starts(runs: Sequence[Run]) -> list[float]:
    """One value for each seed: the variants of a seed begin with equal weights and are measured with equal draws."""
    return list({run["seed"]: run["pass@1"][0] for run in runs}.values())


def _by_seed(runs: Sequence[Run], variant: str, measure: Callable[[Run], float]) -> dict[int, float]:
    return {run["seed"]: measure(run) for run in runs if run["variant"] == variant}


def _compare(runs: Sequence[Run], names: Sequence[str], measure: Callable[[Run], float]) -> dict[str, PairedComparison]:
    """Each other variant less the first, over the seeds that both have; p-values are corrected for these pairs."""
    reference = _by_seed(runs, names[0], measure)
    compared: dict[str, PairedComparison] = {}
    for name in names[1:]:
        values = _by_seed(runs, name, measure)
        compared[name] = PairedComparison(
            [values[seed] - reference[seed] for seed in sorted(reference.keys() & values.keys())]
        )
    correct_p_values(compared.values())
    return compared


def format_comparison(results: Mapping[str, Any], place: int) -> str:
    """The variants at one evaluation (0 is that before the first step) and their differences from the first one."""
    runs, names = results["runs"], list(results["overrides"])
    measures: list[Callable[[Run], float]] = [lambda run: gain(run, place), lambda run: gain_per_minute(run, place)]
    compared = [_compare(runs, names, measure) for measure in measures]
    less = f"minus `{names[0]}`"
    lines = [[f"after {runs[0]['steps'][place]} steps", "seeds", "pass@1", "gain", less, "p", "processor minutes"]]
    lines[0] += ["gain a minute", less, "p"]
    lines.append(["---"] + ["--:"] * (len(lines[0]) - 1))
    for name in names:
        rates = list(_by_seed(runs, name, lambda run: run["pass@1"][place]).values())
        if not rates:
            continue
        cells = [str(len(rates)), format_share(spread(rates, SHARES))]
        for measure, comparisons in zip(measures, compared, strict=True):
            if cells[2:]:
                minutes = [run["processor_seconds"][place] / 60 for run in runs if run["variant"] == name]
                cells.append(f"{mean(minutes):.1f}")
            cells.append(format_points(spread(list(_by_seed(runs, name, measure).values()))))
            comparison = comparisons.get(name, PairedComparison())
            cells.append(format_points(spread(comparison.differences)))
            cells.append("" if comparison.p_value is None else format_p_value(comparison.p_value))
        lines.append([f"`{name}`", *cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _format_families(results: Mapping[str, Any]) -> str:
    runs = results["runs"]
    families = list(runs[0]["families"])
    lines = [["at the end", *(f"`{name}`" for name in families), "tokens trained", "seconds"]]
    lines.append(["---"] + ["--:"] * (len(lines[0]) - 1))
    for name in results["overrides"]:
        own = [run for run in runs if run["variant"] == name]
        if not own:
            continue
        rates = [[mean([run["families"][family][k] for run in own]) for k in (0, 1)] for family in families]
        cells = [f"{100 * before:.0f} -> {100 * after:.0f} %" for before, after in rates]
        cells += [f"{mean([run['tokens_trained'] for run in own]):,.0f}", f"{mean([r['seconds'] for r in own]):.0f}"]
        lines.append([f"`{name}`", *cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="The folder of the study, such as runs/smollm-algorithms.")],
) -> None:
    """Compare the variants of a study by what they gain and by what they gain in a processor minute."""
    results = collect_results(folder)
    write_atomic(folder / "results.json", dump_results(results))
    print(format_results(results))


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code; a user's mistake is one message and exit code 2."""
    return cli.run(arguments, app, "python -m benchmarks.pretrained_algorithms")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
