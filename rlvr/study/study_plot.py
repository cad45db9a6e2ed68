"""The picture of a study: every run as a line from its pass rate before to that after, and mean and interval below."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlvr.core.files import write_atomic

# Two colours that colour-blind readers tell apart (Okabe and Ito); hollow and filled markers say the same.
BEFORE, AFTER = "#d55e00", "#0072b2"
_GREY = "#555555"
_ROW, _TALLEST = 0.17, 30.0  # inches: of a row, and of the picture


def plot_study(summary: Mapping[str, Any], path: Path) -> None:
    """Write the picture as PNG. Variants stand below each other; runs that are not finished are left out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    finished = [run for run in summary["runs"] if run["state"] == "finished"]
    variants = [variant for variant in summary["variants"] if variant["finished"]]
    rows = len(finished) + 4 * len(variants)
    figure = Figure(figsize=(8, min(_TALLEST, 1.5 + _ROW * rows)), dpi=150, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    ticks: dict[float, str] = {}
    place = 0.0
    for variant in variants:
        runs = [run for run in finished if run["variant"] == variant["variant"]]
        axes.text(0, place, variant["variant"], transform=axes.get_yaxis_transform(), fontsize=9, weight="bold",
                  va="center", parse_math=False)  # fmt: skip
        for run in runs:
            place += 1
            before, after = (100 * run[side]["value"] for side in ("before", "after"))
            axes.plot([before, after], [place, place], color="#bbbbbb", linewidth=1.2, zorder=1)
            axes.plot(before, place, "o", markersize=7, color=BEFORE, fillstyle="none", markeredgewidth=1.3)
            axes.plot(after, place, "o", markersize=5, color=AFTER)
            if run["alarms"]:
                axes.plot(after, place, "s", markersize=10, color="black", fillstyle="none")
            if rows * _ROW <= _TALLEST:
                ticks[place] = f"seed {run['seed']}"
        place += 0.3
        for side, colour in (("before", BEFORE), ("after", AFTER)):
            place += 0.9
            spread = variant[side]
            if spread["low"] is not None:
                axes.plot([100 * spread["low"], 100 * spread["high"]], [place, place], color=colour, linewidth=3)
            fill = colour if side == "after" else "white"
            axes.plot(100 * spread["mean"], place, "D", markersize=7, color=colour, markerfacecolor=fill)
            ticks[place] = f"mean {side}"
        place += 1.8
    markers: list[dict[str, Any]] = [
        {"marker": "o", "color": BEFORE, "fillstyle": "none", "markersize": 7, "label": "before"},
        {"marker": "o", "color": AFTER, "label": "after"},
        {"marker": "D", "color": _GREY, "linestyle": "-", "linewidth": 3, "label": "mean, 95 % over seeds"},
    ]
    if any(run["alarms"] for run in finished):
        markers.append({"marker": "s", "color": "black", "fillstyle": "none", "markersize": 9, "label": "alarm"})
    for marker in markers:
        axes.plot([], [], **{"linestyle": "none", "markersize": 6, **marker})
    axes.set_ylim(place - 0.5, -0.9)
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=8, color=_GREY)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("pass@1 on held-out tasks (%)")
    axes.grid(True, axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    title = f"{summary['study']}: {len(finished)} of {len(summary['runs'])} runs"
    figure.suptitle(title, fontsize=11, x=0.01, ha="left", parse_math=False)
    figure.legend(loc="outside upper right", ncols=len(markers), frameon=False, fontsize=8)
    buffer = io.BytesIO()
    canvas.print_png(buffer)
    write_atomic(path, buffer.getvalue())
