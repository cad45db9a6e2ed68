"""A sandbox on a Ray cluster gives the verdicts of one on this machine, and a lost worker is no program's failure.

The tests marked slow start Ray for real, on the loopback address, with more workers than this machine may have cores.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from rlvr.core.cancellation import run_with
from rlvr.core.ray_cluster import RayError, join_cluster
from rlvr.core.types import Outcome
from rlvr.reward import resolve_reward
from rlvr.sandbox import Limits, Sandbox, Verdict
from rlvr.sandbox.ray_worker import SandboxWorker, decode_jobs, decode_verdicts, encode_jobs, encode_verdicts
from rlvr.sandbox.verdict import TestResult as Result
from rlvr.sandbox.verification_job import VerificationJob
from tests.kit.code_rows import REAL
from tests.kit.local_ray import open_cluster
from tests.kit.mutants import mbpp, mutants

ADD = "def add(a, b): return a + b"
JOB: dict[str, Any] = {"solution": ADD, "tests": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]}
SLEEP: dict[str, Any] = {"solution": "import time\ndef f():\n    time.sleep(0.2)", "tests": ["assert f() is None"]}
ENDLESS: dict[str, Any] = {"solution": "while True: pass", "tests": ["assert f()"], "timeout_s": 60}


def without_time(verdicts: list[Verdict]) -> list[Verdict]:
    return [replace(verdict, seconds=0.0) for verdict in verdicts]


def test_jobs_arrive_as_they_were_sent() -> None:
    limits = Limits()
    jobs = [
        VerificationJob(limits, "x = 'é\\ud800'", ["assert x"], 2.5, "y = 1", ["import math"], None, "weak"),
        VerificationJob(limits, ADD, "def check(candidate): pass", entry_point="add"),
        VerificationJob(limits, "print(1)", [{"input": "", "output": None, "tolerance": 0.5}]),
    ]
    arrived = decode_jobs(encode_jobs(jobs), limits)
    assert [job.arguments() for job in arrived] == [job.arguments() for job in jobs]
    assert arrived[0].seconds == 2.5 and arrived[2].stdio


def test_verdicts_arrive_as_they_were_sent_and_anything_else_is_refused() -> None:
    tests = (Result(True), Result(False, "exception", "\ud800"))
    sent = [Verdict(Outcome.FAILED, "exception", tests, "split", "namespaces", 0.25, "d"), Verdict(
        Outcome.PASSED, "", (Result(True),), "stdio", "landlock", 1.0)]  # fmt: skip
    data = encode_verdicts(sent)
    assert decode_verdicts(data, 2) == sent
    with pytest.raises(ValueError, match="2 verdicts came back for 3 jobs"):
        decode_verdicts(data, 3)
    for wrong in (b"[{}]", data.replace(b'"passed"', b'"great"'), b"\x80\x04."):
        with pytest.raises((ValueError, KeyError, TypeError)):
            decode_verdicts(wrong, 2 if wrong[:2] == b"[{" and len(wrong) > 4 else 1)


@pytest.mark.parametrize(
    ("sandbox", "message"),
    [
        ({"ray": 3}, "sandbox.ray='3', expected auto, local or HOST:PORT"),
        ({"ray": "a cluster"}, "sandbox.ray='a cluster', expected"),
        ({"ray": ""}, "sandbox.ray='', expected"),
        ({"wait_s": 5}, "wait_s has no effect without sandbox.ray"),
        ({"ray": "auto", "wait_s": 0}, "sandbox.wait_s=0, expected"),
        ({"ray": "auto", "tiers": ["docker"]}, "tiers='docker'"),
    ],
)
def test_wrong_options_are_refused_before_ray_is_asked(sandbox: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_reward("code", sandbox=sandbox)


# --- with Ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with open_cluster() as ray:
        yield ray


@pytest.fixture(scope="module")
def sandbox(cluster: Any) -> Iterator[Sandbox]:
    from rlvr.sandbox.ray_sandbox import RaySandbox

    with RaySandbox("local", workers=2, limits=Limits(timeout_s=5.0)) as made:
        yield made


PROGRAMS = [
    *[f"def f():\n    {body}\n" for body in (
        "return 1", "return 2", "while True: pass", "import os; os._exit(0)", "import ctypes; ctypes.string_at(0)",
        "return bytearray(1 << 40)", "raise ValueError('no')", "return 'x' * (4 << 20)", "return [1, 2.5, {3: (4,)}]",
    )], "", "def f(:", "x = '\ud800'", "x = '\0'", "y = 1", "x = 1\n" * 2_000_000,
]  # fmt: skip


@pytest.mark.slow
def test_verdicts_limits_and_order_are_those_of_this_machine(sandbox: Sandbox) -> None:
    limits = sandbox.limits
    jobs = [{"solution": text, "tests": ["assert f() == 1"], "timeout_s": 1.5} for text in PROGRAMS]
    jobs += [
        {"solution": None, "tests": ["assert f() == 1"]},
        {"solution": "def f(): return 1", "tests": ["assert f( == 1"]},
        {"solution": "print(input())", "tests": [{"input": "3", "output": "3"}, {"input": "3", "output": "4"}]},
        {"solution": "def f(x): return x", "tests": "def check(c):\n    assert c(2) == 2", "entry_point": "f"},
        {"solution": "def f(): return g()", "tests": ["assert f() == 9"], "setup": "def g(): return 9"},
    ]
    with Sandbox((sandbox.tier,), 2, limits) as local:
        expected = without_time(local.verify_many(jobs))
    assert without_time(sandbox.verify_many(jobs)) == expected
    assert {verdict.tier for verdict in expected} == {sandbox.tier}
    with pytest.raises(ValueError, match="tests="):
        sandbox.verify_many([JOB, {"solution": "x", "tests": []}])


@pytest.mark.slow
@pytest.mark.skipif(not REAL.exists(), reason="MBPP's files are not there")
def test_mbpp_and_its_mutants_get_the_verdicts_of_this_machine(sandbox: Sandbox) -> None:
    """`MUTANTS=all` takes every problem, the suite a sample."""
    jobs = mbpp()
    jobs = jobs if os.environ.get("MUTANTS") == "all" else jobs[::12]
    jobs += mutants(jobs)
    with Sandbox((sandbox.tier,), 2, sandbox.limits) as local:
        expected = without_time(local.verify_many(jobs))
    got = without_time(sandbox.verify_many(jobs))
    pairs = list(zip(jobs, expected, got, strict=True))
    differing = [(job["solution"], want, have) for job, want, have in pairs if want != have]
    # A program that computes for about as long as it may passes or not by how busy the machine is.
    assert [one for one in differing if Outcome.TIMEOUT not in (one[1].outcome, one[2].outcome)] == []
    assert len(differing) <= len(jobs) // 200
    assert {verdict.outcome for verdict in expected[: len(jobs) // 2]} <= {Outcome.PASSED, Outcome.TIMEOUT}
    assert sum(not verdict.passed for verdict in got[len(jobs) // 2 :]) / (len(jobs) // 2) > 0.3


@pytest.mark.slow
def test_hostile_programs_do_no_more_on_a_worker_than_here(sandbox: Sandbox) -> None:
    from rlvr.audits.attack_runner import run_suite
    from rlvr.audits.attacks import HONEST, HOSTILE

    programs = [attack for attack in [*HOSTILE, *HONEST] if sandbox.tier != "landlock" or attack.needs != "scratch"]
    reward = resolve_reward("code", sandbox=sandbox)
    faults = [one for one in run_suite(reward, programs[::3], 2) if one.fault]
    assert [(one.attack.name, one.fault) for one in faults if one.fault in ("false_pass", "escape")] == []
    # An honest program whose time was over on a busy machine passes alone.
    again = run_suite(reward, [one.attack for one in faults], 1)
    assert [(one.attack.name, one.fault) for one in again if one.fault] == []


@pytest.mark.slow
def test_the_programs_of_a_killed_worker_run_again(sandbox: Sandbox) -> None:
    before = set(sandbox.pids)
    assert len(before) == 2
    thread = threading.Timer(1.0, lambda: [os.kill(pid, signal.SIGKILL) for pid in before])
    thread.start()
    verdicts = sandbox.verify_many([SLEEP] * 30)
    thread.join()
    assert {(verdict.outcome, verdict.detail) for verdict in verdicts} == {(Outcome.PASSED, "")}
    assert not before & set(sandbox.pids)


@pytest.mark.slow
def test_a_worker_that_hangs_is_replaced(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlvr.sandbox import ray_pool

    monkeypatch.setattr(ray_pool, "GRACE", 1.0)
    stopped = sandbox.pids
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    assert sandbox.verify(**JOB, timeout_s=1.0).passed
    assert sandbox.verify(**JOB, timeout_s=1.0).passed
    assert not set(stopped) <= set(sandbox.pids)


@pytest.mark.slow
def test_a_machine_whose_sandbox_breaks_makes_no_error_of_a_program(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And does not get most programs because it fails so fast."""
    from rlvr.sandbox import ray_pool
    from rlvr.sandbox.ray_sandbox import RaySandbox

    broken = tmp_path / "pid"

    class BreakingWorker(SandboxWorker):
        """The first that works is on a machine on which no process can be started from then on."""

        def verify(self, batch: int, jobs: bytes) -> bytes:
            if not broken.exists():
                broken.write_text(str(os.getpid()))
            if broken.read_text() != str(os.getpid()):
                return super().verify(batch, jobs)
            limits, start = self._limits, time.perf_counter()
            errors = [job.error("no_tier", "no more processes", "landlock", start) for job in decode_jobs(jobs, limits)]
            return encode_verdicts(errors)

    monkeypatch.setattr(ray_pool, "SandboxWorker", BreakingWorker)
    with RaySandbox("local", workers=2) as made:
        verdicts = made.verify_many([JOB] * 200)
    assert {(verdict.outcome, verdict.detail) for verdict in verdicts} == {(Outcome.PASSED, "")}
    assert broken.exists(), "no worker was broken"


