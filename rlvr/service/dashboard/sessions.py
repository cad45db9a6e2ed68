"""The service's store as the source of a dashboard: sessions, their answers, and what people think of these.

    StoreSource(store)
    StoreSource(store, health=generator.health, learning=generator.learning, decode=generator.decode)

`health` and `learning` are shown as they are; `decode` makes text of tokens, None where no model is loaded. A
database that is away is `StoreDown`, which the page says, and tries again.
Exercised by tests/test_dashboard_sessions.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlvr.service.dashboard import session_rows
from rlvr.service.dashboard.data import (
    PAGE,
    Chart,
    Choices,
    Comparison,
    Detail,
    Entry,
    Found,
    Line,
    Note,
    Piece,
    Query,
    Work,
    line,
    mapping,
    number,
    outcome_of,
    thinned,
    verdicts_of,
    visible,
)
from rlvr.service.dashboard.pieces import MOST, pieces
from rlvr.service.loop.ratings import rate
from rlvr.store import Experience, Session, Status, Store
from rlvr.tracking.console import shown
from rlvr.types import Outcome, mean

SESSIONS = 400  # of the newest, that the curves of the overview are about
WINDOW = 20  # sessions that a point of these is the mean of
SAMPLES = 8  # episodes of a session that have a curve of their own
SUCCESS = 0.7  # confidence above which a session solved its task
SIBLINGS = 64


class StoreSource:
    """`title` is what the dashboard calls itself."""

    noun, status_noun, step_noun, can_rate = "session", "status", "iteration", True

    def __init__(
        self,
        store: Store,
        *,
        health: Callable[[], Mapping[str, Any]] | None = None,
        learning: Callable[[], Mapping[str, Any]] | None = None,
        decode: Callable[[Sequence[int]], str | None] = lambda tokens: None,
        title: str = "service",
    ) -> None:
        self._store, self._health, self._learning, self._decode, self.title = store, health, learning, decode, title

    def revision(self) -> object:
        return session_rows.newest(self._store), repr(self.health())

    def health(self) -> dict[str, Any] | None:
        if self._health is None:
            return None
        told = dict(self._health())
        learned = dict(self._learning()) if self._learning else {}
        figures = {"learns": visible(told.get("learns"), 40)} if told.get("learns") else {}
        for name, value in learned.items():
            if (known := number(value)) is not None:
                figures[name.replace("_", " ")] = f"{known:,.4g}"
        shown = {key: visible(told.get(key), 500) for key in ("state", "name", "detail")}
        return {**shown, "figures": figures}

    def works(self, offset: int = 0, limit: int = PAGE) -> tuple[list[Work], int]:
        found = self._store.sessions(limit=limit, offset=offset, texts=False)
        return [as_work(session) for session in found], sum(self._store.count_sessions().values())

    def work(self, work: str) -> Work | None:
        session = self._store.session(work) if work else None
        return as_work(session) if session else None

    def texts(self, work: str) -> list[tuple[str, str]]:
        session = self._store.session(work)
        if session is None:
            return []
        context = session.request.get("context")
        return [
            ("Prompt", visible(session.prompt)),
            *([("Context", visible(context))] if context else []),
            *([("Best answer", visible(session.final_solution))] if session.final_solution is not None else []),
        ]

    def charts(self, work: str = "", metric: str = "") -> list[Chart]:
        return self._session_charts(work) if work else self._overall()

    def metrics(self, work: str) -> list[str]:
        return []

    def notes(self, work: str) -> list[Note]:
        session = self._store.session(work)
        if session is None:
            return []
        found: list[Note] = []
        if error := mapping(session.error):
            found.append(Note("problem", visible(error.get("code"), 100), visible(error.get("message"), 2000)))
        if session.status is Status.INTERRUPTED:
            found.append(Note("hint", "The service stopped while it worked on this.", "What was done is kept below."))
        return found

    def comparisons(self, work: str) -> list[Comparison]:
        return []

    def choices(self, work: str) -> Choices:
        tasks, last = session_rows.choices(self._store, work)
        return Choices(
            tasks=[visible(task, 1000) for task in tasks],
            outcomes=[outcome.value for outcome in Outcome],
            statuses=[status.value for status in Status],
            steps=(1, last) if last else None,
        )

    def entries(self, query: Query) -> Found:
        rows, total = session_rows.page(self._store, query)
        return Found([as_entry(row) for row in rows], total)

    def detail(self, key: str) -> Detail | None:
        if not (key.isdecimal() and len(key) < 18):
            return None
        e = self._store.experience(int(key))
        if e is None:
            return None
        session = self._store.session(e.session_id)
        row = {**vars(e), "status": session.status if session else ""}
        others = session_rows.together(self._store, e, session is not None and session.kind == "run", SIBLINGS)
        told = mapping(e.feedback)
        shaded, note = self._shaded(e)
        return Detail(
            entry=as_entry(row),
            prompt=visible(e.prompt),
            answer=visible(e.generated_output),
            verdicts=verdicts_of(e.scores),
            pieces=shaded,
            pieces_note=note,
            feedback=visible(told.get("detailed_feedback")),
            suggestions=[visible(text, 1000) for text in _list(told.get("suggestions"))[:50]],
            facts=facts(e),
            siblings=[as_entry(other) for other in others],
            ratings=e.ratings,
        )

    def at_step(self, work: str, step: int) -> dict[str, float]:
        """The means over the answers of one iteration."""
        found = session_rows.means(self._store, work, step)
        return {name: float(value) for name, value in found.items() if value is not None}

    def rate(self, key: str, owner: str, rating: float) -> None:
        if not (key.isdecimal() and len(key) < 18) or rate(self._store, int(key), owner or "local", rating) is None:
            raise ValueError("this answer is not there any more")

    def _shaded(self, e: Experience) -> tuple[list[Piece], str]:
        """The answer's tokens, and what is to be said of them. A store may hold answers of several models."""
        if not e.tokens:
            return [], "a text endpoint gives no log-probs" if e.num_tokens or e.action else ""
        if not e.logprobs or len(e.tokens) != len(e.logprobs):
            return [], "its tokens have no log-probs"
        try:
            whole = self._decode(e.tokens)
        except Exception:  # each library has its own error for an id that it does not have
            whole = ""
        if whole is None:
            return [], "no model is loaded here that could tell its tokens apart"
        if _printed(e.generated_output) not in _printed(whole):
            return [], "its tokens are those of another model than the one that is loaded"
        note = f"the first {MOST:,} of {len(e.tokens):,} tokens" if len(e.tokens) > MOST else ""
        return pieces(e.tokens, e.logprobs, lambda tokens: self._decode(tokens) or ""), note

    def _session_charts(self, work: str) -> list[Chart]:
        session = self._store.session(work)
        if session is None:
            return []
        if session.kind == "run":
            return self._run_charts(work)
        rows = session_rows.by_sample(self._store, work)
        samples = sorted({row["sample"] for row in rows})
        charts: list[Chart] = []
        for title, column, share in (("Confidence", "confidence", True), ("Reward", "reward", False)):
            lines = [
                Line(f"episode {sample + 1}" if len(samples) > 1 else "answer", thinned(points))
                for sample in samples[:SAMPLES]
                if (points := [(float(row["iteration"]), float(row[column])) for row in rows
                               if row["sample"] == sample and row[column] is not None])
            ]  # fmt: skip
            if lines:
                charts.append(Chart(title, lines, share, "iteration", "by iteration"))
        return charts

    def _run_charts(self, work: str) -> list[Chart]:
        rows = session_rows.by_step(self._store, work)
        shown = (
            ("Reward", "reward", False, "mean over a step's answers"),
            ("Pass rate", "passed", True, "of judged answers"),
            ("Groups that teach", "teach", True, "tasks whose answers' rewards differ"),
        )
        charts: list[Chart] = []
        for title, name, share, hint in shown:
            points = [(float(row["iteration"]), float(row[name])) for row in rows if row[name] is not None]
            if points:
                charts.append(Chart(title, [Line("training", thinned(points))], share, "step", hint))
        return charts

    def _overall(self) -> list[Chart]:
        """How the newest sessions went, each point the mean of the `WINDOW` before it."""
        recent = list(reversed(self._store.sessions(kind="train", limit=SESSIONS, texts=False)))
        ended = [session for session in recent if session.final_confidence is not None]
        first = sum(self._store.count_sessions(kind="train").values()) - len(recent)
        places = {session.id: first + i + 1 for i, session in enumerate(recent)}
        spread = session_rows.spreads(self._store, [session.id for session in recent])

        def smooth(values: list[tuple[str, float]]) -> list[tuple[float, float]]:
            return thinned([
                (float(places[id]), mean([value for _, value in values[max(0, i + 1 - WINDOW) : i + 1]]))
                for i, (id, _) in enumerate(values)
            ])  # fmt: skip

        confidence = smooth([(s.id, s.final_confidence or 0.0) for s in ended])
        solved = smooth([(s.id, float((s.final_confidence or 0.0) > SUCCESS)) for s in ended])
        rewards = [(s.id, value) for s in ended if (value := number(s.metrics.get("average_reward"))) is not None]
        teach = smooth([(s.id, float(spread[s.id][0] != spread[s.id][1])) for s in ended if s.id in spread])
        hint = f"mean of {WINDOW} sessions"
        charts = [
            Chart("Pass rate", [Line("solved", solved), Line("confidence", confidence)], True, "session",
                  f"{hint}; solved: above {SUCCESS:.0%}"),
            Chart("Reward", [Line("mean", smooth(rewards))], False, "session", hint),
            Chart("Sessions that teach", [Line("teach", teach)], True, "session", "rewards of their answers differ"),
        ]  # fmt: skip
        return [chart for chart in charts if chart.lines[0].points]


