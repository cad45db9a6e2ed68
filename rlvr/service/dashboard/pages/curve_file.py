"""The numbers behind a chart as CSV: of runs every step, not thinned and not smoothed; else the points of the chart."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from urllib.parse import unquote

from rlvr.service.dashboard.curve_view import CurveView, Series
from rlvr.service.dashboard.dashboard_data import Chart, Source
from rlvr.service.dashboard.pages.compare_page import PATH, comparison_series
from rlvr.service.dashboard.pages.study_page import seed_series, study_series
from rlvr.service.dashboard.run_source import RunSource

_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet would compute


def curve_file(source: Source, parameters: Mapping[str, str]) -> tuple[str, str] | None:
    """(the name of the file, its text) of the chart `title` on the page at `page`; None if there is none."""
    title, view = parameters.get("title", ""), CurveView.of(parameters)
    found = next((found for found in _read_page(source, parameters) if found[0].title == title), None)
    if found is None:
        return None
    chart, lines = found
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", title).strip("-").lower() or "curves"
    return f"{name}.csv", write_csv([view.crop(line) for line in lines], chart.x.split()[0])


def _read_page(source: Source, parameters: Mapping[str, str]) -> Sequence[tuple[Chart, Sequence[Series]]]:
    """The charts of a page with their series."""
    page, metric = parameters.get("page", ""), parameters.get("metric", "")
    match = re.fullmatch(r"/ui/([a-z]+)/(.+)", page)
    kind, name = (match[1], unquote(match[2])) if match else ("", "")
    if isinstance(source, RunSource):
        if page == "/":
            return source.overview_series()
        if page == PATH:
            return comparison_series(source, parameters.get("a", ""), parameters.get("b", ""), metric)
        if kind == "run" and (run := source.run(name)) is not None:
            return run.chart_series(metric)
        if kind == "study" and (study := source.study(name)) is not None:
            return [*study_series(source, study, metric), *seed_series(study)]
    elif page == "/" or kind == source.noun:
        return [(chart, [Series.of(curve) for curve in chart.lines]) for chart in source.charts(name)]
    return []


def write_csv(lines: Sequence[Series], axis: str = "step") -> str:
    """A row a step, or what else the axis counts; a column a series, and two more for its interval if it has one."""
    columns: dict[str, dict[float, float]] = {}
    for line in lines:
        for name, values in (("", line.y), (" low", line.low), (" high", line.high)):
            if values is not None:
                columns[f"{line.name or 'value'}{name}"] = dict(zip(line.x.tolist(), values.tolist(), strict=True))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([axis, *(f"'{name}" if name.startswith(_FORMULA) else name for name in columns)])
    for step in sorted({step for column in columns.values() for step in column}):
        writer.writerow([f"{step:g}", *(repr(column[step]) if step in column else "" for column in columns.values())])
    return text.getvalue()
