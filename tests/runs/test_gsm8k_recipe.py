"""The GSM8K recipe as a user runs it, on a tiny random model in the shape of Qwen2.5-Instruct."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rlvr
from rlvr.algorithms.losses.clipped import Ppo
from rlvr.algorithms.optimizers import OptimizerSection
from rlvr.algorithms.terms.entropy import Entropy
from rlvr.algorithms.terms.kl import Kl
from rlvr.cli.main import run
from rlvr.config import dump, load, read
from rlvr.config.build_config import build_config
from rlvr.engine.engine_options import LoraConfig
from rlvr.envs.prompt import encode_prompt
from rlvr.envs.prompted_source import apply_prompt_options
from rlvr.runs.assembly import assemble
from rlvr.runs.evaluate_weights import evaluate_saved
from rlvr.service.dashboard.run_source import RunSource
from rlvr.service.models.served_models import open_model
from rlvr.tracking import RunConsole
from tests.kit.chat_rows import REAL, ROWS, SYSTEM, TEMPLATE, qwen_folder, write_rows
from tests.kit.code_rows import chat_tokenizer
from tests.kit.tiny_run import RunKilled, attempt, stored_steps

CONFIGS = Path(rlvr.__file__).parent / "configs"
SMALL = [
    "training.steps=2", "training.prompts_per_step=4", "training.group_size=4", "rollout.max_tokens=12",
    "evaluation.tasks=6", "engine.threads=1", "engine.logit_elements=4096", "run.checkpoint_every=1",
]  # fmt: skip
# A length reward gives a random model a signal.
SIGNAL = (
    "reward={type: composite, kwargs: {rewards: [{name: gsm8k_strict, weight: 1.0}, "
    "{name: length_penalty, weight: 0.5, kwargs: {target_length: 2}}]}, watch: [gsm8k_strict, gsm8k_flexible]}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen_folder(tmp_path_factory.mktemp("qwen") / "model")


def words(model: Path, rows: Path, root: Path, *more: str) -> list[str]:
    return [f"model.name={model}", f"env.kwargs.path={rows}", f"run.root={root}", *SMALL, *more]


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize("size", ["0.5", "1.5"])
def test_the_recipe_has_the_conditions_of_the_published_runs(size: str) -> None:
    """As in the two logs that docs/start/pretrained.md names."""
    c = build_config(load(f"gsm8k_{size}b"))
    assert (c.model.name, c.model.lora) == (f"Qwen/Qwen2.5-{size}B-Instruct", LoraConfig(32, 32.0))
    assert (c.training.steps, c.training.prompts_per_step, c.training.group_size) == (116, 64, 5)
    a = c.algorithm.resolve()
    assert (a.advantage.name, a.loss, a.reduction) == ("group_normalized", Ppo(0.2, 0.2), "token_mean")
    assert (a.terms, a.drop_equal_groups) == ((Kl(0.001, "k3", "loss"), Entropy(0.001)), False)
    assert c.training.optimizer == OptimizerSection(
        learning_rate=3e-5, beta1=0.9, beta2=0.999, weight_decay=0.01, grad_clip=1.0
    )
    assert (c.rollout.max_tokens, c.rollout.temperature, c.rollout.top_p) == (1024, 1.0, 1.0)
    e = c.evaluation
    assert (e.tasks, e.samples, e.temperature, e.every, e.interim_tasks, e.interim_samples) == (
        1319,
        1,
        0.0,
        10,
        None,
        1,
    )
    assert (c.reward.type, c.reward.watch, c.prompt.chat) == ("gsm8k_strict", ["gsm8k_flexible"], "on")


def test_the_model_reads_what_the_published_logs_show(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = TEMPLATE
    c = build_config(load("gsm8k_0.5b", None, [f"env.kwargs.path={write_rows(tmp_path)}"]))
    source = apply_prompt_options(assemble(c).source, tokenizer, c.prompt)
    (task,) = [t for t in source.heldout(None) if t.id == "gsm8k-test-1"]
    assert tokenizer.decode(encode_prompt(task, tokenizer)) == (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nAnn has 17 pens and buys 3 more. How many pens has she? "
        'Let\'s think step by step and output the final answer after "####".<|im_end|>\n<|im_start|>assistant\n'
    )


@pytest.mark.slow
def test_strict_and_lenient_accuracy_are_reported_before_between_and_after(model: Path, tmp_path: Path) -> None:
    """A model that was taught to say the bare number: every answer is right, and none has the asked form."""
    bare = [{**row, "answer": "7"} for row in ROWS]
    taught = ["sft.steps=24", "sft.batch_size=4", "sft.optimizer.learning_rate=0.01", "evaluation.every=1"]
    given = words(model, write_rows(tmp_path / "rows", bare), tmp_path, *taught)
    assert run(["train", "--config-name=gsm8k_0.5b", *given]) == 0
    folder = tmp_path / "gsm8k_0.5b"
    found = summary(folder)
    for when in ("baseline", "final"):
        assert found[when]["pass@1"]["value"] == 0.0
        assert found[when]["watched/gsm8k_flexible"]["value"] == 1.0
    assert (found["tasks"], found["samples"]) == (6, 1)
    between = [row for row in stored_steps(folder) if row["phase"] == "rl" and "test/env/all/correct" in row]
    assert [(r["step"], r["test/env/all/correct"], r["test/watched/gsm8k_flexible"]) for r in between] == [
        (0, 0.0, 1.0),
        (1, 0.0, 1.0),  # the last step, which may be the best
    ]
    row = json.loads((folder / "rollouts" / "rl-000000.jsonl").read_text().splitlines()[0])
    asked = f"{row['prompt']}<|im_end|>\n<|im_start|>assistant\n"
    assert row["rendered_prompt"] == f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{asked}"
    assert row["prompt"].startswith("Ann has") and row["prompt"].endswith('the final answer after "####".')
    assert row["scores"].keys() == {"gsm8k_strict", "gsm8k_flexible"}
    shown = RunSource(folder).detail("gsm8k_0.5b:0:0")
    assert shown is not None and shown.prompt == row["rendered_prompt"]


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason="the GSM8K files are not beside the project")
def test_two_steps_on_the_published_rows(model: Path, tmp_path: Path) -> None:
    assert run(["train", "--config-name=gsm8k_1.5b", *words(model, REAL, tmp_path, SIGNAL)]) == 0
    steps = stored_steps(tmp_path / "gsm8k_1.5b")
    assert [m["step"] for m in steps] == [0, 1]
    assert all(m["updates"] == 1 and m["grad_norm"] > 0 and m["kl"] >= 0 for m in steps)
    assert all(m["sampling/sampling_logp_difference/max"] < 1e-4 for m in steps)


@pytest.mark.slow
def test_a_killed_recipe_goes_on_to_the_same_weights(model: Path, tmp_path: Path) -> None:
    rows, file = write_rows(tmp_path / "rows"), str(CONFIGS / "gsm8k_0.5b.yaml")
    whole = attempt(file, *words(model, rows, tmp_path / "whole", SIGNAL))
    with pytest.raises(RunKilled):
        attempt(file, *words(model, rows, tmp_path / "killed", SIGNAL), killed_at=1)
    resumed = attempt(file, *words(model, rows, tmp_path / "killed", SIGNAL))
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert stored_steps(tmp_path / "killed" / "gsm8k_0.5b") == stored_steps(tmp_path / "whole" / "gsm8k_0.5b")


@pytest.mark.slow
def test_a_run_begun_before_there_was_a_prompt_section_goes_on_reading_text(model: Path, tmp_path: Path) -> None:
    """Its resolved.yaml has no `prompt`: a resume and `rlvr evaluate` leave the chat template out, as it began."""
    rows, file = write_rows(tmp_path / "rows"), str(CONFIGS / "gsm8k.yaml")
    as_text = attempt(file, *words(model, rows, tmp_path / "text", SIGNAL, "prompt.chat=off"))
    begun = words(model, rows, tmp_path / "begun", SIGNAL)
    with pytest.raises(RunKilled):
        attempt(file, *begun, "prompt.chat=off", killed_at=1)
    folder = tmp_path / "begun" / "gsm8k"
    stored = read(folder / "resolved.yaml")
    assert stored.pop("prompt")["chat"] == "off"
    stored["algorithm"]["name"] = "ppo"  # the default's name then
    (folder / "resolved.yaml").write_text(dump(stored))
    with pytest.raises(ValueError, match=r"differs in prompt\.chat"):
        attempt(file, *begun, "prompt.chat=on")
    with pytest.raises(ValueError, match=r"prompt\.system"):
        attempt(file, *begun, "prompt.system=Be brief.")
    resumed = attempt(file, *begun)
    assert resumed["weights_sha256"] == as_text["weights_sha256"]
    assert all(
        "rendered_prompt" not in line for line in (folder / "rollouts" / "rl-000001.jsonl").read_text().split("\n")
    )
    with RunConsole() as console:
        again = evaluate_saved(folder, [], console)
    assert again["pass@1"] == resumed["final"]["pass@1"]
    assert again["mean_reward"] == resumed["final"]["mean_reward"]
    assert not open_model(str(folder), tmp_path / "served").prompt_writer.is_chat
