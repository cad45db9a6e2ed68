"""The metrics of a server as text for Prometheus: requests and the process, and numbers that are read on each scrape.

The registry is the server's own: two servers in one process do not mix. `rlvr.service.http.routes_read` and
`rlvr.tinker_server.http.routes_operation` say what is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


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
        method = method if method in ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS") else "other"
        self._requests.labels(method, route, status).inc()
        self._seconds.labels(route).observe(seconds)

    def text(self, read: Callable[[], Iterable[Metric]], accept: str) -> tuple[bytes, str]:
        """The text and its content type, in the format of `accept`, with the metrics that `read` gives. May block."""
        encode, kind = choose_encoder(accept)
        return encode(_CombinedCollector(self._registry, list(read()))), kind  # pyright: ignore[reportArgumentType]


class _CombinedCollector:
    """The metrics of the registry and the ones that were read for this scrape."""

    def __init__(self, registry: CollectorRegistry, more: list[Metric]) -> None:
        self._registry, self._more = registry, more

    def collect(self) -> Iterator[Metric]:
        yield from self._registry.collect()
        yield from self._more


def gauge(name: str, words: str, value: Any, **labels: str) -> GaugeMetricFamily:
    """A gauge with one value."""
    family = GaugeMetricFamily(name, words, labels=list(labels))
    family.add_metric(list(labels.values()), float(value))
    return family
