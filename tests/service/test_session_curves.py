"""The curves over all sessions rise where the model improves, and no point is an average of a few."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlvr.service.dashboard.session_curves import FEWEST, Stretch, join_stretches, overall_charts
from rlvr.store import Experience, ExperienceStore, Session, Status, open_store

numbers = itertools.count()


@pytest.fixture
def store(store_url: str) -> Iterator[ExperienceStore]:
    store = open_store(store_url)
    yield store
    store.close()


@pytest.fixture
def file_store(tmp_path: Path) -> Iterator[ExperienceStore]:
    """For many rows; the queries are tried on both databases by the other tests."""
    store = open_store(tmp_path / "store.sqlite")
    yield store
    store.close()


def add_session(store: ExperienceStore, passes: list[bool], kind: str = "train", **more: Any) -> None:
    """A session with one answer for each of `passes`; its confidence is that of the best."""
    name, best = f"s{next(numbers):05}", float(any(passes))
    store.add_session(Session(name, "t", "p", status=Status.DONE, created=float(name[1:]), final_confidence=best))
    store.add_experiences([
        Experience(
            name, "t", 1, "p", "o", sample=i, kind=kind, outcome="passed" if passed else "failed",
            confidence=float(passed), reward=1.5 * passed, **more,
        )
        for i, passed in enumerate(passes)
    ])  # fmt: skip


def curves(store: ExperienceStore) -> dict[str, dict[str, list[tuple[float, float]]]]:
    return {chart.title: {line.name: line.points for line in chart.lines} for chart in overall_charts(store)}


def best_of_newest(store: ExperienceStore) -> list[float]:
    """What was drawn before: the share of the last 20 sessions whose best answer passed, of the newest 400."""
    newest = list(reversed(store.sessions(limit=400, texts=False)))
    solved = [float((session.final_confidence or 0.0) > 0.7) for session in newest]
    return [sum(solved[max(0, i - 19) : i + 1]) / len(solved[max(0, i - 19) : i + 1]) for i in range(len(solved))]


def test_curves_rise_with_a_model_that_improves_where_the_best_of_each_session_fell(file_store: ExperienceStore):
    """Held-out 62 of 100, training by 16 samples a session that gets better, held-out 85 of 100."""
    for i in range(100):
        add_session(file_store, [(i * 62) % 100 < 62], "evaluate")
    for i in range(80):
        passed = 5 + i // 10  # of 16: 31 % at first, 75 % in the end
        add_session(file_store, [(sample * 7 + i) % 16 < passed for sample in range(16)])
    for i in range(100):
        add_session(file_store, [(i * 85) % 100 < 85], "evaluate")
    old = best_of_newest(file_store)
    assert max(old[100:180]) == 1.0 and old[-1] <= 0.85, "the best of 16, then single samples: it fell"
    rates = curves(file_store)["Pass rate"]
    training, evaluation = ([rate for _, rate in rates[name]] for name in ("training", "evaluation"))
    assert (training[0], training[-1]) == pytest.approx((0.32, 0.74), abs=0.03)
    assert all(later > before - 0.02 for before, later in itertools.pairwise(training)) and len(training) == 12
    assert (evaluation[0], evaluation[-1]) == pytest.approx((0.62, 0.85), abs=0.02)
    assert evaluation == sorted(evaluation) and len(evaluation) == 7


def test_all_sessions_are_in_the_curves_and_none_twice(file_store: ExperienceStore):
    for i in range(500):
        add_session(file_store, [i < 100])
    points = curves(file_store)["Pass rate"]["training"]
    assert points[0][1] == 1.0 and points[-1][1] == 0.0, "the oldest ones passed"
    assert points[-1][0] == 500
    widths = [here - before for (before, _), (here, _) in itertools.pairwise([(0.0, 0.0), *points])]
    assert sum(rate * width for (_, rate), width in zip(points, widths, strict=True)) == pytest.approx(100)


def test_answers_after_feedback_have_a_curve_of_their_own(store: ExperienceStore):
    for i in range(40):
        add_session(store, [False])
        again = Experience(
            f"s{next(numbers) - 1:05}", "t", 2, "p", "o", outcome="passed" if i % 4 == 0 else "failed", confidence=1.0
        )
        store.add_experiences([again])
        next(numbers)
    found = curves(store)
    assert [rate for _, rate in found["Pass rate"]["training"]] == [0.0, 0.0]
    assert [rate for _, rate in found["Pass rate after feedback"]["training"]] == [0.25, 0.25]


def test_unjudged_answers_and_training_runs_are_in_no_point(store: ExperienceStore):
    add_session(store, [True] * 20)
    name = f"s{next(numbers) - 1:05}"
    broken = [Experience(name, "t", 1, "p", "o", sample=20 + i, outcome="error") for i in range(30)]
    store.add_experiences(broken)
    add_session(store, [False] * 50, "run", step=1)
    assert curves(store)["Pass rate"] == {"training": [(20.0, 1.0)]}


def test_fewer_than_twenty_answers_make_no_point(store: ExperienceStore):
    assert overall_charts(store) == []
    add_session(store, [True] * (FEWEST - 1))
    assert overall_charts(store) == []
    add_session(store, [False])
    assert curves(store)["Pass rate"] == {"training": [(20.0, 0.95)]}


def test_signal_is_the_share_of_training_sessions_whose_rewards_differ(store: ExperienceStore):
    for i in range(20):
        add_session(store, [True, i < 5])
        add_session(store, [True])  # one answer: nothing to compare
        add_session(store, [True, False], "evaluate")  # nothing is learned from it
    assert curves(store)["Sessions with signal"] == {"training": [(97.0, 0.75)]}


@pytest.mark.parametrize(
    ("counts", "sizes"),
    [([], []), ([19], []), ([20], [20]), ([20, 19], [39]), ([7] * 5, [35]), ([7] * 7, [21, 28]),
     ([100, 1, 30], [100, 31]), ([50] * 16, [100] * 8), ([50] * 160, [200] * 40)],
)  # fmt: skip
def test_stretches_are_joined_until_a_point_has_enough(counts: list[int], sizes: list[int]):
    stretches = [Stretch(i, count, float(count * i)) for i, count in enumerate(counts)]
    points = join_stretches(stretches)
    assert len(points) == len(sizes)
    assert sum(mean * size for (_, mean), size in zip(points, sizes, strict=True)) == pytest.approx(
        sum(one.total for one in stretches) if sizes else 0.0
    )


def test_a_curve_of_many_answers_has_at_most_forty_points_and_keeps_all_of_them():
    points = join_stretches([Stretch(i, 100, float(i < 200) * 100) for i in range(400)])
    assert len(points) == 40 and points[0] == (9.0, 1.0) and points[-1] == (399.0, 0.0)
