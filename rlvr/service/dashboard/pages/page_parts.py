"""What several pages share: the page and its tables as data, all addresses, and the kinds of words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from rlvr.service.dashboard.dashboard_data import PAGE, Source

GOOD = ("passed", "solved", "finished", "done", "ready", "ok")
BAD = ("failed", "not solved", "error", "timeout", "down", "problem")
WARN = (
    "invalid", "unverified", "interrupted", "cancelled", "loading", "absent", "length", "stopped",
)  # fmt: skip
NEWEST_FIRST = ("Newer", "Older")
PREFIX: ContextVar[str] = ContextVar("prefix", default="")  # of all addresses, where the dashboard is mounted


@dataclass(frozen=True)
class Page:
    """A page of a source: its title, its template with what that shows, its entry in the menu, and its HTTP status."""

    source: Source
    title: str
    template: str
    data: Mapping[str, Any]
    here: str = ""
    status: int = 200


def address(path: str, **query: object) -> str:
    """An address of the dashboard, without empty parameters, so that it stays short."""
    given = {name: str(value) for name, value in query.items() if value not in ("", None)}
    return PREFIX.get() + path + (f"?{urlencode(given)}" if given else "")


def work_path(source: Source, work: str) -> str:
    return f"/ui/{source.noun}/{quote(work, safe='')}"


def work_address(source: Source, work: str, **query: object) -> str:
    """The address of the page of a training run or session."""
    return address(work_path(source, work), **query)


def short_names(one: str, other: str) -> tuple[str, str]:
    """The names of two runs without the study that both belong to, and of one variant without the variant."""
    for pattern in (r"(.*)(seed-\d+)", r"(.*/)(.*)"):
        first, second = (re.fullmatch(pattern, name) for name in (one, other))
        if first and second and first[1] == second[1]:
            return first[2], second[2]
    return one, other


def answer_address(key: str, **query: object) -> str:
    """The address of an answer; `query` are the filters of the table that it stands in."""
    return address(f"/ui/trajectory/{quote(key, safe='')}", **query)


def list_menu(source: Source) -> list[tuple[str, str]]:
    """The entries of the menu with their addresses."""
    menu = [("Overview", "/")]
    menu += [(source.answer_nouns.capitalize(), "/ui/trajectories")] if source.has_answers else []
    menu += [("Hacks", "/ui/hacks")] if source.has_suspicions else []
    menu += [("Sessions", "/ui/sessions"), ("Strategies", "/ui/strategies")] if source.noun == "session" else []
    menu += [("Compare", "/ui/compare")] if source.can_compare else []
    menu += [("Machines", "/ui/machines")] if source.has_machines else []
    return [(name, address(path)) for name, path in menu]


def not_found_page(source: Source, what: str, name: str) -> Page:
    text = f"There is no {what} {name[:200]!r}. It was deleted, or the address is wrong."
    return Page(source, "Not found", "message.html", {"text": text, "class_": "panel"}, status=404)


def kind_of(word: str) -> str:
    """The kind of a word about an outcome or a state: its colour."""
    return "good" if word in GOOD else "bad" if word in BAD else "warn" if word in WARN else "plain"


def format_number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def options(choices: Sequence[str] | Mapping[str, str], value: str, every: str | None) -> dict[str, str]:
    """{value: label} of a choice, of none too, called `every`. The value of the address is among them."""
    named = choices if isinstance(choices, Mapping) else {one: one for one in choices}
    labels = {**({} if every is None else {"": every}), **named}
    labels.setdefault(value, value)
    return labels


def page_number(parameters: Mapping[str, str]) -> int:
    text = parameters.get("page", "")
    return max(1, int(text)) if text.isdecimal() and len(text) < 7 else 1


def make_pager(
    path: str, query: Mapping[str, object], offset: int, shown: int, total: int, words: tuple[str, str]
) -> dict[str, Any] | None:
    """The place of a page among `total` rows, with links to the pages beside it, which are called by `words`. None if
    all rows are on one page."""
    page = offset // PAGE + 1
    if total <= PAGE and page == 1:
        return None
    where = f"{offset + 1:,} to {offset + shown:,} of {total:,}" if shown else f"page {page:,} is beyond the end"
    previous = address(path, **query, page=page - 1 if page > 2 else "") if page > 1 else ""
    following = address(path, **query, page=page + 1) if offset + shown < total and shown else ""
    return {"where": where, "previous": previous, "next": following, "words": words}
