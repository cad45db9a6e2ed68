"""The tables, conclusions and picture of `benchmarks.algorithm_study`, all computed from its `results.json`.

The unit is a run. Gains and differences from the reference are paired by seed; p-values are of paired t tests,
corrected by Holm for all variants of all tasks.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.algorithm_results import dump_results
from rlvr.core.files import write_atomic
from rlvr.core.types import mean
from rlvr.studies.seed_statistics import sign_flip_p_value, spread
from rlvr.studies.study_report import AFTER, BEFORE
from rlvr.studies.study_summary import describe_versions

SHARES = (0.0, 1.0)
SIGNIFICANT = 0.05
ROW_INCHES = 0.2  # height of a variant in the picture
# Variants that are also compared with another one than the reference.
PAIRS = (("noise_20", "dr_grpo"), ("noise_20_corrected", "noise_20"))
# What variants are compared in, from a run at its end.
MEASURES: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "pass@1": lambda run: run["pass@1"][1],
    "pass@k": lambda run: run["pass@k"][1],
    "entropy": lambda run: run["entropy"],
}
HEAD = ("variant", "seeds", "pass@1", "gain", "minus {reference}", "p", "pass@{k}", "entropy", "seconds", "diverged")


@dataclass
class PairedComparison:
    """A variant compared with the reference: differences by seed; the corrected p-value, None for fewer than two."""

    differences: list[float] = field(default_factory=list[float])
    p_value: float | None = None

    @property
    def is_significant(self) -> bool:
        return self.p_value is not None and self.p_value < SIGNIFICANT


@dataclass
class VariantResult:
    """A variant of a task: its `runs` that ended, those of them that `finished` without a failure, and the comparison
    with the reference by each measure of `MEASURES`. Intervals are by `seed_statistics.spread`, None without runs.
    """

    name: str
    runs: list[Mapping[str, Any]]
    finished: list[Mapping[str, Any]]
    compared: dict[str, PairedComparison] = field(default_factory=dict[str, PairedComparison])

    @property
    def pass_rate(self) -> dict[str, Any] | None:
        return spread(self.values("pass@1"), SHARES)

    @property
    def gain(self) -> dict[str, Any] | None:
        return spread([run["pass@1"][1] - run["pass@1"][0] for run in self.finished])

    @property
    def pass_at_k(self) -> dict[str, Any] | None:
        return spread(self.values("pass@k"), SHARES)

    @property
    def diverged(self) -> int:
        return sum(run["is_diverged"] for run in self.runs)

    def values(self, measure: str) -> list[float]:
        return [MEASURES[measure](run) for run in self.finished]


def compare_variants(tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, list[VariantResult]]:
    """The variants of each task of `results.json`; the first one of a task is its reference.

    p-values of a measure are corrected for the comparisons of all tasks together: a reader looks at all of them.
    """
    results = {name: _sort_runs(task) for name, task in tasks.items()}
    for measure in MEASURES:
        for name, task in tasks.items():
            reference, *others = results[name]
            reference.compared[measure] = PairedComparison()
            for other in others:
                is_comparable = _is_comparable(task, other.name, measure)
                differences = _subtract(other, reference, measure) if is_comparable else []
                other.compared[measure] = PairedComparison(differences)
        correct_p_values(v.compared[measure] for variants in results.values() for v in variants)
    return results


def correct_p_values(comparisons: Iterable[PairedComparison]) -> None:
    """Set the p-value of each comparison of at least two seeds: a paired t test, corrected by Holm for all of them."""
    tested = [comparison for comparison in comparisons if len(comparison.differences) > 1]
    p_values = adjust_holm([t_test_p_value(comparison.differences) for comparison in tested])
    for comparison, p in zip(tested, p_values, strict=True):
        comparison.p_value = p


def _sort_runs(task: Mapping[str, Any]) -> list[VariantResult]:
    results = {name: VariantResult(name, [], []) for name in task["overrides"]}
    for run in task["runs"]:
        results[run["variant"]].runs.append(run)
        if run["state"] == "finished":
            results[run["variant"]].finished.append(run)
    return list(results.values())


def _is_comparable(task: Mapping[str, Any], name: str, measure: str) -> bool:
    """False for the entropy of samples at another temperature, which changes it by itself."""
    return measure != "entropy" or not any("temperature_end=" in override for override in task["overrides"][name])


def _subtract(one: VariantResult, other: VariantResult, measure: str) -> list[float]:
    """`one` minus `other`, over the seeds that both have."""
    values = [{run["seed"]: MEASURES[measure](run) for run in result.finished} for result in (one, other)]
    return [values[0][seed] - values[1][seed] for seed in sorted(values[0].keys() & values[1].keys())]


def write_results(folder: Path, results: Mapping[str, Any]) -> None:
    """Write `results.json`, `table.md` and, once a run is finished, `study.png`."""
    write_atomic(folder / "results.json", dump_results(results))
    picture = ""
    if any(run["state"] == "finished" for task in results["tasks"].values() for run in task["runs"]):
        plot_algorithms(results, folder / "study.png")
        picture = "\n![Pass rates of every variant, task by task](study.png)\n"
    write_atomic(folder / "table.md", f"# {results['study']}\n\n{format_results(results)}\n{picture}")


def format_results(results: Mapping[str, Any]) -> str:
    """What the study took, then a table and the conclusions for each task, as Markdown."""
    tasks = results["tasks"]
    runs = [run for task in tasks.values() for run in task["runs"] if run["state"] == "finished"]
    seconds = sum(run["seconds"] for run in runs) + sum(sum(task["start_seconds"]) for task in tasks.values())
    time = f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.1f} minutes"
    took = f"{len(runs)} runs, which took {time} one after another, their starts included."
    compared = compare_variants(tasks)
    return "\n\n".join(
        [took, *(part for name, task in tasks.items() for part in _format_task(name, task, compared[name]))]
    )


def _format_task(name: str, task: Mapping[str, Any], variants: Sequence[VariantResult]) -> Iterator[str]:
    yield f"### {name}"
    shown = [variant for variant in variants if variant.finished]
    if not shown:
        yield "No run is finished."
        return
    starts = {run["seed"]: run for run in task["runs"] if run["state"] == "finished"}  # all runs of a seed start alike
    before, at_k = (
        format_share(spread([run[key][0] for run in starts.values()], SHARES)) for key in ("pass@1", "pass@k")
    )
    seconds = mean(task["start_seconds"]) if task["start_seconds"] else 0.0
    yield (
        f"{len(starts)} seed{'s' if len(starts) > 1 else ''}; every run learns from {task['completions']:,} "
        f"completions. Start: pass@1 {before}, pass@{task['k']} {at_k}, made in {seconds:.0f} s a seed. Measured on "
        f"{task['tasks']:,} held-out tasks x {task['samples']} samples."
    )
    yield _table(task, variants[0].name, shown)
    yield "\n".join(f"- {sentence}" for sentence in conclude(variants, task["k"]))


def _table(task: Mapping[str, Any], reference: str, variants: Sequence[VariantResult]) -> str:
    head = [cell.format(reference=f"`{reference}`", k=task["k"]) for cell in HEAD]
    lines = [head, ["---"] * 2 + ["--:"] * (len(head) - 2)]
    for variant in variants:
        p = variant.compared["pass@1"].p_value
        lines.append(
            [
                f"`{variant.name}`",
                str(len(variant.finished)),
                format_share(variant.pass_rate),
                format_points(variant.gain),
                format_points(spread(variant.compared["pass@1"].differences)),
                "" if p is None else format_p_value(p),
                format_share(variant.pass_at_k),
                f"{mean(variant.values('entropy')):.3f}",
                f"{median(run['seconds'] for run in variant.finished):.0f}",
                f"{variant.diverged} of {len(variant.runs)}",
            ]
        )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def format_differences(results: Mapping[str, Any], names: Sequence[str], measure: str = "pass@1") -> str:
    """A table of variants and tasks: what each differs from the reference by in a share of `MEASURES`, and its p."""
    compared = [{v.name: v.compared for v in task} for task in compare_variants(results["tasks"]).values()]
    lines = [["variant", *results["tasks"]], ["---"] + ["--:"] * len(compared)]
    for name in names:
        found = [variants[name][measure] if name in variants else PairedComparison() for variants in compared]
        cells = [
            "" if one.p_value is None else f"{format_points(spread(one.differences))}, p {format_p_value(one.p_value)}"
            for one in found
        ]
        lines.append([f"`{name}`", *cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def conclude(variants: Sequence[VariantResult], k: int) -> list[str]:
    """The conclusions that the intervals allow, as sentences; `k` is that of pass@k."""
    measured = [variant for variant in variants if len(variant.finished) > 1]
    sentences: list[str] = []
    if not measured:
        sentences.append("One seed has no interval, so nothing can be concluded yet.")
    learned = [variant.name for variant in measured if _sign(variant.gain) > 0]
    fell = [variant.name for variant in measured if _sign(variant.gain) < 0]
    unclear = [variant.name for variant in measured if _sign(variant.gain) == 0]
    for names, text in (
        (learned, "The pass rate rose (the interval of the gain is above 0)"),
        (unclear, "No clear change of the pass rate (the interval holds 0)"),
        (fell, "The pass rate fell (the interval is below 0)"),
    ):
        if names:
            sentences.append(f"{text}: {list_names(names)}.")
    reference, *others = variants
    for measure, title in (("pass@1", " in pass@1"), ("pass@k", f" in pass@{k}"), ("entropy", " in entropy")):
        for word, sign in (("Above", 1), ("Below", -1)):
            compared = [(other.name, other.compared[measure]) for other in others]
            names = [name for name, found in compared if found.is_significant and sign * mean(found.differences) > 0]
            if names:
                sentences.append(
                    f"{word} `{reference.name}`{title} (corrected p below {SIGNIFICANT}): {list_names(names)}."
                )
    rates = {other.name: found for other in others if (found := other.compared["pass@1"]).p_value is not None}
    same = [name for name, found in rates.items() if not any(found.differences)]
    if same:
        sentences.append(f"Equal to `{reference.name}` in pass@1 for every seed: {list_names(same)}.")
    if open_ones := [name for name, found in rates.items() if not found.is_significant and any(found.differences)]:
        count = max(len(found.differences) for found in rates.values())
        sentences.append(
            f"Not told apart from `{reference.name}` in pass@1 with {count} seeds: {list_names(open_ones)}."
        )
    sentences.extend(_compare_pairs({variant.name: variant for variant in measured}))
    still = [v.name for v in variants if v.finished and not any(run["has_moved"] for run in v.finished)]
    if still:
        sentences.append(f"Made no step, the weights at the end are those of the start: {list_names(still)}.")
    sentences.extend(_name_mixtures([run for variant in variants for run in variant.finished]))
    for variant in variants:
        for run in variant.runs:
            if run["state"] == "failed":
                sentences.append(f"`{variant.name}`, seed {run['seed']}, failed: {run['reason']}")
    return sentences


def _compare_pairs(variants: Mapping[str, VariantResult]) -> Iterator[str]:
    for name, other in PAIRS:
        if name in variants and other in variants:
            differences = _subtract(variants[name], variants[other], "pass@1")
            if len(differences) > 1:
                p = format_p_value(t_test_p_value(differences))
                yield f"`{name}` minus `{other}`: {format_points(spread(differences))}, p {p} (of this pair alone)."


def _name_mixtures(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What makes runs not comparable: different versions of the code, or different starts of one seed."""
    if versions := describe_versions(run.get("code") for run in runs):
        yield versions
    for seed in sorted({run["seed"] for run in runs}):
        begun: dict[float, list[str]] = {}
        for run in runs:
            if run["seed"] == seed:
                begun.setdefault(run["pass@1"][0], []).append(run["variant"])
        if len(begun) > 1:
            groups = "; ".join(f"{100 * rate:.1f} %: {list_names(names)}" for rate, names in sorted(begun.items()))
            yield (
                f"Seed {seed} began at several pass rates ({groups}): its start was made anew in between, or on "
                "another machine. Delete the folders of these runs, and the same command makes them again."
            )


