"""The overview of all runs or sessions, and the page of one: its state, numbers and curves."""

from __future__ import annotations

from collections.abc import Mapping

from rlvr.service.dashboard.dashboard_data import PAGE, AnswerRow, Note, Query, Source
from rlvr.service.dashboard.element_tree import Page, Tree, h
from rlvr.service.dashboard.pages import page_parts
from rlvr.service.dashboard.pages import page_parts as parts

FEW = 8  # answers on a work's page; the table has all


def overview(source: Source, parameters: Mapping[str, str]) -> Page:
    offset = (parts.page_number(parameters) - 1) * PAGE
    works, total = source.works(offset)
    if source.noun == "run" and total == 1 and works:  # `rlvr view` of one run
        return work_page(source, {**parameters, "work": works[0].id}, "Overview")
    listed = h("ul", [parts.work_card(source, work) for work in works], class_="works") if works else _no_works(source)
    noun = f"{source.noun}s"
    return parts.frame_page(
        source,
        "Overview",
        "Overview",
        h("div", h("h1", source.title), h("p", f"{total:,} {noun}" if total != 1 else f"1 {source.noun}",
                                          class_="dim"), class_="head"),
        _health(source),
        page_parts.charts(source.charts()) or (h("p", source.no_charts or None, class_="dim") if works else None),
        h("section", h("h2", noun.capitalize()), listed, parts.pager("/", {}, offset, len(works), total),
          aria_label=noun.capitalize()),
    )  # fmt: skip


def work_page(source: Source, parameters: Mapping[str, str], here: str = "") -> Page:
    name, metric = parameters.get("work", ""), parameters.get("metric", "")
    work = source.work(name)
    if work is None:
        return parts.not_found_page(source, source.noun, name)
    page = source.answers(Query(work=name, limit=FEW * 8))
    latest = first_of_each_group(page.rows)
    more = h("a", f"All {page.total:,} trajectories", href=parts.address("/ui/trajectories", work=name))
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
        [note(one) for one in source.notes(name)],
        [h("section", h("h2", title), parts.block(text), class_="panel") for title, text in source.texts(name)],
        [page_parts.comparison(one) for one in source.comparisons(name)],
        page_parts.charts(source.charts(name, metric)),
        _any_metric(source, name, metric),
        h("section", h("h2", "Latest trajectories"),
          parts.answers_table(source, latest, False, f"Latest trajectories of {work.name}") if latest
          else h("p", "No answers are stored.", class_="empty"),
          h("p", more) if page.total > len(latest) else None, class_="panel"),
    )  # fmt: skip


def first_of_each_group(rows: list[AnswerRow]) -> list[AnswerRow]:
    """The newest answers, one of each group: eight answers to one prompt would be alike."""
    first = {row.group or row.key: row for row in reversed(rows)}
    return [row for row in rows if first[row.group or row.key] is row][:FEW]


def note(one: Note) -> Tree:
    return h("div", h("b", one.text), h("span", one.remedy) if one.remedy else None, class_=f"note {one.kind}",
             role="status")  # fmt: skip


def _any_metric(source: Source, work: str, metric: str) -> Tree | None:
    """A form for any other metric, which becomes the first chart."""
    names = source.metrics(work)
    if not names:
        return None
    return h(
        "form", page_parts.select_field("metric", "Draw another metric", metric, names, "none"),
        h("button", "Draw"), method="get", action=page_parts.work_address(source, work), class_="filters panel",
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


def _no_works(source: Source) -> Tree:
    return h("p", f"No {source.noun} yet. New ones appear here by themselves.", class_="panel empty")
