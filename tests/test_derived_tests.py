"""Which tests follow from the examples in a prompt, and what is no example."""

from __future__ import annotations

import builtins
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr.core.types import Outcome
from rlvr.reward import resolve_reward
from rlvr.reward.code.derived_tests import MAX_TESTS, derive_tests
from rlvr.reward.signatures import Case

SEED = "Write a function to calculate the nth Fibonacci number"
FIB = "Write a Python function fib(n) that returns the nth Fibonacci number. "
LEET = "def two_sum(nums, target):\n"


@pytest.mark.parametrize(
    ("prompt", "tests"),
    [
        (f"{FIB}fib(10) = 55", ["assert fib(10) == 55"]),
        (f"{FIB}fib(10) == 55.", ["assert fib(10) == 55"]),
        (f"{SEED}, for example `fib(10) = 55` and `fib(2) -> 1`.", ["assert fib(10) == 55", "assert fib(2) == 1"]),
        (
            f"{SEED}: fib(1) = 1, fib(2) = 1; fib(10) = 55",
            ["assert fib(1) == 1", "assert fib(2) == 1", "assert fib(10) == 55"],
        ),
        (f"{FIB}fib(10) = 55 and fib(0) = 0.", ["assert fib(10) == 55", "assert fib(0) == 0"]),
        (f"{FIB}`fib(10)` should return `55`. It has to be fast.", ["assert fib(10) == 55"]),
        (f"{FIB}(fib(10) is 55)", ["assert fib(10) == 55"]),
        (
            "Write a function f.\n\nExamples:\n- f(2) -> 3\n- f(-1) → 0\n* f(5) => 6  # one more",
            ["assert f(2) == 3", "assert f(-1) == 0", "assert f(5) == 6"],
        ),
        ("Implement reverse(s). reverse('a. b, c') returns 'c ,b .a'.", ["assert reverse('a. b, c') == 'c ,b .a'"]),
        ("Write a function.\n>>> f(3)\n9\n>>> f(4)\n16\n", ["assert f(3) == 9", "assert f(4) == 16"]),
        (
            'Complete this:\n\ndef mean(xs):\n    """The mean.\n\n    >>> mean([1, 2])\n    1.5\n    """\n',
            ["assert mean([1, 2]) == 1.5"],
        ),
        (
            "Write a function.\nYour code should pass these tests:\nassert add(1, 2) == 3\nassert add(x=1, y=-1) == 0",
            ["assert add(1, 2) == 3", "assert add(x=1, y=-1) == 0"],
        ),
        (
            f"{LEET}Input: nums = [2, 7], target = 9\nOutput: [0, 1]\nExplanation: 2 + 7 = 9\n",
            ["assert two_sum([2, 7], 9) == [0, 1]"],
        ),
        (f"{FIB}\nInput: 10\nOutput: 55\n\nInput: 0\nOutput: 0", ["assert fib(10) == 55", "assert fib(0) == 0"]),
        (f"{FIB}\nInput: 10, Output: 55", ["assert fib(10) == 55"]),
        (f"{FIB}\n**Input:** `fib(10)` -> **Output:** `55`", ["assert fib(10) == 55"]),
        (
            "Write a program that reads numbers and prints their sum.\n\nInput:\n2\n1 2\n\nOutput:\n3\n",
            [{"input": "2\n1 2\n", "output": "3"}],
        ),
        (
            "Write a script that reads n from stdin.\nSample Input 1: 5\nSample Output 1: 120\n",
            [{"input": "5\n", "output": "120"}],
        ),
        ("Fix the bug in `def f(x): return x`. f(2) should return 3; now f(2) returns 2.", ["assert f(2) == 3"]),
        (f"{SEED}. fib(10) = 55", ["assert fib(10) == 55"]),
        (f"{SEED} (e.g. fib(10) = 55).", ["assert fib(10) == 55"]),
        ("Write a function named fib that is fast.\nInput: 10\nOutput: 55", ["assert fib(10) == 55"]),
        ("Translate `int f(int n)` from Java to Python. f(2) -> 3", ["assert f(2) == 3"]),
        ("Write a Python function that parses logs, for example count('a b') = 2", ["assert count('a b') == 2"]),
        ("Write a Python function that counts words. count_words('a b') = 2", ["assert count_words('a b') == 2"]),
        ("Write a function `fib`. fib(10) = 55, g(1) = 2", ["assert fib(10) == 55"]),
        (f"{FIB}fib(10) = 55\nHandle errors and edge cases.", ["assert fib(10) == 55"]),
        (f"{FIB}fib(10) = 55. math.sqrt(16) = 4, sqrt(9) = 3.", ["assert fib(10) == 55"]),  # facts beside the task
    ],
)
def test_an_example_with_values_becomes_a_test(prompt: str, tests: list[object]) -> None:
    assert derive_tests(prompt) == tests


