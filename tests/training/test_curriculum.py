"""Which level a prompt is drawn from, and that the position in the data is state."""

from __future__ import annotations

import pytest

from rlvr.core.types import Task
from rlvr.envs import resolve_environment
from rlvr.training.curriculum import Curriculum, CurriculumOptions

RPN = resolve_environment("rpn_arithmetic")


def test_uniform_draws_every_level_alike() -> None:
    tasks = Curriculum(RPN, CurriculumOptions(), seed=1).tasks(3000, step=0)
    shares = [sum(t.level == level for t in tasks) / 3000 for level in ("1", "2", "3")]
    assert shares == pytest.approx([1 / 3] * 3, abs=0.04)


def test_by_pass_rate_prefers_levels_whose_answers_are_mixed() -> None:
    curriculum = Curriculum(RPN, CurriculumOptions(by="pass_rate", decay=0.0), seed=1)
    curriculum.observe({"1": [True] * 8, "2": [True, False] * 4, "3": [False] * 8})
    assert curriculum.weights(0) == pytest.approx([0.05, 0.30, 0.05])  # p (1 - p) + 0.05
    tasks = curriculum.tasks(400, step=0)
    assert sum(t.level == "2" for t in tasks) > 250


def test_by_progress_prefers_levels_whose_pass_rate_moves() -> None:
    """By hand: both means of a level begin at its first rate; one that stands still has no progress."""
    options = CurriculumOptions(by="progress", decay=0.5, slow_decay=0.75, explore=0.3)
    curriculum = Curriculum(RPN, options, seed=1)
    assert curriculum.weights(0) == pytest.approx([1 / 3] * 3)
    curriculum.observe({"1": [True, False], "2": [False] * 4})
    # Only level 3 was never drawn: it has all progress.
    assert curriculum.weights(1) == pytest.approx([0.1, 0.1, 0.7 + 0.1])
    curriculum.observe({"1": [True, False], "2": [True] * 4, "3": [True] * 2})
    curriculum.observe({"3": [False] * 2})
    # Level 2: fast 0 -> 0.5, slow 0 -> 0.25. Level 3: fast 1 -> 0.5, slow 1 -> 0.75. Level 1 stands at 0.5.
    assert curriculum.memory == {"1": [0.5, 0.5], "2": [0.5, 0.25], "3": [0.5, 0.75]}
    assert curriculum.weights(2) == pytest.approx([0.1, 0.35 + 0.1, 0.35 + 0.1])
    restored = Curriculum(RPN, options, seed=1)
    restored.restore(curriculum.state())
    assert restored.weights(2) == curriculum.weights(2)
    still = Curriculum(RPN, options, seed=1)
    still.observe({level: [True] for level in ("1", "2", "3")})
    assert still.weights(1) == [1.0] * 3, "no level moves: all alike"


def test_a_schedule_opens_levels_at_its_steps() -> None:
    options = CurriculumOptions(by="schedule", schedule=[(0, {"1": 1.0}), (10, {"1": 1.0, "2": 1.0, "3": 8.0})])
    curriculum = Curriculum(RPN, options, seed=1)
    assert {t.level for t in curriculum.tasks(50, step=9)} == {"1"}
    levels = [t.level for t in curriculum.tasks(200, step=10)]
    assert set(levels) == {"1", "2", "3"} and levels.count("3") > 130


def test_a_restored_curriculum_goes_on_with_the_next_tasks() -> None:
    """Neither repeats nor skips: what it would have drawn is what it draws."""
    unbroken = Curriculum(RPN, CurriculumOptions(by="pass_rate"), seed=4)
    unbroken.tasks(20, step=0)
    unbroken.observe({"1": [True], "3": [False]})
    restored = Curriculum(RPN, CurriculumOptions(by="pass_rate"), seed=4)
    restored.restore(unbroken.state())
    assert [t.id for t in restored.tasks(20, step=1)] == [t.id for t in unbroken.tasks(20, step=1)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"by": "hard"},
            "by='hard' is unknown; known: uniform, tasks, pass_rate, progress, schedule, threshold",
        ),
        ({"by": "progress", "decay": 0.98}, r"slow_decay=0.97, decay=0.98; expected slow_decay > decay"),
        ({"by": "progress", "explore": 0.0}, "above 0"),
        ({"by": "schedule"}, "belong together"),
        ({"by": "schedule", "schedule": [(0, {"1": -1.0})]}, "not all 0"),
        ({"by": "schedule", "schedule": [(5, {"1": 1.0})]}, "must start at 0"),
    ],
)
def test_options_that_do_not_fit_say_why(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CurriculumOptions(**options)  # type: ignore[arg-type]


def test_a_schedule_with_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="no level"):
        Curriculum(RPN, CurriculumOptions(by="schedule", schedule=[(0, {"9": 1.0})]), seed=1)


