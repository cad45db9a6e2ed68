"""Tasks of a data set, which come again every epoch: each waits once, has one hint, and a resume repeats."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlvr.core.types import Task
from rlvr.envs.row_source import RowSource
from rlvr.training.curriculum import Curriculum, CurriculumOptions
from rlvr.training.hints import HintWriter
from rlvr.training.metrics import verdicts_by_task
from rlvr.training.schedules.sync import Synchronous
from tests.kit.table_trainer import fixed_lag_trainer, make_trainer, run_fixed_lag

HARD, EASY = "z", "a"  # what the policy of `table_trainer` cannot say, and what it can


class Rows(RowSource):
    """Four tasks, of which the first two cannot be solved."""

    def __init__(self) -> None:
        answers = (HARD, HARD, EASY, EASY)
        tasks = [Task(f"t{i}", "say", {"answer": answer}) for i, answer in enumerate(answers)]
        super().__init__("rows", tasks, [], "exact_match", demonstrations="answer")


class OneTokenHints(HintWriter):
    """A hint of as many tokens as it has steps of 0.25."""

    def write(self, task: Task, share: float) -> Task:
        return replace(task, hint=(7,) * round(4 * share))


def curriculum(replay: float = 0.5, hint_step: float = 0.0) -> Curriculum:
    source = Rows()
    return Curriculum(source, CurriculumOptions(replay=replay, hint_step=hint_step), 1, OneTokenHints(source, None, 9))


def by_id(tasks: list[Task], passes: Any) -> dict[str, list[list[bool]]]:
    """The verdicts of a batch with one group for each task."""
    groups: dict[str, list[list[bool]]] = {}
    for task in tasks:
        groups.setdefault(task.id, []).append([passes(task)])
    return groups


def draw_two_epochs(made: Curriculum) -> dict[str, list[tuple[str, int]]]:
    """The places of two epochs by the id of their task: each has two."""
    for index in range(8):
        made.task("", index)
    places, made.under_way = made.under_way, {}
    return places


@pytest.mark.parametrize("hint_step", [0.0, 0.25])
def test_a_task_that_is_never_solved_waits_once(hint_step: float) -> None:
    made = curriculum(hint_step=hint_step)
    for step in range(60):
        made.observe_tasks(by_id(made.tasks(8, step), lambda task: False))
        assert len(made.unsolved) <= 4 and set(made.hints) <= set(made.unsolved.values()) and not made.under_way
    assert sorted(made.unsolved) == ["t0", "t1", "t2", "t3"]
    assert not hint_step or max(made.hints.values()) == 4


def test_what_is_solved_behind_a_hint_only_is_not_solved_and_no_hint_is_left_over() -> None:
    made = curriculum(hint_step=0.25)
    hinted = 0
    for step in range(100):
        tasks = made.tasks(8, step)
        hinted += sum(bool(task.hint) for task in tasks)
        assert all(sum(bool(task.hint) for task in tasks if task.id == id) <= 1 for id in ("t0", "t1", "t2", "t3"))
        made.observe_tasks(by_id(tasks, lambda task: bool(task.hint)))
        assert set(made.hints) <= set(made.unsolved.values())
    assert hinted > 100 and len(made.unsolved) == 4


@pytest.mark.parametrize("fresh_first", [True, False])
def test_the_same_task_with_and_without_its_hint_in_one_batch_has_two_verdicts(fresh_first: bool) -> None:
    def ask(with_hint: bool, without: bool) -> Curriculum:
        made = curriculum(replay=0.999999, hint_step=0.25)
        first, second = draw_two_epochs(made)["t0"]
        made.observe_tasks({made.task(*first).id: [[False]]})
        assert made.draw(1, 0) == [first]
        order = (second, first) if fresh_first else (first, second)
        tasks = [made.task(*place) for place in order]
        assert [len(task.hint) for task in tasks] == ([0, 1] if fresh_first else [1, 0])
        made.observe_tasks(by_id(tasks, lambda task: with_hint if task.hint else without))
        assert set(made.unsolved.values()) <= {first}, "it comes back at the place of its hint"
        return made

    assert ask(True, False).unsolved and not ask(True, False).hints, "it comes back without a hint"
    assert list(ask(False, False).hints.values()) == [2], "a fresh draw makes no hint longer"
    solved = ask(True, True)
    assert not solved.unsolved and not solved.hints and not solved.under_way


def test_a_fresh_draw_that_is_solved_ends_the_wait_and_one_under_way_holds_a_replay_back() -> None:
    made = curriculum(replay=0.999999, hint_step=0.25)
    first, second = draw_two_epochs(made)["t0"]
    made.observe_tasks({made.task(*first).id: [[False]]})
    assert made.task(*second).hint == ()
    made.drawn[""] = 8
    assert made.draw(1, 0) == [("", 8)], "t0 waits, but is under way"
    made.observe_tasks({"t0": [[True]]})
    assert not made.unsolved and not made.hints


@pytest.mark.parametrize("hint_step", [0.0, 0.25])
def test_a_resume_at_any_step_repeats_with_the_same_task_in_flight_twice(hint_step: float) -> None:
    """Two batches of six of four tasks are in flight: drawn again from the checkpoint, they end alike."""

    def passes(task: Task) -> bool:
        return task.id == "t3" or len(task.hint) >= 2

    def run(killed_at: int | None) -> list[Any]:
        made, rows = curriculum(hint_step=hint_step), list[Any]()
        flying = [made.draw(6, 0)]
        batches = [[made.task(*place) for place in flying[0]]]
        for step in range(24):
            flying.append(made.draw(6, step + 1))
            batches.append([made.task(*place) for place in flying[-1]])
            made.observe_tasks(by_id(batches.pop(0), passes))
            flying.pop(0)
            if step == killed_at:
                state, made = json.loads(json.dumps(made.state())), curriculum(hint_step=hint_step)
                made.restore(state)
                batches = [[made.task(*place) for place in drawn] for drawn in flying]
            rows.append((made.state(), made.under_way.copy(), batches[0]))
        return rows

    whole = run(None)
    assert any(max(map(len, under_way.values())) > 1 for _, under_way, _ in whole)
    for killed_at in range(24):
        assert run(killed_at) == whole


def test_a_state_with_a_task_at_several_places_keeps_the_first() -> None:
    """As versions stored it that counted places: a hint whose task waits elsewhere is left out."""
    made = curriculum(hint_step=0.25)
    places = draw_two_epochs(made)
    (a, a2), (b, b2) = places["t0"], places["t1"]
    stored = {"drawn": {"": 8}, "pass_rate": {"": 0.5}, "unsolved": [a, b2, a2, b], "hints": [a2, b2, b2]}
    made.restore(json.loads(json.dumps(stored)))
    assert made.unsolved == {"t0": a, "t1": b2} and made.hints == {b2: 2}


def with_rows(trainer: Any) -> Any:
    source = Rows()
    made = Curriculum(source, CurriculumOptions(replay=0.5), 1)
    trainer.parts = replace(trainer.parts, source=source, curriculum=made)
    trainer.collector.curriculum = made
    trainer.collector._parts = trainer.parts
    return trainer


def test_a_run_over_a_small_data_set_counts_the_tasks_that_wait(tmp_path: Path) -> None:
    trainer = with_rows(make_trainer(steps=12))
    schedule = Synchronous(trainer)
    rows = [schedule.learn(step)[0]["curriculum/unsolved"] for step in range(12)]
    assert max(rows) <= 4 and rows[-1] >= 1 and not trainer.parts.curriculum.under_way
    trainer = with_rows(fixed_lag_trainer(max_steps_off_policy=2))
    run_fixed_lag(trainer, tmp_path)
    assert set(trainer.parts.curriculum.unsolved) >= {"t0", "t1"} and not trainer.parts.curriculum.under_way


def test_a_group_without_a_verdict_comes_back_and_a_control_run_remembers_nothing() -> None:
    trainer = with_rows(make_trainer(prompts_per_step=4))
    _, batch = Synchronous(trainer).learn(0)
    assert sorted(map(len, verdicts_by_task(batch.all, "exact_match")["t0"])) == [4]
    for t in batch.all:
        t.reward = None
    assert verdicts_by_task(batch.all, "exact_match") == {f"t{i}": [[]] for i in range(4)}
    control = with_rows(make_trainer(control="random_reward"))
    Synchronous(control).learn(0)
    assert not control.parts.curriculum.under_way and not control.parts.curriculum.unsolved
