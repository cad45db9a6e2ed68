"""The guarded worker: hostile texts cost their own limit of time and memory, and nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlvr.reward import resolve_reward
from rlvr.sandbox import Worker

FULL = {"pattern": "a+b?", "match": "full"}
EVIL = {"pattern": "(a+)+$", "match": "search"}  # doubles its time with every a
ENDLESS = "a" * 60 + "!"
HUNGRY = "(?:" + "|".join("(b)" for _ in range(300)) + "|(a))*"  # keeps 301 marks per letter: a gigabyte

JOB = """
import os, resource
earlier = []
def run(setup, item):
    if item == "worn" and earlier: os._exit(3)
    earlier.append(item)
    if item == "spin":
        while True: pass
    if item == "eat": bytearray(1 << 40)
    if item == "exit": os._exit(3)
    if item == "raise": raise ValueError("no")
    if item == "large": return "x" * 10_000_000
    if item == "print": print("hello" * 100_000)
    if item == "write":
        with open(setup, "w") as file: file.write("x")
    if item == "fork": return [os.fork(), os.getuid()]
    if item == "about":
        limits = {name: resource.getrlimit(getattr(resource, name))[0] for name in ("RLIMIT_AS", "RLIMIT_CORE")}
        return {**limits, "env": sorted(os.environ), "session": os.getsid(0) == os.getpid(), "cwd": os.getcwd()}
    return item
"""


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker("rlvr.sandbox.regex")
    yield made
    made.close()


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """A worker on a job that runs any command, good or bad."""
    (tmp_path / "hostile_job.py").write_text(JOB)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = Worker("hostile_job")
    yield made
    made.close()


def fits(worker: Worker, text: str, setup: dict[str, str] = FULL) -> Any:
    (reply,) = worker.map(setup, [text], seconds=10)
    return reply.value and reply.value["fits"]


def state(pid: int) -> str:
    """The state letter of a process, Z for one that was not reaped; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


