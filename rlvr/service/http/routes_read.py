"""Routes that only read: health, metrics, statistics, experiences, analysis.

The service learns from all sessions, so every key sees the experiences of all. The metrics' numbers from the database
are read on each scrape and are the same at all instances; docs/service/operations.md lists the names.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from prometheus_client.core import GaugeMetricFamily, Metric
from starlette.responses import JSONResponse

from rlvr import __version__
from rlvr.service.http.responses import (
    AnalysisResponse,
    Experiences,
    Health,
    Liveness,
    MetricsResponse,
    PatternsResponse,
    Stats,
)
from rlvr.service.http.runtime import OwnerDep, Service, ServiceDep
from rlvr.service.http.strict_routes import StrictRoute, json_response
from rlvr.service.session_problems import NO_GENERATOR, not_found, store_unavailable
from rlvr.store import StoreDown
from rlvr.store.records import Experience, Status
from rlvr.web.prometheus import gauge

router = APIRouter(route_class=StrictRoute)
LARGEST_PAGE = 4 << 20  # characters after which a page of answers ends early
STEP = 20  # answers read at a time
LONGEST_ID = 1_000
# Of the metrics for Prometheus: states of a generator, and numbers of what was learned.
STATES = ("ready", "loading", "down", "absent")
LEARNED = ("policy_entropy", "training_loss", "learning_rate", "updates")
SHARED = ("sampled_step", "is_learner", "sessions_waiting", "sessions_dropped")  # of a policy that replicas share
TASKS = 50  # with a series of their own: those with the most sessions
EMPTY_ANALYSIS = {  # for a task without an answer
    "total_experiences": 0,
    "average_reward": None,
    "median_reward": None,
    "reward_variance": None,
    "success_rate": None,
    "improvement_trend": None,
    "common_errors": {},
    "confidence_distribution": dict.fromkeys(("very_low", "low", "medium", "high", "very_high"), 0),
}
PROMETHEUS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


@router.get("/health", response_model=Health, summary="The state of the service, its generator and its database")
async def health(service: ServiceDep, owner: OwnerDep) -> Any:
    return await health_of(service, owner)


@router.get("/health/live", response_model=Liveness, summary="Whether this process answers")
async def live() -> Liveness:
    return Liveness(status="ok")


@router.get(
    "/health/ready",
    response_model=Health,
    summary="Whether sessions can run",
    responses={503: {"model": Health, "description": "Not now; `detail` says why."}},
)
async def ready(service: ServiceDep, owner: OwnerDep) -> Any:
    health = await health_of(service, owner)
    if health.status == "ok":
        return health
    return JSONResponse(without_details(health).model_dump(), 503)


async def health_of(service: Service, owner: str) -> Health:
    """The health of the service. A client without a key (if keys are set) gets states only, no addresses or errors."""
    counts, reasons = await asyncio.gather(count_open_sessions(service), service.readiness())
    if isinstance(counts, str):
        reasons["database"] = counts
    generator = service.generator.health()  # read once: a model that loads may be ready a moment later
    if generator["state"] != "ready":
        reasons["generator"] = NO_GENERATOR if generator["state"] == "absent" else str(generator["state"])
    why = [f"{part}: {reason}" for part, reason in reasons.items() if reason]
    if service.stopping is not None:
        why.append("the service is stopping")
    database, verifiers = (
        {"state": "down" if reason else "ready", "detail": reason if owner else ""}
        for reason in (reasons["database"], reasons["verifiers"])
    )
    if not service.readiness.has_sandbox:
        verifiers = {"state": "absent", "detail": "no sandbox works here: see `rlvr doctor`"}
    health = Health.model_validate(
        {
            "status": "degraded" if why else "ok",
            "detail": "; ".join(why),
            "version": __version__,
            "instance": service.instance,
            "uptime_seconds": round(time.time() - service.started, 3),
            "generator": generator,
            "judge": service.judge.health() if service.judge is not None else None,
            "verifiers": verifiers,
            "database": database,
            "sessions": counts if isinstance(counts, dict) else {"running": 0, "queued": 0},
            "timestamp": time.time(),
        }
    )
    if not owner:
        health = without_details(health)
        health.detail = "give an API key to see why" if why else ""
    return health


def without_details(health: Health) -> Health:
    """The same health states without the names and details, which may hold hosts and paths."""
    bare = {"name": "", "detail": ""}
    judge = health.judge and health.judge.model_copy(update=bare)
    return health.model_copy(update={"generator": health.generator.model_copy(update=bare), "judge": judge})


async def count_open_sessions(service: Service) -> dict[str, int] | str:
    """The numbers of open sessions, or why the database cannot tell."""
    try:
        counts = await service.probe_database()
    except Exception as error:  # a health check must not fail
        return error.reason if isinstance(error, StoreDown) else "the query failed"
    return {"running": counts[Status.RUNNING], "queued": counts[Status.QUEUED]}


@router.get(
    "/metrics", response_model=MetricsResponse, summary="Per task, as JSON or for Prometheus", responses=PROMETHEUS
)
async def metrics(service: ServiceDep, request: Request) -> Any:
    """JSON, or the text for Prometheus if `Accept` prefers text/plain."""
    if wants_text(request.headers.get("accept", "")):
        return await prometheus(service, request)
    try:
        await service.probe_database()
    except StoreDown as error:
        raise store_unavailable(error) from error
    return {"task_aggregates": await service.aggregates(), "timestamp": time.time()}


@router.get("/metrics/prometheus", summary="For Prometheus", response_class=Response, responses=PROMETHEUS)
async def prometheus(service: ServiceDep, request: Request) -> Response:
    try:
        counts = await service.probe_database()
    except StoreDown:
        counts = None
    read = partial(collect_metrics, service, counts)
    render = partial(request.app.state.prometheus.text, read, request.headers.get("accept", ""))
    # Without the database nothing blocks, and the threads of its calls may all be waiting.
    text, kind = render() if counts is None else await service.run_blocking(render)
    return Response(text, media_type=kind)


def wants_text(accept: str) -> bool:
    kinds = [part.partition(";")[0].strip().lower() for part in accept.split(",")]
    text = [kinds.index(kind) for kind in ("text/plain", "application/openmetrics-text") if kind in kinds]
    return bool(text) and ("application/json" not in kinds or min(text) < kinds.index("application/json"))


@router.get("/stats", response_model=Stats, summary="The replay buffer and what was learned")
async def stats(service: ServiceDep) -> Any:
    buffer, totals = await service.totals()
    learned = await service.learning()
    # Strategies learn from answers with a gain; those of evaluations have none.
    usable = buffer.ready if service.generator.kind == "endpoint" else buffer.size
    return {
        "training_stats": {
            **learned,
            "total_experiences": totals["total_experiences"],
            "buffer_utilization": buffer.utilization,
            "verifier_accuracy": await service.accuracy(),
            "policy_entropy": learned.get("policy_entropy"),
            "ready_for_training": usable >= service.settings.training.min_experiences_for_training,
        },
        "global_stats": totals,
        "timestamp": time.time(),
    }


@router.get("/experiences/{task_id:path}", response_model=Experiences, summary="The verified answers of a task")
async def experiences(
    task_id: str,
    service: ServiceDep,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
    after: Annotated[int | None, Query(ge=0, le=2**53, description="The last id of the page before.")] = None,
) -> Any:
    store = service.store
    rows: list[Experience] = []
    more, size = is_usable_id(task_id), 0
    while more and len(rows) <= limit and size < LARGEST_PAGE:
        count, last = min(STEP, limit + 1 - len(rows)), rows[-1].id if rows else after
        page = await service.run_blocking(store.experiences, task_id=task_id, after=last, limit=count, tokens=False)
        rows, more = rows + page, len(page) == count
        size += sum(len(row.prompt) + len(row.generated_output) for row in page)
    if not rows:
        await require_task(service, task_id)

    def answer() -> Response:
        page = rows[:limit]
        return json_response(Experiences, {
            "task_id": task_id,
            "experiences": [experience_row(row) for row in page],
            "count": store.count(task_id=task_id),
            "next_after": page[-1].id if len(rows) > limit or more else None,
        })  # fmt: skip

    return await service.run_blocking(answer)


@router.get("/analysis", response_model=PatternsResponse, summary="What the answers to all tasks have in common")
async def patterns(service: ServiceDep) -> Any:
    return {**await service.patterns(), "timestamp": time.time()}


@router.get(
    "/analysis/{task_id:path}", response_model=AnalysisResponse, summary="What the answers to a task have in common"
)
async def analysis(task_id: str, service: ServiceDep) -> Any:
    await require_task(service, task_id)
    result = await service.run_blocking(service.store.task_analysis, task_id)
    return {"task_id": task_id, "analysis": result or EMPTY_ANALYSIS}


def is_usable_id(task_id: str) -> bool:
    return len(task_id) <= LONGEST_ID and "\x00" not in task_id


async def require_task(service: Service, task_id: str) -> None:
    """404 unless a session or a training run has worked on the task."""
    store = service.store
    exists = is_usable_id(task_id) and (
        await service.run_blocking(store.sessions, task_id=task_id, limit=1, texts=False)
        or await service.run_blocking(store.experiences, task_id=task_id, limit=1, tokens=False)
    )
    if not exists:
        raise not_found("task", task_id)


def experience_row(row: Experience) -> dict[str, Any]:
    """The JSON of an experience: one sampled answer of a session, with its feedback, reward and advantage."""
    return {
        "id": row.id,
        "session_id": row.session_id,
        "task_id": row.task_id,
        "iteration": row.iteration,
        "sample": row.sample,
        "prompt": row.prompt,
        "generated_output": row.generated_output,
        "verifier_feedback": row.feedback,
        "reward": row.reward,
        "outcome": row.outcome,
        "strategy": row.action or None,
        "advantage": row.advantage,
        "num_tokens": row.num_tokens,
        "seconds": row.seconds,
        "rating": row.rating,
        "ratings": row.ratings,
        "timestamp": row.created,
    }


def collect_metrics(service: Service, counts: dict[Status, int] | None) -> Iterator[Metric]:
    """The metrics of one scrape. `counts`: the sessions by status; None if the database does not answer, which is then
    not read. Blocks otherwise."""
    yield gauge("rlvr_info", "What runs here; always 1.", 1, version=__version__, instance=service.instance)
    yield gauge("rlvr_uptime_seconds", "Since this process began.", time.time() - service.started)
    health = service.generator.health()
    state = GaugeMetricFamily("rlvr_generator_state", "1 for the current state.", labels=["kind", "state"])
    for name in STATES:
        state.add_metric([str(health["kind"]), name], float(health["state"] == name))
    yield state
    yield from service.sessions.metrics.collect()
    if counts is not None:
        with suppress(StoreDown):
            service.generator.refresh()
    learned = service.generator.learning()
    for name in (*LEARNED, *SHARED):
        if isinstance(learned.get(name), (int, float)):
            yield gauge(f"rlvr_{name}", f"As /stats has it: {name}.", learned[name])
    is_up = False
    if counts is not None:
        with suppress(StoreDown):
            yield from _store_metrics(service, counts)
            is_up = True
    yield gauge("rlvr_database_up", "Whether the database answers.", is_up)


def _store_metrics(service: Service, counts: dict[Status, int]) -> Iterator[Metric]:
    store = service.store
    sessions = GaugeMetricFamily("rlvr_sessions", "Sessions by status.", labels=["status"])
    for status, number in counts.items():
        sessions.add_metric([status.value], number)
    yield sessions
    totals, buffer = store.global_stats(), store.buffer()
    yield gauge(
        "rlvr_experiences",
        "Answers of sessions in the database, also those that no verifier could judge.",
        totals["total_experiences"],
    )
    yield gauge("rlvr_buffer_utilization", "Share of the replay buffer in use.", buffer.utilization)
    for name, words in (
        ("average_reward", "Mean reward."),
        ("success_rate", "Share of the answers of training sessions that passed."),
    ):
        if totals[name] is not None:
            yield gauge(f"rlvr_{name}", words, totals[name])
    tasks = [
        GaugeMetricFamily(f"rlvr_task_{name}", f"Of one task: {name}.", labels=["task_id"])
        for name in ("total_sessions", "average_confidence", "success_rate", "best_confidence")
    ]
    for task_id, row in store.aggregates(limit=TASKS).items():
        for family in tasks:
            value = row[family.name.removeprefix("rlvr_task_")]
            if value is not None:
                family.add_metric([task_id], value)
    yield from tasks
