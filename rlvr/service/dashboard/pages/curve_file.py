"""The numbers behind a chart as CSV: every step, not thinned and not smoothed."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from urllib.parse import unquote

from rlvr.service.dashboard.curve_view import CurveView, Series
from rlvr.service.dashboard.dashboard_data import Chart, Source
from rlvr.service.dashboard.pages.run_comparison import PATH, comparison_series
from rlvr.service.dashboard.pages.study_page import study_series
from rlvr.service.dashboard.run_source import RunSource

_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet would compute


def curve_file(source: Source, parameters: Mapping[str, str]) -> tuple[str, str] | None:
    """(the name of the file, its text) of the chart `title` on the page at `page`; None if there is none."""
    if not isinstance(source, RunSource):
        return None
    title, view = parameters.get("title", ""), CurveView.of(parameters)
    lines = next((lines for chart, lines in _read_page(source, parameters) if chart.title == title), None)
    if lines is None:
        return None
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", title).strip("-").lower() or "curves"
    return f"{name}.csv", write_csv([view.crop(line) for line in lines])


def _read_page(source: RunSource, parameters: Mapping[str, str]) -> Sequence[tuple[Chart, Sequence[Series]]]:
    page, metric = parameters.get("page", ""), parameters.get("metric", "")
    if page == PATH:
        return comparison_series(source, parameters.get("a", ""), parameters.get("b", ""), metric)
    match = re.fullmatch(r"/ui/(run|study)/(.+)", page)
    name = unquote(match[2]) if match else ""
    if match and match[1] == "run" and (run := source.run(name)) is not None:
        return run.chart_series(metric)
    if match and match[1] == "study" and (study := source.study(name)) is not None:
        return study_series(source, study, metric)
    return []


def write_csv(lines: Sequence[Series]) -> str:
    """A row a step, a column a series, and two more for its interval where it has one."""
    columns: dict[str, dict[float, float]] = {}
    for line in lines:
        for name, values in (("", line.y), (" low", line.low), (" high", line.high)):
            if values is not None:
                columns[f"{line.name or 'value'}{name}"] = dict(zip(line.x.tolist(), values.tolist(), strict=True))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["step", *(f"'{name}" if name.startswith(_FORMULA) else name for name in columns)])
    for step in sorted({step for column in columns.values() for step in column}):
        writer.writerow([f"{step:g}", *(repr(column[step]) if step in column else "" for column in columns.values())])
    return text.getvalue()
