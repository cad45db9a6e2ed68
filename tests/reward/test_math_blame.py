"""Whose fault a pair without a verdict is: the answer's (failed), the task's (invalid), or the verifier's (error).

An answer must not be able to choose between failing and an error, so the attacks here try to be undecided or late.
"""

from __future__ import annotations

import importlib.util

import pytest

from rlvr.core.types import Outcome, Score, Task, Trajectory
from rlvr.reward import resolve_reward
from rlvr.reward.math.algebra import TooLarge
from rlvr.reward.math.compare import Conventions, compare_answers
from rlvr.reward.math.math_reward import _score_exception
from tests.kit.slow_cases import mark_slow_but

peer = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed")


def judge(gold: str, answer: str, **options: object) -> Score:
    trajectory = Trajectory("", [], f"\\boxed{{{answer}}}", [], task=Task("t", "", {"answer": gold}))
    return resolve_reward("math", **options).score([trajectory])[0]


def nest(function: str, depth: int, power: int) -> str:
    """Each level repeats the one inside in every term of a power: depth 6 would have 20^6 terms."""
    text = "x"
    for _ in range(depth):
        text = f"{function}(({text}+1)^{{{power}}})"
    return text


GOLDS = [
    "5", "0", "x+1", "\\sin x", "\\sqrt2", "\\ln 4", "[0,1]", "(-\\infty,2)\\cup(3,\\infty)", "\\{1,2\\}", "(1,2)",
    "x\\equiv 3\\pmod 7", "y=\\sin x", "\\sqrt{2+\\sqrt3}", "n!", "|x|", "\\tan 20^\\circ", "\\binom{n}{k}", "3:4",
    "\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\infty", "e^{i\\theta}", "\\text{east}", "\\text{(C)}", "25\\%",
]  # fmt: skip
WITHOUT_A_NUMBER = [
    "(1/2)!", "\\sqrt{\\infty}+1", "\\sin(\\infty)", "\\tan 90^\\circ", "\\tan\\frac{\\pi}{2}", "x!!", "(1/2)!!",
    "0^{-1}", "\\infty-\\infty", "\\frac{\\infty}{\\infty}", "\\infty^0", "0\\cdot\\infty", "e^{e^{e^{9}}}", "\\ln 0",
    "\\sin(10^{30})", "\\log_1 5", "\\log_0 5", "e^{\\ln 0}", "\\arcsin 2", "\\arctan i", "\\lfloor x\\rfloor!",
    "10\\bmod 0", "10\\bmod\\infty", "x\\equiv i\\pmod i", "x\\equiv 3\\pmod{\\infty}", "x\\equiv 3\\pmod 0",
    "|x|<i", "\\mathbb{R}\\setminus\\{i\\}", "\\mathbb{R}\\setminus[i,2]", "\\{x\\mid x\\in\\{x\\mid x>1\\}\\}",
    "\\binom{n}{500}",
]  # fmt: skip
MONSTERS = [
    nest("\\sin", 4, 20), nest("\\sin", 6, 20), nest("\\cos", 8, 40), nest("\\ln", 5, 12), nest("|\\sin|", 5, 9),
    "\\sqrt{2+" * 24 + "2" + "}" * 24, "\\sin(" * 24 + "1" + ")" * 24, "\\exp(" * 20 + "1" + ")" * 20, "|" * 300,
    "+".join(f"\\sin {i}" for i in range(1, 110)), "\\cdot ".join(f"(\\sin {i}+x)" for i in range(1, 60)),
    "(\\sin 1+\\sin 2+\\sin 3)^{16}", "(\\sin 1+x)^{40}", "9" * 999, "0." + "9" * 990, "2^{2^{2^{9}}}", "501!!",
    "2^{1000}!!", "170!^{9}", "\\sqrt{" + "7" * 190 + "}", "\\binom{x+y+z}{12}", "\\{" * 200, "{\\color{red}" * 60,
    "\\{" * 90 + "1" + "\\}" * 90, "\\{x|" * 40 + "x>1" + "\\}" * 40, "1\\bmod " * 60 + "2", "\\cos 1^\\circ" * 70,
    "\\underline{" * 90 + "5" + "}" * 90, "{" * 450 + "\\over" + "}" * 450, "\\text{a}" * 120, "(" * 400 + ")" * 400,
    "\\mathbb{R}\\setminus\\{" + ",".join(map(str, range(190))) + "\\}", ",".join(f"\\sin {i}" for i in range(110)),
]  # fmt: skip


