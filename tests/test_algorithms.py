"""Algorithms as rows: advantages and weights by hand, identities, and one golden file a row.

After a deliberate change: `RLVR_GOLDEN=write python -m pytest tests/test_algorithms.py`, then read the difference.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr.algorithms import ALGORITHMS, CLIPPED, Algorithm, resolve_algorithm
from rlvr.algorithms import LOSSES as NAMES
from rlvr.algorithms.advantages import ESTIMATORS, REDUCTIONS, teaches
from rlvr.types import Trajectory

GOLDEN = Path(__file__).parent / "golden"
MAX_TOKENS = 10


def trajectory(group: str, rollout: str, reward: float | None, length: int, written: int = 0) -> Trajectory:
    """`length` sampled tokens, and `written` by the environment behind them."""
    return Trajectory(
        "p", [1], "r", [2] * (length + written), [-0.5] * (length + written), reward=reward, group_id=group,
        rollout_id=rollout, action_mask=[1] * length + [0] * written,
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


def advantages(name: str, trajectories: list[Trajectory]) -> list[float]:
    ESTIMATORS[name](trajectories)
    return [t.advantage for t in trajectories]


# Rollout a1 counts once: the rewards of group a are 1 and 0 (mean 1/2, std 1/2), not 1, 0, 0. Those of the batch are
# 1, 0, 1/4, 1/4: mean 3/8, squared deviations 25/64 + 9/64 + 1/64 + 1/64 = 36/64, over 4 is 9/64, std 3/8.
BY_HAND = {
    "group_mean": [0.5, 0.0, -0.5, -0.5, 0.0, 0.0],
    "group_normalized": [0.5 / 0.500001, 0.0, -0.5 / 0.500001, -0.5 / 0.500001, 0.0, 0.0],
    "batch_mean": [0.625, -0.125, -0.375, -0.375, 0.0, -0.125],
    "batch_normalized": [x / 0.375001 for x in (0.625, -0.125, -0.375, -0.375, 0.0, -0.125)],
}


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_advantages_by_hand(name: str) -> None:
    """Each estimator on the batch above; the unknown reward gets 0 and moves no baseline."""
    assert advantages(name, batch()) == pytest.approx(BY_HAND[name], abs=1e-15)


# The five trajectories with a reward have 2, 5, 1, 3, 4 sampled tokens, 15 in all; the written token counts nowhere.
WEIGHTS_BY_HAND = {
    "token_mean": [1 / 15] * 5,
    "sequence_mean": [1 / 10, 1 / 25, 1 / 5, 1 / 15, 1 / 20],
    "constant": [1 / 50] * 5,  # N = 5, M = 10
    "sequence_sum": [1 / 5] * 5,
}


@pytest.mark.parametrize("name", sorted(REDUCTIONS))
def test_reduction_weights_by_hand(name: str) -> None:
    """Each reduction on the five trajectories with a reward."""
    known = [t for t in batch() if t.reward is not None]
    assert REDUCTIONS[name](known, MAX_TOKENS) == pytest.approx(WEIGHTS_BY_HAND[name], abs=1e-15)


GROUP_A = 0.5 / 0.500001
ROWS_BY_HAND = {
    # (position in the batch, advantage, weight) of what is sent to the loss, and its thresholds
    "reinforce": ([(0, 0.625, 0.2), (1, -0.125, 0.2), (2, -0.375, 0.2), (3, -0.375, 0.2), (5, -0.125, 0.2)], {}),
    # Group b has equal rewards: no gradient, so it is not sent; grpo and dr_grpo still count it, ppo's filter does not.
    "grpo": (
        [(0, GROUP_A, 1 / 10), (2, -GROUP_A, 1 / 5), (3, -GROUP_A, 1 / 15)],
        {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    ),
    "dr_grpo": (
        [(0, 0.5, 1 / 50), (2, -0.5, 1 / 50), (3, -0.5, 1 / 50)],
        {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    ),
    "ppo": (
        [(0, 0.5, 1 / 6), (2, -0.5, 1 / 6), (3, -0.5, 1 / 6)],
        {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28},
    ),
    "importance_sampling": ([(0, 0.5, 1 / 6), (2, -0.5, 1 / 6), (3, -0.5, 1 / 6)], {}),
}


@pytest.mark.parametrize("name", sorted(ROWS_BY_HAND))
def test_rows_by_hand(name: str) -> None:
    """What each row sends to its loss: which trajectories, with which advantage and weight, and the thresholds."""
    row, trajectories = resolve_algorithm(name), batch()
    sent = row.weigh(row.select(trajectories), MAX_TOKENS)
    place = {id(t): i for i, t in enumerate(trajectories)}
    found = sorted((place[id(t)], t.advantage, w) for t, w in sent)
    expected, thresholds = ROWS_BY_HAND[name]
    assert [f[0] for f in found] == [e[0] for e in expected]
    assert [x for f in found for x in f[1:]] == pytest.approx([x for e in expected for x in e[1:]], abs=1e-15)
    assert row.loss_config == pytest.approx(thresholds)


def described(row: Algorithm) -> dict[str, Any]:
    """Everything a row does to the fixed batch, floats as they print (which is exact)."""
    trajectories = batch()
    selected = row.select(trajectories)
    place = {id(t): i for i, t in enumerate(trajectories)}
    return {
        "advantage": row.advantage,
        "reduction": row.reduction,
        "loss": row.loss,
        "loss_config": row.loss_config,
        "uses_groups": row.uses_groups,
        "selected": [place[id(t)] for t in selected],
        "advantages": [t.advantage for t in trajectories],
        "sent": [[place[id(t)], w] for t, w in row.weigh(selected, MAX_TOKENS)],
    }


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_row_equals_its_golden_file_to_the_bit(name: str) -> None:
    """A refactor changes no advantage, weight, selection or threshold of any row."""
    path = GOLDEN / f"{name}.json"
    found = described(ALGORITHMS[name])
    if os.environ.get("RLVR_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")
    assert path.exists(), f"no golden file for {name}; write it with RLVR_GOLDEN=write and read it"
    assert found == json.loads(path.read_text())


def test_no_golden_file_is_left_over() -> None:
    """One file a row, no more; and the hand-computed rows above are all of them or a part."""
    assert {p.stem for p in GOLDEN.glob("*.json")} == set(ALGORITHMS)
    assert set(ROWS_BY_HAND) <= set(ALGORITHMS)


REWARDS = st.lists(st.one_of(st.none(), st.integers(-8, 8).map(lambda n: n / 8)), min_size=1, max_size=8)


def groups_of(rewards: list[list[float | None]]) -> list[Trajectory]:
    return [trajectory(f"g{g}", f"g{g}/{i}", r, 1 + i) for g, rs in enumerate(rewards) for i, r in enumerate(rs)]


@given(
    st.lists(REWARDS, min_size=1, max_size=3), st.integers(-5, 5), st.sampled_from(["group_mean", "group_normalized"])
)
def test_shifting_a_groups_rewards_changes_no_advantage(
    rewards: list[list[float | None]], shift: int, name: str
) -> None:
    """A group baseline takes any constant out, of that group and of no other."""
    before = advantages(name, groups_of(rewards))
    moved = [[None if r is None else r + shift for r in rewards[0]], *rewards[1:]]
    # Rounding of a mean (1e-15) is divided by as little as the 1e-6 of a group without spread.
    assert advantages(name, groups_of(moved)) == pytest.approx(before, abs=1e-8)


@given(st.lists(REWARDS, min_size=1, max_size=3), st.integers(0, 2**32), st.sampled_from(sorted(ALGORITHMS)))
def test_the_order_of_trajectories_changes_nothing(rewards: list[list[float | None]], seed: int, name: str) -> None:
    """Advantages and weights belong to the trajectory, bit for bit, wherever it stands in the batch."""

    def by_rollout(trajectories: list[Trajectory]) -> dict[str, tuple[float, float]]:
        row = ALGORITHMS[name]
        sent = row.weigh(row.select(trajectories), MAX_TOKENS)
        return {t.rollout_id: (t.advantage, w) for t, w in sent}

    shuffled = groups_of(rewards)
    random.Random(seed).shuffle(shuffled)
    assert by_rollout(shuffled) == by_rollout(groups_of(rewards))


@given(st.lists(REWARDS, min_size=1, max_size=4))
def test_group_means_of_advantages_are_zero(rewards: list[list[float | None]]) -> None:
    """Within a group, and over the batch for a batch baseline, the known advantages sum to nothing."""
    trajectories = groups_of(rewards)
    advantages("group_mean", trajectories)
    for g in range(len(rewards)):
        assert sum(t.advantage for t in trajectories if t.group_id == f"g{g}") == pytest.approx(0.0, abs=1e-12)
    assert sum(advantages("batch_mean", trajectories)) == pytest.approx(0.0, abs=1e-12)


@given(
    st.floats(-1e6, 1e6, allow_subnormal=False), st.integers(1, 9), st.sampled_from(["group_mean", "group_normalized"])
)
def test_equal_rewards_give_exactly_no_advantage(reward: float, count: int, name: str) -> None:
    """Not even a rounding error: such a group must be skipped, not amplified by 1 / 1e-6."""
    assert advantages(name, groups_of([[reward] * count])) == [0.0] * count


@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(1, 50))
def test_reduction_identities(lengths: list[int], most: int) -> None:
    """token_mean: weights x tokens sum to 1; sequence_mean: too, 1/N a sequence; constant: 1/M; sequence_sum: 1."""
    items = [trajectory("g", str(i), 1.0, n) for i, n in enumerate(lengths)]

    def weights(name: str) -> list[float]:
        return REDUCTIONS[name](items, most)

    assert sum(w * n for w, n in zip(weights("token_mean"), lengths, strict=True)) == pytest.approx(1.0)
    shares = [w * n for w, n in zip(weights("sequence_mean"), lengths, strict=True)]
    assert shares == pytest.approx([1 / len(lengths)] * len(lengths))
    assert sum(weights("constant")) * most == pytest.approx(1.0)
    assert sum(weights("sequence_sum")) == pytest.approx(1.0)


def test_an_empty_response_breaks_no_reduction() -> None:
    """No sampled token: weight 0 per sequence, nothing sent, no division by zero."""
    empty = [trajectory("g", "0", 1.0, 0), trajectory("g", "1", 0.0, 2)]
    assert REDUCTIONS["sequence_mean"](empty, 5) == [0.0, 0.25]
    assert REDUCTIONS["token_mean"](empty[:1], 5) == [0.0]
    row = resolve_algorithm("ppo")
    assert [t.rollout_id for t, _ in row.weigh(row.select(empty), 5)] == ["1"]
    assert row.weigh([], 5) == []


def test_a_group_teaches_when_known_rewards_differ() -> None:
    """Equal rewards, one rollout (even of two trajectories), or only unknown others: nothing to learn."""
    assert teaches([trajectory("g", "0", 1.0, 1), trajectory("g", "1", 0.0, 1)])
    assert not teaches([trajectory("g", "0", 1.0, 1), trajectory("g", "1", 1.0, 1)])
    assert not teaches([trajectory("g", "0", 1.0, 1), trajectory("g", "1", None, 1)])
    assert not teaches([trajectory("g", "0", 1.0, 1), trajectory("g", "0", 1.0, 1)])


def test_trajectories_without_rollout_id_are_rollouts_of_their_own() -> None:
    """Seed 000's trajectories carry no ids: each counts."""
    items = [trajectory("", "", r, 1) for r in (1.0, 0.0, 0.0, 0.0)]
    assert advantages("group_mean", items) == [0.75, -0.25, -0.25, -0.25]


