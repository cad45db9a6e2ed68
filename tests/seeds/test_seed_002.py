"""Seed 002's commands, files and parameter names, with the package's name changed and nothing else."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlvr.cli.main import run
from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.config.schema import RunConfig
from rlvr.runs.assembly import assemble
from rlvr.training.curriculum import Curriculum
from tests.kit.forked_process import run_forked

ROOT = Path(__file__).parents[2]
CUSTOM = """\
# train_rlvr_custom.yaml
defaults:
  - _self_
  - generative_process@training_data_generator: rpn_arithmetic
  - predictive_model: pytorch_transformer
  - logging: mlflow_logger
  - training@rlvr_training: rlvr_small

seed: 123
experiment_name: custom_rlvr_experiment
run_name: ${now:%Y-%m-%d_%H-%M-%S}_${experiment_name}_${seed}
"""
WEIGHTS = ("boxed_weight", "correct_weight")
SHORT = ["evaluation.tasks=8", "sft.steps=4", "rlvr_training.num_epochs=1", "rlvr_training.samples_per_epoch=64"]
SHORT += ["rlvr_training.batch_size=64"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(name: str, *words: str) -> RunConfig:
    return build_config(load(name, None, words), pytest.fail)


def script(path: str, *words: str, python: str = sys.executable, **env: str) -> subprocess.CompletedProcess[str]:
    """A script of the clone in the current folder, the package not installed for it."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [python, str(ROOT / path), *words], env={**kept, "OMP_NUM_THREADS": "1", **env},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def forked(path: str, *words: str) -> subprocess.CompletedProcess[str]:
    """The same by tests/kit/forked_process.py, which has the package imported already."""
    return run_forked([str(ROOT / path), *words], timeout=300)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# --- commands ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_script_runs_a_named_config_from_beginning_to_end(here: Path) -> None:
    """`python3 rlvr/run_rlvr.py --config-name=train_rlvr_test`: warm-up, baseline, training, the table."""
    done = script("rlvr/run_rlvr.py", "--config-name=train_rlvr_test", *SHORT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FINAL RESULTS" in done.stdout and "warning" not in done.stdout + done.stderr
    folder = here / "runs" / "train_rlvr_test"
    assert [row["phase"] for row in rows(folder)] == ["sft"] * 4 + ["rl"]
    assert json.loads((folder / "summary.json").read_text())["final"]["mean_reward"]


@pytest.mark.slow
def test_the_script_of_the_examples_does_the_same(here: Path) -> None:
    done = forked("examples/run_rlvr.py", "--config-name=train_rlvr_test", *SHORT, "run_name=example")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (here / "runs" / "example" / "summary.json").exists()


@pytest.mark.parametrize("path", ["rlvr/run_rlvr.py", "examples/run_rlvr.py"])
def test_without_a_config_the_script_takes_the_main_one(path: str) -> None:
    """Told apart by what a mistake names: the packaged training file of train_rlvr_model."""
    done = script(path, "logging=console_logger", "rlvr_training.batch_size=48", "rlvr_training.samples_per_epoch=50")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "rlvr/configs/training/rlvr_small.yaml" in done.stderr and "not a multiple" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_interpreter_without_the_libraries_is_told_what_to_do_or_left_for_the_clones_own(here: Path) -> None:
    """With -S it sees no installed library. A clone without .venv gives a message, with one that one runs instead."""
    shutil.copytree(ROOT / "rlvr", here / "rlvr", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-S", "rlvr/run_rlvr.py", "--config-name=x", "seed=1"]
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 120, "env": kept}
    told = subprocess.run(command, **how)
    assert told.returncode == 2 and "omegaconf" in told.stderr and "make setup" in told.stderr, told.stderr
    python = here / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho instead: "$@"\n')
    python.chmod(0o755)
    assert subprocess.run(command, **how).stdout == "instead: rlvr/run_rlvr.py --config-name=x seed=1\n"


def test_help_and_an_unknown_config() -> None:
    assert "--config-name" in script("rlvr/run_rlvr.py", "--help", COLUMNS="200").stdout
    done = script("rlvr/run_rlvr.py", "--config-name=train_rlvr_tset")
    assert done.returncode == 2
    assert "did you mean 'train_rlvr_test'?" in done.stderr and "train_rlvr_model" in done.stderr


# --- configuration files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "complexity", "reward", "weights"),
    [
        ("train_rlvr_model", [1, 3], "combined", (0.3, 0.7)),
        ("train_rlvr_large", [1, 5], "combined", (0.2, 0.8)),
        ("train_rlvr_test", [1, 2], "boxed", None),
    ],
)
def test_the_shipped_configs_train_on_what_they_should(
    name: str, complexity: list[int], reward: str, weights: tuple[float, float] | None
) -> None:
    got = config(name)
    assert got.env.name == "rpn_arithmetic" and got.env.kwargs["complexity"] == complexity
    assert got.reward.type == reward
    assert got.reward.kwargs == ({} if weights is None else dict(zip(WEIGHTS, weights, strict=True)))
    assert got.tracking.mlflow == (name != "train_rlvr_test")
    # The longest problem fits the model, and its solution the budget: (k + 1)^2 + k + 2 tokens, 2 k + 2 of them prompt.
    k = complexity[1]
    longest, prompt = (k + 1) ** 2 + k + 2, 2 * k + 2
    assert got.model.config["n_positions"] >= longest
    assert got.training.max_prompt_tokens == prompt and (got.rollout.max_tokens or 0) >= longest - prompt


