"""What retention lets go is deleted with all that hangs on it, and nothing else is."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from rlvr.store import Experience, ExperienceStore, Retention, Session, Status, open_store
from rlvr.store.tables import error_types, ratings

DAY = 86400


@pytest.fixture
def store(store_url: str) -> Iterator[ExperienceStore]:
    store = open_store(store_url, buffer_size=2)
    yield store
    store.close()


def add(store: ExperienceStore, id: str, days_ago: float, status: Status = Status.DONE, answers: int = 3) -> list[int]:
    when = time.time() - days_ago * DAY
    store.add_session(Session(id, "t", "p", status=status, created=when, finished=when if status.final else None))
    new = [
        Experience(id, "t", i + 1, "p", "o", feedback={"error_types": ["too_short"]}, created=when)
        for i in range(answers)
    ]
    return store.add_experiences(new)


def rows(store: ExperienceStore, table: sa.Table) -> int:
    with store.read() as connection:
        return connection.scalar(sa.select(sa.func.count()).select_from(table)) or 0


def test_records_older_than_keep_days_are_deleted_in_small_batches(store: ExperienceStore):
    old, new = add(store, "old", 10), add(store, "new", 1)
    for id in old + new:
        store.rate(id, "ann", 1.0)
    assert store.prune(Retention(keep_days=5), batch=2) == (3, 1)
    assert [e.id for e in store.experiences()] == new and [s.id for s in store.sessions()] == ["new"]
    assert rows(store, ratings) == rows(store, error_types) == 3
    assert store.prune(Retention(keep_days=5)) == (0, 0)


def test_the_newest_experiences_are_kept_and_a_number_is_never_given_twice(store: ExperienceStore):
    add(store, "a", 3)
    [*_, last] = add(store, "b", 2)
    assert store.prune(Retention(keep_experiences=2)) == (4, 1)
    assert [e.id for e in store.experiences()] == [last - 1, last]
    store.prune(Retention(keep_days=1e-9))
    assert store.count() == 0
    assert min(add(store, "c", 0)) > last


def test_a_session_at_work_keeps_its_experiences(store: ExperienceStore):
    add(store, "open", 10, Status.RUNNING)
    add(store, "done", 9)
    assert store.prune(Retention(keep_days=5)) == (3, 1)
    assert store.count(session_id="open") == 3
    store.update_session("open", status=Status.DONE, finished=time.time())
    assert store.prune(Retention(keep_days=5)) == (3, 0), "it ended today"


def test_a_session_without_answers_stays_as_long_as_one_with(store: ExperienceStore):
    add(store, "failed early", 1, Status.FAILED, answers=0)
    add(store, "failed long ago", 10, Status.FAILED, answers=0)
    add(store, "new", 0)
    assert store.prune(Retention(keep_days=5)) == (0, 1)
    assert store.session("failed early") is not None


def test_without_retention_everything_stays(store: ExperienceStore):
    add(store, "old", 10_000)
    assert store.prune(Retention()) == (0, 0) == store.prune(Retention(keep_experiences=3))
    assert store.count() == 3


def test_retention_that_makes_no_sense_is_refused(store: ExperienceStore):
    with pytest.raises(ValueError, match="keep_days=0; expected a positive number"):
        Retention(keep_days=0)
    with pytest.raises(ValueError, match="keep_experiences=1 is less than the replay buffer of 2"):
        store.prune(Retention(keep_experiences=1))
