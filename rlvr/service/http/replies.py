"""What the service answers, as pydantic models: the shapes that /openapi.json promises.

Field names are those that clients of this service know. A number that nobody could compute is null, never a constant.
Times are ISO 8601 in UTC. Models of what other parts fill allow more fields than are named here.
Exercised by tests/test_service_http.py.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def moment(seconds: Any) -> Any:
    """A time as clients read it, of seconds since the epoch; what is text or None already stays."""
    if not isinstance(seconds, (int, float)):
        return seconds
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


Moment = Annotated[str, BeforeValidator(moment)]


class Reply(BaseModel):
    model_config = ConfigDict(extra="allow")


class ProblemReply(BaseModel):
    """Every refusal and failure. `field` is the one at fault; `session_id` the session that keeps what was done."""

    detail: str
    code: str
    request_id: str
    field: str | None = None
    session_id: str | None = None


class VerifierFeedback(Reply):
    confidence: float | None = None
    correctness_score: float | None = None
    quality_score: float | None = None
    detailed_feedback: str = ""
    error_types: list[str] = Field(default_factory=list)
    suggestions: list[str] = Field(default_factory=list)


class TrainingStep(Reply):
    iteration: int
    prompt: str
    generated_output: str
    verifier_feedback: VerifierFeedback
    reward: float | None
    timestamp: Moment


class TrainMetrics(Reply):
    total_reward: float | None = None
    average_reward: float | None = None
    improvement_rate: float | None = None
    convergence_iteration: int | None = None
    verifier_accuracy: float | None = None
    verified_by: list[str] = []
    training_loss: float | None = None
    policy_entropy: float | None = None


class Trained(Reply):
    """`final_solution` is the best verified answer; null where there is none."""

    session_id: str
    final_solution: str | None
    confidence: float | None
    iterations: int
    training_data: list[TrainingStep]
    metrics: TrainMetrics


class Begun(BaseModel):
    session_id: str
    status: str


class DetailedMetrics(Reply):
    session_id: str
    task_id: str
    start_time: Moment | None
    end_time: Moment | None
    duration_seconds: float | None
    total_iterations: int
    final_confidence: float | None
    average_confidence: float | None
    confidence_improvement: float | None
    total_reward: float | None
    average_reward: float | None
    reward_trend: float | None
    max_reward: float | None
    min_reward: float | None
    correctness_scores: list[float]
    quality_scores: list[float]
    average_correctness: float | None
    average_quality: float | None
    total_errors: int
    unique_error_types: int
    error_frequency: dict[str, int]
    error_reduction_rate: float | None
    converged: bool
    convergence_iteration: int | None
    convergence_threshold: float | None
    verifier_accuracy: float | None
    policy_entropy: float | None
    training_loss: float | None
    tokens_generated: int
    tokens_per_iteration: float | None
    time_per_iteration: float | None


class Evaluated(Reply):
    session_id: str
    task_id: str
    summary: str
    detailed_metrics: DetailedMetrics
    recommendations: list[str]


class GeneratorHealth(Reply):
    """`state` is ready, loading, down or absent; `learns` is weights, strategies or nothing."""

    kind: str
    name: str
    state: str
    detail: str = ""
    learns: str = ""


class JudgeHealth(Reply):
    """Of a judge in this process; null where there is none. `state` is ready, loading or down."""

    kind: str
    name: str
    state: str
    detail: str = ""


class Health(Reply):
    """`status` is `ok` where sessions can be run, else `degraded`, and `detail` says why."""

    status: str
    detail: str
    version: str
    instance: str
    uptime_seconds: float
    generator: GeneratorHealth
    judge: JudgeHealth | None = None
    database: dict[str, Any]
    sessions: dict[str, int]
    timestamp: Moment


class Live(BaseModel):
    status: str


class TaskAggregate(Reply):
    task_id: str
    total_sessions: int
    average_confidence: float | None
    average_iterations: float | None
    success_rate: float | None
    best_session_id: str | None
    best_confidence: float | None


class Metrics(BaseModel):
    task_aggregates: dict[str, TaskAggregate]
    timestamp: Moment


class TrainingStats(Reply):
    """Of the buffer, of the verifiers, and of whatever learns here."""

    total_experiences: int
    buffer_utilization: float
    verifier_accuracy: float | None
    policy_entropy: float | None
    ready_for_training: bool


class GlobalStats(Reply):
    total_experiences: int
    average_reward: float | None
    reward_variance: float | None
    success_rate: float | None
    last_updated: Moment | None


class Stats(BaseModel):
    training_stats: TrainingStats
    global_stats: GlobalStats
    timestamp: Moment


class ExperienceRow(Reply):
    """One verified answer. `rating` is the mean of people's ratings, null where nobody gave one."""

    id: int
    session_id: str
    task_id: str
    iteration: int
    sample: int
    prompt: str
    generated_output: str
    verifier_feedback: VerifierFeedback
    reward: float | None
    outcome: str
    rating: float | None
    ratings: int
    timestamp: Moment


class Experiences(BaseModel):
    """`count` is how many the task has in all; `next_after` asks for the page after this one, null where none is."""

    task_id: str
    experiences: list[ExperienceRow]
    count: int
    next_after: int | None


class TaskAnalysis(Reply):
    total_experiences: int
    average_reward: float | None
    median_reward: float | None
    reward_variance: float | None
    success_rate: float | None
    improvement_trend: float | None
    common_errors: dict[str, int]
    confidence_distribution: dict[str, int]


class Analysis(BaseModel):
    task_id: str
    analysis: TaskAnalysis


class SessionRow(Reply):
    """`kind` is `train`, or `run` of a training run that writes into the store: that has a `name` and no task."""

    session_id: str
    task_id: str
    kind: str
    name: str
    status: str
    prompt: str
    created: Moment
    started: Moment | None
    finished: Moment | None
    iterations: int
    confidence: float | None
    converged: bool
    error: dict[str, Any] | None


class SessionPage(BaseModel):
    """The newest first. `next_offset` asks for the page after this one, null where none is."""

    sessions: list[SessionRow]
    next_offset: int | None


class SessionState(SessionRow):
    """`answer` is what /train would have answered, from what is there so far."""

    answer: Trained


class Rated(BaseModel):
    """`rating` is the mean of what people gave this answer, `ratings` how many did."""

    experience_id: int
    session_id: str
    task_id: str
    iteration: int
    sample: int
    rating: float
    ratings: int


class Grade(Reply):
    """`value` is null where the answer could not be judged: `outcome` and `reason` say why. `feedback` and `truth` are
    of verifiers, as a session would have them; a grader gives none."""

    value: float | None
    outcome: str
    reason: str = ""
    detail: str = ""
    parts: dict[str, Any] = Field(default_factory=dict)
    feedback: VerifierFeedback | None = None
    truth: bool | None = None


class Graded(BaseModel):
    results: list[Grade]
    mean: float | None
