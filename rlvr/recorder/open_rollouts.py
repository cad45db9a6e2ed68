"""Rollouts that programs outside play: each has an address of its own, and a queue of the calls that came in there.

    rollouts = OpenRollouts()
    rollout = rollouts.open(on_call, on_reward)  # its address is /r/<rollout.token>/v1/...
    rollout.close()                              # calls that wait are refused, and so is every later one

The web application (`rlvr.recorder.app`) hands calls in on its thread; who answers them takes them from `on_call`.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from rlvr.chat.dialects.forms import ChatAnswer, ChatRequest, DialectError, Json

MAX_WAITING = 64  # calls of one rollout at the same time
MAX_HELD = 64 << 20  # bytes of bodies of one rollout that are being read, or whose calls wait
_OVER = "the rollout is over, and its address answers no more"


@dataclass(eq=False)
class PendingCall:
    """A call that waits for its answers. `has_left` once the program has closed the connection; `delivered` says
    whether it was still there when its answers were; `arrived` is in seconds of the monotonic clock."""

    call: ChatRequest
    dialect: str
    id: str
    request: Json = field(repr=False)
    answers: Future[Sequence[ChatAnswer]] = field(default_factory=Future[Sequence[ChatAnswer]])
    has_left: bool = False
    delivered: Future[bool] = field(default_factory=Future[bool])
    arrived: float = field(default_factory=time.monotonic)

    def leave(self) -> None:
        """The program has gone."""
        self.has_left = True
        self.mark_delivered(False)

    def mark_delivered(self, is_there: bool) -> None:
        if not self.delivered.done():
            self.delivered.set_result(is_there)

    def answer(self, answers: Sequence[ChatAnswer]) -> None:
        if not self.answers.done():
            self.answers.set_result(answers)

    def refuse(self, error: DialectError) -> None:
        self.mark_delivered(False)
        if not self.answers.done():
            self.answers.set_exception(error)


@dataclass(frozen=True)
class ReportedReward:
    """A reward that a program reported for its rollout, or for the branch of the call whose answer has the id `call`.
    `source` says what gave it."""

    reward: float
    call: str = ""
    source: str = ""


OnReward = Callable[[ReportedReward], None]


def _no_answer(id: str, param: str) -> DialectError:
    return DialectError(
        f"this rollout has no answer with the id {id!r:.80}; give the id of one of its answers", param, 404
    )


class OpenRollout:
    """One rollout. `token` is unguessable: who knows it may call."""

    def __init__(
        self, on_call: Callable[[PendingCall], None], on_reward: OnReward, on_close: Callable[[str], None]
    ) -> None:
        self.token = secrets.token_urlsafe(18)
        self._name = secrets.token_hex(4)  # in the ids of answers, which are written down and the token is not
        self._on_call, self._on_reward, self._on_close = on_call, on_reward, on_close
        self._lock = threading.Lock()
        self._waiting: set[PendingCall] = set()
        self._answered: dict[str, tuple[ChatRequest, Json]] = {}  # by the id of an answer
        self._ids: set[str] = set()  # of all answers
        self._count, self._held, self._is_closed = 0, 0, False

    def offer(self, call: ChatRequest, dialect: str, request: Json) -> PendingCall:
        """Hand a call in. DialectError if the rollout is over, or too many of its calls wait."""
        with self._lock:
            if self._is_closed:
                raise DialectError(_OVER, status=410)
            if len(self._waiting) >= MAX_WAITING:
                raise DialectError(f"{MAX_WAITING} calls of this rollout wait for answers; wait for one", status=429)
            if call.previous is not None:
                before = self._answered.get(call.previous)
                if before is None:
                    raise _no_answer(call.previous, "previous_response_id")
                call = call.continue_from(*before)
            pending = PendingCall(call, dialect, f"{self._name}-{self._count:05d}", request)
            self._count += 1
            self._waiting.add(pending)
        pending.answers.add_done_callback(lambda _: self._settle(pending))
        self._on_call(pending)
        return pending

    def report(self, given: ReportedReward) -> None:
        """Hand a reward in. DialectError if the rollout is over, or gave no such answer."""
        with self._lock:
            if self._is_closed:
                raise DialectError(_OVER, status=410)
            if given.call and given.call not in self._ids:
                raise _no_answer(given.call, "call")
        self._on_reward(given)

    def hold(self, size: int) -> None:
        """Count bytes of a body, and take them off with a negative number. DialectError if there are too many."""
        with self._lock:
            if size > 0 and self._held + size > MAX_HELD:
                raise DialectError(
                    f"the calls of this rollout that wait have more than {MAX_HELD >> 20} MiB; wait for one", status=429
                )
            self._held += size

    def _settle(self, pending: PendingCall) -> None:
        with self._lock:
            self._waiting.discard(pending)
            if not pending.answers.cancelled() and pending.answers.exception() is None:
                self._ids.add(pending.id)
                if pending.call.is_kept:
                    self._answered[pending.id] = pending.call, pending.answers.result()[0].message

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            waiting = list(self._waiting)
        self._on_close(self.token)
        for pending in waiting:
            pending.refuse(DialectError(_OVER, status=410))


class OpenRollouts:
    """All rollouts that are open, by their tokens."""

    def __init__(self) -> None:
        self._open: dict[str, OpenRollout] = {}

    def open(self, on_call: Callable[[PendingCall], None], on_reward: OnReward = lambda given: None) -> OpenRollout:
        rollout = OpenRollout(on_call, on_reward, self._forget)
        self._open[rollout.token] = rollout
        return rollout

    def _forget(self, token: str) -> None:
        self._open.pop(token, None)

    def find(self, token: str) -> OpenRollout | None:
        return self._open.get(token)
