"""What the benchmarks compute on: models with random weights, tasks, and rewards.

Both sides use the same objects: a reward here has TRL's signature, which `rlvr` accepts as it is, and a model is a
folder that both load. Time depends on the size of weights, not on what they know, so they are random but for one case;
`rlvr bench --model FOLDER` takes the user's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

from rlvr.core import rng
from rlvr.core.types import Task
from rlvr.envs.row_source import RowSource
from rlvr.envs.rpn_arithmetic import RPNArithmetic
from rlvr.envs.small_tasks import SmallTasks

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


class OrderedPrompts(RowSource):
    """Tasks in the order of the list, repeated: a loader without shuffling."""

    def train(self, seed: int, index: int, level: str) -> Task:
        return self._portions[level][0].draw(0, index)


def near_sum(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 for a number less than 100 away from the right sum or difference."""
    return [float(_near(text.strip(), int(right))) for text, right in zip(completions, answer, strict=True)]


def _near(text: str, right: int) -> bool:
    digits = text.removeprefix("-")
    return digits.isdecimal() and len(digits) <= 4 and abs(int(text) - right) < 100


def last_word(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 if the completion ends in `=` and the answer: `= 8 7 + = 2`."""
    return [float(text.split()[-2:] == ["=", right]) for text, right in zip(completions, answer, strict=True)]


def even_words(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """1 if more than half of the words have an even number of letters: about half of a random model's completions."""
    return [float(2 * sum(len(word) % 2 == 0 for word in text.split()) > len(text.split())) for text in completions]


def last_number(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 if the last number of the completion is the answer."""
    found = [re.findall(r"\d+", text) for text in completions]
    return [float(numbers[-1:] == [right]) for numbers, right in zip(found, answer, strict=True)]


def read_rows(file: Path, keys: set[str], rows: str) -> list[dict[str, Any]]:
    """The JSON objects of a file of lines; ValueError unless the first has these keys."""
    try:
        found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except ValueError:
        found = []
    if not found or not isinstance(found[0], dict) or not keys <= found[0].keys():
        raise ValueError(f"--data {file}: expected {rows}, a JSON object per line")
    return found


def sums(count: int) -> list[Task]:
    """Addition and subtraction of numbers of three digits, `123+456=`."""
    tasks: list[Task] = []
    for index in range(count):
        a, b, plus = (rng.integer(n, rng.key("bench-sums", index, i)) for i, n in enumerate((1000, 1000, 2)))
        tasks.append(Task(f"sum-{index}", f"{a}{'+' if plus else '-'}{b}=", {"answer": str(a + b if plus else a - b)}))
    return tasks


def chat_sums(tokenizer: Any) -> list[Task]:
    """Sums of the environment `small_tasks`, as the text that the tokenizer's chat template makes of them."""
    source = SmallTasks(["sums"])
    tasks = (source.train(0, index, "") for index in range(300))
    render = partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
    return [replace(task, prompt=render([{"role": "user", "content": str(task.prompt)}])) for task in tasks]


def main_job() -> RPNArithmetic:
    """The task source of `arithmetic`."""
    return RPNArithmetic(p=13, complexity=(1, 3))


def main_job_tasks(seed: int, count: int = 1 << 15) -> list[Task]:
    """Training problems of `arithmetic`, its levels in turn; as one level, so that both sides keep the order."""
    source = main_job()
    tasks = (source.train(seed, index, source.levels[index % len(source.levels)]) for index in range(count))
    return [replace(task, level="") for task in tasks]


def word_prompts(count: int, length: int, tokenizer: Any, words: Sequence[str] = WORDS) -> list[Task]:
    """OrderedPrompts of `length` tokens of the tokenizer: words drawn at random, as many as fit."""
    tasks: list[Task] = []
    for index in range(count):
        chosen: list[str] = []
        key = rng.key("bench-words", index)
        while len(tokenizer.encode(" ".join(chosen), add_special_tokens=False)) < length:
            chosen += (words[rng.integer(len(words), key, len(chosen) + i)] for i in range(max(1, length // 8)))
        ids = tokenizer.encode(" ".join(chosen), add_special_tokens=False)[:length]
        tasks.append(Task(f"words-{index}", tokenizer.decode(ids)))
    return tasks


def build_folder(folder: Path, config: dict[str, Any], kind: str, vocabulary: Sequence[str], seed: int = 0) -> Path:
    """Save a random model and its tokenizer in `folder`, unless they are there; returns the folder."""
    if not (folder / "config.json").exists():
        from rlvr.engine.model_loading import build_model
        from rlvr.engine.tokenizer import build_tokenizer

        tokenizer = build_tokenizer(kind, vocabulary, end="<end>", pad="<pad>")
        model = build_model(config, tokenizer, seed=seed, device="cpu", dtype="float32")
        model.module.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder
