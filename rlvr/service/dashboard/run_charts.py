"""The charts of a run and the table of its results. Metric names are those of docs/run/metrics.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlvr.service.dashboard.dashboard_data import Chart, Comparison, Curve, as_mapping, finite_number, one_line
from rlvr.training.run_diagnosis import RunDiagnosis

CurveReader = Callable[[str, str], list[tuple[float, float]]]

# title, ((name of the curve, metric), ...), whether they are shares, hint
_RL: tuple[tuple[str, tuple[tuple[str, str], ...], bool, str], ...] = (
    ("Reward", (("mean", "reward"), ("held-out", "test/env/all/reward/total")), False, "mean over a step's answers"),
    ("Pass rate", (("training", "env/all/correct"), ("held-out", "test/env/all/correct")), True,
     "of judged answers; held-out: interim evaluations"),
    ("Groups with signal", (("signal", "frac_groups_with_signal"), ("all pass", "env/all/by_group/frac_all_good"),
     ("all fail", "env/all/by_group/frac_all_bad")), True, "what the algorithm can learn from"),
    ("Entropy", (("per token", "entropy"),), False, "nats; near zero: exploration has stopped"),
    ("Answer length", (("mean", "completions/mean_length"), ("longest", "completions/max_length")), False, "tokens"),
    ("Verifier", (("no answer", "verifier/no_answer_rate"), ("broke", "verifier/error_rate"),
     ("cut short", "completions/clipped_ratio")), True, "why answers were not judged"),
    ("Distance from the sampler", (("KL after the step", "optim/kl_after"), ("KL from the start", "kl")), False,
     "how far an update moves the policy"),
    ("Gradient norm", (("before clipping", "grad_norm"),), False, "of the last update of a step"),
    ("Ranks that wait for others", tuple((f"rank {n}", f"ranks/idle/{n}") for n in range(8)), True,
     "share of the time in commands, of the first 8: high where rows are of unequal lengths"),
    ("Exchange of the ranks", (("among the ranks", "ranks/transfer_s"), ("weights to the sampler", "ranks/publish_s")),
     False, "seconds of an update"),
)  # fmt: skip
_SFT: tuple[tuple[str, tuple[tuple[str, str], ...], bool, str], ...] = (
    ("Supervised fine-tuning: loss", (("loss", "loss"),), False, "negative log-likelihood per token"),
    (
        "Supervised fine-tuning: held-out pass rate",
        (("held-out", "test/env/all/correct"),),
        True,
        "interim evaluations",
    ),
)


def run_charts(curve: CurveReader) -> list[Chart]:
    """The charts that this run has data for; no verifier chart if no verifier failed."""
    run: list[Chart] = []
    for phase, charts in (("rl", _RL), ("sft", _SFT)):
        for title, names, share, hint in charts:
            lines = [Curve(name, points) for name, metric in names if (points := curve(metric, phase))]
            if title == "Verifier":
                lines = [line for line in lines if any(y for _, y in line.points)]
            if lines:
                run.append(Chart(title, lines, share, hint=hint))
    return run


def run_summary(summary: Any) -> list[Comparison]:
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
    return [Comparison(f"Held-out tasks{number}{p_value}", ["", "before", "after"], [*rows])]


def failing_groups(diagnosis: RunDiagnosis | None) -> list[Comparison]:
    """What failing tasks have in common; [] if nothing was found."""
    if diagnosis is None or not diagnosis.groups:
        return []
    rows = [
        (one_line(group.name, 120), f"{group.tasks:,}", f"{100 * group.rate:.1f} %", f"{100 * group.others:.1f} %")
        for group in diagnosis.groups
    ]
    title = f"Failing tasks have in common ({diagnosis.basis})"
    return [Comparison(title, ["", "tasks", "pass", "the others pass"], [*rows])]


def estimate(value: Any, name: str) -> str:
    """`78.8 %  (75.8 to 81.6)`; a reward has no percent sign."""
    bounds = [finite_number(as_mapping(value).get(key)) for key in ("value", "low", "high")]
    if bounds[0] is None:
        return "not measured"
    scale, unit, digits = (100, " %", 1) if name.startswith(("pass@", "watched/")) else (1, "", 3)
    texts = [f"{scale * one:.{digits}f}" if one is not None else "?" for one in bounds]
    return f"{texts[0]}{unit} ({texts[1]} to {texts[2]})"
