"""What the dashboard shows, and the interface of the sources that provide it.

*Work* is the common name of a training run and of a session of the service: each has metrics and completions.
Everything that a model or a user wrote
goes through `visible_text` before it is in one of these records, so pages need not remember it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np

OWNER = "rlvr.owner"  # the key of the user's key name in a request's scope
PAGE = 25  # rows of a table
TEXT = 40_000  # characters of a text shown in full
HEAD = 160  # characters of a text in a row of a table
POINTS = 400  # of a curve: a chart has no more distinguishable pixels
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


class _Escapes(dict[int, str]):
    """How each character may be shown, for `str.translate`, filled as characters come."""

    def __missing__(self, code: int) -> str:
        c = chr(code)
        hidden = c not in "\n\t" and unicodedata.category(c) in _HIDDEN
        self[code] = shown = c.encode("unicode_escape").decode() if hidden else c
        return shown


_ESCAPES = _Escapes()


def visible_text(text: Any, most: int = TEXT) -> str:
    """Untrusted text as it may be shown: invisible characters and those that turn the writing direction are escaped,
    and the middle of a long text is replaced by a note. Line breaks and tabs stay."""
    if not isinstance(text, str):
        return ""
    if len(text) > most:
        head, tail = most * 2 // 3, most // 3
        text = f"{text[:head]}\n[... {len(text) - head - tail:,} characters are not shown ...]\n{text[-tail:]}"
    plain = text.isprintable() or text.replace("\n", "").replace("\t", "").isprintable()
    return text if plain else text.translate(_ESCAPES)


def one_line(text: Any, most: int = HEAD) -> str:
    """The beginning of a text, on one line."""
    if not isinstance(text, str):
        return ""
    short = visible_text(text[: 2 * most].strip(), 2 * most).replace("\n", " ⏎ ").replace("\t", " ")
    return f"{short[:most].rstrip()} …" if len(short) > most or len(text) > 2 * most else short


def finite_number(value: Any) -> float | None:
    """The value as a float if it is a finite number, else None: stored rows are not trusted."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if abs(result) < 1e300 else None  # None for a nan too


def as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


@dataclass(frozen=True)
class Curve:
    """One curve: (x, y), or (x, y, low, high) where values have an interval; x ascending.

    `style` is `line`, `raw` (pale, behind the smoothed line of the same colour), `dots` (single measurements with
    their intervals), `ends` (the same, and no line joins them) or `band` (a line in its interval). `colour` is a
    number, by default the place of the curve.
    """

    name: str
    points: Sequence[tuple[float, ...]]
    style: str = "line"
    colour: int | None = None


@dataclass(frozen=True)
class Chart:
    """Curves with common axes; with `share` they are percentages from 0 to 100.

    `x` and `unit` say what the axes count. `log` names logarithmic axes (`x`, `y`, `xy`). `csv` is the address of the
    whole series, `zoom` the beginning of an address that shows a part: `from` and `to` are added to it.
    """

    title: str
    lines: list[Curve]
    share: bool = False
    x: str = "step"
    hint: str = ""
    unit: str = ""
    log: str = ""
    csv: str = ""
    zoom: str = ""


@dataclass(frozen=True)
class Note:
    """A remark about a work. `kind` is problem, hint or note; `code` is that of a finding of `rlvr doctor`."""

    kind: str
    text: str
    remedy: str = ""
    code: str = ""


@dataclass(frozen=True)
class Cell:
    """A cell of a table that is more than a text.

    `href` makes the text a link, called `label` by a screen reader; `note` stands behind it, `clip` below it on one
    line. `badge` colours the text by this word. `span` is a line between two shares, `at` a time.
    """

    text: str = ""
    href: str = ""
    class_: str = ""
    label: str = ""
    note: str = ""
    clip: str = ""
    badge: str | None = None
    is_live: bool = False
    span: tuple[float, float] | None = None
    is_change: bool = False  # a span with a direction
    at: float | None = None


