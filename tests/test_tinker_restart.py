"""`kill -9` of a server under load: its clients, real `tinker` ones, go on by themselves when it is there again.

Two clients train, several requests under way at any time, another one samples without pause; the server is killed in
the middle of that three times, at random moments. Nothing in a client knows of it. What they trained is, to the bit,
what an undisturbed server makes of the same requests: every optimizer step was made once. Each sample comes.

tests/test_tinker_core_kill.py kills between a step and its record, and more often; here it is the SDK that waits.
"""

from __future__ import annotations

import gc
import json
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tinker", reason="the extra [tinker] is not installed")
pytest.importorskip("fastapi", reason="the extra [serve] is not installed")

import tinker
from tinker import types
from tinker_core import counters
from tinker_model import write_model
from tinker_rows import ADAM, RATIO, only, prompt, rows
from tinker_server import TinkerServer, serving

# The SDK leaves its connections to the garbage collector.
pytestmark = [pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"), pytest.mark.timeout(300)]
NAME = "tiny"
STEPS, AHEAD = 36, 3  # optimizer steps, and how many a client has under way
KILLS = (4, 14, 24)  # when each of the clients has been told of so many steps
LOSSES = (("cross_entropy", ("target_tokens", "weights")), ("ppo", RATIO))


@dataclass
class Trained:
    """What one client was told: of its losses and gradients step by step, and of its weights in the end."""

    told: list[tuple[float, float, float]] = field(default_factory=list[tuple[float, float, float]])
    sent: int = 0
    run: str = ""


def train(url: str, key: str, number: int, mine: Trained) -> None:
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
        batches = [only(rows(3, seed=100 * number + 2 * i + half), *names) for half in range(2)]
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
class Sampled:
    lengths: list[int] = field(default_factory=list[int])
    scores: list[list[float]] = field(default_factory=list[list[float]])
    sent: int = 0


def sample(url: str, key: str, over: Callable[[], bool], mine: Sampled) -> None:
    """Several requests under way without pause, from the base model and from weights that were saved once."""
    service = tinker.ServiceClient(base_url=url, api_key=key)
    client: Any = service.create_lora_training_client(base_model=NAME, rank=4, seed=9).result()
    client.forward_backward(only(rows(3), "target_tokens", "weights"), "cross_entropy").result()
    client.optim_step(ADAM).result()
    saved: Any = client.save_weights_and_get_sampling_client().result()
    samplers: list[Any] = [service.create_sampling_client(base_model=NAME).result(), saved]
    while not over():
        how = types.SamplingParams(max_tokens=100, seed=mine.sent, stop=[])
        futures = [sampler.sample(prompt(n), 2, how) for n in (3, 4) for sampler in samplers]
        mine.sent += len(futures)
        mine.lengths += [len(s.tokens) for future in futures for s in future.result().sequences]
        mine.scores.append(saved.compute_logprobs(prompt(5, 6, 7, 8)).result()[1:])
    service.close("success").result()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("restart")
    write_model(folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> list[tuple[Trained, dict[str, Any]]]:
    """The same requests, on a server in this process that nobody kills."""
    from rlvr.engine.engine import Engine
    from rlvr.engine.model import load_model
    from rlvr.engine.tokenizer import load_tokenizer
    from rlvr.service.tinker_api.app import create_app
    from rlvr.service.tinker_api.core import Core
    from rlvr.service.tinker_api.tenants import Keys

    folder, state = str(model), model.parent / "undisturbed"
    engine = Engine(load_model(folder, load_tokenizer(folder), device="cpu", dtype="float32"))
    core = Core({NAME: engine}, state)
    trained = [Trained() for _ in LOSSES]
    try:
        with serving(create_app(core, Keys([]))) as port:
            for number, mine in enumerate(trained):
                train(f"http://127.0.0.1:{port}", "tml-no-key-needed", number, mine)
    finally:
        core.close()
    gc.collect()
    return [(mine, counters(state, mine.run, "final")) for mine in trained]


def test_clients_go_on_over_kills_and_no_step_is_lost_or_made_twice(
    model: Path, tmp_path: Path, undisturbed: list[tuple[Trained, dict[str, Any]]]
) -> None:
    dice, over, trained, sampled = random.Random(11), threading.Event(), [Trained() for _ in LOSSES], Sampled()
    with (
        TinkerServer({NAME: model}, tmp_path / "state", "--device", "cpu") as server,
        ThreadPoolExecutor(len(LOSSES) + 1) as threads,
    ):
        runs = [threads.submit(train, server.url, server.key, number, mine) for number, mine in enumerate(trained)]
        runs.append(threads.submit(sample, server.url, server.key, over.is_set, sampled))
        try:
            for told in KILLS:
                while min(len(mine.told) for mine in trained) < told and not any(run.done() for run in runs):
                    time.sleep(0.005)
                time.sleep(dice.random() * 0.2)
                waited = [mine.sent > len(mine.told) for mine in trained] + [2 * sampled.sent > len(sampled.lengths)]
                server.kill()
                assert all(waited), f"somebody had nothing under way when the server was killed: {waited}"
                server.start()
            for run in runs[:-1]:
                run.result(timeout=200)
            over.set()
            runs[-1].result(timeout=100)
        finally:
            over.set()
        faults = [line for line in server.log().splitlines() if json.loads(line)["level"] == "error"]
    gc.collect()  # here, where the SDK's warnings are expected
    for mine, (whole, saved) in zip(trained, undisturbed, strict=True):
        assert mine.told == whole.told
        found = counters(tmp_path / "state", mine.run, "final")
        assert (found["version"], found["weights_sha256"]) == (STEPS, saved["weights_sha256"])
    assert sampled.lengths == [100] * 2 * sampled.sent
    assert all(scores == sampled.scores[0] for scores in sampled.scores), "the weights it samples from are the same"
    assert not faults
