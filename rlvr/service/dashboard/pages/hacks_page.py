"""The page of suspicious rollouts, by kind, with what each kind means and some of its rollouts."""

from __future__ import annotations

from collections.abc import Mapping

from rlvr.service.dashboard.dashboard_data import Query, Source
from rlvr.service.dashboard.pages import page_parts as parts
from rlvr.service.dashboard.pages.rollouts_page import filters_of

PATH = "/ui/hacks"


def hacks_page(source: Source, parameters: Mapping[str, str]) -> parts.Page:
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
    data = {
        "said": said, "share": page.share, "works": source.names(), "work": work, "cautions": source.cautions(work),
        "found": [(one, filters_of(one.query)) for one in found], "clear": clear,
    }  # fmt: skip
    return parts.Page(source, "Hacks", "hacks.html", data, "Hacks")
