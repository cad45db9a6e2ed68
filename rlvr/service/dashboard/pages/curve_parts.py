"""Curves on a page: what the form chooses of them, and the charts with the addresses of their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlvr.service.dashboard.curve_view import LOGS, WINDOWS, CurveView
from rlvr.service.dashboard.dashboard_data import Chart
from rlvr.service.dashboard.pages import page_parts as parts

CSV = "/ui/curves.csv"


def curve_section(
    path: str, query: Mapping[str, str], charts: Sequence[Chart], view: CurveView, metric: str, metrics: list[str]
) -> dict[str, Any] | None:
    """The charts of the page at `path` with the parameters `query`, and what the form above them has and offers.
    `all_steps` is the address without a part of the steps, if one was chosen."""
    given = view.query()
    if not charts and not given and not metrics:
        return None
    kept = {**query, **({"metric": metric} if metric else {})}
    whole = parts.address(path, **kept, **{name: value for name, value in given.items() if name not in ("from", "to")})
    zoom = whole + ("&" if "?" in whole else "?")
    return {
        "charts": [replace(one, zoom=zoom) for one in link_files(charts, path, **kept, **given)], "query": query,
        "path": parts.address(path), "given": given, "metric": metric, "metrics": metrics, "logs": LOGS,
        "windows": {str(window): f"mean of {window} steps" for window in WINDOWS},
        "all_steps": whole if given.keys() & {"from", "to"} else "",
    }  # fmt: skip


def link_files(charts: Sequence[Chart], path: str, **query: str) -> list[Chart]:
    """The charts of a page with the addresses of their numbers."""
    return [replace(one, csv=parts.address(CSV, page=path, title=one.title, **query)) for one in charts]