@pytest.mark.slow
def test_a_program_whose_workers_always_die_is_an_error_and_not_a_failure(sandbox: Sandbox) -> None:
    over = threading.Event()

    def kill_workers() -> None:
        while not over.wait(0.5):
            for pid in sandbox.pids if sandbox.running else ():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill_workers)
    thread.start()
    verdict = sandbox.verify(**SLEEP | {"solution": SLEEP["solution"].replace("0.2", "30"), "timeout_s": 60})
    over.set()
    thread.join()
    assert (verdict.outcome, verdict.reason) == (Outcome.ERROR, "sandbox")
    assert "3 workers were lost while they ran it" in verdict.detail
    assert sandbox.verify(**JOB).passed


def test_a_cancellation_that_overtakes_its_batch_holds() -> None:
    """Ray gives the calls of one caller to a worker's threads in any order."""
    limits = Limits()
    worker = SandboxWorker()
    worker.start(json.dumps({"limits": asdict(limits)}).encode())
    worker.cancel(2, [0])
    for batch, expected in ((1, [True, True]), (2, [False, True]), (3, [True, True])):
        data = worker.verify(batch, encode_jobs([VerificationJob(limits, **JOB)] * 2))
        verdicts = decode_verdicts(data, 2)
        assert [verdict.passed for verdict in verdicts] == expected
    worker._sandbox.close()


