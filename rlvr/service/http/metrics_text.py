"""The service's metrics for Prometheus, in a registry of their own: two services in one process do not mix.

Counters are of this process; numbers from the database are read on each scrape and are the same at all instances.
Exercised by tests/test_service_http.py; docs/service-operations.md lists the names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from rlvr import __version__
from rlvr.store import StoreDown

if TYPE_CHECKING:
    from rlvr.service.http.runtime import Service

SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
STATES = ("ready", "loading", "down", "absent")
TASKS = 50  # with a series of their own: those with the most sessions


class Prometheus:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "rlvr_http_requests", "Requests answered.", ("method", "route", "status"), registry=self._registry
        )
        self._seconds = Histogram(
            "rlvr_http_request_seconds", "Time to answer.", ("route",), buckets=SECONDS, registry=self._registry
        )
        ProcessCollector(registry=self._registry)

    def count(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request. `route` is the pattern, not the path: clients could make any number of paths."""
        method = method if method in ("GET", "POST", "HEAD", "OPTIONS") else "other"
        self._requests.labels(method, route, status).inc()
        self._seconds.labels(route).observe(seconds)

    def text(self, service: Service, accept: str) -> tuple[bytes, str]:
        """The text and its content type, in the format of `accept`. Blocks: it reads the database."""
        encode, kind = choose_encoder(accept)
        return encode(_CombinedCollector(self._registry, lambda: list(_service_metrics(service)))), kind  # pyright: ignore[reportArgumentType]


class _CombinedCollector:
    """The registry's metrics, and those that are made on each scrape."""

    def __init__(self, registry: CollectorRegistry, more: Callable[[], list[Metric]]) -> None:
        self._registry, self._more = registry, more

    def collect(self) -> Iterator[Metric]:
        yield from self._registry.collect()
        yield from self._more()


def _service_metrics(service: Service) -> Iterator[Metric]:
    yield _gauge("rlvr_info", "What runs here; always 1.", 1, version=__version__, instance=service.instance)
    yield _gauge("rlvr_uptime_seconds", "Since this process began.", time.time() - service.started)
    health = service.generator.health()
    state = GaugeMetricFamily("rlvr_generator_state", "1 for the current state.", labels=["kind", "state"])
    for name in STATES:
        state.add_metric([str(health["kind"]), name], float(health["state"] == name))
    yield state
    learned = service.generator.learning()
    for name in ("policy_entropy", "training_loss", "learning_rate", "updates"):
        if isinstance(learned.get(name), (int, float)):
            yield _gauge(f"rlvr_{name}", f"As /stats has it: {name}.", learned[name])
    try:
        yield from _store_metrics(service)
        yield _gauge("rlvr_database_up", "Whether the database answers.", 1)
    except StoreDown:
        yield _gauge("rlvr_database_up", "Whether the database answers.", 0)


def _store_metrics(service: Service) -> Iterator[Metric]:
    store = service.store
    sessions = GaugeMetricFamily("rlvr_sessions", "Sessions by status.", labels=["status"])
    for status, number in store.count_sessions().items():
        sessions.add_metric([status.value], number)
    yield sessions
    totals, buffer = store.global_stats(), store.buffer()
    yield _gauge("rlvr_experiences", "Verified answers in the database.", totals["total_experiences"])
    yield _gauge("rlvr_buffer_utilization", "Share of the replay buffer in use.", buffer.utilization)
    for name, words in (("average_reward", "Mean reward."), ("success_rate", "Share with a confidence above .7.")):
        if totals[name] is not None:
            yield _gauge(f"rlvr_{name}", words, totals[name])
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


def _gauge(name: str, words: str, value: Any, **labels: str) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, words, labels=list(labels))
    family.add_metric(list(labels.values()), float(value))
    return family
