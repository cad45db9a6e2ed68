"""The store keeps what it is given, once, and finds it again: on SQLite and on a real PostgreSQL."""

from __future__ import annotations

import math
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from rlvr.store import Experience, ExperienceStore, Session, Status, open_store
from rlvr.store.tables import experiences, sessions


@pytest.fixture
def store(store_url: str) -> Iterator[ExperienceStore]:
    store = open_store(store_url)
    yield store
    store.close()


def session(id: str = "s1", **how: Any) -> Session:
    return Session(**{"id": id, "task_id": "sum", "prompt": "2+2?", **how})


def experience(iteration: int = 1, session_id: str = "s1", **how: Any) -> Experience:
    given = {"task_id": "sum", "prompt": "2+2?", "generated_output": "4", "created": 100.0 + iteration}
    return Experience(**{"session_id": session_id, "iteration": iteration, **given, **how})


def test_columns_are_the_fields_of_the_records():
    assert [c.name for c in sessions.columns] == [f.name for f in fields(Session)]
    assert {c.name for c in experiences.columns} == {f.name for f in fields(Experience)}


def test_a_session_comes_back_as_it_was_written(store: ExperienceStore):
    full = session(
        request={"task_id": "sum", "max_iterations": 3},
        kind="run",
        name="mine",
        owner="o",
        instance="i",
        status=Status.FAILED,
        created=1.5,
        started=2.5,
        finished=3.5,
        heartbeat=3.0,
        iterations=2,
        final_solution="4",
        final_confidence=0.75,
        converged=True,
        convergence_iteration=2,
        error={"code": "endpoint_unreachable", "message": "…"},
        metrics={"total_reward": 1.25},
    )
    assert store.add_session(full)
    assert store.session("s1") == full
    assert store.session("s2") is None
    assert not store.add_session(session(prompt="another")), "an id is taken once"
    assert store.session("s1") == full


def test_an_experience_comes_back_as_it_was_written(store: ExperienceStore):
    store.add_session(session())
    full = experience(
        sample=3,
        feedback={"confidence": 0.5, "error_types": ["too_short"]},
        scores={"code": {"value": 0.0, "outcome": "failed"}},
        outcome="failed",
        confidence=0.1,
        correctness=0.2,
        quality=0.3,
        reward=1 / 3,
        verified_reward=0.25,
        gain=-0.1,
        action="example",
        action_logprob=-1.1,
        advantage=0.7,
        stop_reason="length",
        tokens=[1, 2],
        logprobs=[-0.1, -1e-300],
        num_tokens=2,
        policy_version=4,
        policy_fingerprint="abc",
        step=7,
        priority=0.5,
        rating=0.5,
        ratings=2,
        seconds=0.25,
    )
    [id] = store.add_experiences([full])
    full.id = id
    assert store.experience(id) == full
    assert store.experience(id + 1) is None
    [light] = store.experiences(tokens=False)
    assert light == Experience(**{**vars(full), "tokens": None, "logprobs": None})


def test_a_repeated_write_changes_nothing_and_answers_the_same_ids(store: ExperienceStore):
    store.add_session(session())
    first = [experience(i, reward=float(i)) for i in (1, 2, 3)]
    ids = store.add_experiences(first)
    assert len(set(ids)) == 3
    again = [experience(3, reward=9.0), experience(4), experience(4, reward=8.0), experience(1, reward=9.0)]
    third, fourth, same, one = store.add_experiences(again)
    assert (third, one, same) == (ids[2], ids[0], fourth)
    assert [e.reward for e in store.experiences()] == [1.0, 2.0, 3.0, 8.0]
    assert store.add_experiences([]) == []


def test_experiences_of_a_session_that_is_not_there_are_refused_whole(store: ExperienceStore):
    store.add_session(session())
    with pytest.raises(ValueError, match="one of the sessions lost, s1 does not exist"):
        store.add_experiences([experience(), experience(session_id="lost")])
    assert store.count() == 0