def _printed(text: str) -> str:
    """Without what a database cannot be given, and what is written there instead of it."""
    return "".join(c for c in text if c.isprintable() and c != "\ufffd").strip()


def as_work(session: Session) -> Work:
    """A session by its task's name; its id tells two of one task apart."""
    of_run = session.kind == "run"
    figures = {"steps" if of_run else "iterations": f"{session.iterations:,}"}
    if of_run:
        figures |= shown({name.removeprefix("rl/"): value for name, value in session.metrics.items()})
    if session.final_confidence is not None:
        figures["confidence"] = f"{session.final_confidence:.2f}"
    for name, label in (("average_reward", "reward"), ("improvement_rate", "improvement")):
        if (value := number(session.metrics.get(name))) is not None:
            figures[label] = f"{value:.3f}"
    began, ended = session.started, session.finished
    if began and ended:
        figures["seconds"] = f"{ended - began:.1f}"
    about = "training run" if of_run else line(session.prompt, 100)
    return Work(
        id=session.id,
        name=line(session.name or session.task_id, 100) or session.id,
        status=session.status.value,
        live=session.status is Status.RUNNING,
        about=about,
        changed=ended or session.started or session.created,
        figures=figures,
    )


def as_entry(row: Mapping[Any, Any]) -> Entry:
    outcome, reason = outcome_of(verdicts_of(row["scores"]))
    status = row["status"]
    return Entry(
        key=str(row["id"]),
        work=visible(row["session_id"], 200),
        task=line(row["task_id"], 100),
        step=row["iteration"],
        outcome=visible(row["outcome"], 40) or outcome,
        status=status.value if isinstance(status, Status) else "",
        reward=number(row["reward"]),
        advantage=number(row["advantage"]),
        tokens=row["num_tokens"] or 0,
        prompt=line(row["prompt"]),
        answer=line(row["generated_output"]),
        reason=reason,
        rating=number(row["rating"]),
    )


def facts(e: Experience) -> dict[str, str]:
    """The numbers and names of an answer that are there."""
    shown = {name: getattr(e, name) for name in ("confidence", "correctness", "quality", "gain")}
    found = {name: f"{value:.3f}" for name, value in shown.items() if value is not None}
    if e.action:
        found["strategy"] = visible(e.action, 100)
    if e.stop_reason:
        found["stop reason"] = visible(e.stop_reason, 40)
    if e.policy_fingerprint:
        found["sampled by"] = visible(e.policy_fingerprint, 100)
    if e.seconds:
        found["seconds"] = f"{e.seconds:.2f}"
    return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
