"""The Sandbox as its users see it: verdicts, blame, threads, event loops, forks, bad input, MBPP under each tier."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rlvr.core.types import Outcome
from rlvr.sandbox import Limits, NoTier, Sandbox, Verdict, shared_sandbox
from rlvr.sandbox.processes import RENEW_JOBS
from tests.kit.code_rows import REAL as DATA

ADD = "def add(a, b):\n    return a + b\n"
JOB: dict[str, Any] = {"solution": ADD, "tests": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]}


@pytest.fixture(scope="module", params=("namespaces", "landlock"))
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    try:
        made = Sandbox((request.param,), workers=2)
    except NoTier as refused:
        pytest.skip(str(refused))
    with made:
        yield made


def outcome_and_reasons(verdict: Verdict) -> tuple[str, str, list[str]]:
    return verdict.outcome.value, verdict.reason, [test.reason for test in verdict.tests]


@pytest.mark.slow
def test_a_calls_own_time_is_time_to_compute_too(sandbox: Sandbox) -> None:
    """The processor's time follows the call's, not the default; what the user set for it holds for every call."""
    program = "import time\nwhile time.process_time() < 3.5: pass\nx = 1"
    with Sandbox((sandbox.tier,), 1, Limits(timeout_s=1.0)) as short:
        assert outcome_and_reasons(short.verify(program, ["assert x == 1"], timeout_s=60.0))[0] == "passed"
    with Sandbox((sandbox.tier,), 1, Limits(cpu_s=1.0)) as bounded:
        assert outcome_and_reasons(bounded.verify(program, ["assert x == 1"], timeout_s=60.0))[1] == "timeout"


def test_a_right_answer_passes_and_the_verdict_says_how_it_was_judged(sandbox: Sandbox) -> None:
    verdict = sandbox.verify(**JOB)
    assert outcome_and_reasons(verdict) == ("passed", "", ["", ""])
    assert (verdict.path, verdict.tier, verdict.num_passed) == ("split", sandbox.tier, 2)
    assert 0 < verdict.seconds < 60


def test_each_test_has_its_own_result(sandbox: Sandbox) -> None:
    tests = ["assert add(1, 2) == 4", "assert add(1, 2) == 3", "assert add(1) == 1", "assert sub(1, 2) == 3"]
    assert outcome_and_reasons(sandbox.verify(ADD, tests)) == (
        "failed",
        "assertion",
        ["assertion", "", "exception", "wrong_name"],
    )
    unknown = sandbox.verify("def f(): return 1", ["assert g(f()) == 1"])
    assert unknown.tests[0].detail == "'g' is not defined"


@pytest.mark.parametrize(
    ("body", "outcome", "reason"),
    [
        ("while True: pass", "timeout", "timeout"),
        ("import time; time.sleep(60)", "timeout", "timeout"),
        ("import signal; [signal.signal(n, signal.SIG_IGN) for n in range(1, 32) if n not in (9, 19)]\n"
         "    while True: pass", "timeout", "timeout"),
        ("import os; os._exit(0)", "failed", "exited"),
        ("import ctypes; ctypes.string_at(0)", "failed", "crashed"),
        ("return bytearray(1 << 40)", "failed", "memory"),
        ("raise ValueError('no')", "failed", "exception"),
        ("raise SystemExit(0)", "failed", "exited"),
        ("return 2", "failed", "assertion"),
        ("return 'x' * (4 << 20)", "failed", "output"),
    ],
)  # fmt: skip
def test_a_harmful_answer_fails_itself_and_not_the_next_one(
    sandbox: Sandbox, body: str, outcome: str, reason: str
) -> None:
    verdict = sandbox.verify(f"def f():\n    {body}\n", ["assert f() == 1"], timeout_s=0.5)
    assert outcome_and_reasons(verdict) == (outcome, reason, [reason])
    assert sandbox.verify(**JOB).passed


def test_an_answer_that_crashes_in_one_test_is_still_judged_by_the_others(sandbox: Sandbox) -> None:
    solution = "import os\ndef f(x):\n    if x == 2: os._exit(0)\n    return x\n"
    tests = ["assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 3", "assert f(4) == 5"]
    assert [test.reason for test in sandbox.verify(solution, tests).tests] == ["", "exited", "", "assertion"]


def test_a_stream_of_crashes_stops_early(sandbox: Sandbox) -> None:
    verdict = sandbox.verify("import os; os._exit(0)", [f"assert f({n}) == {n}" for n in range(500)], timeout_s=20)
    assert {test.reason for test in verdict.tests} == {"exited"}
    assert verdict.seconds < 10


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("", "no_answer"), ("  \n", "no_answer"), (None, "no_answer"), (b"x = 1", "no_answer"), (3, "no_answer"),
        ("def f(:", "syntax_error"), ("def f(): return '\0'", "syntax_error"), ("x = '\ud800'", "syntax_error"),
        ("The answer is 3.", "syntax_error"), ("(" * 100_000, "syntax_error"), ("x = 1\n" * 2_000_000, "too_large"),
        ("y = 1", "wrong_name"),
    ],
)  # fmt: skip
def test_bad_sources_are_failed_answers_never_exceptions(sandbox: Sandbox, source: Any, reason: str) -> None:
    assert outcome_and_reasons(sandbox.verify(source, ["assert f() == 1"])) == ("failed", reason, [reason])


@pytest.mark.parametrize(
    ("tests", "reason"),
    [(["assert f( == 1"], "bad_test"), (["while True: pass\nassert f()"], "test_timeout"), (["1 / 0"], "bad_test")],
)
def test_a_broken_test_is_invalid_not_a_failure(sandbox: Sandbox, tests: list[str], reason: str) -> None:
    verdict = sandbox.verify("def f(): return 1", tests, timeout_s=0.4)
    assert (verdict.outcome, verdict.reason) == (Outcome.INVALID, reason)


def test_no_answer_can_make_its_failure_look_like_a_broken_test_or_sandbox(sandbox: Sandbox) -> None:
    """Values that are dear to compare, to decode or to hash are the answer's own."""
    every = "import os\ndef f():\n    for n in range({}, 64):\n        try: {}\n        except OSError: pass\n"
    for solution in (
        "def f(): return {(2**61 - 1) * n: n for n in range(150_000)}",
        "def f():\n    x = []\n    for _ in range(100_000): x = [x]\n    return x",
        "def f(): return 10 ** 1_000_000",
        "import os\ndef f():\n    while True: os.write(1, b'x' * 65536)",
        every.format(3, "os.write(n, b'\\xff' * 1000)"),
        every.format(3, "os.close(n)"),
        every.format(0, "os.write(n, b'\\0\\0\\0\\x04null')"),
    ):
        verdict = sandbox.verify(solution, ["assert f() == {1: 2}"], timeout_s=0.5)
        assert verdict.outcome in (Outcome.FAILED, Outcome.TIMEOUT), (solution, verdict)
        assert verdict.seconds < 20
    assert sandbox.verify(**JOB).passed


