"""Finds evaluation prompts that nearly equal a training prompt: the evaluation would measure memory.

Prompts are compared as words in lower case, with numbers, operators and signs (#), without punctuation. Two are near
duplicates if the second has at least `SHARE` of the first's sequences of `LENGTH` words; shorter prompts have to be
equal. Sequences that stand in very many training prompts are a template's and do not count. Left out on purpose:
paraphrases, which no words betray.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from rlvr.core.types import Task

LENGTH, SHARE = 8, 0.8
MOST_HELDOUT, MOST_WORDS = 2_000, 2_000_000  # held-out prompts, and words of these and of training prompts
_TEMPLATE = 10, 0.01  # a sequence in more training prompts than this number and this share is a template's
_WORD = re.compile(r"\w+|[+\-*/=<>^%#&|~@]")


class NearDuplicate(NamedTuple):
    """Two tasks, and the share of the first one's word sequences that the second has."""

    heldout: Task
    train: Task
    share: float


def find_near_duplicates(
    heldout: Sequence[Task], train: Sequence[Task], most_heldout: int = MOST_HELDOUT, most_words: int = MOST_WORDS
) -> list[NearDuplicate]:
    """The held-out tasks that a training task nearly repeats, each with the closest one.

    Those of `choose_heldout_to_compare` are compared with the training prompts in their order, until these have
    `most_words` words.
    """
    heldout = choose_heldout_to_compare(heldout, most_heldout, most_words)
    wanted = [set(_sequences(task)) for task in heldout]
    places: dict[int, list[int]] = {sequence: [] for sequences in wanted for sequence in sequences}
    words = looked_at = 0
    for number, task in enumerate(train):
        found = set(_sequences(task))
        for sequence in found & places.keys():
            places[sequence].append(number)
        words, looked_at = words + len(found), number + 1
        if words > most_words:
            break
    most = max(_TEMPLATE[0], _TEMPLATE[1] * looked_at)
    near: list[NearDuplicate] = []
    for task, sequences in zip(heldout, wanted, strict=True):
        telling = [sequence for sequence in sequences if len(places[sequence]) <= most]
        shared = Counter(number for sequence in telling for number in places[sequence])
        if shared:
            number, count = min(shared.items(), key=lambda item: (-item[1], item[0]))
            if count >= SHARE * len(telling):
                near.append(NearDuplicate(task, train[number], count / len(telling)))
    return near


def choose_heldout_to_compare(
    heldout: Sequence[Task], most_heldout: int = MOST_HELDOUT, most_words: int = MOST_WORDS
) -> list[Task]:
    """The first held-out tasks, at most `most_heldout`, until their prompts have `most_words` words."""
    heldout = heldout[:most_heldout]
    before = accumulate((len(_split_words(task)) for task in heldout), initial=0)
    return [task for task, words in zip(heldout, before, strict=False) if words <= most_words]


def find_text(prompt: str | list[dict[str, str]]) -> str | None:
    """The text of a prompt that is text or one message of the user; None for any other chat."""
    if isinstance(prompt, str):
        return prompt
    content = prompt[0].get("content") if len(prompt) == 1 and prompt[0].get("role") == "user" else None
    return content if isinstance(content, str) else None


def _split_words(task: Task) -> list[str]:
    text = find_text(task.prompt)
    return _WORD.findall((task.prompt_text if text is None else text).lower())


def _sequences(task: Task) -> Iterator[int]:
    """The hashes of the sequences: a string of eight words takes three times the memory."""
    words = _split_words(task)
    if not words:
        return iter(())
    return (hash(tuple(words[i : i + LENGTH])) for i in range(max(1, len(words) - LENGTH + 1)))
