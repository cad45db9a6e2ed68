"""boxed, correct, combined of the RPN process; gsm8k on numbers exactly; exact_match."""

from __future__ import annotations

import json
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr.core.types import Outcome, Score, StopReason, Task, Trajectory
from rlvr.reward import resolve_reward
from rlvr.reward.text.final_answer import final_answer, parse_number

PROMPT = "<boe> 3 5 + 7 +"
META = {"answer": "2", "modulus": 13}
GSM8K = Path(__file__).resolve().parents[3] / "shared" / "data" / "gsm8k"


def rollout(response: str, stop: StopReason | None = StopReason.STOP, meta: dict | None = None) -> Trajectory:
    return Trajectory(
        PROMPT, [1], response, [2], task=Task("t", PROMPT, META if meta is None else meta), stop_reason=stop
    )


def values(response: str) -> tuple[float | None, ...]:
    return tuple(resolve_reward(name)(PROMPT, response, META) for name in ("boxed", "correct", "combined"))


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("= 8 7 + = 2 <eoe>", (1.0, 1.0, 1.0)),
        ("= 8 7 + = 3 <eoe>", (1.0, 0.0, 0.3)),
        ("= 2 <eoe> <pad> <pad>", (1.0, 1.0, 1.0)),
        ("= 8 7 + = 2", (0.0, 0.0, 0.0)),  # no end
        ("= 8 7 + <eoe>", (0.0, 0.0, 0.0)),
        ("", (0.0, 0.0, 0.0)),
        ("<eoe>", (0.0, 0.0, 0.0)),
        ("= 2 = 5 <eoe>", (1.0, 0.0, 0.3)),  # two boxes: the last counts
        ("= 5 = 2 <eoe>", (1.0, 1.0, 1.0)),
        ("= 2 <eoe> = 5 <eoe>", (1.0, 0.0, 0.3)),  # two ends: the last counts
        ("= 2 <eoe> <eoe>", (0.0, 0.0, 0.0)),
        ("= = 2 <eoe>", (1.0, 1.0, 1.0)),  # steps are not checked, as the process defines it
        ("= 13 <eoe>", (0.0, 0.0, 0.0)),  # no operand of p = 13
        ("= 15 <eoe>", (0.0, 0.0, 0.0)),  # equal to 2 modulo p, and still no operand
        ("= -11 <eoe>", (0.0, 0.0, 0.0)),
        ("= 02 <eoe>", (0.0, 0.0, 0.0)),
        ("= 2.0 <eoe>", (0.0, 0.0, 0.0)),
        ("= \u0662 <eoe>", (0.0, 0.0, 0.0)),  # Arabic-Indic two
        ("= \uff12 <eoe>", (0.0, 0.0, 0.0)),  # full-width two
        ("= \u00b2 <eoe>", (0.0, 0.0, 0.0)),  # superscript two
        (f"= {'9' * 100_000} <eoe>", (0.0, 0.0, 0.0)),
        ("= <eoe> 2", (0.0, 0.0, 0.0)),
        ("=2 <eoe>", (0.0, 0.0, 0.0)),
        ("2 = <eoe>", (0.0, 0.0, 0.0)),
    ],
)
def test_rpn_rewards_on_text(response, expected):
    assert values(response) == expected


def test_a_box_needs_two_tokens_before_the_end():
    assert resolve_reward("combined")("", "2 <eoe> =", META) == 0.0
    assert resolve_reward("combined")("", "= 2 <eoe>", META) == 1.0


def test_rpn_rewards_see_the_end_in_the_stop_reason():
    """A rollout's text has no end token: the sampler says whether the policy ended it."""
    reward = resolve_reward("combined")
    assert reward.score([rollout("= 8 7 + = 2")]) == [Score(1.0, Outcome.PASSED, "", {"boxed": 1.0, "correct": 1.0})]
    assert reward.score([rollout("= 8 7 + = 2", StopReason.LENGTH)]) == [
        Score(0.0, Outcome.FAILED, "truncated", {"boxed": 0.0, "correct": 0.0})
    ]
    assert reward.score([rollout("= 8 7 + = 2 <eoe>")])[0].value == 1.0
    assert reward.score([rollout("= 8 7 + = 2 <eoe>", StopReason.LENGTH)])[0].reason == "truncated"
    assert reward.score([rollout("= 8 7 + = 2 <eoe>", None)])[0].value == 1.0
    assert reward.score([rollout("= 8 7 + = 2", None)])[0].reason == "no_answer"


