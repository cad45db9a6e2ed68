"""Several verifiers as one: weights, votes that are missing, truth, what is told, and the reward of an iteration."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr.chat.special_tokens import strip_special
from rlvr.core.types import Outcome, Score
from rlvr.reward import Reward, register_reward, resolve_reward
from rlvr.reward.blend import SLOW_TO_READ, SUGGESTIONS, Blend, session_reward
from rlvr.reward.feedback import MAX_DETAIL, Feedback, sanitize
from rlvr.reward.signatures import Case

PROSE = "The answer is a long and clean text."


def fixed_reward(name: str, value: float | None, reason: str = "", *, detail: str = "", **parts: float) -> Reward:
    """A verifier that gives every answer the same score."""
    failed = Outcome.INVALID if value is None else Outcome.FAILED if reason else Outcome.PASSED

    def says(prompt: str, response: str, meta: Any = None) -> Score:
        return Score(value, failed, reason, parts, detail)

    says.__name__ = name
    return resolve_reward(says)


def broken(prompt: str, response: str, meta: Any = None) -> float:
    raise RuntimeError("no judge today")


@register_reward("sees_reference_in_test_blend", gold="answer")
def sees_reference(prompt: str, response: str, meta: Any = None) -> Score:
    return Score(0.4, Outcome.FAILED, "low_score", detail="the reference says 42")


@register_reward("hidden_tests_in_test_blend", verifiable=True)
def hidden_tests(prompt: str, response: str, meta: Any = None) -> Score:
    return Score(0.0, Outcome.FAILED, "assertion", detail="assert f(3) == 9")


def test_confidence_is_the_mean_by_weight_and_parts_give_the_other_two() -> None:
    rules = fixed_reward("rules", 0.95, correctness=1.0, quality=0.9)
    said = Blend([(rules, 0.3), (fixed_reward("judge", 0.6), 0.7)]).judge("p", PROSE)
    assert said.confidence == pytest.approx(0.3 * 0.95 + 0.7 * 0.6)  # 0.705
    assert said.correctness_score == pytest.approx(0.3 * 1.0 + 0.7 * 0.6)  # 0.72
    assert said.quality_score == pytest.approx(0.3 * 0.9 + 0.7 * 0.6)  # 0.69
    assert said.error_types == () and said.truth is None
    assert {name: score.value for name, score in said.scores.items()} == {"rules": 0.95, "judge": 0.6}


def test_weights_need_not_sum_to_one_and_a_weight_of_zero_only_watches() -> None:
    watched = fixed_reward("watched", 0.0, "wrong_value", detail="no")
    said = Blend([(fixed_reward("a", 1.0), 1), (fixed_reward("b", 0.5), 3), (watched, 0)]).judge("p", PROSE)
    assert said.confidence == 0.625 and said.error_types == () and "watched" not in said.detailed_feedback
    assert said.scores["watched"].value == 0.0
    with pytest.raises(ValueError, match="the weights sum to 0"):
        Blend([(watched, 0)])


def test_a_verifier_that_cannot_judge_has_no_vote() -> None:
    """Neither a zero nor an error type: the others' weights are scaled up; with no others there is no confidence."""
    parts = [
        (fixed_reward("a", 0.8), 0.3),
        (resolve_reward(broken), 0.5),
        (fixed_reward("b", None, "no_gold"), 0.2),
    ]
    said = Blend(parts).judge("p", PROSE)
    assert said.confidence == 0.8 and said.error_types == ()
    assert "broken: could not judge (exception)" in said.detailed_feedback.split("\n")
    assert "no judge today" not in said.detailed_feedback  # our own traceback is no advice
    unjudged = Blend(parts[1:]).judge("p", PROSE)
    assert (unjudged.confidence, unjudged.correctness_score, unjudged.quality_score) == (None, None, None)
    assert session_reward(unjudged, 1) is None


