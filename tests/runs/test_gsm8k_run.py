"""`rlvr train --config-name=gsm8k` on real rows, with a tiny random model made on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlvr.cli.main import run
from tests.kit.chat_rows import REAL, write_rows


@pytest.fixture(params=["real rows", "own rows"])
def rows(request: Any, tmp_path: Path) -> Path:
    """A folder with train.jsonl and test.jsonl."""
    if request.param == "real rows":
        if not REAL.is_dir():
            pytest.skip("the GSM8K files are not beside the project")
        return REAL
    return write_rows(tmp_path)


@pytest.fixture
def model(rows: Path, tmp_path: Path) -> Path:
    """A model folder as a hub model would look: byte-level BPE tokenizer and a 2-layer qwen3, random weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    text = [json.loads(line)["question"] for line in (rows / "train.jsonl").read_text().splitlines()[:300]]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(text, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|end|>")
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=512, eos_token_id=0,
    )  # fmt: skip
    folder = tmp_path / "model"
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_two_full_steps_on_grade_school_mathematics(rows: Path, model: Path, tmp_path: Path) -> None:
    """Sampling, verification and a LoRA update with the shipped config; a length reward gives a signal."""
    parts = "[{name: gsm8k, weight: 1.0}, {name: length_penalty, weight: 0.5, kwargs: {target_length: 4}}]"
    words = [
        "train", "--config-name=gsm8k", f"model.name={model}", f"env.kwargs.path={rows}", "training.steps=2",
        "training.prompts_per_step=4", "training.group_size=4", "rollout.max_tokens=16", "evaluation.tasks=6",
        "reward.type=composite", f"reward.kwargs.rewards={parts}", f"run.root={tmp_path / 'runs'}", "engine.threads=1",
    ]  # fmt: skip
    assert run(words) == 0
    metrics = [json.loads(x) for x in (tmp_path / "runs" / "gsm8k" / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == [0, 1]
    assert all(m["updates"] == 1 and m["grad_norm"] > 0 for m in metrics)
    assert all(m["sampling/sampling_logp_difference/max"] < 1e-4 for m in metrics)
    adapter = tmp_path / "runs" / "gsm8k" / "checkpoints" / "final-000002" / "adapter_config.json"
    assert json.loads(adapter.read_text())["peft_type"] == "LORA"
