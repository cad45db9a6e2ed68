"""Answers beside golds, right and wrong: every line of math_rows.txt, with math-verify and without it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from rlvr.core.types import Outcome, Score, Task, Trajectory
from rlvr.reward import resolve_reward

LINES = (Path(__file__).parent / "math_rows.txt").read_text(encoding="utf-8").splitlines()
peer = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed")


def read_rows(line: str) -> list[tuple[str, str, bool]]:
    gold, _, answers = line.partition(" ++ ")
    right, _, wrong = answers.partition(" -- ")
    return [
        (gold, answer.strip(), label)
        for text, label in ((right, True), (wrong, False))
        for answer in text.split(" ;; ")
    ]


ROWS = [row for line in LINES if line and not line.startswith("#") for row in read_rows(line)]


def judge(gold: str, answer: str, **options: str) -> Score:
    trajectory = Trajectory("", [], f"\\boxed{{{answer}}}", [], task=Task("t", "", {"answer": gold}))
    return resolve_reward("math", **options).score([trajectory])[0]


def find_mistakes(**options: str) -> list[tuple[str, str, bool, str]]:
    scores = [(gold, answer, label, judge(gold, answer, **options)) for gold, answer, label in ROWS]
    return [(gold, answer, label, score.reason) for gold, answer, label, score in scores if score.value != float(label)]


def test_half_of_the_rows_are_wrong_answers():
    wrong = sum(not label for *_, label in ROWS)
    assert len(ROWS) > 1700
    assert 0.5 <= wrong / len(ROWS) <= 0.6


FACTORIALS = [("n!", answer, True, "undecided") for answer in ("n\\cdot (n-1)!", "n(n-1)!")]


def test_without_math_verify_identities_are_left_undecided():
    """Identities of functions, as errors and not as 0. Two forms are not read without it."""
    mistakes = find_mistakes(use_math_verify="never")
    assert [row[1] for row in mistakes if row[3] != "undecided"] == [
        "\\gcd(12,18)",
        "\\frac12\\begin{pmatrix}1&0\\\\0&1\\end{pmatrix}",
    ]
    assert {gold for gold, _, label, reason in mistakes if reason == "undecided" and label} == {
        "\\sin x", "n!", "\\cos 2x", "2^{n+1}", "e^{x+1}", "|x-2|", "\\sin 2x", "\\tan^2 x+1", "1",
    }  # fmt: skip
    assert [row for row in mistakes if not row[2]] == [("|x-2|", "2-x", False, "undecided")]


@peer
def test_with_math_verify_every_row_is_judged_as_labelled():
    assert find_mistakes() == FACTORIALS


def test_every_gold_equals_itself_in_another_spelling():
    for gold in sorted({gold for gold, *_ in ROWS}):
        assert judge(gold, f"\\underline{{ {gold} }}").outcome is Outcome.PASSED, gold
