"""The quickstart's `configs/train_rlvr.yaml`, as it is written there: what it means, and that it trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlvr.algorithms.classic import PPOConfig, REINFORCEConfig
from rlvr.algorithms.losses.clipped import Ppo
from rlvr.algorithms.terms.entropy import Entropy
from rlvr.cli.main import run
from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.config.schema import RunConfig

YAML = """\
training:
  mode: rlvr
  seed: 42
  max_steps: 1000

rlvr:
  algorithm: reinforce  # or ppo
  rollout:
    max_new_tokens: 64
    temperature: 0.7
    top_p: 0.9

  reward:
    type: keyword_contains
    kwargs:
      keywords: ["answer", "solution"]

  algorithm_config:
    learning_rate: 1e-5
    use_baseline: true
    normalize_advantages: true
    entropy_coef: 0.01
"""
SILENT = "rlvr:\n  algorithm: reinforce\n  rollout: {max_new_tokens: 8}\n  reward: {type: keyword_contains, kwargs: "
SILENT += "{keywords: [answer]}}\n"


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with configs/train_rlvr.yaml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "train_rlvr.yaml").write_text(YAML)
    (tmp_path / "configs" / "silent.yaml").write_text(SILENT)
    return tmp_path


def config(name: str, *words: str) -> RunConfig:
    return build_config(load(name, None, words), pytest.fail)


def test_every_key_of_the_file_is_taken_up() -> None:
    got = config("train_rlvr")
    assert (got.training.mode, got.seed, got.training.steps) == ("rlvr", 42, 1000)
    assert (got.rollout.max_tokens, got.rollout.temperature, got.rollout.top_p) == (64, 0.7, 0.9)
    assert (got.reward.type, got.reward.kwargs) == ("keyword_contains", {"keywords": ["answer", "solution"]})
    assert got.training.optimizer.learning_rate == 1e-5
    assert (got.algorithm.name, got.algorithm.advantage.name, got.algorithm.terms.entropy.coef) == (
        "reinforce_ema", "batch_normalized", 0.01,
    )  # fmt: skip


def test_a_file_that_names_no_model_and_no_prompts_runs_on_the_toy() -> None:
    got = config("train_rlvr")
    assert (got.client.name, got.env.name) == ("mock", "toy")
    named = config("train_rlvr", "env.name=rpn_arithmetic", "model.tokenizer=words", "model.config.model_type=gpt2")
    assert (named.client.name, named.env.name) == ("local", "rpn_arithmetic")


def test_the_shipped_file_says_the_same(tmp_path: Path) -> None:
    shipped = config("train_rlvr")
    (tmp_path / "configs" / "train_rlvr.yaml").unlink()
    assert config("train_rlvr") == shipped


def test_where_the_file_is_silent_the_defaults_of_the_classes_hold() -> None:
    """One place: REINFORCEConfig and PPOConfig; what a config makes of them is the row that the classes use."""
    defaults, got = REINFORCEConfig(), config("silent")
    assert got.algorithm.resolve() == defaults.row()
    assert got.training.optimizer.learning_rate == defaults.learning_rate == 1e-5
    ppo, classic = config("silent", "rlvr.algorithm=ppo"), PPOConfig()
    assert ppo.algorithm.resolve() == classic.row()
    assert (ppo.training.ppo_epochs, ppo.training.target_kl) == (classic.ppo_epochs, classic.target_kl) == (4, 0.01)
    assert (ppo.algorithm.loss.clip_low, ppo.algorithm.loss.clip_high) == (0.2, 0.2)
    assert ppo.algorithm.drop_equal_groups is False
    assert ppo.training.optimizer.learning_rate == 1e-5 and ppo.algorithm.terms.entropy.coef == 0.01


@pytest.mark.parametrize(
    ("words", "row"),
    [
        (["normalize_advantages=false"], REINFORCEConfig(normalize_advantages=False).row()),
        (["normalize_advantages=false", "use_baseline=false"],
         REINFORCEConfig(normalize_advantages=False, use_baseline=False).row()),
        (["normalize_advantages=false", "baseline_decay=0.9"],
         REINFORCEConfig(normalize_advantages=False, baseline_decay=0.9).row()),
        (["rlvr.algorithm=ppo", "rlvr.algorithm_config.clip_range=0.1"], PPOConfig(clip_range=0.1).row()),
        (["rlvr.algorithm=ppo", "epsilon_high=0.28", "entropy_coef=0.02"], None),
    ],
)  # fmt: skip
def test_settings_mean_what_they_mean_to_the_classes(words: list[str], row: Any) -> None:
    got = config("silent", *words).algorithm.resolve()
    assert got == row if row else (got.loss, got.terms) == (Ppo(0.2, 0.28), (Entropy(0.02),))


def test_settings_of_the_other_algorithm_do_nothing_and_say_so() -> None:
    told: list[str] = []
    build_config(load("train_rlvr", None, ["rlvr.algorithm=ppo"]), told.append)
    assert [line.partition(" (from")[0] for line in told] == [
        "rlvr.algorithm_config.use_baseline", "rlvr.algorithm_config.normalize_advantages",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"rlvr\.algorithm_config\.target_kl \(reinforce has no such setting\)"):
        config("train_rlvr", "rlvr.algorithm_config.target_kl=0.1")


def test_a_row_of_the_table_can_stand_there_and_an_unknown_name_lists_them() -> None:
    got = build_config(load("train_rlvr", None, ["rlvr.algorithm=dapo"]))
    assert got.algorithm.resolve().advantage.name == "group_normalized"
    with pytest.raises(ValueError, match=r"'reinfroce' is unknown.*reinforce.*known"):
        build_config(load("train_rlvr", None, ["rlvr.algorithm=reinfroce"]))
    with pytest.raises(ValueError, match=r"rlvr\.algorithm=3"):
        load("train_rlvr", None, ["rlvr.algorithm=3"])


@pytest.mark.parametrize("algorithm", ["reinforce", "ppo"])
def test_it_trains(project: Path, algorithm: str) -> None:
    """On the command line, with nothing installed but the package: no model, no prompts, no torch."""
    words = ["training.max_steps=3", f"rlvr.algorithm={algorithm}", f"run.name={algorithm}"]
    assert run(["train", "--config-name=train_rlvr", *words]) == 0
    rows = [json.loads(line) for line in (project / "runs" / algorithm / "metrics.jsonl").read_text().splitlines()]
    assert [row["phase"] for row in rows] == ["rl"] * 3
    assert (project / "runs" / algorithm / "summary.json").exists()