def test_the_training_group_is_switched_on_the_command_line() -> None:
    got = config("train_rlvr_model", "training@rlvr_training=rlvr_large")
    assert got.env.kwargs["complexity"] == [1, 5] and got == config("train_rlvr_large", "run_name=train_rlvr_model")
    assert config("train_rlvr_large", "training@rlvr_training=rlvr_small").env.kwargs["complexity"] == [1, 3]
    assert not config("train_rlvr_model", "logging=console_logger", "experiment_name=null").tracking.mlflow
    assert config("train_rlvr_model", "logging=tensorboard_logger").tracking.tensorboard


@pytest.mark.parametrize("how", ["configs", "path"])
def test_the_custom_example_composes_from_a_users_folder(here: Path, how: str) -> None:
    """In ./configs, or in a folder given by --config-path; the packaged groups are found from there."""
    folder = here / ("configs" if how == "configs" else "elsewhere")
    folder.mkdir()
    (folder / "train_rlvr_custom.yaml").write_text(CUSTOM)
    loaded = load("train_rlvr_custom", None if how == "configs" else str(folder))
    got = build_config(loaded, pytest.fail)
    assert got.seed == 123 and got.tracking.mlflow and got.tracking.experiment == "custom_rlvr_experiment"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_custom_rlvr_experiment_123", got.run.name or "")
    assert loaded.timed == ("run.name",)
    assert got.env == config("train_rlvr_model").env and got.training == config("train_rlvr_model").training


@pytest.mark.slow
def test_the_custom_example_runs(here: Path, capsys: Any) -> None:
    """Without its tracker, which is an extra."""
    (here / "mine").mkdir()
    (here / "mine" / "train_rlvr_custom.yaml").write_text(CUSTOM)
    words = ["train", "--config-name=train_rlvr_custom", "--config-path=mine", "logging=console_logger", *SHORT]
    assert run(words) == 0
    (folder,) = (here / "runs").iterdir()
    assert folder.name.endswith("_custom_rlvr_experiment_123") and (folder / "summary.json").exists()
    assert "warning" not in capsys.readouterr().err


# --- parameter names ---------------------------------------------------------------------------------------------


def test_every_parameter_name_reaches_the_run() -> None:
    """Each with a value that is no default, typed under the section that the files use."""
    words = {
        "num_epochs": 3, "samples_per_epoch": 320, "max_prompt_length": 11, "max_generation_length": 21,
        "complexity_range": [2, 3], "learning_rate": 0.0007, "batch_size": 160, "mini_batch_size": 40, "ppo_epochs": 2,
        "cliprange": 0.15, "target_kl": 0.03, "temperature": 0.9, "top_p": 0.95, "reward_type": "combined",
        "boxed_weight": 0.1, "correct_weight": 0.9,
    }  # fmt: skip
    got = config("train_rlvr_model", *(f"rlvr_training.{word}={value}" for word, value in words.items()))
    training, rollout = got.training, got.rollout
    assert training.steps == 3 * 320 // 160 == 6
    assert training.prompts_per_step * training.group_size == 160 and training.num_substeps == 160 // 40
    assert (training.max_prompt_tokens, rollout.max_tokens) == (11, 21)
    # The warm-up has no levels of its own that could be missing.
    Curriculum(assemble(got).source, got.sft.curriculum, 0)
    assert got.env.kwargs["complexity"] == [2, 3] and training.optimizer.learning_rate == 0.0007
    assert (training.ppo_epochs, training.target_kl) == (2, 0.03)
    assert (got.algorithm.loss.clip_low, got.algorithm.loss.clip_high) == (0.15, 0.15)
    assert (rollout.temperature, rollout.top_p) == (0.9, 0.95)
    assert got.reward.type == "combined" and got.reward.kwargs == {"boxed_weight": 0.1, "correct_weight": 0.9}


@pytest.mark.parametrize("reward", ["boxed", "correct", "combined"])
def test_every_reward_type_can_be_chosen(reward: str) -> None:
    """The weights belong to `combined`: with another reward the file's are left out, which is said once."""
    told: list[str] = []
    got = build_config(load("train_rlvr_model", None, [f"rlvr_training.reward_type={reward}"]), told.append)
    assert got.reward.type == reward
    assert bool(got.reward.kwargs) == (reward == "combined")
    assert len(told) == (reward != "combined") and all("boxed_weight" in line for line in told)


@pytest.mark.slow
def test_the_custom_example_reaches_mlflow(here: Path) -> None:
    """As written, tracker included: the run is in the local store under its experiment."""
    pytest.importorskip("mlflow")
    (here / "configs").mkdir()
    (here / "configs" / "train_rlvr_custom.yaml").write_text(CUSTOM)
    done = forked("rlvr/run_rlvr.py", "--config-name=train_rlvr_custom", *SHORT)
    assert done.returncode == 0, done.stdout + done.stderr
    experiments = [path.read_text() for path in here.glob("runs/mlruns/*/meta.yaml")]
    assert any("name: custom_rlvr_experiment" in text for text in experiments)
    assert list(here.glob("runs/mlruns/*/*/metrics/*"))