def test_text_that_a_model_wrote_is_kept_whatever_it_is(store: ExperienceStore):
    """NUL and lone surrogates, which PostgreSQL and UTF-8 refuse, are the replacement character; all else stays."""
    store.add_session(session(prompt="a\x00b\ud800c é 😀 ' \" \\ % {x} \u202e"))
    assert store.session("s1").prompt == "a\ufffdb\ufffdc é 😀 ' \" \\ % {x} \u202e"  # type: ignore[union-attr]
    odd = {"detailed_feedback": "\x00\ud800😀", "error_types": ["\x00x"]}
    [id] = store.add_experiences([experience(generated_output="\x00" * 3, feedback=odd, reward=math.nan)])
    back = store.experience(id)
    assert back is not None and back.generated_output == "\ufffd" * 3 and back.reward is None
    assert back.feedback["detailed_feedback"] == "\x00\ufffd😀"  # JSON has its own escape for NUL
    assert store.task_analysis("sum")["common_errors"] == {"\ufffdx": 1}  # type: ignore[index]


def test_numbers_that_are_not_finite_are_unknown(store: ExperienceStore):
    store.add_session(session(metrics={"loss": math.nan, "deep": [{"x": -math.inf}, 1.5]}))
    assert store.session("s1").metrics == {"loss": None, "deep": [{"x": None}, 1.5]}  # type: ignore[union-attr]
    [id] = store.add_experiences([experience(confidence=math.inf, logprobs=[-math.inf, -1.0])])
    back = store.experience(id)
    assert back is not None and back.confidence is None and back.logprobs == [None, -1.0]
    assert store.global_stats()["average_reward"] is None


def test_pages_follow_each_other_in_both_directions(store: ExperienceStore):
    store.add_session(session())
    ids = store.add_experiences([experience(i) for i in range(1, 8)])
    page = store.experiences(limit=3)
    rest = store.experiences(limit=10, after=page[-1].id)
    assert [e.id for e in page + rest] == ids
    newest = store.experiences(limit=3, newest_first=True)
    older = store.experiences(limit=10, after=newest[-1].id, newest_first=True)
    assert [e.id for e in newest + older] == ids[::-1]
    assert [e.id for e in store.experiences(limit=2, offset=4)] == ids[4:6]


def test_experiences_are_found_by_task_session_outcome_and_step(store: ExperienceStore):
    store.add_session(session())
    store.add_session(session("s2", task_id="other"))
    store.add_experiences(
        [
            experience(1, outcome="passed", step=1),
            experience(2, outcome="failed", step=2),
            experience(1, "s2", task_id="other", outcome="failed"),
        ]
    )

    def find_rows(**by: Any) -> list[tuple[str, int]]:
        rows = store.experiences(**by)
        assert store.count(**by) == len(rows)
        return [(e.session_id, e.iteration) for e in rows]

    assert find_rows(task_id="sum") == [("s1", 1), ("s1", 2)]
    assert find_rows(session_id="s2") == [("s2", 1)]
    assert find_rows(outcome="failed") == [("s1", 2), ("s2", 1)]
    assert find_rows(outcome="failed", task_id="sum") == [("s1", 2)]
    assert find_rows(step=1) == [("s1", 1)]
    assert find_rows(task_id="nowhere") == []


def test_sessions_are_listed_newest_first_and_counted(store: ExperienceStore):
    for i, (status, kind) in enumerate([("done", "train"), ("running", "train"), ("done", "run")]):
        store.add_session(session(f"s{i}", created=float(i + 1), status=Status(status), kind=kind, owner=f"o{i % 2}"))
    assert [s.id for s in store.sessions()] == ["s2", "s1", "s0"]
    assert [s.id for s in store.sessions(limit=1, offset=1)] == ["s1"]
    assert [s.id for s in store.sessions(status=Status.DONE, kind="train")] == ["s0"]
    assert [s.id for s in store.sessions(status=[Status.DONE, Status.RUNNING], owner="o0")] == ["s2", "s0"]
    counts = store.count_sessions()
    assert counts[Status.DONE] == 2 and counts[Status.RUNNING] == 1 and counts[Status.FAILED] == 0


