"""The results of a study for people: its table, and the files `summary.json`, `table.md` and `study.png`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlvr.core.files import write_atomic
from rlvr.studies.seed_statistics import FEWEST_FOR_POWER, MOST_SEEDS
from rlvr.studies.study_summary import describe_versions
from rlvr.tracking import readable
from rlvr.tracking.picture_files import begin_figure, can_draw, write_figure
from rlvr.tracking.run_report import duration, format_rate

# Two colours that colour-blind readers tell apart (Okabe and Ito); hollow and filled markers say the same.
BEFORE, AFTER = "#d55e00", "#0072b2"
_GREY = "#555555"
_ROW, _TALLEST = 0.17, 30.0  # inches: of a row, and of the picture


def write_report(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write `summary.json`, `table.md` and, once a run is finished, `study.png`, where pictures can be drawn."""
    write_atomic(folder / "summary.json", json.dumps(_round(summary), indent=1) + "\n")
    picture = ""
    if can_draw() and any(variant["finished"] for variant in summary["variants"]):
        plot_study(summary, folder / "study.png")
        picture = "\n![Pass rate of each seed before and after](study.png)\n"
    text = f"# {summary['study']}\n\n```text\n{study_table(summary)}\n```\n{picture}"
    write_atomic(folder / "table.md", text)


def statistics_rows(summary: Mapping[str, Any]) -> list[list[Sequence[str]]]:
    """The spread over the seeds, variant by variant, then the comparisons with the first variant: parts of rows, the
    first of them the head. A row of one cell is a title or a sentence."""
    variants, compared = summary["variants"], summary["comparisons"]
    parts: list[list[Sequence[str]]] = [
        [("pass@1", "Mean [95% over seeds]", "Min to max", "SD over seeds")],
        [row for variant in variants for row in _variant_rows(variant, summary["runs"])],
        *([*_comparison_rows(comparison)] for comparison in compared),
    ]
    if len(compared) > 1:
        parts[-1].append((f"p-values are not corrected for the number of comparisons ({len(compared)})",))
    return parts