@pytest.mark.parametrize(
    "prompt",
    [
        SEED,
        f"{FIB}For n = 10 this is slow.",
        f"{FIB}fib(10) is slow.",
        f"{FIB}fib(10) = 55 takes 3 seconds.",
        f"{FIB}It needs fib(10) = 55 calls.",
        f"{FIB}fib(10) = fib(9) + fib(8)",
        f"{FIB}fib(n) = 55 for n = 10",
        f"{FIB}fib(10) is not 55.",
        f"{FIB}It must not say that fib(10) = 56.",
        f"{FIB}My code says fib(10) = 56 instead of 55.",
        f"{FIB}If fib(10) = 55, it is right.",
        f"{FIB}Is fib(10) = 55?",
        f"{FIB}fib(10) = 55 or 56",
        f"{FIB}fib(10) = 5 * 11",
        f"{FIB}fib(10) = 55, 56",
        f"{FIB}fib(10) = 55... fib(11) = 89...",
        f"{FIB}fib(10) = 1,000",
        f"{FIB}fib(10) = 5!",
        f"{FIB}2 fib(10) = 110",
        f"{FIB}1 + fib(10) = 56",
        f"{FIB}fib(9) + fib(10) = 89",
        f"{FIB}self.fib(10) = 55",
        f"{FIB}x = fib(10) == 55",
        f"{FIB}fib(10) = 55 = fib(5) * 11",
        f"{FIB}fib(10) ≈ 55, about fib(10) = 55",
        f"{FIB}fib(10) = 55 and fib(10) = 56.",  # one of the two is no example
        f"{FIB}fib(2) = 5. That is what my code says.\nIt is wrong.",
        f"{FIB}fib(10) = 56. This is what you get without a base case.",
        f"{FIB}sqrt(2) = 1.414",
        f"{FIB}fib(0.5) = 0.3",  # may be rounded
        f"{FIB}fib(10) = None",  # a function that does nothing returns it
        f"{FIB}fib(10) = ...",
        f"{FIB}len('abc') = 3, sum([1, 2]) = 3",  # of Python's functions every answer passes them
        "Write a function sum(xs).\nassert sum([1, 2]) == 3",
        f"{SEED}, where F(0) = 0 and F(1) = 1.",  # mathematics, not the name of a function
        f"{SEED}: f(n) = f(n - 1) + f(n - 2), f(0) = 0, f(1) = 1.",
        f"{SEED}. Let f(0) = 0.",
        f"{SEED}. Use dp(0) = 1.",
        f"{SEED}. sqrt(16) = 4.",
        f"{SEED}. f(1) = 1, g(1) = 2.",  # which of the two is asked for?
        f"{SEED}.\nInput: 10\nOutput: 55",  # no name to call
        f"{SEED}. Make it (fast).\nInput: 10\nOutput: 55",
        "Write code (python) for Fibonacci numbers.\nInput: 10\nOutput: 55",
        "Write a function called once for each n.\nInput: 10\nOutput: 55",
        "Write a function that (quickly) gives Fibonacci numbers.\nInput: 10\nOutput: 55",
        "Write a JavaScript function f with f(2) = 3.",
        "Write a function f in C++ with f(2) = 3.",
        "Write a function f in Go with f(2) = 3.",
        "Write a function pairs(n) that gives all pairs in any order. pairs(1) -> [[0, 1], [1, 0]]",
        "Write a function pick(xs) that picks a random item. pick([1, 2]) -> 2",
        "Write a function `parse`. g(1) = 2",
        "Write a function f(2) = 3 in words.",
        "Write a Python function that parses logs. A log has count(3) = 7.",  # another function's value
        "Write a Python function f.\n>>> x = g(2)\n>>> f(3)\n4",  # what x is may matter
        "Write a Python function f.\n>>> f(2)\n3\n>>> f(2)\n4",
        "Write a Python function f.\n>>> f(x)\n3",
        "Write a Python function f.\n>>> print(f(2))\n3",
        "Let f be a function with f(1) = 1 and f(2) = 4. What is f(3)?",
        "Find f(3), where f(1) = 1.",
        "The recurrence T(1) = 1 has which solution?",
        "Explain why f(2) -> 3.",
        "Write a story in which f(2) = 3.",
        "My function is buggy: f(2) returns 3.\nInput: 2\nOutput: 3",
        f"{FIB}\nInput: 1, 2\nOutput: a number",
        f"{FIB}\nInput: n\nOutput: the number",
        f"{FIB}fib(*[10]) = 55, fib(**{{}}) = 0",
        f"{FIB}fib(__import__('os').getpid()) = 1",
        f"{FIB}def fib(10) -> 55",
        "",
    ],
)
def test_what_may_be_no_example_becomes_no_test(prompt: str) -> None:
    assert derive_tests(prompt) == []


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="f(2) =->3.,;:'\"[]{}`\n\\_né>", max_size=80))
def test_any_text_is_read_without_an_error(text: str) -> None:
    for test in derive_tests(f"Write a Python function f.\n{text}"):
        assert isinstance(test, str) and test.startswith("assert ")
        compile(test, "", "exec")


