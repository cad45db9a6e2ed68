"""What the database computes of experiences is what plain Python computes of the same rows."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import event

from rlvr.store import Experience, ExperienceStore, Session, Status, open_store
from rlvr.store.tables import sessions

unit = st.one_of(st.none(), st.sampled_from([0.0, 0.2, 0.4, 0.6, 0.7, 0.8, 1.0]), st.floats(0, 1, width=32))
rewards = st.one_of(st.none(), st.floats(-5, 5, width=32), st.sampled_from([0.0, 1.0]))
codes = st.lists(st.sampled_from(["too_short", "syntax_error", "é"]), max_size=3)
answers = st.lists(st.tuples(rewards, unit, codes), max_size=12)
ends = st.lists(st.tuples(st.sampled_from(["t1", "t2"]), unit, st.integers(0, 5), st.sampled_from(Status)), max_size=10)


@pytest.fixture
def store(store_url: str) -> Iterator[ExperienceStore]:
    store = open_store(store_url)
    yield store
    store.close()


fresh = itertools.count()


def add_task(store: ExperienceStore, rows: Sequence[tuple[float | None, float | None, list[str]]], **how: Any) -> str:
    """The rows as experiences of a task of its own, whose id is returned."""
    task = f"task-{next(fresh)}"
    store.add_session(Session(task, task, "p"))
    store.add_experiences(
        [
            Experience(task, task, i + 1, "p", "o", reward=reward, confidence=c, feedback={"error_types": codes}, **how)
            for i, (reward, c, codes) in enumerate(rows)
        ]
    )
    return task


def mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def close(value: Any) -> Any:
    return value if value is None else pytest.approx(value, abs=1e-9)


def test_a_training_runs_rewards_are_in_no_mean_with_those_of_sessions(store: ExperienceStore):
    task = add_task(store, [(1.5, 1.0, []), (0.5, 0.2, ["wrong"])])
    before = store.task_analysis(task)
    store.add_session(Session("run", "", "", kind="run"))
    more = [Experience("run", task, 1, "p", "o", sample=i, reward=-7.0, confidence=0.0, step=0) for i in range(3)]
    more[0].feedback = {"error_types": ["wrong"]}
    store.add_experiences(more)
    assert store.task_analysis(task) == before and before is not None
    assert (before["total_experiences"], before["average_reward"], before["common_errors"]) == (2, 1.0, {"wrong": 1})


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(answers)
def test_a_task_is_analysed_as_plain_python_does(store: ExperienceStore, rows: list[tuple[Any, Any, list[str]]]):
    found = store.task_analysis(add_task(store, rows))
    if not rows:
        assert found is None
        return
    judged = [reward for reward, _, _ in rows if reward is not None]
    sure = [c for _, c, _ in rows if c is not None]
    middle = (len(judged) + 1) // 2
    older, newer = judged[:middle], judged[middle:]
    edges = [-1, 0.2, 0.4, 0.6, 0.8, 2]
    names = ["very_low", "low", "medium", "high", "very_high"]
    assert found == {
        "total_experiences": len(rows),
        "average_reward": close(mean(judged)),
        "median_reward": close(statistics.median(judged) if judged else None),
        "reward_variance": close(statistics.pvariance(judged) if judged else None),
        "success_rate": close(mean([float(c > 0.7) for c in sure])),
        "improvement_trend": close(statistics.fmean(newer) - statistics.fmean(older) if newer else None),
        "common_errors": Counter(code for _, _, codes in rows for code in set(codes)),
        "confidence_distribution": {
            name: sum(low <= c < high for c in sure) for name, low, high in zip(names, edges, edges[1:], strict=False)
        },
    }


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ends)
def test_sessions_are_aggregated_as_plain_python_does(store: ExperienceStore, rows: list[tuple[str, Any, int, Status]]):
    prefix = f"{next(fresh)}-"
    for i, (task, confidence, iterations, status) in enumerate(rows):
        how = {"final_confidence": confidence, "iterations": iterations, "status": status, "created": 1.0 + i}
        store.add_session(Session(f"{prefix}{i}", prefix + task, "p", **how))
    found = {task: told for task, told in store.aggregates().items() if task.startswith(prefix)}
    expected: dict[str, Any] = {}
    for task in {task for task, *_ in rows}:
        mine = [(f"{prefix}{i}", *row[1:]) for i, row in enumerate(rows) if row[0] == task]
        sure = [(c, id) for id, c, _, _ in mine if c is not None]
        best = max(sure, key=lambda pair: pair[0], default=(None, None))  # the first of equals
        expected[prefix + task] = {
            "task_id": prefix + task,
            "total_sessions": len(mine),
            "average_confidence": close(mean([c for c, _ in sure])),
            "average_iterations": close(mean([n for _, _, n, status in mine if status.final])),
            "success_rate": close(mean([float(c > 0.7) for c, _ in sure])),
            "best_session_id": best[1],
            "best_confidence": best[0],
        }
    assert found == expected


def test_the_numbers_are_floats_on_both_databases(store: ExperienceStore):
    """PostgreSQL has a decimal type of its own, which no JSON takes."""
    task = add_task(store, [(1.0, 0.75, []), (0.5, 0.25, [])])
    store.update_session(task, status=Status.DONE, iterations=2, final_confidence=0.75)
    analysis = store.task_analysis(task)
    assert analysis is not None
    told = [*analysis.values(), *store.aggregates()[task].values(), *store.global_stats().values()]
    assert {type(value) for value in told} == {int, float, str, dict}
    assert {type(n) for n in analysis["confidence_distribution"].values()} == {int}


def test_success_follows_the_verdict_and_evaluations_are_apart(store: ExperienceStore):
    """A failed answer of high confidence is no success, a passed one of low confidence is; one unjudged is in no share.
    One that passed because the request's minimum is 0 is no success either."""
    verdicts = [("failed", 0.875), ("passed", 0.5), ("passed", 0.0), ("unverified", None)]
    for kind in ("train", "evaluate"):
        for i, (outcome, confidence) in enumerate(verdicts if kind == "train" else [("passed", 1.0)] * 5):
            more: dict[str, Any] = {"outcome": outcome, "kind": kind}
            id = f"{kind}-{i}"
            store.add_session(Session(id, "verdicts", "p", final_confidence=confidence, **more))
            store.add_experiences([Experience(id, f"verdicts-{kind}", 1, "p", "o", confidence=confidence, **more)])
    third = pytest.approx(1 / 3)
    assert store.aggregates()["verdicts"]["success_rate"] == third
    assert (store.aggregates()["verdicts"]["total_sessions"], store.global_stats()["success_rate"]) == (4, third)
    analysis = store.task_analysis("verdicts-train")
    assert analysis is not None and analysis["success_rate"] == third
    assert store.global_stats()["total_experiences"] == 9
    solved = [s.is_solved for i in range(4) if (s := store.session(f"train-{i}"))]
    assert solved == [False, True, False, None]


