"""The results of a run for people: the final table and the reward curve."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlvr.core.files import read_json
from rlvr.tracking.picture_files import (
    BLUE,
    GREEN,
    GREY,
    RED,
    begin_figure,
    clean_axes,
    count_steps,
    draw_series,
    render_figure,
    write_figure,
)

_WIDTHS = (22, 24, 24, 12)
_LABELS = {"pass@1": "Pass Rate (pass@1)", "mean_reward": "Mean Reward"}


def duration(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def final_table(summary: Mapping[str, Any]) -> str:
    """Baseline against trained: each metric with its 95 % interval, the difference, and the paired test.

    `summary` holds `baseline` and `final` (`{"pass@1": {"value", "low", "high"}, ..., "mean_reward": ...}`), `p_value`,
    and where known `by_level` (`{level: {"baseline": {"pass@1": ...}, "final": ...}}`), `by_family` and `beside` (the
    same for families of tasks and extra held-out sets), `tasks`, `samples`, `seconds`, `mode` (what trained: rlvr or
    sft), `steps` (0: nothing was trained, so there is one column), `stopped` (why it ended before the last step),
    `report` and `best` (of which policy the last evaluation is), `incomplete` (tasks left out of all numbers) and
    `unjudged` (completions, likewise).
    Rates are percentages and their differences percentage points; rewards stay decimals.
    """
    trained = "SFT" if summary.get("mode") == "sft" else "RLVR"
    rows: list[tuple[str, ...]] = [("Metric", "Baseline", trained, "Improvement"), *comparison_rows(summary)]
    basis = [describe_test(summary), "[95% interval]"]
    if summary.get("steps") == 0:
        rows, basis = [row[:2] for row in rows], basis[1:]
    first = max(_WIDTHS[0], *(len(row[0]) + 2 for row in rows))
    width = first + sum(_WIDTHS[1 : len(rows[0])])
    rule, thin = "=" * width, "-" * width
    head, *body = (_row(first, *row) for row in rows)
    lines = [rule, "FINAL RESULTS", rule, head, thin, *body]
    if "tasks" in summary:
        samples = f" x {summary['samples']} samples" if "samples" in summary else ""
        basis.append(f"{summary['tasks']:,} held-out tasks{samples}")
    if "seconds" in summary:
        basis.append(duration(summary["seconds"]))
    lines += [thin, ", ".join(basis)]
    if summary.get("stopped"):
        lines.append(f"ended after {summary['steps']:,} steps: {summary['stopped']}")
    if summary.get("report") == "best":
        step = summary["best"]["step"]
        lines.append(f"{trained}: the policy after step {step:,}, chosen by its interim evaluation on other tasks")
    lines += _describe_incomplete(summary)
    if summary.get("unjudged", 0) > 0:
        both = "" if summary.get("steps") == 0 else " of both evaluations"
        lines.append(f"{summary['unjudged']:,} completions{both} could not be judged and are left out")
    if summary.get("control", "none") != "none":
        lines.append(f"CONTROL RUN ({summary['control']}): training did not use the verifier's verdicts")
    return "\n".join([*lines, rule])


def comparison_rows(summary: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """(name, baseline, trained, change) as text, for every metric, then every level, family and extra held-out set."""
    baseline, final = summary["baseline"], summary["final"]
    rows = [
        _comparison_row(_LABELS.get(name) or name, baseline[name], final[name]) for name in baseline if name in final
    ]
    parts = [(f"level {level}", both) for level, both in (summary.get("by_level") or {}).items()]
    parts += [(f"family {name}", both) for name, both in (summary.get("by_family") or {}).items()]
    parts += (summary.get("beside") or {}).items()
    return rows + [
        _comparison_row(
            f"pass@1, {part}{_number_of(b['final']['pass@1'])}", b["baseline"]["pass@1"], b["final"]["pass@1"]
        )
        for part, b in parts
    ]


def describe_test(summary: Mapping[str, Any]) -> str:
    """`paired test: p = 0.0312`"""
    p = summary["p_value"]
    return f"paired test: p {'< 0.0001' if p < 1e-4 else f'= {p:.4f}'}"


def stored_summary(folder: Path) -> dict[str, Any]:
    """The `summary.json` of a finished run; ValueError if it is damaged: what `final_table` shows must be present."""
    path = folder / "summary.json"
    remedy = "delete it, and the same command writes it again from evaluations/"
    summary = read_json(path, "the summary of a finished run", remedy)
    try:
        if not all("pass@1" in summary[side] for side in ("baseline", "final")):
            raise KeyError("pass@1")
        final_table(summary)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ValueError(f"{path} is not the summary of a finished run ({error!r:.120}); {remedy}") from None
    return summary


def evaluation_table(result: Mapping[str, Any]) -> str:
    """One evaluation by itself, as `rlvr evaluate` returns it: each metric with its 95 % interval, then by level and
    family, then on the extra held-out sets.
    """
    parts: list[tuple[str, Mapping[str, Any]]] = [("", result)]
    parts += [(f", level {level}", measured) for level, measured in (result.get("by_level") or {}).items()]
    parts += [(f", family {name}", measured) for name, measured in (result.get("by_family") or {}).items()]
    parts += [(f", {name}", measured) for name, measured in (result.get("beside") or {}).items()]
    rows = [("Metric", "Value [95% interval]")]
    for part, measured in parts:
        for name, estimate in measured.items():
            if isinstance(estimate, Mapping) and "value" in estimate:
                label, text = (_LABELS[name], _decimal) if name == "mean_reward" else (name, format_rate)
                rows.append((label + part + (_number_of(estimate) if part else ""), text(estimate)))
    first = max(_WIDTHS[0], *(len(label) + 2 for label, _ in rows))
    rule = "=" * (first + _WIDTHS[1])
    head, *body = (f"{label:<{first}}{text}" for label, text in rows)
    lines = [rule, head, "-" * len(rule), *body, "-" * len(rule)]
    lines += [f"{result['tasks']:,} held-out tasks, weights {result['checkpoint']}"]
    lines += _describe_incomplete(result)
    if result.get("unjudged", 0) > 0:
        lines.append(f"{result['unjudged']:,} completions could not be judged and are left out")
    for name, measured in (result.get("beside") or {}).items():
        left_out = f", {measured['unjudged']:,} completions left out unjudged" if measured["unjudged"] else ""
        lines.append(f"{measured['tasks']:,} tasks of {name}{left_out}")
    return "\n".join([*lines, rule])


def _number_of(estimate: Mapping[str, Any]) -> str:
    """` (n = 128)`, the number of tasks of a part; "" in evaluations of older versions."""
    return f" (n = {estimate['n']:,})" if "n" in estimate else ""


def _describe_incomplete(result: Mapping[str, Any]) -> list[str]:
    left_out = result.get("incomplete", 0)
    return [f"{left_out:,} tasks with fewer than k judged completions are left out"] if left_out else []


def _comparison_row(
    label: str, before: Mapping[str, float | None], after: Mapping[str, float | None]
) -> tuple[str, str, str, str]:
    text, scale, form = (_decimal, 1, "{:+.3f}") if "Reward" in label else (format_rate, 100, "{:+.1f}pp")
    start, end = (_numbers(estimate, scale)[0] for estimate in (before, after))
    change = "-" if start is None or end is None else form.format(end - start)
    return label, text(before), text(after), change


def format_rate(estimate: Mapping[str, float | None]) -> str:
    """`46.1% [44.9, 47.3]`; `-` for what is not known."""
    value, low, high = _numbers(estimate, 100)
    return "-" if value is None else f"{value:.1f}%" + ("" if low is None else f" [{low:.1f}, {high:.1f}]")


def _decimal(estimate: Mapping[str, float | None]) -> str:
    value, low, high = _numbers(estimate, 1)
    return "-" if value is None else f"{value:.3f}" + ("" if low is None else f" [{low:.3f}, {high:.3f}]")


def _numbers(estimate: Mapping[str, float | None], scale: int) -> list[float | None]:
    """Value, low and high; None for what is not known, which older versions wrote as nan."""
    found = (estimate[key] for key in ("value", "low", "high"))
    return [None if number is None or math.isnan(number) else scale * number for number in found]


def _row(first: int, *cells: str) -> str:
    widths = (first, *_WIDTHS[1:])
    return "".join(f"{cell:<{width - 1}} " for cell, width in zip(cells, widths, strict=False)).rstrip()


_WATCHED = re.compile(r"rewards/([^/]+)/mean")
_WATCHED_COLOURS = ("#cc79a7", GREY, "#56b4e9")
_RATE, _HELD_OUT = "env/all/correct", "test/env/all/correct"
_NEAR_A_RATE = 2.0  # rewards up to this share an axis with pass rates


def plot_curve(
    rows: list[dict[str, Any]], path: str | os.PathLike[str], title: str, ends: Sequence[float] = ()
) -> None:
    """The reward curve as PNG or SVG: reward and pass rate of training, watching verifiers, held-out pass rate.

    Rows of another phase than the last (supervised fine-tuning) are drawn before step 0 on a grey ground, scaled to a
    seventh of the width. `ends` are the held-out pass rates before and after the last phase. Rewards that are no
    numbers near those of a rate have a panel of their own.
    """
    write_figure(_draw_figure(rows, title, ends), Path(path))


def draw_curve(rows: list[dict[str, Any]], title: str, ends: Sequence[float] = ()) -> bytes:
    """The bytes of the PNG that `plot_curve` writes."""
    return render_figure(_draw_figure(rows, title, ends))


def _draw_figure(rows: list[dict[str, Any]], title: str, ends: Sequence[float]) -> Any:
    last = next((row.get("phase") for row in reversed(rows) if "step" in row), None)
    before = [row for row in rows if "step" in row and row.get("phase") != last]
    after = [row for row in rows if "step" in row and row.get("phase") == last]
    scale = max([row["step"] for row in after], default=1) / 7 / max(len(before), 1)
    names = sorted({match[1] for row in after for key in row if (match := _WATCHED.fullmatch(key))})
    names = [n for n in names if any(row.get(f"rewards/{n}/mean") != row.get("reward") for row in after)]
    is_rate = any("reward" in row for row in after) and all(row.get("reward") == row.get(_RATE) for row in after)
    rewards = [] if is_rate else [("reward", "reward", RED)]
    rewards += [(f"rewards/{n}/mean", f"{n} (watched)", c) for n, c in zip(names, _WATCHED_COLOURS, strict=False)]
    rates = [
        (_RATE, f"{'reward = ' if is_rate else ''}pass rate, training", BLUE),
        (_HELD_OUT, "pass rate, held out", GREEN),
    ]

    def read_points(key: str) -> list[tuple[float, float]]:
        points = [((i - len(before)) * scale, row[key]) for i, row in enumerate(before) if _drawable(row.get(key))]
        return points + [(row["step"], row[key]) for row in after if _drawable(row.get(key))]

    is_apart = any(abs(y) > _NEAR_A_RATE for key, _, _ in rewards for _, y in read_points(key))
    panels = [("reward", rewards), ("pass rate", rates)] if is_apart else [("reward, pass rate", rewards + rates)]
    figure, _ = begin_figure(title, 6.0 if is_apart else 4.5, has_axes=False)
    for axes, (name, lines) in zip(figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0], panels, strict=True):
        for key, label, colour in lines:
            if points := read_points(key):
                draw_series(axes, [x for x, _ in points], [y for _, y in points], colour, label)
        if lines[-1][0] == _HELD_OUT and after and ends:
            style = "none" if read_points(_HELD_OUT) else "-"
            axes.plot((0, after[-1]["step"] + 1), ends, linestyle=style, color=GREEN, marker="D", markersize=6,
                      markerfacecolor="white", label="pass rate, before and after")  # fmt: skip
        if before:
            axes.axvspan(-len(before) * scale, 0, color="#000000", alpha=0.05, linewidth=0)
            label, place = f"fine-tuning, {len(before)} steps", axes.get_xaxis_transform()
            axes.text(-len(before) * scale, 1.01, label, transform=place, fontsize=8, color="#555555")
        clean_axes(axes).set_ylabel(name)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, loc="best", fontsize=9)
        else:
            axes.text(0.5, 0.5, "no step yet", transform=axes.transAxes, ha="center", color="#555555")
        count_steps(axes)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}" if x >= 0 else "")
        axes.label_outer()
    return figure


def _drawable(value: Any) -> bool:
    """A number that an axis can hold (differences of such numbers must be floats too), or nan, which leaves a gap."""
    return isinstance(value, (int, float)) and not abs(value) > 1e100
