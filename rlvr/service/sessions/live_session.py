"""A session while this process works on it: its phase, its answers so far, its events for watchers, and how it ended.

A session has the same events whether a client watches it live or reads it from the store later (`Sessions.watch`):
`status` queued, `status` running, one `iteration` for each verified answer, `end`. So a client that lost its connection
can resume by number, at another instance too.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import IntEnum
from typing import Any

from rlvr.reward.feedback import Feedback, is_request_fault
from rlvr.service.sessions.jobs import AnswerKey, SessionOutcome
from rlvr.service.sessions.verification import VerifiableTask
from rlvr.store import StoreDown
from rlvr.store.records import Experience, Session, Status

Event = dict[str, Any]
CANCELLED_ERROR = {"code": "cancelled", "message": "cancelled on request"}


class Phase(IntEnum):
    """Where a session is in this process. It only moves forward, and may skip phases."""

    STARTING = 0  # its row is being written
    QUEUED = 1  # its task waits for a slot
    RUNNING = 2  # the generator works on it
    ENDING = 3  # its final status is decided and being written
    OVER = 4


@dataclass(eq=False)
class LiveSession:
    """`turn` is what it takes turns by (`turn_of` of `sessions.py`). `stop_status` is the status a stop was requested
    with: no new iteration begins. `unsaved` are the answers that are not in the store yet, `store_error` is set once
    the store did not take them in time; a thread that writes them holds `saving`. `task` exists from QUEUED on. `loop`
    is the event loop of those who wait and watch."""

    session: Session
    target: VerifiableTask
    turn: str = ""
    is_background: bool = False
    phase: Phase = Phase.STARTING
    stop_status: Status | None = None
    task: asyncio.Task[None] | None = None
    feedbacks: list[Feedback] = field(default_factory=list[Feedback])
    experiences: list[Experience] = field(default_factory=list[Experience])
    unsaved: list[Experience] = field(default_factory=list[Experience])
    store_error: StoreDown | None = None
    saving: threading.RLock = field(default_factory=threading.RLock)
    loop: asyncio.AbstractEventLoop | None = None
    _reached: dict[Phase, asyncio.Event] = field(default_factory=lambda: {phase: asyncio.Event() for phase in Phase})
    _events: list[Event] = field(default_factory=list[Event])
    _news: asyncio.Event = field(default_factory=asyncio.Event)  # set, and replaced, after new events
    _watchers: int = 0

    def advance(self, phase: Phase) -> None:
        self.phase = max(self.phase, phase)
        for reached in range(self.phase + 1):
            self._reached[Phase(reached)].set()

    async def wait_for(self, phase: Phase) -> None:
        await self._reached[phase].wait()

    def request_stop(self, status: Status) -> None:
        """Begin no further iteration. The first request decides the status."""
        self.stop_status = self.stop_status or status

    @property
    def ids(self) -> dict[AnswerKey, int]:
        """The store's ids of the answers that it has."""
        return {(e.sample, e.iteration): e.id for e in self.experiences if e.id is not None}

    def publish(self, event: Event) -> None:
        """Add an event, from any thread."""
        self._events.append(event)
        if self._watchers and self.loop is not None:  # counted before they read: one of the two sees the other
            self.loop.call_soon_threadsafe(self._wake_watchers)

    def _wake_watchers(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def events(self) -> AsyncIterator[Event]:
        """All events from the first one to `end`, waiting for those to come."""
        number = 0
        self._watchers += 1
        try:
            while True:
                news = self._news
                if number == len(self._events):
                    await news.wait()
                for event in self._events[number:]:
                    number += 1
                    yield event
                    if event["event"] == "end":
                        return
        finally:
            self._watchers -= 1


def iso_time(seconds: Any) -> Any:
    """Seconds since the epoch as ISO 8601 in UTC; text and None stay as they are."""
    if not isinstance(seconds, (int, float)):
        return seconds
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def status_event(session_id: str, status: Status) -> Event:
    return {"event": "status", "session_id": session_id, "status": status.value}


def iteration_event(e: Experience) -> Event:
    return {
        "event": "iteration",
        "session_id": e.session_id,
        "iteration": e.iteration,
        "sample": e.sample,
        "generated_output": e.generated_output,
        "verifier_feedback": e.feedback,
        "outcome": e.outcome,
        "confidence": e.confidence,
        "reward": e.reward,
        "strategy": e.action or None,
        "timestamp": iso_time(e.created),
    }


def end_event(session: Session) -> Event:
    return {
        "event": "end",
        "session_id": session.id,
        "status": session.status.value,
        "final_solution": session.final_solution,
        "confidence": session.final_confidence,
        "iterations": session.iterations,
        "converged": session.converged,
        "error": session.error,
    }


def opening_events(session: Session) -> list[Event]:
    """The events of a stored session before its first answer."""
    statuses = (Status.QUEUED,) if session.started is None else (Status.QUEUED, Status.RUNNING)
    return [status_event(session.id, status) for status in statuses]


@dataclass(frozen=True)
class Ending:
    """The final status of a session, and why if it did not finish."""

    status: Status
    error: dict[str, Any] | None = None


def decide_ending(live: LiveSession, outcome: SessionOutcome) -> Ending:
    """The ending of a job that its generator played to the end."""
    if "cancelled" in outcome.end_reasons.values() and live.stop_status is not None:
        return decide_ending_of_stop(live)
    if live.feedbacks and all(f.confidence is None and not f.is_unverified for f in live.feedbacks):
        scores = live.feedbacks[-1].scores
        message = f"no verifier could judge an answer: {live.feedbacks[-1].failures}"
        is_invalid = all(is_request_fault(scores[label]) for label in live.target.blend.voters)
        code = "task_invalid" if is_invalid else "judge_failed"  # the request's fault, or a verifier's
        return Ending(Status.FAILED, {"code": code, "message": message[:640]})
    return Ending(Status.DONE)


def decide_ending_of_stop(live: LiveSession) -> Ending:
    if live.stop_status is Status.CANCELLED:
        return Ending(Status.CANCELLED, dict(CANCELLED_ERROR))
    return Ending(Status.INTERRUPTED, {"code": "interrupted", "message": "the service stopped"})
