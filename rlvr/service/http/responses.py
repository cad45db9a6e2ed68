"""The responses as pydantic models: the shapes that /openapi.json promises.

Clients rely on the field names. A number that could not be computed is null, never a constant. Times are ISO 8601 in
UTC. `ResponseModel`s that other parts fill may have more fields than are declared.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from rlvr.service.sessions.live_session import iso_time

IsoTime = Annotated[str, BeforeValidator(iso_time)]


class ResponseModel(BaseModel):
    model_config = ConfigDict(extra="allow")


class ProblemResponse(BaseModel):
    """A refusal or failure. `field` is the field at fault; `session_id` the session with the answers so far."""

    detail: str
    code: str
    request_id: str
    field: str | None = None
    session_id: str | None = None


class VerifierFeedback(ResponseModel):
    confidence: float | None = None
    correctness_score: float | None = None
    quality_score: float | None = None
    detailed_feedback: str = ""
    error_types: list[str] = Field(default_factory=list)
    suggestions: list[str] = Field(default_factory=list)


class TrainingStep(ResponseModel):
    iteration: int
    prompt: str
    generated_output: str
    verifier_feedback: VerifierFeedback
    reward: float | None
    timestamp: IsoTime


class TrainMetrics(ResponseModel):
    total_reward: float | None = None
    average_reward: float | None = None
    improvement_rate: float | None = None
    convergence_iteration: int | None = None
    verifier_accuracy: float | None = None
    verified_by: list[str] = []
    training_loss: float | None = None
    policy_entropy: float | None = None


class TrainResponse(ResponseModel):
    """The result of a session. `final_solution` is the best answer, null if there is none. `confidence` is null if no
    verifier could tell whether it is right. `warnings` say what the confidence does not mean; `derived_tests` are the
    tests that examples in the prompt gave."""

    session_id: str
    final_solution: str | None
    confidence: float | None
    iterations: int
    warnings: list[str] = []
    derived_tests: list[str | dict[str, str]] = []
    training_data: list[TrainingStep]
    metrics: TrainMetrics


class AcceptedSession(BaseModel):
    session_id: str
    status: str
    warnings: list[str] = []


class DetailedMetrics(ResponseModel):
    session_id: str
    task_id: str
    start_time: IsoTime | None
    end_time: IsoTime | None
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


class EvaluateResponse(ResponseModel):
    session_id: str
    task_id: str
    summary: str
    warnings: list[str] = []
    derived_tests: list[str | dict[str, str]] = []
    detailed_metrics: DetailedMetrics
    recommendations: list[str]


class GeneratorHealth(ResponseModel):
    """The generator of answers. `state` is ready, loading, down or absent; `learns` is weights, strategies or
    nothing."""

    kind: str
    name: str
    state: str
    detail: str = ""
    learns: str = ""


class JudgeHealth(ResponseModel):
    """The state of a judge in this process: ready, loading or down."""

    kind: str
    name: str
    state: str
    detail: str = ""


class PartHealth(ResponseModel):
    """The state of a part: ready, down, or absent (there is no sandbox on this machine)."""

    state: str
    detail: str = ""


class Health(ResponseModel):
    """Whether the service works. `status` is `ok` if sessions can run, else `degraded`, and `detail` says why."""

    status: str
    detail: str
    version: str
    instance: str
    uptime_seconds: float
    generator: GeneratorHealth
    judge: JudgeHealth | None = None
    verifiers: PartHealth
    database: PartHealth
    sessions: dict[str, int]
    timestamp: IsoTime


class Liveness(BaseModel):
    status: str


class TaskAggregate(ResponseModel):
    task_id: str
    total_sessions: int
    average_confidence: float | None
    average_iterations: float | None
    success_rate: float | None
    best_session_id: str | None
    best_confidence: float | None


class MetricsResponse(BaseModel):
    """By task, of the 1,000 tasks with the most training sessions."""

    task_aggregates: dict[str, TaskAggregate]
    timestamp: IsoTime


class TrainingStats(ResponseModel):
    """The state of the buffer, the verifiers and the policy that learns."""

    total_experiences: int
    buffer_utilization: float
    verifier_accuracy: float | None
    policy_entropy: float | None
    ready_for_training: bool


class GlobalStats(ResponseModel):
    total_experiences: int
    average_reward: float | None
    reward_variance: float | None
    success_rate: float | None
    last_updated: IsoTime | None


class Stats(BaseModel):
    training_stats: TrainingStats
    global_stats: GlobalStats
    timestamp: IsoTime


class ExperienceRow(ResponseModel):
    """One verified answer. `rating` is the mean of people's ratings, null without one."""

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
    timestamp: IsoTime


