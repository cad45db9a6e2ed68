"""The page of suspicious rollouts, by kind, with what each kind means and some of its rollouts."""

from __future__ import annotations

from collections.abc import Mapping

from rlvr.service.dashboard.dashboard_data import Query, Source, Suspicion
from rlvr.service.dashboard.element_tree import Page, Tree, h
from rlvr.service.dashboard.pages import page_parts as parts
from rlvr.service.dashboard.pages.rollout_filters import filters_of, link
from rlvr.service.dashboard.pages.rollouts_page import draw_reading, rollout_table

PATH = "/ui/hacks"


def hacks(source: Source, parameters: Mapping[str, str]) -> Page:
    if not source.has_suspicions:
        return parts.not_found_page(source, "page", PATH)
    work = parameters.get("work", "")
    if work and source.work(work) is None:
        return parts.not_found_page(source, source.noun, work)
    page = source.answers(Query(work=work, limit=1))
    every = source.suspicions(work)
    found, clear = [one for one in every if one.count], [one for one in every if not one.count]
    said = (
        f"{len(found)} of {len(every)} kinds of suspicion, in {page.total:,} rollouts"
        if found
        else f"Nothing is suspicious in {page.total:,} rollouts"
    )
    works = source.names()
    return parts.frame_page(
        source,
        "Hacks",
        "Hacks",
        h("div", h("h1", "Hacks"), h("p", said, class_="dim", role="status"), class_="head"),
        h("p", "Rollouts that look as if the reward was earned without solving the task. A suspicion is no verdict: "
          "read some of each kind.", class_="dim"),
        draw_reading(page.share),
        h("form", parts.select_field("work", source.noun.capitalize(), work, works, f"all {source.noun}s"),
          h("div", h("button", "Show", class_="main")), method="get", action=PATH, class_="filters panel")
        if len(works) > 1 else None,
        [parts.note(one) for one in source.cautions(work)],
        [_suspicion(source, one) for one in found],
        h("section", h("h2", "Looked for, and not found"),
          h("dl", [part for one in clear for part in (h("dt", one.title), h("dd", one.meaning, class_="dim"))],
            class_="meanings"), class_="panel") if clear else None,
    )  # fmt: skip


def _suspicion(source: Source, one: Suspicion) -> Tree:
    filters = filters_of(one.query)
    noun = source.answer_noun if one.count == 1 else source.answer_nouns
    return h(
        "section",
        h("div", h("h2", one.title), h("span", f"{one.count:,} {noun}", class_="badge warn"),
          h("a", f"Open in Rollouts: all {one.count:,}" if one.count > 1 else "Open in Rollouts", href=link(filters),
            class_="end"), class_="head"),
        h("p", one.meaning, class_="dim"),
        rollout_table(source, one.rows, filters),
        class_="panel suspicion",
    )  # fmt: skip
