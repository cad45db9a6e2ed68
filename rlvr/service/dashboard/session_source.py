"""The service's store as the source of a dashboard: sessions, their answers, and people's ratings.

    StoreSource(store)
    StoreSource(store, health=generator.health, learning=generator.learning, decode=generator.decode)

`health` and `learning` are shown as they are; `decode` turns tokens into text, or returns None while no model is
loaded; `collect` returns the counters of `rlvr.service.service_metrics`, and `limit` sessions run at a time. If the
database is down, methods raise `StoreDown`, and the page says so and retries.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rlvr.core.types import Outcome
from rlvr.service.dashboard import session_rows
from rlvr.service.dashboard.answer_reference import reference_of_session
from rlvr.service.dashboard.dashboard_data import (
    PAGE,
    AnswerDetail,
    AnswerPage,
    AnswerRow,
    Chart,
    Choices,
    Curve,
    MachineGroup,
    Neighbours,
    Note,
    Query,
    Source,
    TokenView,
    Work,
    as_list,
    as_mapping,
    finite_number,
    one_line,
    outcome_of,
    thin_points,
    verdicts_of,
    visible_text,
)
from rlvr.service.dashboard.service_load import ServiceLoad
from rlvr.service.dashboard.session_curves import FEWEST, overall_charts
from rlvr.service.dashboard.token_pieces import MOST, token_pieces
from rlvr.service.learning.strategies import FIRST, NEXT
from rlvr.service.learning.strategy_policy import STATE, StrategyPolicy, rate
from rlvr.store import Experience, ExperienceStore, Session, Status
from rlvr.store.records import UNVERIFIED
from rlvr.tracking.console import format_metrics

SAMPLES = 8  # episodes of a session with a curve
SIBLINGS = 64
REST = 20.0  # times as long as the curves of all sessions took, until they are computed again


class StoreSource(Source):
    """The dashboard's source of a service's sessions; `title` is the heading of the dashboard."""

    noun, status_noun, step_noun, can_rate = "session", "status", "iteration", True
    filters, sorts = session_rows.FILTERS, tuple(session_rows.SORTS)
    no_charts = f"Curves begin at {FEWEST} judged answers."

    def __init__(
        self,
        store: ExperienceStore,
        *,
        health: Callable[[], Mapping[str, Any]] | None = None,
        learning: Callable[[], Mapping[str, Any]] | None = None,
        decode: Callable[[Sequence[int]], str | None] = lambda tokens: None,
        collect: Callable[[], Iterable[Any]] | None = None,
        limit: int = 0,
        title: str = "service",
    ) -> None:
        self._store, self._health, self._learning, self._decode, self.title = store, health, learning, decode, title
        self._load = ServiceLoad(collect, limit)
        self._drawn, self._redraw_at = list[Chart](), 0.0

    def revision(self) -> object:
        return session_rows.newest_change(self._store), repr(self.health())

    def health(self) -> dict[str, Any] | None:
        if self._health is None:
            return None
        health = dict(self._health())
        figures = {"learns": visible_text(health.get("learns"), 40)} if health.get("learns") else {}
        figures |= describe_learning(self.learning())
        return {key: visible_text(health.get(key), 500) for key in ("state", "name", "detail")} | {"figures": figures}

    def works(self, offset: int = 0, limit: int = PAGE) -> tuple[list[Work], int]:
        sessions = self._store.sessions(limit=limit, offset=offset, texts=False)
        return [as_work(session) for session in sessions], sum(self._store.count_sessions().values())

    def work(self, work: str) -> Work | None:
        session = self._store.session(work) if work else None
        return as_work(session) if session else None

    def texts(self, work: str) -> list[tuple[str, str]]:
        session = self._store.session(work)
        if session is None:
            return []
        context = session.request.get("context")
        return [
            ("Prompt", visible_text(session.prompt)),
            *([("Context", visible_text(context))] if context else []),
            *([("Best answer", visible_text(session.final_solution))] if session.final_solution is not None else []),
            *reference_of_session(session),
        ]

    def charts(self, work: str = "") -> list[Chart]:
        return self._session_charts(work) if work else self._overall_charts()

    def _overall_charts(self) -> list[Chart]:
        """Drawn from all answers, so in a large store not for every page and every new answer."""
        now = time.monotonic()
        if now >= self._redraw_at:
            self._drawn = overall_charts(self._store)
            self._redraw_at = now + REST * (time.monotonic() - now)
        return self._drawn

    def notes(self, work: str) -> list[Note]:
        session = self._store.session(work)
        if session is None:
            return []
        notes: list[Note] = []
        if error := as_mapping(session.error):
            notes.append(
                Note("problem", visible_text(error.get("code"), 100), visible_text(error.get("message"), 2000))
            )
        if session.status is Status.INTERRUPTED:
            notes.append(Note("hint", "The service stopped during this session.", "The answers so far are below."))
        return notes + [Note("hint", visible_text(text, 1000)) for text in as_list(session.metrics.get("warnings"))]

    def choices(self, work: str) -> Choices:
        tasks, last = session_rows.filter_choices(self._store, work)
        return Choices(
            tasks=[visible_text(task, 1000) for task in tasks],
            outcomes=[*(outcome.value for outcome in Outcome), UNVERIFIED],
            statuses=[status.value for status in Status],
            steps=(1, last) if last else None,
            strategies=[strategy.name for strategy in (*FIRST, *NEXT)],
        )

    def answers(self, query: Query) -> AnswerPage:
        rows, total = session_rows.list_page(self._store, query)
        return AnswerPage([as_answer_row(row) for row in rows], total)

    def neighbours(self, query: Query, grouped: bool, key: str) -> Neighbours | None:
        found = session_rows.find_neighbours(self._store, query, int(key)) if _is_key(key) else None
        if found is None:
            return None
        before, after = ("" if one is None else str(one) for one in found[:2])
        return Neighbours(before, after, *found[2:])

    def sessions(self, result: str, task: str, sort: str, offset: int, limit: int = PAGE) -> tuple[list[Session], int]:
        return session_rows.sessions_page(self._store, result, task, sort, offset, limit)

    def steps_of(self, sessions: Sequence[Session]) -> dict[str, session_rows.Rows]:
        return session_rows.steps_of(self._store, [session.id for session in sessions])

    def strategies(self) -> StrategyPolicy | None:
        """The policy over strategies as the store has it; None if no strategy was learned."""
        policy = StrategyPolicy((self._store.state(STATE) or (None, 0))[0])
        return None if policy.is_new else policy

    def learning(self) -> dict[str, Any]:
        return dict(self._learning()) if self._learning else {}

    def count_by_strategy(self) -> dict[str, tuple[int, int]]:
        return session_rows.count_by_strategy(self._store)

    def machines(self) -> list[MachineGroup]:
        instances, now = session_rows.load(self._store)
        return self._load.machines(self._health() if self._health else {}, self.learning(), instances, now)

    def detail(self, key: str) -> AnswerDetail | None:
        if not _is_key(key):
            return None
        e = self._store.experience(int(key))
        if e is None:
            return None
        session = self._store.session(e.session_id)
        row = {**vars(e), "status": session.status if session else ""}
        others = session_rows.list_siblings(self._store, e, session is not None and session.kind == "run", SIBLINGS)
        feedback = as_mapping(e.feedback)
        return AnswerDetail(
            row=as_answer_row(row),
            prompt=visible_text(e.prompt),
            answer=visible_text(e.generated_output),
            verdicts=verdicts_of(e.scores),
            tokens=self._token_pieces(e),
            reference=reference_of_session(session) if session else [],
            feedback=visible_text(feedback.get("detailed_feedback")),
            suggestions=[visible_text(text, 1000) for text in as_list(feedback.get("suggestions"))[:50]],
            facts=known_facts(e),
            siblings=[as_answer_row(other) for other in others],
            ratings=e.ratings,
        )

    def at_step(self, work: str, step: int) -> dict[str, float]:
        """The means over the answers of one iteration."""
        means = session_rows.iteration_means(self._store, work, step)
        return {name: float(value) for name, value in means.items() if value is not None}

    def rate(self, key: str, owner: str, rating: float) -> None:
        if not _is_key(key) or rate(self._store, int(key), owner or "local", rating) is None:
            raise ValueError("this answer was deleted")

    def _token_pieces(self, e: Experience) -> TokenView:
        """The answer's tokens as text, if the loaded model made them. A store may have answers of several models."""
        if not e.tokens:
            return TokenView(note="a text endpoint gives no log-probs" if e.num_tokens or e.action else "")
        if not e.logprobs or len(e.tokens) != len(e.logprobs):
            return TokenView(note="its tokens have no log-probs")
        try:
            text = self._decode(e.tokens)
        except Exception:  # each library raises its own error for an unknown id
            text = ""
        if text is None:
            return TokenView(note="no model is loaded that could decode its tokens")
        if _comparable_text(e.generated_output) not in _comparable_text(text):
            return TokenView(note="its tokens are of another model than the loaded one")
        note = f"the first {MOST:,} of {len(e.tokens):,} tokens" if len(e.tokens) > MOST else ""
        return TokenView(token_pieces(e.tokens, e.logprobs, lambda tokens: self._decode(tokens) or ""), note)

    def _session_charts(self, work: str) -> list[Chart]:
        session = self._store.session(work)
        if session is None:
            return []
        if session.kind == "run":
            return self._run_charts(work)
        rows = session_rows.session_answers(self._store, work)
        samples = sorted({row["sample"] for row in rows})
        charts: list[Chart] = []
        for title, column, share, unit in (
            ("Confidence", "confidence", True, "%"),
            ("Reward", "reward", False, "reward"),
        ):
            curves = [
                Curve(f"episode {sample + 1}" if len(samples) > 1 else "answer", thin_points(points))
                for sample in samples[:SAMPLES]
                if (points := [(float(row["iteration"]), float(row[column])) for row in rows
                               if row["sample"] == sample and row[column] is not None])
            ]  # fmt: skip
            if curves:
                charts.append(Chart(title, curves, share, "iteration", unit=unit))
        return charts

    def _run_charts(self, work: str) -> list[Chart]:
        rows = session_rows.run_steps(self._store, work)
        curves = (
            ("Reward", "reward", False, "", "mean reward of an answer"),
            ("Pass rate", "passed", True, "", "% of judged answers"),
            ("Groups with signal", "signal", True, "tasks whose answers' rewards differ", "% of tasks"),
        )
        charts: list[Chart] = []
        for title, name, share, hint, unit in curves:
            points = [(float(row["iteration"]), float(row[name])) for row in rows if row[name] is not None]
            if points:
                charts.append(Chart(title, [Curve("training", thin_points(points))], share, "step", hint, unit))
        return charts