def test_rpn_reasons_and_parts():
    combined, boxed = resolve_reward("combined"), resolve_reward("boxed")
    assert combined.score([rollout("= 3")]) == [
        Score(0.3, Outcome.FAILED, "wrong_value", {"boxed": 1.0, "correct": 0.0})
    ]
    assert combined.score([rollout("8 7")])[0].reason == "no_answer"
    assert boxed.score([rollout("= 3")]) == [Score(1.0, Outcome.PASSED, "", {"boxed": 1.0})]
    assert "HACKED" in (boxed.spec.function.__doc__ or "")


@pytest.mark.parametrize("name", ["correct", "combined", "gsm8k", "exact_match", "word_match"])
def test_a_missing_gold_is_an_invalid_task_and_never_a_zero(name):
    for meta in ({"modulus": 13}, {"modulus": 13, "answer": None}):
        score = resolve_reward(name).score([rollout("= 2", meta=meta)])[0]
        assert (score.value, score.outcome, score.reason) == (None, Outcome.INVALID, "no_gold")


def test_rpn_gold_may_be_an_integer_and_must_be_an_operand():
    reward = resolve_reward("combined")
    assert reward(PROMPT, "= 2 <eoe>", {"answer": 2, "modulus": 13}) == 1.0
    assert reward(PROMPT, "= 2 <eoe>", {"answer": "15", "modulus": 13}) is None
    assert resolve_reward("boxed")(PROMPT, "= 2 <eoe>", {"modulus": 13}) == 1.0
    assert reward.score([rollout("= 2", meta={"answer": "2"})])[0].reason == "no_modulus"


def test_combined_weights():
    reward = resolve_reward("combined", boxed_weight=0.2, correct_weight=0.8)
    assert reward(PROMPT, "= 3 <eoe>", META) == 0.2
    assert reward(PROMPT, "= 2 <eoe>", META) == 1.0
    for bad in (-1, float("nan"), "0.3", True):
        with pytest.raises(ValueError, match=r"boxed_weight=.*expected a finite number"):
            resolve_reward("combined", boxed_weight=bad)


ROWS = [
    ("She sells 9.\n9 * 2 = $<<9*2=18>>18.\n#### 18", "18"),
    ("#### 1,234", "1234"),
    ("#### -7", "-7"),
    ("#### 1,000,000", "1000000"),
    ("#### 0.5", "1/2"),
]


@pytest.mark.parametrize(("solution", "number"), ROWS)
def test_gsm8k_accepts_a_gold_solution_and_refuses_the_next_one(solution, number):
    reward = resolve_reward("gsm8k")
    for gold in (solution, number):
        assert reward("q", solution, {"answer": gold}) == 1.0
        for other, _ in ROWS:
            assert reward("q", other, {"answer": gold}) == float(other == solution)


