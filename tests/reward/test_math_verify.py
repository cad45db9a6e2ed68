"""Pairs that go to math-verify: from several threads and beside hostile ones."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlvr.core.types import Outcome, Task, Trajectory
from rlvr.reward import resolve_reward

pytestmark = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed")
HONEST = ("\\sin 2x", "2\\sin x\\cos x")


def outcome(gold: str, answer: str) -> Outcome:
    task = Task("t", "", {"answer": gold})
    reward = resolve_reward("math", timeout_s=2.0)
    return reward.score([Trajectory("", [], f"\\boxed{{{answer}}}", [], task=task)])[0].outcome


@pytest.mark.slow
def test_an_honest_pair_is_never_late_because_of_another_threads_hostile_one():
    hostile = ("\\int_0^1 x^2 dx", "\\sum_{k=1}^{\\infty} \\frac{\\sin k}{k^3}")
    with ThreadPoolExecutor(4) as threads:
        got = list(threads.map(lambda pair: outcome(*pair), [HONEST, hostile] * 4))
    assert got[::2] == [Outcome.PASSED] * 4
    assert set(got[1::2]) <= {Outcome.FAILED, Outcome.TIMEOUT}


@pytest.mark.slow
def test_a_killed_worker_does_not_delay_the_next_pair():
    from rlvr.reward.math import math_reward

    assert outcome(*HONEST) is Outcome.PASSED
    for worker in list(math_reward._worker_pool().idle):
        worker.close()
    assert outcome(*HONEST) is Outcome.PASSED


@pytest.mark.parametrize("answer", ["x^{9^{9^9}}", "\\int_0^1 10^{99999} dx", "\\int_0^1 (10^{8})! dx"])
def test_numbers_that_only_a_kill_would_stop_are_not_asked(answer):
    assert outcome("\\int_0^1 x^2 dx", answer) is Outcome.FAILED


@pytest.mark.parametrize(
    ("gold", "form"),
    [("5", form) for form in (
        "\\ne %s", "\\le %s", "\\lt %s", "\\notin %s", "\\neg %s", "\\foo %s", "\\foo{6}%s", "\\bar %s", "\\sum %s",
        "\\max %s", "\\lceil %s", "\\cdot %s", "%s\\cdot", "%s\\\\6", "%s,\\ldots", "%s\\ldots", "%s\\to 6",
        "%s\\le 6", "%s\\setminus 6", "%s\\prime", "\\phantom{%s}", "\\not %s", "\\vee %s", "6\\Rightarrow %s",
        "%s\\approx 6", "%s\\sim 9", "\\begin{cases}%s\\\\6\\end{cases}", "%s\\text{ crores}", "%s\\pmod{6}",
    )]
    + [("x=5", "\\ne %s"), ("x=5", "%s'"), ("x=5", "\\sum %s"), ("\\{1,2\\}", "%s'"), ("\\{1,2\\}", "%s^c")]
    + [("(1,2)", "%s\\setminus\\{1.5\\}"), ("(1,2)", "\\mathbb{R}\\setminus %s"), ("x>5", "\\neg(%s)")]
    + [("50\\%", "%s'"), ("50\\%", "%s \\cap (100,101)"), ("\\infty", "%s 9"), ("\\ln 4", "2%s/2 \\ne 9")]
    + [("\\mathbb{R}", "%s\\setminus\\{1\\}"), ("\\ln 4", "\\approx %s + 0"), ("\\ln 4", "0 + %s\\approx 9")],
)  # fmt: skip
def test_an_answer_that_math_verify_would_read_in_part_is_refused(gold: str, form: str) -> None:
    assert outcome(gold, form.replace("%s", gold)) is Outcome.FAILED


def test_a_gold_that_math_verify_reads_in_part_is_not_compared() -> None:
    assert outcome("f'(x)", "f(x)") is Outcome.FAILED
    assert outcome("f'(x) = 2x", "f'(x) = x + x") is Outcome.PASSED


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("\\ln 4", "2\\ln 2"), ("\\ln 4", "2\\ln 2 \\approx 1.386"), ("\\frac12", "\\int_0^1 x\\,dx"),
        ("6", "\\sum_{k=1}^{3} k"),
        ("3", "\\max(1,3)"), ("\\tan^{-1}(2)", "\\arctan(2)"), ("\\binom{n}{2}", "\\frac{n(n-1)}{2}"),
        ("0", "\\lim_{n\\to\\infty} \\frac1n"), ("1", "\\sum_{k=1}^\\infty 2^{-k}"),
        ("(-\\infty,1)\\cup(1,\\infty)", "\\mathbb{R}\\setminus\\{1\\}"), ("\\frac12", "\\frac12 \\approx 50\\%"),
        ("12\\text{ cm}", "12\\text{ cm} \\approx 4.7\\text{ inches}"), ("\\pi", "\\pi \\approx 3.14"),
    ],
)  # fmt: skip
def test_text_that_math_verify_reads_whole_is_handed_over(gold: str, answer: str) -> None:
    assert outcome(gold, answer) is Outcome.PASSED
