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
from rlvr.types import Outcome, Score, Trajectory

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
    """A worker on a job that does what it is told, good or bad."""
    (tmp_path / "hostile_job.py").write_text(JOB)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = Worker("hostile_job")
    yield made
    made.close()


def fits(worker: Worker, text: str, setup: dict[str, str] = FULL) -> Any:
    (reply,) = worker.map(setup, [text], seconds=10)
    return reply.value and reply.value["fits"]


def state(pid: int) -> str:
    """The state letter of a process, Z for one that nobody has reaped; empty where there is none."""
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
    root = str(Path(__file__).parents[1])
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


@pytest.mark.parametrize("text", ["", "\n", "é\u0000\U0001f600", "\ud800 alone", '"\\'])
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


def test_what_a_job_prints_is_no_reply(hostile: Worker) -> None:
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
    assert reply.failure == "died" and "No module named 'numpy'" in reply.detail


def scores(texts: list[str], **kwargs: Any) -> list[Score]:
    reward = resolve_reward("format_compliance", required_format="regex", **kwargs)
    return reward.score([Trajectory("p", [1], text, [2]) for text in texts])


def test_the_whole_response_must_match_unless_a_search_is_asked_for() -> None:
    texts = ["42", "42\n", "is 42", "", "4" * 100_001]
    assert [s.value for s in scores(texts, pattern="[0-9]+")] == [1, 0, 0, 0, 0]
    found = scores(texts, pattern="[0-9]+", match="search")
    assert [s.value for s in found] == [1, 1, 1, 0, 0]
    assert [(s.outcome, s.reason) for s in found][-2:] == [(Outcome.FAILED, "wrong_format")] * 2
    assert resolve_reward("format_compliance", required_format="regex", pattern="(?is)<a>.*</A>")("p", "<A>\n</a>") == 1


def test_a_pattern_that_runs_away_is_an_error_and_never_a_zero() -> None:
    got = scores(["aaa", ENDLESS], pattern="(a+)+", seconds=0.3)
    assert got[0] == Score(1.0, Outcome.PASSED)
    assert (got[1].value, got[1].outcome, got[1].reason) == (None, Outcome.ERROR, "regex_timeout")
    assert "pattern '(a+)+' on an answer of 61 characters" in got[1].detail and "raise `seconds`" in got[1].detail
    hungry = scores(["a" * 100_000], pattern=HUNGRY, seconds=60)[0]
    assert (hungry.value, hungry.outcome, hungry.reason) == (None, Outcome.ERROR, "regex_failed")


def test_in_a_composite_a_runaway_pattern_is_an_error_of_the_whole() -> None:
    part = {"required_format": "regex", "pattern": "(a+)+", "seconds": 0.2}
    rewards = [{"name": "length_penalty"}, {"name": "format_compliance", "kwargs": part}]
    (got,) = resolve_reward("composite", rewards=rewards).score([Trajectory("p", [1], ENDLESS, [2])])
    assert (got.value, got.reason) == (None, "regex_timeout") and "part format_compliance" in got.detail


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"pattern": "(a"}, r"pattern='\(a' is no regular expression: missing \), .* at position 0; mend it there"),
        ({"pattern": "ab**"}, "multiple repeat at position 3"),
        ({"pattern": "a{99999999999999999999}"}, "the repetition number is too large"),
        ({"pattern": "(" * 4000 + ")" * 4000}, "is no regular expression: .*recursion"),
        ({}, "expected a regular expression of 1 to 10,000 characters"),
        ({"pattern": ""}, "expected a regular expression"),
        ({"pattern": 3}, "pattern='3', expected a regular expression of .* in quotes"),
        ({"pattern": "a" * 10_001}, "expected a regular expression of 1 to 10,000"),
        ({"pattern": "a", "match": "ful"}, r"match='ful' \(did you mean 'full'\?\); known: full, search"),
        ({"pattern": "a", "seconds": 0}, "seconds=0, expected a number above 0, at most 60"),
        ({"pattern": "a", "seconds": True}, "seconds=True"),
        ({"pattern": "a", "flags": "i"}, "does not take 'flags'"),
        (
            {"required_format": "json", "pattern": "a"},
            "pattern has no effect with required_format='json'",
        ),
        ({"required_format": "json", "match": "full"}, "match has no effect"),
    ],
)
def test_a_bad_pattern_or_option_is_refused_when_resolved(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_reward("format_compliance", **{"required_format": "regex", **kwargs})