def test_zero_advantage_is_skipped_and_still_counted() -> None:
    """Rows without advantage are not sent; their tokens stay in the denominator."""
    items = batch()
    ppo = resolve_algorithm("ppo", drop_equal_groups=False)
    sent = ppo.weigh(ppo.select(items), MAX_TOKENS)
    assert [(t.rollout_id, w) for t, w in sent] == [("a0", 1 / 15), ("a1", 1 / 15), ("a1", 1 / 15)]


@pytest.mark.parametrize(
    ("name", "cells", "message"),
    [
        ("ppo", {"loss": "dro"}, "'dro' is unknown"),  # its weight does not fold into the advantage alone
        ("ppo", {"loss": "gspo"}, "'gspo' is unknown"),
        ("importance_sampling", {"loss": "ppo"}, "give algorithm.clip_low and algorithm.clip_high"),
        ("reinforce", {"drop_equal_groups": True}, "set it to false"),
    ],
)
def test_cells_that_would_compute_something_else_are_refused(name: str, cells: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_algorithm(name, **cells)


def test_an_unknown_algorithm_names_the_nearest() -> None:
    """A misspelling is answered with the likely word and all known ones."""
    with pytest.raises(ValueError, match=r"'grp0' is unknown \(did you mean 'grpo'\?\); known: dr_grpo, grpo"):
        resolve_algorithm("grp0")
    with pytest.raises(ValueError, match=r"algorithm.advantage='group_men' is unknown \(did you mean 'group_mean'\?\)"):
        resolve_algorithm("ppo", advantage="group_men")
    with pytest.raises(ValueError, match=r"algorithm.loss='pppo' is unknown \(did you mean 'ppo'\?\)"):
        resolve_algorithm("ppo", loss="pppo")
    with pytest.raises(ValueError, match=r"algorithm.reduction='tokens' is unknown.*known: token_mean, sequence_mean"):
        resolve_algorithm("ppo", reduction="tokens")


@pytest.mark.parametrize("bound", ["clip_low", "clip_high"])
def test_a_clip_without_effect_is_an_error(bound: str) -> None:
    """importance_sampling does not clip: saying nothing would leave the user believing it does."""
    with pytest.raises(ValueError, match=f"algorithm.{bound}=0.2 has no effect.*cispo, ppo"):
        resolve_algorithm("importance_sampling", **{bound: 0.2})


@pytest.mark.parametrize(("bound", "value"), [("clip_low", -0.1), ("clip_low", 1.1), ("clip_high", -0.1)])
def test_a_clip_out_of_range_is_an_error(bound: str, value: float) -> None:
    """A lower epsilon is 0 to 1, an upper one at least 0."""
    with pytest.raises(ValueError, match=f"algorithm.{bound}={value}"):
        resolve_algorithm("ppo", **{bound: value})


def test_cells_can_be_replaced_one_by_one() -> None:
    """A row is the sum of its cells: thresholds are absolute ratios, and the table itself stays."""
    row = resolve_algorithm("ppo", reduction="sequence_mean", clip_low=0.1, clip_high=0.5)
    assert (row.reduction, row.advantage) == ("sequence_mean", "group_mean")
    assert row.loss_config == pytest.approx({"clip_low_threshold": 0.9, "clip_high_threshold": 1.5})
    assert ALGORITHMS["ppo"].reduction == "token_mean"


def test_another_loss_leaves_the_rows_own_clip_behind() -> None:
    """ppo's row with importance_sampling has no thresholds; with cispo it keeps them; asking for both is an error."""
    assert resolve_algorithm("ppo", loss="importance_sampling").loss_config == {}
    assert resolve_algorithm("ppo", loss="cispo").loss_config == pytest.approx(resolve_algorithm("ppo").loss_config)
    with pytest.raises(ValueError, match="has no effect"):
        resolve_algorithm("ppo", loss="importance_sampling", clip_low=0.1)


def test_every_row_names_a_loss_of_the_engine() -> None:
    """The table and the engine's dictionary agree on names and on which losses clip."""
    from rlvr.engine.losses import LOSSES

    assert set(NAMES) <= set(LOSSES) - {"cross_entropy"}  # which is for demonstrations
    assert {row.loss for row in ALGORITHMS.values()} <= set(NAMES)
    assert {n for n in NAMES if "clip_low_threshold" in LOSSES[n].config} == CLIPPED
    assert all(row.source for row in ALGORITHMS.values())
