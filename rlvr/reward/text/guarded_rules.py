"""Scores of rules that run in a guarded worker, where an answer can cost its own limit of time and memory only.

An answer on which a rule runs out of time or memory, and does so again in a worker that has just done the same for a
plain item and for the task's reference, has broken the rule (`timeout`, `memory`): as an `error` it would have no
value, and a policy that writes such answers would never learn that they are wrong. Where the reference fails too, the
rule is to blame: an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlvr.core.types import Outcome, Score

if TYPE_CHECKING:
    from rlvr.sandbox import Worker, WorkerReply

MAX_CHARS = 100_000  # of an answer that a rule looks into
WARM_SECONDS = 30.0  # that a new worker may take to load what it needs, on a busy machine

NO_WORKER = (
    "could not start the worker process in which patterns and schemas run; they are not the cause, correct what the "
    "system says and run again: "
)


def rule_score(
    reason: str = "", detail: str = "", *, parts: Mapping[str, float] | None = None, outcome: Outcome = Outcome.FAILED
) -> Score:
    """1.0 without a reason, else 0.0."""
    return Score(float(not reason), outcome if reason else Outcome.PASSED, reason, dict(parts or {}), detail)


@dataclass(frozen=True)
class GuardedRule:
    """A rule in a worker: its setup, the seconds that a text has, and how a verdict is read from the worker's reply.

    `remedy` says which rule it is and what to do where it takes too long.
    """

    worker: Worker
    setup: dict[str, Any]
    seconds: float
    read: Callable[[Any], Score]
    remedy: str = ""
    _references: dict[str, WorkerReply] = field(default_factory=dict[str, "WorkerReply"], compare=False)

    def score(self, texts: Sequence[str], references: Sequence[str | None] | None = None) -> list[Score]:
        """One score per text; `references` are the reference answers of their tasks, None where there is none."""
        from rlvr.sandbox.worker import LATE_IN_A_ROW

        replies = iter(self.worker.map(self.setup, [text for text in texts if len(text) <= MAX_CHARS], self.seconds))
        scores: list[Score] = []
        late = 0
        for text, reference in zip(texts, references or [None] * len(texts), strict=True):
            if len(text) > MAX_CHARS:
                scores.append(rule_score("too_large"))
                continue
            reply = next(replies)
            if not reply.failure:
                late = 0
                scores.append(self.read(reply.value))
            elif reply.failure == "not_started":
                scores.append(Score(None, Outcome.ERROR, "no_worker", detail=NO_WORKER + reply.detail))
            elif late == LATE_IN_A_ROW:  # the worker gave up on the rest of the batch: these were not tried
                scores.append(Score(None, Outcome.ERROR, "not_run", detail=reply.detail + self.remedy))
            else:
                late += reply.failure == "timeout"
                scores.append(self._try_again(text, reference))
        return scores

    def _try_again(self, text: str, reference: str | None) -> Score:
        """Try a text once more after a failure, but first what no answer can have caused to fail."""
        (warm,) = self.worker.map(self.setup, [None], WARM_SECONDS)
        if warm.failure:
            return Score(None, Outcome.ERROR, "worker_failed", detail=f"{warm.failure}: {warm.detail}")
        if reference is not None and len(reference) <= MAX_CHARS:
            known = self._references
            if reference not in known:
                (known[reference],) = self.worker.map(self.setup, [reference], self.seconds)
            if (control := known[reference]).failure:
                reason = "rule_timeout" if control.failure == "timeout" else "rule_failed"
                where = f"on the task's reference, of {len(reference):,} characters, too"
                return Score(None, Outcome.ERROR, reason, detail=f"{where}: {control.detail}{self.remedy}")
        (reply,) = self.worker.map(self.setup, [text], self.seconds)
        if not reply.failure:
            return self.read(reply.value)
        detail = f"on an answer of {len(text):,} characters: {reply.detail}{self.remedy}"
        if reply.failure == "timeout":
            return rule_score("timeout", detail, outcome=Outcome.TIMEOUT)
        return rule_score("memory" if reply.failure == "died" else "unjudgeable", f"{reply.failure} {detail}")
