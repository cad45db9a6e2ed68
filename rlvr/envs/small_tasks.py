"""Families of small tasks for small pretrained models: generated questions, each checked by the reward that it names.

    env: {name: small_tasks, kwargs: {families: [sums, records, short_texts]}}

A family makes `tasks_per_family` different questions from its own draws, the same on every machine, and holds
`heldout_per_family` others out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlvr.core import rng
from rlvr.core.registry import did_you_mean
from rlvr.core.types import Task
from rlvr.envs.registry import register_environment
from rlvr.envs.row_source import RowSource, take_in_turn
from rlvr.reward.reward_options import check_flag, check_integer

_NAMES = "Anna Ben Clara David Emma Felix Grace Henry Ida Jonas Karin Leo Maria Nils Olga Paul Rosa Simon Tina Viktor"
_CITIES = "Athens Berlin Cairo Delhi Dublin Lima London Madrid Oslo Paris Prague Rome Tokyo Vienna Zurich Boston"
_THINGS = "apples books coins stamps pencils cards shells marbles buttons stones keys candles"
_TOPICS = (
    "cats, the moon, bread, trains, the sea, music, winter, bicycles, coffee, trees, birds, books, rain, football, "
    "bridges, gardens, horses, clocks, mountains, tea, rivers, schools, dogs, the sun, snow, boats, markets, farms, "
    "painting, chess, islands, forests, bees, windows, apples, airports, castles, dancing, honey, maps"
)
_WORDS = (
    "cat table river garden window bottle market planet silver monkey pocket ticket dragon forest basket candle hammer "
    "island jacket kitchen ladder mirror needle orange pepper rabbit saddle tunnel violin hospital engine carpet"
)
NAMES, CITIES, THINGS, WORDS = _NAMES.split(), _CITIES.split(), _THINGS.split(), _WORDS.split()
TOPICS = _TOPICS.split(", ")


class Draws:
    """The random draws of one question, one after the other."""

    def __init__(self, key: int) -> None:
        self._key, self._used = key, 0

    def integer(self, lowest: int, highest: int) -> int:
        """A whole number, both ends included."""
        self._used += 1
        return lowest + rng.integer(highest - lowest + 1, self._key, self._used)

    def one_of(self, options: Sequence[str]) -> str:
        return options[self.integer(0, len(options) - 1)]


@dataclass(frozen=True)
class Question:
    """A prompt, the rewards that judge its answers (`by_row`), and an answer that they accept."""

    prompt: str
    reward: Mapping[str, Any] | list[Any]
    right: str
    meta: Mapping[str, Any]


def _number(prompt: str, answer: int) -> Question:
    """A question that is answered by a number: the last one of the completion counts."""
    return Question(prompt, {"name": "gsm8k_flexible"}, str(answer), {"answer": str(answer)})


def _sums(draws: Draws) -> Question:
    a, b = draws.integer(1, 19), draws.integer(1, 19)
    return _number(f"What is {a} + {b}?", a + b)


def _purchases(draws: Draws) -> Question:
    """The sum stands in a story."""
    a, b = draws.integer(2, 19), draws.integer(2, 19)
    name, things = draws.one_of(NAMES), draws.one_of(THINGS)
    return _number(f"{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?", a + b)


def _records(draws: Draws) -> Question:
    """A sentence becomes a JSON object, alone or as the last code block."""
    name, age, city = draws.one_of(NAMES), draws.integer(5, 80), draws.one_of(CITIES)
    record = {"name": name, "age": age, "city": city}
    prompt = (
        f'{name} is {age} years old and lives in {city}. Write this as JSON with the keys "name", "age" and "city".'
    )
    reward = {"name": "json_schema", "kwargs": {"schema": {"const": record}}}
    return Question(prompt, reward, json.dumps(record), {"answer": json.dumps(record)})


def _short_texts(draws: Draws, is_strict: bool = False) -> Question:
    """A text of at least three words and at most a number of them; a strict one names its topic in words of its own."""
    most, topic = draws.integer(5, 12), draws.one_of(TOPICS)
    rules: list[Any] = [{"name": "length", "kwargs": {"at_least": 3, "at_most": most}}]
    if is_strict:
        rules += [{"name": "required_words", "kwargs": {"words": [topic]}}, {"name": "own_words"}]
    prompt = f"Write about {topic} in at most {most} words."
    return Question(prompt, rules if is_strict else rules[0], f"I like {topic}.", {"most": most})


def _keywords(draws: Draws) -> Question:
    """One sentence with two words, which does not copy the question."""
    one = draws.one_of(WORDS)
    two = draws.one_of([word for word in WORDS if word != one])
    instructions = [
        ("keywords:existence", {"keywords": [one, two]}),
        ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"}),
        ("length_constraints:number_words", {"num_words": 5, "relation": "at least"}),
    ]
    meta = {"instruction_id_list": [name for name, _ in instructions], "kwargs": [given for _, given in instructions]}
    prompt = f'Write one sentence that contains the words "{one}" and "{two}".'
    return Question(prompt, [{"name": "ifeval"}, {"name": "own_words"}], f"The {one} is near the {two}.", meta)


def _addresses(draws: Draws) -> Question:
    """A text is to be copied out of another, exactly."""
    name, city = draws.one_of(NAMES), draws.one_of(CITIES)
    address = f"{name.lower()}{draws.integer(1, 99)}@{city.lower()}.org"
    text = f"Hello, this is {name}. Write to {address} if you come to {draws.one_of(CITIES)}."
    prompt = f'Find the email address in this text and answer with the address only: "{text}"'
    return Question(prompt, {"name": "exact_match"}, address, {"answer": address})


FAMILIES: dict[str, Callable[[Draws], Question]] = {
    "sums": _sums,
    "purchases": _purchases,
    "records": _records,
    "short_texts": _short_texts,
    "keywords": _keywords,
    "addresses": _addresses,
}
_TRIES = 50  # draws in a row that repeat a question: the family has no more


@register_environment("small_tasks")
class SmallTasks(RowSource):
    """Generated tasks for small pretrained models, in `families` (a list; None: all of them).

    `sums`, `purchases`: arithmetic up to 38, the last number counts. `records`: a sentence as JSON. `short_texts`: at
    most so many words, and with `strict_texts` the topic among them and no copy of the question. `keywords`: a sentence
    with two words, which does not copy the question. `addresses`: an exact copy. A training epoch has
    `tasks_per_family` of each, fewer where there are no more; the first `heldout_per_family` different questions are
    held out, the families in turn.
    """

    reward_range = (0.0, 1.0)

    def __init__(
        self,
        families: Sequence[str] | None = None,
        tasks_per_family: int = 300,
        heldout_per_family: int = 48,
        strict_texts: bool = False,
    ) -> None:
        chosen = list(FAMILIES) if families is None else families
        if isinstance(chosen, str) or not chosen or len(set(map(str, chosen))) < len(chosen):
            raise ValueError(f"small_tasks: families={families!r:.200}, expected a list of {', '.join(FAMILIES)}")
        for family in chosen:
            if family not in FAMILIES:
                raise ValueError(
                    f"small_tasks: there is no family {family!r:.80}{did_you_mean(str(family), FAMILIES)}; the "
                    f"families are {', '.join(FAMILIES)}"
                )
        for option, given in (("tasks_per_family", tasks_per_family), ("heldout_per_family", heldout_per_family)):
            check_integer(f"small_tasks: {option}", given, 1)
        check_flag("small_tasks: strict_texts", strict_texts)
        if strict_texts and "short_texts" not in chosen:
            raise ValueError("small_tasks: strict_texts has no effect without the family short_texts; leave it out")
        makers = {**FAMILIES, "short_texts": partial(_short_texts, is_strict=strict_texts)}
        count = heldout_per_family + tasks_per_family
        made = {family: _make_tasks(family, makers[family], count) for family in chosen}
        for family, tasks in made.items():
            if len(tasks) <= heldout_per_family:
                raise ValueError(
                    f"small_tasks: heldout_per_family={heldout_per_family}, but {family} has {len(tasks)} different "
                    "questions; give fewer"
                )
        heldout = take_in_turn([iter(tasks[:heldout_per_family]) for tasks in made.values()], 1_000_000)
        train = [task for tasks in made.values() for task in tasks[heldout_per_family:]]
        super().__init__("small_tasks", train, heldout, "by_row", "right", describe=_describe)
        self._heldout = heldout  # the families in turn: any first part has equally many of each

    def advice(self) -> list[str]:
        """None: questions of a family differ by their numbers, names and words alone, as they are meant to."""
        return []


def _make_tasks(family: str, make: Callable[[Draws], Question], count: int) -> list[Task]:
    """The first `count` different questions of a family; fewer where it has no more."""
    tasks: dict[str, Task] = {}
    draw = repeated = 0
    while len(tasks) < count and repeated < _TRIES:
        question = make(Draws(rng.key("small-tasks", family, draw)))
        draw += 1
        if question.prompt in tasks:
            repeated += 1
            continue
        repeated = 0
        meta = {"family": family, "reward": question.reward, "right": question.right, **question.meta}
        tasks[question.prompt] = Task(f"{family}-{len(tasks) + 1}", question.prompt, meta)
    return list(tasks.values())


def _describe(task: Task) -> dict[str, str]:
    return {"family": task.meta["family"]}