def test_a_session_changes_only_from_the_status_that_was_expected(store: ExperienceStore):
    store.add_session(session(status=Status.RUNNING))
    assert store.update_session("s1", iterations=2, error={"code": "x"})
    assert not store.update_session("s1", expect=Status.QUEUED, status=Status.CANCELLED)
    assert store.update_session("s1", expect=[Status.QUEUED, Status.RUNNING], status=Status.DONE)
    found = store.session("s1")
    assert found is not None and (found.iterations, found.status, found.error) == (2, Status.DONE, {"code": "x"})
    assert not store.update_session("s2", iterations=1)
    with pytest.raises(AssertionError, match="iteratons"):
        store.update_session("s1", iteratons=3)


def test_one_state_is_changed_by_one_writer_at_a_time(store: ExperienceStore):
    """A write based on an older version fails with that reason, and its value is not stored."""
    assert store.state("policy") is None
    assert store.save_state("policy", {"w": [0.5]}, 0)
    assert not store.save_state("policy", {"w": [1.5]}, 0)
    assert store.state("policy") == ({"w": [0.5]}, 1)
    assert store.save_state("policy", {"w": [2.5]}, 1)
    assert not store.save_state("policy", {"w": [3.5]}, 1)
    assert store.state("policy") == ({"w": [2.5]}, 2)


def test_many_threads_count_a_state_up_without_losing_one(store: ExperienceStore):
    def count(_: int) -> None:
        while True:
            value, version = store.state("n") or ({"n": 0}, 0)
            if store.save_state("n", {"n": value["n"] + 1}, version):
                return

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(count, range(40)))
    assert store.state("n") == ({"n": 40}, 40)


def test_many_threads_write_and_read_at_once(store: ExperienceStore):
    seen = threading.Event()

    def work(number: int) -> None:
        store.add_session(session(f"s{number}"))
        for i in range(1, 6):
            store.add_experiences([experience(i, f"s{number}", reward=0.5)])
            if store.experiences(session_id=f"s{number}")[-1].iteration == i:
                seen.set()
            store.heartbeat("nobody")

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(work, range(24)))
    assert seen.is_set() and store.count() == 120 and store.global_stats()["average_reward"] == 0.5


# --- ratings -----------------------------------------------------------------------------------------------------


def test_peoples_ratings_become_a_capped_part_of_the_reward(store: ExperienceStore):
    store.add_session(session())
    [id] = store.add_experiences([experience(reward=1.0)])
    first = store.rate(id, "ann", 0.0, weight=0.25)
    assert first is not None and (first.rating, first.ratings, first.reward) == (0.0, 1, 0.75)
    second = store.rate(id, "bob", 1.0, "good", weight=0.25)
    assert second is not None and (second.rating, second.ratings, second.reward) == (0.5, 2, 1.0)
    replaced = store.rate(id, "ann", 1.0, weight=0.25)
    assert replaced is not None and (replaced.rating, replaced.ratings, replaced.reward) == (1.0, 2, 1.25)
    assert replaced.verified_reward == 1.0 and store.experience(id) == replaced


def test_a_rating_gives_no_reward_where_verifiers_gave_none_or_a_run_trained(store: ExperienceStore):
    store.add_session(session())
    unjudged, of_run = store.add_experiences([experience(1), experience(2, reward=-3.0, step=2)])
    rated = [store.rate(id, "ann", 1.0) for id in (unjudged, of_run)]
    assert [(e.reward, e.rating) for e in rated if e] == [(None, 1.0), (-3.0, 1.0)]
    assert store.rate(999, "ann", 1.0) is None


@pytest.mark.parametrize("rating", [-0.1, 1.1, math.nan, math.inf])
def test_a_rating_outside_0_to_1_is_refused(store: ExperienceStore, rating: float):
    with pytest.raises(ValueError, match=r"rating=.*expected a number from 0 \(bad\) to 1 \(good\)"):
        store.rate(1, "ann", rating)