class Problems:
    """A source of problems with 3, 4 and 9 tests: 30, 10 and 5 of them."""

    levels = ("3", "4", "9")
    sizes = {"3": 30, "4": 10, "9": 5}  # noqa: RUF012

    def size(self, level: str) -> int:
        return self.sizes[level]

    def train(self, seed: int, index: int, level: str) -> Task:
        return Task(f"{level}-{index}", "", {}, level)


class OneLevel(Problems):
    levels = ("3",)


def test_a_threshold_opens_levels_as_steps_go_by_and_draws_every_open_task_alike() -> None:
    """Seed 001: problems with at most min(10, 3 + iteration // 5) tests."""
    curriculum = Curriculum(Problems(), CurriculumOptions(by="threshold"), seed=1)  # type: ignore[arg-type]
    opened = {
        step: [level for level, w in zip("349", curriculum.weights(step), strict=True) if w] for step in range(60)
    }
    for step, levels in opened.items():
        assert levels == [level for level in "349" if int(level) <= min(10, 3 + step // 5)]
    assert opened[29] == ["3", "4"] and opened[30] == ["3", "4", "9"]
    drawn = [task.level for task in curriculum.tasks(4500, step=40)]
    assert [drawn.count(level) / 4500 for level in "349"] == pytest.approx([30 / 45, 10 / 45, 5 / 45], abs=0.02)
    assert curriculum.advice() == []


def test_by_tasks_draws_every_task_alike_whatever_its_level() -> None:
    drawn = [t.level for t in Curriculum(Problems(), CurriculumOptions(by="tasks"), seed=1).tasks(4500, step=0)]  # type: ignore[arg-type]
    assert [drawn.count(level) / 4500 for level in "349"] == pytest.approx([30 / 45, 10 / 45, 5 / 45], abs=0.02)
    with pytest.raises(ValueError, match=r"generates its tasks.*use by=uniform"):
        Curriculum(RPN, CurriculumOptions(by="tasks"), seed=1)


def test_a_threshold_that_nothing_is_above_is_warned_of_and_one_below_everything_refused() -> None:
    """On full MBPP every problem has three tests."""
    options = CurriculumOptions(by="threshold", first=9)
    (told,) = Curriculum(Problems(), options, seed=1).advice()  # type: ignore[arg-type]
    assert "changes nothing here" in told and "levels 3, 4, 9" in told
    (told,) = Curriculum(Problems(), CurriculumOptions(by="threshold", highest=8), seed=1).advice()  # type: ignore[arg-type]
    assert "never opens the levels 9" in told
    assert Curriculum(Problems(), CurriculumOptions(by="pass_rate"), seed=1).advice() == []  # type: ignore[arg-type]
    for by in ("threshold", "pass_rate"):  # one level: neither can choose, and neither is praised
        (told,) = Curriculum(OneLevel(), CurriculumOptions(by=by), seed=1).advice()  # type: ignore[arg-type]
        assert f"by={by} changes nothing here" in told and "may help" not in told
    with pytest.raises(ValueError, match="no level is at most first=2"):
        Curriculum(Problems(), CurriculumOptions(by="threshold", first=2), seed=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the level '' is not a number"):
        Curriculum(resolve_environment("toy"), CurriculumOptions(by="threshold"), seed=1)
    with pytest.raises(ValueError, match="every=0, expected at least 1"):
        CurriculumOptions(by="threshold", every=0)