@dataclass(frozen=True)
class Table:
    """A table whose rows become blocks on a phone, each cell with the name of its column.

    `columns` are names and classes of all but the first, which is called `head` and names the rows; `links` are
    addresses of some of them. A row of one cell is a sentence.
    """

    columns: Sequence[tuple[str, str]]
    rows: Sequence[Sequence[Cell | str]]
    label: str
    head: str = ""
    class_: str = "data"
    links: Mapping[str, Cell] = field(default_factory=dict[str, Cell])


@dataclass(frozen=True)
class Work:
    """A training run or a session of the service. `live` while it is in progress; `result`, or else `status`, is its
    badge."""

    id: str
    name: str
    status: str
    live: bool = False
    result: str = ""  # of a session that is done: whether its task is solved
    about: str = ""
    changed: float | None = None
    done: float | None = None  # from 0 to 1
    figures: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class AnswerRow:
    """One answer as a row of a table. `key` identifies it, in addresses too."""

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
    verifiers: tuple[str, ...] = ()  # that judged it
    level: str = ""
    logprob: float | None = None  # mean over its tokens, in nats
    found: str = ""  # of a search: the text around the first place that has it
    expected: str = ""  # the answer that it was compared with


@dataclass(frozen=True)
class VerifierVerdict:
    """The score of one verifier."""

    verifier: str
    outcome: str
    value: float | None
    reason: str = ""
    parts: dict[str, float] = field(default_factory=dict[str, float])
    detail: str = ""


@dataclass(frozen=True)
class TokenPiece:
    """A token as text with its log-probability. `token` is its id, or the ids of several that make one letter, `place`
    that of the first in the answer. The environment wrote those that are not `is_sampled`. `advantage` is its own,
    where tokens of one answer differ."""

    text: str
    logprob: float
    token: str
    place: int = 0
    is_sampled: bool = True
    advantage: float | None = None


@dataclass(frozen=True)
class TokenView:
    """The token pieces of an answer, and why they are missing or cut."""

    pieces: list[TokenPiece] = field(default_factory=list[TokenPiece])
    note: str = ""


@dataclass(frozen=True)
class Message:
    """A message of a conversation. `calls` are those of tools: names and arguments. `mark` says what a turn of the
    policy is in this answer: `trained`, `shared` with another branch, in which it is trained, or nothing."""

    role: str
    text: str
    name: str = ""  # of the tool that answers
    calls: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    mark: str = ""
    credit: float | None = None  # the reward that the turn is trained with, where branches have rewards of their own


@dataclass(frozen=True)
class BranchRow:
    """A branch of an episode. `depth` is 0 for one that begins anew, and one more than that of the branch that it left
    after `shared` turns of the policy."""

    key: str
    text: str  # the beginning of its last turn
    turns: int
    depth: int = 0
    shared: int = 0
    reward: float | None = None
    is_shown: bool = False


@dataclass(frozen=True)
class ConversationView:
    """An answer as messages, and the branches of its episode; none if it has only one."""

    messages: list[Message] = field(default_factory=list[Message])
    branches: list[BranchRow] = field(default_factory=list[BranchRow])


@dataclass(frozen=True)
class AnswerDetail:
    """One answer in full. `tokens` has no pieces without tokens or without a tokenizer that decodes them. `siblings`
    are the others of its group or session, and itself where they have an order."""

    row: AnswerRow
    prompt: str
    answer: str
    verdicts: list[VerifierVerdict]
    tokens: TokenView = TokenView()
    conversation: ConversationView = ConversationView()
    reference: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])  # what it was compared with
    feedback: str = ""
    suggestions: list[str] = field(default_factory=list[str])
    facts: dict[str, str] = field(default_factory=dict[str, str])
    siblings: list[AnswerRow] = field(default_factory=list[AnswerRow])
    ratings: int = 0


