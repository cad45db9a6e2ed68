"""The environment `reasoning_gym`: the same tasks every time, held-out questions apart, mistakes named."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.core.types import Outcome
from rlvr.envs import resolve_environment
from rlvr.reward import resolve_reward
from rlvr.reward.reasoning_gym import library_workers
from rlvr.reward.reasoning_gym.library_workers import describe_families
from rlvr.reward.signatures import Case
from rlvr.runs.run_tasks import check_demonstrations
from tests.kit.packages import need_package

need_package("reasoning_gym", "needs the extra reasoning-gym")

# Whose configuration the library itself refuses.
REFUSED_LEVELS = [("caesar_cipher", 3), ("knight_swap", 0), ("knight_swap", 4), ("rubiks_cube", 4), ("survo", 3)]
SLOW_LEVELS = [("jugs", 3), ("sokoban", 0)]  # one task takes half a minute to minutes, so a slow machine makes none


def restart_workers() -> None:
    for worker in library_workers._pool().idle:
        worker.close()


def make(**kwargs: Any) -> Any:
    return resolve_environment("reasoning_gym", **kwargs)


def test_a_task_is_a_function_of_seed_and_index() -> None:
    """Also of pool_matrix, which seeds numpy's global generator, in any order, and from two sources."""
    source, again = (make(families=["leg_counting", "pool_matrix", "codeio"]) for _ in range(2))
    tasks = [source.train(7, index, "") for index in range(6)]
    assert [again.train(7, index, "") for index in reversed(range(6))] == tasks[::-1]
    assert len({task.id for task in tasks}) == 6
    assert source.train(8, 0, "") != tasks[0]


@pytest.mark.slow
def test_a_task_is_the_same_in_another_process() -> None:
    """Also of families that go through sets of words, whose order differs between processes."""
    families = ["polynomial_multiplication", "isomorphic_strings", "ransom_note", "word_ladder"]
    given = make(families=families)
    tasks = [given.train(1, index, "") for index in range(4)]
    restart_workers()
    assert [make(families=families).train(1, index, "") for index in range(4)] == tasks


def test_the_global_generators_of_this_process_are_left_alone() -> None:
    states = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    source = make(family="pool_matrix")
    source.train(0, 0, "")
    source.heldout(3)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states  # type: ignore[index]


def test_held_out_questions_are_never_trained_on() -> None:
    """A family of 16 questions: every one is on one side."""
    source = make(family="leg_counting", config={"min_animals": 1, "max_animals": 1, "max_instances": 2})
    heldout = source.heldout(None)
    questions = {task.prompt for task in heldout}
    trained = {source.train(0, index, "").prompt for index in range(150)}
    assert len(heldout) == len(questions) > 3 and len(trained) > 10
    assert not questions & trained
    assert source.heldout(3) == heldout[:3]


def test_families_come_by_weight_and_held_out_ones_in_turn() -> None:
    source = make(families={"leg_counting": 3, "chain_sum": 1})
    drawn = Counter(source.describe_task(source.train(0, index, ""))["family"] for index in range(80))
    assert drawn.total() == 80 and 45 <= drawn["leg_counting"] <= 75
    families = [source.describe_task(task)["family"] for task in source.heldout(4)]
    assert families == ["leg_counting", "chain_sum"] * 2


def test_levels_are_those_of_the_curriculum() -> None:
    source = make(families=["chain_sum", "leg_counting"], levels=[0, 2])
    assert source.levels == ("0", "2")
    assert {task.level for task in source.heldout(4)} == {"0", "2"}
    easy, hard = (make(family="spell_backward", levels=[0, 3]).train(0, 1, level) for level in ("0", "3"))
    assert len(easy.meta["answer"]) <= len(hard.meta["answer"])
    assert easy.meta["reasoning_gym"]["level"] == 0 and hard.meta["reasoning_gym"]["level"] == 3


