"""A mutant of a right answer gets the verdict of a plain interpreter: nothing wrong passes, nothing right fails.

The interpreter runs solution, setup and asserts as one program, which says a sentinel at its end. `MUTANTS=all python
-m pytest tests/project/test_mutants.py` takes every problem of MBPP, the suite a sample.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rlvr.core.types import Outcome
from rlvr.sandbox import Sandbox
from tests.kit.code_rows import REAL as MBPP
from tests.kit.mutants import SECONDS, mbpp, mutants

SAMPLE = 120
SENTINEL = "every assert held"


def plain(job: dict[str, Any]) -> bool | None:
    """The verdict of one interpreter that runs it all, None where time was out."""
    parts = [*job["imports"], job["solution"], job["setup"], *job["tests"], f"print({SENTINEL!r})"]
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-W", "ignore", "-c", "\n".join(parts)],
            capture_output=True, timeout=SECONDS, text=True, errors="replace", stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.endswith(SENTINEL + "\n")


def as_check(job: dict[str, Any]) -> dict[str, Any]:
    """The same asserts as a function of the candidate: they run as statements, a call over for each call."""
    defined = re.findall(r"^def (\w+)", job["solution"], re.MULTILINE)
    name = next(name for name in defined if re.search(rf"\b{name}\b", job["tests"][0]))
    lines = "\n".join(re.sub(rf"\b{name}\b", "candidate", test) for test in job["tests"]).split("\n")
    return {**job, "tests": ["\n    ".join(["def check(candidate):", *lines])], "entry_point": name}


def disagreements(jobs: list[dict[str, Any]]) -> list[str]:
    """Where the sandbox and the interpreter differ, the tests run in either way."""
    with ThreadPoolExecutor(2) as threads:
        expected = list(threads.map(plain, jobs))
    assert 0.02 < expected.count(True) / len(expected) < 0.9, "the mutants decide nothing"
    checks = [as_check(job) for job in jobs]
    with Sandbox() as sandbox:
        got = sandbox.verify_many(jobs + checks)
    return [
        f"plain {want}, ours {verdict.outcome} {verdict.reason} {verdict.detail}\n{job['solution']}\n{job['tests']}"
        for job, want, verdict in zip(jobs + checks, expected + expected, got, strict=True)
        if want not in (None, verdict.passed) or verdict.outcome in (Outcome.INVALID, Outcome.ERROR)
    ]


OWN = [
    ("def f(a, b):\n    return a * 2 + b - 1", ["assert f(1, 2) == 3", "assert f(0, 0) == -1"]),
    ("def f(s):\n    return [w.title() + '.' for w in s.split() if len(w) > 2]", ["assert f('ab abc') == ['Abc.']"]),
    ("def f(n):\n    return {i: i % 3 == 0 for i in range(n)}", ["assert f(3) == {0: True, 1: False, 2: False}"]),
    ("def f(x):\n    while x > 9:\n        x = x // 10 + x % 10\n    return x",
     ["assert f(99) == 9", "assert f(5) == 5"]),
    ("def f(x):\n    return x / 3 + 0.5", ["assert abs(f(1) - 0.8333) < 1e-3", "assert isinstance(f(0), float)"]),
    ("def f(a):\n    return set(x << 1 for x in a) | {0}", ["assert f([1, 2]) == {0, 2, 4}", "assert f([]) == {0}"]),
    ("import re\ndef f(s):\n    return re.search('a+b', s)", ["assert f('xaab')", "assert not f('ba')"]),
    ("def f(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n        yield a",
     ["assert list(f(5)) == [1, 1, 2, 3, 5]"]),
    ("def f(t):\n    return (t[0], *t[-1:], not t[1])", ["assert f((1, 0, 2)) == (1, 2, True)"]),
    ("def f(k, d=2, **o):\n    return k ** d - len(o)", ["assert f(3) == 9", "assert f(2, d=3, z=1) == 7"]),
    ("def f(s):\n    if s is None or s == '':\n        return None\n    return s[0]",
     ["assert f('') is None", "assert f('xy') == 'x'"]),
    ("def f(n):\n    return 1 if n < 2 else n * f(n - 1)",
     ["assert f(25) == 15511210043330985984000000", "assert f(0) == 1"]),
]  # fmt: skip


def test_a_mutant_of_our_own_rows_gets_the_plain_verdict() -> None:
    rows = [
        {"solution": source, "tests": tests, "setup": "", "imports": [], "timeout_s": SECONDS} for source, tests in OWN
    ]
    assert disagreements(mutants(rows * 5)) == []


@pytest.mark.skipif(not MBPP.exists(), reason=f"MBPP is not at {MBPP}")
@pytest.mark.parametrize("size", [SAMPLE // 3, pytest.param(SAMPLE, marks=pytest.mark.slow)])
def test_a_mutant_of_an_mbpp_solution_gets_the_plain_verdict(size: int) -> None:
    jobs = mbpp()
    if os.environ.get("MUTANTS") != "all":
        jobs = random.Random(0).sample(jobs, size)
    assert disagreements(mutants(jobs)) == []
