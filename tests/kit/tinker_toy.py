"""A random model for the environment `toy`, and runs of it at a Tinker server."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from rlvr.envs import resolve_environment
from tests.kit.tiny import END, PAD
from tests.kit.tiny_run import attempt as attempt_at


def toy_model(folder: Path) -> None:
    """A random model that can say the words of the environment `toy`, and read its questions."""
    from rlvr.engine.model_loading import build_model
    from rlvr.engine.tokenizer import build_tokenizer

    source = resolve_environment("toy")
    tasks = [*source.heldout(None), *(source.train(7, i, source.levels[0]) for i in range(40))]
    words = sorted({*source.vocabulary, *(word for task in tasks for word in task.prompt_text.split())})
    tokenizer = build_tokenizer("words", words, end=END, pad=PAD)
    config = {
        "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "initializer_range": 0.3,
    }  # fmt: skip
    save(build_model(config, tokenizer, seed=1, device="cpu", dtype="float32"), tokenizer, folder)


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    model.module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


RUN = """
client: tinker
seed: 7
env: {name: toy}
reward: {kwargs: {keywords: [answer, solution]}}
model: {name: toy, lora: {rank: 8}}
rollout: {max_tokens: 16}
algorithm: {name: reinforce}
training: {steps: 12, prompts_per_step: 8, group_size: 4, optimizer: {learning_rate: 2e-2}}
evaluation: {samples: 8, tasks: 16}
run: {checkpoint_every: 4, rollouts_per_step: 2}
"""


attempt = partial(attempt_at, "run.yaml")

# A server that samples each completion alone. Which ones it would compute together depends on when they come, and with
# it their rounding, which every optimizer step makes larger. So a run is the same bit for bit, done once more.
ALONE = "engine.max_rows=1"
