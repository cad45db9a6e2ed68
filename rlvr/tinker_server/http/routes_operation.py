"""Routes for the operator: metrics for Prometheus, and the disk space that an owner uses.

The SDK calls none of them; docs/tinker/operations.md lists the metrics.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Response
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from rlvr import __version__
from rlvr.tinker_server.http.dependencies import CallerDep, JsonRoute
from rlvr.tinker_server.http.tinker_middleware import METRICS_PATH
from rlvr.web.prometheus import gauge

if TYPE_CHECKING:
    from rlvr.tinker_server.backend.tinker_backend import TinkerBackend

router = APIRouter(route_class=JsonRoute)


@router.get(METRICS_PATH)
async def metrics(caller: CallerDep) -> Response:
    def read(owner: str) -> tuple[bytes, str]:
        collect = partial(collect_metrics, caller.backend)
        return caller.request.app.state.middleware.prometheus.text(collect, caller.request.headers.get("accept", ""))

    text, kind = await caller.call(read)
    return Response(text, media_type=kind)


@router.get("/api/v1/disk_usage")
async def disk_usage(caller: CallerDep) -> dict[str, Any]:
    """The bytes that the caller's checkpoints and runs take, the limit, and the largest checkpoints."""
    return await caller.call(caller.backend.disk.describe)


def collect_metrics(backend: TinkerBackend) -> Iterator[Metric]:
    """The metrics of one scrape. Blocks: it reads the database and looks at folders that changed."""
    yield gauge("rlvr_info", "What runs here; always 1.", 1, version=__version__)
    yield gauge("rlvr_uptime_seconds", "Since the models were loaded.", time.time() - backend.started)
    yield from _engine_metrics(backend)
    yield from _disk_metrics(backend)


def _engine_metrics(backend: TinkerBackend) -> Iterator[Metric]:
    gauges = {
        "alive": GaugeMetricFamily("rlvr_engine_alive", "1 while the engine's thread runs.", labels=["model"]),
        "queued_training": GaugeMetricFamily(
            "rlvr_queued_training_requests", "Training requests that wait or run.", labels=["model"]
        ),
        "queued_samples": GaugeMetricFamily(
            "rlvr_queued_sampling_requests", "Sampling requests that wait.", labels=["model"]
        ),
        "running_samples": GaugeMetricFamily(
            "rlvr_running_sampling_requests", "Sampling requests in the engine or at vLLM servers.", labels=["model"]
        ),
        "adapters": GaugeMetricFamily("rlvr_adapters_in_memory", "Adapters that can be trained.", labels=["model"]),
    }
    sampled = CounterMetricFamily("rlvr_sampled_tokens", "Tokens sampled for clients.", labels=["model"])
    trained = CounterMetricFamily("rlvr_trained_tokens", "Tokens of forward_backward.", labels=["model"])
    sampling = CounterMetricFamily("rlvr_sampling_seconds", "Time the engine sampled.", labels=["model"])
    steps = SummaryMetricFamily(
        "rlvr_training_request_seconds", "Time the engine worked on a request of a run.", labels=["model", "kind"]
    )
    for state in backend.describe_engines():
        for name, family in gauges.items():
            family.add_metric([state.model], float(getattr(state, name)))
        counters = state.counters
        sampled.add_metric([state.model], counters.sampled_tokens)
        trained.add_metric([state.model], counters.trained_tokens)
        sampling.add_metric([state.model], counters.sampling_seconds)
        for kind, (count, seconds) in sorted(counters.requests.items()):
            steps.add_metric([state.model, kind], count, seconds)
    yield from (*gauges.values(), sampled, trained, sampling, steps)
    yield gauge("rlvr_sampler_weights_in_memory", "Weights of sampling sessions.", backend.weights_in_memory)


def _disk_metrics(backend: TinkerBackend) -> Iterator[Metric]:
    used = GaugeMetricFamily("rlvr_disk_bytes", "Bytes of an owner on the disk.", labels=["owner", "kind"])
    for owner, usage in backend.disk.measure_owners().items():
        for kind, size in usage._asdict().items():
            used.add_metric([owner, kind], size)
    yield used
    yield gauge("rlvr_disk_limit_bytes", "The most bytes of one owner.", backend.disk.limit)
    yield gauge("rlvr_disk_free_bytes", "Free on the disk of the state folder.", shutil.disk_usage(backend.state).free)