INDETERMINATE = [
    "1^{\\infty}", "(2-1)^\\infty", "\\infty^0", "(\\infty)^{0}", "{\\infty}^0", "(\\infty+1)^0",
    "\\frac{\\infty+1}{\\infty+1}", "\\frac{\\infty}{\\infty}", "\\infty-\\infty", "0\\cdot\\infty",
]  # fmt: skip


@pytest.mark.parametrize("answer", INDETERMINATE)
def test_an_indeterminate_form_is_no_number(answer: str) -> None:
    assert [judge(gold, answer).outcome for gold in ("0", "1", "\\infty")] == [Outcome.FAILED] * 3


@pytest.mark.parametrize("answer", mark_slow_but(20, [*WITHOUT_A_NUMBER, *MONSTERS]))
def test_an_answer_cannot_choose_to_be_an_error(answer: str) -> None:
    for gold in GOLDS:
        if gold != "5" or "\\underline" not in answer:  # which is 5
            score = judge(gold, answer, use_math_verify="never")
            assert score.outcome is Outcome.FAILED, (gold, score)


@peer
@pytest.mark.parametrize("gold", mark_slow_but(2, ["5", "\\sin x", "[0,1]", "\\int_0^1 x^2\\,dx"]))
def test_nor_by_what_math_verify_takes_long_for(gold: str) -> None:
    for answer in ("\\int_0^1 x^{x^x}dx", "\\sum_{k=1}^{\\infty}\\frac{\\sin k}{k^3}", "\\lim_{x\\to 0} x^{x^{1/x}}"):
        assert judge(gold, answer).outcome in (Outcome.FAILED, Outcome.TIMEOUT)
    for answer in ("(\\sin 1+1)(\\sin 2+1)" * 5, "\\cos 1^\\circ" * 40, "9" * 400, "500!!", "\\{1,\\sin 1\\}"):
        assert judge(gold, answer).outcome in (Outcome.FAILED, Outcome.TIMEOUT)


@peer
def test_a_late_comparison_of_well_formed_sides_is_an_error() -> None:
    """The numbers of both agree, so the answer has the gold's value as far as anything is known."""
    score = judge("\\sin 2x", "2\\sin x\\cos x", timeout_s=1e-6)
    assert (score.outcome, score.reason) == (Outcome.ERROR, "timeout")
    assert judge("\\sin 2x", "2\\sin x\\cos x", timeout_s=20).outcome is Outcome.PASSED
    assert judge("\\sin 2x", "2\\sin x\\sin x", timeout_s=1e-6).outcome is Outcome.FAILED
    assert judge("\\sin 2x", "\\int_0^x 2\\cos 2t\\,dt", timeout_s=1e-6).outcome is Outcome.TIMEOUT


def test_an_undecided_comparison_is_an_error_where_the_numbers_agree() -> None:
    for gold, answer in (("\\sin 2x", "2\\sin x\\cos x"), ("n!", "n(n-1)!"), ("2^{n+1}", "2\\cdot 2^n")):
        score = judge(gold, answer, use_math_verify="never")
        assert (score.outcome, score.reason) == (Outcome.ERROR, "undecided")
        assert judge(gold, f"{answer}+1", use_math_verify="never").reason == "wrong_value"


def test_an_answer_that_is_not_read_has_failed() -> None:
    for answer in ("\\foo{5}", "5 \\$ 6 \\\\ 7", "\\int_0^5 dx", "\\lim x"):
        assert judge("5", answer, use_math_verify="never").outcome is Outcome.FAILED
    assert judge("5", "\\int_0^5 dx", use_math_verify="never").reason == "unreadable"


