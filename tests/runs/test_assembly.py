"""The objects of a run are made once, and the settings that do not concern them keep them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlvr.cli.main import run
from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.envs.registry import register_environment
from rlvr.envs.toy import Toy
from rlvr.reward.registry import register_reward
from rlvr.reward.signatures import Case
from rlvr.runs.assembly import assemble

WORDS = (
    *("client=mock", "env.name=counted_tasks", "reward.type=counted_reward", "reward.watch=[watched_reward]"),
    *("training.steps=1", "training.prompts_per_step=2", "training.group_size=2", "rollout.max_tokens=2"),
    *("evaluation.tasks=2", "evaluation.samples=1"),
)
FILE = "seed: 1\nsft: {steps: 0}\n"


@pytest.fixture
def counts() -> Counter[str]:
    """How often each object is made, and its reward started."""
    count = Counter[str]()

    class CountedTasks(Toy):
        def __init__(self) -> None:
            count["environment"] += 1
            super().__init__()

    register_environment("counted_tasks")(CountedTasks)
    for name in ("counted_reward", "watched_reward"):
        _register_counted(name, count)
    return count


def test_a_run_makes_its_environment_and_its_rewards_once(
    counts: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("counted.yaml").write_text(FILE)
    assert run(["train", "--config=counted.yaml", *WORDS]) == 0, capsys.readouterr().err
    parts = ("environment", "counted_reward", "watched_reward")
    assert counts == dict.fromkeys((*parts, "start of counted_reward", "start of watched_reward"), 1)


def test_settings_that_do_not_concern_the_objects_keep_them(counts: Counter[str]) -> None:
    config = build_config(load(None, None, WORDS))
    assembly = assemble(config)
    longer = replace(assembly, config=replace(config, training=replace(config.training, steps=9)))
    assert longer.source is assembly.source and longer.reward is assembly.reward
    assert counts["environment"] == 1


def _register_counted(name: str, count: Counter[str]) -> None:
    class Options:
        def __init__(self) -> None:
            count[name] += 1

    def start(options: Options) -> None:
        count[f"start of {name}"] += 1

    def judge(case: Case, options: Options) -> float:
        return 1.0

    register_reward(name, "counts", options=Options, start=start)(judge)


def test_observations_of_an_environment_of_one_turn_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """There are no tokens of the environment to learn from; nothing is trained."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(FILE)
    words = ["--config=run.yaml", "client=mock", "env.name=toy", "reward.type=keyword_contains", *WORDS[4:-2]]
    words += ["reward.kwargs.keywords=[a]", "evaluation.tasks=2", "evaluation.samples=1", "algorithm.name=echo"]
    assert run(["train", *words]) == 2
    assert "algorithm.observation_coef=0.05 has no effect" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
