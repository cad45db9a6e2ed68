"""Holes of the library's scorers: each is there, and our second check closes it without refusing right answers."""

from __future__ import annotations

import re

import pytest

from rlvr.core.types import Outcome, Task
from rlvr.envs import resolve_environment
from rlvr.reward import resolve_reward
from rlvr.reward.reasoning_gym.second_checks import SECOND_CHECKS, UNSOUND, confirm
from rlvr.reward.signatures import Case
from tests.kit.packages import need_package

need_package("reasoning_gym", "needs the extra reasoning-gym")


def tasks(family: str, count: int = 4) -> list[Task]:
    source = resolve_environment("reasoning_gym", family=family)
    return [source.train(0, index, "") for index in range(count)]


def find_hole(family: str, gold: str) -> str:
    """A wrong answer that the scorer of the family takes."""
    match family:
        case "coin_flip":
            return "0."
        case "complex_arithmetic":
            return "nan"
        case "countdown":
            return gold  # none follows from a right answer
        case "game_of_life_halting":
            return "no idea"
        case "gsm_symbolic":
            return f"-{gold}"
        case "number_sorting":
            return re.sub(r"-?\d+(\.\d+)?", lambda number: str(round(float(number[0]) + 0.4, 4)), gold)
        case _:
            return "3 + 5 + 7 + 9"


@pytest.mark.parametrize("family", sorted(SECOND_CHECKS.keys() - {"countdown"}))
def test_the_library_takes_a_wrong_answer_and_the_reward_does_not(family: str) -> None:
    reward = resolve_reward("reasoning_gym")
    fooled = 0
    for task in tasks(family):
        (score,) = reward.judge_all([Case.of_task(task, f"<answer>{find_hole(family, task.meta['answer'])}</answer>")])
        assert score.outcome is Outcome.FAILED and score.value == 0.0
        if score.reason == "unconfirmed":
            fooled += 1
            assert score.parts == {"library_score": 1.0} and score.detail
    assert fooled, "the library has closed this hole: drop its second check"


FULL_WIDTH = str.maketrans("0123456789", "\uff10\uff11\uff12\uff13\uff14\uff15\uff16\uff17\uff18\uff19")
ARABIC = str.maketrans("0123456789", "\u0660\u0661\u0662\u0663\u0664\u0665\u0666\u0667\u0668\u0669")


@pytest.mark.parametrize(
    "family", ["chain_sum", "products", "decimal_arithmetic", "gsm_symbolic", "prime_factorization"]
)
def test_numbers_that_only_python_reads_do_not_pass(family: str) -> None:
    """The scorers call `int` and `float`, which take `1_00` and every script's digits."""
    reward, reasons = resolve_reward("reasoning_gym"), []
    for task in tasks(family):
        gold = task.meta["answer"]
        for answer in {gold.translate(FULL_WIDTH), gold.translate(ARABIC), re.sub(r"(\d)(?=\d)", r"\1_", gold)} - {
            gold
        }:
            (score,) = reward.judge_all([Case.of_task(task, f"<answer>{answer}</answer>")])
            assert (score.outcome, score.value) == (Outcome.FAILED, 0.0), answer
            reasons.append(score.reason)
    assert "unconfirmed" in reasons, "the library has closed this hole: drop its second check"


def test_a_right_answer_may_be_spelled_as_only_python_reads_it() -> None:
    assert confirm("word_sorting", "x1_2", "x1_2") == ""
    assert confirm("word_sorting", "x1_2", None) != ""


@pytest.mark.parametrize("family", SECOND_CHECKS)
def test_right_answers_pass_their_second_check(family: str) -> None:
    reward = resolve_reward("reasoning_gym")
    for task in tasks(family):
        (score,) = reward.judge_all([Case.of_task(task, f"<answer>{task.meta['answer']}</answer>")])
        assert score.outcome is Outcome.PASSED


@pytest.mark.parametrize(
    ("family", "answer", "gold", "is_right"),
    [
        ("puzzle24", "(5 + 3)*(4 - 1)", "(4 - 1) * (3 + 5)", True),
        ("puzzle24", "8*3 + 2/4", "8*3 + (4 - 4)/2", False),
        ("puzzle24", "8/(3 - 8/3)", "8*3*(8 - 8 + 3 - 2)", False),
        ("puzzle24", "8/(3 - 8/3)", "(8*3 - 0)*8/(8 + 0*3)", False),
        ("puzzle24", "8/(3 - 8/3)", "8/(3 - 8/3)", True),
        ("puzzle24", "1/(1 - 1) + 24", "24 + 1 - 1*1", False),
        ("countdown", "1000/3", "(1000 + 2*0)/3", False),
        ("countdown", "3 + 4*2", "2*4 + 3", True),
        ("coin_flip", "1/4", "0.25", True),
        ("coin_flip", "0", "0.25", False),
        ("coin_flip", "1/0", "0.25", False),
        ("complex_arithmetic", "3 + nanj", "3.0 + 2.0i", False),
        ("complex_arithmetic", "3+2j", "3.0 + 2.0i", True),
        ("gsm_symbolic", "-288", "288", False),
        ("gsm_symbolic", "$288.00", "288", True),
        ("gsm_symbolic", "-5", "-5", True),
        ("gsm_symbolic", "a lot", "288", False),
        ("number_sorting", '["1.0", "2"]', "['1', '2']", True),
        ("number_sorting", "[1.5, 2]", "['1', '2']", False),
        ("game_of_life_halting", " true", "True", True),
        ("game_of_life_halting", "True", "False", False),
        ("chain_sum", "1", "2", True),
    ],
)
def test_a_second_check_compares_with_the_right_answer(family: str, answer: str, gold: str, is_right: bool) -> None:
    assert (confirm(family, answer, gold) == "") is is_right


def test_a_copied_premise_passes_and_the_environment_warns() -> None:
    assert set(UNSOUND) == {"propositional_logic"}
    source = resolve_environment("reasoning_gym", families=["propositional_logic", "ab"])
    (warning,) = source.advice()
    assert "propositional_logic" in warning and "copied" in warning
    task = tasks("propositional_logic", 1)[0]
    assert isinstance(task.prompt, str)
    premise = re.findall(r"^\.?\d+\. (.*)$", task.prompt, re.M)[0]
    (score,) = resolve_reward("reasoning_gym").judge_all([Case.of_task(task, f"<answer>{premise}</answer>")])
    assert score.parts["library_score"] in (1.0, 0.25)
