"""The picture of `rlvr study algorithms`: a panel for each task, a row for each variant."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlvr.core.files import write_atomic
from rlvr.study.seed_statistics import spread
from rlvr.study.study_plot import AFTER, BEFORE

_ROW = 0.2  # inches


def plot_algorithms(results: Mapping[str, Any], path: Path) -> None:
    """Write the picture as PNG: pass@1 and pass@k after training with 95 % intervals, and both at the start."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tasks = results["tasks"]
    names = list(max((task["overrides"] for task in tasks.values()), key=len))  # some are for tasks of several turns
    figure = Figure(figsize=(2.2 + 3.2 * len(tasks), 1.4 + _ROW * len(names)), dpi=150, layout="constrained")
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
