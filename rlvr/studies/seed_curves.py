"""A metric over the steps of several seeds in one picture: each run, their mean, and a band around it.

plot_seeds([run_1, run_2, run_3], "reward", "reward.svg")
plot_seeds({"grpo": runs, "dapo": others}, "entropy")
plot_seeds("runs/arithmetic-study")
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlvr.config import difference
from rlvr.core.files import read_json
from rlvr.core.registry import did_you_mean
from rlvr.core.types import mean
from rlvr.runs.library import Run, load_run
from rlvr.runs.run_folder import CONNECTION_KEYS
from rlvr.studies import SPECIFICATION
from rlvr.studies.seed_statistics import summarize_steps
from rlvr.tracking.picture_files import begin_figure, count_steps, smooth, to_picture_path, write_figure
from rlvr.training.metric_values import get_value

# Colours that readers with colour-blindness tell apart (Okabe and Ito); beyond them lines are dashed.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_OF_A_RUN = ("seed", "run", "tracking", "engine", "folder", *CONNECTION_KEYS)  # in which runs of several seeds differ
# What a band is, by the number of seeds; of more than two it is the interval.
_BANDS = {1: "no band", 2: "band: from one to the other"}
_INTERVAL = "band: 95 % interval of the mean"

Runs = Sequence[Run | str | Path]


def plot_seeds(
    runs: Runs | Mapping[str, Runs] | str | Path, metric: str = "reward", file: str | Path | None = None
) -> Path:
    """Draw a metric over the steps of runs that differ by their seed: each run, their mean, and a band around it.

    `runs` are runs or their folders, or such lists by name, which are drawn side by side, or the folder of a study,
    whose variants are these lists. The band is Student's 95 % interval of the mean over the seeds. Of two seeds, whose
    interval is 12.7 standard errors, it goes from one run to the other instead; one run has none. Mean and band are
    drawn for the steps that all runs of a list have; of many steps each run is smoothed first. `metric` is a name of
    `metrics.jsonl`; `file` is a PNG or SVG file, by default `seeds-METRIC.png` beside the runs. ValueError for runs
    with different settings in one list, and for a metric that no run has.
    """
    place, lists = _name_lists(runs)
    curves = {name: [_read_curve(run, metric) for run in members] for name, members in lists.items()}
    if not any(curve for members in curves.values() for curve in members):
        known = sorted({key for members in lists.values() for run in members for row in run.metrics for key in row})
        raise ValueError(
            f"metric={metric!r}: no run has it{did_you_mean(metric, known)}; expected one of metrics.jsonl: "
            f"{', '.join(key for key in known if key not in ('phase', 'step')) or 'it has no step yet'}"
        )
    path = to_picture_path(file if file is not None else place / f"seeds-{metric.replace('/', '-')}.png")
    write_figure(_draw(curves, metric, place.name), path)
    return path


def _name_lists(runs: Any) -> tuple[Path, dict[str, list[Run]]]:
    """(the folder that they lie in, the runs by the name of their list)."""
    if isinstance(runs, (str, Path)):
        return read_study(Path(runs).expanduser())
    if isinstance(runs, Run):
        runs = [runs]
    named = runs if isinstance(runs, Mapping) else {"": runs}
    lists = {str(name): [one if isinstance(one, Run) else load_run(one) for one in of] for name, of in named.items()}
    if not lists or not all(lists.values()):
        raise ValueError(
            f"plot_seeds: runs={runs!r:.80} {'has an empty list' if lists else 'is empty'}; give runs, or their folders"
        )
    for name, members in lists.items():
        _check_list(name, members)
    return next(iter(lists.values()))[0].folder.parent, lists


def _check_list(name: str, members: Sequence[Run]) -> None:
    """ValueError for a run that is there twice, and for runs that differ by more than their seed."""
    where = f" of {name!r}" if name else ""
    folders = [run.folder.resolve() for run in members]
    if twice := [folder for folder in folders if folders.count(folder) > 1]:
        raise ValueError(f"plot_seeds: the run {twice[0]}{where} is given twice; a run counts once")
    first, *others = members
    for other in others:
        if changed := difference(first.settings, other.settings, ignore=_OF_A_RUN):
            raise ValueError(
                f"plot_seeds: {first.folder} and {other.folder}{where} differ in {', '.join(changed[:6])}, and not by "
                "their seed alone; give a list for each of the settings: {'name': [runs], 'other': [runs]}"
            )


def read_study(folder: Path) -> tuple[Path, dict[str, list[Run]]]:
    """The begun runs of a study, by variant."""
    if not (folder / SPECIFICATION).exists():
        raise ValueError(
            f"plot_seeds: {folder} is no folder of a study (no {SPECIFICATION}); give it, or a list of runs"
        )
    stored = read_json(folder / SPECIFICATION, "the specification of a study")
    lists = {
        str(variant["name"]): [
            Run(place)
            for seed in stored["seeds"]
            if ((place := folder / f"{variant['folder']}seed-{seed}") / "metrics.jsonl").exists()
        ]
        for variant in stored["variants"]
    }
    if not (begun := {name: members for name, members in lists.items() if members}):
        raise ValueError(f"plot_seeds: no run of the study {folder} has made a step yet")
    return folder, begun


def _read_curve(run: Run, metric: str) -> dict[int, float]:
    """The finite values of a metric by step, of the last phase of a run."""
    rows = [row for row in run.metrics if "step" in row]
    last = rows[-1].get("phase") if rows else None
    values = {int(row["step"]): get_value(row, metric) for row in rows if row.get("phase") == last}
    return {step: value for step, value in values.items() if math.isfinite(value)}


def _band(curves: Sequence[Mapping[int, float]], step: int, found: Mapping[str, Any]) -> tuple[float, float]:
    """The ends of the band at a step: of the interval, and of two seeds, whose interval says little, the two values."""
    if len(curves) > 2:
        return found["low"], found["high"]
    values = [curve[step] for curve in curves]
    return min(values), max(values)


def _smooth(curve: Mapping[int, float]) -> dict[int, float]:
    return dict(zip(sorted(curve), smooth([curve[step] for step in sorted(curve)]), strict=True))


def _draw(curves: Mapping[str, Sequence[Mapping[int, float]]], metric: str, title: str) -> Any:
    figure, axes = begin_figure(f"{title}: {metric}")
    curves = {name: [_smooth(curve) for curve in members] for name, members in curves.items()}
    width = max(len(curve) for members in curves.values() for curve in members) // 40 * 2 + 1
    bands = {_BANDS.get(len(members), _INTERVAL) for members in curves.values()}
    title_of_bands = bands.pop() if len(curves) > 1 and len(bands) == 1 else None  # said once, so the legend is narrow
    for number, (name, members) in enumerate(curves.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        style = "-" if number < len(_COLOURS) else "--"
        for curve in members:
            if curve and len(members) > 1:
                axes.plot(*zip(*curve.items(), strict=True), color=colour, linewidth=0.7, alpha=0.35)
        found = summarize_steps(members, metric)
        marker = "o" if len(found) <= 40 else ""
        many = f"{len(members)} seed{'s' if len(members) > 1 else ''}"
        many += "" if title_of_bands else f", {_BANDS.get(len(members), _INTERVAL)}"
        label = f"{name} ({many})" if name else f"mean of {many}" if len(members) > 1 else many
        steps = list(found)
        axes.plot(steps, [found[step]["mean"] for step in steps], style, color=colour, linewidth=2, marker=marker,
                  markersize=3, label=label)  # fmt: skip
        if len(members) > 1:
            bounds = [_band(members, step, found[step]) for step in steps]
            axes.fill_between(steps, *zip(*bounds, strict=True), color=colour, alpha=0.18, linewidth=0)
    # The axis shows the runs and their means: the band of a few seeds may be many times as high.
    values = [value for members in curves.values() for curve in members for value in curve.values()]
    margin = 0.15 * (max(values) - min(values)) or 0.05 * abs(mean(values)) or 0.05
    axes.set_ylim(min(values) - margin, max(values) + margin)
    count_steps(axes)
    axes.set_xlabel(f"step (means of {width} steps)" if width > 1 else "step")
    axes.set_ylabel(metric)
    columns = 1 if len(bands) > 1 else min(3, len(curves))
    axes.legend(
        frameon=False, fontsize=9, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=columns,
        title=title_of_bands, title_fontsize=9,
    )  # fmt: skip
    return figure
