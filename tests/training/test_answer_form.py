"""Failed completions that hold the right answer in another form: found, with a reward that tells right from wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest

from rlvr.core.types import Task, Trajectory
from rlvr.reward import Reward, register_reward, resolve_reward
from rlvr.reward.registry import _rewards  # pyright: ignore[reportPrivateUsage]
from rlvr.training.answer_form import AnswerForm, examine_form
from rlvr.training.evaluate import Evaluation
from rlvr.training.judged_tasks import JudgedTask

Rows = Sequence[tuple[str, Any, Sequence[str]]]


def judge(rows: Rows, reward: str = "exact_match", **options: Any) -> tuple[list[JudgedTask], Reward]:
    """Tasks of (prompt, answer, completions), judged."""
    bound, judged = resolve_reward(reward, **options), list[JudgedTask]()
    for number, (prompt, answer, texts) in enumerate(rows):
        task = Task(f"t{number}", prompt, {} if answer is None else {"answer": answer})
        completions = [Trajectory(prompt, [1], text, [1], task=task) for text in texts]
        for t in completions:
            [t.scores[bound.name]] = bound.score([t])
            t.reward = t.scores[bound.name].value
        judged.append(JudgedTask(task, completions, len(texts)))
    return judged, bound


def examine(rows: Rows, reward: str = "exact_match", **options: Any) -> AnswerForm:
    form = examine_form(*judge(rows, reward, **options))
    assert form is not None
    return form


def accepted(form: AnswerForm) -> dict[str, tuple[int, int]]:
    """Failed completions that each reward accepts, and controls."""
    return {r.setting.removeprefix("reward.type="): (r.accepted, r.wrong) for r in form.rewards}


SUMS = [(a, b) for a in (3, 7, 11) for b in (12, 15, 18)]
CHATTY: Rows = [
    (f"What is {a} + {b}?", str(a + b), [f"{a} + {b} = {a + b}.", f"The sum comes to {a + b}!", "Let me count."])
    for a, b in SUMS
]


def test_a_chatty_model_is_shown_the_reward_that_reads_its_numbers():
    """9 tasks x 3 completions; two of three end on the right number, which exact match refuses."""
    form = examine(CHATTY)
    assert (form.judged, form.failed, form.open, form.mentioned) == (27, 27, 27, 18)
    assert accepted(form)["gsm8k_flexible"] == (18, 0)
    assert form.best and form.best.setting == "reward.type=gsm8k_flexible" and form.best.controls > 18
    found = form.describe()
    assert found and (found.severity, found.code) == ("problem", "answer_form")
    assert "the answer is there but the form is not" in found.fact and "67%" in found.fact
    assert "accepts 18 of 27" in found.fact and found.remedy.startswith("reward.type=gsm8k_flexible")


def test_a_model_that_cannot_add_is_told_nothing_of_forms():
    """Every sum is one too large."""
    wrong: Rows = [(f"What is {a} + {b}?", str(a + b), [f"{a} + {b} = {a + b + 1}."] * 3) for a, b in SUMS]
    form = examine(wrong)
    assert (form.mentioned, form.best, form.describe()) == (0, None, None)


def test_a_few_right_answers_are_enough_where_nothing_passes():
    """One completion of nine ends on the right number: too few for the reference to occur in most, enough to learn."""
    rare: Rows = [(q, a, [f"I say {a}.", *["No idea."] * 8]) for q, a, _ in CHATTY]
    found = examine(rare).describe()
    assert found and "gsm8k_flexible accepts 9 of 81" in found.fact and "the answer is there" not in found.fact


def test_a_reward_that_only_looks_whether_the_reference_occurs_is_not_suggested():
    """It accepts most of all, and any number that the text mentions too."""

    @register_reward("mentions_of_this_test", gold="answer", verifiable=True)
    def mentions(prompt: str, response: str, meta: Any = None) -> float:
        return float(str(meta["answer"]) in response)

    @register_reward("pays_all_of_this_test", gold="answer", verifiable=True)
    def pays_all(prompt: str, response: str) -> float:
        return 1.0

    try:
        lists: Rows = [(q, a, [f"It is {a} or {int(a) + 1} or {int(a) + 2}."] * 3) for q, a, _ in CHATTY]
        form = examine(lists)
        assert form.is_mentioned and form.best is None
        tried = {r.setting: r for r in form.rewards}
        for name in ("mentions_of_this_test", "pays_all_of_this_test"):
            assert tried[f"reward.type={name}"].accepted == 27
            assert not tried[f"reward.type={name}"].tells_right_from_wrong
        assert tried["reward.type=pays_all_of_this_test"].wrong == tried["reward.type=pays_all_of_this_test"].controls
        found = form.describe()
        assert (
            found
            and "no registered reward reads it there" in found.fact
            and "reward.type=module:function" in found.remedy
        )
    finally:
        for name in ("mentions_of_this_test", "pays_all_of_this_test"):
            del _rewards._entries[name]  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("PARIS", "exact_match reward.kwargs.ignore_case=true"),
        ("The answer is {}.", "math"),
        ("\\boxed{{{}}}", "math"),
    ],
)
def test_words_are_read_by_the_rewards_that_read_words(text: str, setting: str):
    cities = ["Paris", "Rome", "Oslo", "Bern", "Lima"]
    rows: Rows = [
        (f"Capital {i}?", city, [city.upper() if text == "PARIS" else text.format(city)] * 3)
        for i, city in enumerate(cities)
    ]
    form = examine(rows)
    assert form.mentioned == 15 and accepted(form)[setting] == (15, 0)


def test_the_reference_counts_only_as_a_whole_and_where_the_prompt_lacks_it():
    """12 is in 112 and 12.5 no number of its own; a prompt that holds the answer proves nothing; `a` is no `A`."""
    form = examine([("x?", "12", ["112 and 12.5", "1,012", "12, I think", "12.0"]), ("y?", "7", ["no"] * 4)])
    assert form.mentioned == 2
    assert examine([("is it 12?", "12", ["12!"] * 4), ("y?", "7", ["no"] * 4)]).open == 4
    assert examine([("Which?", "A", ["a thing", "(A) it is"]), ("Which?", "B", ["-", "-"])]).mentioned == 1


def test_random_numbers_are_no_right_answers():
    """Each completion is a number by turns, so every reference is met as often as another one."""
    draws = [f"It is {n}." for n in range(15, 30)]
    lucky: Rows = [(q, a, draws) for q, a, _ in CHATTY]
    form = examine(lucky)
    tried = {r.setting: r for r in form.rewards}["reward.type=gsm8k_flexible"]
    assert (tried.accepted, tried.by_chance, tried.wrong) == (9, 9, 0) and tried.signal > 0.3
    assert form.best is None and form.describe() is None


@pytest.mark.parametrize(("hits", "is_named"), [(6, False), (7, True)])
def test_a_handful_of_right_answers_among_many_wrong_ones_may_be_chance(hits: int, is_named: bool):
    """None with another task's reference: by the sign test 1/64 is no proof, and 1/128 is."""
    rows: Rows = [
        (q, a, ["No idea."] * 15 + [f"I say {a}." if i < hits else "No idea."]) for i, (q, a, _) in enumerate(CHATTY)
    ]
    form = examine(rows)
    tried = {r.setting: r for r in form.rewards}["reward.type=gsm8k_flexible"]
    assert (tried.accepted, tried.by_chance, form.failed) == (hits, 0, 144)
    assert (form.best is not None) is is_named


