"""`rlvr evaluate` of a model that no run made: the numbers of a run with the same config, for every kind of folder."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlvr.cli.main import run
from tests.kit.tiny_run import TINY

METRICS = ("pass@1", "pass@2", "mean_reward")


@pytest.fixture(scope="module")
def model_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny.yaml, runs/tiny, and the model of that run, ./model, as `rlvr push` writes it."""
    home = tmp_path_factory.mktemp("evaluate")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        Path("tiny.yaml").write_text(TINY)
        Path("from_model.yaml").write_text(FROM_MODEL)
        assert run(["train", "--config=tiny.yaml", "sft.steps=20", "sft.optimizer.learning_rate=0.02"]) == 0
        assert run(["push", "runs/tiny", "./model"]) == 0
    return home


@pytest.fixture
def home(model_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(model_home, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def report(capsys: Any, *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert run(["evaluate", *words]) == 0
    return json.loads(capsys.readouterr().out)


def summary_of(name: str) -> dict[str, Any]:
    return json.loads(Path("runs", name, "summary.json").read_text())


def refusal(capsys: Any, *words: str) -> str:
    assert run(["evaluate", *words]) == 2
    return capsys.readouterr().err


def test_a_run_names_the_nearest_model_folder(home: Path, capsys: Any) -> None:
    assert run(["train", "--config=from_model.yaml", "model.name=./modle"]) == 2
    assert "did you mean 'model'?" in capsys.readouterr().err


FROM_MODEL = re.sub("model:.*?rollout:", "model: {name: ./model, device: cpu}\nrollout:", TINY, flags=re.DOTALL)
ONE_STEP = ("--config=from_model.yaml", "sft.steps=0", "training.steps=1")


def test_a_model_folder_has_the_numbers_of_the_run_that_made_it(home: Path, capsys: Any) -> None:
    found = report(capsys, "./model", "--config=tiny.yaml", "sft.steps=20")
    assert {name: found[name] for name in METRICS} == {name: summary_of("tiny")["final"][name] for name in METRICS}
    assert found["mean_reward"]["value"] > 0, "a model that earns nothing tests nothing"
    assert (found["checkpoint"], found["tasks"], found["samples"], found["seed"]) == ("./model", 8, 2, 3)
    assert found["environment"] == "rpn_arithmetic"


def test_a_model_is_evaluated_like_a_run(home: Path, capsys: Any) -> None:
    """On the tasks that an evaluation of the run reports on, with its draws: its own weights have its own numbers."""
    again = report(capsys, "runs/tiny", "evaluation.samples=3")
    found = report(capsys, "./model", "--like", "runs/tiny", "evaluation.samples=3")
    assert (found.pop("checkpoint"), found.pop("like")) == ("./model", "runs/tiny")
    assert {name: value for name, value in again.items() if name != "checkpoint"} == found
    assert found["mean_reward"]["value"] > 0, "a model that earns nothing tests nothing"


def test_a_mistyped_folder_is_named_before_the_hub_is_asked(
    home: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = refusal(capsys, "rnus/tiny", "--config=tiny.yaml")
    assert "there is no such folder rnus (did you mean 'runs'?)" in said.partition("cannot be loaded")[0]
    assert "did you mean" not in refusal(capsys, "Qwen/Qwen2.5-0.5B", "--config=tiny.yaml")


def test_a_run_with_a_damaged_last_checkpoint_is_evaluated_with_a_warning(home: Path, capsys: Any) -> None:
    Path("runs/tiny/checkpoints/final-000003/model.safetensors").write_bytes(b"")
    capsys.readouterr()
    assert run(["evaluate", "runs/tiny"]) == 0
    said = capsys.readouterr()
    assert "final-000003 is damaged" in said.err and "older" in said.err
    assert not json.loads(said.out)["checkpoint"].endswith("final-000003")


@pytest.mark.slow
def test_an_evaluation_is_the_baseline_of_a_run_from_that_model(home: Path, capsys: Any) -> None:
    assert run(["train", *ONE_STEP, "run.name=next"]) == 0
    found = report(capsys, "model", "--config=tiny.yaml")
    assert {name: found[name] for name in METRICS} == {name: summary_of("next")["baseline"][name] for name in METRICS}


@pytest.mark.slow
def test_an_adapter_is_evaluated_on_its_base(home: Path, capsys: Any) -> None:
    more = ("model.lora={rank: 4}", "training.optimizer.learning_rate=0.05", "run.name=adapter")
    assert run(["train", *ONE_STEP, *more]) == 0
    assert run(["push", "runs/adapter", "./adapter"]) == 0
    assert not Path("adapter/config.json").exists()
    found = report(capsys, "./adapter", "--config=tiny.yaml")
    final = summary_of("adapter")["final"]
    assert {name: found[name] for name in METRICS} == {name: final[name] for name in METRICS}
    config = json.loads(Path("adapter/adapter_config.json").read_text())
    Path("adapter/adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "./gone"}))
    assert "give model.name=<its base model>" in refusal(capsys, "./adapter", "--config=tiny.yaml")
    again = report(capsys, "./adapter", "--config=tiny.yaml", "model.name=./model")
    assert again["mean_reward"] == found["mean_reward"]


@pytest.mark.slow
def test_an_adapter_by_peft_is_evaluated(home: Path, capsys: Any) -> None:
    """Written by peft's own code, with weights that change the answers."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = get_peft_model(
        AutoModelForCausalLM.from_pretrained("./model"), LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_()
    model.save_pretrained("./theirs")
    model.merge_and_unload().save_pretrained("./merged")
    shutil.copy("model/tokenizer.json", "merged")
    shutil.copy("model/tokenizer_config.json", "merged")
    theirs, merged, plain = (report(capsys, f"./{n}", "--config=tiny.yaml") for n in ("theirs", "merged", "model"))
    assert theirs["mean_reward"] == merged["mean_reward"] != plain["mean_reward"]


@pytest.mark.slow
def test_tasks_can_be_named_without_a_config(home: Path, capsys: Any) -> None:
    """And the report goes to a file."""
    words = ("env.name=rpn_arithmetic", "env.kwargs.complexity=[1, 1]", "evaluation.tasks=4", "evaluation.samples=1")
    capsys.readouterr()
    assert run(["evaluate", "./model", *words, "rollout.max_tokens=6", "model.device=cpu", "--out", "report.json"]) == 0
    said = capsys.readouterr()
    assert said.out == "" and "4 held-out tasks, weights ./model" in said.err
    found = json.loads(Path("report.json").read_text())
    assert found["tasks"] == 4 and found["pass@1"]["low"] <= found["pass@1"]["value"] <= found["pass@1"]["high"]
    assert not Path("runs/runs").exists() and sorted(p.name for p in Path("runs").iterdir()) == ["tiny"]


def test_what_is_no_model_is_said(home: Path, capsys: Any) -> None:
    Path("empty").mkdir()
    Path("judge").mkdir()
    Path("judge/config.json").write_text(json.dumps({"architectures": ["LlamaForSequenceClassification"]}))
    for place, said in (
        ("./nowhere", "there is no such folder; expected a run folder"),
        ("runs/nowhere", "there is no such folder"),
        ("name", "there is no such folder"),
        ("./modle", "there is no such folder (did you mean 'model'?)"),
        ("modle", "did you mean 'model'?"),
        ("./rnus/tiny", "there is no such folder rnus (did you mean 'runs'?)"),
        ("empty", "it holds no weights that are known here"),
        ("./judge", "reward.type=classifier reward.kwargs.model=./judge"),
    ):
        assert said in refusal(capsys, place, "--config=tiny.yaml"), place


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["./model"], "the tasks must be named"),
        (["./model"], "--like RUN"),
        (["./model", "--like", "runs/tniy"], "no run is there (no resolved.yaml) (did you mean 'tiny'?)"),
        (["./model", "--like", "runs/tiny", "--config=tiny.yaml"], "give one of the two"),
        (["./model", "--like", "runs/tiny", "rollout.max_tokens=3"], "rollout.max_tokens cannot be changed here"),
        (["./model", "--like", "runs/tiny", "model.lora.rank=3"], "model.lora.rank cannot be changed here"),
        (["./model", "--like", "runs/tiny", "gsm8k"], "--like out"),
        (["runs/tiny", "--like", "runs/tiny"], "leave the option --like out"),
        (["runs/tiny", "--config=tiny.yaml"], "leave the config out"),
        (["runs/tiny/checkpoints/final-000003", "--config-name=gsm8k"], "leave the config out"),
        (["./model", "--config=tiny.yaml", "model.name=./model"], "model.name has no effect here"),
        (["./model", "--config=tiny.yaml", "lora_r=4"], "model.lora.rank has no effect here"),
        (["./model", "--config=tiny.yaml", "--out", "gone/report.json"], "the folder gone does not exist"),
    ],
)
def test_a_word_without_effect_is_refused(home: Path, capsys: Any, words: list[str], said: str) -> None:
    assert said in refusal(capsys, *words)
