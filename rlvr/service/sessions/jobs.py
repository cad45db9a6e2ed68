"""What a generator is given (`SessionJob`), what it returns (`SessionOutcome`), and what a `Generator` is.

An answer is judged and stored by one call of a thread (`SessionJob.open_judge`), before the generator samples the next
one. The two generators are
`rlvr.service.generators.endpoint_generator` (a model behind a URL) and `rlvr.service.generators.engine_generator`
(weights that are trained); both play the environment `rlvr.envs.refine`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlvr.core.types import Task
from rlvr.envs.reviewers import BlendJudge, BlendReviewer, JudgedAttempt, RecordAttempts, is_accepted
from rlvr.reward.blend import session_reward
from rlvr.reward.feedback import Feedback
from rlvr.service.service_metrics import ServiceMetrics
from rlvr.service.session_problems import NO_GENERATOR
from rlvr.service.sessions.verification import EnvironmentTask, VerifiableTask, list_verifiers
from rlvr.store.records import UNVERIFIED, Experience

CONVERGED = ("confident", "converged")  # the end reasons of an episode that mean success
NOTHING_LEARNED: dict[str, Any] = {"policy_entropy": None, "training_loss": None, "updates": 0, "learning_rate": None}

AnswerKey = tuple[int, int]  # (sample, iteration): an answer's place in its session


class SessionFailure(Exception):
    """A session that ended early: a `code` for programs, a message for people."""

    def __init__(self, code: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.code, self.retry_after = code, retry_after

    def as_dict(self) -> dict[str, Any]:
        error: dict[str, Any] = {"code": self.code, "message": str(self)}
        return error if self.retry_after is None else {**error, "retry_after": self.retry_after}


@dataclass
class SessionJob:
    """One session as a generator sees it.

    `record` stores answers that were judged together, and blocks; if it raises, only this job ends. `is_cancelled` is
    checked between iterations. `seed` fixes the random draws. With `learn=False` (an evaluation) nothing is learned
    from the session. Programs of different owners take turns in the sandbox. `threads` run what blocks.
    """

    session_id: str
    target: VerifiableTask
    max_iterations: int
    min_confidence: float
    convergence_threshold: float
    record: Callable[[Sequence[tuple[Experience, Feedback]]], None]
    is_cancelled: Callable[[], bool] = lambda: False
    samples: int | None = None
    seed: int | None = None
    learn: bool = True
    metrics: ServiceMetrics = field(default_factory=ServiceMetrics)
    owner: str = ""
    threads: Executor | None = None

    def open_judge(self, record: RecordAttempts) -> BlendJudge:
        """Open a judge whose threads pass what was judged to `record`."""
        return BlendJudge(self.target.blend, self.owner, record=record, threads=self.threads)

    def open_reviewer(self, judge: BlendJudge, sample: int, cancelled: Callable[[], bool]) -> BlendReviewer:
        return BlendReviewer(
            judge,
            min_confidence=self.min_confidence,
            convergence_threshold=self.convergence_threshold,
            sample=sample,
            cancelled=cancelled,
        )

    @property
    def kind(self) -> str:
        return "train" if self.learn else "evaluate"

    @property
    def task(self) -> Task:
        return self.target.task

    @property
    def draw_name(self) -> str:
        """The name that the random draws depend on: with a seed it is the same in every session of the task."""
        return self.session_id if self.seed is None else f"{self.task.id}/{self.seed}"


@dataclass
class SessionOutcome:
    """How a job ended. `end_reasons` is by sample; `loss` and `entropy` are the policy's, None if unknown; `gains` (for
    strategies) and `advantages` (for weights) are by answer."""

    end_reasons: dict[int, str] = field(default_factory=dict[int, str])
    loss: float | None = None
    entropy: float | None = None
    gains: dict[AnswerKey, float] = field(default_factory=dict[AnswerKey, float])
    advantages: dict[AnswerKey, float] = field(default_factory=dict[AnswerKey, float])


class Generator(Protocol):
    """A model that works on sessions.

    `health` never blocks; `check` brings it up to date. `refresh`, which blocks, loads what other instances learned.
    `task_from_prompt` makes a task of the model's own environment, or returns None. `decode` returns the text of
    tokens with special tokens, or None if no model with a tokenizer is loaded. `run` raises
    SessionFailure. `learn`, which blocks, is called with the answers of a job that have gains, after these are stored.
    """

    kind: str
    name: str

    def start(self) -> None:
        pass

    def health(self) -> dict[str, Any]: ...

    async def check(self) -> None:
        pass

    def refresh(self) -> None:
        pass

    def task_from_prompt(self, text: str) -> EnvironmentTask | None:
        return None

    def decode(self, tokens: Sequence[int]) -> str | None:
        return None

    async def run(self, job: SessionJob) -> SessionOutcome: ...

    def learn(self, answers: Sequence[Experience]) -> None:
        pass

    def learning(self) -> dict[str, Any]: ...

    async def close(self) -> None:
        pass


def build_experience(
    job: SessionJob,
    judged: JudgedAttempt,
    *,
    began: float,
    num_tokens: int | None = None,
    tokens: bool = False,
    logprobs: list[float] | None = None,
    action: str = "",
    action_logprob: float | None = None,
    policy_version: int = 0,
    policy_fingerprint: str = "",
) -> Experience:
    """The stored form of a verified answer. `began` is when its sampling began (`time.time`)."""
    now, attempt, feedback = time.time(), judged.attempt, judged.feedback
    first = next(iter(feedback.scores.values()), None)
    passed = is_accepted(feedback, job.min_confidence) if feedback.truth is None else feedback.truth
    unjudged = UNVERIFIED if feedback.is_unverified else first.outcome.value if first is not None else "error"
    return Experience(
        session_id=job.session_id,
        task_id=job.task.id,
        iteration=attempt.number,
        sample=judged.sample,
        prompt=attempt.prompt,
        generated_output=attempt.answer,
        feedback=feedback.as_dict(),
        scores={
            name: {**vars(score), "outcome": score.outcome.value, "detail": score.detail[:2000]}
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
        kind=job.kind,
        verified_by="+".join(list_verifiers(job.target.blend, [feedback])),
    )


class NoGenerator(Generator):
    """The generator of a service without a model: the service answers queries, and sessions fail with the remedy.

    The methods that it inherits do nothing.
    """

    kind, name = "none", ""

    def health(self) -> dict[str, Any]:
        return {"kind": "none", "name": "", "state": "absent", "detail": NO_GENERATOR, "learns": "nothing"}

    async def run(self, job: SessionJob) -> SessionOutcome:
        raise SessionFailure("no_generator", NO_GENERATOR)

    def learning(self) -> dict[str, Any]:
        return dict(NOTHING_LEARNED)