@pytest.mark.parametrize(
    ("response", "strict", "flexible"),
    [
        ("6 * 3\n#### 18", "passed", "passed"),
        ("#### 18 apples", "passed", "passed"),
        ("#### 5\nno:\n#### 18", "passed", "passed"),
        ("#### 18\nThat took 2 steps.", "passed", "wrong_value"),
        ("#### 5\nSo it is 18.", "wrong_value", "passed"),
        ("It is 18.", "no_answer", "passed"),
        ("It is $18.00.", "no_answer", "passed"),
        (r"\boxed{18}", "no_answer", "passed"),
        ("####18", "no_answer", "passed"),
        ("#### $18", "no_answer", "passed"),
        ("#### 18.00", "no_answer", "passed"),
        ("#### **18**", "no_answer", "passed"),
        ("#### -18", "wrong_value", "wrong_value"),
        ("eighteen", "no_answer", "no_answer"),
        ("#### \u0661\u0668", "no_answer", "no_answer"),  # Arabic-Indic digits
        (f"#### {'1' * 200}", "no_answer", "no_answer"),
    ],
)
def test_gsm8k_strict_reads_the_asked_form_and_flexible_the_last_number(response, strict, flexible):
    for name, expected in (("gsm8k_strict", strict), ("gsm8k_flexible", flexible)):
        score = resolve_reward(name).score([rollout(response, meta={"answer": "3 * 6 = 18\n#### 18"})])[0]
        assert (score.reason or score.outcome.value, score.value) == (expected, float(expected == "passed"))


@pytest.mark.parametrize(
    ("response", "value"),
    [("1,234", 1234), ("-5", -5), ("-$5.5", -5.5), ("x = .5", 0.5), ("10 - 3", 3), (r"1{,}000", 1000), ("v2: none", 2)],
)
def test_the_last_number_of_a_text(response, value):
    assert resolve_reward("gsm8k_flexible")("q", response, {"answer": value}) == 1.0


@pytest.mark.parametrize("name", ["gsm8k_strict", "gsm8k_flexible"])
def test_gsm8k_in_its_other_degrees_on_hostile_and_missing_text(name):
    reward = resolve_reward(name)
    for hostile in ("#### " * 20_000, "1," * 50_000, "-" * 100_000, "#### " + "9,999" * 20_000):
        assert reward("q", hostile, {"answer": "7"}) == 0.0
    assert reward.score([rollout("#### 7", meta={})])[0].reason == "no_gold"
    assert reward.score([rollout("", StopReason.LENGTH, {"answer": "7"})])[0].reason == "truncated"


@pytest.mark.skipif(not GSM8K.is_dir(), reason="the GSM8K files are not beside the project")
def test_gsm8k_on_all_real_rows():
    """Each of the 8,792 gold solutions scores 1; the next row's scores 0 unless the numbers are equal."""
    texts = [(GSM8K / f"{name}.jsonl").read_text(encoding="utf-8") for name in ("train", "test")]
    rows = [json.loads(line) for text in texts for line in text.strip().split("\n")]
    assert len(rows) == 8792
    reward = resolve_reward("gsm8k")
    for degree in ("gsm8k_strict", "gsm8k_flexible"):
        assert all(resolve_reward(degree)("", row["answer"], {"answer": row["answer"]}) == 1.0 for row in rows)
    for row, following in zip(rows, rows[1:] + rows[:1], strict=True):
        gold, other = (int(r["answer"].split("#### ")[1].replace(",", "")) for r in (row, following))
        assert reward("", row["answer"], {"answer": row["answer"]}) == 1.0
        assert reward("", row["answer"], {"answer": gold}) == 1.0
        assert reward("", following["answer"], {"answer": row["answer"]}) == float(gold == other)


@pytest.mark.parametrize(
    ("response", "number"),
    [
        ("The answer is 18.", 18),
        ("So the ANSWER IS: **$1,018.50**.", Fraction(2037, 2)),
        ("The answer is \\(18\\), since 2 * 9 = 18", 18),
        ("the answer is 3. No: the answer is 4", 4),
        ("the answer is 5\n#### 6", 6),
        ("\\boxed{7} so the answer is 8", 7),
        ("\\boxed{7} and \\boxed{8\\text{ eggs}}", 8),
        ("#### 9\n\\boxed{7}", 9),
        ("#### 1\n#### 2 dollars per day.", 2),
        ("#### Answer\nThe answer is 3", 3),
        ("  42\n", 42),
        ("\u22123/4", Fraction(-3, 4)),
        ("20%", 20),
        ("$.5", Fraction(1, 2)),
        ("I think it is 18", None),
        ("**Answer:** 18 dollars", 18),
        ("Answer:\n18", 18),
        ("The result is 18, as 2 * 9 = 18", 18),
        ("The answer is 18 and so we stop", 18),
        ("Answer: 18 or 19", None),
        ("answer is 3x + 1", None),
        ("answer is 3 + 1", None),
        ("answer is 3-1", None),
        ("answer is 1,23", None),
        ("answer is 1.2.3", None),
        ("#### 18 or 19", None),
        ("#### 1e3", None),
        ("1e3", None),
        ("12 13", None),
        ("1/0", None),
        ("--1", None),
        ("+-1", None),
        ("\\boxed{}", None),
        ("\\boxed{18", None),
        ("\u0661\u0668", None),  # Arabic-Indic digits
        ("nan", None),
        ("inf", None),
        ("9" * 101, None),
        ("9" * 100, int("9" * 100)),
        ("", None),
    ],
)
def test_final_answer(response, number):
    found = final_answer(response)
    assert found is None if number is None else found == number


