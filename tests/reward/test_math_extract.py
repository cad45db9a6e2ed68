"""Where the final answer of a solution is looked for."""

from __future__ import annotations

import pytest

from rlvr.reward.text.final_answer import ExtractedAnswer, find_answer

AUTO = ("boxed", "hash", "answer_is", "whole")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("so \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\fbox{3} or \\boxed {4}", "4"),
        ("\\boxed 7", "7"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("work\n#### 1,234", "1,234"),
        ("The final answer is $\\frac{2}{3}$.", "\\frac{2}{3}"),
        ("The answer is 3.5. Done", "3.5"),
        ("answer: 5", "5"),
        ("**Answer:** 5", "5"),
        ("**Answer**: $5$ apples", "5"),  # what follows a formula is no part of it
        ("**The answer is 5**", "5"),
        ("**Answer: 5**, as said", "5"),
        ("The answer is 5**2", "5**2"),  # a power, and no end of bold print
        ("The answer is 5 ** 2", "5 ** 2"),
        ("Answer:\n5\nas said", "5"),
        ("The answer is\n\\[\n\\frac{2}{3}\n\\]", "\\frac{2}{3}"),
        ("The answer is:\n\n$$\n7\n$$\nas said", "7"),
        ("42", "42"),
        ("<think>\\boxed{1}</think> \\boxed{2}", "2"),
    ],
)
def test_found(text, found):
    assert find_answer(text, AUTO) == ExtractedAnswer(found)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("The answer is 5, so \\boxed{}", "no_answer"),  # never the prose instead
        ("The answer is 5, so \\boxed{5", "unclosed"),
        ("", "no_answer"),
        ("I do not know.\nReally.", "no_answer"),
        ("<think>\\boxed{1}</think> well\nwell", "no_answer"),
        ("#### " + "1" * 2000, "too_large"),
    ],
)
def test_not_found(text, problem):
    assert find_answer(text, AUTO) == ExtractedAnswer(problem=problem)


def test_many_boxes_by_convention():
    text = "\\boxed{1}, \\boxed{2}"
    got = {many: find_answer(text, AUTO, many) for many in ("last", "first", "agree", "join")}
    assert got == {
        "last": ExtractedAnswer("2"),
        "first": ExtractedAnswer("1"),
        "agree": ExtractedAnswer(problem="many_answers"),
        "join": ExtractedAnswer("1, 2"),
    }
