"""Digits to put in order: a task that a small transformer with random weights learns by verification alone.

    sort 5 2 8 :  ->  2 5 8

A completion is judged word by word (the reward `word_match`), so the first ones, which are noise, earn something too.
"""

from __future__ import annotations

from rlvr.core import rng
from rlvr.core.types import Task
from rlvr.envs.registry import register_environment
from rlvr.envs.row_source import RowSource

_MOST = 6  # digits: 10**6 tasks in memory
_HELDOUT_FRACTION = 0.2


@register_environment("sorting")
class Sorting(RowSource):
    """Sort `digits` digits, "sort 5 2 8 :" to "2 5 8"; a fifth of all sequences is held out, chosen by a hash.

    For `model.tokenizer=words`: the words are the digits, `sort` and `:`.
    """

    end_word: str = "<end>"
    pad_word: str = "<pad>"

    def __init__(self, digits: int = 3) -> None:
        if type(digits) is not int or not 2 <= digits <= _MOST:
            raise ValueError(f"sorting: digits={digits!r}, expected a whole number from 2 to {_MOST}")
        self.vocabulary = [*map(str, range(10)), "sort", ":", self.end_word, self.pad_word]
        train: list[Task] = []
        heldout: list[Task] = []
        for number in range(10**digits):
            text = f"{number:0{digits}}"
            answer = " ".join(sorted(text))
            task = Task(text, f"sort {' '.join(text)} :", {"answer": answer})
            side = heldout if rng.uniform(rng.key("sorting-heldout", text)) < _HELDOUT_FRACTION else train
            side.append(task)
        super().__init__("sorting", train, heldout, "word_match", "answer")

    def advice(self) -> list[str]:
        """None: sequences differ by a digit, as they are meant to."""
        return []
