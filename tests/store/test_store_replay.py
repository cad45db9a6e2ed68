"""The replay buffer holds the newest answers of the service's sessions, and gives those that have a gain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rlvr.store import Experience, ExperienceStore, Session, open_store
from rlvr.store.experience_queries import ReplayBuffer


@pytest.fixture
def store(store_url: str) -> Iterator[ExperienceStore]:
    store = open_store(store_url, buffer_size=5)
    store.add_session(Session("s", "a", "p"))
    yield store
    store.close()


def add(store: ExperienceStore, *iterations: int, **how: Any) -> list[int]:
    given = {"task_id": "a", "prompt": "p", "generated_output": "o", "gain": 0.1}
    return store.add_experiences([Experience("s", iteration=i, **{**given, **how}) for i in iterations])


def test_an_empty_buffer_gives_nothing(store: ExperienceStore):
    assert store.read_buffer() == [] and store.buffer() == ReplayBuffer(0, 5, 0)


def test_the_buffer_holds_the_newest_answers_of_sessions(store: ExperienceStore):
    """Older ones stay in the history; a training run's are no part of it; without a gain there is nothing to learn."""
    old = add(store, 1, 2)
    new = add(store, 3, 4, 5, action="revise")
    add(store, 6, step=1)
    waiting = add(store, 7, gain=None)
    assert store.buffer() == ReplayBuffer(5, 5, 4) and store.buffer().utilization == 1.0
    buffered = store.read_buffer()
    assert [e.id for e in buffered] == [old[1], *new] and store.count() == 7
    assert [(e.action, e.gain, e.prompt) for e in buffered] == [("", 0.1, ""), *[("revise", 0.1, "")] * 3]
    store.set_gains({waiting[0]: 0.5})
    assert store.buffer().ready == 5 and store.read_buffer()[-1].gain == 0.5