def test_values_outside_the_unit_interval_are_clipped() -> None:
    said = Blend([(fixed_reward("low", -0.5, "assertion"), 1), (fixed_reward("high", 1.2), 1)]).judge("p", PROSE)
    assert said.confidence == 0.5 and said.error_types == ("assertion",)


def test_truth_comes_from_verifiable_rewards_alone() -> None:
    """All that could judge have to pass; rules, judges and an undecided comparison are no truth."""
    blend = Blend.of(["draft", "math", "exact_match"])
    assert blend.verifiable and not Blend.of(["draft"]).verifiable
    assert blend.judge("p", "\\boxed{4}", {}).truth is None
    assert Blend.of(["draft", "math"]).judge("p", "It is \\boxed{4}.", {"answer": "4"}).truth is True
    assert blend.judge("p", "It is \\boxed{4}.", {"answer": "4"}).truth is False  # exactly "4" it is not
    assert Blend.of(["draft"]).judge("p", PROSE, {"answer": "4"}).truth is None
    undecided = {"name": "math", "kwargs": {"use_math_verify": "never"}}
    assert Blend.of([undecided]).judge("p", r"\boxed{\int_0^x e^{t^2} dt}", {"answer": "x^{x}+1"}).truth is None


def test_opinions_do_not_outvote_the_truth() -> None:
    """A wrong answer has no more confidence than the verifiers that failed it give it; a right one has the mean."""
    blend = Blend.of([{"name": "draft", "weight": 9}, "math"])
    right, wrong = (blend.judge("p", f"The answer is {n}.", {"answer": "144"}) for n in (144, 100))
    assert (right.confidence, right.truth) == (1.0, True) and (wrong.confidence, wrong.truth) == (0.0, False)
    partly = register_reward("half_right_in_test_blend", verifiable=True)(
        lambda prompt, response: Score(0.4, Outcome.FAILED, "assertion")
    )
    said = Blend([(resolve_reward("draft"), 1), (resolve_reward(partly), 1)]).judge("p", PROSE)
    assert (said.confidence, said.truth) == (0.4, False)  # not (1 + .4) / 2
    watching = Blend([(resolve_reward("draft"), 1), (resolve_reward(partly), 0)]).judge("p", PROSE)
    assert (watching.confidence, watching.truth) == (0.4, False)  # without a vote it still limits


def test_advisory_verifiers_object_but_give_no_confidence() -> None:
    draft, judge = (resolve_reward("draft"), 0.3), (fixed_reward("judge", 0.6, "low_score", detail="Why?"), 0.7)
    alone = Blend([draft], advisory=["draft"])
    said = alone.judge("p", "fn f()")
    assert (said.confidence, said.correctness_score, said.quality_score) == (None, None, 0.3) and said.is_unverified
    assert said.error_types == ("too_short", "incomplete_code") and said.suggestions and not alone.can_verify
    assert session_reward(said, 1) is None
    both = Blend([draft, judge], advisory=["draft"])
    assert both.can_verify and both.judge("p", PROSE).confidence == pytest.approx(0.3 + 0.7 * 0.6)
    broke = Blend([draft, (resolve_reward(broken), 0.7)], advisory=["draft"])
    assert broke.can_verify and broke.judge("p", PROSE).is_unverified  # the judge could not judge: form is no proof
    assert not Blend([(resolve_reward(broken), 1)]).judge("p", PROSE).is_unverified


def test_failures_name_the_reason_and_quote_nothing_of_the_services_own() -> None:
    address = "http://10.0.0.5:8000/v1 answered 500: secret"
    scores = {
        "judge": Score(None, Outcome.ERROR, "judge_failed", detail=address),
        "math": Score(None, Outcome.INVALID, "no_gold", detail="meta['answer'] is missing"),
        "grader": Score(None, Outcome.ERROR, "grader_failed", detail="NameError: x"),
        "draft": Score(1.0, Outcome.PASSED),
    }
    said = Feedback(None, None, None, scores=scores).failures
    expected = "judge: judge_failed; math: no_gold meta['answer'] is missing; grader: grader_failed NameError: x"
    assert said == expected


