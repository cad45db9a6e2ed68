"""Faults of a Tinker server and of the way to it: a step is made once, or the error says what happened and what to do.

The server is ours, in this process; its application is wrapped in one that does what a bad network, a full queue or an
eviction would do. Missing log-probs are in tests/clients/test_other_tinker_servers.py.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tinker")
pytest.importorskip("fastapi")

from rlvr.clients.tinker import TinkerTrainingClient, connect
from rlvr.clients.tinker_sdk import translate_errors
from rlvr.core.messages import AdamParams, ModelInput, SamplingParams
from rlvr.engine.engine_options import LoraConfig
from rlvr.tinker_server.backend.tinker_backend import TinkerBackend
from rlvr.tinker_server.http.app import create_app
from rlvr.tinker_server.protocol.server_limits import ServerLimits
from rlvr.web.auth import ApiKeys
from tests.kit.loss_calls import POLICY, select
from tests.kit.tinker_server import serving
from tests.kit.tiny import PROMPTS, data

pytestmark = [pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"), pytest.mark.timeout(120)]
ROWS = select(data(), *POLICY)
ADAM = AdamParams(learning_rate=0.05, eps=1e-8)
KEY = "tml-mine-alone"


class FaultyServer:
    """An application with faults, by the last word of the path.

    `drops`: how many requests are done and their answers cut off. `delays`: seconds before each request. `refusals`:
    the status and detail that each request gets.
    """

    def __init__(self, app: Any) -> None:
        self._app, self.url = app, ""
        self.heal()

    def heal(self) -> None:
        self.drops, self.delays = Counter[str](), dict[str, float]()
        self.refusals: dict[str, tuple[int, str]] = {}
        self.dropped: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        name = scope.get("path", "").rpartition("/")[2]
        await asyncio.sleep(self.delays.get(name, 0))
        if name in self.refusals:
            status, detail = self.refusals[name]
            body = json.dumps({"detail": detail}).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})
        elif self.drops[name]:
            self.drops[name] -= 1
            self.dropped.append(name)
            await self._app(scope, receive, _swallow)
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1000")]})
            await send({"type": "http.response.body", "body": b"{", "more_body": True})
            raise ConnectionError("the connection is cut off, as the test asked for")
        else:
            await self._app(scope, receive, send)


async def _swallow(message: Any) -> None:
    """Let the server answer, and drop the answer before the client has it."""


@pytest.fixture(scope="module")
def server(fresh: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyServer]:
    backend = TinkerBackend({"tiny": fresh("qwen3")}, tmp_path_factory.mktemp("state"))
    faulty = FaultyServer(create_app(backend, ApiKeys([KEY]), ServerLimits(poll_seconds=0.3)))
    with serving(faulty) as port:
        faulty.url = f"http://127.0.0.1:{port}"
        yield faulty
    backend.close()


@pytest.fixture
def remote(server: FaultyServer, tokenizer: Any) -> Iterator[Callable[..., TinkerTrainingClient]]:
    made: list[TinkerTrainingClient] = []

    def make(timeout_s: float = 60.0) -> TinkerTrainingClient:
        address = {"base_url": server.url, "api_key": KEY, "timeout_s": timeout_s}
        made.append(connect("tiny", lora=LoraConfig(rank=4), seed=3, tokenizer=tokenizer, **address))
        return made[-1]

    yield make
    server.heal()
    for client in made:
        client.close()
    made.clear()
    gc.collect()


def train(client: TinkerTrainingClient, steps: int = 2) -> list[Any]:
    """The log-probs [T] of every row after some steps."""
    for _ in range(steps):
        client.forward_backward(ROWS, "ppo").result()
        client.optim_step(ADAM).result()
    return [out["logprobs"].data for out in client.forward(ROWS, "ppo").result().loss_fn_outputs]


def test_a_dropped_connection_makes_no_step_twice(remote: Callable[..., Any], server: FaultyServer):
    """The work is done and the answer lost, of each call of a step: the same bits as without."""
    calm = train(remote())
    torn = remote()
    calls = ["forward_backward", "optim_step", "retrieve_future"]
    server.drops.update(calls)
    for one, other in zip(calm, train(torn), strict=True):
        np.testing.assert_array_equal(one, other)
    assert sorted(server.dropped) == sorted(calls)


def test_a_dropped_connection_while_sampling_is_tried_again(remote: Callable[..., Any], server: FaultyServer):
    sampler = remote().save_weights_and_get_sampling_client()
    ask = (ModelInput(PROMPTS[0]), 2, SamplingParams(max_tokens=3, seed=5))
    calm = sampler.sample(*ask).result()
    server.drops["asample"] = 1
    assert sampler.sample(*ask).result() == calm and server.dropped == ["asample"]


@pytest.mark.parametrize(
    ("call", "status", "detail"),
    [
        ("forward_backward", 404, "no training run of this id"),
        ("retrieve_future", 400, "Model m not loaded (likely stale request from previous server)"),  # SkyRL's words
        ("retrieve_future", 410, "the request is gone"),
    ],
)
def test_a_run_that_the_server_has_lost_is_named(
    remote: Callable[..., Any], server: FaultyServer, call: str, status: int, detail: str
):
    """Evicted, restarted without its state, or its session over."""
    client = remote()
    server.refusals[call] = (status, detail)
    with pytest.raises(RuntimeError, match=r"no longer has this training run.*start the same command again"):
        client.forward_backward(ROWS, "ppo").result()


@pytest.mark.parametrize("call", ["retrieve_future", "forward_backward"])
def test_a_slow_server_meets_a_deadline(remote: Callable[..., Any], server: FaultyServer, call: str):
    client = remote()
    client.timeout_s = 0.5
    server.delays[call] = 5.0
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"no answer in 0\.5 s.*model\.timeout_s"):
        client.forward_backward(ROWS, "ppo").result()
    with pytest.raises(TimeoutError):  # the caller's own deadline stays the caller's
        client.forward(ROWS, "ppo").result(0.1)

    async def wait() -> None:
        await client.forward(ROWS, "ppo")

    with pytest.raises(RuntimeError, match=r"no answer in 0\.5 s"):
        asyncio.run(wait())
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("call", ["create_model", "save_weights_for_sampler"])
def test_a_client_that_is_not_made_meets_a_deadline(remote: Callable[..., Any], server: FaultyServer, call: str):
    client = remote() if call != "create_model" else None
    server.delays[call] = 3.0
    with pytest.raises(RuntimeError, match=r"no answer in 0\.5 s"):
        if client is None:
            remote(timeout_s=0.5)
        else:
            client.timeout_s = 0.5
            client.save_weights_and_get_sampling_client()


def test_a_server_that_reads_json_only_is_named(remote: Callable[..., Any], server: FaultyServer):
    """What SkyRL 0.3.0 answers to the protobuf of the SDK 0.25 and newer, and what the SDK says of its JSON."""
    client = remote()
    server.refusals["forward_backward"] = (422, "Input should be a valid dictionary")
    with pytest.raises(ValueError, match=r"422.*JSON only.*0\.24.*other-servers"):
        client.forward_backward(ROWS, "ppo").result()
    with (
        pytest.raises(ValueError, match=r"gave JSON where the SDK reads protobuf.*tinker==0\.24\.1"),
        translate_errors(),
    ):
        raise ValueError("Server returned a JSON payload, which this SDK version only supports as proto")
    with (
        pytest.raises(RuntimeError, match=r"does not take this server's answer.*older SDK"),
        translate_errors(of_run=True),
    ):
        raise AssertionError("asample promises always carry sample_sequence_ids")