def describe_learning(learned: Mapping[str, Any]) -> dict[str, str]:
    """The numbers of what learns, as text."""
    named = {name.replace("_", " "): finite_number(value) for name, value in learned.items()}
    return {name: f"{number:,.4g}" for name, number in named.items() if number is not None}


def _is_key(key: str) -> bool:
    return key.isdecimal() and len(key) < 18


def _comparable_text(text: str) -> str:
    """The printable text, without characters that a database replaces."""
    return "".join(c for c in text if c.isprintable() and c != "\ufffd").strip()


def as_work(session: Session) -> Work:
    """A session, named by its task."""
    of_run = session.kind == "run"
    figures = {"steps" if of_run else "iterations": f"{session.iterations:,}"}
    if of_run:
        figures |= format_metrics({name.removeprefix("rl/"): value for name, value in session.metrics.items()})
    if session.final_confidence is not None:
        figures["confidence"] = f"{session.final_confidence:.2f}"
    for name, label in (("average_reward", "reward"), ("improvement_rate", "improvement")):
        if (value := finite_number(session.metrics.get(name))) is not None:
            figures[label] = f"{value:.3f}"
    began, ended = session.started, session.finished
    if began and ended:
        figures["seconds"] = f"{ended - began:.1f}"
    about = "training run" if of_run else one_line(session.prompt, 100)
    return Work(
        id=session.id,
        name=one_line(session.name or session.task_id, 100) or session.id,
        status=session.status.value,
        result="" if of_run or session.status is not Status.DONE else result_of(session),
        live=session.status is Status.RUNNING,
        about=about,
        changed=ended or session.started or session.created,
        figures=figures,
    )


