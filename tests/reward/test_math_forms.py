"""Forms in which readers take an answer: inline formulas, spelled percents, labelled values; the lenient profile.

Each form stands beside its near misses. `rlvr/audits/data/` has them with solutions around; here are the bare answers.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from rlvr.audits.verifier_errors import measure, read_labelled
from rlvr.reward import resolve_reward
from rlvr.reward.math.compare import Conventions, compare_answers
from rlvr.reward.math.spelling import normalize
from rlvr.reward.text.final_answer import find_answer

AUTO = ("boxed", "hash", "answer_is", "whole")
ACCEPTED = [
    *(("28\\%", answer) for answer in ("28 pct", "28pct.", "28 PCT", "28 percentage", "28 per cent", "28\\text{ pct}")),
    *(("28\\%", answer) for answer in ("$28$ %", "$28$\\%", "\\(28\\) \\%", "28\\text{%}")),
    *(("0.28", answer) for answer in ("28 pct", "$28$ %", "28 percentage")),
    ("28", "28 pct"),
    *(
        ("$125$ miles", answer)
        for answer in ("125 miles", "125", "$125$ miles", "\\(125\\) mi", "$125 \\text{ miles}$")
    ),
    ("125\\text{ miles}", "$125$ miles"),
    ("(3,-1)", "$x = 3$, $y = -1$"),
    ("1, 2", "$1$ and $2$"),
    ("11:21", "V_1:V_2 = 11:21"),
    ("11:21", "V_{1} : V_{2} = 11 : 21"),
    ("V_1:V_2 = 11:21", "V₁:V₂ = 11:21"),
    ("V_2:V_1 = 21:11", "V_2:V_1 = 21:11"),
    ("1:2:3", "a:b:c = 1:2:3"),
    ("3:2", "\\text{boys}:\\text{girls} = 3:2"),
    *(("1", answer) for answer in ("|AB| = 1", "\\left|AB\\right| = 1", "\\lvert A'B' \\rvert = 1", "1 = |AB|")),
    *(("1", answer) for answer in ("\\overline{AB} = 1", "|\\overline{AB}| = 1", "|F_1F_2| = 1")),
    ("|AB| = 1", "1"),
    ("|AB| = |CD|", "|CD| = |AB|"),
    ("V_1 = 5", "V_{1} = 5"),
    ("x = 3 or y = -1", "y = -1 or x = 3"),
]
REFUSED = [
    *(("28\\%", answer) for answer in ("0.28 pct", "28 pct or 29 pct", "28 pct is wrong", "28 pct pct", "28 %%")),
    *(("28\\%", answer) for answer in ("28 miles", "28 pints", "28 degrees", "28 percentage points")),
    *(("0.28", answer) for answer in ("28", "2.8 pct", "$28$", "28 points")),
    ("28\\text{ cm}", "28 pct"),
    *(("$125$ miles", answer) for answer in ("125 km", "\\$125", "$152$ miles", "125 miles per hour")),
    *(("1234", answer) for answer in ("$1$ $234$", "\\(1\\) \\(234\\)", "1 $234$")),
    *(("12", answer) for answer in ("$3$ $4$", "$1$$2$", "$1$2")),
    *(("5", answer) for answer in ("$5$ or $6$", "$5$, $6$", "$5$ is wrong", "$5$ million", "$5 and $6")),
    *(
        ("11:21", answer)
        for answer in ("V_1:V_2 = 21:11", "V_1:V_2 = 22:42", "V_1:V_2 = 11:21 = 21:11", "a = b = 11:21")
    ),
    *(
        ("11:21", answer)
        for answer in ("V_2:V_1 = 11:21", "x_10:x_9 = 11:21", "V_1:V_1 = 11:21", "a:a:b = 11:21", "a:b:c = 11:21")
    ),
    *(
        ("11:21", answer)
        for answer in ("21:11 = 11:21", "not a:b = 11:21", "a:b = \\frac{11}{21}", "a:b = 11:21 or 1:2")
    ),
    ("V_1:V_2 = 11:21", "V_1:V_3 = 11:21"),
    *(("1", answer) for answer in ("|AB| = 2", "|AB| = 1 = 2", "|AB| = 2 = 1", "1 = 2", "|AB| < 1", "|AB| \\ne 1")),
    *(
        ("1", answer)
        for answer in ("|x| = 1", "|AB| = |CD| = 1", "|AB| = |CD|", "|AB| = 1 or 2", "2 = |AB| = 1", "|AB|")
    ),
    *(("|AB| = 1", answer) for answer in ("|CD| = 1", "|AB| = -1", "\\overline{CD} = 1")),
    ("5\\text{ cm}", "|AB| = 5\\text{ inches}"),
    *(("(3,-1)", answer) for answer in ("x = 3 or y = -1", "x = 3, or y = -1", "x = 3 or -1, y = -1")),
    ("(1,2)", "a = 1, b = 2"),
]


@pytest.mark.parametrize(("gold", "answer"), ACCEPTED)
def test_a_form_that_readers_accept(gold: str, answer: str) -> None:
    assert compare_answers(gold, answer, Conventions()) is True


@pytest.mark.parametrize(("gold", "answer"), REFUSED)
def test_a_near_miss_of_such_a_form(gold: str, answer: str) -> None:
    assert compare_answers(gold, answer, Conventions()) in (False, None)
    assert resolve_reward("math")("", f"\\boxed{{{answer}}}", {"answer": gold}) == 0.0


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Answer $9$", "9"),
        ("So.\n**Answer** $9$.", "9"),
        ("### The final answer \\(\\frac{2}{3}\\)\n", "\\frac{2}{3}"),
        ("The answer is 8.\nAnswer $9$", "9"),
    ],
)
def test_answer_and_one_formula_need_no_colon(text: str, found: str) -> None:
    assert find_answer(text, AUTO).text == found


@pytest.mark.parametrize(
    "text",
    [
        "Answer $9$ or $10$", "Answer $9$ is wrong.", "Answer $10$, not $9$", "Answer $9$ $10$", "Answer $10$",
        "If n is odd, answer $9$\nelse\nnothing.", "The answer $9$ is one of two.\nThe other is 10.", "answer 9 apples",
    ],
)  # fmt: skip
def test_no_other_line_that_begins_like_it(text: str) -> None:
    for name in ("math", "gsm8k"):
        assert resolve_reward(name)("", text, {"answer": "9" if name == "math" else "#### 9"}) == 0.0


def test_a_unit_after_a_formula_belongs_to_it() -> None:
    reward = resolve_reward("math", use_math_verify="never")

    def judge(gold: str, tail: str) -> float | None:
        return reward("", f"The answer is $5${tail}", {"answer": gold})

    assert judge("5\\text{ cm}", " cm.") == judge("5\\text{ cm}", ".") == judge("0.05", " %.") == 1.0
    assert judge("5", " apples.") == judge("5", " by symmetry.") == judge("5", ", since 2 + 3 = 5.") == 1.0
    assert judge("5\\text{ cm}", " inches.") == judge("5", " million.") == judge("5", " apples or $6$ pears.") == 0.0
    assert judge("5", ":$6$.") == judge("5", " : 6") == judge("5", "00.") == judge("5", " 1:2.") == 0.0
    assert reward("", "The answer is $(1,2)$ meters.", {"answer": "(1,2)"}) == 1.0  # no value has such a form


def lenient(**options: Any) -> Any:
    return resolve_reward("math", profile="lenient", **options)


def test_the_lenient_profile_follows_its_labels() -> None:
    """Rounding, several boxes, assignments; the strict one refuses all but what it accepts anyway."""
    rows = read_labelled("builtin-lenient")
    mistakes = [one.row["id"] for one in measure(rows, lenient(use_math_verify="never")).judged if one.mistake]
    assert mistakes == []
    strict = measure(rows, resolve_reward("math", use_math_verify="never"))
    assert [one.row["id"] for one in strict.judged if one.score.value] == ["assignments-007", "several-boxes-009"]


def test_the_strict_profile_follows_the_labels() -> None:
    reward = resolve_reward("math", use_math_verify="never")
    wrong = [one for one in measure(read_labelled("builtin"), reward).judged if one.mistake]
    assert [one.row["id"] for one in wrong if one.mistake == "false positive"] == []
    assert {one.score.reason for one in wrong} <= {"undecided", "unreadable"}  # these are math-verify's


def test_the_lenient_profile_chooses_the_boxes_itself() -> None:
    with pytest.raises(ValueError, match=r"on_many_boxes='join'.*leave it out"):
        lenient(on_many_boxes="join")
    with pytest.raises(ValueError, match=r"profile='lenent'.*did you mean"):
        resolve_reward("math", profile="lenent")


def test_a_rounded_percentage_is_measured_in_percent() -> None:
    rounded = Conventions(decimals="rounded")
    verdicts = [compare_answers("\\frac13", answer, rounded) for answer in ("33.33%", "33.80%", "33.3%", "33%")]
    assert verdicts == [True, False, True, False]


PIECES = [
    "$", "$ ", "$a", "$a$ ", "\\(", "\\)", "\\$", "$\\", "\nanswer $", "\nanswer $a$ ", "\nthe final answer **", "|A",
    "\nanswer \\( \\", "A_{", "\\overline{A", "a:b", "V_1:V_2=", "%", "% ", "pct ", "a_1=1, ", "=1", "\\boxed{1} ",
    "$5$ miles ", "answer is $5$ ", "or $", "|AB|",
]  # fmt: skip


@pytest.mark.parametrize("piece", PIECES)
def test_a_long_text_takes_no_long_time(piece: str) -> None:
    """100,000 characters of what the patterns begin with; a pattern that backtracks would take minutes."""
    start = time.process_time()
    normalize(piece * (20_000 // len(piece)))
    for text in (piece * (100_000 // len(piece)), "The answer is $5$ " + piece * (990 // len(piece))):
        for reward in (lenient(use_math_verify="never"), resolve_reward("gsm8k")):
            reward("", text, {"answer": "(1,2)" if reward.name == "math" else "#### 5"})
    assert time.process_time() - start < 5.0
