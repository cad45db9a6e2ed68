"""One run or session: where it stands, what its numbers say, its curves. Exercised by tests/test_dashboard_pages.py."""

from __future__ import annotations

from collections.abc import Mapping

from rlvr.service.dashboard.data import Entry, Note, Query, Source
from rlvr.service.dashboard.pages import parts
from rlvr.service.dashboard.pages.parts import address, ago, answers_table, badge, block, figures, framed, missing
from rlvr.service.dashboard.tree import Page, Tree, h

FEW = 8  # answers that are shown here; the table has all


def work_page(source: Source, asked: Mapping[str, str], here: str = "") -> Page:
    name, metric = asked.get("work", ""), asked.get("metric", "")
    work = source.work(name)
    if work is None:
        return missing(source, source.noun, name)
    found = source.entries(Query(work=name, limit=FEW * 8))
    latest = one_of_each(found.entries)
    more = h("a", f"All {found.total:,} trajectories", href=address("/ui/trajectories", work=name))
    return framed(
        source,
        work.name,
        here,
        h("div", h("h1", work.name), badge(work.status, work.live), h("span", work.about, class_="dim"),
          h("span", ago(work.changed), class_="dim"),
          h("a", f"Compare two {source.step_noun}s", href=address("/ui/compare", work=name), class_="end"),
          class_="head"),
        h("section", h("progress", value=str(work.done), max="1", aria_label="progress") if work.done else None,
          figures(work.figures), class_="panel", aria_label="Latest numbers") if work.figures else None,
        [note(one) for one in source.notes(name)],
        [h("section", h("h2", title), block(text), class_="panel") for title, text in source.texts(name)],
        [parts.comparison(one) for one in source.comparisons(name)],
        parts.charts(source.charts(name, metric)),
        _any_metric(source, name, metric),
        h("section", h("h2", "Latest trajectories"),
          answers_table(source, latest, False, f"Latest trajectories of {work.name}") if latest
          else h("p", "No answers are kept here.", class_="empty"),
          h("p", more) if found.total > len(latest) else None, class_="panel"),
    )  # fmt: skip


def one_of_each(entries: list[Entry]) -> list[Entry]:
    """The newest answers, of every group only the first: eight answers to one prompt tell little."""
    first = {entry.group or entry.key: entry for entry in reversed(entries)}
    return [entry for entry in entries if first[entry.group or entry.key] is entry][:FEW]


def note(one: Note) -> Tree:
    return h("div", h("b", one.text), h("span", one.remedy) if one.remedy else None, class_=f"note {one.kind}",
             role="status")  # fmt: skip


def _any_metric(source: Source, work: str, metric: str) -> Tree | None:
    """A form that draws any other metric; it becomes the first chart of this page."""
    names = source.metrics(work)
    if not names:
        return None
    return h(
        "form", parts.select_field("metric", "Draw another metric", metric, names, "none"),
        h("button", "Draw"), method="get", action=parts.work_address(source, work), class_="filters panel",
    )  # fmt: skip
