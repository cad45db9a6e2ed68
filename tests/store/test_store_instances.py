"""Several instances on one database: each session has one worker, and none is lost or doubled when a worker dies."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlvr.store import ExperienceStore, Session, Status, open_store

WRITER = """
import sys
from rlvr.store import Experience, Session, open_store
url, name, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
store = open_store(url)
for s in range(number):
    store.add_session(Session(f"{name}-{s}", "shared", "p", instance=name))
    for i in range(1, 6):
        new = [Experience(f"{name}-{s}", "shared", i, "p", "o", sample=k, reward=0.5) for k in range(3)]
        store.add_experiences(new)
        print(f"{name}-{s} {i}", flush=True)
"""


@pytest.fixture
def store(store_url: str) -> Iterator[ExperienceStore]:
    store = open_store(store_url)
    yield store
    store.close()


def writer(url: str, name: str, sessions: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, url, name, str(sessions)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_queued_session_is_taken_by_one_instance(store: ExperienceStore, store_url: str):
    for i in range(12):
        store.add_session(Session(f"s{i}", "t", "p"))
    instances = [open_store(store_url) for _ in range(4)]

    def take(number: int) -> list[str]:
        return [f"s{i}" for i in range(12) if instances[number].claim(f"s{i}", f"i{number}")]

    with ThreadPoolExecutor(4) as pool:
        taken = [id for ids in pool.map(take, range(4)) for id in ids]
    assert sorted(taken) == sorted(f"s{i}" for i in range(12))
    assert {s.status for s in store.sessions()} == {Status.RUNNING}
    assert not store.claim("s0", "i9") and not store.claim("nowhere", "i9")
    for instance in instances:
        instance.close()


def test_silent_sessions_are_interrupted_once_and_living_ones_are_not(store: ExperienceStore, store_url: str):
    other = open_store(store_url)
    with store.read() as connection:
        now = store.now(connection)
    for id, beat, kind, status in [
        ("silent", now - 100, "train", Status.RUNNING),
        ("queued", now - 100, "train", Status.QUEUED),
        ("alive", now, "train", Status.RUNNING),
        ("done", now - 100, "train", Status.DONE),
        ("slow run", now - 100, "run", Status.RUNNING),
        ("dead run", now - 4000, "run", Status.RUNNING),
    ]:
        store.add_session(Session(id, "t", "p", kind=kind, status=status, heartbeat=beat, instance="gone"))
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(lambda s: s.interrupt_lost("me", 30), [store, other]))
    assert sorted(ended[0] + ended[1]) == ["dead run", "queued", "silent"]
    found = store.session("silent")
    assert found is not None and found.status is Status.INTERRUPTED and (found.error or {})["code"] == "interrupted"
    assert found.finished == pytest.approx(now, abs=30)
    assert store.interrupt_lost("me", 30) == []
    other.close()


def test_unfinished_sessions_of_an_instances_earlier_process_are_interrupted(store: ExperienceStore, store_url: str):
    store.add_session(Session("left", "t", "p", instance="me", status=Status.RUNNING))
    store.add_session(Session("another's", "t", "p", instance="you", status=Status.RUNNING))
    time.sleep(0.01)
    reborn = open_store(store_url)
    reborn.add_session(Session("mine", "t", "p", instance="me", status=Status.RUNNING))
    assert reborn.interrupt_lost("me", 60) == ["left"]
    assert reborn.interrupt_lost("me", 60) == []
    assert reborn.heartbeat("me") == 1
    reborn.close()


def test_a_heartbeat_keeps_a_session_alive(store: ExperienceStore):
    store.add_session(Session("s", "t", "p", instance="me", status=Status.RUNNING, heartbeat=1.0))
    assert store.heartbeat("me") == 1 and store.heartbeat("you") == 0
    assert store.interrupt_lost("other", 30) == []


@pytest.mark.slow
def test_of_two_writers_one_is_killed_and_no_experience_is_lost_or_doubled(store: ExperienceStore, store_url: str):
    """Acknowledged writes are there; another writer repeats the killed one's work, which is stored once."""
    killed, other = writer(store_url, "a", 40), writer(store_url, "b", 20)
    assert killed.stdout is not None
    told = [killed.stdout.readline().split() for _ in range(33)]
    killed.send_signal(signal.SIGKILL)
    told += [line.split() for line in killed.stdout.read().splitlines()]
    killed.communicate(timeout=30)
    out, err = other.communicate(timeout=100)
    assert other.returncode == 0 and len(out.splitlines()) == 100, err
    assert len(told) < 200, "the writer was to be killed in the middle"
    for id, iteration in told:
        assert {(e.iteration, e.sample) for e in store.experiences(session_id=id)} >= {
            (int(iteration), k) for k in range(3)
        }
    by_session = {s.id: store.count(session_id=s.id) for s in store.sessions(limit=1000)}
    assert {id: n for id, n in by_session.items() if n % 3} == {}, "an iteration is written whole or not at all"
    again = writer(store_url, "a", 40)
    assert "Error" not in again.communicate(timeout=100)[1] and again.returncode == 0
    assert store.count() == (40 + 20) * 5 * 3
    keys = [(e.session_id, e.sample, e.iteration) for e in store.experiences(limit=10_000, tokens=False)]
    assert len(set(keys)) == len(keys)
    assert set(store.interrupt_lost("c", 0)) == {s.id for s in store.sessions(limit=1000)}
