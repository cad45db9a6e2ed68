"""Two runs, or two seeds, beside each other: result, what was set differently, curves, held-out tasks, findings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlvr.service.dashboard.curve_view import CurveView, Series
from rlvr.service.dashboard.dashboard_data import Chart
from rlvr.service.dashboard.heldout_changes import AFTER, BEFORE, HeldoutChanges
from rlvr.service.dashboard.pages import heldout_parts
from rlvr.service.dashboard.pages import page_parts as parts
from rlvr.service.dashboard.pages.curve_parts import curve_section
from rlvr.service.dashboard.pages.heldout_parts import Sides
from rlvr.service.dashboard.pages.page_parts import Cell, Page, Table
from rlvr.service.dashboard.run_charts import COMPARED, draw_charts, estimate, metric_chart
from rlvr.service.dashboard.run_differences import list_differences
from rlvr.service.dashboard.run_reader import RunReader
from rlvr.service.dashboard.run_source import RunSource
from rlvr.training.interim import PASS_RATE

PATH = "/ui/compare"


def compare_runs(source: RunSource, parameters: Mapping[str, str]) -> Page:
    chosen = dict(zip("ab", source.choose_pair(), strict=True))
    a, b = (parameters.get(name, "") or chosen[name] for name in "ab")
    if a == b and len(names := list(source.names())) > 1:  # one run was named, or none
        a = next(name for name in (chosen["a"], chosen["b"], *names) if name != b)
    runs = [source.run(name) for name in (a, b)]
    for name, run in zip((a, b), runs, strict=True):
        if run is None:
            return parts.not_found_page(source, source.noun, name)
    first, second = (run for run in runs if run is not None)
    metric, view = parameters.get("metric", ""), CurveView.of(parameters)
    sides: Sides = ((a, AFTER), (b, AFTER))
    changes = source.changes(*sides)
    query = {"a": a, "b": b}
    metrics = sorted({*first.metric_names(), *second.metric_names()})
    charts = draw_charts(comparison_series(source, a, b, metric), view)
    data = {
        "a": a, "b": b, "names": source.names(), "exchanged": parts.address(PATH, a=b, b=a),
        **_result(source, first, second, changes, sides), **_differences(first, second),
        "tasks": heldout_parts.list_changed(changes, sides, {}),
        "curves": curve_section(PATH, query, charts, view, metric, metrics),
        "findings": [(run.name, [one for one in run.notes() if one.kind != "note"]) for run in (first, second)],
    }  # fmt: skip
    return Page(source, f"{a} and {b}", "compare_runs.html", data, "Compare")


def comparison_series(source: RunSource, a: str, b: str, metric: str) -> list[tuple[Chart, list[Series]]]:
    """A chart a metric, both runs in each."""
    names = dict.fromkeys((metric, *COMPARED) if metric else COMPARED)
    return [(metric_chart(name), source.run_series(name, (a, b))) for name in names]


def _result(
    source: RunSource, first: RunReader, second: RunReader, changes: HeldoutChanges | None, sides: Sides
) -> dict[str, Any]:
    """Both runs before and after, then the paired difference over the tasks of both."""
    rows: list[list[Cell | str]] = []
    for run in (first, second):
        rates = [evaluation.intervals()["pass@1"] if (evaluation := run.evaluation(stage)) else None
                 for stage in (BEFORE, AFTER)]  # fmt: skip
        work = run.work()
        rows.append([Cell(run.name, parts.work_address(source, run.name)), Cell(badge=work.status, is_live=work.live),
                     work.about, *(estimate(rate, "pass@1") for rate in rates)])  # fmt: skip
    columns = [("State", ""), ("Steps", ""), ("Held-out before", ""), ("Held-out after", "")]
    data: dict[str, Any] = {
        "runs": Table(columns, rows, "Both runs", "Run"),
        "why": "",
        "verdict": None,
        "tables": None,
    }
    if changes is None or not changes.tasks:
        why = "no task is held out in both" if changes else "one of the runs has no evaluation at its end yet"
        data["why"] = f"There is no paired difference: {why}. Their settings and curves are below."
    else:
        data |= {
            "verdict": heldout_parts.describe_change(changes.whole, sides), "apart": changes.apart,
            "solved": _count_solved(changes, first.name, second.name),
            "tables": heldout_parts.tabulate_parts(changes, sides),
        }  # fmt: skip
    return {**data, "parting": _find_parting(first, second)}


def _count_solved(changes: HeldoutChanges, first: str, second: str) -> str:
    """How many tasks each run passes more often than not."""
    solved = [tuple(2 * passed >= judged for passed, judged in (task.before, task.after)) for task in changes.tasks]
    both, one, other = (solved.count(pair) for pair in ((True, True), (True, False), (False, True)))
    neither = len(solved) - both - one - other
    return (
        f"Tasks that pass at least every second time: {both:,} under both, {one:,} under {first} alone, {other:,} "
        f"under {second} alone, {neither:,} under neither."
    )


def _find_parting(first: RunReader, second: RunReader) -> str | None:
    """From which step on the held-out intervals of both runs are apart."""
    lines = [run.series(PASS_RATE) for run in (first, second)]
    ends = [
        {float(x): (low, high) for x, low, high in zip(line.x, line.low, line.high, strict=True)}
        for line in lines if line is not None and line.low is not None and line.high is not None
    ]  # fmt: skip
    if len(ends) < 2 or not (common := sorted(ends[0].keys() & ends[1].keys())):
        return None
    apart = [ends[0][x][1] < ends[1][x][0] or ends[1][x][1] < ends[0][x][0] for x in common]
    if not any(apart):
        return "In no interim evaluation are their held-out intervals apart."
    begin = next(place for place in range(len(apart)) if apart[place])
    text = f"Their held-out intervals first lie apart after step {common[begin]:,.0f}"
    return f"{text} and stay so." if all(apart[begin:]) else f"{text}, and touch again later."


def _differences(first: RunReader, second: RunReader) -> dict[str, Any]:
    """What was set differently, by group."""
    if not first.config() or not second.config():
        said = "One of the runs has no resolved.yaml, so settings cannot be compared."
        return {"differ": said, "differences": None}
    found = list_differences(first, second)
    keys = [one.key for one in found if one.group != "code and machine"]
    others = [one.key for one in found if one.group == "code and machine"]
    if not keys:
        said = "Every setting is equal, the seed too."
    elif keys == ["seed"]:
        said = "Of the settings only the seed differs."
    else:
        number = "One setting differs" if len(keys) == 1 else f"{len(keys):,} settings differ"
        said = f"{number}{'' if 'seed' in keys else '; the seed is the same'}."
    if others:
        said += f" The code or the machine differs too ({', '.join(others[:4])}), and may be a cause."
    elif first.machine() and second.machine():
        said += " Code, libraries and machine are the same"
        said += ": what sets the runs apart is chance." if keys == ["seed"] else "."
    rows = [[one.key, one.group, one.first, one.second] for one in found[:300]]
    columns = [("Kind", ""), (first.name, "mono"), (second.name, "mono")]
    return {"differ": said, "differences": Table(columns, rows, "Differences", "Key") if rows else None}