def format_p_value(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _sign(interval: Mapping[str, Any] | None) -> int:
    """On which side of 0 an interval lies; 0 if it holds 0."""
    assert interval is not None
    return 1 if interval["low"] > 0 else -1 if interval["high"] < 0 else 0


def format_share(result: Mapping[str, Any] | None) -> str:
    """`71.2 % [69.0, 73.4]`, without an interval for one seed."""
    if result is None:
        return ""
    if result["low"] is None:
        return f"{100 * result['mean']:.1f} %"
    return f"{100 * result['mean']:.1f} % [{100 * result['low']:.1f}, {100 * result['high']:.1f}]"


def format_points(result: Mapping[str, Any] | None) -> str:
    """`+2.1 [-0.4, +4.6]`: percentage points."""
    if result is None:
        return ""
    if result["low"] is None:
        return f"{100 * result['mean']:+.1f}"
    return f"{100 * result['mean']:+.1f} [{100 * result['low']:+.1f}, {100 * result['high']:+.1f}]"


def list_names(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def plot_algorithms(results: Mapping[str, Any], path: Path) -> None:
    """Write the picture as PNG: a panel for each task, a row for each variant.

    Shown are pass@1 and pass@k after training with 95 % intervals, and both at the start.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tasks = results["tasks"]
    names = list(max((task["overrides"] for task in tasks.values()), key=len))  # some are for tasks of several turns
    figure = Figure(figsize=(2.2 + 3.2 * len(tasks), 1.4 + ROW_INCHES * len(names)), dpi=150, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
    styles = (("pass@1", AFTER, "o", AFTER), ("pass@k", BEFORE, "D", "white"))
    for axes, (task_name, task) in zip(panels, tasks.items(), strict=True):
        finished = [run for run in task["runs"] if run["state"] == "finished"]
        for key, colour, marker, fill in styles:
            if starts := list({run["seed"]: 100 * run[key][0] for run in finished}.values()):
                axes.axvline(sum(starts) / len(starts), color=colour, linewidth=1, linestyle=":")
            for row, name in enumerate(names):
                result = spread([run[key][1] for run in finished if run["variant"] == name], (0.0, 1.0))
                if result is None:
                    continue
                if result["low"] is not None:
                    axes.plot([100 * result["low"], 100 * result["high"]], [row, row], color=colour, linewidth=2)
                axes.plot(100 * result["mean"], row, marker, color=colour, markerfacecolor=fill, markersize=5)
        axes.set_title(task_name, fontsize=10, loc="left", parse_math=False)
        axes.set_xlim(0, 100)
        axes.set_xlabel("held-out tasks that pass (%)", fontsize=8)
        axes.tick_params(labelsize=8, length=0)
        axes.grid(True, color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].set_ylim(len(names) - 0.4, -0.6)
    for key, colour, marker, fill in styles:
        panels[0].plot([], [], marker, color=colour, markerfacecolor=fill, label=f"{key}, 95 % over seeds")
    panels[0].plot([], [], ":", color="#555555", label="the start")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower right", ncols=3, frameon=False, fontsize=8)
    buffer = io.BytesIO()
    canvas.print_png(buffer)
    write_atomic(path, buffer.getvalue())


def t_test_p_value(differences: Sequence[float]) -> float:
    """Two-sided p-value of Student's paired t test; it takes the differences to be normal.

    Unlike that of sign flips it may be small with few pairs. Without a deviation there is no t: sign flips decide.
    """
    from scipy.special import stdtr

    result = spread(differences)
    if result is None or not result["sd"] or result["sd"] < 1e-12:  # equal but for rounding
        return sign_flip_p_value(differences)
    t = abs(result["mean"]) / (result["sd"] / math.sqrt(result["n"]))
    return float(2 * stdtr(result["n"] - 1, -t))


def adjust_holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction for several tests: the i-th smallest of n times n + 1 - i, never falling, at most 1.

    Holm 1979, "A simple sequentially rejective multiple test procedure".
    """
    adjusted, largest = [1.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted
