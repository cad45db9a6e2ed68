"""Batches of trajectories for the tests of advantages and algorithms: one worked out by hand, and random ones."""

from __future__ import annotations

from hypothesis import strategies as st

from rlvr.core.types import Trajectory

MAX_TOKENS = 10


def trajectory(group: str, rollout: str, reward: float | None, length: int, written: int = 0) -> Trajectory:
    """`length` sampled tokens, and `written` by the environment behind them; a critic's value is 1/4 everywhere."""
    return Trajectory(
        "p", [1], "r", [2] * (length + written), [-0.5] * (length + written), reward=reward, group_id=group,
        rollout_id=rollout, action_mask=[1] * length + [0] * written, values=[0.25] * (length + written + 1),
    )  # fmt: skip


def batch() -> list[Trajectory]:
    """Two groups: rewards 1 and 0 and an unknown one; and twice 0.25. Rollout a1 made two trajectories."""
    return [
        trajectory("a", "a0", 1.0, 2),
        trajectory("b", "b0", 0.25, 5),
        trajectory("a", "a1", 0.0, 1),
        trajectory("a", "a1", 0.0, 3, written=1),
        trajectory("a", "a2", None, 4),
        trajectory("b", "b1", 0.25, 4),
    ]


REWARDS = st.lists(st.one_of(st.none(), st.integers(-8, 8).map(lambda n: n / 8)), min_size=1, max_size=8)


def groups_of(rewards: list[list[float | None]]) -> list[Trajectory]:
    return [trajectory(f"g{g}", f"g{g}/{i}", r, 1 + i) for g, rs in enumerate(rewards) for i, r in enumerate(rs)]
