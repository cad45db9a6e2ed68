"""The overview of all runs or sessions, and the page of one: its state, numbers and curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlvr.service.dashboard.dashboard_data import PAGE, Source, Work
from rlvr.service.dashboard.element_tree import Page, Tree, h
from rlvr.service.dashboard.pages import page_parts as parts
from rlvr.service.dashboard.pages.rollouts_page import latest_rollouts
from rlvr.service.dashboard.pages.run_page import run_page
from rlvr.service.dashboard.pages.sessions_page import DEFAULT, session_table
from rlvr.service.dashboard.pages.study_page import study_list, study_page
from rlvr.service.dashboard.run_source import RunSource
from rlvr.service.dashboard.session_source import StoreSource


def overview(source: Source, parameters: Mapping[str, str]) -> Page:
    offset = (parts.page_number(parameters) - 1) * PAGE
    works, total = source.works(offset)
    if isinstance(source, RunSource):
        if total == 1 and works and not source.studies():  # `rlvr view` of one run
            return run_page(source, {**parameters, "work": works[0].id}, "Overview")
        if len(source.studies()) == 1 and not source.studies()[0].prefix:  # of the folder of a study
            return study_page(source, {**parameters, "study": source.studies()[0].name}, "Overview")
    listed = _list(source, works, offset)
    noun = f"{source.noun}s"
    return parts.frame_page(
        source,
        "Overview",
        "Overview",
        h("div", h("h1", source.title), h("p", f"{total:,} {noun}" if total != 1 else f"1 {source.noun}",
                                          class_="dim"), class_="head"),
        _health(source),
        parts.charts(source.charts()) or (h("p", source.no_charts or None, class_="dim") if works else None),
        study_list(source) if isinstance(source, RunSource) else None,
        h("section", h("h2", noun.capitalize()), listed, parts.pager("/", {}, offset, len(works), total),
          aria_label=noun.capitalize()) if works or not isinstance(source, RunSource) else None,
    )  # fmt: skip


def _list(source: Source, works: Sequence[Work], offset: int) -> Tree:
    """Runs as cards with their progress, sessions as the rows of a table."""
    if not works:
        return h("p", f"No {source.noun} yet. New ones appear here by themselves.", class_="panel empty")
    if isinstance(source, StoreSource):
        return h("div", session_table(source, source.sessions("", "", "", offset)[0], DEFAULT), class_="panel")
    return h("ul", [parts.work_card(source, work) for work in works], class_="works")


def work_page(source: Source, parameters: Mapping[str, str], here: str = "") -> Page:
    if isinstance(source, RunSource):
        return run_page(source, parameters, here)
    name = parameters.get("work", "")
    work = source.work(name)
    if work is None:
        return parts.not_found_page(source, source.noun, name)
    return parts.frame_page(
        source,
        work.name,
        here,
        h("div", h("h1", work.name), parts.badge(work.result or work.status, work.live),
          h("span", work.about, class_="dim"),
          h("span", parts.ago(work.changed), class_="dim"),
          h("a", f"Compare two {source.step_noun}s", href=parts.address("/ui/compare", work=name), class_="end")
          if source.can_compare else None,
          class_="head"),
        h("section", h("progress", value=str(work.done), max="1", aria_label="progress") if work.done else None,
          parts.figures(work.figures), class_="panel", aria_label="Latest numbers") if work.figures else None,
        [parts.note(one) for one in source.notes(name)],
        h("div", [h("section", h("h2", title), parts.block(text), class_="panel")
                  for title, text in source.texts(name)], class_="charts"),
        parts.charts(source.charts(name)),
        latest_rollouts(source, name),
    )  # fmt: skip


def _health(source: Source) -> Tree | None:
    health = source.health()
    if health is None:
        return None
    state = str(health.get("state", ""))
    details = [str(health[key]) for key in ("name", "detail") if health.get(key)]
    numbers = {str(name): str(value) for name, value in dict(health.get("figures") or {}).items()}
    return h(
        "section", h("h2", "Generator"),
        h("div", parts.badge(state), *[h("span", text) for text in details], class_="head"),
        parts.figures(numbers) if numbers else None, class_="panel", aria_label="Generator",
    )  # fmt: skip