def test_two_cancellations_that_overtake_one_batch_hold_both() -> None:
    limits = Limits()
    worker = SandboxWorker()
    worker.start(json.dumps({"limits": asdict(limits)}).encode())
    worker.cancel(0, [0])
    worker.cancel(0, [2])
    verdicts = decode_verdicts(worker.verify(0, encode_jobs([VerificationJob(limits, **JOB)] * 3)), 3)
    assert [verdict.passed for verdict in verdicts] == [False, True, False]
    worker._sandbox.close()


@pytest.mark.slow
def test_what_a_test_has_beside_its_input_and_output_harms_nothing(sandbox: Sandbox) -> None:
    """As rows of a dataset have: JSON has no form for every type."""
    test = {"input": "3", "output": "3", "id": b"1", "when": object()}
    verdicts = sandbox.verify_many([{"solution": "print(input())", "tests": [test]}, JOB])
    assert [verdict.passed for verdict in verdicts] == [True, True]
    with pytest.raises(ValueError, match="entry_point=b'f'"):
        sandbox.verify(**JOB, entry_point=b"f")  # pyright: ignore[reportArgumentType]
    assert sandbox.verify(**JOB).passed


@pytest.mark.slow
def test_a_cancelled_call_kills_its_programs(sandbox: Sandbox) -> None:
    event = threading.Event()
    threading.Timer(1.0, event.set).start()
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="cancelled"):
        run_with(event, sandbox.verify_many, [ENDLESS] * 6)
    assert time.monotonic() - begun < 30
    assert all(verdict.passed for verdict in sandbox.verify_many([JOB] * 6))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_as_many_programs_run_at_once_as_there_are_workers(cluster: Any, workers: int) -> None:
    from rlvr.sandbox.ray_sandbox import RaySandbox

    with RaySandbox("local", workers=workers) as made:
        verdicts: list[Verdict] = []
        thread = threading.Thread(target=lambda: verdicts.extend(made.verify_many([SLEEP] * 2 * workers)))
        thread.start()
        counts = {made.running}
        while thread.is_alive():
            counts.add(made.running)
        assert max(counts) == workers
        assert len(verdicts) == 2 * workers and all(verdict.passed for verdict in verdicts)


