"""The charts of runs, and the tables of their results. Metric names are those of docs/run/metrics.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlvr.service.dashboard.curve_view import CurveView, Series
from rlvr.service.dashboard.dashboard_data import Chart, Table, as_mapping, finite_number, one_line
from rlvr.training.interim import MEAN_REWARD, PASS_RATE
from rlvr.training.run_diagnosis import RunDiagnosis

SeriesReader = Callable[[str, str], Series | None]  # of a metric and a phase
ENDS = {PASS_RATE: "pass@1", MEAN_REWARD: "mean_reward"}  # what the evaluations before and after say of it
STEPS = {"rl": "step of reinforcement learning", "sft": "step of fine-tuning"}


@dataclass(frozen=True)
class ChartSpec:
    """A chart: the metrics that it shows with the names of their curves, and what its axis counts."""

    title: str
    lines: tuple[tuple[str, str], ...]
    unit: str
    hint: str = ""
    phase: str = "rl"

    @property
    def chart(self) -> Chart:
        return Chart(self.title, [], self.unit.startswith("%"), STEPS[self.phase], self.hint, self.unit)


CHARTS = (
    ChartSpec("Pass rate", (("training", "env/all/correct"), ("held-out, interim", PASS_RATE)), "% of completions",
              "held-out: with 95 % intervals; interim ones are of other tasks than those before and after"),
    ChartSpec("Reward", (("training", "reward"), ("held-out, interim", MEAN_REWARD)), "mean reward of a completion"),
    ChartSpec("Groups with signal", (("signal", "frac_groups_with_signal"),
              ("all pass", "env/all/by_group/frac_all_good"), ("all fail", "env/all/by_group/frac_all_bad")),
              "% of groups", "what the algorithm can learn from"),
    ChartSpec("Entropy", (("policy", "entropy"),), "nats per token", "near zero: exploration has stopped"),
    ChartSpec("Answer length", (("mean", "completions/mean_length"), ("longest", "completions/max_length")), "tokens"),
    ChartSpec("Verifier", (("no answer", "verifier/no_answer_rate"), ("broke", "verifier/error_rate"),
              ("cut short", "completions/clipped_ratio")), "% of completions", "why answers were not judged"),
    ChartSpec("Distance from the sampler", (("KL after the step", "optim/kl_after"), ("KL from the start", "kl")),
              "nats per token", "how far an update moves the policy"),
    ChartSpec("Gradient norm", (("before clipping", "grad_norm"),), "L2 norm", "of the last update of a step"),
    ChartSpec("Ranks that wait for others", tuple((f"rank {n}", f"ranks/idle/{n}") for n in range(8)),
              "% of the time in commands", "of the first 8: high where rows are of unequal lengths"),
    ChartSpec("Exchange of the ranks", (("among the ranks", "ranks/transfer_s"),
              ("weights to the sampler", "ranks/publish_s")), "seconds of an update"),
    ChartSpec("Supervised fine-tuning: loss", (("loss", "loss"),), "nats per token", "negative log-likelihood", "sft"),
    ChartSpec("Supervised fine-tuning: held-out pass rate", (("held-out, interim", PASS_RATE),), "% of completions",
              "interim evaluations, with 95 % intervals", "sft"),
)  # fmt: skip
# What runs beside each other show: one metric in each chart.
COMPARED = ("env/all/correct", PASS_RATE, "reward", "entropy", "completions/mean_length", "frac_groups_with_signal",
            "grad_norm", "optim/kl_after")  # fmt: skip


def metric_chart(metric: str, phase: str = "rl") -> Chart:
    """The empty chart of one metric, with the unit that `CHARTS` has for it."""
    for spec in CHARTS:
        if spec.phase == phase and metric in dict((name, line) for line, name in spec.lines):
            line = next(line for line, name in spec.lines if name == metric)
            if len(spec.lines) == 1:
                return spec.chart
            hint = "interim evaluations, with 95 % intervals" if metric.startswith("test/") else ""
            return replace(spec.chart, title=f"{spec.title}: {line}", hint=hint)
    return Chart(one_line(metric, 100), [], x=STEPS.get(phase, "step"), unit=one_line(metric, 100))


def run_series(
    read: SeriesReader, ends: Callable[[str], Series | None], metric: str = ""
) -> list[tuple[Chart, list[Series]]]:
    """The charts that this run has data for, the chosen metric first; no verifier chart if no verifier failed."""
    found: list[tuple[Chart, list[Series]]] = []
    if metric:
        phases = [phase for phase in STEPS if read(metric, phase)]
        found += [(metric_chart(metric, phase), [replace(series, name="")])
                  for phase in phases[:1] if (series := read(metric, phase))]  # fmt: skip
    for spec in CHARTS:
        lines = [replace(series, name=name, colour=number) for number, (name, metric) in enumerate(spec.lines)
                 if (series := read(metric, spec.phase))]  # fmt: skip
        if spec.title == "Verifier":
            lines = [line for line in lines if line.y.any()]
        if lines and spec.phase == "rl":
            lines += [replace(end, colour=len(spec.lines)) for _, name in spec.lines if (end := ends(name))]
        if lines:
            found.append((spec.chart, lines))
    return found


def draw_charts(given: Sequence[tuple[Chart, list[Series]]], view: CurveView) -> list[Chart]:
    """The charts as a page shows them."""
    return [chart for empty, lines in given if (chart := view.draw(empty, lines)) is not None]


def run_summary(summary: Any) -> list[Table]:
    """Before and after on the held-out tasks, with their number and intervals."""
    before, after = as_mapping(as_mapping(summary).get("baseline")), as_mapping(as_mapping(summary).get("final"))
    rows = [
        (one_line(name, 60), estimate(before.get(name), name), estimate(after.get(name), name))
        for name in list(after)[:20]
    ]
    if not rows:
        return []
    p = finite_number(as_mapping(summary).get("p_value"))
    p_value = "" if p is None else f", p = {p:.2g}" if p >= 1e-4 else ", p < 0.0001"
    tasks = finite_number(as_mapping(summary).get("tasks"))
    number = "" if tasks is None else f", n = {tasks:,.0f}"
    return [Table([("before", ""), ("after", "")], rows, f"Held-out tasks{number}{p_value}")]


def failing_groups(diagnosis: RunDiagnosis | None) -> list[Table]:
    """What failing tasks have in common; [] if nothing was found."""
    if diagnosis is None or not diagnosis.groups:
        return []
    rows = [
        (
            one_line(group.name, 120),
            f"{group.tasks:,}",
            f"{100 * group.rate:.1f} %",
            f"{100 * group.rate_of_others:.1f} %",
        )
        for group in diagnosis.groups
    ]
    title = f"Failing tasks have in common ({diagnosis.basis})"
    return [Table([("tasks", ""), ("pass", ""), ("the others pass", "")], rows, title)]


def estimate(value: Any, name: str) -> str:
    """`78.8 %  (75.8 to 81.6)`; a reward has no percent sign."""
    bounds = [finite_number(as_mapping(value).get(key)) for key in ("value", "low", "high")]
    if bounds[0] is None:
        return "not measured"
    scale, unit, digits = (100, " %", 1) if name.startswith(("pass@", "watched/")) else (1, "", 3)
    texts = [f"{scale * one:.{digits}f}" if one is not None else "?" for one in bounds]
    return f"{texts[0]}{unit} ({texts[1]} to {texts[2]})"
