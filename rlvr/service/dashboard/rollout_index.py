"""The rollouts of a source as a table that can be sorted, filtered and searched.

    index = RolloutIndex(lambda work, file, place: f"{work}:{file}:{place}")
    index.add("arithmetic", 3, [(0, 0, row), ...])
    index.page(Query(sort="reward", more=Conditions(text="= 42")))

The table is an SQLite database of this process. SQLite keeps it in a temporary file without a name (in `TMPDIR`, or
`/var/tmp`), so nothing is written beside the run, and nothing stays behind, not even after a kill. A search compares
texts (`LIKE`): every substring is found, whatever its script, and no query has a syntax. That takes a fifth of a second
for 100 MB; an index of trigrams was slower to build by a factor of a hundred.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from rlvr.service.dashboard.dashboard_data import (
    HEAD,
    AnswerPage,
    AnswerRow,
    Choices,
    GroupPage,
    GroupRow,
    Neighbours,
    Query,
    one_line,
    verdicts_of,
    visible_text,
)
from rlvr.service.dashboard.rollout_signs import (
    ENDS_OTHERWISE,
    HOLDS_ANSWER,
    IS_PROMPT,
    NO_CONTENT,
    OTHER_NUMBER,
    WATCHED_FAILS,
    read_signs,
)
from rlvr.service.dashboard.run_files import answer_row

SEARCHED = 1_000_000  # characters of a text that a search looks at
OPENED = 16  # completions of a group in a table; its own page has all
MOST_CHOICES = 1000  # tasks that a filter offers
USUAL = 0.95  # of the passing completions of a run end with the expected number, for others to be suspicious
FEWEST_TASKS = 3  # with different expected answers, for the same text to be suspicious
SORTS = ("reward", "advantage", "tokens", "logprob", "step")
FILTERS = frozenset({"outcome", "reason", "task", "level", "steps", "rewards", "status", "text"})
_SCHEMA = """
PRAGMA journal_mode = MEMORY; PRAGMA synchronous = OFF; PRAGMA cache_size = -65536;
CREATE TABLE works (id INTEGER PRIMARY KEY, name TEXT UNIQUE, rank INTEGER, typical REAL);
CREATE TABLE groups (id INTEGER PRIMARY KEY, work INTEGER, file INTEGER, name TEXT, UNIQUE (work, file, name));
CREATE TABLE rollouts (
    id INTEGER PRIMARY KEY, work INTEGER, file INTEGER, place INTEGER, at INTEGER, grp INTEGER, prompt INTEGER,
    step INTEGER, reward REAL, advantage REAL, tokens INTEGER, logprob REAL, signs INTEGER, said INTEGER,
    expected INTEGER, task TEXT, level TEXT, outcome TEXT, reason TEXT, status TEXT, verifiers TEXT, episode TEXT,
    answer TEXT
);
CREATE INDEX of_file ON rollouts (work, file, place);
CREATE INDEX of_group ON rollouts (grp);
CREATE TABLE texts (id INTEGER PRIMARY KEY, head TEXT, text TEXT);
CREATE TABLE hits (id INTEGER PRIMARY KEY);
"""
# The conditions of `Conditions.sign`. `copied`: passing completions without the expected answer that are the same for
# tasks with several expected answers. `paid`: what did not pass and earned as much as passing ones do on average.
SIGNS = {
    "watched": f"r.signs & {WATCHED_FAILS}",
    "paid": "r.outcome IN ('failed', 'timeout') AND r.reward > 0 AND r.reward >= w.typical",
    "number": f"r.signs & {OTHER_NUMBER}",
    "ending": f"r.signs & {ENDS_OTHERWISE} AND r.work IN (SELECT work FROM rollouts WHERE outcome = 'passed' "
    f"GROUP BY work HAVING avg(signs & {ENDS_OTHERWISE | HOLDS_ANSWER} = {HOLDS_ANSWER}) >= {USUAL})",
    "content": f"r.signs & {NO_CONTENT}",
    "prompt": f"r.signs & {IS_PROMPT}",
    "copied": f"r.outcome = 'passed' AND NOT r.signs & {HOLDS_ANSWER} AND (r.work, r.said) IN (SELECT work, said "
    f"FROM rollouts WHERE outcome = 'passed' AND NOT signs & {HOLDS_ANSWER} GROUP BY work, said "
    f"HAVING count(DISTINCT expected) >= {FEWEST_TASKS})",
}
_COLUMNS = """r.id, w.name, r.file, r.place, g.name, r.step, r.reward, r.advantage, r.tokens, r.logprob, r.task,
    r.level, r.outcome, r.reason, r.status, r.answer, r.verifiers, p.head, t.head"""
_JOINED = "rollouts r JOIN works w ON w.id = r.work"
_SHOWN = f"""{_JOINED} JOIN groups g ON g.id = r.grp JOIN texts t ON t.id = r.id LEFT JOIN texts p ON p.id = r.prompt"""
_NEWEST = "w.rank, r.step DESC, r.file DESC, r.place"
Parameters = list[Any]
GivenRow = tuple[int, int, dict[str, Any]]  # its place in the file, the byte where it begins, and itself


class RolloutIndex:
    """`key` makes the key of an answer out of its work, file and place. Rollouts are a group if their file and the name
    of their group are the same, and with `groups_of_works` their work. Thread-safe; methods block."""

    def __init__(self, key: Callable[[str, int, int], str], groups_of_works: bool = True) -> None:
        self._key, self._groups_of_works = key, groups_of_works
        self._lock = threading.RLock()
        self._db = sqlite3.connect("", check_same_thread=False, isolation_level=None)
        self._db.executescript(_SCHEMA)
        weakref.finalize(self, self._db.close)
        self._ids = count(1)
        self._searched: tuple[str, int] | None = None  # what `hits` has: the text, and the revision then
        self._choices: dict[str, tuple[int, Choices]] = {}
        self._rated = -1  # the revision of `typical`
        self.revision = 0

    def rank(self, works: Sequence[str]) -> None:
        """The order of works, the newest first. Rollouts of other works are left out of tables."""
        with self._lock:
            self._db.execute("UPDATE works SET rank = NULL")
            self._db.executemany(
                "INSERT INTO works (name, rank) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET rank = excluded.rank",
                [(work, place) for place, work in enumerate(works)],
            )

    def add(self, work: str, file: int, step: int | None, rows: Iterable[GivenRow]) -> int:
        """Add rows of a file; return how many."""
        made = [(place, at, _read_row(work, step, row)) for place, at, row in rows]
        with self._lock, self._db:
            number = self._work_number(work)
            self._db.execute("BEGIN")
            groups, prompts = dict[str, int](), dict[str, int]()
            texts: list[tuple[int, str, str]] = []
            table: list[tuple[Any, ...]] = []
            for place, at, one in made:
                id = next(self._ids)
                name = one.group or f"\0{place}"
                if name not in groups:
                    groups[name] = self._group_number(number if self._groups_of_works else 0, file, name)
                if one.prompt not in prompts:
                    prompts[one.prompt] = -id
                    texts.append((-id, one.prompt_head, one.prompt))
                texts.append((id, one.head, one.text))
                values = number, file, place, at, groups[name], prompts[one.prompt], step
                table.append((id, *values, *one.columns))
            self._db.executemany(f"INSERT INTO rollouts VALUES ({', '.join('?' * 23)})", table)
            self._db.executemany("INSERT INTO texts VALUES (?, ?, ?)", texts)
            self.revision += 1
        return len(made)

    def remove(self, work: str, file: int) -> None:
        """Remove the rollouts of a file."""
        with self._lock, self._db:
            rule, given = "work = ? AND file = ?", [self._work_number(work), file]
            self._db.execute("BEGIN")
            for column in ("id", "prompt"):
                self._db.execute(f"DELETE FROM texts WHERE id IN (SELECT {column} FROM rollouts WHERE {rule})", given)
            for table in ("rollouts", "groups"):
                self._db.execute(f"DELETE FROM {table} WHERE {rule}", given)
            self.revision += 1

    def page(self, query: Query, share: float = 1.0) -> AnswerPage:
        with self._lock:
            rule, given = self._where(query)
            order = _order(query.sort)
            rows = self._db.execute(
                f"SELECT r.id, count(*) OVER () FROM {_JOINED} WHERE {rule} ORDER BY {order} LIMIT ? OFFSET ?",
                [*given, query.limit, query.offset],
            ).fetchall()
            total = rows[0][1] if rows else self._count(rule, given)
            found = self._rows([id for id, _ in rows], query.more.text)
        return AnswerPage([found[id] for id, _ in rows], total, share >= 1, share)

    def groups(self, query: Query, share: float = 1.0) -> GroupPage:
        with self._lock:
            rule, given = self._where(query)
            table = self._db.execute(
                "SELECT r.grp, count(*), sum(r.outcome = 'passed'), min(r.reward), avg(r.reward), max(r.reward), "
                f"count(*) OVER (), sum(count(*)) OVER () FROM {_JOINED} WHERE {rule} "
                f"GROUP BY r.grp ORDER BY {_group_order(query.sort)} LIMIT ? OFFSET ?",
                [*given, query.limit, query.offset],
            ).fetchall()
            if not table:
                totals = f"SELECT count(DISTINCT r.grp), count(*) FROM {_JOINED} WHERE {rule}"
                total, answers = self._db.execute(totals, given).fetchone()
                return GroupPage([], total, answers, share >= 1, share)
            numbers = [one[0] for one in table]
            marks = ", ".join("?" * len(numbers))
            members = self._db.execute(
                f"SELECT id, grp FROM (SELECT r.id, r.grp, row_number() OVER (PARTITION BY r.grp ORDER BY "
                f"{_order(query.sort)}) place FROM {_JOINED} WHERE {rule} AND r.grp IN ({marks})) "
                f"WHERE place <= {OPENED} ORDER BY grp, place",
                [*given, *numbers],
            ).fetchall()
            sizes = dict(
                self._db.execute(f"SELECT grp, count(*) FROM rollouts WHERE grp IN ({marks}) GROUP BY grp", numbers)
            )
            names = dict(self._db.execute(f"SELECT id, name FROM groups WHERE id IN ({marks})", numbers))
            found = self._rows([id for id, _ in members], query.more.text)
        groups = [
            GroupRow(
                "" if names[number].startswith("\0") else names[number],
                [found[id] for id, of in members if of == number],
                matching,
                sizes[number],
                passed,
                None if mean is None else (low, mean, high),
            )
            for number, matching, passed, low, mean, high, *_ in table
        ]
        return GroupPage(groups, table[0][-2], table[0][-1], share >= 1, share)

    def neighbours(self, query: Query, grouped: bool, work: str, file: int, place: int) -> Neighbours | None:
        """The answers around one in the order of a table, grouped or not; None for an answer that it does not have."""
        with self._lock:
            rule, given = self._where(query)
            own = self._db.execute(
                f"SELECT r.id FROM {_JOINED} WHERE w.name = ? AND r.file = ? AND r.place = ? AND {rule}",
                [work, file, place, *given],
            ).fetchone()
            if own is None:
                return None
            ordered = f"SELECT r.id, r.grp FROM {_JOINED} WHERE {rule} ORDER BY {_order(query.sort)}"
            rows = self._db.execute(ordered, given).fetchall()
            if grouped:
                places = f"SELECT r.grp FROM {_JOINED} WHERE {rule} GROUP BY r.grp ORDER BY {_group_order(query.sort)}"
                at = {group: place for place, (group,) in enumerate(self._db.execute(places, given))}
                rows.sort(key=lambda one: at[one[1]])
            ids = [id for id, _ in rows]
            now = ids.index(own[0])
            near = ids[max(0, now - 1) : now + 2]
            marks = ", ".join("?" * len(near))
            keys = {
                id: self._key(name, file, place)
                for id, name, file, place in self._db.execute(
                    f"SELECT r.id, w.name, r.file, r.place FROM {_JOINED} WHERE r.id IN ({marks})", near
                )
            }
        before = keys[ids[now - 1]] if now else ""
        after = keys[ids[now + 1]] if now + 1 < len(ids) else ""
        return Neighbours(before, after, now + 1, len(ids))

    def group_of(self, work: str, file: int, place: int, most: int) -> list[AnswerRow]:
        """The answers of the group of one, itself too, in the order of their file."""
        with self._lock:
            ids = self._db.execute(
                "SELECT o.id FROM rollouts r JOIN works w ON w.id = r.work JOIN rollouts o ON o.grp = r.grp "
                "WHERE w.name = ? AND r.file = ? AND r.place = ? ORDER BY abs(o.place - r.place) LIMIT ?",
                [work, file, place, most],
            ).fetchall()
            found = self._rows([id for (id,) in ids], "")
        return [found[id] for id in sorted(found)]

    def offsets(self, work: str, file: int, place: int) -> dict[int, int]:
        """The answer and the others of its episode: where each begins in the file, by its place."""
        with self._lock:
            return dict(
                self._db.execute(
                    "SELECT o.place, o.at FROM rollouts r JOIN works w ON w.id = r.work JOIN rollouts o ON "
                    "o.work = r.work AND o.file = r.file AND (o.id = r.id OR o.episode = r.episode AND r.episode != '')"
                    " WHERE w.name = ? AND r.file = ? AND r.place = ? ORDER BY o.place LIMIT 200",
                    [work, file, place],
                )
            )

    def choices(self, work: str) -> Choices:
        with self._lock:
            known = self._choices.get(work)
            if known is None or known[0] != self.revision:
                known = self._choices[work] = (self.revision, self._read_choices(work))
            return known[1]

    def count(self, query: Query) -> int:
        with self._lock:
            return self._count(*self._where(query))

    def count_by_work(self, query: Query) -> list[tuple[str, int]]:
        """How many of the answers are of each work, the fewest first."""
        with self._lock:
            rule, given = self._where(query)
            sql = f"SELECT w.name, count(*) n FROM {_JOINED} WHERE {rule} GROUP BY w.id ORDER BY n, w.rank"
            return self._db.execute(sql, given).fetchall()

    def select(self, sql: str, given: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """The rows of a query on the tables."""
        with self._lock:
            self._rate()
            return self._db.execute(sql, given).fetchall()

    def _read_choices(self, work: str) -> Choices:
        rule, given = self._where(Query(work=work))

        def values(column: str, most: int = 200) -> list[str]:
            often = self._db.execute(
                f"SELECT r.{column}, count(*) n FROM {_JOINED} WHERE {rule} AND r.{column} != '' GROUP BY 1 "
                f"ORDER BY n DESC, 1 LIMIT {most}",
                given,
            )
            return sorted(value for value, _ in often)

        first, last = self._db.execute(f"SELECT min(r.step), max(r.step) FROM {_JOINED} WHERE {rule}", given).fetchone()
        return Choices(
            values("task", MOST_CHOICES), values("outcome"), values("status"), None if first is None else (first, last),
            values("reason"), values("level"),
        )  # fmt: skip

    def _count(self, rule: str, given: Parameters) -> int:
        return self._db.execute(f"SELECT count(*) FROM {_JOINED} WHERE {rule}", given).fetchone()[0]

    def _rows(self, ids: Sequence[int], text: str) -> dict[int, AnswerRow]:
        """The rows of these ids; of a search each with the place where its text was found."""
        found: dict[int, AnswerRow] = {}
        for begin in range(0, len(ids), 500):
            some = ids[begin : begin + 500]
            table = self._db.execute(
                f"SELECT {_COLUMNS} FROM {_SHOWN} WHERE r.id IN ({', '.join('?' * len(some))})", some
            )
            for id, work, file, place, group, step, *more, verifiers, prompt, answer in table.fetchall():
                reward, advantage, tokens, logprob, task, level, outcome, reason, status, expected = more
                found[id] = AnswerRow(
                    self._key(work, file, place), work, task, step, outcome, status, reward, advantage, tokens,
                    prompt or "", answer, "" if group.startswith("\0") else group, reason, None,
                    tuple(verifiers.split("\0")) if verifiers else (), level, logprob,
                    self._excerpt(id, text) if text else "", expected,
                )  # fmt: skip
        return found

    def _excerpt(self, id: int, text: str) -> str:
        """The line around the first place of a text, in the completion and its verdicts or else in the prompt."""
        text = visible_text(text)
        rows = self._db.execute(
            "WITH places AS (SELECT t.id own, t.text, instr(lower(t.text), lower(?)) place FROM texts t WHERE t.id = ? "
            "OR t.id = (SELECT prompt FROM rollouts WHERE id = ?)) SELECT place, substr(text, max(1, place - 60), ?) "
            "FROM places WHERE place > 0 ORDER BY own DESC",
            [text, id, id, HEAD + min(len(text), HEAD)],
        ).fetchone()
        return "" if rows is None else ("… " if rows[0] > 61 else "") + one_line(rows[1], HEAD + min(len(text), HEAD))

    def _where(self, query: Query) -> tuple[str, Parameters]:
        """The condition of a query, on `rollouts r` and `works w`."""
        rules, given = ["w.rank IS NOT NULL"], Parameters()

        def add(rule: str, *values: Any) -> None:
            rules.append(rule)
            given.extend(values)

        more = query.more
        exact = {"w.name": query.work, "r.outcome": query.outcome, "r.status": query.status, "r.reason": more.reason,
                 "r.level": more.level}  # fmt: skip
        for column, value in exact.items():
            if value:
                add(f"{column} = ?", value)
        if query.task:
            add("r.task LIKE ? ESCAPE '\\'", _pattern(query.task))
        steps = (query.step, query.step) if query.step is not None else more.steps
        for column, (low, high) in (("r.step", steps), ("r.reward", more.rewards)):
            if low is not None:
                add(f"{column} >= ?", low)
            if high is not None:
                add(f"{column} <= ?", high)
        if more.group:
            add("r.grp IN (SELECT id FROM groups WHERE name = ?)", more.group)
        if more.sign:
            self._rate()
            add(f"({SIGNS[more.sign]})")
        if more.text:
            self._search(more.text)
            add("(r.id IN (SELECT id FROM hits) OR r.prompt IN (SELECT id FROM hits))")
        return " AND ".join(rules), given

    def _search(self, text: str) -> None:
        """Fill `hits`; the next page of the same search finds it filled."""
        text = visible_text(text)  # as the texts are
        if self._searched != (text, self.revision):
            self._db.execute("DELETE FROM hits")
            self._db.execute("INSERT INTO hits SELECT id FROM texts WHERE text LIKE ? ESCAPE '\\'", [_pattern(text)])
            self._searched = text, self.revision

    def _rate(self) -> None:
        """What a passing rollout of each work earns on average."""
        if self._rated != self.revision:
            self._db.execute(
                "UPDATE works SET typical = "
                "(SELECT avg(reward) FROM rollouts r WHERE r.work = works.id AND outcome = 'passed')"
            )
            self._rated = self.revision

    def _work_number(self, work: str) -> int:
        self._db.execute("INSERT INTO works (name) VALUES (?) ON CONFLICT (name) DO NOTHING", [work])
        return self._db.execute("SELECT id FROM works WHERE name = ?", [work]).fetchone()[0]

    def _group_number(self, work: int, file: int, name: str) -> int:
        own = [work, file, name]
        found = self._db.execute("SELECT id FROM groups WHERE work = ? AND file = ? AND name = ?", own).fetchone()
        if found is not None:
            return found[0]
        return self._db.execute("INSERT INTO groups (work, file, name) VALUES (?, ?, ?)", own).lastrowid or 0


@dataclass(frozen=True)
class _Row:
    """What the table has of a stored row; `columns` are those from `reward` on."""

    group: str
    prompt_head: str
    prompt: str
    head: str
    text: str
    columns: tuple[Any, ...]


def _read_row(work: str, step: int | None, row: dict[str, Any]) -> _Row:
    shown, verdicts = answer_row(work, step, "", row), verdicts_of(row.get("scores"))
    prompt, response, answer = row.get("prompt"), row.get("response"), row.get("answer")
    parts = [response, answer if answer != response else None]
    parts += [part for verdict in verdicts for part in (verdict.reason, verdict.detail) if part]
    columns = (
        shown.reward, shown.advantage, shown.tokens, shown.logprob,
        read_signs(row, verdicts), _fingerprint(response), _fingerprint(row.get("reference") or row.get("task_id")),
        shown.task, shown.level, shown.outcome, shown.reason, shown.status, "\0".join(shown.verifiers),
        visible_text(row.get("rollout_id"), 200), shown.expected,
    )  # fmt: skip
    text = "\n".join(visible_text(part, SEARCHED) for part in parts if isinstance(part, str))
    return _Row(shown.group, shown.prompt, visible_text(prompt, SEARCHED), shown.answer, text, columns)


def _fingerprint(value: Any) -> int:
    try:
        return hash(json.dumps(value))
    except RecursionError:
        return 0


def _pattern(text: str) -> str:
    """The pattern of LIKE for texts that contain this one."""
    for special in "\\%_":
        text = text.replace(special, f"\\{special}")
    return f"%{text}%"


def _order(sort: str) -> str:
    column = sort.removeprefix("-")
    if column not in SORTS:
        return _NEWEST
    return f"r.{column} IS NULL, r.{column} {'ASC' if sort.startswith('-') else 'DESC'}, {_NEWEST}"


def _group_order(sort: str) -> str:
    """By the greatest value in a group, or the smallest if the smallest come first."""
    column, newest = sort.removeprefix("-"), "min(w.rank), max(r.step) DESC, max(r.file) DESC, min(r.place)"
    if column not in SORTS:
        return newest
    value, way = (f"min(r.{column})", "ASC") if sort.startswith("-") else (f"max(r.{column})", "DESC")
    return f"{value} IS NULL, {value} {way}, {newest}"
