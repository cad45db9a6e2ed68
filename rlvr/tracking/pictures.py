"""Pictures of a run beside its reward curve: rewards inside groups, lengths against rewards, entropy and divergence.

Each function draws one picture from stored rows, a PNG or SVG file by the end of its name; ValueError if the rows do
not hold what it draws. What matters is told by shape or place, and not by colour alone.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlvr.tracking.picture_files import (
    BLUE,
    GREEN,
    GREY,
    RED,
    begin_figure,
    clean_axes,
    count_steps,
    draw_series,
    widen_axis,
    write_figure,
)

Rollouts = Sequence[Mapping[str, Any]]

_MOST_NUMBERED = 24  # groups up to which counts are written into the marks
_BINS = 8  # of the lengths, with about as many completions in each
_PANELS = (
    ("entropy", "entropy\n(nats a token)"),
    ("kl", "KL from the first\npolicy (nats a token)"),
    ("optim/kl_after", "KL of the step's\nupdates (nats a token)"),
)


def plot_groups(rollouts: Rollouts, path: Path, title: str) -> None:
    """Draw the rewards of a step, group by group in the order of their means; groups whose rewards are equal are grey.

    An advantage compares the completions of one group: groups without a difference give no signal.
    """
    groups: dict[str, list[float]] = {}
    for row in rollouts:
        if row.get("reward") is not None:
            groups.setdefault(str(row.get("group_id")), []).append(float(row["reward"]))
    if not groups:
        raise ValueError("these rollouts have no reward, so there is nothing to draw")
    ordered = sorted(groups.values(), key=lambda rewards: (statistics.fmean(rewards), max(rewards)))
    figure, axes = begin_figure(title)
    for place, rewards in enumerate(ordered, 1):
        colour = BLUE if len(set(rewards)) > 1 else GREY
        axes.plot([place, place], [min(rewards), max(rewards)], color=colour, linewidth=1.2, alpha=0.5, zorder=1)
        for reward, count in Counter(rewards).items():
            is_numbered = count > 1 and len(ordered) <= _MOST_NUMBERED
            size = 60 + 25 * min(count, 12) if is_numbered else 36
            filled = colour if is_numbered or len(ordered) > _MOST_NUMBERED else "white"
            axes.scatter([place], [reward], s=size, color=filled, edgecolors=colour, linewidths=1.2, zorder=2)
            if is_numbered:
                axes.annotate(str(count), (place, reward), ha="center", va="center", fontsize=8, color="white")
        if colour == BLUE:  # the mean of equal rewards would strike through their number
            mean = statistics.fmean(rewards)
            axes.plot([place - 0.3, place + 0.3], [mean, mean], color=RED, linewidth=1.8, zorder=3)
    _add_key(
        axes,
        {"marker": "o", "color": BLUE, "label": "rewards differ"},
        {"marker": "o", "color": GREY, "label": "all equal: no signal"},
        {"marker": "_", "color": RED, "markersize": 12, "label": "mean of the group"},
    )
    differing = sum(len(set(rewards)) > 1 for rewards in ordered)
    axes.set_xlabel(f"group, by mean reward ({differing} of {len(ordered)} have signal)")
    axes.set_ylabel("reward" + (" (numbers: completions)" if len(ordered) <= _MOST_NUMBERED else ""))
    axes.set_xlim(0.4, len(ordered) + 0.6)
    axes.margins(y=0.12)
    widen_axis(axes, [reward for rewards in ordered for reward in rewards])
    if len(ordered) <= _MOST_NUMBERED:
        axes.set_xticks(range(1, len(ordered) + 1))
    axes.grid(False, axis="x")
    write_figure(figure, path)


def plot_lengths(rollouts: Mapping[int, Rollouts], path: Path, title: str) -> None:
    """Draw the reward of stored completions, by step, against their length in tokens, with the mean of each length."""
    points = [
        (len(row["response_tokens"]), float(row["reward"]), step, row.get("stop_reason") == "length")
        for step, rows in rollouts.items()
        for row in rows
        if row.get("reward") is not None and row.get("response_tokens")
    ]
    if not points:
        raise ValueError("these rollouts have no completion with tokens and a reward, so there is nothing to draw")
    figure, axes = begin_figure(title)
    steps = [point[2] for point in points]
    levels, lengths = sorted({point[1] for point in points}), [point[0] for point in points]
    # Equal points would hide each other: they are spread, by less than what lies between two rewards or two lengths.
    gaps = [high - low for low, high in itertools.pairwise(levels)]
    has_equal = len({point[:2] for point in points}) < len(points)
    spread_y = has_equal * (min(0.03 * (levels[-1] - levels[0]), 0.35 * min(gaps)) if gaps else 0.03)
    spread_x = has_equal * max(0.3, 0.006 * (max(lengths) - min(lengths)))
    shown: Any = None
    for is_cut, marker, label in ((False, "o", "ended by itself"), (True, "^", "cut at the limit")):
        chosen = [(i, point) for i, point in enumerate(points) if point[3] is is_cut]
        chosen.sort(key=lambda one: one[0] * 0.618034 % 1)  # steps take turns, so that the last does not hide the first
        if chosen:
            shown = axes.scatter(
                [p[0] + spread_x * _spread(i, 0.754878) for i, p in chosen],
                [p[1] + spread_y * _spread(i, 0.569840) for i, p in chosen],
                c=[p[2] for _, p in chosen], cmap="viridis", vmin=min(steps), vmax=max(max(steps), min(steps) + 1),
                marker=marker, s=22, alpha=0.75, linewidths=0,
            )  # fmt: skip
            axes.scatter([], [], color=GREY, marker=marker, s=22, label=f"{label} ({len(chosen):,})")
    if 1 < len(bins := _mean_by_length(points)) < len(points):
        axes.plot(*zip(*bins, strict=True), color=RED, marker="s", markersize=5, linewidth=1.8, label="mean reward")
    if len(set(steps)) > 1:
        figure.colorbar(shown, ax=axes, label="step", pad=0.02).ax.yaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, fontsize=9, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    axes.set_xlabel("completion (tokens)" + ("" if len(set(steps)) > 1 else f", step {steps[0]}"))
    axes.set_ylabel("reward" + (" (equal points are spread)" if has_equal else ""))
    axes.xaxis.get_major_locator().set_params(integer=True)
    if min(lengths) == max(lengths):
        axes.set_xlim(lengths[0] - 1, lengths[0] + 1)
    widen_axis(axes, levels)
    write_figure(figure, path)


def _spread(number: int, step: float) -> float:
    """A number from -1 to 1, of a sequence that fills the plane evenly (Roberts 2018, generalized golden ratio)."""
    return 2 * (number * step % 1) - 1


def _mean_by_length(points: Sequence[tuple[int, float, int, bool]]) -> list[tuple[float, float]]:
    """(mean length, mean reward) of each length, of many in ranges with about an eighth of the completions each."""
    by_length: dict[int, list[float]] = {}
    for point in sorted(points):
        by_length.setdefault(point[0], []).append(point[1])
    most = 0 if len(by_length) <= _BINS else 1.25 * len(points) / _BINS
    bins: list[list[tuple[int, float]]] = []
    for length, rewards in by_length.items():  # equal lengths stay together
        part = [(length, reward) for reward in rewards]
        if bins and len(bins[-1]) + len(part) <= most:
            bins[-1] += part
        else:
            bins.append(part)
    return [(statistics.fmean(p[0] for p in part), statistics.fmean(p[1] for p in part)) for part in bins]


def plot_entropy(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw the policy's entropy over the steps and, below it, how far it moved: from the first policy and in a step."""
    last = next((row.get("phase") for row in reversed(rows) if "step" in row), None)
    steps = [row for row in rows if "step" in row and row.get("phase") == last]
    series = {
        label: [(row["step"], row[key]) for row in steps if isinstance(row.get(key), (int, float))]
        for key, label in _PANELS
    }
    series = {label: points for label, points in series.items() if points}
    if "entropy" not in {key for row in steps for key in row}:
        raise ValueError("these metrics have no step with an entropy, which reinforcement learning records")
    figure, _ = begin_figure(title, 1.2 + 1.7 * len(series), has_axes=False)
    panels = figure.subplots(len(series), sharex=True, squeeze=False)[:, 0]
    for axes, (label, points), colour in zip(panels, series.items(), (BLUE, RED, GREEN), strict=False):
        x, y = zip(*points, strict=True)
        draw_series(axes, x, y, colour)
        axes.set_ylabel(label, fontsize=9)
        axes.ticklabel_format(axis="y", scilimits=(-4, 5), useOffset=False)
        clean_axes(axes)
    count_steps(panels[-1])
    figure.align_ylabels()
    write_figure(figure, path)


def _add_key(axes: Any, *marks: dict[str, Any]) -> None:
    """A legend above the picture, where it hides nothing."""
    for mark in marks:
        axes.plot([], [], **{"linestyle": "none", "markersize": 7, **mark})
    axes.legend(frameon=False, fontsize=9, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(marks))