def test_programs_are_judged_by_their_output_and_exit(sandbox: Sandbox) -> None:
    tests = [{"input": "1 2\n", "output": "3\n"}, {"input": "2 2\n", "output": "4"}]
    program = "a, b = map(int, input().split())\nprint(a + b)\n"
    assert outcome_and_reasons(sandbox.verify(program, tests)) == ("passed", "", ["", ""])
    assert outcome_and_reasons(sandbox.verify(program + "1 / 0", tests[:1])) == ("failed", "exception", ["exception"])
    assert outcome_and_reasons(sandbox.verify("print(3)", tests)) == ("failed", "wrong_output", ["", "wrong_output"])
    assert sandbox.verify("print(3)", tests).path == "stdio"
    for broken in ("print(3", "(" * 300 + ")" * 300, "\0"):
        assert outcome_and_reasons(sandbox.verify(broken, tests[:1])) == ("failed", "syntax_error", ["syntax_error"])
    assert outcome_and_reasons(sandbox.verify("exec('print(3')", tests[:1])) == ("failed", "exception", ["exception"])
    assert (
        outcome_and_reasons(sandbox.verify("print(3, flush=True)\nwhile True: pass", tests[:1], timeout_s=0.5))[1]
        == "timeout"
    )


def test_humaneval_style_functions_and_setup_and_imports(sandbox: Sandbox) -> None:
    check = "def check(candidate):\n    for n in range(5):\n        assert candidate(n, 1) == n + 1\n"
    verdict = sandbox.verify(ADD, check, entry_point="add")
    assert (outcome_and_reasons(verdict), verdict.path) == (("passed", "", [""]), "rpc")
    assert not sandbox.verify(ADD.replace("+", "-"), [check], entry_point="add").passed
    assert sandbox.verify("def f(): return math.floor(2.5)", ["assert f() == 2"], imports=["import math"]).passed