@pytest.mark.slow
def test_a_closed_sandbox_ends_what_runs_and_leaves_no_process(cluster: Any) -> None:
    from rlvr.sandbox.ray_sandbox import RaySandbox

    closing = RaySandbox("local", workers=1)
    (pid,) = closing.pids
    zygotes = [int(line) for line in subprocess.check_output(["pgrep", "-P", str(pid)], text=True).split()]
    verdicts: list[Verdict] = []
    thread = threading.Thread(target=lambda: verdicts.extend(closing.verify_many([ENDLESS] * 3)))
    thread.start()
    while not closing.running:
        time.sleep(0.05)
    closing.close()
    thread.join()
    assert {(verdict.outcome, verdict.detail) for verdict in verdicts} == {(Outcome.ERROR, "the sandbox was closed")}
    with pytest.raises(ValueError, match="closed"):
        closing.verify(**JOB)
    assert len(zygotes) >= 2
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{one}/exe").exists() for one in zygotes) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{one}/exe").exists() for one in zygotes)


@pytest.mark.slow
def test_a_cluster_that_lacks_the_cpus_says_so_in_time(cluster: Any, sandbox: Sandbox) -> None:
    from rlvr.sandbox.ray_sandbox import RaySandbox

    begun = time.monotonic()
    with pytest.raises(RayError, match=r"99 workers with 1 CPU each .* 4 CPU \(\d free\) on 1 machine") as refusal:
        RaySandbox("local", workers=99, wait_s=2.0)
    assert time.monotonic() - begun < 120 and "ray start --address" in str(refusal.value)
    assert sandbox.verify(**JOB).passed


@pytest.mark.slow
def test_the_reward_code_is_judged_on_the_cluster(cluster: Any) -> None:
    reward = resolve_reward("code", sandbox={"ray": "local", "workers": 1, "limits": {"timeout_s": 2.0}})
    assert reward("", ADD, {"tests": JOB["tests"]}) == 1.0
    assert join_cluster("local") is None
