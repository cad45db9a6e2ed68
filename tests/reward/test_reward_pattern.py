"""`format_compliance` with a user's pattern: what it says of answers, of runaway patterns, and of wrong options."""

from __future__ import annotations

from typing import Any

import pytest

from rlvr.core.types import Outcome, Score, Task, Trajectory
from rlvr.reward import resolve_reward
from rlvr.reward.signatures import Case
from rlvr.training.errors import TrainingStoppedError, check_error_budget
from tests.kit.slow_cases import mark_slow_but

ENDLESS = "a" * 60 + "!"
HUNGRY = "(?:" + "|".join("(b)" for _ in range(300)) + "|(a))*"  # keeps 301 marks per letter: a gigabyte


def scores(texts: list[str], **kwargs: Any) -> list[Score]:
    reward = resolve_reward("format_compliance", required_format="regex", **kwargs)
    return reward.score([Trajectory("p", [1], text, [2]) for text in texts])


def test_the_whole_response_must_match_unless_a_search_is_asked_for() -> None:
    texts = ["42", "42\n", "is 42", "", "4" * 100_001]
    assert [s.value for s in scores(texts, pattern="[0-9]+")] == [1, 0, 0, 0, 0]
    found = scores(texts, pattern="[0-9]+", match="search")
    assert [s.value for s in found] == [1, 1, 1, 0, 0]
    assert [(s.outcome, s.reason) for s in found][-2:] == [
        (Outcome.FAILED, "wrong_format"),
        (Outcome.FAILED, "too_large"),
    ]
    assert resolve_reward("format_compliance", required_format="regex", pattern="(?is)<a>.*</A>")("p", "<A>\n</a>") == 1


REWARDS = {
    "format_compliance": {"required_format": "regex", "match": "full"},
    "regex": {"match": "full"},
}


def judge(name: str, cases: list[tuple[str, Any]], **kwargs: Any) -> list[tuple[float | None, str, str]]:
    found = resolve_reward(name, **REWARDS[name], **kwargs).judge_all([Case("p", text, meta) for text, meta in cases])
    return [(score.value, score.outcome.value, score.reason) for score in found]


@pytest.mark.parametrize("name", mark_slow_but(1, REWARDS))
def test_an_answer_on_which_alone_the_pattern_runs_away_does_not_fit(name: str) -> None:
    """A policy must not escape its 0 by an answer that no verdict is found on."""
    cases: list[tuple[str, Any]] = [("aaa", {"answer": "aa"}), (ENDLESS, {"answer": "aa"}), (ENDLESS, {})]
    passed, late = (1.0, "passed", ""), (0.0, "timeout", "timeout")
    assert judge(name, cases, pattern="(a+)+", seconds=0.3) == [passed, late, late]
    hungry: list[tuple[str, Any]] = [("a" * 100_000, {"answer": "a"}), ("a" * 100_000, {})]
    assert judge(name, hungry, pattern=HUNGRY, seconds=60) == [(0.0, "failed", "memory")] * 2


@pytest.mark.parametrize("name", mark_slow_but(1, REWARDS))
def test_a_pattern_that_runs_away_on_the_reference_too_is_an_error(name: str) -> None:
    """Also for the right answer itself; a task whose reference is harmless is judged."""
    bad, good = {"reward_model": {"ground_truth": ENDLESS}}, {"answer": "aa"}
    cases: list[tuple[str, Any]] = [(ENDLESS, bad), (f"{ENDLESS}?", bad), (ENDLESS, good), ("aa", bad)]
    error, late, passed = (None, "error", "rule_timeout"), (0.0, "timeout", "timeout"), (1.0, "passed", "")
    assert judge(name, cases, pattern="(a+)+", seconds=0.3) == [error, error, late, passed]
    large: list[tuple[str, Any]] = [("a" * 100_000, {"answer": "a" * 99_999})]
    assert judge(name, large, pattern=HUNGRY, seconds=60) == [(None, "error", "rule_failed")]


@pytest.mark.parametrize(("answer", "where"), [("aa", "an answer of 61"), (ENDLESS, "the task's reference, of 61")])
def test_the_message_names_the_pattern_and_what_to_do(answer: str, where: str) -> None:
    reward = resolve_reward("format_compliance", required_format="regex", pattern="(a+)+", seconds=0.3)
    (score,) = reward.judge_all([Case("p", ENDLESS, {"answer": answer})])
    assert f"on {where} characters" in score.detail and "the pattern is '(a+)+'" in score.detail
    assert "write a+ or a possessive (a++)+ instead, or raise `seconds`" in score.detail


def test_the_error_budget_counts_a_pattern_that_runs_away_on_the_references() -> None:
    reward = resolve_reward("format_compliance", required_format="regex", pattern="(a+)+", seconds=0.2)
    batch = [Trajectory("p", [1], text, [2], task=Task("t", "p", {"answer": ENDLESS})) for text in ("aa", ENDLESS)]
    for trajectory, score in zip(batch, reward.score(batch), strict=True):
        trajectory.scores[reward.name] = score
    failures = [t for t in batch if t.scores[reward.name].outcome is Outcome.ERROR]
    assert [t.response for t in failures] == [ENDLESS]
    with pytest.raises(TrainingStoppedError, match=r"(?s)error_budget=0\.05 allows.*the pattern is '\(a\+\)\+'"):
        check_error_budget("step 1", reward.name, failures, len(batch), 0.05)


def test_in_a_composite_a_runaway_pattern_is_an_error_of_the_whole() -> None:
    part = {"required_format": "regex", "pattern": "(a+)+", "seconds": 0.2}
    rewards = [{"name": "length_penalty"}, {"name": "format_compliance", "kwargs": part}]
    cases = [Case("p", ENDLESS, {"answer": ENDLESS}), Case("p", ENDLESS, {"answer": "a"})]
    error, late = resolve_reward("composite", rewards=rewards).judge_all(cases)
    assert (error.value, error.reason) == (None, "rule_timeout") and "part format_compliance" in error.detail
    assert late.value is not None and late.parts["format_compliance"] == 0.0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"pattern": "(a"},
            r"pattern='\(a' is not a regular expression: missing \), .* at position 0; correct the expression",
        ),
        ({"pattern": "ab**"}, "multiple repeat at position 3"),
        ({"pattern": "a{99999999999999999999}"}, "the repetition number is too large"),
        ({"pattern": "(" * 4000 + ")" * 4000}, "is not a regular expression: .*recursion"),
        ({}, "expected a regular expression of 1 to 10,000 characters"),
        ({"pattern": ""}, "expected a regular expression"),
        ({"pattern": 3}, "pattern='3', expected a regular expression of .* in quotes"),
        ({"pattern": "a" * 10_001}, "expected a regular expression of 1 to 10,000"),
        ({"pattern": "a", "match": "ful"}, r"match='ful' \(did you mean 'full'\?\); known: full, search"),
        ({"pattern": "a", "seconds": 0}, "seconds=0, expected a finite number above 0, at most 60"),
        ({"pattern": "a", "seconds": True}, "seconds=True"),
        ({"pattern": "a", "flags": "i"}, "does not take 'flags'"),
        (
            {"required_format": "json", "pattern": "a"},
            "pattern has no effect with required_format='json'",
        ),
        ({"required_format": "json", "match": "full"}, "match has no effect"),
    ],
)
def test_a_bad_pattern_or_option_is_refused_when_resolved(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_reward("format_compliance", **{"required_format": "regex", **kwargs})