def test_the_weak_path_is_taken_only_when_asked_for_and_says_so(sandbox: Sandbox) -> None:
    verdict = sandbox.verify(**JOB, path="weak")
    assert (verdict.passed, verdict.path) == (True, "weak")


@pytest.mark.parametrize(
    "wrong",
    [
        {"tests": []}, {"tests": [1]}, {"tests": ["assert f()", {"input": "", "output": ""}]},
        {"tests": [{"input": ""}]},
        {"timeout_s": 0}, {"timeout_s": float("nan")}, {"path": "fast"}, {"path": "rpc"},
        {"imports": "import os"}, {"setup": None},
    ],
)  # fmt: skip
def test_a_callers_mistake_is_a_value_error(sandbox: Sandbox, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"expected|give|needs"):
        sandbox.verify(**{**JOB, **wrong})


@pytest.mark.parametrize("wrong", [{"tiers": ("docker",)}, {"tiers": "landlock"}, {"tiers": ()}, {"workers": 0}])
def test_a_sandbox_that_cannot_be_meant_is_a_value_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"tiers=|workers="):
        Sandbox(**wrong)


def test_verify_many_keeps_the_order_and_works_from_many_threads(sandbox: Sandbox) -> None:
    jobs = [{"solution": f"def f(): return {n}", "tests": [f"assert f() == {n // 2 * 2}"]} for n in range(40)]
    got: list[list[bool]] = []

    def work() -> None:
        got.append([verdict.passed for verdict in sandbox.verify_many(jobs)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [[n % 2 == 0 for n in range(40)]] * 4


def test_an_event_loop_goes_on_while_answers_run(sandbox: Sandbox) -> None:
    async def main() -> tuple[list[str], int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        slow = [sandbox.averify("while True: pass", ["assert f()"], timeout_s=0.4) for _ in range(2)]
        verdicts = await asyncio.gather(*slow, sandbox.averify(**JOB))
        ticking.cancel()
        return [verdict.outcome.value for verdict in verdicts], ticks

    outcomes, ticks = asyncio.run(main())
    assert outcomes == ["timeout", "timeout", "passed"]
    assert ticks >= 5


def test_a_forked_copy_of_our_process_uses_workers_of_its_own() -> None:
    with Sandbox(workers=1) as sandbox:
        before = sandbox.pids
        child = os.fork()
        if child == 0:
            ok = sandbox.pids == [] and sandbox.verify(**JOB).passed and not set(before) & set(sandbox.pids)
            sandbox.close()
            os._exit(0 if ok else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert sandbox.pids == before
        assert sandbox.verify(**JOB).passed


def test_a_closed_sandbox_stops_running_programs_and_refuses_more() -> None:
    sandbox = Sandbox(workers=1)
    got: list[Verdict] = []
    job = {"solution": "while True: pass", "tests": ["assert f()"], "timeout_s": 60}
    thread = threading.Thread(target=lambda: got.append(sandbox.verify(**job)))
    thread.start()
    time.sleep(0.3)
    sandbox.close()
    sandbox.close()
    thread.join(10)
    assert not thread.is_alive() and got[0].outcome is Outcome.ERROR and got[0].reason == "sandbox"
    assert sandbox.pids == []
    with pytest.raises(ValueError, match="closed"):
        sandbox.verify(**JOB)


def test_the_shared_sandbox_is_one() -> None:
    assert shared_sandbox() is shared_sandbox()
    assert shared_sandbox().verify(**JOB).passed


def test_limits_are_kept() -> None:
    with Sandbox(workers=1, limits=Limits(memory=128 << 20, source=100, output=1000, timeout_s=0.5)) as sandbox:
        assert sandbox.verify("x" * 101, ["assert f()"]).reason == "too_large"
        assert sandbox.verify("def f(): return bytearray(200 << 20)", ["assert f()"]).reason == "memory"
        assert sandbox.verify("def f(): return 'x' * 2000", ["assert f()"]).reason == "output"
        assert sandbox.verify("while True: pass", ["assert f()"]).reason == "timeout"
        many = (
            "import threading, time\ndef f():\n"
            "    for n in range(500): threading.Thread(target=time.sleep, args=(9,)).start()\n"
        )
        assert sandbox.verify(many, ["assert f() is None"]).outcome in (Outcome.FAILED, Outcome.TIMEOUT)
        assert sandbox.verify("def f(): return 1", ["assert f()"]).passed


HOARDS = """
import os, stat
body = b'["v",["l",' + b'["l",["l",["l"]]],' * 230_000 + b'1]]'
for descriptor in range(3, 60):
    try:
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            for frame in (b'["ready"]', body):
                left = memoryview(len(frame).to_bytes(4, "big") + frame)
                while left:
                    left = left[os.write(descriptor, left):]
    except OSError:
        pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("memory", [64, 512])
def test_an_answer_that_fills_the_checkers_memory_only_fails_itself(memory: int) -> None:
    with Sandbox(workers=1, limits=Limits(memory=memory << 20, timeout_s=30.0)) as sandbox:
        verdict = sandbox.verify(HOARDS, ["assert f(1) == 2"])
        assert (verdict.outcome, verdict.reason) == (Outcome.FAILED, "crashed" if memory == 64 else "output")
        assert sandbox.verify("def f(): return 1", ["assert f() == 1"]).passed


UNFIT: list[dict[str, Any]] = [{"tolerance": "x"}, {"tolerance": float("inf")}, {"tolerance": -1}, {"input": "\ud800"}]


@pytest.mark.parametrize("wrong", UNFIT)
def test_a_program_test_that_nothing_could_be_compared_by_is_refused(sandbox: Sandbox, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"tolerance=|surrogate"):
        sandbox.verify("print(5)", [{"input": "", "output": "5", **wrong}])


@pytest.mark.parametrize("name", ["mbpp.jsonl", "sanitized-mbpp.json"])
def test_every_reference_solution_of_mbpp_is_accepted(sandbox: Sandbox, name: str) -> None:
    if not (DATA / name).exists():
        pytest.skip(f"{DATA / name} is not here")
    text = (DATA / name).read_text()
    rows = json.loads(text) if name.endswith(".json") else [json.loads(line) for line in text.splitlines()]
    jobs = [
        {
            "solution": row["code"], "tests": row["test_list"], "setup": row.get("test_setup_code", ""),
            "imports": row.get("test_imports", ()), "timeout_s": 30.0,
        }
        for row in rows
    ]  # fmt: skip
    verdicts = sandbox.verify_many(jobs)
    bad = [
        (row["task_id"], outcome_and_reasons(verdict))
        for row, verdict in zip(rows, verdicts, strict=True)
        if not verdict.passed
    ]
    assert not bad
    assert len(verdicts) == {"mbpp.jsonl": 974, "sanitized-mbpp.json": 427}[name]


def test_the_same_answer_sees_the_same_order_of_sets_and_other_draws_each_time() -> None:
    """In another process, too: a verdict that depends on the order is the same each time."""
    solution = "import random\ndef f(): return list({'a', 'bc', 'def', ''})\ndef g(): return random.random()\n"
    orders: set[str] = set()
    draws: set[str] = set()
    for _ in range(2):
        with Sandbox(workers=1) as sandbox:
            orders |= {sandbox.verify(solution, ["assert f() == 0"]).detail for _ in range(2)}
            draws |= {sandbox.verify(solution, ["assert g() == 2"]).detail for _ in range(2)}
    assert (len(orders), len(draws)) == (1, 4)


@pytest.mark.slow
def test_a_worker_is_started_anew_after_many_verifications() -> None:
    with Sandbox(workers=1) as sandbox:
        before = sandbox.pids
        sandbox._pairs[0].jobs = RENEW_JOBS - 1
        assert sandbox.verify("def f(): return 1", ["assert f() == 1"]).passed and sandbox.pids == before
        assert sandbox.verify("def f(): return 1", ["assert f() == 1"]).passed
        assert len(sandbox.pids) == 2 and not set(sandbox.pids) & set(before)


def test_an_answer_starts_without_the_modules_that_few_need_and_its_values_of_theirs_travel(sandbox: Sandbox) -> None:
    """Each module that a solver holds makes every fork dearer."""
    count = "import sys\ndef held(names): return [name for name in names if name in sys.modules]"
    few = ["datetime", "decimal", "fractions", "numbers", "socket", "threading"]
    assert sandbox.verify(count, [f"assert held({few}) == []"]).passed
    solution = (
        "import datetime, decimal, fractions\n"
        "def made():\n"
        "    times = [datetime.date(2020, 1, 2), datetime.timedelta(3)]\n"
        "    return [*times, decimal.Decimal('1.5'), fractions.Fraction(1, 3)]"
    )
    test = (
        "from datetime import date, timedelta\nfrom decimal import Decimal\nfrom fractions import Fraction\n"
        "assert made() == [date(2020, 1, 2), timedelta(3), Decimal('1.5'), Fraction(1, 3)]"
    )
    assert sandbox.verify(solution, [test]).passed


def test_a_test_that_cannot_run_alone_is_not_run_alone(sandbox: Sandbox) -> None:
    """Tests that build on one another run once: else a crash earns a second draw, or a row without a verdict."""
    builds = ["expected = [1]\nassert f(1) == 1", "assert f(2) == expected"]
    lost = sandbox.verify("import os\ndef f(x): os._exit(0)", builds)
    assert outcome_and_reasons(lost) == ("failed", "exited", ["exited", "exited"])
    draws = "import os\nresult = expected = 0\ndef f(x): return os.urandom(1)[0] < 128 and os._exit(0)"
    named = ["expected = 5\nresult = f(1)", "assert result == expected"]
    assert sandbox.verify("def f(x): return 5", named).passed
    assert not any(sandbox.verify(draws, named).passed for _ in range(8))


def test_a_program_has_the_usual_environment(sandbox: Sandbox) -> None:
    program = "import sys\nprint(sys.argv)\n{}()\nprint('not reached')"
    for end in ("exit", "quit"):
        verdict = sandbox.verify(program.format(end), [{"input": "", "output": "['answer.py']"}])
        assert verdict.passed, (end, outcome_and_reasons(verdict))


def test_an_argument_that_is_too_large_is_the_fault_of_the_test_and_says_so(sandbox: Sandbox):
    verdict = sandbox.verify("def f(x): return len(x)", ["assert f([0] * 1_400_000) == 1_400_000"])
    assert verdict.outcome is Outcome.INVALID and "an argument cannot be sent to the answer" in verdict.detail