@dataclass(frozen=True)
class Conditions:
    """Further conditions of a query. Ranges include both ends. `text` is in the prompt, the completion or a verdict;
    `sign` is a kind of suspicion (`suspicions.KINDS`), `strategy` the one that wrote the prompt."""

    text: str = ""
    reason: str = ""
    level: str = ""
    steps: tuple[int | None, int | None] = (None, None)
    rewards: tuple[float | None, float | None] = (None, None)
    group: str = ""
    sign: str = ""
    strategy: str = ""


@dataclass(frozen=True)
class Query:
    """A filter of answers; '' and None are no condition. A task matches if it contains `task`.

    `sort` is one of the source's `sorts`, the greatest first, or with a `-` before it the smallest; '' is the newest
    first.
    """

    work: str = ""
    task: str = ""
    outcome: str = ""
    status: str = ""
    step: int | None = None
    offset: int = 0
    limit: int = PAGE
    sort: str = ""
    more: Conditions = Conditions()


@dataclass(frozen=True)
class AnswerPage:
    """A page of answers. `complete` is False while older ones are still being read, `share` how much of them was;
    `note` says what else is not in the table."""

    rows: list[AnswerRow]
    total: int
    complete: bool = True
    share: float = 1.0
    note: str = ""


@dataclass(frozen=True)
class GroupRow:
    """The completions of one prompt that match, the first of them in `rows`; `size` counts all, matching or not."""

    name: str
    rows: list[AnswerRow]
    matching: int
    size: int
    passed: int
    rewards: tuple[float, float, float] | None  # the least, the mean and the greatest of those that match


@dataclass(frozen=True)
class GroupPage:
    """A page of groups; `answers` counts their completions that match, on all pages."""

    groups: list[GroupRow]
    total: int
    answers: int
    complete: bool = True
    share: float = 1.0
    note: str = ""


@dataclass(frozen=True)
class Neighbours:
    """The answers before and after one in the order of a query, its place from 1, and how many there are."""

    before: str
    after: str
    place: int
    total: int


@dataclass(frozen=True)
class Suspicion:
    """A kind of suspicious rollouts: how many there are, what that means, some of them, and the query of all."""

    title: str
    meaning: str
    count: int
    rows: list[AnswerRow]
    query: Query
    by_work: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])  # the fewest first


@dataclass(frozen=True)
class MachinePart:
    """A part of what works, such as the sampler or a verifier: how much of it is busy (0 to 1, None if that is not
    measured), what it did, and what it waits for."""

    name: str
    busy: float | None
    did: str
    waits: str = ""


@dataclass(frozen=True)
class MachineGroup:
    """The parts of a run or of a service. `work` is the id of the run; `about` says what bounds the whole."""

    name: str
    status: str
    parts: list[MachinePart]
    about: str = ""
    work: str = ""


@dataclass(frozen=True)
class Choices:
    """The values that the filters offer."""

    tasks: list[str] = field(default_factory=list[str])
    outcomes: list[str] = field(default_factory=list[str])
    statuses: list[str] = field(default_factory=list[str])
    steps: tuple[int, int] | None = None  # the first and the last
    reasons: list[str] = field(default_factory=list[str])
    levels: list[str] = field(default_factory=list[str])
    strategies: list[str] = field(default_factory=list[str])


