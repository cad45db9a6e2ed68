"""What the benchmarks compute on: models from random weights, tasks, and the rewards that judge them.

The same objects serve ours and the peers: a reward here has TRL's signature, which `rlvr` takes as it is, and a model
is a folder that both load. Exercised by `tests/test_bench.py`. Left out on purpose: pretrained weights (their size, not
their knowledge, is what costs time; `rlvr bench --model FOLDER` takes the user's own).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any

from rlvr import draws
from rlvr.envs.rows import RowSource
from rlvr.types import Task

_SHAPE = {"model_type": "qwen3", "head_dim": 64, "tie_word_embeddings": True}
QWEN_3M = _SHAPE | {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 768,
    "max_position_embeddings": 256,
}
QWEN_25M = _SHAPE | {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1408,
    "max_position_embeddings": 4096,
}
QWEN_500M = _SHAPE | {  # with a vocabulary of 150,000
    "hidden_size": 1024,
    "num_hidden_layers": 22,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 3072,
    "max_position_embeddings": 32_768,
}
# 4,000 words, every second one with an even number of letters.
WORDS = tuple(
    "".join(letters) + "n" * (i % 2)
    for i, letters in enumerate(islice(product("bdfgklmprstvwxyz", "aeiou", "bdfgklmprstvwxyz", "aeiou"), 4000))
)


class Prompts(RowSource):
    """Tasks in the order of the list, again and again: what a loader without shuffling gives."""

    def train(self, seed: int, index: int, level: str) -> Task:
        tasks = self._by_level[level]
        return tasks[index % len(tasks)]


def near_sum(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 for a number less than 100 away from the sum or difference that was asked for."""
    return [float(_near(text.strip(), int(right))) for text, right in zip(completions, answer, strict=True)]


def _near(text: str, right: int) -> bool:
    digits = text.removeprefix("-")
    return digits.isdecimal() and len(digits) <= 4 and abs(int(text) - right) < 100


def even_words(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """1 where more than half of the words have an even number of letters: about every second answer at first."""
    return [float(2 * sum(len(word) % 2 == 0 for word in text.split()) > len(text.split())) for text in completions]


def sums(count: int) -> list[Task]:
    """Addition and subtraction of numbers of three digits, `123+456=`."""
    made: list[Task] = []
    for index in range(count):
        a, b, plus = (draws.integer(n, draws.key("bench-sums", index, i)) for i, n in enumerate((1000, 1000, 2)))
        made.append(Task(f"sum-{index}", f"{a}{'+' if plus else '-'}{b}=", {"answer": str(a + b if plus else a - b)}))
    return made


def word_prompts(count: int, length: int, tokenizer: Any, words: Sequence[str] = WORDS) -> list[Task]:
    """Prompts of `length` tokens of the tokenizer: words drawn at random, as many as fit."""
    made: list[Task] = []
    for index in range(count):
        chosen: list[str] = []
        key = draws.key("bench-words", index)
        while len(tokenizer.encode(" ".join(chosen), add_special_tokens=False)) < length:
            chosen += (words[draws.integer(len(words), key, len(chosen) + i)] for i in range(max(1, length // 8)))
        ids = tokenizer.encode(" ".join(chosen), add_special_tokens=False)[:length]
        made.append(Task(f"words-{index}", tokenizer.decode(ids)))
    return made


def built_folder(folder: Path, config: dict[str, Any], kind: str, vocabulary: Sequence[str], seed: int = 0) -> Path:
    """A model of random weights with its tokenizer, saved once in `folder`, as any trainer loads it."""
    if not (folder / "config.json").exists():
        from rlvr.engine.model import build_model
        from rlvr.engine.tokenizer import build_tokenizer

        tokenizer = build_tokenizer(kind, vocabulary, end="<end>", pad="<pad>")
        model = build_model(config, tokenizer, seed=seed, device="cpu", dtype="float32")
        model.module.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder
