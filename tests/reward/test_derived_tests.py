"""Which tests follow from the examples in a prompt, and what is no example."""

from __future__ import annotations

import builtins
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr.core.types import Outcome
from rlvr.reward import resolve_reward
from rlvr.reward.code.derived_tests import MAX_LINES, MAX_PROMPT, MAX_TESTS, derive_tests
from rlvr.reward.signatures import Case

SEED = "Write a function to calculate the nth Fibonacci number"
FIB = "Write a Python function fib(n) that returns the nth Fibonacci number. "
PROGRAM = "Write a program that reads n."
FORMAT = f"""{PROGRAM}\n\nInput:\nThe first line contains n.\n\nOutput:\nPrint the square of n.

Sample Input:\n3\n\nSample Output:\n9"""
HELPER = """Write a function sum_squares(xs). You can use this helper:
def square(x):
    return x * x
so that square(3) = 9."""
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
        ("Write a Python function that parses logs, for example count('a b') = 2", ["assert count('a b') == 2"]),
        ("Write a Python function that counts words. count_words('a b') = 2", ["assert count_words('a b') == 2"]),
        ("Write a function `fib`. fib(10) = 55, g(1) = 2", ["assert fib(10) == 55"]),
        (f"{FIB}fib(10) = 55\nHandle errors and edge cases.", ["assert fib(10) == 55"]),
        (f"{FIB}\nExample: Input: 3 Output: 9", ["assert fib(3) == 9"]),
        (f"{FIB}\n\nInput: 3\nOutput: 2\n", ["assert fib(3) == 2"]),
        (f"{SEED}, for example f(10) = 55.", ["assert f(10) == 55"]),
        (f"{SEED}. fib(10) should return 55.", ["assert fib(10) == 55"]),
        (f"{FIB}\n\nExamples:\n\n>>> fib(10)\n55\n", ["assert fib(10) == 55"]),
        (f"{FIB}\n## Usage\nfib(10) -> 55\n\nBad:\nfib(9) -> 55", ["assert fib(10) == 55"]),
        *(  # a section of wrong values is over
            (f"{FIB}\n{wrong}\n\n{right}\nfib(10) = 55", ["assert fib(10) == 55"])
            for wrong, right in (
                ("## Bad\nThis was slow.", "## Example"),
                ("### Bad\nThis was slow.\nfib(9) -> 54", "## Usage\nAs follows.\n\nExample:"),
                ("Bad:\nfib(9) -> 54", "Example:"),
                ("Old:\n>>> fib(9)\n54", "## Example"),
            )
        ),
        (f"# Before the numbers\n\n{FIB}\n\n## Example\n\nfib(10) = 55", ["assert fib(10) == 55"]),  # a title
        ('def fib(n):\n    """The nth number.\n    >>> fib(10)\n    55\n    """', ["assert fib(10) == 55"]),
        (
            HELPER.replace("so that square(3) = 9", "\nFor example, sum_squares([1, 2]) = 5"),
            ["assert sum_squares([1, 2]) == 5"],
        ),
        (FORMAT, [{"input": "3\n", "output": "9"}]),
        (
            'def even(x):\n    """Whether x is even.\n    >>> even(2)\n    True\n    >>> even(3)\n    False\n    """',
            ["assert even(2) == True", "assert even(3) == False"],
        ),
        (f"{PROGRAM}\nInput: 3\nOutput: 9", [{"input": "3\n", "output": "9"}]),
        (f"{PROGRAM}\n\nExample:\nInput:\na b\nOutput:\nB A", [{"input": "a b\n", "output": "B A"}]),
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
        HELPER,
        "Write a function sum_squares(xs) using the function square(x), where square(3) is 9.",
        "Write a function that uses `square(x)`. square(3) = 9.",
        "Write a function sum_squares. square = lambda x: x * x, square(3) = 9.",
        "Write a function f(x) and create a function g(x). f(1) = 2.",
        f"{PROGRAM}\nInput: an integer n\nOutput: its square",
        f"{PROGRAM}\nInput: an integer n\nExpected output: its square",
        f"{PROGRAM}\nInput: 3\nOutput: any number",
        f"{PROGRAM}\nInput: n\nOutput: 2n",
        f"{PROGRAM}\nInput:\nThe first line contains n.\n\nOutput:\nPrint the square of n.",
        f"{PROGRAM}\n\nBad example:\nInput: 3\nOutput: 5",
        f"{PROGRAM}\nInput: 3\nWrong output: 5\nOutput: 6",
        f"{FIB}Common mistake: fib(10) = 54.",
        f"{FIB}It is false that fib(10) = 54.",
        f"{FIB}A naive implementation returns fib(10) = 54.",
        f"{FIB}Off by one would give fib(10) = 89.",
        f"{FIB}My friend has fib(10) = 54.",  # no word of doubt, and none of examples
        f"{FIB}\nfib(10) -> 54  # wrong",
        f"{FIB}\nThese are mistakes.\nfib(10) -> 54",
        f"{FIB}\nfib(10) -> 54\nThis came out of the last version.",
        f"{FIB}\nInvalid outputs:\n- fib(2) -> 5",
        f"{FIB}\nThese must raise instead:\n- fib(-2) -> 5",
        f"{FIB}\nCounterexamples:\nfib(2) = 5",
        f"{FIB}\nNon-examples:\nfib(2) = 5",
        f"{FIB}\nExamples of wrong values:\nfib(2) = 5",
        *(f"{FIB}\n{word}:\n>>> fib(2)\n5" for word in ("Bad", "Forbidden", "Deprecated", "Old", "Currently", "Notes")),
        *(f"{FIB}\n{word}:\n\nfib(2) = 5\n\n- fib(3) = 7" for word in ("Bad", "**Old**", "## Notes")),
        f"{FIB}Watch out:\n\n1. fib(2) = 5",
        f"{FIB}\nBad:\n\nExample:\n\nInput: 3\nOutput: 5",
        *(
            f"{FIB}\n{heading}\n{prose}\n{example}"
            for heading in ("## Bad", "## Bad\n", "# Old version\n")
            for prose in ("Beginners write this.\n", "This is slow.\n\nIt is also unclear.\n", "- slow\n- long\n")
            for example in (
                "Example:\nfib(10) = 54",
                "Example:\n\nfib(10) -> 54",
                "### Example\nfib(10) = 54",
                "**Example**\n>>> fib(10)\n54",
                "Example:\nInput: 10\nOutput: 54",
                "Example:\nInput:\n10\nOutput:\n54",
                "fib(10) = 54",
            )
        ),
        f"{FIB}\nBad:\nBeginners write this.\nExample:\nfib(10) = 54",
        f"{FIB}\nBad:\nBeginners write this.\n\nExample:\nfib(10) = 54",
        f"{FIB}\n## Bad\nSlow.\n\nExample:\nfib(9) = 33\n\nExample:\nfib(10) = 54",
        "Write fib(n). Beginners write fib(10) = 54.",
        f"{FIB}\n## Old\n>>> fib(2)\n5",
        f"{FIB}\n**Bad**\n>>> fib(2)\n5\n\n>>> fib(3)\n7",
        *(
            f"Write a {word} function fib(n). fib(10) = 55"
            for word in ("JS", "TypeScript", "C", "C++", "C#", "Go", "R", "VB")
        ),
        "Write Go code for a function f. f(2) = 3",
        "Write Rust code for a function f. f(2) = 3",
        "Translate `int f(int n)` from Java to Python. f(2) -> 3",
        "Explain what this code does. It is a Python function f. f(2) = 3",
        "Write a function g(x) that inverts f. g(2) = 3",
        "Write a function f(xs) that sorts in place. f([2, 1]) = [1, 2]",
        "Write a function f(n) that prints the square. f(2) -> 4",
        "Write a generator f(n). f(2) -> [0, 1]",
        "Write a function f(n) that yields numbers. f(2) -> [0, 1]",
        "Write an async function f(n). f(2) = 4",
        "Write a class with f(n). f(2) = 4",
        "Write a method f(n). f(2) = 4",
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


