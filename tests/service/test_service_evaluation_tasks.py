"""The tasks of the evaluation suite: their verifiers separate good from bad answers, and the references are right."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from rlvr.reward.signatures import Case
from rlvr.sandbox import NoTier, shared_sandbox
from rlvr.service.evaluation.evaluation_tasks import CATEGORIES, TASKS, EvalTask, select_tasks
from rlvr.service.http.requests import TrainBody
from rlvr.service.sessions.verification import build_verifiable_task
from tests.kit.evaluation_answers import BAD, GOOD

TARGET = 0.85
BY_ID = {task.id: task for task in TASKS}


def confidence(task: EvalTask, *answers: str) -> list[float | None]:
    """Judge answers as the service does, from the body that a client sends."""
    case = build_verifiable_task(TrainBody.model_validate(task.body(judge=False)).request())
    return [
        feedback.confidence
        for feedback in case.blend.judge_many([Case(task.prompt, a, case.task.meta) for a in answers])
    ]


@pytest.fixture(autouse=True, scope="module")
def sandbox() -> None:
    try:
        shared_sandbox()
    except NoTier as refusal:
        pytest.skip(f"no sandbox works here: {refusal}")


@pytest.mark.parametrize("name", BY_ID)
def test_the_known_good_answer_reaches_the_target(name: str) -> None:
    assert confidence(BY_ID[name], GOOD[name]) == [1.0]


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_ID)
def test_no_known_bad_answer_reaches_the_target(name: str) -> None:
    assert len(BAD[name]) >= 4
    found = confidence(BY_ID[name], *BAD[name])
    assert [answer for answer, value in zip(BAD[name], found, strict=True) if value is None or value >= TARGET] == []


@pytest.mark.parametrize("name", [task.id for task in TASKS if task.verifiers])
def test_breaking_one_rule_misses_the_target_even_with_the_judges_best_score(name: str) -> None:
    weights = [verifier["weight"] for verifier in BY_ID[name].body(judge=True)["verifiers"]]
    assert (sum(weights) - min(weights)) / sum(weights) < TARGET


def test_answers_to_other_tasks_miss_the_target() -> None:
    for task in TASKS:
        others = [answer for name, answer in GOOD.items() if name != task.id]
        assert all(value is not None and value < TARGET for value in confidence(task, *others)), task.id


def test_the_queue_puzzle_has_one_solution_and_needs_every_clue() -> None:
    clues: list[Any] = [
        lambda a, b, c, d, e: b == e + 1,
        lambda a, b, c, d, e: c < a,
        lambda a, b, c, d, e: c != 1,
        lambda a, b, c, d, e: abs(d - c) != 1,
        lambda a, b, c, d, e: a != 5,
    ]

    def orders(kept: list[Any]) -> list[str]:
        return ["".join(map(str, p)) for p in permutations(range(1, 6)) if all(clue(*p) for clue in kept)]

    assert orders(clues) == [BY_ID["logic_puzzle"].answer]
    assert all(len(orders([c for c in clues if c is not left_out])) > 1 for left_out in clues)


def test_the_coin_puzzle_has_one_solution() -> None:
    def true(coin: int) -> int:
        return sum([coin == 1, coin != 2, coin != 1, coin in (1, 5), coin % 2 == 1])

    assert [str(coin) for coin in range(1, 6) if true(coin) == 1] == [BY_ID["logic_boxes"].answer]


def test_each_category_has_several_tasks_and_one_quick_one() -> None:
    for category in CATEGORIES:
        own = [task for task in TASKS if task.category == category]
        assert len(own) >= 2 and sum(task.quick for task in own) == 1
    assert len(BY_ID) == len(TASKS) and all(task.tests or task.answer or task.verifiers for task in TASKS)


def test_tasks_are_selected_by_id_or_all_or_the_quick_ones() -> None:
    assert [task.id for task in select_tasks(["math_problem", "code_fibonacci"], False)] == [
        "code_fibonacci",
        "math_problem",
    ]
    assert select_tasks([], False) == list(TASKS) and len(select_tasks([], True)) == len(CATEGORIES)
    with pytest.raises(ValueError, match=r"'code_fibonaci' is unknown .did you mean 'code_fibonacci'.*known: code_fib"):
        select_tasks(["code_fibonaci"], False)
