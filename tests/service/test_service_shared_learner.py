"""A policy that replicas share: the learner's steps are those of one instance, and a session is learned from once.

The weights are tables of logits in a folder in place of the server; test_service_replicas.py has a real one.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from rlvr.clients.mock.mock_client import MockTrainingClient
from rlvr.core.types import Trajectory
from rlvr.service.learning import shared_learner
from rlvr.service.learning.leased_learner import MAX_LAG, LeasedLearner, LeaseLost, read_group, write_group
from rlvr.service.learning.session_learner import LearnerOptions, SessionLearner
from rlvr.service.learning.shared_learner import SharedLearner
from rlvr.service.models.shared_model import TinkerPolicyServer
from rlvr.store import ExperienceStore, Session, Status, open_store
from rlvr.store.shared_states import NOT_LEARNED, WaitingGroup
from rlvr.store.tables import groups
from tests.kit.table_replicas import (
    NAME,
    OPTIONS,
    QUICK,
    FolderServer,
    draw_rewards,
    episodes,
    replica,
    state_of,
    steps,
    table,
    wait_until,
    write_session,
)  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ExperienceStore]:
    with closing(open_store(tmp_path / "store.sqlite")) as store:
        yield store


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in QUICK.items():
        monkeypatch.setattr(shared_learner, name, seconds)


def group(store: ExperienceStore, id: str, rewards: list[float | None], version: int = 0) -> WaitingGroup:
    """The group of a session that ended, in the database."""
    store.add_session(Session(id, "t", "p", status=Status.DONE))
    new = write_group(id, episodes(id, rewards, version))
    store.add_groups(NAME, [new])
    return new


def leased(store: ExperienceStore, server: FolderServer, seconds: float = 60.0) -> LeasedLearner:
    token = store.lead_policy(NAME, "a", 0, seconds)
    policy = store.policy(NAME)
    assert token and policy
    client = server.open_trainer(policy.state["path"] if policy.state else None)
    learner = LeasedLearner(client, store, NAME, token, OPTIONS, retire=server.retire)
    learner.restore(policy.state)
    return learner


def test_a_group_in_the_database_is_the_group_that_was_written():
    row = Trajectory(
        "text", [3, 1], "text", [2, 4, 1], [-0.1, 0.0, -1 / 3], reward=1 / 7, action_mask=[1, 0, 1],
        group_id="s", rollout_id="s/0", policy_version=5,
    )  # fmt: skip
    written = write_group("s", [row, *episodes("s", [None], 3)])
    assert written.version == 3, "the oldest of its weights"
    back = read_group(WaitingGroup("s", 3, json.loads(json.dumps(written.trajectories))))
    row.prompt = row.response = ""
    assert back[0] == row and back[1].reward is None


def test_the_steps_have_the_bits_of_an_instance_that_learns_alone(store: ExperienceStore, tmp_path: Path):
    alone = SessionLearner(table(tmp_path / "alone"), tmp_path / "alone", OPTIONS)
    alone.restore()
    learner = leased(store, FolderServer(tmp_path / "served"))
    for number, rewards in enumerate(([1.0, 0.0], [0.5, 0.25], [0.5, 0.5], [0.0, 1.0], [0.3, 0.6])):
        one = alone.learn(episodes(f"s{number}", rewards))
        group(store, f"s{number}", rewards)
        assert learner.take(store.waiting_groups(NAME, 9, learner.taken)) == one
    assert isinstance(alone.client, MockTrainingClient) and isinstance(learner.client, MockTrainingClient)
    assert alone.progress.steps == 2 and alone.client.policy.sha256() == learner.client.policy.sha256()
    state = state_of(store)
    for name in ("steps", "sessions", "silent", "loss", "entropy", "plateau"):
        assert state[name] == vars(alone.progress)[name], name
    assert steps(store) == {"s0": 1, "s1": 1, "s2": NOT_LEARNED, "s3": 2, "s4": 2}
    alone.close()


def test_what_is_gathered_and_not_learned_is_there_for_the_next_learner(store: ExperienceStore, tmp_path: Path):
    server = FolderServer(tmp_path)
    first = leased(store, server, 0.1)
    for id, rewards in (("a", [1.0, 0.0]), ("b", [1.0, 0.0]), ("c", [1.0, 0.0])):
        group(store, id, rewards)
    assert first.take(store.waiting_groups(NAME, 3)) is not None  # a, b, c
    group(store, "d", [1.0, 0.0])
    group(store, "equal", [0.5, 0.5])
    assert first.take(store.waiting_groups(NAME, 9, first.taken)) is None and first.taken == {"d"}
    learned = state_of(store)
    assert steps(store) == {"a": 1, "b": 1, "c": 1, "d": None, "equal": NOT_LEARNED} and learned["silent"] == 1
    time.sleep(0.15)  # it was killed
    second = leased(store, server)
    assert second.progress == first.progress
    group(store, "e", [0.0, 1.0], version=1)
    assert second.take(store.waiting_groups(NAME, 9, second.taken)) is not None
    assert steps(store) == {"a": 1, "b": 1, "c": 1, "d": 2, "e": 2, "equal": NOT_LEARNED}
    assert state_of(store)["before"] == learned["path"]


def test_a_learner_that_was_replaced_while_it_computed_changes_nothing(store: ExperienceStore, tmp_path: Path):
    server = FolderServer(tmp_path)
    first = leased(store, server, 0.1)
    for id in "ab":
        group(store, id, [1.0, 0.0])
    computing = store.waiting_groups(NAME, 9)
    time.sleep(0.15)
    second = leased(store, server)
    assert second.take(store.waiting_groups(NAME, 9)) is not None
    learned, retired = state_of(store), len(server.retired)
    with pytest.raises(LeaseLost):
        first.take(computing)
    unpublished = server.retired[retired:]
    assert [Path(path).name for path in unpublished] == ["step-00000001", "sampler-00000001"]
    assert not {learned["path"], learned["sampler"]} & {*unpublished}
    assert state_of(store) == learned and steps(store) == {"a": 1, "b": 1} and learned["sessions"] == 2
    assert second.progress.path == learned["path"]
    third = table(tmp_path)
    third.load_state_with_optimizer(learned["path"]).result()
    assert isinstance(second.client, MockTrainingClient) and third.policy.sha256() == second.client.policy.sha256()


def test_groups_of_old_weights_are_dropped_and_counted(store: ExperienceStore, tmp_path: Path):
    learner = leased(store, FolderServer(tmp_path))
    learner.progress.steps = MAX_LAG + 1
    for id, version in (("old", 0), ("late", 1), ("new", MAX_LAG + 1)):
        group(store, id, [1.0, 0.0], version=version)
    assert learner.take(store.waiting_groups(NAME, 9)) is not None
    assert steps(store) == {"old": NOT_LEARNED, "late": MAX_LAG + 2, "new": MAX_LAG + 2}
    assert state_of(store)["dropped"] == 1


def test_a_learner_that_is_slower_than_the_replicas_learns_from_the_newest_groups(
    store: ExperienceStore, tmp_path: Path
):
    learner = leased(store, FolderServer(tmp_path))
    for arrival in range(12):  # 4 groups arrive in the time of a step, which takes 2 of them
        for number in range(4):
            group(store, f"{arrival:02d}-{number}", [1.0, 0.0], version=arrival)
        assert learner.take(store.waiting_groups(NAME, 2)) is not None
    learned = steps(store)
    assert {id: step for id, step in learned.items() if step} == {
        f"{arrival:02d}-{number}": arrival + 1 for arrival in range(12) for number in (2, 3)
    }
    dropped = [id for id, step in learned.items() if step == NOT_LEARNED]
    assert dropped == [f"{arrival:02d}-{number}" for arrival in range(12 - MAX_LAG) for number in (0, 1)]
    assert state_of(store)["dropped"] == len(dropped) == 8 and store.count_waiting(NAME) == 16


@pytest.mark.parametrize("fault", ["not finite", "refused by the server"])
def test_groups_that_no_step_can_learn_from_do_not_come_back(store: ExperienceStore, tmp_path: Path, fault: str):
    learner = leased(store, FolderServer(tmp_path))
    client = learner.client
    assert isinstance(client, MockTrainingClient)
    before = client.policy.sha256()
    if fault == "not finite":
        client.policy.rate = float("inf")
        group(store, "bad", [1.0, 0.0, 1.0, 0.0])
    else:
        store.add_session(Session("bad", "t", "p", status=Status.DONE))
        written = write_group("bad", episodes("bad", [1.0, 0.0, 1.0, 0.0])).trajectories
        rows = [{**row, "response_tokens": [99]} for row in written]
        store.add_groups(NAME, [WaitingGroup("bad", 0, rows)])
    assert learner.take(store.waiting_groups(NAME, 9)) is None
    assert (steps(store), state_of(store)["refused"], state_of(store)["steps"]) == ({"bad": NOT_LEARNED}, 1, 0)
    assert client.policy.sha256() == before and learner.taken == set()
    client.policy.rate = 300.0
    group(store, "good", [1.0, 0.0, 1.0, 0.0])
    assert learner.take(store.waiting_groups(NAME, 9)) is not None


# Replicas


@pytest.mark.usefixtures("quick")
def test_two_replicas_sample_from_one_policy_and_the_other_one_learns_when_the_first_stops(
    store: ExperienceStore, tmp_path: Path
):
    server = FolderServer(tmp_path)
    with closing(replica(store, "a", server)) as a, closing(replica(store, "b", server)) as b:
        assert (a.holder, a.describe()["is_learner"], b.describe()["is_learner"]) == ("a", 1, 0)
        assert len(server.trainers) == 1, "a replica that samples has no training run"
        before = a.sampler.fingerprint
        assert b.sampler.fingerprint == before and (a.version, b.version) == (0, 0)
        first = state_of(store)
        write_session(store, a, "x")
        write_session(store, b, "y")
        wait_until(lambda: steps(store) == {"x": 1, "y": 1})
        wait_until(lambda: server.retired == [first["path"], first["sampler"]])
        assert a.sampler.fingerprint == b.sampler.fingerprint != before and (a.version, b.version) == (1, 1)
        assert b.describe()["sessions_learned"] == 2 and b.describe()["learner"] == "a"
        assert b.detail == "samples from step 1 of 1; a learns"
        a.close()
        wait_until(lambda: b.holder == "b")
        write_session(store, b, "z")
        write_session(store, b, "w")
        wait_until(lambda: steps(store) == {"x": 1, "y": 1, "z": 2, "w": 2})
        assert b.sampler is not None and b.version == 2
    alone = SessionLearner(table(tmp_path / "alone"), tmp_path / "alone", OPTIONS)
    alone.restore()
    for id in "xyzw":
        alone.learn(episodes(id, [1.0, 0.0]))
    assert isinstance(alone.client, MockTrainingClient)
    assert server.trainers[-1].policy.sha256() == alone.client.policy.sha256(), "the optimizer went on, too"
    alone.close()


@pytest.mark.usefixtures("quick")
def test_a_replica_whose_step_fails_leaves_the_learning_to_another(store: ExperienceStore, tmp_path: Path):
    good, bad, said = FolderServer(tmp_path), FolderServer(tmp_path), list[str]()
    with closing(replica(store, "bad", bad, said)) as one, closing(replica(store, "good", good)) as other:
        bad.failure = "the disk of the server is full"
        write_session(store, one, "x")
        write_session(store, one, "y")
        wait_until(lambda: steps(store) == {"x": 1, "y": 1})
        assert other.holder == "good" and "the disk of the server is full" in one.detail
    assert said == ["this instance leaves the learning to others: the disk of the server is full"]


@pytest.mark.usefixtures("quick")
def test_a_server_that_fails_at_the_start_is_the_reason_that_health_shows(store: ExperienceStore, tmp_path: Path):
    server = FolderServer(tmp_path)
    server.failure = "no route to the server"
    with pytest.raises(ValueError, match="no route to the server"):
        replica(store, "a", server)
    assert store.led_policies() == {}, "the lease is left to others"


@pytest.mark.usefixtures("quick")
def test_a_replica_of_another_model_is_refused(store: ExperienceStore, tmp_path: Path):
    server = FolderServer(tmp_path)
    with closing(replica(store, "a", server)):
        other = SharedLearner(store, "tinker:other", "b", server, OPTIONS)
        with pytest.raises(ValueError, match=r"RLVR_MODEL=tinker:other: a trains tinker:table.*DATABASE_URL"):
            other.restore(lambda text: None)
    later = SharedLearner(store, "tinker:other", "b", server, OPTIONS)
    later.restore(lambda text: None)  # the first model's replicas have stopped
    later.close()


@pytest.mark.usefixtures("quick")
def test_a_replica_that_the_published_weights_do_not_suit_is_refused(store: ExperienceStore, tmp_path: Path):
    class OtherServer(FolderServer):
        def check(self, state: dict[str, Any]) -> None:
            raise ValueError(f"rank {state['rank']}")

    with closing(replica(store, "a", FolderServer(tmp_path))):
        with pytest.raises(ValueError, match="rank 16"):
            replica(store, "b", OtherServer(tmp_path))
        assert store.led_policies() == {NAME: "a"}


def test_an_adapter_of_another_rank_is_refused(tmp_path: Path):
    TinkerPolicyServer("tinker:base", tmp_path, 0).check({"rank": 16})
    TinkerPolicyServer("tinker://run/weights/x", tmp_path, 0).check({"rank": 32})  # its own rank, wherever it is from
    with pytest.raises(ValueError, match=r"RLVR_MODEL=tinker:base: .* has rank 32.* trains rank 16.*DATABASE_URL"):
        TinkerPolicyServer("tinker:base", tmp_path, 0).check({"rank": 32})


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_sessions_wait_for_a_database_that_is_away(postgres: Any, tmp_path: Path):
    said, server = list[str](), FolderServer(tmp_path)
    with closing(open_store(postgres.database())) as store, closing(replica(store, "a", server, said)) as a:
        for id in "xy":
            store.add_session(Session(id, "t", "p", status=Status.DONE))
        postgres.stop()
        try:
            a.learn(episodes("x", [1.0, 0.0]))
            assert "1 sessions wait for the database, to be learned from (the database is not reachable)" in said
            assert a.sampler is not None, "it samples from the weights that it knows"
        finally:
            postgres.start()
        wait_until(lambda: steps(store) == {"x": None})
        a.learn(episodes("y", [1.0, 0.0]))
        wait_until(lambda: steps(store) == {"x": 1, "y": 1})


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_the_weights_are_those_of_every_session_learned_once_however_often_replicas_are_killed(
    postgres: Any, tmp_path: Path
):
    """The steps are made again from the marks of the sessions, by a learner that is alone: the weights are the same."""
    url, random_ = postgres.database(), random.Random(7)
    told = list[str]()
    with closing(open_store(url)) as store:
        running = {name: start_replica(url, tmp_path, name) for name in "abc"}
        for number in range(9):
            wait_until(lambda least=4 * number: has_steps(store, least))
            time.sleep(random_.uniform(0.0, 0.2))
            policy = store.policy(NAME)
            assert policy is not None
            leader = next((name for name in running if name == policy.holder), "")
            name = leader if leader and number % 3 else random_.choice(sorted(running))
            told += kill(running.pop(name))
            fresh = f"r{number}"
            running[fresh] = start_replica(url, tmp_path, fresh)
        for process in running.values():
            told += kill(process)
        with closing(replica(store, "last", FolderServer(tmp_path))):
            wait_until(lambda: store.count_waiting(NAME) <= 1)  # one group is too few for a step
        state, learned = state_of(store), steps(store)
        assert set(told) <= set(learned), "a session that was written is lost"
        assert state["steps"] > 30 and state["dropped"] == state["refused"] == 0
        with store.read() as connection:
            order = connection.scalars(sa.select(groups.c.session_id).order_by(groups.c.created)).all()
    alone = SessionLearner(
        table(tmp_path / "alone"), tmp_path / "alone", LearnerOptions(batch_size=1, learning_rate=0.01)
    )
    alone.restore()
    for step in range(1, state["steps"] + 1):
        alone.learn([t for id in order if learned[id] == step for t in episodes(id, draw_rewards(id))])
        assert alone.progress.steps == step
    published = table(tmp_path)
    published.load_state_with_optimizer(state["path"]).result()
    assert isinstance(alone.client, MockTrainingClient)
    np.testing.assert_allclose(published.policy.logits, alone.client.policy.logits, rtol=1e-9)
    np.testing.assert_allclose(published.policy.moments, alone.client.policy.moments, rtol=1e-6, atol=1e-15)
    assert published.policy.adam_steps == state["steps"]
    alone.close()


def has_steps(store: ExperienceStore, least: int) -> bool:
    policy = store.policy(NAME)
    return policy is not None and policy.state is not None and policy.state["steps"] >= least


def start_replica(url: str, folder: Path, name: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "tests.kit.table_replicas", url, str(folder), name]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])


def kill(process: subprocess.Popen[str]) -> list[str]:
    """The sessions that it said to be written."""
    process.kill()
    said, _ = process.communicate(timeout=60)
    return said.split("\n")[:-1]
