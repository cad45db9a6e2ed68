"""Loops that sample ahead, on a real server of the Tinker protocol: `rlvr train` with client=tinker learns, overlaps
sampling with training, and goes on after a kill."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tinker")
pytest.importorskip("fastapi")

from test_clients_tinker import RUN, Killed, attempt, near, steps, toy_model
from test_pipelined_completion import fates
from tinker_server import TinkerServer

# The SDK leaves its connections to the garbage collector.
pytestmark = [pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"), pytest.mark.timeout(300)]
AHEAD = ["algorithm.name=ppo", "algorithm.drop_equal_groups=true"]
SCHEDULES = {
    "one step behind": ["training.max_steps_off_policy=1"],
    "in minibatches": ["training.num_minibatches=2", "algorithm.reduction=constant"],
    "what is first": ["training.schedule=completion", "training.max_steps_off_policy=1"],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerServer]:
    root = tmp_path_factory.mktemp("served")
    toy_model(root / "toy")
    with TinkerServer({"toy": root / "toy"}, root / "state") as started:
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


@pytest.mark.parametrize("words", SCHEDULES.values(), ids=SCHEDULES)
def test_a_loop_that_samples_ahead_learns_at_a_server(here: Path, server: TinkerServer, words: list[str]) -> None:
    summary = attempt(*words, "training.steps=16")
    rows = [row for row in steps(here / "runs" / "run") if row["phase"] == "rl"]
    print(summary["baseline"]["pass@1"]["value"], summary["final"]["pass@1"]["value"], summary["p_value"])
    print([(round(r["reward"], 2), r.get("async/staleness_max"), r["updates"]) for r in rows])
    print([(round(r.get("optim/kl_sample_train_v1", -9), 4)) for r in rows])
