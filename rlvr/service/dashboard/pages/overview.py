"""The first page: is it healthy, what is going on, does it learn. Exercised by tests/test_dashboard_pages.py."""

from __future__ import annotations

from collections.abc import Mapping

from rlvr.service.dashboard.data import PAGE, Source
from rlvr.service.dashboard.pages import parts
from rlvr.service.dashboard.pages.parts import address, badge, figures, framed, work_card
from rlvr.service.dashboard.pages.work import work_page
from rlvr.service.dashboard.tree import Page, Tree, h


def overview(source: Source, asked: Mapping[str, str]) -> Page:
    offset = (page_number(asked) - 1) * PAGE
    works, total = source.works(offset)
    if source.noun == "run" and total == 1 and works:  # `rlvr view` of one run: this is what it is about
        return work_page(source, {**asked, "work": works[0].id}, "Overview")
    listed = h("ul", [work_card(source, work) for work in works], class_="works") if works else _nothing(source)
    noun = f"{source.noun}s"
    return framed(
        source,
        "Overview",
        "Overview",
        h("div", h("h1", source.title), h("p", f"{total:,} {noun}" if total != 1 else f"1 {source.noun}",
                                          class_="dim"), class_="head"),
        _health(source),
        parts.charts(source.charts()),
        h("section", h("h2", noun.capitalize()), listed, pager("/", {}, offset, len(works), total),
          aria_label=noun.capitalize()),
    )  # fmt: skip


def page_number(asked: Mapping[str, str]) -> int:
    text = asked.get("page", "")
    return max(1, int(text)) if text.isdecimal() and len(text) < 7 else 1


def pager(path: str, query: Mapping[str, object], offset: int, shown: int, total: int) -> Tree | None:
    """Where one is among `total`, and the ways on and back."""
    page = offset // PAGE + 1
    if total <= PAGE and page == 1:
        return None
    older = h("a", "Older", href=address(path, **query, page=page + 1), class_="button", rel="next")
    newer = h("a", "Newer", href=address(path, **query, page=page - 1 if page > 2 else ""), class_="button", rel="prev")
    where = f"{offset + 1:,} to {offset + shown:,} of {total:,}" if shown else f"page {page:,} is beyond the end"
    return h(
        "nav", newer if page > 1 else None, h("span", where, class_="dim"),
        older if offset + shown < total and shown else None, class_="pager", aria_label="Pages",
    )  # fmt: skip


def _health(source: Source) -> Tree | None:
    health = source.health()
    if health is None:
        return None
    state = str(health.get("state", ""))
    told = [str(health[key]) for key in ("name", "detail") if health.get(key)]
    numbers = {str(name): str(value) for name, value in dict(health.get("figures") or {}).items()}
    return h(
        "section", h("h2", "Generator"),
        h("div", badge(state), *[h("span", text) for text in told], class_="head"),
        figures(numbers) if numbers else None, class_="panel", aria_label="Generator",
    )  # fmt: skip


def _nothing(source: Source) -> Tree:
    return h("p", f"No {source.noun} yet. What happens next appears here by itself.", class_="panel empty")
