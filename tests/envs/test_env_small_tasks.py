"""Small tasks: the same everywhere, none held out is trained on, and each right answer passes by its own reward."""

from __future__ import annotations

from typing import Any

import pytest

from rlvr.core.types import Task
from rlvr.envs import resolve_environment
from rlvr.envs.small_tasks import FAMILIES
from rlvr.reward import resolve_reward
from rlvr.reward.signatures import Case

pytest.importorskip("jsonschema", reason="the extra [rules] is not installed")

WRONG = {  # of each family, an answer that its reward refuses
    "sums": ["", "I do not know", "12 + 7 = 99", "99 apples"],
    "purchases": ["", "99"],
    "records": ["", "{}", '{"name": "Anna"}', "Anna is 5"],
    "short_texts": ["", "Cats", "one two three four five six seven eight nine ten eleven twelve thirteen"],
    "keywords": ["", "A sentence without them.", "cat", "One. Two sentences are two, and wrong."],
    "addresses": ["", "anna1@rome.org or others", "Write to me"],
}


def train(source: Any, count: int, seed: int = 1) -> list[Task]:
    return [source.train(seed, index, "") for index in range(count)]


def test_the_tasks_are_the_same_every_time_and_no_held_out_one_is_trained_on() -> None:
    one, two = (resolve_environment("small_tasks") for _ in range(2))
    assert one.heldout(None) == two.heldout(None)
    assert train(one, 50) == train(two, 50)
    assert train(one, 50) != train(one, 50, seed=2)
    epoch = train(one, one.size("") if one.size else 0)
    prompts = {str(task.prompt) for task in epoch}
    assert len(prompts) == len(epoch) > 1_000
    assert not prompts & {str(task.prompt) for task in one.heldout(None)}


def test_the_first_held_out_tasks_have_equally_many_of_each_family() -> None:
    tasks = resolve_environment("small_tasks").heldout(24)
    assert [task.meta["family"] for task in tasks] == [*FAMILIES] * 4


@pytest.mark.parametrize("family", FAMILIES)
def test_the_right_answer_passes_and_wrong_ones_fail(family: str) -> None:
    source = resolve_environment("small_tasks", families=[family])
    reward = resolve_reward(source.reward)
    tasks = source.heldout(12)
    right = [Case(str(task.prompt), str(source.demonstration(task, 0)), task.meta) for task in tasks]
    assert [score.value for score in reward.judge_all(right)] == [1.0] * 12
    wrong = [Case(str(task.prompt), text, task.meta) for task in tasks for text in WRONG[family]]
    for case, score in zip(wrong, reward.judge_all(wrong), strict=True):
        assert (score.value, score.outcome.value) == (0.0, "failed"), case.response
    if family != "short_texts":  # another task's answer is right only where it is the same
        pairs = list(zip(tasks, [*tasks[1:], tasks[0]], strict=True))
        others = [Case(str(one.prompt), str(source.demonstration(two, 0)), one.meta) for one, two in pairs]
        same = [float(one.meta["right"] == two.meta["right"]) for one, two in pairs]
        assert [score.value for score in reward.judge_all(others)] == same


@pytest.mark.parametrize(("family", "options"), [("keywords", {}), ("short_texts", {"strict_texts": True})])
def test_a_copy_of_the_question_does_not_pass(family: str, options: dict[str, Any]) -> None:
    source = resolve_environment("small_tasks", families=[family], **options)
    reward = resolve_reward(source.reward)
    for task in source.heldout(12):
        prompt, right = str(task.prompt), str(source.demonstration(task, 0))
        copies = [prompt, prompt.upper(), " ".join(prompt.split()[2:]), "The answer is correct."]
        scores = reward.judge_all([Case(prompt, text, task.meta) for text in (right, *copies)])
        assert [score.value for score in scores] == [1.0, 0.0, 0.0, 0.0, 0.0], task.prompt


def test_the_recipe_of_smollm_counts_words_alone() -> None:
    """Its figures were measured so."""
    source = resolve_environment("small_tasks", families=["short_texts"])
    for task in source.heldout(12):
        assert task.meta["reward"] == {"name": "length", "kwargs": {"at_least": 3, "at_most": task.meta["most"]}}


def test_the_questions_state_their_answers() -> None:
    for task in resolve_environment("small_tasks", families=["sums", "purchases"]).heldout(None):
        numbers = [int(word.strip("?.")) for word in str(task.prompt).split() if word.strip("?.").isdigit()]
        assert sum(numbers) == int(task.meta["answer"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"families": ["sum"]}, "there is no family 'sum' (did you mean 'sums'?)"),
        ({"families": "sums"}, "families='sums', expected a list"),
        ({"families": []}, "expected a list"),
        ({"families": ["sums", "sums"]}, "expected a list"),
        ({"tasks_per_family": 0}, "tasks_per_family=0, expected a whole number of at least 1"),
        ({"heldout_per_family": True}, "heldout_per_family=True"),
        ({"strict_texts": 1}, "strict_texts=1, expected true or false"),
        ({"families": ["sums"], "strict_texts": True}, "no effect without the family short_texts"),
        ({"families": ["sums"], "heldout_per_family": 400}, "different questions; give fewer"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        resolve_environment("small_tasks", **options)
    assert message in str(caught.value)