def test_hostile_texts_of_a_megabyte_take_no_time() -> None:
    pieces = [
        "\n",
        "x",
        " ",
        "(",
        "[",
        "-",
        "f(",
        "f(1) = ",
        "f(1) = 1, ",
        "f(1) = 1\n",
        "Input: ",
        "Input: 1 Output: ",
        "`",
    ]
    pieces += [
        "'",
        "write ",
        "write a function ",
        "use ",
        ">>> f(1)\n",
        ">>> f(1)\n1\n",
        "def f(x):\n",
        "def ",
        "#",
        "**",
        ":",
    ]
    pieces += ["f(" * 499 + "\n", "x:\n", ". ", "program ", "f = ", "f(n+"]
    start, longest = time.perf_counter(), ("", 0.0)
    for piece in pieces:
        for size in (900, MAX_PROMPT - 100, 1_000_000):
            for text in (piece * (size // len(piece)), f"{piece}\n" * min(MAX_LINES - 5, size // (len(piece) + 1))):
                before = time.perf_counter()
                assert len(derive_tests(f"Write a Python function f.\nf({text}"[:size])) <= MAX_TESTS
                longest = max(longest, (piece[:20], time.perf_counter() - before), key=lambda one: one[1])
    assert time.perf_counter() - start < 20 and longest[1] < 2, longest
    assert derive_tests(f"Write a Python function f. f({'(' * 400}1{')' * 400}) = 1") == []
    many = "\n".join(f"f({i}) -> {i}" for i in range(2 * MAX_TESTS))
    assert len(derive_tests(f"Write a Python function f.\n{many}")) == MAX_TESTS
    assert derive_tests(f"{FIB}fib(10) = 55.\n" + "\n" * MAX_LINES) == []


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