def test_one_of_two_answers_is_right_half_of_the_time():
    """The references of other tasks are accepted as often, which says nothing where there are only two."""
    texts = ["The answer is yes.", "The answer is no."]
    found = examine([(f"Is {n} even?", ["yes", "no"][n % 2], texts * 2) for n in range(20)]).describe()
    assert found and found.code == "answer_form" and "reward.type=math" in found.remedy


def test_completions_that_equal_their_reference_are_the_rewards_fault():
    form = examine([(q, a, [a] * 3) for q, a, _ in CHATTY], "gsm8k_strict")
    found = form.describe()
    assert found and found.code == "reference_refused" and "27 of 27" in found.fact and "rlvr verify" in found.remedy


def test_where_most_pass_or_no_answer_is_known_nothing_is_examined():
    assert examine_form(*judge([(q, a, [a, a, "no"]) for q, a, _ in CHATTY])) is None
    assert examine_form(*judge([("x?", None, ["no"] * 4)], "keyword_contains", keywords=["yes"])) is None


def test_an_evaluation_keeps_the_form():
    form = examine(CHATTY)
    stored = replace(Evaluation([], 1), form=form)
    assert Evaluation.from_json(stored.to_json()) == stored
    assert AnswerForm.from_json(asdict(form)) == form
    for damaged in ({"judged": 1}, {**asdict(form), "rewards": [{"setting": "x"}]}):
        with pytest.raises(ValueError, match="not a stored evaluation"):
            Evaluation.from_json({**stored.to_json(), "form": damaged})


def test_a_last_number_is_one_number():
    """A list of guesses earns what its last number earns."""
    guesses = " ".join(map(str, range(100)))
    reward = resolve_reward("gsm8k_flexible")
    assert [reward("?", guesses, {"answer": n}) for n in (0, 42, 98, 99)] == [0, 0, 0, 1]
