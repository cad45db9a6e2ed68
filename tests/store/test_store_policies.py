"""A shared policy in the database: one learner at a time, and one that was replaced changes nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from threading import Barrier
from typing import Any

import pytest
import sqlalchemy as sa

from rlvr.store import ExperienceStore, Retention, Session, Status, open_store
from rlvr.store.shared_states import NOT_LEARNED, WaitingGroup
from rlvr.store.tables import groups, policies

NAME = "tinker:base"


@pytest.fixture
def store(store_url: str) -> Iterator[ExperienceStore]:
    with closing(open_store(store_url)) as store:
        yield store


def add(store: ExperienceStore, *ids: str, version: int = 0) -> None:
    for id in ids:
        store.add_session(Session(id, "t", "p", status=Status.DONE))
    store.add_groups(NAME, [WaitingGroup(id, version, [{"reward": 0.1, "of": id}]) for id in ids])


def steps(store: ExperienceStore) -> dict[str, tuple[int | None, bool]]:
    """By session: the step that learned from it, and whether its trajectories are still there."""
    with store.read() as connection:
        rows = connection.execute(sa.select(groups.c.session_id, groups.c.step, groups.c.value))
        return {row.session_id: (row.step, row.value is not None) for row in rows}


def test_one_replica_leads_until_it_leaves(store: ExperienceStore):
    assert store.policy(NAME) is None and store.led_policies() == {}
    assert store.lead_policy(NAME, "a", 0, 60.0) == 1
    assert store.lead_policy(NAME, "b", 0, 60.0) == 0
    assert store.lead_policy(NAME, "a", 1, 60.0) == 1, "it renews"
    assert store.led_policies() == {NAME: "a"}
    store.leave_policy(NAME, 1)
    policy = store.policy(NAME)
    assert policy is not None and policy.holder == "" and store.led_policies() == {}
    assert store.lead_policy(NAME, "b", 0, 60.0) == 2
    assert store.lead_policy(NAME, "a", 1, 60.0) == 0, "its token is an old one"
    store.leave_policy(NAME, 1)
    assert store.led_policies() == {NAME: "b"}, "an old token ends no lease"


def test_a_lease_ends_without_renewals_and_a_late_one_renews_it_while_no_other_replica_took_it(store: ExperienceStore):
    assert store.lead_policy(NAME, "a", 0, 0.2) == 1
    time.sleep(0.3)
    assert store.led_policies() == {}
    assert store.lead_policy(NAME, "a", 1, 0.2) == 1
    time.sleep(0.3)
    assert store.lead_policy(NAME, "b", 0, 60.0) == 2 and store.lead_policy(NAME, "a", 1, 60.0) == 0


def test_a_policy_is_not_led_beside_another_one(store: ExperienceStore):
    assert store.lead_policy(NAME, "a", 0, 60.0) == 1
    assert store.lead_policy("tinker:other", "b", 0, 60.0) == 0 and store.policy("tinker:other") is None
    store.leave_policy(NAME, 1)
    assert store.lead_policy("tinker:other", "b", 0, 60.0) == 1
    assert store.lead_policy(NAME, "a", 0, 60.0) == 0


def test_a_late_renewal_gives_way_to_a_policy_that_is_led_meanwhile(store: ExperienceStore):
    assert store.lead_policy(NAME, "a", 0, 0.1) == 1
    time.sleep(0.2)
    assert store.lead_policy("tinker:other", "b", 0, 60.0) == 1
    assert store.lead_policy(NAME, "a", 1, 60.0) == 0
    assert store.led_policies() == {"tinker:other": "b"}


FROZEN = """
import os, signal, sys
from sqlalchemy import event
from rlvr.store import open_store, shared_states
shared_states.STILL_S = 1
store = open_store(sys.argv[1])
assert store.lead_policy(sys.argv[2], "a", 0, 0.5) == 1
event.listen(store._engine, "commit", lambda connection: os.kill(os.getpid(), signal.SIGSTOP))
store.publish_policy(sys.argv[2], 1, {"steps": 1}, {})
"""


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_replica_that_is_frozen_in_a_publication_does_not_keep_the_lease_from_others(postgres: Any):
    """Its transaction has the lock of the lease's row, and its connection stays open."""
    url = postgres.database()
    with closing(open_store(url)) as store:
        frozen = subprocess.Popen([sys.executable, "-c", FROZEN, url, NAME], stderr=subprocess.PIPE, text=True)
        try:
            _, status = os.waitpid(frozen.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            time.sleep(0.5)
            assert store.lead_policy(NAME, "b", 0, 60.0) == 2
            frozen.send_signal(signal.SIGCONT)
            assert "StoreDown" in frozen.communicate(timeout=30)[1]
            policy = store.policy(NAME)
            assert policy is not None and (policy.holder, policy.state) == ("b", None)
        finally:
            frozen.kill()
            frozen.wait()


def test_of_many_replicas_one_gets_an_ended_lease(store: ExperienceStore, store_url: str):
    replicas = [open_store(store_url) for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        for token in (1, 2, 3):
            got = list(pool.map(lambda i: replicas[i].lead_policy(NAME, f"r{i}", 0, 60.0), range(6)))
            assert sorted(got) == [0, 0, 0, 0, 0, token]
            store.leave_policy(NAME, token)
    for replica in replicas:
        replica.close()


def test_of_many_policies_one_is_led(store: ExperienceStore, store_url: str):
    replicas = [open_store(store_url) for _ in range(6)]
    together = Barrier(6)

    def lead(i: int) -> int:
        together.wait()
        return replicas[i].lead_policy(f"tinker:{i}", "a", 0, 60.0)

    with ThreadPoolExecutor(6) as pool:
        for _ in range(4):
            tokens = list(pool.map(lead, range(6)))
            [leads] = [i for i, token in enumerate(tokens) if token]
            assert store.led_policies() == {f"tinker:{leads}": "a"}
            store.leave_policy(f"tinker:{leads}", tokens[leads])
    for replica in replicas:
        replica.close()


def test_a_lease_that_is_renewed_at_the_last_moment_is_not_taken(postgres: Any):
    with closing(open_store(postgres.database())) as store, ThreadPoolExecutor(1) as pool:
        assert store.lead_policy(NAME, "a", 0, 0.1) == 1
        with store.write() as connection:
            renewal = sa.update(policies).values(expires=store.now(connection) + 60.0)
            time.sleep(0.2)
            connection.execute(renewal)
            taking = pool.submit(store.lead_policy, NAME, "b", 0, 60.0)
            time.sleep(0.3)
            assert not taking.done(), "it waits for the row"
        assert taking.result() == 0 and store.led_policies() == {NAME: "a"}


def test_what_is_published_and_which_sessions_were_learned_from_change_together(store: ExperienceStore):
    assert store.lead_policy(NAME, "a", 0, 60.0) == 1
    add(store, "x", "y", "z")
    assert store.publish_policy(NAME, 1, {"steps": 7, "rate": 0.1}, {"x": 7, "y": NOT_LEARNED})
    policy = store.policy(NAME)
    assert policy is not None and policy.state == {"steps": 7, "rate": 0.1}
    assert steps(store) == {"x": (7, False), "y": (0, False), "z": (None, True)}
    assert [group.session_id for group in store.waiting_groups(NAME, 9)] == ["z"] and store.count_waiting(NAME) == 1
    assert store.publish_policy(NAME, 1, {"steps": 8}, {"x": 8, "z": 8})
    assert steps(store)["x"] == (7, False), "it was learned from once"


def test_a_replaced_learner_publishes_nothing(store: ExperienceStore):
    assert store.lead_policy(NAME, "a", 0, 0.1) == 1
    add(store, "x")
    assert store.publish_policy(NAME, 1, {"steps": 1}, {})
    time.sleep(0.2)
    assert store.publish_policy(NAME, 1, {"steps": 2}, {}), "the lease has ended, and no other replica has it"
    assert store.lead_policy(NAME, "b", 0, 60.0) == 2
    assert not store.publish_policy(NAME, 1, {"steps": 3}, {"x": 3})
    policy = store.policy(NAME)
    assert policy is not None and policy.state == {"steps": 2} and steps(store) == {"x": (None, True)}


def test_groups_are_written_once_and_come_back_in_order(store: ExperienceStore):
    add(store, "x", "y")
    store.add_groups(NAME, [WaitingGroup("y", 9, []), WaitingGroup("x", 9, [])])
    add(store, "z", version=4)
    store.add_groups(NAME, [WaitingGroup("deleted", 0, [])])
    assert store.waiting_groups(NAME, 9) == [
        WaitingGroup(id, version, [{"reward": 0.1, "of": id}]) for id, version in (("x", 0), ("y", 0), ("z", 4))
    ]
    assert [group.session_id for group in store.waiting_groups(NAME, 1, {"z"})] == ["y"], "the newest"
    assert store.waiting_below(NAME, 4) == ["x", "y"] and store.waiting_below(NAME, 0) == []
    assert store.waiting_groups("tinker:other", 9) == [] and store.count_waiting("tinker:other") == 0


def test_groups_have_the_order_of_the_database_whatever_the_clocks_of_replicas_say(
    postgres: Any, monkeypatch: pytest.MonkeyPatch
):
    with closing(open_store(postgres.database())) as store:
        now = time.time()
        for id, skew in (("x", 3600.0), ("y", 0.0), ("z", -3600.0)):
            monkeypatch.setattr(time, "time", lambda skew=skew: now + skew)
            add(store, id)
        assert [group.session_id for group in store.waiting_groups(NAME, 9)] == ["x", "y", "z"]


def test_huge_groups_are_read_a_few_at_a_time(store: ExperienceStore):
    for id in "zyxw":
        store.add_session(Session(id, "t", "p", status=Status.DONE))
        store.add_groups(NAME, [WaitingGroup(id, 0, [{"prompt_tokens": [1] * (5000 if id == "y" else 50)}])])

    def read(most_bytes: int, without: str = "") -> str:
        return "".join(group.session_id for group in store.waiting_groups(NAME, 3, without, most_bytes))

    assert read(300) == "xw" and read(1) == "w" and read(20_000) == "yxw"
    assert read(300, "wx") == "y", "one at least"


def test_a_pruned_session_takes_its_group_along(store: ExperienceStore):
    store.add_session(Session("old", "t", "p", status=Status.DONE, created=5.0, finished=6.0))
    store.add_groups(NAME, [WaitingGroup("old", 0, [])])
    add(store, "new")
    assert store.prune(Retention(keep_days=1.0)) == (0, 1)
    assert list(steps(store)) == ["new"]
