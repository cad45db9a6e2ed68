"""Which level a prompt is drawn from, and that the position in the data is state."""

from __future__ import annotations

import pytest

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
        ({"by": "hardness"}, "expected uniform, pass_rate or schedule"),
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