def study_table(summary: Mapping[str, Any]) -> str:
    """The statistics over the seeds, then every run."""
    variants, runs = summary["variants"], summary["runs"]
    finished = [run for run in runs if run["state"] == "finished"]
    body = [
        *statistics_rows(summary),
        [("Run", "Before [95% over tasks]", "After [95% over tasks]", "Time")],
        [row for variant in variants for row in _run_rows(variant["variant"], runs, len(variants) > 1)],
    ]
    rows = [cells for part in body for cells in part if len(cells) > 1]
    widths = [22, 24, 24, 12, 0]  # at least, as in the final table of a run
    widths = [max([w, *(len(row[i]) + 2 for row in rows if i < len(row))]) for i, w in enumerate(widths)]
    rule, thin = "=" * (sum(widths) - 2), "-" * (sum(widths) - 2)
    seeds = f"{len(summary['seeds'])} seed{'s' if len(summary['seeds']) > 1 else ''}"
    lines = [rule, f"STUDY {summary['study']}: {seeds}, {len(finished)} of {len(runs)} runs finished", rule]
    for part in body:
        lines += [_row(cells, widths) for cells in part]
        lines.append(thin)
    return "\n".join([*lines, *_footer(finished), rule])


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Cells in their columns; a single one is a title or sentence and may go over all of them."""
    if len(cells) == 1:
        return readable(cells[0], None)
    return "".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=False)).rstrip()


def _variant_rows(variant: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    count = f"{variant['finished']} finished run{'s' if variant['finished'] > 1 else ''}"
    yield (f"{variant['variant']} ({variant['finished']} of {variant['runs']} runs finished)",)
    if not variant["finished"]:
        yield ("  no run is finished: no statistics",)
        return
    for side in ("before", "after"):
        yield (f"  {side}", *_spread_cells(variant[side]))
        for group, word in (("by_level", "level"), ("watched", "watched")):
            for name, sides in variant[group].items():
                yield (f"    {word} {name}", *_spread_cells(sides[side]))
    if variant["finished"] > 1:
        yield ("  after minus before", *_difference_cells(variant["gain"]))
    seconds = variant["seconds"]
    yield ("  time", duration(seconds["mean"]), f"{duration(seconds['least'])} to {duration(seconds['most'])}")
    codes = Counter(code for run in runs if run["variant"] == variant["variant"] for code in _alarm_codes(run))
    listed = ", ".join(f"{code} ({number})" for code, number in codes.most_common())
    yield (f"  alarms in {variant['runs_with_alarms']} of {count}" + (f": {listed}" if listed else ""),)
    if variant["finished"] == 1:
        yield ("  one seed: no interval. Another seed may end elsewhere; give more seeds",)
    elif variant["finished"] < variant["runs"]:
        yield (f"  the statistics are over the {count}",)


def _spread_cells(result: Mapping[str, Any]) -> tuple[str, ...]:
    if result["n"] == 1:
        return f"{_percent(result['mean'])} (no interval)", "", ""
    if result["sd"] == 0:  # an interval without width would look certain
        return f"{_percent(result['mean'])} (all equal)", "", "0.0pp"
    interval = f"{_percent(result['mean'])} [{100 * result['low']:.1f}, {100 * result['high']:.1f}]"
    return interval, f"{_percent(result['least'])} to {_percent(result['most'])}", f"{100 * result['sd']:.1f}pp"


def _comparison_rows(comparison: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    yield (f"{comparison['variant']} minus {comparison['reference']}, seed by seed",)
    for side in ("before", "after"):
        result = comparison[side]
        n = result["n"]
        if n < 2:
            only = f" {_points(result['mean'])} with" if n else ""
            yield (f"  {side}:{only} {n or 'no'} seed finished in both: no interval, no test",)
            continue
        yield (f"  {side} ({n} seeds)", *_difference_cells(result))
        for sentence in judge_comparison(result):
            yield (f"    {sentence}",)


def _difference_cells(result: Mapping[str, Any]) -> tuple[str, ...]:
    """Of differences over at least two seeds."""
    interval = f"{_points(result['mean'])} [{100 * result['low']:+.1f}, {100 * result['high']:+.1f}]"
    if result["sd"] == 0:
        interval = f"{_points(result['mean'])} (all equal)"
    span = f"{_points(result['least'])} to {_points(result['most'])}"
    return interval, span, f"{100 * result['sd']:.1f}pp", f"p = {result['p_value']:.4f}"


def judge_comparison(result: Mapping[str, Any]) -> list[str]:
    """What a comparison of at least two seeds does not show, and how many seeds it would take."""
    n, sentences = result["n"], list[str]()
    if result["sd"] == 0 and result["mean"] == 0:
        return ["equal for every seed"]
    if result["sd"] > 0 and result["low"] <= 0 <= result["high"]:
        sentences.append(f"The interval contains 0: the spread over {n} seeds is too wide to tell the two apart.")
        if n < FEWEST_FOR_POWER:
            sentences.append(f"{n} seeds are too few to say how many would: give {FEWEST_FOR_POWER} or more.")
            return sentences
        detectable = result["detectable"]
        needed = f"About {result['seeds_needed']}" if result["seeds_needed"] else f"More than {MOST_SEEDS:,}"
        sentences.append(
            f"{needed} seeds would show a difference of this size (with 80% chance, if this spread is the true one); "
            f"{n} seeds show one of {f'{100 * detectable:.1f}pp or more' if detectable < 1 else 'no less than 100pp'}."
        )
    if result["least_p"] > 0.05:
        sentences.append(f"With {n} seeds p cannot be below {result['least_p']:.4g}.")
    return sentences


def _run_rows(variant: str, runs: Sequence[Mapping[str, Any]], has_title: bool) -> Iterator[tuple[str, ...]]:
    if has_title:
        yield (variant,)
    for run in runs:
        if run["variant"] != variant:
            continue
        name = f"{'  ' if has_title else ''}seed {run['seed']}"
        if run["state"] != "finished":
            reason = f": {readable(run['reason'], 200)}" if run.get("reason") else ""
            yield (f"{name}  {run['state']}{reason}",)
            continue
        alarms = ", ".join(_alarm_codes(run))
        before, after = format_rate(run["before"]), format_rate(run["after"])
        yield (name, before, after, duration(run["seconds"]), f"alarms: {alarms}" if alarms else "finished")


def _alarm_codes(run: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(alarm["code"] for alarm in run.get("alarms", ())))


def _footer(finished: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    sizes = {(run["tasks"], run["samples"]) for run in finished}
    tasks = "; ".join(f"{tasks:,} held-out tasks x {samples} samples" for tasks, samples in sorted(sizes))
    yield f"{tasks + '; ' if tasks else ''}[95% over seeds]: Student's t; p: sign flips of the differences"
    for control in sorted({run["control"] for run in finished} - {"none", None}):
        yield f"CONTROL RUNS ({control}): training did not use the verifier's verdicts"
    if versions := describe_versions((run.get("machine") or {}).get("rlvr") for run in finished):
        yield versions


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _points(difference: float) -> str:
    return f"{100 * difference:+.1f}pp"


def _round(value: Any) -> Any:
    """The value with floats of 6 significant digits: the file is to be read and committed."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _round(child) for key, child in value.items()}
    return [_round(child) for child in value] if isinstance(value, (list, tuple)) else value


def plot_study(summary: Mapping[str, Any], path: Path) -> None:
    """Write the picture as PNG. Variants stand below each other; runs that are not finished are left out."""
    finished = [run for run in summary["runs"] if run["state"] == "finished"]
    variants = [variant for variant in summary["variants"] if variant["finished"]]
    rows = len(finished) + 4 * len(variants)
    title = f"{summary['study']}: {len(finished)} of {len(summary['runs'])} runs"
    figure, axes = begin_figure(title, min(_TALLEST, 1.5 + _ROW * rows))
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
    axes.grid(False, axis="y")
    axes.spines["left"].set_visible(False)
    figure.legend(loc="outside upper right", ncols=len(markers), frameon=False, fontsize=8)
    write_figure(figure, path)