class Source(Protocol):
    """Where a dashboard's data come from. Methods may block: pages call them in threads.

    `noun` names a work (`run`, `session`), `status_noun` the `status` of an answer, `step_noun` its step; `can_rate`
    says whether ratings can be stored, `can_compare` whether there are steps to compare, `no_charts` when the
    overview's curves begin. `filters` and `sorts` are those of a `Query` that the source can apply to answers,
    `can_group` says whether it has `groups`, `has_suspicions` whether it looks for hacks, `has_machines` whether it
    knows what works.
    `answer_noun` names an answer; `has_answers` is false where none is ever stored.
    `revision` is cheap and changes when there is something new.
    """

    noun: ClassVar[str]
    status_noun: ClassVar[str]
    step_noun: ClassVar[str]
    can_rate: ClassVar[bool] = False
    can_compare: ClassVar[bool] = True
    no_charts: ClassVar[str] = ""
    filters: ClassVar[frozenset[str]] = frozenset({"outcome", "task", "steps", "status"})
    sorts: ClassVar[tuple[str, ...]] = ()
    can_group: ClassVar[bool] = False
    has_suspicions: ClassVar[bool] = False
    has_machines: ClassVar[bool] = True
    has_answers: ClassVar[bool] = True
    answer_noun: ClassVar[str] = "rollout"
    answer_nouns: ClassVar[str] = "rollouts"
    title: str

    def revision(self) -> object: ...
    def works(self, offset: int = 0, limit: int = PAGE) -> tuple[list[Work], int]: ...
    def work(self, work: str) -> Work | None: ...
    def charts(self, work: str = "") -> list[Chart]: ...

    def choices(self, work: str) -> Choices:
        return Choices()

    def answers(self, query: Query) -> AnswerPage:
        return AnswerPage([], 0)

    def detail(self, key: str) -> AnswerDetail | None:
        return None

    def at_step(self, work: str, step: int) -> dict[str, float]:
        return {}

    def names(self) -> dict[str, str]:
        """{id: label} of the newest works: a session's task and the start of its id."""
        return {w.id: w.id if w.name == w.id else f"{w.name}, {w.id[:8]}" for w in self.works(0, 200)[0]}

    def health(self) -> dict[str, Any] | None:
        return None

    def notes(self, work: str) -> list[Note]:
        return []

    def texts(self, work: str) -> list[tuple[str, str]]:
        return []

    def groups(self, query: Query) -> GroupPage:
        raise ValueError("this source has no groups: its answers are a plain table")

    def neighbours(self, query: Query, grouped: bool, key: str) -> Neighbours | None:
        return None

    def suspicions(self, work: str) -> list[Suspicion]:
        return []

    def cautions(self, work: str) -> list[Note]:
        return []

    def machines(self) -> list[MachineGroup]:
        return []

    def rate(self, key: str, owner: str, rating: float) -> None:
        raise ValueError("this source is read-only: ratings cannot be stored")


def thin_points(points: list[tuple[float, float]], most: int = POINTS) -> list[tuple[float, float]]:
    """At most `most` points: the lowest and the highest of each stretch, so no spike is lost."""
    return [points[i] for i in thin_indices(np.array([y for _, y in points]), most)]


def thin_indices(values: np.ndarray, most: int = POINTS) -> np.ndarray:
    """The places of at most `most` values: the lowest and the highest of each stretch, and the last."""
    if len(values) <= most:
        return np.arange(len(values))
    chosen = [len(values) - 1]
    size = len(values) / (most // 2)
    for i in range(most // 2):
        start, part = int(i * size), values[int(i * size) : int((i + 1) * size)]
        chosen += [start + int(part.argmin()), start + int(part.argmax())]
    return np.unique(chosen)


def outcome_of(verdicts: list[VerifierVerdict]) -> tuple[str, str]:
    """The outcome and reason of the first verifier, the one that rewards."""
    return (verdicts[0].outcome, verdicts[0].reason) if verdicts else ("", "")


def verdicts_of(scores: Any) -> list[VerifierVerdict]:
    """Read the `scores` of a stored answer."""
    verdicts: list[VerifierVerdict] = []
    for name, value in as_mapping(scores).items():
        score = as_mapping(value)
        parts = {
            visible_text(k, 60): v
            for k, raw in as_mapping(score.get("parts")).items()
            if (v := finite_number(raw)) is not None
        }
        verdicts.append(
            VerifierVerdict(
                verifier=visible_text(name, 100),
                outcome=visible_text(score.get("outcome"), 40) or "unknown",
                value=finite_number(score.get("value")),
                reason=visible_text(score.get("reason"), 200),
                parts=parts,
                detail=visible_text(score.get("detail"), 2000),
            )
        )
    return verdicts
