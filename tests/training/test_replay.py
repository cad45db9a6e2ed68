"""Tasks that were not solved come back: which, when, how often, and the same after a resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.training.curriculum import Curriculum, CurriculumOptions
from rlvr.training.journal import describe_mismatch
from rlvr.training.schedules.sync import Synchronous
from rlvr.training.sft import SftOptions
from tests.kit.table_trainer import Letters, fixed_lag_trainer, make_trainer, run_fixed_lag
from tests.kit.tiny_run import TINY, RunKilled, attempt, stored_steps


def curriculum(replay: float = 0.5) -> Curriculum:
    return Curriculum(Letters(), CurriculumOptions(replay=replay), seed=1)


def test_an_unsolved_task_comes_back_the_longest_waiting_first_and_a_solved_one_does_not() -> None:
    made = curriculum(0.999999)
    tasks = made.tasks(4, step=0)
    assert [task.id for task in tasks] == ["0", "1", "2", "3"]
    made.observe_tasks({"2": [[False, False]], "0": [[False]], "1": [[False, True]], "3": [[]]})
    assert list(made.unsolved.values()) == [("", 2), ("", 0), ("", 3)], "no judged completion is no solution"
    assert [task.id for task in made.tasks(5, step=1)] == ["2", "0", "3", "4", "5"]
    assert not made.unsolved
    made.observe_tasks({"2": [[False]], "7": [[False]]})
    assert made.unsolved == {"2": ("", 2)}, "again unsolved; 7 is not under way"


def test_a_waiting_task_that_is_under_way_again_is_not_drawn_a_second_time() -> None:
    made = curriculum(0.999999)
    made.unsolved, made.under_way = {"0": ("", 0), "1": ("", 1)}, {"0": [("", 9)]}
    assert made.draw(2, 0) == [("", 1), ("", 0)] and made.drawn == {"": 1} and list(made.unsolved) == ["0"]


def test_a_task_of_a_killed_attempt_is_skipped() -> None:
    made = curriculum()
    made.skip("", 4)
    assert made.draw(2, 0) == [("", 5), ("", 6)]
    made.skip("", 2)
    assert made.draw(1, 1) == [("", 7)]


def test_a_place_is_given_to_a_replay_with_the_chance_of_the_option() -> None:
    made = curriculum(0.3)
    made.unsolved = {f"{10_000 + i}": ("", 10_000 + i) for i in range(2000)}
    drawn = made.draw(2000, step=3)
    share = sum(index >= 10_000 for _, index in drawn) / 2000
    assert abs(share - 0.3) < 4 * (0.3 * 0.7 / 2000) ** 0.5
    assert [index for _, index in drawn if index < 10_000] == list(range(len([i for _, i in drawn if i < 10_000])))


def test_without_the_option_nothing_is_remembered() -> None:
    made = curriculum(0.0)
    made.tasks(2, step=0)
    made.observe_tasks({"0": [[False]]})
    assert not made.unsolved and not made.under_way and made.state() == {"drawn": {"": 2}, "pass_rate": {"": 0.5}}


def with_replay(trainer: Any, replay: float = 0.5) -> Any:
    """The trainer with another curriculum; every third task of its source cannot be solved."""
    made = Curriculum(Letters(impossible=True), CurriculumOptions(replay=replay), seed=1)
    trainer.parts = replace(trainer.parts, curriculum=made)
    trainer.collector.curriculum = made
    return trainer


def test_a_run_asks_unsolved_tasks_again_and_reports_how_many_wait() -> None:
    trainer = with_replay(make_trainer(steps=6))
    schedule = Synchronous(trainer)
    rows = [schedule.learn(step) for step in range(6)]
    asked = [{t.task.id for t in row[1].all if t.task} for row in rows]
    again = [ids & set().union(*asked[:i]) for i, ids in enumerate(asked) if i]
    assert any(again) and not again[0] - asked[0]
    assert all(row[0]["curriculum/unsolved"] >= 0 for row in rows) and rows[0][0]["curriculum/unsolved"] >= 2


def test_the_state_restores_what_waits_and_a_fixed_lag_repeats(tmp_path: Path) -> None:
    made = curriculum()
    made.unsolved = {"4": ("", 4)}
    other = curriculum()
    other.restore(made.state())
    assert other.unsolved == {"4": ("", 4)}
    runs = []
    for name in ("a", "b"):
        trainer = with_replay(fixed_lag_trainer(max_steps_off_policy=1))
        run_fixed_lag(trainer, tmp_path / name)
        runs.append((trainer.parts.curriculum.unsolved, trainer.parts.client.weights_sha256()))
    assert runs[0] == runs[1] and runs[0][0]


@pytest.mark.parametrize("schedule", [[], ["training.max_steps_off_policy=1"]])
@pytest.mark.slow
def test_a_killed_run_with_replays_ends_with_the_same_bits(
    schedule: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    words = ["curriculum.replay=0.5", "training.steps=6", *schedule]
    attempt("tiny.yaml", *words, "run.name=whole")
    with pytest.raises(KeyboardInterrupt):
        attempt("tiny.yaml", *words, "run.name=killed", killed_at=4)
    attempt("tiny.yaml", *words, "run.name=killed")
    rows = stored_steps(tmp_path / "runs" / "whole")
    assert stored_steps(tmp_path / "runs" / "killed") == rows
    assert rows[-1]["curriculum/unsolved"] > 0


def test_a_run_that_was_killed_in_fine_tuning_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next examples are those that it had not drawn, and no row of a step that is made again stays."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(TINY)
    words = ("sft.steps=4", "training.steps=1", "run.checkpoint_every=2")
    calm = attempt("tiny.yaml", "run.name=calm", *words)
    with pytest.raises(RunKilled):
        attempt("tiny.yaml", "run.name=torn", *words, killed_at=3, phase="sft")
    torn = attempt("tiny.yaml", "run.name=torn", *words)
    assert torn["weights_sha256"] == calm["weights_sha256"]
    assert stored_steps(Path("runs/torn")) == stored_steps(Path("runs/calm"))


@pytest.mark.parametrize("stored", [3, [["", -1]], [[1, 1]], [["", 1, 2]], ["x"]])
def test_a_damaged_list_of_tasks_is_named(stored: Any) -> None:
    found = describe_mismatch({"unsolved": stored}, {"unsolved": []})
    assert "state.unsolved" in found and "[level, index]" in found
    assert not describe_mismatch({"unsolved": [["a", 3]]}, {"unsolved": [["b", 1], ["c", 2]]})


def test_what_cannot_replay_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"curriculum.replay=1.0, expected a chance from 0 to below 1"):
        CurriculumOptions(replay=1.0)
    with pytest.raises(ValueError, match=r"sft.curriculum.replay"):
        SftOptions(curriculum=CurriculumOptions(replay=0.5))
    (tmp_path / "tiny.yaml").write_text(TINY)
    for words, message in (
        (["training.schedule=completion"], "use schedule=sync or fixed_lag"),
        (["training.control=random_reward"], "a control run must not choose tasks"),
        (["training.false_positives=0.1"], "a control run must not choose tasks"),
    ):
        with pytest.raises(ValueError, match=message):
            build_config(load(None, str(tmp_path / "tiny.yaml"), ["curriculum.replay=0.5", *words]))
    with pytest.raises(ValueError, match=r"curriculum.by \(a control run must not choose tasks"):
        words = ["curriculum.by=pass_rate", "training.control=random_reward"]
        build_config(load(None, str(tmp_path / "tiny.yaml"), words))
