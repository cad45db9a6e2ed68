"""The weights behind the mock client: a table of token logits, its words, and its place on disk.

`rlvr.clients.mock.mock_client` samples from it and trains it. A saved table is one JSON file in a folder with
checksums; floats in JSON keep every bit.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from rlvr.core import rng
from rlvr.core.files import find_damage, read_json

_CURE = "load another checkpoint, or train anew"


class WordTokenizer:
    """Words split at blanks; id 0 is the end token, id 1 stands for every word outside the vocabulary."""

    def __init__(self, words: Sequence[str], end: str = "<end>") -> None:
        self.words = list(dict.fromkeys([end, "<unk>", *words]))
        self.ids = {word: i for i, word in enumerate(self.words)}
        self.eos_token_id: int | None = 0

    def __len__(self) -> int:
        return len(self.words)

    def get_vocab(self) -> dict[str, int]:
        return dict(self.ids)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [self.ids.get(word, 1) for word in text.split()]

    def __call__(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.encode(text) for text in texts]}

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        hidden = {0, 1} if skip_special_tokens else set[int]()
        return " ".join(self.words[int(i)] for i in token_ids if int(i) not in hidden)


class TablePolicy:
    """`logits` [V] are the weights; `gradient` accumulates until a step; AdamW's moments and steps beside them.

    Logits begin uniform in a band of width `spread`. `rate` multiplies every learning rate: rates meant for networks,
    where a small change of many weights moves a logit far, would hardly move a table.
    """

    def __init__(
        self, words: Sequence[str], seed: int = 0, spread: float = 0.1, *, end: str = "<end>", rate: float = 1.0
    ) -> None:
        self.tokenizer = WordTokenizer(words, end)
        size = len(self.tokenizer.words)
        self.logits = np.array([spread * (rng.uniform(rng.key("table", seed), i) - 0.5) for i in range(size)])
        self.logits[1] = -30.0  # the unknown word is for prompts: the policy never says it
        self.rate = rate
        self.gradient: np.ndarray | None = None
        self.moments, self.adam_steps = np.zeros((2, size)), 0
        self.version = 0

    def logprobs(self, temperature: float = 1.0) -> np.ndarray:
        scaled = self.logits / temperature
        shifted = scaled - scaled.max()
        return shifted - math.log(np.exp(shifted).sum())

    def sha256(self) -> str:
        """A hash of the weights."""
        return hashlib.sha256(self.logits.astype("<f8").tobytes()).hexdigest()

    def check_tokens(self, tokens: np.ndarray, where: str) -> None:
        bad = (tokens < 0) | (tokens >= len(self.logits))
        if bad.any():
            raise ValueError(f"{where} holds token {tokens[bad.argmax()]}, outside 0..{len(self.logits) - 1}")

    def save(self, folder: Path, *, optimizer: bool) -> None:
        state: dict[str, Any] = {
            "words": self.tokenizer.words,
            "logits": self.logits.tolist(),
            "version": self.version,
            "adam": {"moments": self.moments.tolist(), "steps": self.adam_steps} if optimizer else None,
        }
        (folder / "table.json").write_text(json.dumps(state))

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Take the weights (and optimizer state) saved there; ValueError if they are damaged or do not fit."""
        if wrong := find_damage(folder):
            raise ValueError(f"checkpoint {folder} is damaged or missing: {wrong}; give another one")
        path = folder / "table.json"
        state = read_json(path, "a table of the mock client", _CURE)
        words = state.get("words")
        if not isinstance(words, list):
            raise ValueError(f"{path}: words are not a list; {_CURE}")
        if words != self.tokenizer.words:
            raise ValueError(
                f"checkpoint {folder} is of another vocabulary ({len(cast(list[Any], words))} words, this policy has "
                f"{len(self.tokenizer.words)}); make the policy with the words it was trained with"
            )
        size, adam = len(words), state.get("adam")
        if optimizer and adam is None:
            raise ValueError(f"checkpoint {folder} has no optimizer state: it was saved for sampling; use load_state")
        kept: dict[str, Any] = {"moments": [[0.0] * size] * 2, "steps": 0} if adam is None else adam
        moments = kept.get("moments") if isinstance(kept, dict) else None  # pyright: ignore[reportUnnecessaryIsInstance]
        if not _numbers(state.get("logits"), size):
            raise ValueError(f"{path}: logits are not {size} finite numbers, one a word; {_CURE}")
        if not (isinstance(moments, list) and len(moments) == 2 and all(_numbers(row, size) for row in moments)):
            raise ValueError(f"{path}: adam.moments are not 2 rows of {size} finite numbers; {_CURE}")
        if min(moments[1]) < 0:
            raise ValueError(f"{path}: adam.moments[1], a mean of squares, has a number below 0; {_CURE}")
        for name, count in (("version", state.get("version")), ("adam.steps", kept.get("steps"))):
            if type(count) is not int or not 0 <= count < 2**63:
                raise ValueError(f"{path}: {name} is not a whole number of at least 0; {_CURE}")
        self.logits, self.version, self.gradient = np.array(state["logits"], dtype=float), state["version"], None
        self.moments = np.array(moments, dtype=float) if optimizer else np.zeros_like(self.moments)
        self.adam_steps = kept["steps"] if optimizer else 0


def _numbers(values: Any, size: int) -> bool:
    """Whether this is a list of `size` finite numbers."""
    if not isinstance(values, list) or len(cast(list[Any], values)) != size:
        return False
    return all(type(v) in (int, float) and abs(v) <= sys.float_info.max for v in cast(list[Any], values))


# A token in so many ends an untrained answer, so that lengths vary; a small vocabulary says its end more often anyway.
MEAN_LENGTH = 50
# How far a table goes at a network's learning rate: 1e-5 moves a logit by about 0.01 a step.
RATE = 1000.0


def toy_policy(words: Sequence[str], seed: int, end: str = "<end>") -> TablePolicy:
    """An untrained table over `words`: nearly uniform, but for the end token of a large vocabulary."""
    policy = TablePolicy(words, seed, end=end, rate=RATE)
    words_sampled = len(policy.tokenizer.words) - 2  # all but the end and the unknown word
    policy.logits[0] += math.log(max(1.0, words_sampled / (MEAN_LENGTH - 1)))
    return policy