def script(code: str, *words: str) -> subprocess.Popen[str]:
    root = str(Path(__file__).parents[2])
    head = "import os, signal, sys, threading, time\nfrom rlvr.sandbox import Worker\n"
    setup = f"FULL, EVIL, ENDLESS = {FULL!r}, {EVIL!r}, {ENDLESS!r}\nworker = Worker('rlvr.sandbox.regex')\n"
    return subprocess.Popen(
        [sys.executable, "-c", head + setup + code, *words], env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_a_catastrophic_pattern_costs_its_time_and_spares_the_other_texts(worker: Worker) -> None:
    """The text that runs away is killed at its limit, its child reaped; those before and after get their verdicts."""
    worker.map(EVIL, ["a"], 10)
    first = worker.pid
    start = time.monotonic()
    replies = worker.map(EVIL, ["aaa", ENDLESS, "b", ENDLESS, "aa"], seconds=0.3)
    assert 0.6 <= time.monotonic() - start < 5
    assert [r.failure for r in replies] == ["", "timeout", "", "timeout", ""]
    assert [r.value["fits"] for r in replies if not r.failure] == [True, False, True]
    assert first is not None and worker.pid != first and state(first) == ""


def test_a_pattern_that_eats_memory_fails_alone(worker: Worker) -> None:
    """Our own process never pays: the child meets its limit, and the next text finds a fresh one."""
    replies = worker.map({"pattern": HUNGRY, "match": "full"}, ["a", "a" * 100_000, "b"], seconds=60)
    assert [r.failure for r in replies] == ["", "died", ""]
    assert "more than the 256 MiB of memory" in replies[1].detail
    assert replies[0].value == replies[2].value == {"fits": True}


def test_a_thousand_calls_take_one_child_and_leave_nothing_open(worker: Worker) -> None:
    assert fits(worker, "a")
    child, descriptors = worker.pid, len(os.listdir("/proc/self/fd"))
    for i in range(1000):
        assert fits(worker, "a" * (i % 7) + "b") is (i % 7 > 0)
    assert (worker.pid, len(os.listdir("/proc/self/fd"))) == (child, descriptors)
    worker.close()
    assert child is not None and state(child) == "" and worker.pid is None


def test_more_text_than_a_pipe_holds_goes_both_ways(hostile: Worker) -> None:
    texts = [chr(97 + i % 26) * 50_000 for i in range(100)]
    assert [r.value for r in hostile.map(None, texts, 10)] == texts


@pytest.mark.parametrize("text", ["", "\n", "é\u0000\U0001f600", "\ud800 alone", "\ud83d" + "\ude00", '"\\'])
def test_any_text_arrives_as_it_is(hostile: Worker, text: str) -> None:
    assert hostile.map(None, [text], 10)[0].value == text


def test_a_child_killed_between_calls_is_replaced_unnoticed(worker: Worker) -> None:
    assert fits(worker, "a")
    for _ in range(5):
        killed = worker.pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        assert fits(worker, "ab") is True
        assert worker.pid != killed and state(killed) == ""


def test_a_text_that_fails_after_others_is_judged_again_by_a_fresh_child(hostile: Worker) -> None:
    """So a verdict does not depend on what the child did before."""
    assert [r.value for r in hostile.map(None, ["worn", "x", "worn"], 10)] == ["worn", "x", "worn"]


def test_threads_take_turns_and_get_their_own_replies(worker: Worker) -> None:
    wrong: list[str] = []

    def ask(own: int) -> None:
        for i in range(50):
            text = "a" * (own + 1) + "b" * (i % 3)
            if fits(worker, text) is not (i % 3 < 2):
                wrong.append(text)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_it_works_inside_an_event_loop(worker: Worker) -> None:
    async def main() -> list[Any]:
        inside = fits(worker, "ab")
        return [inside, *await asyncio.gather(*(asyncio.to_thread(fits, worker, "b") for _ in range(4)))]

    assert asyncio.run(main()) == [True, False, False, False, False]


def test_a_forked_copy_has_a_child_of_its_own_and_leaves_ours_alone() -> None:
    """Even when the fork happens while another thread waits for a reply; the copy holds no end of our pipes open."""
    process = script("""
worker.map(FULL, ["a"], 10)
mine = worker.pid
waiting = threading.Thread(target=worker.map, args=(EVIL, [ENDLESS], 1.0)); waiting.start(); time.sleep(0.3)
copy = os.fork()
if copy == 0:
    (reply,) = worker.map(FULL, ["ab"], 10)
    fine = reply.value == {"fits": True} and worker.pid != mine
    worker.close()
    os._exit(0 if fine else 1)
status = os.waitpid(copy, 0)[1]
waiting.join()
(reply,) = worker.map(FULL, ["aab"], 10)
sleeper = os.fork()
if sleeper == 0:
    os.close(1); os.close(2); time.sleep(30); os._exit(0)
print(status, reply.value, worker.pid, sleeper, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
""")
    output, errors = process.communicate(timeout=60)
    status, _, ended, ours, sleeper = output.split()
    try:
        assert (status, ended) == ("0", "True}"), errors
        assert until(lambda: state(int(ours)) in ("", "Z"), 5), "the copy keeps the dead parent's child alive"
    finally:
        os.kill(int(sleeper), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_the_child_ends_with_a_parent_that_is_killed(busy: bool) -> None:
    """Its input closes; one that is busy then runs into its limit of processor time."""
    code = "worker.map(FULL, ['a'], 10); print(worker.pid, flush=True)\n"
    process = script(code + ("worker.map(EVIL, [ENDLESS], 1.0)" if busy else "time.sleep(60)"))
    assert process.stdout is not None
    child = int(process.stdout.readline())
    time.sleep(0.2)
    process.kill()
    process.communicate(timeout=10)
    assert until(lambda: state(child) in ("", "Z"), 20)


def test_the_child_ends_with_a_parent_that_ends(worker: Worker) -> None:
    process = script("worker.map(FULL, ['a'], 10); print(worker.pid)")
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 0 and errors == ""
    assert until(lambda: state(int(output)) in ("", "Z"), 5)


def test_ctrl_c_leaves_no_reply_behind_for_the_next_call() -> None:
    process = script("""
worker.map(FULL, ["a"], 10)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    worker.map(EVIL, [ENDLESS, "a"], 30)
except KeyboardInterrupt:
    print([r.value["fits"] for r in worker.map(FULL, ["b", "a"], 10)])
""")
    output, errors = process.communicate(timeout=20)
    assert output == "[False, True]\n", errors


@pytest.mark.parametrize(
    ("item", "failure", "detail"),
    [
        ("spin", "timeout", "no reply within 0.5 s"),
        ("eat", "died", "more than the 256 MiB of memory"),
        ("exit", "died", "ended with status 3"),
        ("raise", "raised", "ValueError: no"),
        ("large", "too_large", "a reply of 10000013 bytes, at most 1048576"),
        ("write", "raised", "OSError"),
    ],
)
def test_every_way_to_misbehave_is_a_failure_of_that_item(
    hostile: Worker, tmp_path: Path, item: str, failure: str, detail: str
) -> None:
    replies = hostile.map(str(tmp_path / "file"), ["before", item, "after"], seconds=0.5)
    assert [r.value for r in replies] == ["before", None, "after"]
    assert replies[1].failure == failure and detail in replies[1].detail


def test_output_printed_by_a_job_is_not_a_reply(hostile: Worker) -> None:
    assert [r.value for r in hostile.map(None, ["print", "x"], 10)] == ["print", "x"]


def test_the_child_sees_no_environment_and_is_limited(hostile: Worker) -> None:
    about = hostile.map(None, ["about"], 10)[0].value
    assert about["env"] in ([], ["LC_CTYPE"])  # Python sets the latter itself
    assert (about["RLIMIT_AS"], about["RLIMIT_CORE"]) == (256 << 20, 0)
    assert about["session"] and about["cwd"] == "/"
    if os.getuid() != 0:  # root may always fork
        assert hostile.map(None, ["fork"], 10)[0].failure == "raised"


def test_a_job_that_cannot_be_loaded_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no_job_at_all.py").write_text("import numpy\n")  # not there: standard library only
    monkeypatch.syspath_prepend(str(tmp_path))
    (reply,) = Worker("no_job_at_all").map(None, ["x"], 10)
    assert reply.failure == "not_started" and "No module named 'numpy'" in reply.detail


def test_a_job_that_is_never_ready_fails_the_call_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once per item: each would wait as long."""
    (tmp_path / "sleepy_job.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    start = time.monotonic()
    replies = Worker("sleepy_job", start_seconds=0.5).map(None, ["x"] * 10, 10)
    assert time.monotonic() - start < 4
    assert {(r.failure, r.detail) for r in replies} == {("not_started", "it was not ready within 0.5 s")}


@pytest.mark.slow
def test_after_twenty_late_texts_in_a_row_the_rest_of_the_call_is_not_run(worker: Worker) -> None:
    """A good one in between starts the count anew, and so does the next call."""
    texts = [ENDLESS] * 15 + ["a"] + [ENDLESS] * 20 + ["a"] * 2000
    replies = worker.map(EVIL, texts, seconds=0.05)
    assert [r.failure for r in replies] == ["timeout"] * 15 + [""] + ["timeout"] * 2020
    assert {r.detail for r in replies[:15] + replies[16:36]} == {"no reply within 0.05 s"}
    assert {r.detail for r in replies[36:]} == {"not run: none of the 20 before it had a reply within 0.05 s"}
    assert [r.failure for r in worker.map(EVIL, ["a"], 10)] == [""]


def test_the_end_of_the_process_waits_for_no_text() -> None:
    process = script("""
worker.map(FULL, ["a"], 10)
replies = []
waiting = threading.Thread(target=lambda: replies.append(worker.map(EVIL, [ENDLESS] * 12, 2.0)), daemon=True)
waiting.start(); time.sleep(0.3)
print(worker.pid, time.time(), flush=True)
""")
    output, errors = process.communicate(timeout=60)
    child, left = output.split()
    assert time.time() - float(left) < 2 and (process.returncode, errors) == (0, "")
    assert until(lambda: state(int(child)) in ("", "Z"), 5)


START_TROUBLE = {
    "no interpreter": ("sys.executable = '/nowhere/python'", "/nowhere/python could not be started"),
    "unknown interpreter": ("sys.executable = None", "sys.executable is empty"),
    "no descriptors": (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))", "Too many open files",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("trouble", "told"), START_TROUBLE.values(), ids=START_TROUBLE)
def test_a_worker_that_cannot_start_is_not_blamed_on_the_pattern(trouble: str, told: str) -> None:
    """Neither where the reward is made nor where it judges."""
    process = script(f"""
from rlvr.reward import resolve_reward
from rlvr.reward.text.pattern import matcher
from rlvr.core.types import Trajectory
reward = resolve_reward("format_compliance", required_format="regex", pattern="a")
matcher().close()
{trouble}
(score,) = reward.score([Trajectory("p", [1], "a", [2])])
print(score.value, score.reason, score.detail)
try:
    resolve_reward("format_compliance", required_format="regex", pattern="b")
except ValueError as error:
    print(error)
""")
    output, errors = process.communicate(timeout=60)
    scored, refused = output.splitlines() or ("", errors)
    assert scored.startswith("None no_worker could not start the worker") and told in scored
    assert refused.startswith("reward 'format_compliance': could not start the worker") and told in refused
    assert "pattern '" not in output and "possessive" not in output and errors == ""


def test_a_hard_limit_on_processor_time_is_kept_and_harmless() -> None:
    process = script("""
import resource
resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
print([r.value or r for r in worker.map(FULL, ["a", "b"], seconds=100)])
""")
    output, errors = process.communicate(timeout=60)
    assert (output, errors) == ("[{'fits': True}, {'fits': False}]\n", "")


def test_a_text_beyond_the_memory_of_the_child_is_reported_as_such() -> None:
    small = Worker("rlvr.sandbox.regex", memory=80 << 20)
    replies = small.map(FULL, ["a", "a" * (90 << 20), "a"], seconds=30)
    small.close()
    assert [r.failure for r in replies] == ["", "died", ""]
    assert "more than the 80 MiB of memory" in replies[1].detail


def test_a_pattern_has_no_more_time_to_compile_than_an_answer_has() -> None:
    """A fresh child compiles it within an answer's time: what is accepted here works there."""
    slow = "(?i)" + "[\u0100-\uffff]" * 40  # each range is expanded for its upper and lower case
    with pytest.raises(ValueError, match=r"could not be compiled: no reply within 0.01 s; .* or raise `seconds`"):
        resolve_reward("format_compliance", required_format="regex", pattern=slow, seconds=0.01)
