"""What the dashboard shows, and the protocol of the places it comes from.

A *work* is what answers belong to: a training run, or a session of the service. An *entry* is one answer as a row of a
table, a *detail* the same in full. Everything a model or a user wrote goes through `visible` before it is in one of
these, so that no page has to remember it. Exercised by tests/test_dashboard_runs.py and test_dashboard_sessions.py.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

PAGE = 25  # rows of a table
TEXT = 40_000  # characters of a text that are shown in full
HEAD = 160  # characters of a text in a row of a table
POINTS = 400  # of a curve: more than a chart has pixels to tell apart
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def visible(text: Any, most: int = TEXT) -> str:
    """Text from anywhere as it may be shown: what is invisible or turns the direction of writing is spelled out, and
    the middle of what is too long left out, with a note of how much. Line breaks and tabs stay."""
    if not isinstance(text, str):
        return ""
    if len(text) > most:
        head, tail = most * 2 // 3, most // 3
        text = f"{text[:head]}\n[... {len(text) - head - tail:,} characters are not shown ...]\n{text[-tail:]}"
    return "".join(
        c.encode("unicode_escape").decode() if c not in "\n\t" and unicodedata.category(c) in _HIDDEN else c
        for c in text
    )


def line(text: Any, most: int = HEAD) -> str:
    """The beginning of a text, on one line."""
    if not isinstance(text, str):
        return ""
    short = visible(text[: 2 * most].strip(), 2 * most).replace("\n", " ⏎ ").replace("\t", " ")
    return f"{short[:most].rstrip()} …" if len(short) > most or len(text) > 2 * most else short


def number(value: Any) -> float | None:
    """A finite number, else None: a row that somebody else wrote may hold anything."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if abs(found) < 1e300 else None  # also False for a nan


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


@dataclass(frozen=True)
class Line:
    """One curve: (x, y), x ascending."""

    name: str
    points: list[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """Curves that share their axes. `share` are drawn as percentages from 0 to 100."""

    title: str
    lines: list[Line]
    share: bool = False
    x: str = "step"
    hint: str = ""


@dataclass(frozen=True)
class Note:
    """Something to know about a work. `kind` is problem, hint or note."""

    kind: str
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Comparison:
    """A table of numbers: a name, and a text for each of `columns`."""

    title: str
    columns: list[str]
    rows: list[tuple[str, ...]]


@dataclass(frozen=True)
class Work:
    """A run or a session. `status` is a word to show and to colour by; `live` while something is going on in it."""

    id: str
    name: str
    status: str
    live: bool = False
    about: str = ""
    changed: float | None = None
    done: float | None = None  # from 0 to 1
    figures: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Entry:
    """One answer, as a row. `key` finds it again, in an address too."""

    key: str
    work: str
    task: str
    step: int | None
    outcome: str
    status: str
    reward: float | None
    advantage: float | None
    tokens: int
    prompt: str
    answer: str
    group: str = ""
    reason: str = ""
    rating: float | None = None


@dataclass(frozen=True)
class Verdict:
    """What one verifier said."""

    verifier: str
    outcome: str
    value: float | None
    reason: str = ""
    parts: dict[str, float] = field(default_factory=dict[str, float])
    detail: str = ""


@dataclass(frozen=True)
class Piece:
    """A token as text, with its log-probability; `token` is its id, or what stands for several that make one letter."""

    text: str
    logprob: float
    token: str


@dataclass(frozen=True)
class Detail:
    """One answer in full. `pieces` is empty where there are no tokens, or nobody can turn them into text."""

    entry: Entry
    prompt: str
    answer: str
    verdicts: list[Verdict]
    pieces: list[Piece] = field(default_factory=list[Piece])
    pieces_note: str = ""  # why they are missing or cut
    feedback: str = ""
    suggestions: list[str] = field(default_factory=list[str])
    facts: dict[str, str] = field(default_factory=dict[str, str])
    siblings: list[Entry] = field(default_factory=list[Entry])
    ratings: int = 0


@dataclass(frozen=True)
class Query:
    """Which answers; '' and None are no condition."""

    work: str = ""
    task: str = ""
    outcome: str = ""
    status: str = ""
    step: int | None = None
    offset: int = 0
    limit: int = PAGE


@dataclass(frozen=True)
class Found:
    """A page of answers, newest first, of `total` known. `complete` is False while older ones are still being read."""

    entries: list[Entry]
    total: int
    complete: bool = True


@dataclass(frozen=True)
class Choices:
    """What the filters offer."""

    tasks: list[str] = field(default_factory=list[str])
    outcomes: list[str] = field(default_factory=list[str])
    statuses: list[str] = field(default_factory=list[str])
    steps: tuple[int, int] | None = None  # the first and the last


class Source(Protocol):
    """Where a dashboard's data come from. All methods may block: pages call them in a thread.

    `noun` says what works are (`run`, `session`), `status_noun` what an entry's `status` is, `can_rate` whether a
    person's rating has a place to go. `revision` is cheap and changes when there is something new.
    """

    noun: str
    status_noun: str
    step_noun: str
    title: str
    can_rate: bool

    def revision(self) -> object: ...
    def health(self) -> dict[str, Any] | None: ...
    def works(self, offset: int = 0, limit: int = PAGE) -> tuple[list[Work], int]: ...
    def work(self, work: str) -> Work | None: ...
    def texts(self, work: str) -> list[tuple[str, str]]: ...
    def charts(self, work: str = "", metric: str = "") -> list[Chart]: ...
    def metrics(self, work: str) -> list[str]: ...
    def notes(self, work: str) -> list[Note]: ...
    def comparisons(self, work: str) -> list[Comparison]: ...
    def choices(self, work: str) -> Choices: ...
    def entries(self, query: Query) -> Found: ...
    def detail(self, key: str) -> Detail | None: ...
    def at_step(self, work: str, step: int) -> dict[str, float]: ...
    def rate(self, key: str, owner: str, rating: float) -> None: ...


def thinned(points: list[tuple[float, float]], most: int = POINTS) -> list[tuple[float, float]]:
    """At most `most` points. Of every stretch the lowest and the highest stay, in their order: no spike is lost."""
    if len(points) <= most:
        return points
    kept: list[tuple[float, float]] = []
    size = len(points) / (most // 2)
    for i in range(most // 2):
        part = points[int(i * size) : int((i + 1) * size)]
        low, high = min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])
        kept += sorted({low, high})
    if kept[-1] != points[-1]:
        kept.append(points[-1])
    return kept


def outcome_of(verdicts: list[Verdict]) -> tuple[str, str]:
    """What is said of an answer in a word, and why: the first verifier's, which is the one that rewards."""
    return (verdicts[0].outcome, verdicts[0].reason) if verdicts else ("", "")


def verdicts_of(scores: Any) -> list[Verdict]:
    """The `scores` of a stored answer."""
    found: list[Verdict] = []
    for name, score in mapping(scores).items():
        told = mapping(score)
        parts = {visible(k, 60): v for k, raw in mapping(told.get("parts")).items() if (v := number(raw)) is not None}
        found.append(
            Verdict(
                verifier=visible(name, 100),
                outcome=visible(told.get("outcome"), 40) or "unknown",
                value=number(told.get("value")),
                reason=visible(told.get("reason"), 200),
                parts=parts,
                detail=visible(told.get("detail"), 2000),
            )
        )
    return found
