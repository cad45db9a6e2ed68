"""Eight clients of one server at once, one of them sending garbage: the others' numbers are those of a client alone.

Real `tinker` clients, each with an adapter, a loss and a session of its own, some with a key of their own, against a
server process; each honest one is then run once more, alone, on a fresh server. Losses and gradient norms are compared
bit for bit, log-probs of sampled tokens within 1e-5 (they are computed in batches shared by all clients), tokens not.
"""

from __future__ import annotations

import gc
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit.rounding import close_logprobs

pytest.importorskip("tinker", reason="the extra [tinker] is not installed")
pytest.importorskip("fastapi", reason="the extra [serve] is not installed")

import tinker
import zstandard
from tinker import types

from rlvr.core.messages import Datum
from rlvr.tinker_server.protocol.server_limits import ServerLimits
from tests.kit.tinker_backend import forward_backward
from tests.kit.tinker_model import write_model
from tests.kit.tinker_rows import RATIO, prompt, rows, select_inputs
from tests.kit.tinker_server import TinkerServer, serving

# The SDK leaves its connections to the garbage collector.
pytestmark = [pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"), pytest.mark.timeout(240)]
NAME = "tiny"
STEPS = 10
ADAM = types.AdamParams(learning_rate=3e-3, eps=1e-8)
VANDAL = "tml-vandal-0001"
SOON = 20.0  # seconds; the SDK repeats what it takes for an outage for 300
PROTOBUF = "application/x-protobuf"


@dataclass(frozen=True)
class Customer:
    """What one honest client does; some of them share a key."""

    key: str
    loss: str
    names: tuple[str, ...]
    count: int = 5
    length: int = 9
    steps: int = STEPS


SFT = ("target_tokens", "weights")
CUSTOMERS = [
    Customer("tml-alice-0001", "cross_entropy", SFT),
    Customer("tml-alice-0001", "importance_sampling", RATIO),
    Customer("tml-alice-0001", "ppo", RATIO, count=9, length=40),
    Customer("tml-bob-00002", "cispo", RATIO),
    Customer("tml-bob-00002", "dro", RATIO, count=1),
    Customer("tml-carol-003", "gspo", (*RATIO, "sequence_ratio_mask")),
    Customer(
        "tml-carol-003", "cross_entropy", SFT, count=1_030, length=2, steps=4
    ),  # two messages a batch, the last one first
]
KEYS = ",".join([*dict.fromkeys(c.key for c in CUSTOMERS), VANDAL])


@dataclass
class Life:
    losses: list[float] = field(default_factory=list[float])
    norms: list[float] = field(default_factory=list[float])
    sampled: list[tuple[list[int], list[float]]] = field(default_factory=list[tuple[list[int], list[float]]])
    scored: list[list[float]] = field(default_factory=list[list[float]])


def live(
    url: str, number: int, begin: Callable[[Any], object], meet: Callable[[], object], sampled: list[list[int]]
) -> Life:
    """Train, then sample, then score what was sampled (or `sampled`, where it is given)."""
    me, mine = CUSTOMERS[number], Life()
    service = tinker.ServiceClient(base_url=url, api_key=me.key)
    client: Any = service.create_lora_training_client(base_model=NAME, rank=2 + number, seed=number).result()
    data = select_inputs(rows(me.count, seed=number, length=me.length), *me.names)
    begin(client)
    for _ in range(me.steps):
        back, step = client.forward_backward(data, me.loss), client.optim_step(ADAM)
        mine.losses.append(back.result().metrics["loss:sum"])
        mine.norms.append(step.result().metrics["grad_norm"])
    sampler: Any = client.save_weights_and_get_sampling_client().result()
    meet()
    how = types.SamplingParams(max_tokens=24, seed=number, stop=[])
    found = sampler.sample(prompt(), num_samples=4, sampling_params=how).result()
    mine.sampled = [(s.tokens, s.logprobs) for s in found.sequences]
    for tokens in sampled or [tokens for tokens, _ in mine.sampled]:
        mine.scored.append(sampler.compute_logprobs(prompt(5, 6, 7, 8, *tokens)).result()[4:])
    service.close("success").result()
    return mine


@dataclass
class Vandal:
    """One client that sends nothing but garbage, round after round, and records the replies."""

    port: int
    victims: list[Any]
    outcome_of_call: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    seconds: list[float] = field(default_factory=list[float])
    rounds: int = 0

    def send(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        given = {"X-API-Key": VANDAL, "Content-Type": PROTOBUF if isinstance(body, bytes) else "application/json"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", f"/api/v1/{path}", data, given)
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        return answer.status, json.loads(text) if "json" in (answer.getheader("content-type") or "") else text

    def note(self, what: str, call: Callable[[], str]) -> None:
        begun = time.monotonic()
        self.outcome_of_call.setdefault(what, set()).add(call())
        self.seconds.append(time.monotonic() - begun)

    def raw(self, what: str, path: str, body: Any, **headers: str) -> None:
        def call() -> str:
            status, answer = self.send(path, body, **headers)
            if status == 200 and isinstance(answer, dict) and "request_id" in answer:
                asked = {"request_id": answer["request_id"]}
                while status in (200, 408) and (not isinstance(answer, dict) or "error" not in answer):
                    status, answer = self.send("retrieve_future", asked, Accept=PROTOBUF)
                    if status == 200 and isinstance(answer, bytes):
                        return "done"
                return f"failed: {answer['category']}"
            return str(status)

        self.note(what, call)

    def sdk(self, what: str, call: Callable[[], Any]) -> None:
        def outcome_of_call() -> str:
            try:
                call()
            except tinker.RequestFailedError as error:
                return f"failed: {error.category.value}"
            except tinker.APIStatusError as error:
                return str(error.status_code)
            return "done"

        self.note(what, outcome_of_call)

    def rage(self, url: str, over: threading.Event) -> None:
        service = tinker.ServiceClient(base_url=url, api_key=VANDAL)
        mine = service.create_lora_training_client(base_model=NAME, rank=4).result()
        sampler = service.create_sampling_client(base_model=NAME).result()
        rng = np.random.default_rng(0)
        while not over.is_set() or not self.rounds:
            self.round(service, mine, sampler, rng, self.victims[self.rounds % len(self.victims)])
            self.rounds += 1
        service.close("errored").result()

    def round(self, service: Any, mine: Any, sampler: Any, rng: np.random.Generator, victim: Any) -> None:
        [good] = rows(1)
        theirs, short = victim.model_id, types.SamplingParams(max_tokens=4)

        def bad(loss: str = "cross_entropy", **change: Any) -> Any:
            given = {name: good.loss_fn_inputs[name].to_numpy() for name in SFT} | change
            inputs = {name: types.TensorData.from_numpy(value) for name, value in given.items()}
            return mine.forward_backward([types.Datum(model_input=good.model_input, loss_fn_inputs=inputs)], loss)

        body = forward_backward(theirs, STEPS * 2, [Datum.from_completion([1, 2], [3], weight=1.0)]).raw
        packed = zstandard.ZstdCompressor().compress(body)
        self.raw("no protobuf", "forward_backward", b"\xff\xff")
        self.raw("noise", "forward_backward", rng.bytes(400))
        self.raw("half a body", "forward_backward", body[: len(body) // 2])
        self.raw("half a zstd frame", "forward_backward", packed[:-4], Content_Encoding="zstd")
        bomb = zstandard.ZstdCompressor().compress(bytes(1 << 28))
        self.raw("a zstd bomb", "forward_backward", bomb, Content_Encoding="zstd")
        self.raw("a huge body", "forward_backward", bytes(ServerLimits().max_body + 1))
        self.raw("a key that is none", "optim_step", {}, X_API_Key="tml-nobody")
        self.raw("another's run", "forward_backward", body)
        for seq in (1, 2, STEPS, 2 * STEPS + 1):
            self.raw("another's step", "optim_step", {"model_id": theirs, "seq_id": seq, "adam_params": {}})
        self.raw("another's result", "retrieve_future", {"request_id": f"{theirs}:0"})
        self.raw("another's stop", "cancel_future", {"request_id": f"{theirs}:0"})
        session = theirs.split(":")[0]
        self.raw("another's session", f"sessions/{session}/finish", {"reason": {"type": "errored"}, "detail": None})
        self.raw("another's heartbeat", "session_heartbeat", {"session_id": session})
        asked = {"sampling_session_id": f"{session}:sample:0", "seq_id": 0, "num_samples": 1}
        self.raw("another's sampler", "asample", {**asked, "prompt": {"chunks": [{"tokens": [1]}]}})
        saved = f"tinker://{theirs}/weights/x"
        self.sdk("another's path", lambda: service.create_training_client_from_state(saved).result())
        vanished = {"session_id": "0" * 32, "model_seq_id": 0, "base_model": NAME, "lora_config": {"rank": 4}}
        self.raw("a session that is no more", "create_model", vanished)
        self.sdk("not a number", lambda: bad(weights=np.full(9, np.nan, np.float32)).result())
        self.sdk("no such token", lambda: bad(target_tokens=np.full(9, 1 << 40)).result())
        self.sdk("another length", lambda: bad(weights=np.ones(3, np.float32)).result())
        self.sdk("no such loss", lambda: bad("no_such_loss").result())
        self.sdk("a step without gradients", lambda: mine.optim_step(ADAM).result())
        self.sdk("no such model", lambda: service.create_lora_training_client(base_model="no/model").result())
        self.sdk("a prompt too long", lambda: sampler.sample(prompt(*[5] * 600), 1, short).result())
        self.sdk("a prompt of no tokens of ours", lambda: sampler.sample(prompt(1 << 30), 2, short).result())
        self.sdk("an empty prompt", lambda: sampler.sample(types.ModelInput.empty(), 1, short).result())


TOLD = {
    "no protobuf": "400", "noise": "400", "half a body": "400", "half a zstd frame": "400", "a zstd bomb": "400",
    "a huge body": "413", "a key that is none": "401", "another's run": "404", "another's step": "404",
    "another's result": "410", "another's stop": "204", "another's session": "410", "another's heartbeat": "410",
    "another's sampler": "404", "another's path": "404", "not a number": "failed: user",
    "a session that is no more": "410", "no such token": "failed: user",
    "another length": "failed: user", "no such loss": "failed: user",
    "a step without gradients": "failed: user", "no such model": "400", "a prompt too long": "failed: user",
    "a prompt of no tokens of ours": "failed: user", "an empty prompt": "failed: user",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tenants")
    write_model(folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def together(model: Path) -> Iterator[tuple[list[Life], Vandal, list[str]]]:
    """All at once: the results of each honest client, the vandal's replies, and the server's log."""
    everybody, over, victims = threading.Barrier(len(CUSTOMERS) + 1), threading.Event(), []
    samplers = threading.Barrier(len(CUSTOMERS))
    with (
        TinkerServer({NAME: model}, model.parent / "state", "--device", "cpu", keys=KEYS) as server,
        ThreadPoolExecutor(len(CUSTOMERS) + 1) as threads,
    ):
        vandal = Vandal(server.port, victims)

        def begin(client: Any) -> None:
            victims.append(client)
            everybody.wait(60)

        def rage() -> None:
            everybody.wait(60)
            vandal.rage(server.url, over)

        raging = threads.submit(rage)
        lives = [
            threads.submit(live, server.url, number, begin, lambda: samplers.wait(60), [])
            for number in range(len(CUSTOMERS))
        ]
        try:
            found = [one.result(timeout=180) for one in lives]
        finally:
            over.set()
            everybody.abort()
        raging.result(timeout=60)
        log = server.log().splitlines()
    victims.clear()
    gc.collect()  # here, where the SDK's warnings are expected
    yield found, vandal, log


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CUSTOMERS)), ids=[f"{c.loss}-{c.count}" for c in CUSTOMERS])
def test_a_client_among_others_gets_the_numbers_of_one_alone(
    number: int, together: Any, model: Path, tmp_path: Path
) -> None:
    from rlvr.engine.engine import Engine
    from rlvr.engine.model_loading import load_model
    from rlvr.engine.tokenizer import load_tokenizer
    from rlvr.tinker_server.backend.tinker_backend import TinkerBackend
    from rlvr.tinker_server.http.app import create_app
    from rlvr.web.auth import ApiKeys

    crowd: Life = together[0][number]
    folder = str(model)
    engine = Engine(load_model(folder, load_tokenizer(folder), device="cpu", dtype="float32"))
    backend = TinkerBackend({NAME: engine}, tmp_path / "alone")
    try:
        with serving(create_app(backend, ApiKeys(KEYS.split(",")))) as port:
            sampled = [tokens for tokens, _ in crowd.sampled]
            alone = live(f"http://127.0.0.1:{port}", number, lambda _: None, lambda: None, sampled)
    finally:
        backend.close()
    gc.collect()
    assert len(set(alone.losses)) == CUSTOMERS[number].steps
    assert (crowd.losses, crowd.norms) == (alone.losses, alone.norms)
    for (_, drawn), scored, expected in zip(crowd.sampled, crowd.scored, alone.scored, strict=True):
        assert len(expected) == 24
        assert np.array(scored) == close_logprobs(np.array(expected))
        assert np.array(drawn) == close_logprobs(np.array(expected))


@pytest.mark.slow
def test_garbage_is_refused_soon_and_without_server_errors(together: Any) -> None:
    _, vandal, log = together
    assert {what: ", ".join(sorted(told)) for what, told in vandal.outcome_of_call.items()} == TOLD
    assert max(vandal.seconds) < SOON
    assert not [line for line in log if json.loads(line)["level"] == "error"]
