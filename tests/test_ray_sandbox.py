"""A sandbox on a Ray cluster gives the verdicts of one on this machine, and a lost worker is no program's failure.

The tests marked slow start Ray for real, on the loopback address, with more workers than this machine may have cores.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import rlvr
from rlvr.core.cancellation import run_with
from rlvr.core.code_version import describe_code, hash_package
from rlvr.core.ray_cluster import RayError, check_same_code, join_cluster
from rlvr.core.types import Outcome
from rlvr.reward import resolve_reward
from rlvr.sandbox import Limits, Sandbox, Verdict
from rlvr.sandbox.ray_worker import SandboxWorker, decode_jobs, decode_verdicts, encode_jobs, encode_verdicts
from rlvr.sandbox.verdict import TestResult as Result
from rlvr.sandbox.verification_job import VerificationJob
from tests.code_rows import REAL
from tests.local_ray import open_cluster
from tests.mutants import mbpp, mutants

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


def test_other_code_or_another_python_is_refused_with_both_versions() -> None:
    ours = describe_code()
    check_same_code(ours | {"machine": "a"}, "a")
    with pytest.raises(RayError, match=rf"worker on b has python 3\.9\.1, this process has python {ours['python']}"):
        check_same_code(ours | {"python": "3.9.1"}, "b")
    with pytest.raises(RayError, match=rf"rlvr None, this process has rlvr {rlvr.__version__} \({hash_package()}\)"):
        check_same_code({"python": ours["python"]}, "b")


@pytest.mark.parametrize(
    ("sandbox", "message"),
    [
        ({"ray": 3}, "sandbox.ray=3, expected auto, local or host:port"),
        ({"ray": ""}, "sandbox.ray='', expected"),
        ({"wait_s": 5}, "wait_s has no effect without sandbox.ray"),
        ({"ray": "auto", "wait_s": 0}, "sandbox.wait_s=0, expected"),
        ({"ray": "auto", "tiers": ["docker"]}, "tiers='docker'"),
    ],
)
def test_wrong_options_are_refused_before_ray_is_asked(sandbox: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_reward("code", sandbox=sandbox)


def test_without_the_package_the_message_says_how_to_install_it() -> None:
    code = (
        "import sys; sys.modules['ray'] = None\nfrom rlvr.reward import resolve_reward\n"
        "resolve_reward('code', sandbox={'ray': 'auto'}).start()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "ray is not installed: pip install 'rlvr[ray]'" in done.stderr


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
    from rlvr.audit.attack_runner import run_suite
    from rlvr.audit.attacks import HONEST, HOSTILE

    programs = [attack for attack in [*HOSTILE, *HONEST] if sandbox.tier != "landlock" or attack.needs != "scratch"]
    results = run_suite(resolve_reward("code", sandbox=sandbox), programs[::3], 2, lambda result: None)
    assert [(one.attack.name, one.fault) for one in results if one.fault] == []


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


NEWER = """
import sys
from pathlib import Path
from rlvr.core.code_version import describe_code
from rlvr.sandbox.ray_sandbox import RaySandbox
describe_code()  # what this process runs; then the files change, as on a machine that was updated
with open(Path(sys.argv[1]) / "rlvr" / "sandbox" / "verdict.py", "a") as file:
    file.write("# newer")
RaySandbox("local", workers=1)
"""


@pytest.mark.slow
def test_a_worker_of_another_version_is_refused_with_both(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    shutil.copytree(Path(rlvr.__file__).parent, tmp_path / "rlvr", ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-c", NEWER, str(tmp_path)], capture_output=True, text=True, timeout=300, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    version = rf"has rlvr {rlvr.__version__} \(\w{{12}}\)"
    assert re.search(rf"the worker on \S+ {version}, this process {version}; install", done.stderr), done.stderr


@pytest.mark.slow
def test_an_address_where_nothing_listens_is_refused_at_once() -> None:
    pytest.importorskip("ray")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    code = "import sys; from rlvr.core.ray_cluster import join_cluster; join_cluster(sys.argv[1])"
    for given, reason in ((address, "refused"), ("a cluster", "is not auto, local or host:port")):
        done = subprocess.run([sys.executable, "-c", code, given], capture_output=True, text=True, timeout=60)
        assert f"ray={given}: no cluster could be joined" in done.stderr and reason in done.stderr


@pytest.mark.slow
def test_the_reward_code_is_judged_on_the_cluster(cluster: Any) -> None:
    reward = resolve_reward("code", sandbox={"ray": "local", "workers": 1, "limits": {"timeout_s": 2.0}})
    assert reward("", ADD, {"tests": JOB["tests"]}) == 1.0
    assert join_cluster("local") is None
