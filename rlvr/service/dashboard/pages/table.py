"""Every answer, by task, outcome, step and status; the address carries the filters. Exercised by
tests/test_dashboard_pages.py."""

from __future__ import annotations

from collections.abc import Mapping

from rlvr.service.dashboard.data import PAGE, Query, Source
from rlvr.service.dashboard.pages.overview import page_number, pager
from rlvr.service.dashboard.pages.parts import answers_table, framed, select_field, text_field, work_choices
from rlvr.service.dashboard.tree import Page, Tree, h

PATH = "/ui/trajectories"


def query_of(asked: Mapping[str, str]) -> Query:
    """What an address asks for; a step that is no number is no condition."""
    step = asked.get("step", "").strip()
    return Query(
        work=asked.get("work", ""),
        task=asked.get("task", "").strip(),
        outcome=asked.get("outcome", ""),
        status=asked.get("status", ""),
        step=int(step) if step.isdecimal() and len(step) < 10 else None,
        offset=(page_number(asked) - 1) * PAGE,
    )


def trajectories(source: Source, asked: Mapping[str, str]) -> Page:
    query = query_of(asked)
    found = source.entries(query)
    kept = {"work": query.work, "task": query.task, "outcome": query.outcome, "status": query.status,
            "step": query.step}  # fmt: skip
    some = "" if found.complete else " so far (older ones are still being read)"
    filtered = any(value not in ("", None) for value in kept.values())
    return framed(
        source,
        "Trajectories",
        "Trajectories",
        h("div", h("h1", "Trajectories"), h("p", f"{found.total:,}{' match' if filtered else ''}{some}",
                                            class_="dim", role="status"), class_="head"),
        _filters(source, query, filtered),
        h("section",
          answers_table(source, found.entries, not query.work, "Trajectories, newest first") if found.entries
          else h("p", "No trajectory matches." if filtered else "No trajectory yet.", class_="empty"),
          pager(PATH, kept, query.offset, len(found.entries), found.total), class_="panel"),
    )  # fmt: skip


def _filters(source: Source, query: Query, filtered: bool) -> Tree:
    known = source.choices(query.work)
    works = work_choices(source)
    first, last = known.steps or (0, 0)
    step = "" if query.step is None else str(query.step)
    hint = f"{first} to {last}" if known.steps else ""
    return h(
        "form",
        select_field("outcome", "Outcome", query.outcome, known.outcomes),
        text_field("task", "Task", query.task, known.tasks, placeholder="any"),
        text_field("step", source.step_noun.capitalize(), step, inputmode="numeric", placeholder=hint or "any"),
        select_field("status", source.status_noun.capitalize(), query.status, known.statuses),
        select_field("work", source.noun.capitalize(), query.work, works) if len(works) > 1 or query.work else None,
        h("div", h("button", "Filter", class_="main"),
          h("a", "Clear", href=PATH, class_="button") if filtered else None, class_="rate"),
        method="get", action=PATH, class_="filters panel", role="search", aria_label="Filter trajectories",
    )  # fmt: skip
