"""`kill -9` of a server under load: its clients, real `tinker` ones, go on by themselves when it is there again.

Two clients train, several requests under way at any time, another one samples without pause; the server is killed in
the middle of that three times, at random moments (RLVR_KILLS=20 in the environment kills it 20 times). Nothing in a
client knows of it. What they trained is, to the bit, what an undisturbed server makes of the same requests: every
optimizer step was made once. Each sample comes.

test_tinker_backend_kill.py kills between a step and its record, and more often; here it is the SDK that waits.
"""

from __future__ import annotations

import gc
import json
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.kit.rounding import close_logprobs

pytest.importorskip("tinker", reason="the extra [tinker] is not installed")
pytest.importorskip("fastapi", reason="the extra [serve] is not installed")

import tinker
from tinker import types

from tests.kit.tinker_backend import counters
from tests.kit.tinker_model import write_model
from tests.kit.tinker_rows import ADAM, RATIO, prompt, rows, select_inputs
from tests.kit.tinker_server import TinkerServer, serving

TIMES = int(os.environ.get("RLVR_KILLS", "3"))
# The SDK leaves its connections to the garbage collector.
pytestmark = [pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"), pytest.mark.timeout(400 + 30 * TIMES)]
NAME = "tiny"
# When the client that is ahead has been told of so many steps: 3, 9, 15.
KILLS = tuple(3 + 6 * number for number in range(TIMES))
STEPS, AHEAD = KILLS[-1] + 9, 3  # optimizer steps, and how many a client has under way
LENGTH = 60  # tokens of a sample
LOSSES = (("cross_entropy", ("target_tokens", "weights")), ("ppo", RATIO))


@dataclass
class TrainingRecord:
    """One client's replies: losses and gradients step by step, and its final weights."""

    told: list[tuple[float, float, float]] = field(default_factory=list[tuple[float, float, float]])
    sent: int = 0
    run: str = ""


def train(url: str, key: str, number: int, mine: TrainingRecord) -> None:
    """Two forward_backward calls and a step, STEPS times, AHEAD of them under way; weights saved now and then."""
    service = tinker.ServiceClient(base_url=url, api_key=key)
    client: Any = service.create_lora_training_client(base_model=NAME, rank=4, seed=number).result()
    mine.run = client.model_id
    loss, names = LOSSES[number]
    waiting: list[list[Any]] = []

    def hear() -> None:
        one, two, step, *saved = waiting.pop(0)
        figures = one.result().metrics["loss:sum"], two.result().metrics["loss:sum"]
        mine.told.append((*figures, step.result().metrics["grad_norm"]))
        for path in saved:
            path.result()

    for i in range(STEPS):
        batches = [select_inputs(rows(3, seed=100 * number + 2 * i + half), *names) for half in range(2)]
        waiting.append([client.forward_backward(rows_, loss) for rows_ in batches] + [client.optim_step(ADAM)])
        if i % 5 == 4:
            waiting[-1].append(client.save_state(f"step{i}"))
        mine.sent += 1
        if len(waiting) == AHEAD:
            hear()
    while waiting:
        hear()
    client.save_state("final").result()
    service.close("success").result()


@dataclass
class SamplingRecord:
    lengths: list[int] = field(default_factory=list[int])
    scores: list[list[float]] = field(default_factory=list[list[float]])
    sent: int = 0


def sample(url: str, key: str, over: Callable[[], bool], mine: SamplingRecord) -> None:
    """From the base model and from weights that were saved once, AHEAD rounds of requests under way, without pause."""
    service = tinker.ServiceClient(base_url=url, api_key=key)
    client: Any = service.create_lora_training_client(base_model=NAME, rank=4, seed=9).result()
    client.forward_backward(select_inputs(rows(3), "target_tokens", "weights"), "cross_entropy").result()
    client.optim_step(ADAM).result()
    saved: Any = client.save_weights_and_get_sampling_client().result()
    base: Any = service.create_sampling_client(base_model=NAME).result()
    waiting: list[list[Any]] = []
    while waiting or not over():
        if len(waiting) < AHEAD and not over():
            how = types.SamplingParams(max_tokens=LENGTH, seed=mine.sent, stop=[])
            waiting.append([saved.compute_logprobs(prompt()), *(s.sample(prompt(), 4, how) for s in (base, saved))])
            mine.sent += 1
        else:
            scores, *sampled = waiting.pop(0)
            mine.lengths += [len(sequence.tokens) for future in sampled for sequence in future.result().sequences]
            mine.scores.append(scores.result()[1:])
    service.close("success").result()


def start_thread(live: Callable[..., None], server: TinkerServer, *how: Any) -> Future[None]:
    """Run `live` on a daemon thread, which does not keep this process alive when the test has failed."""
    ended: Future[None] = Future()

    def run() -> None:
        try:
            ended.set_result(live(server.url, server.key, *how))
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return ended


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("restart")
    write_model(folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def undisturbed_records(model: Path) -> list[tuple[TrainingRecord, dict[str, Any]]]:
    """The same requests, on a server in this process that is never killed."""
    from rlvr.engine.engine import Engine
    from rlvr.engine.model_loading import load_model
    from rlvr.engine.tokenizer import load_tokenizer
    from rlvr.tinker_server.backend.tinker_backend import TinkerBackend
    from rlvr.tinker_server.http.app import create_app
    from rlvr.web.auth import ApiKeys

    folder, state = str(model), model.parent / "undisturbed"
    engine = Engine(load_model(folder, load_tokenizer(folder), device="cpu", dtype="float32"))
    backend = TinkerBackend({NAME: engine}, state)
    trained = [TrainingRecord() for _ in LOSSES]
    try:
        with serving(create_app(backend, ApiKeys([]))) as port:
            for number, mine in enumerate(trained):
                train(f"http://127.0.0.1:{port}", "tml-no-key-needed", number, mine)
    finally:
        backend.close()
    gc.collect()
    return [(mine, counters(state, mine.run, "final")) for mine in trained]


@pytest.mark.slow
def test_clients_continue_after_kills_and_no_step_is_lost_or_done_twice(
    model: Path, tmp_path: Path, undisturbed_records: list[tuple[TrainingRecord, dict[str, Any]]]
) -> None:
    dice, over, trained, sampled = (
        random.Random(11),
        threading.Event(),
        [TrainingRecord() for _ in LOSSES],
        SamplingRecord(),
    )
    idle: list[str] = []  # who had nothing under way when the server was killed
    with TinkerServer({NAME: model}, tmp_path / "state", "--device", "cpu") as server:
        runs = [start_thread(train, server, number, mine) for number, mine in enumerate(trained)]
        runs.append(start_thread(sample, server, over.is_set, sampled))
        for told in KILLS:
            while not any(run.done() for run in runs):
                heard = [len(mine.told) for mine in trained]
                if sampled.sent and min(heard) > 0 and max(heard) >= told:
                    break
                time.sleep(0.005)
            time.sleep(dice.random() * 0.1)
            idle += [mine.run for mine in trained if mine.sent == len(mine.told)]
            idle += ["the sampler"] * (sampled.sent == len(sampled.scores))
            server.kill()
            server.start()
        for run in runs[:-1]:
            run.result(timeout=120)
        over.set()
        runs[-1].result(timeout=60)
        faults = [line for line in server.log().splitlines() if json.loads(line)["level"] == "error"]
    del runs
    gc.collect()  # here, where the SDK's warnings are expected
    assert not idle
    for mine, (whole, saved) in zip(trained, undisturbed_records, strict=True):
        assert mine.told == whole.told
        found = counters(tmp_path / "state", mine.run, "final")
        assert (found["version"], found["weights_sha256"]) == (STEPS, saved["weights_sha256"])
    assert sampled.lengths == [LENGTH] * 8 * sampled.sent
    assert len(sampled.scores) == sampled.sent
    # The weights it samples from are the same; up to rounding, for what shares a pass with it is not.
    assert all(scores == close_logprobs(sampled.scores[0]) for scores in sampled.scores)
    assert not faults
