"""`/metrics` of the Tinker server: what it counts is what was done, and the page lists what it gives."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")
pytest.importorskip("google.protobuf", reason="the extra [serve] is not installed")
pytest.importorskip("prometheus_client", reason="the extra [serve] is not installed")

from prometheus_client.parser import text_string_to_metric_families

from rlvr.core.messages import ModelInput, SamplingParams
from rlvr.tinker_server.backend.request_futures import ProtoResult
from rlvr.tinker_server.backend.runs.run_operations import SaveWeights
from rlvr.tinker_server.backend.tinker_backend import TinkerBackend
from rlvr.tinker_server.http.app import create_app
from rlvr.web.auth import ApiKeys, owner_of
from tests.kit.tinker_backend import MODEL, BackendClient, sampled_tokens
from tests.kit.tinker_server import serving
from tests.kit.tiny import data

KEY = "tml-a-secret-key"
OWNER = owner_of(KEY)
PAGE = Path(__file__).parents[2] / "docs" / "tinker" / "operations.md"
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def backend(fresh: Callable[..., Any], tmp_path: Path) -> Iterator[TinkerBackend]:
    """One engine with two names."""
    engine = fresh("qwen3")
    made = TinkerBackend({MODEL: engine, "same": engine}, tmp_path / "state")
    yield made
    made.close()


@pytest.fixture
def port(backend: TinkerBackend) -> Iterator[int]:
    with serving(create_app(backend, ApiKeys([KEY]))) as number:
        yield number


def get(port: int, path: str, **headers: str) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, answer.getheader("content-type") or ""


def scrape(port: int) -> Samples:
    status, text, kind = get(port, "/metrics", Authorization=f"Bearer {KEY}")
    assert status == 200 and kind.startswith("text/plain")
    families = text_string_to_metric_families(text)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def test_what_is_counted_is_what_was_done(backend: TinkerBackend, port: int) -> None:
    client = BackendClient(backend, OWNER)
    client.make()
    rows = data(seed=1)
    assert isinstance(client.wait(client.gradients(1, seed=1)), ProtoResult)
    client.wait(client.step(2))
    client.do(3, SaveWeights("first"))
    base = backend.sampling.create_sampler(OWNER, client.session, 1, "same")
    request, _ = backend.sampling.sample(OWNER, base, 1, ModelInput([1, 2]), 3, SamplingParams(max_tokens=5, stop=[]))
    sampled = sum(len(tokens) for tokens in sampled_tokens(client.wait(request)))
    assert get(port, "/api/v1/sessions", **{"X-API-Key": KEY})[0] == 200
    assert get(port, "/api/v1/sessions")[0] == 401
    found, model = scrape(port), {"model": f"{MODEL}, same"}
    assert value(found, "rlvr_trained_tokens_total", **model) == sum(row.model_input.length for row in rows)
    assert value(found, "rlvr_sampled_tokens_total", **model) == sampled == 15
    for kind in ("create", "forward_backward", "optim_step", "save_weights"):
        assert value(found, "rlvr_training_request_seconds_count", **model, kind=kind) == 1
        assert value(found, "rlvr_training_request_seconds_sum", **model, kind=kind) > 0
    assert value(found, "rlvr_sampling_seconds_total", **model) > 0
    assert value(found, "rlvr_adapters_in_memory", **model) == value(found, "rlvr_engine_alive", **model) == 1
    for name in ("rlvr_queued_training_requests", "rlvr_queued_sampling_requests", "rlvr_running_sampling_requests"):
        assert value(found, name, **model) == 0
    [checkpoint] = backend.queries.checkpoints(OWNER)["checkpoints"]
    assert value(found, "rlvr_disk_bytes", owner=OWNER, kind="checkpoints") == checkpoint["size_bytes"]
    assert value(found, "rlvr_http_requests_total", method="GET", route="/sessions", status="200") == 1
    assert value(found, "rlvr_http_requests_total", method="GET", route="other", status="401") == 1


def test_what_waits_is_seen_while_it_waits(backend: TinkerBackend, port: int) -> None:
    client = BackendClient(backend, OWNER)
    client.make()
    model = {"model": f"{MODEL}, same"}
    with backend.engines[MODEL].lock:  # the engine computes nothing
        ids = [client.gradients(1, seed=1), client.step(2)]
        found = scrape(port)
        assert value(found, "rlvr_queued_training_requests", **model) == 2
    for request in ids:
        client.wait(request)
    assert value(scrape(port), "rlvr_queued_training_requests", **model) == 0


def test_metrics_need_a_key(port: int) -> None:
    assert get(port, "/metrics")[0] == 401
    assert get(port, "/metrics", **{"X-API-Key": KEY})[0] == 200


def test_the_page_lists_every_metric_and_no_other(backend: TinkerBackend, port: int) -> None:
    """But for those of Python's own process collector."""
    named = set(re.findall(r"`(rlvr_[a-z_]+)", PAGE.read_text(encoding="utf-8")))
    families = text_string_to_metric_families(get(port, "/metrics", Authorization=f"Bearer {KEY}")[1])
    made = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    assert named == {name for name in made if name.startswith("rlvr_") and not name.endswith("_created")}


def test_an_owner_reads_its_disk_usage(backend: TinkerBackend, port: int) -> None:
    status, text, _ = get(port, "/api/v1/disk_usage", **{"X-API-Key": KEY})
    assert status == 200 and json.loads(text) == backend.disk.describe(OWNER)