def test_concurrent_ratings_are_all_counted(store: ExperienceStore):
    store.add_session(session())
    [id] = store.add_experiences([experience(reward=1.0)])
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: store.rate(id, f"p{i}", (i % 2) * 1.0), range(16)))
    found = store.experience(id)
    assert found is not None and (found.ratings, found.rating) == (16, 0.5)


# --- opening -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "nothing given"),
        ("mysql://u:secret@h/d", "mysql:// is not known"),
        ("sqlite://", "in memory"),
        ("sqlite:///:memory:", "in memory"),
        ("postgresql://u:secret@h:port/d", "not a valid URL"),
        ("/dev/null/x.db", "cannot be opened"),
    ],
)
def test_an_invalid_database_url_is_refused_clearly(url: str, says: str):
    with pytest.raises(ValueError, match=says) as told:
        open_store(url)
    assert "secret" not in str(told.value)


def test_a_plain_path_is_a_sqlite_file_only_its_owner_may_read(tmp_path: Path):
    place = tmp_path / "deep" / "er" / "store.db"
    open_store(place).add_session(session())
    modes = {path.name: stat.S_IMODE(os.stat(path).st_mode) for path in place.parent.iterdir()}
    assert modes.keys() >= {"store.db"} and set(modes.values()) == {0o600}
    again = open_store(f"sqlite:///{place}")
    assert again.session("s1") is not None


def test_opening_loads_neither_alembic_nor_a_driver_that_is_not_used(tmp_path: Path):
    code = (
        f"import sys; from rlvr.store import open_store; open_store({str(tmp_path / 'x.db')!r}).ping()\n"
        "print([m for m in ('alembic', 'psycopg', 'torch', 'scipy', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def test_the_queries_of_the_pages_use_an_index(store: ExperienceStore):
    """A page of a task, of an outcome, of a step, and the replay window: none reads the whole table."""
    store.add_session(session())
    store.add_experiences([experience(i, outcome="passed") for i in range(1, 400)])
    e = experiences.c
    pages = [
        sa.select(experiences).where(e.task_id == "sum", e.id > 5).order_by(e.id).limit(10),
        sa.select(experiences).where(e.outcome == "failed").order_by(e.id).limit(10),
        sa.select(experiences).where(e.session_id == "s1", e.step == 4).order_by(e.id).limit(10),
        store._window(),
    ]
    with store.write() as connection:
        if not store.is_sqlite:
            connection.execute(sa.text("SET LOCAL enable_seqscan = off"))  # a small table is read whole otherwise
        for page in pages:
            text = str(page.compile(connection.engine, compile_kwargs={"literal_binds": True}))
            explain = "EXPLAIN QUERY PLAN " if store.is_sqlite else "EXPLAIN "
            told = "\n".join(str(tuple(row)) for row in connection.exec_driver_sql(explain + text.replace("%", "%%")))
            assert "rlvr_experiences_" in told.replace("rlvr_experiences_pkey", "") and "Sort" not in told, told
            assert "TEMP B-TREE" not in told, told


def test_answers_and_their_sessions_row_are_written_together_or_not_at_all(store: ExperienceStore):
    store.add_session(Session("s1", "t1", "p", status=Status.RUNNING))
    with pytest.raises(Exception, match="real number"):  # the row cannot be written
        store.record_answers("s1", [experience(1)], {"final_confidence": "high"}, Status.RUNNING)
    assert store.count() == 0
    [id], was_expected = store.record_answers("s1", [experience(1)], {"iterations": 1}, Status.RUNNING)
    session = store.session("s1")
    assert was_expected and id and session is not None and session.iterations == 1


def test_an_answer_that_comes_after_its_session_was_ended_still_counts_in_its_row(store: ExperienceStore):
    store.add_session(Session("s1", "t1", "p", status=Status.INTERRUPTED))
    [_], was_expected = store.record_answers(
        "s1", [experience(1)], {"iterations": 1}, [Status.QUEUED, Status.RUNNING], status=Status.DONE
    )
    session = store.session("s1")
    assert not was_expected and session is not None
    assert (session.status, session.iterations, store.count()) == (Status.INTERRUPTED, 1, 1)
