"""The table of all rollouts, by group or one by one, with its filters. The address has all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlvr.service.dashboard.dashboard_data import GroupPage, Query, Source
from rlvr.service.dashboard.pages import page_parts as parts
from rlvr.service.dashboard.pages.page_parts import Page
from rlvr.service.dashboard.pages.rollout_filters import PATH, describe_form, filters_of, read_filters

OPEN_ROWS = 60  # completions of a page whose groups are opened, where a filter chose them
FEW = 8  # rollouts on the page of a run or session; the table has all
SORTED = ("Previous", "Next")


def rollouts(source: Source, parameters: Mapping[str, str]) -> Page:
    filters = read_filters(source, parameters)
    page = source.groups(filters.query) if filters.is_grouped else source.answers(filters.query)
    answers, groups, rows, within = page.total, [], [], ""
    if isinstance(page, GroupPage):
        answers, groups = page.answers, page.groups
        within = f" in {page.total:,} group{'' if page.total == 1 else 's'}"
    else:
        rows = page.rows
    said = f"{answers:,} {source.answer_noun if answers == 1 else source.answer_nouns}{within}"
    words, title = SORTED if filters.query.sort else parts.NEWEST_FIRST, source.answer_nouns.capitalize()
    offset, shown = filters.query.offset, len(groups or rows)
    data = {
        "said": said + (" match" if filters.narrowing else "") + ("" if page.share >= 1 else " so far"),
        "filters": filters, "form": describe_form(source, filters), "groups": groups, "rows": rows,
        "are_open": bool(filters.narrowing) and answers <= OPEN_ROWS, "share": page.share, "note": page.note,
        "empty": f"No {source.answer_noun} matches." if filters.narrowing else f"No {source.answer_noun} yet.",
        "pager": parts.make_pager(PATH, filters.given, offset, shown, page.total, words),
    }  # fmt: skip
    return Page(source, title, "rollouts.html", data, title)


def latest_rollouts(source: Source, work: str) -> dict[str, Any]:
    """The newest rollouts of a run or session, one of each group, whose rollouts are alike, and a link to all."""
    filters = filters_of(Query(work=work, limit=FEW * 8))
    page = source.answers(filters.query)
    first = {row.group or row.key: row for row in reversed(page.rows)}
    latest = [row for row in page.rows if first[row.group or row.key] is row][:FEW]
    every = parts.address(PATH, work=work) if page.total > len(latest) else ""
    return {"rows": latest, "filters": filters, "all": every, "total": page.total}


def highlight(text: str, searched: str) -> list[tuple[str, bool]]:
    """A text in pieces, of which the places of a search are marked; large and small letters of the Latin alphabet are
    alike."""
    wanted, places = searched.lower(), text.lower()
    if not wanted or len(places) != len(text):  # a letter that is two when small: its places would be others
        return [(text, False)]
    found: list[tuple[str, bool]] = []
    begin = 0
    while (place := places.find(wanted, begin)) >= 0 and len(found) < 40:
        found += [(text[begin:place], False), (text[place : place + len(wanted)], True)]
        begin = place + len(wanted)
    return [*found, (text[begin:], False)]
