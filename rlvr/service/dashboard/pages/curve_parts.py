"""Curves on a page: the form that chooses what is shown of them, and the charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlvr.service.dashboard.curve_view import LOGS, WINDOWS, CurveView
from rlvr.service.dashboard.dashboard_data import Chart
from rlvr.service.dashboard.element_tree import Tree, h
from rlvr.service.dashboard.pages import page_parts as parts

CSV = "/ui/curves.csv"


def curve_section(
    path: str, query: Mapping[str, str], charts: Sequence[Chart], view: CurveView, metric: str, metrics: list[str]
) -> Tree | None:
    """The charts of a page, which lies at `path` with the parameters `query`. The form makes an address of it."""
    if not charts and not view.query() and not metrics:
        return None
    kept = {**query, **({"metric": metric} if metric else {})}
    part = {name: value for name, value in view.query().items() if name not in ("from", "to")}
    zoom = parts.address(path, **kept, **part)
    zoom += "&" if "?" in zoom else "?"
    shown = [
        replace(one, zoom=zoom, csv=parts.address(CSV, page=path, title=one.title, **kept, **view.query()))
        for one in charts
    ]
    windows = {str(window): f"mean of {window} steps" for window in WINDOWS}
    given = view.query()
    return h(
        "section",
        h("h2", "Curves"),
        h(
            "form",
            [h("input", type="hidden", name=name, value=value) for name, value in query.items()],
            parts.select_field("metric", "One more metric", metric, metrics, "none"),
            parts.select_field("smooth", "Smoothing", given.get("smooth", ""), windows, "none"),
            parts.select_field("log", "Axes", given.get("log", ""), LOGS, "linear"),
            parts.text_field("from", "From step", given.get("from", ""), inputmode="numeric", placeholder="first"),
            parts.text_field("to", "To step", given.get("to", ""), inputmode="numeric", placeholder="last"),
            h("div", h("button", "Draw", class_="main"),
              h("a", "All steps", href=parts.address(path, **kept, **part), class_="button")
              if "from" in given or "to" in given else None, class_="rate"),
            method="get", action=path, class_="filters panel", aria_label="What the curves show",
        ),
        h("div", [parts.chart(one) for one in shown], class_="charts") if shown
        else h("p", "No number lies in this part of the steps.", class_="panel empty", role="status"),
        class_="stack", id="curves",
    )  # fmt: skip
