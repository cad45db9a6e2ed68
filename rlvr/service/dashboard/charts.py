"""Which metrics of a run are drawn, and the table of what it reached. Names as in docs/metrics.md.

Exercised by tests/test_dashboard_runs.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlvr.service.dashboard.data import Chart, Comparison, Line, line, mapping, number

Curve = Callable[[str, str], list[tuple[float, float]]]

# title, ((name of the line, metric), ...), whether they are shares, what it tells
_RL: tuple[tuple[str, tuple[tuple[str, str], ...], bool, str], ...] = (
    ("Reward", (("mean", "reward"), ("held-out", "test/env/all/reward/total")), False, "mean over a step's answers"),
    ("Pass rate", (("training", "env/all/correct"), ("held-out", "test/env/all/correct")), True,
     "of judged answers; held-out: quick looks"),
    ("Groups that teach", (("teach", "env/all/by_group/frac_mixed"), ("all pass", "env/all/by_group/frac_all_good"),
     ("all fail", "env/all/by_group/frac_all_bad")), True, "equal rewards in a group: no gradient"),
    ("Entropy", (("per token", "entropy"),), False, "nats; near zero: exploration has stopped"),
    ("Answer length", (("mean", "completions/mean_length"), ("longest", "completions/max_length")), False, "tokens"),
    ("Verifier", (("no answer", "verifier/no_answer_rate"), ("broke", "verifier/error_rate"),
     ("cut short", "completions/clipped_ratio")), True, "what kept answers from being judged"),
    ("Distance from the sampler", (("KL after the step", "optim/kl_after"), ("KL from the start", "kl")), False,
     "how far an update moves the policy"),
    ("Gradient norm", (("before clipping", "grad_norm"),), False, "of the last update of a step"),
)  # fmt: skip
_SFT: tuple[tuple[str, tuple[tuple[str, str], ...], bool, str], ...] = (
    ("Warm-up: loss", (("loss", "loss"),), False, "negative log-likelihood per token"),
    ("Warm-up: held-out pass rate", (("held-out", "test/env/all/correct"),), True, "quick looks"),
)


def run_charts(curve: Curve) -> list[Chart]:
    """The charts that this run has data for. A verifier that never failed needs none."""
    found: list[Chart] = []
    for phase, charts in (("rl", _RL), ("sft", _SFT)):
        for title, names, share, hint in charts:
            lines = [Line(name, points) for name, metric in names if (points := curve(metric, phase))]
            if title == "Verifier":
                lines = [one for one in lines if any(y for _, y in one.points)]
            if lines:
                found.append(Chart(title, lines, share, hint=hint))
    return found


def run_summary(summary: Any) -> list[Comparison]:
    """Before and after on the held-out tasks, with their intervals."""
    before, after = mapping(mapping(summary).get("baseline")), mapping(mapping(summary).get("final"))
    rows = [
        (line(name, 60), estimate(before.get(name), name), estimate(after.get(name), name)) for name in list(after)[:20]
    ]
    if not rows:
        return []
    p = number(mapping(summary).get("p_value"))
    told = "" if p is None else f", p = {p:.2g}" if p >= 1e-4 else ", p < 0.0001"
    return [Comparison(f"Held-out tasks{told}", ["", "before", "after"], [*rows])]


def estimate(value: Any, name: str) -> str:
    """`78.8 %  (75.8 to 81.6)`; a reward has no percent sign."""
    found = [number(mapping(value).get(key)) for key in ("value", "low", "high")]
    if found[0] is None:
        return "not measured"
    scale, unit, digits = (100, " %", 1) if name.startswith(("pass@", "watched/")) else (1, "", 3)
    texts = [f"{scale * one:.{digits}f}" if one is not None else "?" for one in found]
    return f"{texts[0]}{unit} ({texts[1]} to {texts[2]})"