@pytest.mark.parametrize("gold", ["2^{2^{2^{20}}}", "((5!)!)!", "(" * 60 + ")" * 60, "\\tan 90^\\circ", "\\foo{5}"])
def test_a_gold_that_cannot_be_compared_makes_the_task_invalid(gold: str) -> None:
    """Whatever the answer is, but for the gold's own spelling."""
    for answer in ("5", "x+1", "\\foo{6}", "\\text{east}", "2^{2^{2^{21}}}"):
        score = judge(gold, answer, use_math_verify="never")
        assert (score.outcome, score.reason) == (Outcome.INVALID, "unreadable_gold")
        assert "meta['answer']" in score.detail
    assert judge(gold, gold, use_math_verify="never").outcome is Outcome.PASSED


@peer
def test_a_gold_that_math_verify_reads_is_none_of_these() -> None:
    assert judge("\\int_0^1 x^2\\,dx", "\\frac13").outcome is Outcome.PASSED
    assert judge("\\int_0^1 x^2\\,dx", "\\frac12").reason == "wrong_value"
    assert judge("\\int_0^1 x^2\\,dx", "\\frac12", use_math_verify="never").reason == "unreadable_gold"


def test_an_exception_is_ours_where_the_answer_is_well_formed() -> None:
    assert _score_exception("x^2+1", KeyError("x")).outcome is Outcome.ERROR
    for answer in ("\\foo", "9" * 2000, "(" * 60, "\\ln 0"):
        assert _score_exception(answer, KeyError("x")).outcome is Outcome.FAILED


def test_nested_functions_have_a_cap_that_is_far_from_answers() -> None:
    with pytest.raises(TooLarge, match="at most"):
        compare_answers("5", nest("\\sin", 3, 20), Conventions())
    nested = "\\sqrt{2+\\sqrt{3+\\sin(x^2+\\cos(x+1))}}"
    assert compare_answers(nested, f"\\frac{{2{nested}}}{{2}}", Conventions()) is True


HOSTILE = (
    "9**9**9 | 9^{9^{9}} | 10^{10^{10}} | (x+1)^{500} | (a+b+c+d+e)^{60} | \\sum_{k=1}^{1000000}k | 999999! | "
    "\\binom{10^9}{5\\cdot 10^8} | 5\\pmod{0} | \\log_1 5 | 0^0 | 5/0 | \\infty-\\infty | \\tan 90^\\circ | "
    "i^{i^{i}} | \ud800 | \x005 | nan | inf | None | 5!!!!!!!!!! | \\sqrt[0]{5} | 5 or 6 | \\pm5 | "
    "\\cancel{6}5 | 5%5 | 5\\ne 6"
)
LONG = ["(" * 20_000, "{" * 3000 + "}" * 3000, "1/" * 5000 + "1", "x" * 30_000, "\\frac" * 3000, "1" * 200_000]
LONG += ["\\sqrt{" * 500 + "2" + "}" * 500, "\\begin{pmatrix}" + "1&" * 5000 + "1\\end{pmatrix}", "0." + "3" * 100_000]


@pytest.mark.parametrize("answer", [*HOSTILE.split(" | "), *LONG], ids=lambda answer: repr(answer[:20]))
def test_no_answer_avoids_its_0_and_none_earns(answer: str) -> None:
    for gold in ("5", "\\frac12", "x+1", "(1,2)"):
        for use in ("never", "auto"):
            score = judge(gold, answer, use_math_verify=use)
            assert score.value == 0.0, (gold, use, score)


@pytest.mark.parametrize("answer", ["|A|-0=0", "|x|=0", "\\sin x=2", "\\sqrt{x}=y", "2^x=y", "\\ln x = 3"])
def test_another_equation_of_functions_is_wrong_without_math_verify_too(answer: str) -> None:
    score = judge("y=2x+3", answer, use_math_verify="never")
    assert (score.outcome, score.reason) == (Outcome.FAILED, "wrong_value")
    same = judge("\\sin 2x=y", "4\\sin x\\cos x=2y", use_math_verify="never")
    assert (same.outcome, same.reason) == (Outcome.ERROR, "undecided")
