"""What the store keeps: a `Session` is one task worked on, an `Experience` one verified answer in it.

Plain dataclasses, no SQL: the service, the dashboard and the trackers speak in these. Times are seconds since the
epoch, in UTC.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

SUCCESS = 0.7  # the confidence above which an answer counts as right, if no verdict on it is stored
UNVERIFIED = "unverified"  # the outcome of an answer that no verifier could tell right from wrong


class Status(str, Enum):
    """Where a session stands. All but the first two are final."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"  # `error` says why; what was done until then is kept
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"  # the service stopped or was killed; its experiences are kept

    @property
    def final(self) -> bool:
        return self not in (Status.QUEUED, Status.RUNNING)


@dataclass
class Session:
    """One task worked on. `owner` is the hash of the API key that asked, `instance` the process that works on it.

    `request` is the body as it was accepted; `kind` is `train` or `evaluate` (the service), or `run` (a training run of
    `rlvr train` that writes into the store: then `task_id` is '' and `name` the run's name). `outcome` is that of the
    final solution, '' if there is none.
    """

    id: str
    task_id: str
    prompt: str
    request: dict[str, Any] = field(default_factory=dict[str, Any])
    kind: str = "train"
    name: str = ""
    owner: str = ""
    instance: str = ""
    status: Status = Status.QUEUED
    created: float = 0.0
    started: float | None = None
    finished: float | None = None
    heartbeat: float = 0.0
    iterations: int = 0
    final_solution: str | None = None
    final_confidence: float | None = None
    converged: bool = False
    convergence_iteration: int | None = None
    error: dict[str, Any] | None = None  # {"code": ..., "message": ...}
    metrics: dict[str, Any] = field(default_factory=dict[str, Any])  # what /train answers as `metrics`
    outcome: str = ""

    @property
    def is_solved(self) -> bool | None:
        """Whether the final solution passed; None if no verifier could judge it."""
        if self.final_confidence is None:
            return None
        passed = self.outcome == "passed" and self.final_confidence > 0  # the minimum asked for may be 0
        return passed if self.outcome else self.final_confidence > SUCCESS


@dataclass
class Experience:
    """One verified answer. (session_id, sample, iteration) is unique: a repeated write changes nothing.

    `iteration` counts from 1. `sample` tells episodes of one session apart (a group of answers to the same prompt).
    `confidence` and `reward` are None where no verifier could judge. `action` is the refinement strategy that was
    chosen, with its log-probability; `tokens`/`logprobs` are the policy's, where it has any (a text endpoint has none).
    `kind` is what the answer was asked for: `train`, `evaluate` (nothing is learned from it) or `run` (a training run);
    `verified_by` names the verifiers that decided, such as `code` or `draft+judge`.
    `gain` is what the strategy's policy learns from: the improvement this step and those after it brought. For a
    training run `step` is that of its metrics, `iteration` counts steps from 1 and `sample` tells the answers of a step
    apart.
    """

    session_id: str
    task_id: str
    iteration: int
    prompt: str
    generated_output: str
    sample: int = 0
    id: int | None = None
    feedback: dict[str, Any] = field(default_factory=dict[str, Any])  # `Feedback.as_dict()`
    scores: dict[str, Any] = field(default_factory=dict[str, Any])  # by verifier: a Score
    outcome: str = ""
    confidence: float | None = None
    correctness: float | None = None
    quality: float | None = None
    reward: float | None = None  # with people's ratings in it, where there are any
    verified_reward: float | None = None  # the verifiers' alone; None is written as `reward`
    gain: float | None = None
    action: str = ""
    action_logprob: float | None = None
    advantage: float | None = None
    stop_reason: str = ""
    tokens: list[int] | None = None
    logprobs: list[float] | None = None
    num_tokens: int = 0
    policy_version: int = 0
    policy_fingerprint: str = ""
    step: int | None = None  # of a training run
    priority: float = 1.0
    rating: float | None = None  # a person's, 0 to 1, mean of those given
    ratings: int = 0
    seconds: float = 0.0
    created: float = 0.0
    kind: str = "train"
    verified_by: str = ""
