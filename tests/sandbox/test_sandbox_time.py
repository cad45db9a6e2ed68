"""Whose time it is: the answer has that of its calls, the test has the rest, and no answer can shift it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from rlvr.core.types import Outcome
from rlvr.sandbox import Sandbox
from rlvr.sandbox.own_part import OwnPart
from tests.kit.slow_cases import mark_slow_but

SECONDS = 0.3
RIGHT, WRONG, RAISES = "def f(x): return x + 1", "def f(x): return 7", "def f(x): raise ValueError"
HANGS = "import time\ndef f(x): time.sleep(60)"
FAILED = (Outcome.FAILED, Outcome.TIMEOUT)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(workers=2) as made:
        yield made


SLOW_TESTS = {
    "loop": "assert f(1) == 2\nwhile True: pass",
    "loop with calls": "while True:\n    assert f(1) == 2",
    "sleep": "import time\nassert f(1) == 2\ntime.sleep(9)",
    "expected value": "assert f(1) == 2 + 0 * sum(range(10**10))",
    "argument": "assert f(sum(range(10**10))) == 2",
    "function": "import time\ndef test_f():\n    assert f(1) == 2\n    time.sleep(9)\ntest_f()",
    "loop around": "import time\nfor x in range(9):\n    time.sleep(0.1)\n    assert f(x) == x + 1",
    "unittest": "import unittest, time\nclass T(unittest.TestCase):\n    def test_a(self):\n"
    "        self.assertEqual(f(1), 2)\n        time.sleep(9)\nif __name__ == '__main__':\n    unittest.main()",
    "coroutine": "import asyncio\nasync def main():\n    assert f(1) == 2\n    await asyncio.sleep(9)\n"
    "asyncio.run(main())",
}


@pytest.mark.parametrize("name", mark_slow_but(3, SLOW_TESTS))
def test_test_that_hangs_is_to_blame_whatever_the_answer_is(sandbox: Sandbox, name: str) -> None:
    jobs = [dict(solution=text, tests=[SLOW_TESTS[name]], timeout_s=SECONDS) for text in (RIGHT, WRONG, RAISES, HANGS)]
    got = sandbox.verify_many(jobs)
    assert [(one.outcome, one.reason) for one in got] == [(Outcome.INVALID, "test_timeout")] * 4


def test_check_that_hangs(sandbox: Sandbox) -> None:
    text = "import time\ndef check(candidate):\n    assert candidate(1) == 2\n    time.sleep(9)"
    jobs = [dict(solution=one, tests=text, entry_point="f", timeout_s=SECONDS) for one in (RIGHT, WRONG, HANGS)]
    assert {one.reason for one in sandbox.verify_many(jobs)} == {"test_timeout"}


# A test, an answer that passes it, and one that makes it slow, which must cost that answer what a failure costs.
SLOWED_TESTS = {
    "returns a large number": ("for _ in range(f(1)): pass\nassert f(1) == 2", RIGHT, "def f(x): return 10 ** 12"),
    "never ends the loop": ("while f(1) != 2: pass\nassert f(1) == 2", RIGHT, WRONG),
    "never calls back": (
        "seen = []\nwhile len(seen) < 3: f(seen.append)\nassert f(len) == 2 and len(seen) == 3",
        "def f(g):\n    g([])\n    return 2",
        "def f(g): return 2",
    ),
    "changes nothing": (
        "seen = []\ndef keep():\n    seen.append(1)\nwhile not seen: f(keep)\nassert f(keep) == 2",
        "def f(g):\n    g()\n    return 2",
        "def f(g): return 2",
    ),
    "does not raise": (
        "try:\n    f(1)\n    while True: pass\nexcept ValueError as error:\n    assert str(error) == 'no'",
        "def f(x): raise ValueError('no')",
        RIGHT,
    ),
    "does not raise in a context": (
        "import unittest\nwith unittest.TestCase().assertRaises(ValueError):\n    f(1)\n    while True: pass",
        RAISES,
        RIGHT,
    ),
    "chooses a branch": ("if f(1) == 7:\n    while True: pass\nassert f(1) == 2", RIGHT, WRONG),
    "returns from no function": (
        "def test():\n    if f(1) == 2:\n        return\n    while True: pass\ntest()\nassert f(1) == 2",
        RIGHT,
        WRONG,
    ),
    "yields for ever": (
        "def cases():\n    while True: yield f(1)\nfor _, y in zip(range(3), cases()): assert y == 2",
        RIGHT,
        HANGS,
    ),
    "sends much": ("x = f(1)\nassert sum(y in x for y in range(20_000)) == 2", "def f(x): return [2, 1]",
                   "def f(x): return list(range(-50_000, 0))"),
    "hangs": ("assert f(1) == 2", RIGHT, HANGS),
    "hangs at its start": ("assert f(1) == 2", RIGHT, "while True: pass"),
}  # fmt: skip


@pytest.mark.parametrize("name", mark_slow_but(3, SLOWED_TESTS))
def test_answer_that_makes_a_test_slow_fails(sandbox: Sandbox, name: str) -> None:
    test, right, slow = SLOWED_TESTS[name]
    got = sandbox.verify_many([dict(solution=one, tests=[test], timeout_s=1.0) for one in (right, slow)])
    assert got[0].passed, got[0]
    assert got[1].outcome in FAILED, got[1]


def test_times_of_answer_and_test_are_counted_apart(sandbox: Sandbox) -> None:
    """Each may take `timeout_s`: together more is no failure."""
    test = "import time\ntime.sleep(0.4)\nassert f(1) == 2\ntime.sleep(0.4)"
    slow = "import time\ndef f(x):\n    time.sleep({})\n    return x + 1"
    jobs = [dict(solution=slow.format(seconds), tests=[test], timeout_s=1.5) for seconds in (1.0, 9)]
    got = sandbox.verify_many(jobs)
    assert got[0].passed, got[0]
    assert (got[1].outcome, got[1].reason) == (Outcome.TIMEOUT, "timeout")


PARTS = [
    ("x = f(1)\nassert x == g(2)\nh()", "g(2)\nh()"),
    ("for i in range(3):\n    assert f(i) == i\n    h()", "for i in range(3):\n    h()"),
    ("for i in range(3):\n    if f(i): break\nh()", "range(3)\nh()"),
    ("while f(1): h()", ""),
    ("while h():\n    f(1)", ""),
    ("while True:\n    f(1)", "while True:\n    pass"),
    ("x = 0\nif f(1):\n    x = 1\nwhile x: h()", ""),
    ("def check(c):\n    assert c(1) == 2\n    h()\ncheck(f)", "def check(c):\n    h()\ncheck(None)"),
    ("assert f(1) and h()", ""),
    ("y = [h() for _ in range(2)]\nassert f(y) == 3", "[h() for _ in range(2)]"),
    ("assert f(lambda: h()) == 3", ""),
]


@pytest.mark.parametrize(("text", "left"), PARTS)
def test_part_that_does_not_depend_on_the_answer(text: str, left: str) -> None:
    tree = ast.parse(text)
    assert ast.unparse(OwnPart([ast.parse(text)], {"f"}, set()).of(tree)) == left
