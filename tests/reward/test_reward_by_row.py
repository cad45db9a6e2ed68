"""The reward that each row names: verdicts of the row's reward, and rows that must not decide."""

from __future__ import annotations

from typing import Any

import pytest

from rlvr.core.types import Score
from rlvr.reward import known_rewards, resolve_reward
from rlvr.reward.by_row import NOT_IN_ROWS
from rlvr.reward.signatures import Case


def judge(*rows: tuple[str, dict[str, Any]], **options: Any) -> list[Score]:
    return resolve_reward("by_row", **options).judge_all([Case("p", text, meta) for text, meta in rows])


def verdicts(scores: list[Score]) -> list[tuple[float | None, str, str]]:
    return [(score.value, score.outcome.value, score.reason) for score in scores]


def test_each_row_is_judged_by_its_own_reward_in_order() -> None:
    short = {"reward": {"name": "length", "kwargs": {"at_most": 2}}}
    rows = [
        ("so 42", {"reward": {"name": "gsm8k_flexible"}, "answer": "42"}),
        ("one two three", short),
        ("Paris", {"reward": "exact_match", "answer": "Paris"}),
        ("one two", short),
        ("41", {"reward": {"name": "gsm8k_flexible"}, "answer": "42"}),
    ]
    expected = [
        (1.0, "passed", ""),
        (0.0, "failed", "too_long"),
        (1.0, "passed", ""),
        (1.0, "passed", ""),
        (0.0, "failed", "wrong_value"),
    ]
    scores = judge(*rows)
    assert verdicts(scores) == expected
    assert scores[1].parts == {"length": 3.0}
    assert verdicts(judge(*reversed(rows))) == expected[::-1]


def test_options_of_a_row_are_those_of_the_row_alone() -> None:
    rows = [("a b c", {"reward": {"name": "length", "kwargs": {"at_most": most}}}) for most in (2, 3, 2, 4)]
    assert [score.value for score in judge(*rows)] == [0.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "meta['reward'] is None, expected a name or {name, kwargs}"),
        ({"kwargs": {}}, "expected a name or {name, kwargs}"),
        ({"name": "length", "weight": 2}, "expected a name or {name, kwargs}"),
        ("exact_mach", "names 'exact_mach' (did you mean 'exact_match'?)"),
        ("os:system", "names 'os:system'"),
        ({"name": "length", "kwargs": {}}, "no bound is given"),
        ({"name": "length", "kwargs": {"at_mots": 2}}, "did you mean 'at_most'?"),
        ({"name": "length", "kwargs": [2]}, "kwargs=[2], expected a mapping"),
        ({"name": "length", "kwargs": {"at_most": {1}}}, "is not JSON"),
        *[(name, f"names {name!r}") for name in NOT_IN_ROWS],
    ],
)
def test_a_wrong_entry_is_the_row_s_fault(given: Any, message: str) -> None:
    (score,) = judge(("42", {"reward": given, "answer": "42"}))
    assert (score.value, score.outcome.value, score.reason) == (None, "invalid", "bad_reward")
    assert message in score.detail


def test_allowed_limits_the_rows() -> None:
    right, other = {"reward": "exact_match", "answer": "a"}, {"reward": "gsm8k_flexible", "answer": "1"}
    assert verdicts(judge(("a", right), ("1", other), allowed=["exact_match"])) == [
        (1.0, "passed", ""),
        (None, "invalid", "bad_reward"),
    ]
    for allowed in ([], "exact_match", ["judge"], ["no_such"]):
        with pytest.raises(ValueError, match="reward 'by_row': allowed"):
            resolve_reward("by_row", allowed=allowed)


def test_rows_may_name_no_model_no_judge_and_no_composite() -> None:
    assert set(NOT_IN_ROWS) <= set(known_rewards())


def test_programs_are_judged_beside_sampling_where_code_is_named() -> None:
    assert resolve_reward("by_row").waits_for == ""
    assert resolve_reward("by_row", allowed=["exact_match"]).waits_for == ""
    assert resolve_reward("by_row", allowed=["exact_match", "code"]).waits_for == "processes"


def test_a_list_of_rewards_must_all_hold() -> None:
    rules = {"reward": [{"name": "length", "kwargs": {"at_most": 3}}, "gsm8k_flexible"], "answer": "42"}
    scores = judge(("so 42", rules), ("so 41", rules), ("so it is 42", rules), ("a b c d", rules))
    assert verdicts(scores) == [
        (1.0, "passed", ""), (0.0, "failed", "wrong_value"), (0.0, "failed", "too_long"), (0.0, "failed", "too_long"),
    ]  # fmt: skip
    assert [score.parts["length"] for score in scores] == [2.0, 2.0, 4.0, 4.0]
    broken = {"reward": [{"name": "length", "kwargs": {"at_most": 0}}, "exact_match"]}  # it needs an answer
    assert [score.value for score in judge(("one", broken))] == [None]
    for wrong, words in (([], "a list of 0"), (["length"] * 21, "a list of 21"), ([["length"]], "expected a name or")):
        (score,) = judge(("one", {"reward": wrong}))
        assert score.reason == "bad_reward" and words in score.detail
