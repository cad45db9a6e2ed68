"""A session as a generator gets it (`Job`), what it gives back (`Outcome`), and what a `Generator` is.

Every verified answer goes to the job's `record` before the next one is asked for. The generators are in
`rlvr.service.loop.endpoint` (a model behind a URL) and `rlvr.service.loop.engine` (weights that are trained); all play
`rlvr.envs.refine` by the project's rollout. Exercised by tests/test_sessions.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlvr.envs.refine import Attempt
from rlvr.reward.blend import session_reward
from rlvr.reward.feedback import Feedback
from rlvr.service.loop.verification import Case
from rlvr.service.problems import NO_GENERATOR
from rlvr.store.records import Experience
from rlvr.types import Task

CONVERGED = ("confident", "converged")  # of the words by which an episode ends, those that mean that it got somewhere


class SessionFailure(Exception):
    """Why a session ended without having been worked to its end: a code to act on, and a message for people."""

    def __init__(self, code: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.code, self.retry_after = code, retry_after

    def as_dict(self) -> dict[str, Any]:
        told = {"code": self.code, "message": str(self)}
        return told if self.retry_after is None else {**told, "retry_after": self.retry_after}


@dataclass
class Job:
    """One session as a generator gets it. `record` may raise, which ends this job alone; `cancelled` is asked between
    iterations. `seed` fixes the draws, where it is not None; `learn` False leaves what learns as it is."""

    session_id: str
    case: Case
    max_iterations: int
    min_confidence: float
    convergence_threshold: float
    record: Callable[[Experience, Feedback], Coroutine[Any, Any, None]]
    cancelled: Callable[[], bool] = lambda: False
    samples: int | None = None
    seed: int | None = None
    learn: bool = True

    @property
    def task(self) -> Task:
        return self.case.task


@dataclass
class Outcome:
    """How a job ended: by sample, the word and the number of iterations. `loss` and `entropy` are those of what learns,
    as far as they are known; `gains` are what strategies learn from and `advantages` what
    weights were given, by (sample, iteration)."""

    ended: dict[int, str] = field(default_factory=dict[int, str])
    loss: float | None = None
    entropy: float | None = None
    gains: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    advantages: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])


class Generator(Protocol):
    """`health` never blocks; `run` raises SessionFailure; `learn` is called once a job's gains are in the store.

    `posed` is a prompt as a task of the model's own environment, with the name of its reward, where it has one.
    `decode` is the text of an answer's tokens, special ones too; None where no model is loaded that has them.
    """

    kind: str
    name: str

    def start(self) -> None: ...

    def health(self) -> dict[str, Any]: ...

    def posed(self, text: str) -> tuple[Task, str] | None: ...

    def decode(self, tokens: Sequence[int]) -> str | None: ...

    async def run(self, job: Job) -> Outcome: ...

    async def learn(self, result: float | None) -> None: ...

    def learning(self) -> dict[str, Any]: ...

    async def close(self) -> None: ...


def experience_of(
    job: Job,
    attempt: Attempt,
    feedback: Feedback,
    *,
    sample: int = 0,
    began: float,
    num_tokens: int | None = None,
    tokens: bool = False,
    logprobs: list[float] | None = None,
    action: str = "",
    action_logprob: float | None = None,
    policy_version: int = 0,
    policy_fingerprint: str = "",
) -> Experience:
    """A verified answer as the store keeps it. `began` is when it was asked for (`time.time`)."""
    now = time.time()
    first = next(iter(feedback.scores.values()), None)
    if feedback.truth is None:
        passed = feedback.confidence is not None and feedback.confidence >= job.min_confidence
    else:
        passed = feedback.truth
    unjudged = first.outcome.value if first is not None else "error"
    return Experience(
        session_id=job.session_id,
        task_id=job.task.id,
        iteration=attempt.number,
        sample=sample,
        prompt=attempt.prompt,
        generated_output=attempt.answer,
        feedback=feedback.as_dict(),
        scores={
            name: {
                "value": score.value,
                "outcome": score.outcome.value,
                "reason": score.reason,
                "parts": score.parts,
                "detail": score.detail[:2000],
            }
            for name, score in feedback.scores.items()
        },
        outcome=unjudged if feedback.confidence is None else "passed" if passed else "failed",
        confidence=feedback.confidence,
        correctness=feedback.correctness_score,
        quality=feedback.quality_score,
        reward=session_reward(feedback, attempt.number),
        action=action,
        action_logprob=action_logprob,
        stop_reason=attempt.stop_reason.value if attempt.stop_reason else "",
        tokens=list(attempt.tokens) if tokens else None,
        logprobs=logprobs,
        num_tokens=len(attempt.tokens) if num_tokens is None else num_tokens,
        policy_version=policy_version,
        policy_fingerprint=policy_fingerprint,
        seconds=max(0.0, now - began),
        created=now,
    )


class NoGenerator:
    """There is none: the service serves what it knows, and says what is missing."""

    kind, name = "none", ""

    def start(self) -> None:
        pass

    def health(self) -> dict[str, Any]:
        return {"kind": "none", "name": "", "state": "absent", "detail": NO_GENERATOR, "learns": "nothing"}

    def posed(self, text: str) -> tuple[Task, str] | None:
        return None

    def decode(self, tokens: Sequence[int]) -> str | None:
        return None

    async def run(self, job: Job) -> Outcome:
        raise SessionFailure("no_generator", NO_GENERATOR)

    async def learn(self, result: float | None) -> None:
        pass

    def learning(self) -> dict[str, Any]:
        return {"policy_entropy": None, "training_loss": None, "updates": 0, "learning_rate": None}

    async def close(self) -> None:
        pass
