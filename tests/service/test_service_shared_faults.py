"""What goes wrong around a shared policy: one bad group, a server that fails, a database that takes no writes.

The weights are tables of logits in a folder in place of the server.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rlvr.core.futures import Future
from rlvr.core.messages import Datum, ForwardBackwardOutput
from rlvr.service.learning import leased_learner, shared_learner
from rlvr.service.learning.leased_learner import LeasedLearner, LeaseLost, write_group
from rlvr.store import ExperienceStore, Session, Status, open_store
from rlvr.store.shared_states import NOT_LEARNED, WaitingGroup
from tests.kit.postgres import make_read_only
from tests.kit.table_replicas import (
    NAME,
    OPTIONS,
    QUICK,
    FolderServer,
    FolderTrainer,
    episodes,
    replica,
    state_of,
    steps,
    wait_until,
    write_session,
)  # fmt: skip

BAD = [3] * 6  # a prompt that the server cannot train on


class FragileTrainer(FolderTrainer):
    """Fails at a bad prompt, and at all of them while `is_broken`."""

    is_broken = False
    calls = 0

    def forward_backward(
        self, data: list[Datum], loss_fn: str, loss_fn_config: dict[str, float] | None = None
    ) -> Future[ForwardBackwardOutput]:
        self.calls += 1
        if self.is_broken or any(datum.model_input.length >= len(BAD) for datum in data):
            raise RuntimeError("the Tinker server: out of memory")
        return super().forward_backward(data, loss_fn, loss_fn_config)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ExperienceStore]:
    with closing(open_store(tmp_path / "store.sqlite")) as store:
        yield store


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in QUICK.items():
        monkeypatch.setattr(shared_learner, name, seconds)


def add(store: ExperienceStore, id: str, *, is_bad: bool = False) -> None:
    group = episodes(id, [1.0, 0.0])
    for t in group:
        t.prompt_tokens = BAD if is_bad else t.prompt_tokens
    store.add_session(Session(id, "t", "p", status=Status.DONE))
    store.add_groups(NAME, [write_group(id, group)])


def lead(store: ExperienceStore, server: FolderServer, said: list[str] | None = None) -> LeasedLearner:
    token = store.lead_policy(NAME, "a", 0, 60.0)
    policy = store.policy(NAME)
    assert token and policy
    client = FragileTrainer(server, server.folder / f"run-{token}")
    if policy.state:
        client.load_state_with_optimizer(policy.state["path"]).result()
    warn = (said if said is not None else []).append
    learner = LeasedLearner(client, store, NAME, token, OPTIONS, retire=server.retire, warn=warn)
    learner.restore(policy.state)
    return learner


@pytest.mark.parametrize("place", [0, 3, 6])
def test_one_bad_group_is_refused_and_the_others_are_learned_from(store: ExperienceStore, tmp_path: Path, place: int):
    said = list[str]()
    learner = lead(store, FolderServer(tmp_path), said)
    for number in range(7):
        add(store, f"s{number}", is_bad=number == place)
    assert learner.take(store.waiting_groups(NAME, 9)) is not None
    marks, state = steps(store), state_of(store)
    assert marks.pop(f"s{place}") == NOT_LEARNED
    assert set(marks.values()) == set(range(1, state["steps"] + 1)), "each of the others is in a step"
    assert (state["sessions"], state["refused"], learner.taken) == (6, 1, set())
    assert said == ["1 sessions are not learned from: steps of other sessions work, and theirs fail"]
    for id in "xy":
        add(store, id)
    assert learner.take(store.waiting_groups(NAME, 9)) is not None, "the weights are good ones"


def test_a_server_that_fails_at_every_group_loses_none(store: ExperienceStore, tmp_path: Path):
    learner = lead(store, FolderServer(tmp_path))
    client = learner.client
    assert isinstance(client, FragileTrainer)
    client.is_broken = True
    for number in range(32):
        add(store, f"s{number}")
    with pytest.raises(RuntimeError, match="out of memory"):
        learner.take(store.waiting_groups(NAME, 64))
    assert client.calls <= leased_learner.FAILURES, "it is left soon"
    assert set(steps(store).values()) == {None} and state_of(store)["refused"] == 0
    store.leave_policy(NAME, 1)
    assert lead(store, FolderServer(tmp_path)).take(store.waiting_groups(NAME, 64)) is not None
    assert set(steps(store).values()) == {1}


def test_a_bad_group_alone_waits_for_others_that_show_whose_fault_it_is(store: ExperienceStore, tmp_path: Path):
    learner = lead(store, FolderServer(tmp_path))
    add(store, "bad", is_bad=True)
    assert learner.take(store.waiting_groups(NAME, 9)) is None, "gathered"
    add(store, "bad too", is_bad=True)
    with pytest.raises(RuntimeError, match="out of memory"):
        learner.take(store.waiting_groups(NAME, 9, learner.taken))
    assert steps(store) == {"bad": None, "bad too": None}
    store.leave_policy(NAME, 1)
    add(store, "good")
    assert lead(store, FolderServer(tmp_path)).take(store.waiting_groups(NAME, 9)) is not None
    assert steps(store) == {"bad": NOT_LEARNED, "bad too": NOT_LEARNED, "good": 1}


def test_a_group_that_cannot_be_read_is_refused(store: ExperienceStore, tmp_path: Path):
    learner = lead(store, FolderServer(tmp_path))
    for id, row in (("other version", {"tokens": [1]}), ("damaged", {"prompt_tokens": [3], "response_tokens": [4, 1]})):
        store.add_session(Session(id, "t", "p", status=Status.DONE))
        store.add_groups(NAME, [WaitingGroup(id, 0, [{"logprobs": [-0.1], **row}])])
    for id in "xy":
        add(store, id)
    assert learner.take(store.waiting_groups(NAME, 9)) is not None
    assert steps(store) == {"other version": NOT_LEARNED, "damaged": NOT_LEARNED, "x": 1, "y": 1}
    assert state_of(store)["refused"] == 2


def test_weights_that_no_replica_will_sample_from_expire(store: ExperienceStore, tmp_path: Path):
    server = FolderServer(tmp_path)
    learner = lead(store, server)
    first = state_of(store)
    for id in "xy":
        add(store, id)
    server.retire = lambda paths: (_ for _ in ()).throw(KeyboardInterrupt)  # killed after the publication
    learner._retire = server.retire
    with pytest.raises(KeyboardInterrupt):
        learner.take(store.waiting_groups(NAME, 9))
    assert steps(store) == {"x": 1, "y": 1}
    del server.retire
    store.leave_policy(NAME, 1)
    second = lead(store, server)
    assert server.retired == [first["path"], first["sampler"]]
    for id in "zw":
        add(store, id)
    store.leave_policy(NAME, 2)
    assert store.lead_policy(NAME, "b", 0, 60.0) == 3
    server.retired.clear()
    with pytest.raises(LeaseLost):
        second.take(store.waiting_groups(NAME, 9))
    assert len(server.retired) == 2 and not {*server.retired} & {state_of(store)["path"], state_of(store)["sampler"]}


@pytest.mark.usefixtures("quick")
def test_a_database_that_takes_no_writes_for_a_while_ends_no_thread(postgres: Any, tmp_path: Path):
    said, url = list[str](), postgres.database()
    with closing(open_store(url)) as store, closing(replica(store, "a", FolderServer(tmp_path), said)) as a:
        for id in "xy":
            store.add_session(Session(id, "t", "p", status=Status.DONE))
        wait_until(lambda: a.describe()["is_learner"] == 1)
        with make_read_only(url):
            a.learn(episodes("x", [1.0, 0.0]))
            assert any("the database is read-only" in text for text in said), said
            wait_until(lambda: a.describe()["is_learner"] == 0)
        a.learn(episodes("y", [1.0, 0.0]))
        wait_until(lambda: steps(store) == {"x": 1, "y": 1})
        wait_until(lambda: a.describe()["is_learner"] == 1)  # a slow machine may renew late


@pytest.mark.usefixtures("quick")
def test_an_error_of_the_database_that_is_ours_ends_no_thread_either(postgres: Any, tmp_path: Path):
    said, url = list[str](), postgres.database()
    with closing(open_store(url)) as store, closing(replica(store, "a", FolderServer(tmp_path), said)) as a:
        with store.write() as connection:
            connection.exec_driver_sql("ALTER TABLE rlvr_groups RENAME TO hidden")
        write_session(store, a, "x")
        wait_until(lambda: sum("rlvr_groups" in text for text in said) >= 2)
        with store.write() as connection:
            connection.exec_driver_sql("ALTER TABLE hidden RENAME TO rlvr_groups")
        write_session(store, a, "y")
        wait_until(lambda: steps(store) == {"x": 1, "y": 1})


@pytest.mark.usefixtures("quick")
def test_a_replica_that_cannot_renew_its_lease_does_not_call_itself_the_learner(postgres: Any, tmp_path: Path):
    with closing(open_store(postgres.database())) as store, closing(replica(store, "a", FolderServer(tmp_path))) as a:
        wait_until(lambda: a.describe()["is_learner"] == 1)
        with store.write() as connection:  # another transaction holds its row
            connection.exec_driver_sql("SELECT * FROM rlvr_policies FOR UPDATE")
            time.sleep(QUICK["LEASE_S"] + 0.1)
            assert a.describe()["is_learner"] == 0
        wait_until(lambda: a.describe()["is_learner"] == 1)


@pytest.mark.usefixtures("quick")
def test_a_replica_that_stops_keeps_the_lease_until_its_last_step_is_published(store: ExperienceStore, tmp_path: Path):
    slow, other = FolderServer(tmp_path / "a", save_s=3 * QUICK["LEASE_S"]), FolderServer(tmp_path / "b")
    with closing(replica(store, "a", slow)) as a, closing(replica(store, "b", other)) as b:
        write_session(store, b, "x")
        write_session(store, b, "y")
        wait_until(lambda: slow.saves == 2)  # the first weights, and those of the step
        a.close()
        assert steps(store) == {"x": 1, "y": 1} and state_of(store)["path"].startswith(f"{tmp_path}/a/")
        wait_until(lambda: b.describe()["is_learner"] == 1)