class Experiences(BaseModel):
    """A page of a task's answers. `count` is the task's total; `next_after` is the `after` of the next page, null on
    the last page."""

    task_id: str
    experiences: list[ExperienceRow]
    count: int
    next_after: int | None


class TaskAnalysis(ResponseModel):
    total_experiences: int
    average_reward: float | None
    median_reward: float | None
    reward_variance: float | None
    success_rate: float | None
    improvement_trend: float | None
    common_errors: dict[str, int]
    confidence_distribution: dict[str, int]


class AnalysisResponse(BaseModel):
    task_id: str
    analysis: TaskAnalysis


class CountedRate(ResponseModel):
    """A pass rate with counts. `low` and `high` are its 95 % interval over these tasks; null where no answer was
    judged."""

    verified_by: str
    tasks: int
    answers: int
    passed: int
    pass_rate: float | None
    low: float | None
    high: float | None


class TaskGroup(CountedRate):
    """The tasks that the same verifiers decide."""

    judged: int


class ErrorPattern(ResponseModel):
    """A type of error and how often it occurs; `share` is of the judged answers of this group."""

    verified_by: str
    verifier: str
    reason: str
    answers: int
    tasks: int
    share: float | None


class StrategyPattern(CountedRate):
    """A strategy for first answers (`after` null) or after an error of that type. `difference` is its pass rate less
    that of the other strategies on the same tasks; `p_value` is corrected for all comparisons, null where the counts
    are too few. `finding` is better, worse or undecided."""

    after: str | None
    strategy: str
    difference: float | None
    p_value: float | None
    finding: str


class PatternsResponse(BaseModel):
    """Statistics over all answers: by group of tasks, by type of error, and by strategy of the prompt."""

    groups: list[TaskGroup]
    errors: list[ErrorPattern]
    strategies: list[StrategyPattern]
    timestamp: IsoTime


class SessionRow(ResponseModel):
    """A session in a list. `kind` is `train` or `evaluate`, or `run` for a training run that writes into the store,
    which has a `name` and no task."""

    session_id: str
    task_id: str
    kind: str
    name: str
    status: str
    prompt: str
    created: IsoTime
    started: IsoTime | None
    finished: IsoTime | None
    iterations: int
    confidence: float | None
    converged: bool
    error: dict[str, Any] | None


class SessionPage(BaseModel):
    """The newest first. `next_offset` is the `offset` of the next page, null on the last page."""

    sessions: list[SessionRow]
    next_offset: int | None


class SessionState(SessionRow):
    """A session and its answers. `answer` is the response of /train, from the answers so far."""

    answer: TrainResponse


class RatingResponse(BaseModel):
    """An answer after it was rated. `rating` is the mean of people's ratings of this answer, `ratings` their number."""

    experience_id: int
    session_id: str
    task_id: str
    iteration: int
    sample: int
    rating: float
    ratings: int


class Grade(ResponseModel):
    """The verdict on a given answer. `value` is null if the answer could not be judged; `outcome` and `reason` say why
    (`unverified`: no verifier could tell whether it is right). `feedback` and `truth` come from verifiers, as in a
    session, not from a grader."""

    value: float | None
    outcome: str
    reason: str = ""
    detail: str = ""
    parts: dict[str, Any] = Field(default_factory=dict)
    feedback: VerifierFeedback | None = None
    truth: bool | None = None


class GradeResponse(BaseModel):
    """The verdicts on given answers; `warnings` and `derived_tests` as in the response of /train."""

    results: list[Grade]
    mean: float | None
    warnings: list[str] = []
    derived_tests: list[str | dict[str, str]] = []
