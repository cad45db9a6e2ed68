"""The table of all rollouts, by group or one by one, and its filters: read from an address with what is wrong about
them, written as links, and what their form offers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlvr.service.dashboard.dashboard_data import PAGE, Conditions, GroupPage, Query, Source, one_line, visible_text
from rlvr.service.dashboard.pages import page_parts as parts
from rlvr.service.dashboard.suspicions import KINDS

PATH = "/ui/trajectories"
LONGEST = 300  # characters of a search: comparing a text takes as long as both are
LONGEST_VALUE = 4000  # characters of a filter
SINGLE = "single"  # the value of `show` for a table without groups
SORT_NAMES = {
    "reward": ("Reward", "highest first", "lowest first"),
    "advantage": ("Advantage", "highest first", "lowest first"),
    "tokens": ("Length", "longest first", "shortest first"),
    "logprob": ("Log-prob", "highest first", "lowest first"),
    "step": ("Step", "last first", "first first"),
}
# The names of filters in an address, by the filter of the source that each needs.
NAMES = {
    "text": ("q",), "outcome": ("outcome",), "reason": ("reason",), "task": ("task",), "level": ("level",),
    "steps": ("from", "to", "step"), "rewards": ("min", "max"), "status": ("status",), "strategy": ("strategy",),
}  # fmt: skip
GROUPED = ("group", "sign")  # that need a source with groups
RARE = (
    "reason",
    "task",
    "level",
    "from",
    "to",
    "step",
    "status",
    "strategy",
    "work",
    *GROUPED,
)  # behind "More filters"
OPEN_ROWS = 60  # completions of a page whose groups are opened, where a filter chose them
FEW = 8  # rollouts on the page of a run or session; the table has all
SORTED = ("Previous", "Next")


@dataclass(frozen=True)
class RolloutFilters:
    """What an address asks for: `given` are its filters as they stand in links, `problems` what cannot be applied."""

    query: Query
    is_grouped: bool
    given: dict[str, str]
    problems: list[str] = field(default_factory=list[str])

    @property
    def narrowing(self) -> dict[str, str]:
        """The filters that choose among the rollouts of a work."""
        return {name: value for name, value in self.given.items() if name not in ("sort", "show", "work")}

    def link(self, **changes: object) -> str:
        """The address of the table with other filters."""
        return parts.address(PATH, **{**self.given, **changes})


def read_filters(source: Source, parameters: Mapping[str, str]) -> RolloutFilters:
    """A filter that makes no sense is left out, and a problem says so."""
    problems = list[str]()
    known = [name for filter, names in NAMES.items() if filter in source.filters for name in names]
    known += ["work", *(GROUPED if source.can_group else ()), *(("sort", "show") if source.sorts else ())]
    given = {name: value for name in known if (value := visible_text(parameters.get(name), LONGEST_VALUE).strip())}
    others = [name for names in NAMES.values() for name in names if parameters.get(name) and name not in known]
    if others:
        problems.append(f"{source.noun.capitalize()}s cannot be filtered by {', '.join(others)}; that is left out.")
    if step := given.pop("step", ""):  # one step: it is read once, and named once if it is none
        given = {name: value for name, value in given.items() if name != "to"} | {"from": step}
    text = given.get("q", "")
    if len(text) > LONGEST:
        problems.append(f"The search has {len(text):,} characters; only the first {LONGEST} are searched for.")
        given["q"] = text = text[:LONGEST].strip()
    steps = _read_range(given, "from", "to", source.step_noun, whole=True, problems=problems)
    if step and "from" in given:
        given["to"], steps = step, (steps[0], steps[0])
    rewards = _read_range(given, "min", "max", "reward", whole=False, problems=problems)
    sort = given.get("sort", "")
    if sort.removeprefix("-") not in ("", *source.sorts):
        names = ", ".join(source.sorts)
        problems.append(f"{one_line(sort, 40)!r} is no order; expected one of {names}, with - for the smallest first.")
        del given["sort"]
        sort = ""
    if given.get("sign", "") not in ("", *KINDS):
        problems.append(f"{one_line(given.pop('sign'), 40)!r} is no suspicion; expected one of {', '.join(KINDS)}.")
    more = Conditions(
        text, given.get("reason", ""), given.get("level", ""), _as_steps(steps), rewards, given.get("group", ""),
        given.get("sign", ""), given.get("strategy", ""),
    )  # fmt: skip
    query = Query(
        given.get("work", ""), given.get("task", ""), given.get("outcome", ""), given.get("status", ""),
        offset=(parts.page_number(parameters) - 1) * PAGE, sort=sort, more=more,
    )  # fmt: skip
    return RolloutFilters(query, source.can_group and given.get("show") != SINGLE, given, problems)


Range = tuple[float | None, float | None]


def _as_steps(steps: Range) -> tuple[int | None, int | None]:
    low, high = steps
    return None if low is None else int(low), None if high is None else int(high)


def _read_range(given: dict[str, str], low: str, high: str, noun: str, whole: bool, problems: list[str]) -> Range:
    """Two numbers of an address; those that are none are taken out of `given`."""
    found: dict[str, float | None] = {low: None, high: None}
    for name in (low, high):
        text = given.get(name, "")
        try:
            number = float(int(text) if whole and len(text) < 10 else text) if text else None
            if number is not None and not (math.isfinite(number) and (not whole or 0 <= number < 1e9)):
                raise ValueError
            found[name] = number
        except ValueError:
            expected = "a whole number from 0 on, such as 12" if whole else "a number such as 0.5"
            shown = one_line(given.pop(name), 40)
            problems.append(f"The filter {noun} {name}={shown!r} is left out: expected {expected}.")
    first, last = found[low], found[high]
    if first is not None and last is not None and first > last:
        problems.append(f"No {noun} is from {given[low]} to {given[high]}: the first is the greater one.")
    return first, last


def filters_of(query: Query) -> RolloutFilters:
    """The filters of a query, for a table without groups."""
    more, (first, last), (low, high) = query.more, query.more.steps, query.more.rewards
    given = {
        "q": more.text, "outcome": query.outcome, "reason": more.reason, "task": query.task, "level": more.level,
        "from": first, "to": last, "min": low, "max": high, "status": query.status, "work": query.work,
        "group": more.group, "sign": more.sign, "strategy": more.strategy, "sort": query.sort, "show": SINGLE,
    }  # fmt: skip
    return RolloutFilters(query, False, {name: str(value) for name, value in given.items() if value not in ("", None)})


def describe_form(source: Source, filters: RolloutFilters) -> dict[str, Any]:
    """What the form of all filters of the source offers; those that are rarely used are behind "More filters"."""
    works = source.names()
    return {
        "choices": source.choices(filters.query.work),
        "works": works if len(works) > 1 or filters.query.work else None,
        "sorts": _name_sorts(source), "single": {SINGLE: f"single {source.answer_nouns}"}, "longest": LONGEST,
        "signs": {sign: title for sign, (title, _) in KINDS.items()},
        "is_open": any(name in filters.given for name in RARE),
    }  # fmt: skip


def _name_sorts(source: Source) -> dict[str, str]:
    """{value of `sort`: label}."""
    named: dict[str, str] = {}
    for sort in source.sorts:
        name, most, least = SORT_NAMES[sort]
        name = source.step_noun.capitalize() if sort == "step" else name
        named |= {sort: f"{name}, {most}", f"-{sort}": f"{name}, {least}"}
    return named


def rollouts_page(source: Source, parameters: Mapping[str, str]) -> parts.Page:
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
    return parts.Page(source, title, "rollouts.html", data, title)


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