def test_gsm8k_reasons():
    reward = resolve_reward("gsm8k")
    meta = {"answer": "#### 5"}
    cases = [rollout("#### 5", meta=meta), rollout("#### 6", meta=meta), rollout("five", meta=meta)]
    cases.append(rollout("I will", StopReason.LENGTH, meta))
    assert [s.reason for s in reward.score(cases)] == ["", "wrong_value", "no_answer", "truncated"]
    for gold in ("five", "#### five", True, [5], float("nan")):
        assert reward("q", "#### 5", {"answer": gold}) is None
    assert reward("q", "0.1", {"answer": 0.1}) == 1.0  # as written, not as stored in binary


@given(st.integers(-(10**40), 10**40), st.integers(0, 12))
def test_parse_number_is_exact(number, decimals):
    """Whatever Python writes, with or without thousands separators, is read back as the same rational."""
    assert parse_number(str(number)) == parse_number(f" ${number:,}. ") == number
    scaled = Fraction(number, 10**decimals)
    sign, digits = "-" * (number < 0), str(abs(number)).rjust(decimals + 1, "0")
    assert parse_number(f"{sign}{digits[: len(digits) - decimals]}.{digits[len(digits) - decimals :]}") == scaled


@given(st.text(alphabet="0123456789 .,$%/-+#\n\\boxed{}answeri*", max_size=300))
def test_final_answer_never_raises(text):
    assert final_answer(text) is None or isinstance(final_answer(text), Fraction)


@pytest.mark.parametrize(
    "hostile",
    [
        "answer is " * 200_000,
        "answer is " + "1," * 1_000_000,
        "answer is " + " " * 1_000_000 + "5",
        "\\boxed{" * 200_000,
        "\\boxed{" + "{" * 1_000_000,
        "9" * 2_000_000,
        "#" * 2_000_000,
        "- $ " * 500_000,
        "#### " + "a " * 1_000_000,
    ],
)
def test_hostile_text_takes_linear_time(hostile):
    start = time.perf_counter()
    assert resolve_reward("gsm8k")("q", hostile, {"answer": "7"}) == 0.0
    assert time.perf_counter() - start < 1.0


def test_exact_match():
    reward = resolve_reward("exact_match")
    assert [reward("q", r, {"answer": "Paris"}) for r in (" Paris\n", "paris", "Paris.")] == [1.0, 0.0, 0.0]
    assert resolve_reward("exact_match", ignore_case=True)("q", "PARIS", {"answer": "Paris"}) == 1.0
    assert reward("q", "7", {"answer": 7}) == 1.0


def test_word_match_is_the_share_of_words_in_their_place():
    reward = resolve_reward("word_match")
    gold = {"answer": "a b c d"}
    assert [reward("q", text, gold) for text in ("a b  c d", "a b x d", "b c d", "a b c d e")] == [1.0, 0.75, 0.0, 0.8]
    assert reward("q", "0", {"answer": 0}) == 1.0
    for missing in ("", "  ", ["a"], None):
        assert reward("q", "a", {"answer": missing}) is None
