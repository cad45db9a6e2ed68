"""Digits to put in order: a task that a small transformer with random weights learns by verification alone.

    sort 5 2 8 :  ->  2 5 8

A completion is judged word by word (the reward `word_match`), so the first ones, which are noise, earn something too.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlvr.core import rng
from rlvr.core.types import Task
from rlvr.envs.registry import register_environment
from rlvr.envs.row_source import RowSource
from rlvr.reward.reward_options import check_integer

_MOST = 6  # digits: 10**6 tasks in memory
_HELDOUT_FRACTION = 0.2


@register_environment("sorting")
class Sorting(RowSource):
    """Sort `digits` digits, "sort 5 2 8 :" to "2 5 8"; a fifth of all sequences is held out, chosen by a hash.

    For `model.tokenizer=words`: the words are the digits, `sort` and `:`. With `orders` there are families of tasks,
    each a level: family 0 sorts as usual, any other by an order of the ten digits that its number decides. The prompts
    of all families are alike, so a policy learns a family's order from its verdicts alone.
    """

    end_word: str = "<end>"
    pad_word: str = "<pad>"

    def __init__(self, digits: int = 3, orders: Sequence[int] | None = None) -> None:
        check_integer("sorting: digits", digits, 2, _MOST)
        listed = [0] if orders is None else orders
        if not isinstance(listed, (list, tuple)) or not listed or len(set(listed)) < len(listed):
            raise ValueError(f"sorting: orders={orders!r:.80}, expected a list of different whole numbers")
        for order in listed:
            check_integer("sorting: orders", order, 0)
        self.vocabulary = [*map(str, range(10)), "sort", ":", self.end_word, self.pad_word]
        ranks = {order: _rank_digits(order) for order in listed}
        train: list[Task] = []
        heldout: list[Task] = []
        for number in range(10**digits):
            text = f"{number:0{digits}}"
            side = heldout if rng.uniform(rng.key("sorting-heldout", text)) < _HELDOUT_FRACTION else train
            for order in listed:
                answer = " ".join(sorted(text, key=ranks[order].__getitem__))
                name, level = (text, "") if orders is None else (f"{order}-{text}", str(order))
                side.append(Task(name, f"sort {' '.join(text)} :", {"answer": answer}, level))
        super().__init__("sorting", train, heldout, "word_match", "answer")

    def advice(self) -> list[str]:
        """None: sequences differ by a digit, as they are meant to."""
        return []


def _rank_digits(order: int) -> dict[str, int]:
    """The place of each digit in an order of the ten; the 0th is the usual one."""
    places = rng.permutation(10, rng.key("sorting-order", order)) if order else range(10)
    return {str(digit): place for digit, place in enumerate(places)}
