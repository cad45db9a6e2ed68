"""A session while this process works on it: what it has done so far, and its events for whoever watches.

The events of a session are the same whether they are heard as they happen or read from the store afterwards
(`Sessions.watch`): `status` queued, `status` running, an `iteration` for each verified answer, `end`. So a client that
lost its connection can go on by number, on another instance too. Exercised by tests/test_sessions.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from rlvr.reward.feedback import Feedback
from rlvr.service.http.replies import moment
from rlvr.service.loop.verification import Case
from rlvr.store import StoreDown
from rlvr.store.records import Experience, Session, Status

Event = dict[str, Any]


@dataclass(eq=False)
class Live:
    """`unsaved` are answers that the store has not got yet, `away` why it did not take them in the time it was given.
    `stop` says why no new iteration shall begin, if none shall. `begun`: its row is written and `task` works on it, or
    it could not be written."""

    session: Session
    case: Case
    feedbacks: list[Feedback] = field(default_factory=list[Feedback])
    experiences: list[Experience] = field(default_factory=list[Experience])
    unsaved: list[Experience] = field(default_factory=list[Experience])
    away: StoreDown | None = None
    stop: str = ""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)
    saving: asyncio.Lock = field(default_factory=asyncio.Lock)
    _events: list[Event] = field(default_factory=list[Event])
    _told: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def ids(self) -> dict[tuple[int, int], int]:
        """The store's numbers, by (sample, iteration)."""
        return {(e.sample, e.iteration): e.id for e in self.experiences if e.id is not None}

    async def tell(self, event: Event) -> None:
        async with self._told:
            self._events.append(event)
            self._told.notify_all()

    async def events(self) -> AsyncIterator[Event]:
        """From the first one on, until `end`."""
        number = 0
        while True:
            async with self._told:
                await self._told.wait_for(lambda: len(self._events) > number)  # noqa: B023
                fresh = self._events[number:]
            for event in fresh:
                number += 1
                yield event
                if event["event"] == "end":
                    return


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
        "timestamp": moment(e.created),
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
    """Those before the first answer that a stored session has had so far."""
    queued, running = (status_event(session.id, status) for status in (Status.QUEUED, Status.RUNNING))
    return [queued] if session.started is None else [queued, running]
