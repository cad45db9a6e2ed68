"""The peak of a process that makes two training steps, for test_memory.py; and the model and rows it trains on.

    python tests/kit/peak_memory.py '[CONFIG, "float32", 0, {"micro_tokens": 2048}, 12, 512]'

Prints the bytes of resident memory beyond what the process had after it had trained a far smaller model, which loads
every library. The list holds the config, the dtype, the rank of an adapter (0: all weights), limits of the engine, and
the number of rows and of their tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from rlvr.core.messages import AdamParams, Datum, ModelInput, TensorData
from rlvr.engine.engine import Engine
from rlvr.engine.engine_options import EngineLimits, LoraConfig
from rlvr.engine.model_loading import build_model
from rlvr.engine.tokenizer import build_tokenizer


def make_engine(tokenizer: Any, config: dict[str, Any], dtype: str = "float32", **limits: Any) -> Engine:
    return Engine(build_model(config, tokenizer, seed=1, device="cpu", dtype=dtype), EngineLimits(**limits))


def make_rows(count: int, length: int, vocabulary: int) -> list[Datum]:
    """Rows without a common prefix, a loss on every token."""
    generator = torch.Generator().manual_seed(0)
    rows: list[Datum] = []
    for _ in range(count):
        tokens = torch.randint(0, vocabulary, (length + 1,), generator=generator).tolist()
        inputs = {"target_tokens": TensorData.of(tokens[1:]), "weights": TensorData.of([1.0] * length)}
        rows.append(Datum(ModelInput(tokens[:-1]), inputs))
    return rows


def train(engine: Engine, rank: int, rows: list[Datum]) -> None:
    policy = engine.create_policy("policy", lora=LoraConfig(rank) if rank else None)
    for _ in range(2):
        engine.forward_backward(policy, rows, "cross_entropy", None)
        engine.optim_step(policy, AdamParams())


def read_peak() -> int:
    """Of this program alone: the peak that `getrusage` gives begins with that of the process that started it."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def main(config: dict[str, Any], dtype: str, rank: int, limits: dict[str, Any], rows: int, length: int) -> None:
    words = [f"w{i}" for i in range(config["vocab_size"] - 2)]
    tokenizer = build_tokenizer("words", words, end="<end>", pad="<pad>")
    small = {**config, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    train(make_engine(tokenizer, small, dtype), rank, make_rows(1, 8, config["vocab_size"]))
    before = read_peak()
    train(make_engine(tokenizer, config, dtype, **limits), rank, make_rows(rows, length, config["vocab_size"]))
    print(read_peak() - before)


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
