"""Forks of a guarded worker: a result comes back, and nothing that an item does outlives it or leaves its fork.

Each attempt runs in a worker whose job (written here) calls a function of its own in a fork.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlvr.sandbox.worker import MIB, Worker

JOB = """
import os, signal, socket, sys, time
from rlvr.sandbox.item_forks import ItemForks

state = {"count": 0}
forks = None

def count():
    state["count"] += 1
    return state["count"]

def burn():
    while True:
        pass

ATTEMPTS = {
    "count": count,
    "burn": burn,
    "sleep": lambda: time.sleep(60),
    "memory": lambda: len(bytearray(1 << 40)),
    "raise": lambda: 1 / 0,
    "exit": lambda: sys.exit(3),
    "end": lambda: os._exit(0),
    "kill": lambda: os.kill(os.getppid(), 9),
    "fork": lambda: os.fork(),
    "read": lambda: open("/etc/passwd").read(),
    "write": lambda: open("/tmp/rlvr-fork", "w"),
    "connect": lambda: socket.socket().bind(("127.0.0.1", 0)),
    "execute": lambda: os.execv(sys.executable, ["python"]),
    "descriptors": lambda: [n for n in range(3, 64) if is_open(n)],
    "flood": lambda: "x" * (1 << 20),
    "unpackable": lambda: object(),
}

def is_open(n):
    try:
        os.fstat(n)
        return True
    except OSError:
        return False

def run(setup, item):
    global forks
    forks = forks or ItemForks([os.path.dirname(os.__file__), "/usr/lib", "/lib"])
    if item == "missing":
        return forks.missing
    return list(forks.run(ATTEMPTS[item], 0.3, 1.0))
"""


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    folder = tmp_path_factory.mktemp("job")
    (folder / "fork_attempts.py").write_text(JOB)
    sys.path.insert(0, str(folder))
    try:
        worker = Worker("fork_attempts", memory=512 * MIB, may_fork=True)
        yield worker
        worker.close()
    finally:
        sys.path.remove(str(folder))


def attempt(worker: Worker, name: str) -> Any:
    (reply,) = worker.map(None, [name], 20.0)
    assert reply.failure == "", reply
    return reply.value


def test_a_fork_starts_from_the_same_state_each_time(worker: Worker) -> None:
    assert [attempt(worker, "count") for _ in range(3)] == [[1, "", ""]] * 3


@pytest.mark.parametrize(
    ("name", "failure"),
    [
        ("burn", "timeout"),
        ("sleep", "timeout"),
        ("memory", "memory"),
        ("raise", "raised"),
        ("exit", "raised"),
        ("end", "died"),
        ("flood", "died"),
        ("unpackable", "died"),
    ],
)
def test_what_goes_wrong_in_a_fork_has_a_name(worker: Worker, name: str, failure: str) -> None:
    assert attempt(worker, name)[1] == failure
    assert attempt(worker, "count") == [1, "", ""]


def test_a_fork_holds_no_descriptor_of_its_worker(worker: Worker) -> None:
    """One is its own report; requests and replies of the worker are closed, so it cannot forge another's."""
    assert len(attempt(worker, "descriptors")[0]) == 1


@pytest.mark.parametrize("name", ["kill", "fork", "read", "write", "connect", "execute"])
def test_a_fork_reaches_nothing_outside(worker: Worker, name: str) -> None:
    if attempt(worker, "missing"):
        pytest.skip("this system has no Landlock or no seccomp")
    value, failure, detail = attempt(worker, name)
    assert value is None and failure == "raised" and ("PermissionError" in detail or "Operation" in detail), detail
    assert attempt(worker, "count") == [1, "", ""]
    assert not Path("/tmp/rlvr-fork").exists()