def test_feedback_states_the_limits_that_hold() -> None:
    """Two verifiers with the same code have different limits, and a suggestion states neither."""
    three = {"name": "length", "kwargs": {"at_most": 3}}
    said = Blend.of([three]).judge("p", "one two three four five")
    assert said.detailed_feedback == "length: too long: 5 words, expected at most 3"
    assert said.suggestions == ("Shorten the answer.",)
    both = Blend.of(["draft", three]).judge("p", "word " * 4000)
    assert both.detailed_feedback.split("\n") == [
        "draft: too long: 20,000 characters, expected at most 10,000",
        "length: too long: 4,000 words, expected at most 3",
    ]
    between = {"name": "length", "kwargs": {"at_least": 2, "at_most": 20, "unit": "characters"}}
    short = Blend.of(["draft", between]).judge("p", "x")
    assert short.detailed_feedback.split("\n") == [
        "draft: too short: 1 character, expected at least 10",
        "length: too short: 1 character, expected at least 2 and at most 20",
    ]
    again = Blend.of([{"name": "repetition", "kwargs": {"words": 2, "at_most": 0.25}}]).judge("p", "a b a b a b")
    assert again.detailed_feedback.endswith("share of 0.6 of the runs of 2 words came before, expected at most 0.25")


def test_no_suggestion_states_a_number() -> None:
    """The limits are the caller's; a suggestion is the same for every caller."""
    assert not [text for text in {**SUGGESTIONS, **SLOW_TO_READ}.values() if any(c.isdigit() for c in text)]


def test_a_verifier_that_reads_the_answer_does_not_ask_for_a_faster_program() -> None:
    late = fixed_reward("regex", 0.0, "timeout")
    assert Blend([(late, 1)]).judge("p", "a").suggestions == (SLOW_TO_READ["timeout"],)
    program = fixed_reward("code", 0.0, "timeout")
    assert Blend([(program, 1)]).judge("p", "a").suggestions == (SUGGESTIONS["timeout"],)


def test_codes_become_error_types_and_suggestions() -> None:
    said = Blend.of(["draft", {"name": "exact_match", "weight": 2}]).judge("p", "fn f()", {"answer": "4"})
    assert said.error_types == ("too_short", "incomplete_code", "wrong_value")
    assert said.suggestions == tuple(SUGGESTIONS[code] for code in said.error_types)
    draft = "draft: too short, incomplete code: 6 characters, expected at least 10"
    assert said.detailed_feedback == f"{draft}\nexact_match: wrong value"
    assert said.as_dict()["error_types"] == ["too_short", "incomplete_code", "wrong_value"]


def test_two_verifiers_with_one_complaint_are_one_error() -> None:
    said = Blend([(fixed_reward("a", 0.0, "no_answer"), 1), (fixed_reward("b", 0.0, "no_answer"), 1)]).judge("p", "")
    assert said.error_types == ("no_answer",)


def test_details_that_reveal_the_answer_are_hidden() -> None:
    """A verifier that knows what is right speaks in codes alone, unless its task holds none or it is revealed."""
    blend = Blend.of(["sees_reference_in_test_blend"])
    assert blend.judge("p", "a", {"answer": "42"}).detailed_feedback == "sees_reference_in_test_blend: low score"
    assert blend.judge("p", "a", {}).detailed_feedback.endswith("low score: the reference says 42")
    assert Blend.of(["hidden_tests_in_test_blend"]).judge("p", "a", {}).detailed_feedback.endswith(": assertion")
    shown = Blend.of(["sees_reference_in_test_blend"], reveal=["sees_reference_in_test_blend"])
    assert shown.judge("p", "a", {"answer": "42"}).detailed_feedback.endswith("low score: the reference says 42")
    with pytest.raises(ValueError, match=r"reveal='judge', expected some of its verifiers: draft"):
        Blend.of(["draft"], reveal=["judge"])


