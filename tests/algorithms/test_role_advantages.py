"""Baselines by role: literals worked out by hand, what a game and an unknown reward do, and the state of a run."""

from __future__ import annotations

import pytest

from rlvr.algorithms import Algorithm, resolve_algorithm
from rlvr.algorithms.advantages import ADVANTAGES, RoleBaselineAdvantage
from rlvr.core.types import Task, Trajectory
from tests.kit.advantage_batch import trajectory


def play(group: str, number: int, first: float | None, second: float | None, game: str = "duel") -> list[Trajectory]:
    """An episode of two roles, each with a row of two tokens and a reward."""
    rows: list[Trajectory] = []
    for role, reward in (("first", first), ("second", second)):
        row = trajectory(group, f"{group}{number}", reward, 2)
        row.role, row.task, row.turn_starts = role, Task(group, group, {"game": game}), [0]
        row.turn_credits = [] if reward is None else [reward]
        rows.append(row)
    return rows


def values(name: str, rows: list[Trajectory], **options: float) -> list[float]:
    advantage = ADVANTAGES.find(name)(**options)
    advantage.estimate(rows, advantage.start_baseline())
    return [t.advantage for t in rows]


def test_role_baseline_by_hand() -> None:
    """decay 1/2. first: b = 0, 1/2, 1/4 - 1/2 = -1/4 before the rewards 1, -1, 1; second the negative of each."""
    rows = [*play("a", 0, 1.0, -1.0), *play("a", 1, -1.0, 1.0), *play("b", 0, 1.0, -1.0)]
    assert values("role_baseline", rows, role_decay=0.5) == [1.0, -1.0, -1.5, 1.5, 1.25, -1.25]


def test_role_baseline_goes_on_in_the_next_batch_and_by_game() -> None:
    """b of `duel` after 1 is 1/2 (decay 1/2), that of `poker` 0; a batch is first subtracted from, then seen."""
    advantage = RoleBaselineAdvantage(0.5)
    algorithm = Algorithm("own", advantage, resolve_algorithm("spiral").loss, "sequence_sum", drop_equal_groups=False)
    baseline = advantage.start_baseline()
    algorithm.select(play("a", 0, 1.0, 0.0), baseline)
    assert baseline.of_roles == {"duel/first": 0.5, "duel/second": 0.0} and baseline.value is None
    rows = [*play("b", 0, 1.0, 0.5), *play("c", 0, 1.0, 0.5, "poker")]
    algorithm.select(rows, baseline)
    assert [t.advantage for t in rows] == [0.5, 0.5, 1.0, 0.5]
    assert baseline.of_roles == {
        "duel/first": 0.75, "duel/second": 0.25, "poker/first": 0.5, "poker/second": 0.25
    }  # fmt: skip


def test_an_unknown_reward_and_a_second_row_of_a_role_move_no_baseline() -> None:
    rows = [*play("a", 0, None, None), *play("a", 1, 1.0, -1.0), *play("a", 1, 1.0, -1.0), *play("a", 2, 1.0, 1.0)]
    assert values("role_baseline", rows, role_decay=0.5) == [0.0, 0.0, 1.0, -1.0, 1.0, -1.0, 0.5, 1.5]


def test_role_group_mean_by_hand() -> None:
    """first earned 1, 1, -1 (mean 1/3), second -1, -1, 1; the mean over both roles is 0 and would keep the 1."""
    rows = [*play("a", 0, 1.0, -1.0), *play("a", 1, 1.0, -1.0), *play("a", 2, -1.0, 1.0)]
    assert values("role_group_mean", rows) == pytest.approx([2 / 3, -2 / 3, 2 / 3, -2 / 3, -4 / 3, 4 / 3])
    assert values("group_mean", rows) == [1.0, -1.0, 1.0, -1.0, -1.0, 1.0]


def test_role_prompt_mean_by_hand() -> None:
    """Two proposals of one prompt earned 1/2 and 0 (mean 1/4); the answers to one 1 and 0, to the other 0 and 0."""
    rows: list[Trajectory] = []
    for number, (paid, answers) in enumerate([(0.5, (1.0, 0.0)), (0.0, (0.0, 0.0))]):
        for role, prompt, reward in [("proposer", 9, paid), *(("solver", number, one) for one in answers)]:
            row = trajectory("a", f"a{number}", reward, 2)
            row.role, row.prompt_tokens, row.turn_starts, row.turn_credits = role, [prompt], [0], [reward]
            rows.append(row)
    assert values("role_prompt_mean", rows) == [0.25, 0.5, -0.5, -0.25, 0.0, 0.0]
    algorithm = resolve_algorithm("grpo", advantage="role_prompt_mean")
    assert [rows.index(t) for t in algorithm.select(rows)] == [0, 3, 1, 2], "equal answers to a task teach nothing"
    assert values("role_group_mean", rows)[1] == 0.75, "which also pays for an easier task"


def test_a_group_without_a_difference_in_a_role_has_no_signal() -> None:
    """The first role always wins: the two roles differ, and no role does. Where one differs, it alone is kept."""
    by_role, mixed = resolve_algorithm("grpo", advantage="role_group_mean"), resolve_algorithm("grpo")
    same = [*play("a", 0, 1.0, -1.0), *play("a", 1, 1.0, -1.0)]
    assert by_role.select(same) == [] and not by_role.has_signal(same)
    assert len(mixed.select(same)) == 4 and mixed.has_signal(same)
    partly = [*play("a", 0, 1.0, 0.5), *play("a", 1, 1.0, 0.0)]
    assert [t.role for t in by_role.select(partly)] == ["second", "second"] and by_role.has_signal(partly)


@pytest.mark.parametrize("decay", [-0.1, 1.1, "fast"])
def test_a_decay_that_is_none_is_refused(decay: object) -> None:
    with pytest.raises(ValueError, match=r"algorithm.role_decay=.*expected 0 to 1"):
        resolve_algorithm("spiral", role_decay=decay)
