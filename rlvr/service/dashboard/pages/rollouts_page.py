"""The table of all rollouts, by group or one by one, with its filters. The address has all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlvr.service.dashboard.dashboard_data import AnswerRow, GroupRow, Query, Source
from rlvr.service.dashboard.pages import page_parts as parts
from rlvr.service.dashboard.pages.page_parts import Page
from rlvr.service.dashboard.pages.rollout_filters import (
    PATH,
    SINGLE,
    RolloutFilters,
    describe_form,
    filters_of,
    read_filters,
)

OPEN_ROWS = 60  # completions of a page whose groups are opened, where a filter chose them
FEW = 8  # rollouts on the page of a run or session; the table has all
SORTED = ("Previous", "Next")


@dataclass(frozen=True)
class Head:
    """The head of a column: its address sorts by it, or once more the other way round; `way` is the order now."""

    name: str
    kind: str = ""
    to: str = ""
    way: str = ""


@dataclass(frozen=True)
class RolloutTable:
    """Rollouts as rows; their links take the filters along, so that keys lead through the same list."""

    rows: Sequence[AnswerRow]
    filters: RolloutFilters
    heads: list[Head]
    label: str
    in_group: bool
    has_logprobs: bool
    has_works: bool

    def highlight(self, row: AnswerRow) -> list[tuple[str, bool]]:
        """The completion, or the text that a search found, in pieces; some are to be marked."""
        return highlight(row.found, self.filters.query.more.text) if row.found else [(row.answer or "(empty)", False)]


@dataclass(frozen=True)
class Group:
    """A group as a row that opens to its completions."""

    row: GroupRow
    table: RolloutTable
    is_open: bool
    rewards: str
    rest: int  # completions that match and are not shown
    more: str
    whole: str


def rollouts(source: Source, parameters: Mapping[str, str]) -> Page:
    filters = read_filters(source, parameters)
    nouns = source.answer_nouns
    groups, table = list[Group](), None
    if filters.is_grouped:
        page = source.groups(filters.query)
        groups = [_group(source, filters, one, page.answers) for one in page.groups]
        shown, in_groups = len(groups), f"in {page.total:,} group{'' if page.total == 1 else 's'}"
        said = f"{page.answers:,} {nouns if page.answers != 1 else source.answer_noun} {in_groups}"
    else:
        page = source.answers(filters.query)
        table = list_rollouts(source, page.rows, filters) if page.rows else None
        shown, said = len(page.rows), f"{page.total:,} {nouns if page.total != 1 else source.answer_noun}"
    words = SORTED if filters.query.sort else parts.NEWEST_FIRST
    data = {
        "said": said + (" match" if filters.narrowing else "") + ("" if page.share >= 1 else " so far"),
        "filters": filters, "form": describe_form(source, filters), "groups": groups, "table": table,
        "share": page.share, "note": page.note,
        "empty": f"No {source.answer_noun} matches." if filters.narrowing else f"No {source.answer_noun} yet.",
        "pager": parts.make_pager(PATH, filters.given, filters.query.offset, shown, page.total, words),
    }  # fmt: skip
    return Page(source, nouns.capitalize(), "rollouts.html", data, nouns.capitalize())


def latest_rollouts(source: Source, work: str) -> dict[str, Any]:
    """The newest rollouts of a run or session, one of each group, whose rollouts are alike, and a link to all."""
    filters = filters_of(Query(work=work, limit=FEW * 8))
    page = source.answers(filters.query)
    first = {row.group or row.key: row for row in reversed(page.rows)}
    latest = [row for row in page.rows if first[row.group or row.key] is row][:FEW]
    return {
        "table": list_rollouts(source, latest, filters) if latest else None,
        "all": parts.address(PATH, work=work) if page.total > len(latest) else "", "total": page.total,
    }  # fmt: skip


def _group(source: Source, filters: RolloutFilters, group: GroupRow, answers: int) -> Group:
    first, rest = group.rows[0], group.matching - len(group.rows)
    named: dict[str, Any] = {
        "group": group.name, "work": first.work, "show": SINGLE, "from": first.step, "to": first.step,
    }  # fmt: skip
    return Group(
        group, list_rollouts(source, group.rows, filters, in_group=True),
        is_open=bool(filters.narrowing) and answers <= OPEN_ROWS, rewards=_write_rewards(group), rest=rest,
        more=filters.link(**named) if rest > 0 and group.name else "",
        whole=parts.address(PATH, **named) if group.matching < group.size and group.name else "",
    )  # fmt: skip


def _write_rewards(group: GroupRow) -> str:
    if group.rewards is None:
        return "–"
    low, mean, high = group.rewards
    return f"{mean:.3f}" + (f" ({low:.3g} to {high:.3g})" if low < high else "")


def list_rollouts(
    source: Source, rows: Sequence[AnswerRow], filters: RolloutFilters, in_group: bool = False
) -> RolloutTable:
    several = not filters.query.work and not in_group and len({row.work for row in rows}) > 1
    has_logprobs = any(row.logprob is not None for row in rows)

    def head(name: str, kind: str = "", sort: str = "") -> Head:
        if in_group or sort not in source.sorts:
            return Head(name, kind)
        now = filters.query.sort
        mark, way = {sort: (" ↓", "descending"), f"-{sort}": (" ↑", "ascending")}.get(now, ("", ""))
        return Head(f"{name}{mark}", kind, filters.link(sort=f"-{sort}" if now == sort else sort), way)

    heads = [head("Outcome"), head("Reward", "num", "reward"), head("Advantage", "num", "advantage"),
             head("Length", "num", "tokens")]  # fmt: skip
    heads += [head("Log-prob", "num", "logprob")] if has_logprobs else []
    heads += [] if in_group else [head(source.step_noun.capitalize(), "num", "step"), head("Task")]
    heads += [head("Completion"), head(source.status_noun.capitalize())]
    heads += [head(source.noun.capitalize())] if several else []
    label = f"{source.answer_nouns.capitalize()}{' of the group' if in_group else ''}"
    return RolloutTable(rows, filters, heads, label, in_group, has_logprobs, several)


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
