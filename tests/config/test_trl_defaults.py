"""A config in TRL's words does as TRL does beyond the words, and says what it still does otherwise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlvr.cli.main import run
from rlvr.config import load
from rlvr.config.build_config import build_config, resolved_values
from rlvr.config.schema import RunConfig
from rlvr.config.trl_defaults import list_differences
from tests.kit.composing import BASE, compose_base, refusal_of, warnings_of

ADAPTER = "lora: {rank: 8}"
MORE = ("weight_decay=0.1", "num_iterations=2")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(BASE)


def read_shipped(*words: str, name: str = "dataset") -> tuple[RunConfig, list[str], dict[str, str]]:
    """A shipped config with words typed: the config, its warnings, and what its plan says of TRL."""
    said: list[str] = []
    loaded = load(name, None, ["model.name=./m", *words])
    built = build_config(loaded, said.append)
    assert resolved_values(built, loaded)["model"]["lora"] == (
        built.model.lora and vars(built.model.lora) | {"targets": []}
    )
    return built, said, list_differences(loaded, built)


# --- num_iterations ----------------------------------------------------------------------------------------------


def test_num_iterations_alone_is_the_number_of_steps() -> None:
    built = build_config(compose_base("", "num_iterations=2", "learning_rate=1e-3"), warn=pytest.fail)
    assert (built.training.steps, built.training.ppo_epochs) == (2, 1)


@pytest.mark.parametrize(
    "beside", ["num_generations=4", "epsilon=0.2", "loss_type=dapo", "use_vllm=false", "report_to=none"]
)
def test_num_iterations_beside_a_word_of_trl_is_how_often_a_batch_is_used(beside: str) -> None:
    said: list[str] = []
    built = build_config(compose_base("", "num_iterations=2", beside), said.append)
    assert built.training.ppo_epochs == 2 and built.training.steps == 100
    assert len(said) == 1 and "num_iterations" in said[0] and "training.ppo_epochs" in said[0]


def test_in_one_file_num_iterations_is_trls_too() -> None:
    built = build_config(compose_base("num_iterations: 3\nnum_generations: 4\n", "seed=1"))
    assert (built.training.ppo_epochs, built.training.group_size) == (3, 4)


def test_trls_counts_of_updates_become_steps() -> None:
    words = ["num_iterations=2", "num_generations=4", "max_steps=100", "eval_steps=10", "save_steps=50"]
    said: list[str] = []
    built = build_config(compose_base("", *words), said.append)
    assert (built.training.steps, built.evaluation.every, built.run.checkpoint_every) == (50, 5, 25)
    assert built.training.ppo_epochs == 2 and "max_steps=100 updates are training.steps=50" in said[0]
    text = refusal_of("", *words[:2], "max_steps=101")
    assert "max_steps=101" in text and "multiple of 2" in text and "training.steps" in text


@pytest.mark.parametrize(
    ("text", "word"), [("num_iterations: 100\n", "num_generations=4"), ("num_generations: 4\n", "num_iterations=100")]
)
def test_num_iterations_that_may_be_either_is_refused(text: str, word: str) -> None:
    said = refusal_of(text, word)
    assert "num_iterations=100" in said and "num_generations=4" in said
    assert "training.ppo_epochs" in said and "training.steps" in said


def test_num_iterations_of_a_section_stays_the_number_of_steps() -> None:
    built = build_config(compose_base("rlvr_training: {num_iterations: 7, num_generations: 4}\n", "num_generations=2"))
    assert (built.training.steps, built.training.ppo_epochs, built.training.group_size) == (7, 1, 2)


# --- which weights are trained -----------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["num_generations=4", "beta=0.0", "bf16=true", "use_peft=false", "use_vllm=false"])
def test_words_of_trl_without_lora_train_all_weights_at_trls_rate_and_say_so(word: str) -> None:
    built, said, _ = read_shipped(word)
    assert built.model.lora is None and built.training.optimizer.learning_rate == 1e-6
    assert len(said) == 1 and word.partition("=")[0] in said[0] and "all weights" in said[0]
    assert "rlvr/configs/dataset.yaml" in said[0] and "1e-06" in said[0] and "4e-05" in said[0] and "lora_r" in said[0]


def test_a_learning_rate_of_ones_own_stays() -> None:
    built, said, _ = read_shipped("num_generations=4", "learning_rate=3e-6")
    assert built.model.lora is None and built.training.optimizer.learning_rate == 3e-6
    assert "learning_rate" not in said[0]


@pytest.mark.parametrize(
    ("words", "rank"),
    [
        (["num_generations=4", "lora_r=4"], 4), (["num_generations=4", "model.lora.rank=4"], 4),
        (["num_generations=4", "use_peft=true"], 32), (["num_generations=4", "lora_alpha=16"], 32),
        (["num_generations=4", "lora_rank=4"], 4), (["temperature=0.9", "max_steps=3"], 32), ([], 32),
    ],
)  # fmt: skip
def test_an_adapter_stays_where_it_is_named_or_nothing_is_trls(words: list[str], rank: int) -> None:
    built, said, _ = read_shipped(*words)
    assert built.model.lora is not None and built.model.lora.rank == rank and said == []
    assert built.training.optimizer.learning_rate == 4e-5


def test_an_adapter_of_the_users_file_stays() -> None:
    text = BASE.replace("model: {", f"model: {{{ADAPTER}, ") + "num_generations: 4\n"
    Path("own.yaml").write_text(text)
    built = build_config(load(None, "own.yaml"), warn=pytest.fail)
    assert built.model.lora is not None and built.model.lora.rank == 8


def test_use_peft_alone_makes_trls_adapter() -> None:
    built = build_config(compose_base("", "use_peft=true"), warn=pytest.fail)
    assert built.model.lora is not None and (built.model.lora.rank, built.model.lora.alpha) == (16, 32)
    assert build_config(compose_base("", "use_peft=false")).model.lora is None
    assert "disagree" in refusal_of("", "use_peft=false", "lora_r=8")


def test_a_client_that_trains_adapters_keeps_its_own() -> None:
    built, said, lines = read_shipped("num_generations=4", "client=tinker", "client.base_url=http://localhost:1")
    assert built.model.lora is not None and built.training.optimizer.learning_rate == 4e-5
    assert not any("all weights" in text for text in said) and "TRL all weights" in lines["  weights"]


# --- what still differs ------------------------------------------------------------------------------------------


def test_the_plan_names_each_default_that_is_not_trls_in_its_words() -> None:
    _, _, lines = read_shipped("num_generations=8", "lr_scheduler_type=linear", "temperature=0.8", "weight_decay=0.1")
    said = lines["unlike TRL"]
    for part in ("adam_beta2=0.95 (0.999)", "scale_rewards=none (group)", "max_completion_length=256 (512)"):
        assert part in said, said
    for word in ("learning_rate", "num_generations", "lr_scheduler_type", "weight_decay", "temperature", "epsilon="):
        assert word not in said, said
    assert "biases" in lines["  weight decay"] and "evaluation.temperature=1" in lines["  sampling"]
    assert "0.8" in lines["  sampling"] and "drop_equal_groups=false" in lines["  equal rewards"]


def test_what_is_given_or_does_not_differ_is_not_named() -> None:
    _, _, lines = read_shipped(
        "num_generations=8", "adam_beta2=0.999", "scale_rewards=group", "algorithm.drop_equal_groups=false",
        "lr_scheduler_type=linear", "warmup_steps=0", "max_completion_length=64", "epsilon=0.2", "epsilon_high=0.2",
        "max_steps=9", "generation_batch_size=8",
    )  # fmt: skip
    assert lines.pop("  scale_rewards") and lines == {"unlike TRL": "no other default"}


def test_evaluations_that_cut_the_distribution_in_training_only_are_named() -> None:
    _, _, lines = read_shipped("num_generations=8", "top_p=0.9")
    assert "without top_p" in lines["  sampling"] and "  weight decay" not in lines


def test_other_configs_say_nothing_of_trl() -> None:
    assert read_shipped("temperature=0.8")[2] == {}
    loaded = load("train_rlvr_test")
    assert list_differences(loaded, build_config(loaded)) == {} == dict.fromkeys(loaded.trl_words)
    assert warnings_of("", "data.train_batch_size=8") == []


def test_the_commands_print_it_before_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "--config=base.yaml", "num_generations=2", "max_completion_length=6", *MORE]) == 0
    said = capsys.readouterr()
    assert "unlike TRL" in said.out + said.err and "adam_beta2=0.95 (0.999)" in said.out + said.err
    assert "training.ppo_epochs" in said.err


@pytest.mark.slow
def test_the_defaults_are_those_of_the_library() -> None:
    pytest.importorskip("trl")
    sizes = ("num_generations", "per_device_train_batch_size", "gradient_accumulation_steps", "num_iterations")
    adam = ("learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm")
    sampling = ("max_completion_length", "temperature", "top_p", "top_k", "min_p")
    loss = ("scale_rewards", "loss_type", "epsilon", "epsilon_high", "beta")
    names = [*sizes, *adam, *sampling, *loss, "warmup_steps", "num_train_epochs"]
    code = (
        "import dataclasses, json; from trl import GRPOConfig, ModelConfig\n"
        "found = {f.name: f.default for f in dataclasses.fields(GRPOConfig)}\n"
        "peft = {f.name: f.default for f in dataclasses.fields(ModelConfig)}\n"
        f"print(json.dumps([{{n: found[n] for n in {names!r}}}, str(found['lr_scheduler_type']),"
        " peft['lora_r'], peft['lora_alpha'], peft['use_peft']]))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    found, schedule, rank, alpha, use = json.loads(printed.splitlines()[-1])
    assert ("linear" in schedule.lower(), rank, alpha, use) == (True, 16, 32, False)
    expected: dict[str, Any] = {
        "learning_rate": 1e-6, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.0,
        "max_grad_norm": 1.0, "warmup_steps": 0, "num_train_epochs": 3.0, "num_generations": 8,
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_iterations": 1,
        "max_completion_length": 512, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None,
        "scale_rewards": "group", "loss_type": "dapo", "epsilon": 0.2, "epsilon_high": None, "beta": 0.0,
    }  # fmt: skip
    assert found == expected