def test_a_configuration_reaches_the_tasks() -> None:
    one = {"family": "chain_sum", "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
    task = make(families=[one]).train(0, 0, "")
    assert task.prompt.count("+") + task.prompt.count(" - ") == 1


def test_the_prompt_says_where_the_answer_goes_and_a_demonstration_does_it() -> None:
    source = make(family="leg_counting")
    task = source.train(0, 0, "")
    assert task.prompt.endswith("use exactly that one.") and "<answer>" in task.prompt
    completion = source.demonstration(task, 0)
    assert completion == f"\n<answer>{task.meta['answer']}</answer>"
    (score,) = resolve_reward(source.reward).judge_all([Case.of_task(task, completion)])
    assert score.outcome is Outcome.PASSED
    assert make(family="leg_counting", instruction="").train(0, 0, "").prompt in task.prompt
    boxes = make(family="boxnet")
    assert boxes.demonstration(boxes.train(0, 0, ""), 0) is None


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"family": "count_down"}, r"no family 'count_down' \(did you mean 'countdown'\?\); the families are ab, "),
        ({}, "give one of them"),
        ({"family": "ab", "families": ["ab"]}, "give one of them"),
        ({"families": []}, "at least one"),
        ({"families": ["ab", "ab"]}, "each once"),
        ({"families": {"ab": 0}}, "weight=0, expected a number above 0"),
        ({"families": [{"family": "ab", "wieght": 2}]}, "did you mean 'weight'"),
        ({"families": [7]}, "7 is not a name"),
        ({"families": ["ab"], "config": {"length": 3}}, "config belongs to one family"),
        ({"family": "chain_sum", "config": {"min_term": 2}}, "did you mean 'min_terms'"),
        ({"family": "chain_sum", "config": {"seed": 2}}, "config.seed is set by the run"),
        ({"family": "chain_sum", "config": {"min_terms": 9, "max_terms": 2}}, "does not take the config .*max_terms"),
        ({"family": "chain_sum", "config": {"min_terms": 2}, "levels": [0]}, "has no effect, since levels set it"),
        ({"family": "chain_sum", "levels": [99]}, r"levels=\[99\], expected a list of whole numbers from 0 to \d"),
        ({"family": "chain_sum", "levels": []}, "expected a list"),
        ({"family": "chain_sum", "levels": [1, 1]}, "each once"),
        ({"family": "acre", "levels": [0]}, "acre has no curriculum"),
    ],
)
def test_a_mistake_is_named_with_what_to_do(kwargs: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make(**kwargs)


def test_a_level_that_the_source_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="the levels are '0', '1'"):
        make(family="chain_sum", levels=[0, 1]).train(0, 0, "2")


def test_without_the_library_the_message_says_what_must_be_there() -> None:
    import subprocess
    import sys

    code = (
        "import importlib.util as u; found = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'reasoning_gym' else found(name, *rest)\n"
        "from rlvr.envs import resolve_environment; resolve_environment('reasoning_gym', family='ab')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "rlvr[reasoning-gym]" in done.stderr and "C compiler and Python's headers" in done.stderr


@pytest.mark.slow
def test_every_family_makes_the_same_tasks_in_another_process() -> None:
    sources = [make(family=name) for name in describe_families()]
    tasks = [source.train(0, index, "") for source in sources for index in range(2)]
    restart_workers()
    again = [source.train(0, index, "") for source in sources for index in range(2)]
    assert [task.id for task, other in zip(tasks, again, strict=True) if task != other] == []


@pytest.mark.slow
def test_every_family_makes_tasks_at_both_ends_of_its_curriculum_and_scores_them() -> None:
    families = describe_families()
    assert len(families) > 100
    reward = resolve_reward("reasoning_gym")
    refused: list[tuple[str, int]] = []
    for name, family in families.items():
        for level in [None, *sorted({0, family.levels - 1} if family.levels else ())]:
            if (name, level) in SLOW_LEVELS:
                continue
            try:
                source = make(family=name, levels=None if level is None else [level])
                tasks = [source.train(0, 0, source.levels[0]), *source.heldout(1)]
            except ValueError:
                assert level is not None
                refused.append((name, level))
                continue
            for task in tasks:
                completion = source.demonstration(task, 0) or "<answer>0</answer>"
                (score,) = reward.judge_all([Case.of_task(task, completion)])
                assert score.value is not None, (name, level, score)
    assert refused == REFUSED_LEVELS


def test_a_family_without_answers_is_named_when_it_is_to_be_imitated() -> None:
    """Not the option `demonstration_field`, which this environment does not have."""
    config = build_config(load("reasoning_gym", None, ["env.kwargs={family: boxnet}", "sft.steps=2"]))
    with pytest.raises(
        ValueError, match=r"\(family=boxnet\); let env.kwargs leave such tasks out.*sft.steps=0"
    ) as refusal:
        check_demonstrations(config, make(family="boxnet"))
    assert "demonstration_field" not in str(refusal.value)