def test_an_empty_store_knows_nothing(store: ExperienceStore):
    assert store.task_analysis("x") is None and store.aggregates() == {}
    nothing = dict.fromkeys(("average_reward", "reward_variance", "success_rate", "last_updated"))
    assert store.global_stats() == {"total_experiences": 0, **nothing}


def test_a_training_runs_answers_count_for_their_task_and_not_for_the_service(store: ExperienceStore):
    task = add_task(store, [(-30.0, None, [])], step=1)
    analysis = store.task_analysis(task)
    assert analysis is not None and analysis["average_reward"] == -30.0
    assert store.global_stats()["total_experiences"] == 0
    store.add_session(Session("run", "", "", kind="run"))
    assert store.aggregates().keys() == {task}


def test_the_tasks_with_the_most_sessions_come_first(store: ExperienceStore):
    for i, task in enumerate(["b", "a", "c", "c"]):
        store.add_session(Session(f"s{i}", task, "p"))
    assert list(store.aggregates()) == ["c", "a", "b"] and list(store.aggregates(limit=2)) == ["c", "a"]


def test_the_work_for_the_aggregates_grows_with_the_sessions_and_not_with_their_square(tmp_path: Path):
    """Counted in thousands of SQLite's instructions."""
    instructions: list[int] = []

    def count(connection: Any, *_: Any) -> None:
        connection.set_progress_handler(lambda: instructions.append(1_000) or 0, 1_000)

    spent: list[int] = []
    with closing(open_store(tmp_path / "store.db")) as store:
        event.listen(store._engine, "checkout", count)
        for tasks in (range(200), range(200, 800)):
            with store.write() as connection:
                rows = [vars(Session(f"s{i}", f"t{i}", "p", final_confidence=0.5, created=1.0)) for i in tasks]
                connection.execute(sa.insert(sessions), rows)
            instructions.clear()
            assert len(store.aggregates()) == tasks.stop
            spent.append(sum(instructions))
    assert spent[1] < 8 * spent[0]  # four times as many sessions
