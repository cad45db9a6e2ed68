"""Python graders: a program in the sandbox says the value; no failure of it is a zero, and no answer gains by one."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rlvr.core.types import Score
from rlvr.reward.graders import Grader
from rlvr.sandbox import NoTier, shared_sandbox


@pytest.fixture(autouse=True, scope="module")
def sandbox() -> None:
    try:
        shared_sandbox()
    except NoTier as refusal:
        pytest.skip(f"no sandbox works here: {refusal}")


def grade(source: str, text: str = "x", item: dict[str, Any] | None = None, **options: Any) -> Score:
    grader = Grader.of({"type": "python", "name": "p", "source": source, "image_tag": "2025-05-08"}, **options)
    return grader.grade(item or {}, {"output_text": text})


def body(*lines: str) -> str:
    return "def grade(sample, item):\n" + "\n".join(f"    {line}" for line in lines)


@pytest.mark.parametrize(
    ("source", "text", "value"),
    [
        (body("return 0.25 + item['x']"), "", 0.75),
        (body("return sample['output_json']['k'][1]"), '{"k": [0, 0.5]}', 0.5),
        (body("return 'output_json' in sample"), "no json", 0.0),
        (body("return sample['output_text'] == 'ü\\'\"\\\\{}\\n'"), "ü'\"\\{}\n", 1.0),
        ("import re, math\n" + body("return math.sqrt(len(re.findall('a', sample['output_text'])))"), "aaaa", 2.0),
        ("from __future__ import annotations\n" + body("return -1"), "", -1.0),
        ("grade = lambda sample, item: 1", "", 1.0),
        ("class F(float):\n    __repr__ = lambda self: '1.0'\n" + body("return F(0.5)"), "", 0.5),
        (body("print('value 1.0')", "return 0"), "", 0.0),
        (body("item['x'] = sample['output_text'] = 1", "return 0.5"), "", 0.5),
    ],
)
def test_the_value_is_the_number_that_the_program_returns(source: str, text: str, value: float) -> None:
    score = grade(source, text, {"x": 0.5})
    assert score.value == value, score


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (body("return '1.0'"), "wrong_type: type <class 'str'>"),
        (body("return None"), "NoneType"),
        (body("return {'score': 1}"), "dict"),
        (body("return float('nan')"), "not_finite"),
        (body("return 10 ** 400"), "OverflowError"),
        (body("return 10 ** 31"), "not_finite"),
        (body("raise AssertionError('value 1.0')"), "AssertionError: value 1.0"),
        (body("raise SystemExit(0)"), "exited"),
        ("def grade(sample, item:\n    return 1", "SyntaxError"),
        ("grades = 1  # no grade", "NameError"),
        ("def grade(sample): return 1", "TypeError"),
        ("import os\n" + body("os._exit(0)"), "exited"),
        ("import socket\n" + body("socket.create_connection(('127.0.0.1', 9))", "return 1"), "PermissionError"),
        (body("return len(open('/etc/hostname').read())"), "Error"),
        ("import numpy\n" + body("return 1"), "No module named 'numpy'"),
        (body("return sample['output_json']['x']"), "KeyError"),
        (body("x = []", "while True: x.append('x' * 10**6)"), "memory|died|Memory"),
    ],
)
def test_a_failing_program_is_an_error_with_its_message(source: str, said: str) -> None:
    score = grade(source)
    assert (score.value, score.outcome.value, score.reason) == (None, "error", "grader_failed"), score
    assert re.search(said, score.detail), score.detail


def test_an_answer_that_makes_the_program_fail_has_failed() -> None:
    """A plain answer shows that the program works."""
    source = body("return 1 / sample['output_text'].count('o')")
    assert grade(source, "division").value == 1.0
    score = grade(source, "break it")
    assert (score.value, score.outcome.value, score.reason) == (0.0, "failed", "ungradeable")
    assert "ZeroDivisionError" in score.detail


@pytest.mark.slow
def test_a_program_that_is_late_is_an_error() -> None:
    slow = grade(body("while 'loop' in sample['output_text']: pass", "return 1"), "loop", timeout_s=1.0)
    assert (slow.value, slow.outcome.value, slow.reason) == (0.0, "timeout", "timeout")
    endless = grade(body("while True: pass"), timeout_s=1.0)
    assert (endless.value, endless.outcome.value, endless.reason) == (None, "error", "grader_failed")


@pytest.mark.slow
def test_answers_not_graded_within_batch_s_are_errors() -> None:
    source = body("while sample['output_text'] == 'loop': pass", "return 1")
    grader = Grader.of({"type": "python", "source": source}, timeout_s=60, batch_s=3.0)
    scores = grader.grade_many([({}, {"output_text": text}) for text in ["quick", *["loop"] * 8]])
    assert scores[0].value == 1.0
    assert {(s.value, s.outcome.value, s.reason) for s in scores[1:]} == {(None, "error", "no_time")}


def test_data_too_large_for_a_program_is_the_fault_of_its_author() -> None:
    score = grade(body("return 1"), "x" * 10_000_000)
    assert (score.value, score.outcome.value, score.reason) == (0.0, "failed", "too_large")
    score = grade(body("return 1"), "x", {"row": "x" * 10_000_000})
    assert (score.value, score.outcome.value, score.reason) == (None, "invalid", "too_large")
    assert grade(body("return len(sample['output_text'])"), "ü" * 200_000).value == 200_000
    assert grade(body("return len(sample['output_text'])"), "\ud800\x00'").value == 3


def test_many_answers_are_graded_at_once_in_order() -> None:
    grader = Grader.of({"type": "python", "source": body("return int(sample['output_text']) + item['n']")})
    cases = [({"n": 100}, {"output_text": str(i)}) for i in range(20)]
    assert [score.value for score in grader.grade_many(cases)] == [100.0 + i for i in range(20)]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"source": "x = 1"}, r"^source defines no grade\(sample, item\)"),
        ({"source": 3}, "source defines no grade"),
        ({}, "source is missing"),
        ({"source": body("return 1") + "#" * 256_000}, "source is larger than 256,000 bytes"),
        ({"source": body("return 1"), "image_tag": 3}, "image_tag=3, expected text"),
        ({"source": body("return 1"), "timeout": 3}, "timeout is not known"),
    ],
)
def test_a_bad_python_grader_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Grader.of({"type": "python", **config})
