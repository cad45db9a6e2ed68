"""Runs with the section `prompt`: what each environment's model reads by default, and a whole run that is resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rlvr
from rlvr.core.protocols import TaskSource
from rlvr.core.types import Task
from rlvr.engine.tokenizer import load_tokenizer
from rlvr.envs import resolve_environment
from rlvr.envs.prompt import PromptOptions, encode_prompt
from rlvr.envs.prompted_source import apply_prompt_options
from rlvr.runs.evaluate_weights import evaluate_saved
from rlvr.service.dashboard.run_source import RunSource
from rlvr.service.models.served_models import open_model
from rlvr.tracking import RunConsole
from rlvr.training.rollout_rows import trajectory_row
from tests.kit.chat_rows import qwen_folder, write_rows
from tests.kit.code_rows import mbpp_file
from tests.kit.prompt_cases import CHAT, ENABLE_THINKING, first, play
from tests.kit.tiny_run import RunKilled, attempt, stored_steps

GSM8K = str(Path(rlvr.__file__).parent / "configs" / "gsm8k.yaml")
SMALL = [
    "training.steps=2", "training.prompts_per_step=2", "training.group_size=4", "rollout.max_tokens=6", "sft.steps=2",
    "sft.batch_size=4", "evaluation.tasks=4", "evaluation.samples=1", "evaluation.k=1", "engine.threads=1",
    "run.checkpoint_every=1", "prompt.thinking=off", "prompt.examples=2", "reward.type=length_penalty",
    "reward.kwargs.target_length=2",
]  # fmt: skip


def open_source(name: str, folder: Path) -> TaskSource:
    rows, file = str(write_rows(folder / "gsm8k")), folder / "tasks.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n} + 1?", "answer": str(n + 1)}) + "\n" for n in range(9)))
    given: dict[str, dict[str, Any]] = {
        "gsm8k": {"path": rows},
        "jsonl": {"path": str(file)},
        "mbpp": {"path": str(mbpp_file(folder))},
        "refine": {"inner": "gsm8k", "inner_kwargs": {"path": rows}},
    }
    return resolve_environment(name, **given[name])


@pytest.mark.parametrize("name", ["gsm8k", "jsonl", "mbpp", "refine"])
def test_by_default_the_model_reads_the_templates_prompt_and_rollouts_keep_it(name: str, tmp_path: Path) -> None:
    source = apply_prompt_options(open_source(name, tmp_path), CHAT, PromptOptions())
    answers = ("one", "two") if name == "refine" else ("one",)
    row = json.loads(trajectory_row(play(source, CHAT, *answers)))
    (message,) = source.chat_messages(first(source))
    text = f"<|im_start|>user\n{message['content']}<|im_end|>\n<|im_start|>assistant\n"
    assert row["prompt"] == first(source).prompt and row["rendered_prompt"] == text
    assert row["prompt_tokens"] == CHAT.encode(text, add_special_tokens=False)


@pytest.mark.slow
def test_a_run_without_thinking_after_two_examples_is_resumed_evaluated_shown_and_served(tmp_path: Path) -> None:
    """Killed and resumed to the same weights; every part of it shows the model the same prompt."""
    model, rows = qwen_folder(tmp_path / "model", ENABLE_THINKING), write_rows(tmp_path / "rows")
    words = [f"model.name={model}", f"env.kwargs.path={rows}", *SMALL]
    whole = attempt(GSM8K, *words, f"run.root={tmp_path / 'whole'}")
    killed = [*words, f"run.root={tmp_path / 'killed'}"]
    with pytest.raises(RunKilled):
        attempt(GSM8K, *killed, killed_at=1)
    with pytest.raises(ValueError, match=r"differs in prompt\.examples"):
        attempt(GSM8K, *killed, "prompt.examples=1")
    resumed, folder = attempt(GSM8K, *killed), tmp_path / "killed" / "gsm8k"
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert stored_steps(folder) == stored_steps(tmp_path / "whole" / "gsm8k")

    tokenizer, view = load_tokenizer(str(model)), RunSource(folder)
    asked = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    examples = [resolve_environment("gsm8k", path=str(rows)).train(0, index, "") for index in (0, 1)]
    before = "".join(f"{asked.format(task.prompt)}{task.meta['answer']}<|im_end|>\n" for task in examples)
    expected = f"{before}{asked}<think>\n\n</think>\n\n"
    for step in (0, 1):
        lines = (folder / "rollouts" / f"rl-{step:06d}.jsonl").read_text().splitlines()
        for place, row in enumerate(map(json.loads, lines)):
            assert row["rendered_prompt"] == expected.format(row["prompt"])
            assert tokenizer.decode(row["prompt_tokens"]) == row["rendered_prompt"]
            shown = view.detail(f"gsm8k:{step}:{place}")
            assert shown is not None and shown.prompt == row["rendered_prompt"]
    with RunConsole() as console:
        again = evaluate_saved(folder, [], console)
    assert again["mean_reward"] == resumed["final"]["mean_reward"]
    served = open_model(str(folder), tmp_path / "served").prompt_writer.write(Task("own", "And now?"))
    assert tokenizer.decode(encode_prompt(served, tokenizer)) == expected.format("And now?")
