"""The reward `math` as a whole: reasons, hostile answers, real data."""

from __future__ import annotations

import importlib.util
import json
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr.core.types import Outcome, StopReason, Task, Trajectory
from rlvr.reward import resolve_reward

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
peer = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed")


def score(response, gold, stop=StopReason.STOP, **options):
    task = Task("t", "", {} if gold is None else {"answer": gold})
    return resolve_reward("math", **options).score([Trajectory("", [], response, [], task=task, stop_reason=stop)])[0]


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").strip().split("\n")]


def test_reasons():
    assert score("\\boxed{0.5}", "\\frac12").outcome is Outcome.PASSED
    assert score("\\boxed{0.6}", "\\frac12").reason == "wrong_value"
    assert score("I will", "1", StopReason.LENGTH).reason == "wrong_value"  # short enough to be an answer
    assert score("I\nwill", "1", StopReason.LENGTH).reason == "truncated"
    assert score("\\boxed{1", "1", StopReason.LENGTH).reason == "truncated"
    assert score("\\boxed{}", "1").reason == "no_answer"
    assert score("\\boxed{" + "(" * 60 + "}", "1").reason == "too_large"
    for gold in (None, "", True, [1], float("nan"), "\\boxed{}"):
        assert (score("1", gold).outcome, score("1", gold).reason) == (Outcome.INVALID, "no_gold")


def test_gold_may_be_a_number_or_a_whole_solution():
    for gold in (18, 18.0, "18", "so \\boxed{18}", "9 * 2 = 18\n#### 18"):
        assert score("\\boxed{18}", gold).value == 1.0


def test_bad_options_are_refused():
    for options in ({"extract": "box"}, {"extract": []}, {"percent": "yes"}, {"timeout_s": 0}, {"units": "some"}):
        with pytest.raises(ValueError, match="reward 'math'"):
            resolve_reward("math", **options)


@peer
def test_math_verify_decides_pairs_without_a_normal_form_from_any_thread():
    got = []
    thread = threading.Thread(target=lambda: got.append(score("\\boxed{2\\sin x\\cos x}", "\\sin 2x", timeout_s=20)))
    thread.start()
    thread.join()
    assert got[0].outcome is Outcome.PASSED
    assert score("\\boxed{2\\sin x\\cos x}", "\\sin 2x", use_math_verify="never").reason == "undecided"


HOSTILE = [
    "9^9^9^9", "2^{2^{2^{2^{2^2}}}}", "100000!", "((((5!)!)!)!)!", "9" * 100_000, "(x+y+z+a+b+c)^{40}", "(" * 900,
    "\\sqrt{" * 100, "\\frac" * 200, "{" * 400, "1/(x+" * 100, "+".join(f"x^{{{i}}}/(x+{i})" for i in range(1, 60)),
    "\\int_0^{9^{9^9}} x^{x^x} dx", "\\prod_{k=1}^{99999999} k", "\\ud800", "\x00", "\u202e5", "1e999999999",
]  # fmt: skip


@pytest.mark.parametrize("answer", HOSTILE)
def test_a_hostile_answer_fails_and_is_never_an_error(answer):
    assert score("\\boxed{" + answer + "}", "7").outcome in (Outcome.FAILED, Outcome.TIMEOUT)


@pytest.mark.parametrize("text", ["\\boxed{", "answer is ", "9", "x", "\u00bd\u221a", "#", "\\[", "$"])
def test_ten_megabytes(text):
    assert score(text * (10_000_000 // len(text)), "7").outcome is Outcome.FAILED


TOKENS = [
    *(
        "{",
        "}",
        "(",
        ")",
        "[",
        "]",
        "^",
        "_",
        "1",
        "23",
        "x",
        "e",
        "i",
        ",",
        "=",
        "<",
        "!",
        "|",
        "%",
        "&",
        ".",
        "-",
        "+",
    ),
    *(" ", "\\frac", "\\sqrt", "\\pi", "\\pm", "\\cup", "\\text{", "\\\\", "\\in ", "\\log", "\\lbrace "),
    *("\\begin{pmatrix}", "\\end{pmatrix}", "$", "$5$", "\\(", ":", "a:b", "|AB|", "pct", "or", "x_1=", "\\boxed{1}"),
]
VECTOR = "\\begin{pmatrix}1\\\\2\\end{pmatrix}"
GOLDS = st.sampled_from(["5", "(1,2)", "\\{1,2\\}", "x>3", "x^2+1", "\\text{east}", VECTOR, "y=2x+3"])


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(max_size=200), st.lists(st.sampled_from(TOKENS), max_size=60).map("".join)), GOLDS)
def test_an_answer_never_causes_an_error(answer, gold):
    for response in (answer, "\\boxed{" + answer + "}", f"Answer ${answer}$", f"The answer is $5$ {answer}"):
        strict = score(response, gold, use_math_verify="never").outcome
        lenient = score(response, gold, use_math_verify="never", profile="lenient").outcome
        assert (strict, lenient) in (
            (Outcome.PASSED, Outcome.PASSED),
            (Outcome.FAILED, Outcome.FAILED),
            (Outcome.FAILED, Outcome.PASSED),
        )


@pytest.mark.skipif(not (DATA / "gsm8k").is_dir(), reason="the GSM8K files are not beside the project")
def test_every_gold_solution_of_gsm8k():
    reward = resolve_reward("math", use_math_verify="never")
    rows = [row["answer"] for name in ("train", "test") for row in read_rows(DATA / "gsm8k" / f"{name}.jsonl")]
    assert sum(reward("", row, {"answer": row}) or 0 for row in rows) == len(rows) == 8792


@pytest.mark.skipif(not (DATA / "math").is_dir(), reason="the MATH-500 file is not beside the project")
def test_every_solution_of_math_500_and_no_other_gold():
    """Each solution has its gold; the golds of two problems are equal only where their values are."""
    reward = resolve_reward("math", use_math_verify="never")
    rows = read_rows(DATA / "math" / "math500_test.jsonl")
    assert sum(reward("", row["solution"], {"answer": row["answer"]}) or 0 for row in rows) == len(rows) == 500
    golds = sorted({row["answer"] for row in rows})
    pairs = {(a, b) for a in golds for b in golds if a < b and reward("", f"\\boxed{{{b}}}", {"answer": a})}
    assert pairs == EQUAL


# Another spelling, a unit left out, a base converted, a name left out, a list in another order.
EQUAL = {
    ("-2,1", "1,-2"), ("10,\\!080", "10080"), ("120", "120^\\circ"), ("15", "15\\mbox{ cm}^2"),
    ("2 \\sqrt{5}", "2\\sqrt{5}"), ("30", "30^\\circ"), ("36", "36^\\circ"), ("36", "40_9"), ("36", "\\$36"),
    ("36^\\circ", "40_9"), ("42", "52_8"), ("5", "x=5"), ("90", "90^\\circ"),
    ("\\frac14", "\\frac{1}{4}"),
}  # fmt: skip
