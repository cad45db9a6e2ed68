"""The service's metrics for Prometheus that are read on each scrape; `rlvr.web.prometheus` counts the requests.

Numbers from the database are read on each scrape and are the same at all instances.
docs/service-operations.md lists the names.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily, Metric

from rlvr import __version__
from rlvr.store import StoreDown
from rlvr.store.records import Status
from rlvr.web.prometheus import gauge

if TYPE_CHECKING:
    from rlvr.service.http.runtime import Service

STATES = ("ready", "loading", "down", "absent")
LEARNED = ("policy_entropy", "training_loss", "learning_rate", "updates")
SHARED = ("sampled_step", "is_learner", "sessions_waiting", "sessions_dropped")  # of a policy that replicas share
TASKS = 50  # with a series of their own: those with the most sessions


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