def result_of(session: Session) -> str:
    """Whether a session that is done has solved its task, as far as its verifiers can tell."""
    return {None: UNVERIFIED, True: "solved", False: "not solved"}[session.is_solved]


def as_answer_row(row: Mapping[Any, Any]) -> AnswerRow:
    verdicts = verdicts_of(row["scores"])
    outcome, reason = outcome_of(verdicts)
    outcome = visible_text(row["outcome"], 40) or outcome
    if outcome == Outcome.PASSED.value and not row["confidence"]:  # the minimum that the request asked for was 0
        outcome = UNVERIFIED
    status = row["status"]
    return AnswerRow(
        key=str(row["id"]),
        work=visible_text(row["session_id"], 200),
        task=one_line(row["task_id"], 100),
        step=row["iteration"],
        outcome=outcome,
        status=status.value if isinstance(status, Status) else "",
        reward=finite_number(row["reward"]),
        advantage=finite_number(row["advantage"]),
        tokens=row["num_tokens"] or 0,
        prompt=one_line(row["prompt"]),
        answer=one_line(row["generated_output"]),
        reason=reason,
        rating=finite_number(row["rating"]),
        verifiers=tuple(verdict.verifier for verdict in verdicts),
    )


def known_facts(e: Experience) -> dict[str, str]:
    """The known numbers and names of an answer."""
    scores = {name: getattr(e, name) for name in ("confidence", "correctness", "quality", "gain")}
    facts = {name: f"{value:.3f}" for name, value in scores.items() if value is not None}
    if e.action:
        facts["strategy"] = visible_text(e.action, 100)
    if e.stop_reason:
        facts["stop reason"] = visible_text(e.stop_reason, 40)
    if e.policy_fingerprint:
        facts["sampled by"] = visible_text(e.policy_fingerprint, 100)
    if e.seconds:
        facts["seconds"] = f"{e.seconds:.2f}"
    return facts