def test_details_are_one_short_printable_line() -> None:
    """An answer may have written them."""
    noise = fixed_reward("n", 0.0, "exception", detail="a\n\x1b[31mb" + "y" * 900 + " at 0x7f00aa")
    line = Blend([(noise, 1)]).judge("p", "a").detailed_feedback
    assert "\n" not in line and "\x1b" not in line and len(line) == len("n: exception: ") + MAX_DETAIL


def test_stripping_leaves_no_special_text_that_stripping_forms() -> None:
    special = ["<|im_end|>", "[DONE]"]
    assert sanitize("a <|im_<|im_end|>end|> b [DO[DONE]NE] at 0x12ab", special) == "a <|im_ end|> b [DO NE]"
    assert strip_special("x[DONE]\ny", special) == "x \ny"
    assert strip_special("axb", ["x", "a b"]) == " "


def test_many_are_judged_at_once_and_as_one_by_one() -> None:
    sizes: list[int] = []

    def list_reward(prompts: Any, responses: Any) -> list[float]:
        sizes.append(len(responses))
        return [float(len(text) > 3) for text in responses]

    register_reward("lengths_in_test_blend", batched=True)(list_reward)
    blend = Blend.of(["lengths_in_test_blend", "draft"])
    cases = [Case("p", text) for text in ("abcd", "ab", PROSE)]
    many = blend.judge_many(cases)
    assert sizes == [3] and many == [blend.judge(c.prompt, c.response) for c in cases]
    assert blend.judge_many([]) == []


@pytest.mark.parametrize(
    ("verifiers", "said"),
    [
        ([], "verifiers=\\[\\], expected a list"),
        (["drafft"], "did you mean 'draft'"),
        ([{"name": "draft", "weight": -1}], r"part 1 \(draft\): weight=-1"),
        ([{"name": "draft", "wieght": 1}], "did you mean 'weight'"),
        ([{"name": "draft", "kwargs": {"x": 1}}], "does not take 'x'"),
    ],
)
def test_mistakes_in_a_blend_are_named(verifiers: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Blend.of(verifiers)


@pytest.mark.parametrize(
    ("feedback", "first", "second"),
    [
        (Feedback(1.0, 1.0, 1.0), 1.5, 1.6),
        (Feedback(0.9, 0.8, 1.0, error_types=("incomplete_code",)), 1.24, 1.34),
        (Feedback(0.0, 0.0, 0.0, error_types=("a", "b")), 0.0, 0.0),  # clamped from -0.2 and -0.1
        (Feedback(0.05, 0.0, 0.0, error_types=("a",)), 0.0, 0.05),
    ],
)
def test_the_reward_of_an_iteration(feedback: Feedback, first: float, second: float) -> None:
    assert session_reward(feedback, 1) == first
    assert session_reward(feedback, 2) == session_reward(feedback, 7) == second


def test_iterations_are_counted_from_one() -> None:
    with pytest.raises(ValueError, match="iteration=0, expected at least 1"):
        session_reward(Feedback(1.0, 1.0, 1.0), 0)


UNIT = st.floats(0, 1)


@given(UNIT, UNIT, UNIT, st.integers(0, 30), st.integers(1, 20))
def test_the_reward_is_bounded_and_rises_with_each_score(c: float, k: float, q: float, errors: int, at: int) -> None:
    def worth(confidence: float, correctness: float, quality: float, count: int) -> float:
        given = Feedback(confidence, correctness, quality, error_types=tuple(map(str, range(count))))
        reward = session_reward(given, at)
        assert reward is not None and 0 <= reward <= 2
        return reward

    base = worth(c, k, q, errors)
    assert worth(c, k, q, errors + 1) <= base <= min(worth(1.0, k, q, errors), worth(c, 1.0, q, errors))
