"""Curves on a page: what the form chooses of them, and the charts with the addresses of their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rlvr.service.dashboard.curve_view import LOGS, WINDOWS, CurveView
from rlvr.service.dashboard.dashboard_data import Chart
from rlvr.service.dashboard.pages import page_parts as parts

CSV = "/ui/curves.csv"


@dataclass(frozen=True)
class CurveSection:
    """The charts of the page at `path` with the parameters `query`, and the values of the form above them.
    `all_steps` is the address without a part of the steps, if one was chosen."""

    path: str
    query: Mapping[str, str]
    charts: Sequence[Chart]
    given: Mapping[str, str]
    metric: str
    metrics: Sequence[str]
    all_steps: str
    windows: Mapping[str, str]
    logs: Mapping[str, str]


def curve_section(
    path: str, query: Mapping[str, str], charts: Sequence[Chart], view: CurveView, metric: str, metrics: list[str]
) -> CurveSection | None:
    given = view.query()
    if not charts and not given and not metrics:
        return None
    kept = {**query, **({"metric": metric} if metric else {})}
    whole = parts.address(path, **kept, **{name: value for name, value in given.items() if name not in ("from", "to")})
    zoom = whole + ("&" if "?" in whole else "?")
    shown = [replace(one, zoom=zoom) for one in link_files(charts, path, **kept, **given)]
    windows = {str(window): f"mean of {window} steps" for window in WINDOWS}
    all_steps = whole if given.keys() & {"from", "to"} else ""
    return CurveSection(parts.address(path), query, shown, given, metric, metrics, all_steps, windows, LOGS)


def link_files(charts: Sequence[Chart], path: str, **query: str) -> list[Chart]:
    """The charts of a page with the addresses of their numbers."""
    return [replace(one, csv=parts.address(CSV, page=path, title=one.title, **query)) for one in charts]