def test_long_and_nested_texts_take_no_time() -> None:
    start = time.perf_counter()
    pieces = [
        "(",
        "[",
        "-",
        "f(",
        "f(1) = ",
        "f(1) = 1, ",
        "Input: ",
        "Input: 1 Output: ",
        "`",
        "'",
        "write ",
        ">>> f(1)\n",
    ]
    for piece in pieces:
        for text in (piece * 900, piece * (90_000 // len(piece)), f"{piece}\n" * 9_000):
            assert len(derive_tests(f"Write a Python function f. f({text}\n{text}")) <= MAX_TESTS
    assert time.perf_counter() - start < 20
    assert derive_tests(f"Write a Python function f. f({'(' * 400}1{')' * 400}) = 1") == []
    many = "\n".join(f"f({i}) -> {i}" for i in range(2 * MAX_TESTS))
    assert len(derive_tests(f"Write a Python function f.\n{many}")) == MAX_TESTS


def test_nothing_of_a_prompt_is_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(builtins, "called_by_a_prompt", called.append, raising=False)
    assert derive_tests(f"{FIB}fib(called_by_a_prompt('x')) = 1\n>>> called_by_a_prompt('y')\n1") == []
    assert called == []


def test_derived_tests_tell_right_from_wrong_in_the_sandbox() -> None:
    meta = {"tests": derive_tests(f"{SEED}, for example `f(10) = 55` and f(2) -> 1.")}
    wrong, right = (
        "def f(n): return n + 1",
        "def f(n):\n    a, b = 0, 1\n    for _ in range(n): a, b = b, a + b\n    return a",
    )
    scores = resolve_reward("code").judge_all([Case("", answer, meta) for answer in (wrong, right)])
    assert [(score.outcome, score.reason) for score in scores] == [(Outcome.FAILED, "assertion"), (Outcome.PASSED, "")]
