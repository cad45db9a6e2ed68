"""A mutant of a right answer gets the verdict of a plain interpreter: nothing wrong passes, nothing right fails.

A mutant is a reference solution with one operator, comparison or constant changed, chosen by a seed; one that has none
returns its result in a tuple. The interpreter runs solution, setup and asserts as one program, which says a sentinel at
its end. `MUTANTS=all python -m pytest tests/test_mutants.py` takes every problem of MBPP, the suite a sample.
"""

from __future__ import annotations

import ast
import json
import os
import random
import re
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rlvr.core.types import Outcome
from rlvr.sandbox import Sandbox
from tests.code_rows import REAL as MBPP

SAMPLE = 120
SECONDS = 5.0
SENTINEL = "every assert held"

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Div, ast.Mod: ast.Mult,
    ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitXor,
    ast.BitXor: ast.BitAnd, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or,
    ast.Or: ast.And, ast.UAdd: ast.USub, ast.USub: ast.UAdd,
}  # fmt: skip


def places(tree: ast.AST) -> list[tuple[ast.AST, str, int]]:
    """(node, field, index in a list or -1) of all that can be changed."""
    found: list[tuple[ast.AST, str, int]] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp, ast.UnaryOp)) and type(node.op) in SWAPS:
            found.append((node, "op", -1))
        elif isinstance(node, ast.Compare):
            found += [(node, "ops", place) for place, op in enumerate(node.ops) if type(op) in SWAPS]
        elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float, str)):
            found.append((node, "value", -1))
    return found


def mutant(source: str, seed: int) -> str:
    with warnings.catch_warnings(action="ignore"):  # of escapes that MBPP writes
        tree = ast.parse(source)
    returns = [(node, "return", -1) for node in ast.walk(tree) if isinstance(node, ast.Return) and node.value]
    node, field, index = random.Random(seed).choice(places(tree) or returns)
    if isinstance(node, ast.Return) and node.value:
        node.value = ast.Tuple([node.value], ast.Load())
    elif field == "value":
        value: Any = getattr(node, field)
        changed = not value if isinstance(value, bool) else value + "x" if isinstance(value, str) else value + 1
        setattr(node, field, changed)
    elif index < 0:
        setattr(node, field, SWAPS[type(getattr(node, field))]())
    else:
        ops = getattr(node, field)
        ops[index] = SWAPS[type(ops[index])]()
    return ast.unparse(tree)


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


def mbpp() -> list[dict[str, Any]]:
    full = [json.loads(line) for line in (MBPP / "mbpp.jsonl").read_text(encoding="utf-8").splitlines()]
    clean = json.loads((MBPP / "sanitized-mbpp.json").read_text(encoding="utf-8"))
    return [
        {
            "solution": row["code"], "tests": row["test_list"], "setup": row.get("test_setup_code", ""),
            "imports": row.get("test_imports", []), "timeout_s": SECONDS,
        }
        for row in full + clean
    ]  # fmt: skip


def mutants(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**job, "solution": mutant(job["solution"], seed)} for seed, job in enumerate(jobs)]


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
def test_a_mutant_of_an_mbpp_solution_gets_the_plain_verdict() -> None:
    jobs = mbpp()
    if os.environ.get("MUTANTS") != "all":
        jobs = random.Random(0).sample(jobs, SAMPLE)
    assert disagreements(mutants(jobs)) == []
