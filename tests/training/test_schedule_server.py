"""Loops that sample ahead, on a real server of the Tinker protocol: `rlvr train` with client=tinker learns, overlaps
sampling with training, and goes on after a kill."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tinker")
pytest.importorskip("fastapi")

from transformers import AutoTokenizer

from rlvr.clients.tinker import TinkerTrainingClient, connect
from rlvr.core.futures import LazyFuture
from rlvr.core.types import Task
from rlvr.engine.engine_options import LoraConfig
from rlvr.reward import resolve_reward
from rlvr.training.journal import Journal
from rlvr.training.schedules.completion_order import CompletionOrder
from rlvr.training.schedules.fixed_lag import FixedLag
from tests.kit.table_trainer import Letters, make_trainer
from tests.kit.tinker_server import TinkerServer
from tests.kit.tinker_toy import ALONE, RUN, attempt, toy_model
from tests.kit.tiny_run import RunKilled, count_fates
from tests.kit.tiny_run import stored_steps as steps

# The SDK leaves its connections to the garbage collector.
pytestmark = [pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"), pytest.mark.timeout(300)]
SCHEDULES = {
    "one step behind": ["training.max_steps_off_policy=1", "algorithm.name=cispo"],
    "in minibatches": ["training.num_minibatches=2", "algorithm.reduction=constant"],
    "what is first": ["training.schedule=completion", "training.max_steps_off_policy=1", "algorithm.name=cispo"],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerServer]:
    root = tmp_path_factory.mktemp("served")
    toy_model(root / "toy")
    with TinkerServer({"toy": root / "toy"}, root / "state", ALONE) as started:
        yield started


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: TinkerServer) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.setenv("TINKER_API_KEY", server.key)
    tokenizer = server.state.parent / "toy"
    text = RUN.replace("name: toy, lora", f"name: toy, tokenizer: {tokenizer}, lora")
    (tmp_path / "run.yaml").write_text(text.replace("reinforce", "ppo"))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["one step behind", "in minibatches"])
def test_a_loop_that_samples_ahead_learns_at_a_server(here: Path, schedule: str) -> None:
    """`rlvr train` with client=tinker: held-out completions get better (p < 0.01); ages are what the schedule says."""
    summary = attempt(*SCHEDULES[schedule], "training.steps=24", "training.optimizer.learning_rate=1e-2")
    rows = [row for row in steps(here / "runs" / "run") if row["phase"] == "rl"]
    print(summary["baseline"]["pass@1"]["value"], summary["final"]["pass@1"]["value"], summary["p_value"])
    assert summary["final"]["pass@1"]["value"] > summary["baseline"]["pass@1"]["value"] + 0.1
    assert summary["p_value"] < 0.01
    behind = 1.0 if schedule == "one step behind" else 0.0
    assert [row["async/staleness_max"] for row in rows] == [0.0] + [behind] * 23
    learned = [row for row in rows if row["updates"]]
    assert learned and all(math.isfinite(row["loss"]) for row in learned)
    if not behind:  # on-policy: sampler and trainer are one model
        assert all(abs(row["optim/kl_sample_train_v1"]) < 1e-3 for row in learned)


class HeldAnswers(TinkerTrainingClient):
    """Hands out later answers only once something has been learned: without overlap they would not come."""

    def __init__(self, service: Any, client: Any, tokenizer: Any, free: int) -> None:
        super().__init__(service, client, tokenizer=tokenizer)
        self.free, self.asked, self.learned = free, 0, threading.Event()

    def forward_backward(self, *args: Any, **how: Any) -> Any:
        self.learned.set()
        return super().forward_backward(*args, **how)

    def save_weights_and_get_sampling_client(self, name: str | None = None) -> Any:
        return HeldSampler(self, super().save_weights_and_get_sampling_client(name))


class HeldSampler:
    def __init__(self, client: HeldAnswers, sampler: Any) -> None:
        self.client, self.sampler, self.fingerprint = client, sampler, sampler.fingerprint

    def sample(self, *args: Any, **how: Any) -> Any:
        self.client.asked += 1
        future = self.sampler.sample(*args, **how)
        if self.client.asked <= self.client.free:
            return future

        def later() -> Any:
            assert self.client.learned.wait(60), "nothing was learned while answers were missing"
            return future.result()

        return LazyFuture(later)

    def get_tokenizer(self) -> Any:
        return self.sampler.get_tokenizer()


@pytest.mark.parametrize(
    ("make", "options", "free"),
    [
        (FixedLag, {"max_steps_off_policy": 1}, 4),
        (FixedLag, {"num_minibatches": 2}, 2),
        (CompletionOrder, {"max_steps_off_policy": 1}, 4),
    ],
    ids=SCHEDULES,
)
def test_sampling_goes_on_at_the_server_while_it_trains(
    tmp_path: Path, server: TinkerServer, make: Any, options: dict[str, Any], free: int
) -> None:
    """Of the groups in flight all but the first are answered only once these have been learned from."""
    there = connect("toy", lora=LoraConfig(rank=4), base_url=server.url, api_key=server.key)
    tokenizer = AutoTokenizer.from_pretrained(server.state.parent / "toy")
    client = HeldAnswers(there._service, there._client, tokenizer, free)
    cells = {"reduction": "constant"} if "num_minibatches" in options else None
    schedule = "completion" if make is CompletionOrder else "fixed_lag"
    t = make_trainer(
        client, reward=resolve_reward(letters), source=Toy(), cells=cells, sampling={"max_tokens": 4}, steps=3,
        prompts_per_step=4, schedule=schedule, **options,
    )  # fmt: skip
    try:
        with Journal(tmp_path) as journal:
            schedule = make(t, journal)
            rows = [schedule.learn(step)[0] for step in range(3)]
            schedule.close()
    finally:
        client.close()
    assert client.learned.is_set() and client.asked >= 12
    assert [row["rollout/groups"] for row in rows] == [4] * 3


class Toy(Letters):
    """A question that the served model can read."""

    def train(self, seed: int, index: int, level: str) -> Task:
        return Task(str(index), "How does a vaccine work?")


def letters(prompt: str, response: str) -> float:
    """Hardly ever the same for a whole group, so that every group has signal."""
    return len(response) % 7 / 7


@pytest.mark.slow
@pytest.mark.parametrize("words", SCHEDULES.values(), ids=SCHEDULES)
def test_a_killed_loop_goes_on_at_the_server(here: Path, words: list[str]) -> None:
    """Stopped between checkpoints: the same steps as undisturbed; under completion every group has one fate."""
    words = [*words, "training.steps=6", "evaluation.tasks=2", "run.checkpoint_every=2"]
    with pytest.raises(RunKilled):
        attempt(*words, "run.name=torn", killed_at=5)
    torn = attempt(*words, "run.name=torn")
    rows = steps(here / "runs" / "torn")
    assert [row["step"] for row in rows] == list(range(6))
    if words[0] == "training.schedule=completion":
        journal = (here / "runs" / "torn" / "journal.jsonl").read_text()
        counted = count_fates([json.loads(line) for line in journal.splitlines()], 1)
        assert sorted(counted) == list(range(48)) and set(counted.values()) == {1}
    else:
        calm = attempt(*words, "run.name=calm")
        assert {**torn, "seconds": 0} == {**calm, "seconds": 0}
        assert rows == steps(here / "runs" / "calm")
    assert list((here / "runs" / "torn" / "inflight").iterdir()) == []
