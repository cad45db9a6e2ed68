"""Advantage estimators and reductions: literals by hand, identities, and what a penalty, a part or an unknown does."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr.algorithms import resolve_algorithm
from rlvr.algorithms.advantages import ADVANTAGES, RunningBaseline, register_advantage
from rlvr.algorithms.penalties import penalize
from rlvr.algorithms.reductions import REDUCTIONS
from rlvr.algorithms.returns import has_mixed_rewards
from rlvr.core.types import Trajectory
from tests.kit.advantage_batch import MAX_TOKENS, REWARDS, batch, groups_of, trajectory

OPTIONS: dict[str, dict[str, float]] = {"pass_at_k": {"k": 2}, "gae": {"gae_lambda": 1.0}}


def advantages(name: str, trajectories: list[Trajectory]) -> list[float]:
    ADVANTAGES.find(name)(**OPTIONS.get(name, {})).estimate(trajectories, RunningBaseline())
    return [t.advantage for t in trajectories]


# Rollout a1 counts once: the rewards of group a are 1 and 0 (mean 1/2, std 1/2), not 1, 0, 0. Those of the batch are
# 1, 0, 1/4, 1/4: mean 3/8, squared deviations 25/64 + 9/64 + 1/64 + 1/64 = 36/64, over 4 is 9/64, std 3/8.
BY_HAND = {
    "group_mean": [0.5, 0.0, -0.5, -0.5, 0.0, 0.0],
    "group_normalized": [0.5 / 0.500001, 0.0, -0.5 / 0.500001, -0.5 / 0.500001, 0.0, 0.0],
    "batch_mean": [0.625, -0.125, -0.375, -0.375, 0.0, -0.125],
    "batch_normalized": [x / 0.375001 for x in (0.625, -0.125, -0.375, -0.375, 0.0, -0.125)],
    # Over the 15 sampled tokens, two of 1, nine of 1/4 and four of 0: mean 17/60, squared deviations 4890/3600.
    "token_normalized": [x / 60 / (math.sqrt(163 / 1800) + 1e-6) for x in (43, -2, -17, -17, 0, -2)],
    # Two of 1/2, nine of 0 and four of -1/2: mean -1/15, squared deviations 1290/900.
    "group_mean_token_normalized": [x / 30 / (math.sqrt(43 / 450) + 1e-6) for x in (17, 2, -13, -13, 0, 2)],
    "group_mean_batch_std": [x / 0.375001 for x in (0.5, 0.0, -0.5, -0.5, 0.0, 0.0)],
    # One reward: the two of group a are as in group_normalized, x and -x, and the two of b 0. Mean 0, std x / sqrt(2).
    "reward_normalized": [x / (math.sqrt(0.5) + 1.000002e-6) for x in (1.0, 0.0, -1.0, -1.0, 0.0, 0.0)],
    "leave_one_out": [1.0, 0.0, -1.0, -1.0, 0.0, 0.0],  # 1 - 0 and 0 - 1; the unknown one is no other
    "ema": [0.625, -0.125, -0.375, -0.375, 0.0, -0.125],  # the first batch is its own baseline
    "role_group_mean": [0.5, 0.0, -0.5, -0.5, 0.0, 0.0],  # all of one role
    "role_prompt_mean": [0.5, 0.0, -0.5, -0.5, 0.0, 0.0],  # and of one prompt
    # b after each rollout: 0.05, 0.0475 + 0.0125 = 0.06, 0.057; a1 counts once, the unknown one not
    "role_baseline": [1.0, 0.2, -0.06, -0.06, 0.0, 0.193],
    "raw": [1.0, 0.25, 0.0, 0.0, 0.0, 0.25],
    "zero": [0.0] * 6,
    "acceptance": [1.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    "verdict": [1.0, -1.0, -1.0, -1.0, 0.0, -1.0],
    "pass_at_k": [2.0, 0.0, 0.0, 0.0, 0.0, 0.0],  # k 2: beside a1 it adds 1 to the best of the two
    # The turns of group a earned 1, 0 and 0 (a1 has one in each part): mean 1/3, std sqrt(2) / 3.
    "process_normalized": [x / (math.sqrt(2) + 3e-6) for x in (2.0, 0.0, -2.0, -1.0, 0.0, 0.0)],
    # Every value is 1/4 and lambda 1: each token of a rollout has its return less 1/4.
    "gae": [0.75, 0.0, -0.25, -0.25, 0.0, 0.0],
}


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_advantages_by_hand(name: str) -> None:
    """Each estimator on the batch above; the unknown reward gets 0 and moves no baseline."""
    assert advantages(name, batch()) == pytest.approx(BY_HAND[name], abs=1e-15)


def with_parts(rewards: list[list[dict[str, list[float]]]]) -> list[Trajectory]:
    """Groups of answers with several rewards each: name, weight and value."""
    made = groups_of([[sum(w * r for w, r in parts.values()) for parts in group] for group in rewards])
    for t, parts in zip(made, (parts for group in rewards for parts in group), strict=True):
        t.reward_parts = parts
    return made


def test_reward_normalized_by_hand_keeps_what_the_sum_loses() -> None:
    """An answer right in two respects has twice the advantage of one right in one; normalized sums make them equal.

    Group 0 differs in `form`, group 1 in both: s is -1, 1, -2, 2, with mean 0 and std sqrt(10 / 4).
    """
    right, wrong = {"form": [1.0, 1.0], "answer": [1.0, 1.0]}, {"form": [1.0, 0.0], "answer": [1.0, 0.0]}
    made = with_parts([[wrong, {**wrong, "form": [1.0, 1.0]}], [wrong, right]])
    expected = [x / math.sqrt(2.5) for x in (-1, 1, -2, 2)]
    assert advantages("reward_normalized", made) == pytest.approx(expected, rel=1e-5)
    assert advantages("group_normalized", made) == pytest.approx([-1, 1, -1, 1], rel=1e-5)


def test_reward_normalized_weighs_each_reward_and_not_its_scale() -> None:
    """Weights 3 and 1, the second a thousand times as wide: s is 3 x (-1, 1) + (1, -1) = -2, 2 alone in its batch."""
    parts = [
        {"a": [3.0, 0.0], "b": [1.0, 1000.0]},
        {"a": [3.0, 1.0], "b": [1.0, 0.0]},
        {"a": [3.0, 1.0], "b": [1.0, 0]},
    ]
    root = math.sqrt(2)  # of three the first is apart: -root and root / 2 in a, root and -root / 2 in b
    s = [-3 * root + root, 3 * root / 2 - root / 2, 3 * root / 2 - root / 2]
    deviation = math.sqrt(sum(x * x for x in s) / 3)
    assert advantages("reward_normalized", with_parts([parts])) == pytest.approx([x / deviation for x in s], rel=1e-5)


def test_reward_normalized_in_parts_of_a_rollout_and_with_an_unknown_reward() -> None:
    """A rollout of two trajectories counts once; an unknown reward counts nowhere and gets 0."""
    one, none = {"a": [1.0, 1.0]}, {"a": [1.0, 0.0]}
    made = with_parts([[one, none]])
    twice = trajectory("g0", "g0/1", 0.0, 3)
    twice.reward_parts = none
    assert advantages("reward_normalized", [*made, twice, trajectory("g0", "g0/2", None, 2)]) == pytest.approx(
        [1, -1, -1, 0], rel=1e-5
    )


# The five trajectories with a reward have 2, 5, 1, 3, 4 sampled tokens, 15 in all; the written token counts nowhere.
# They are four answers: the third and the fourth are one, of 4 tokens.
WEIGHTS_BY_HAND = {
    "token_mean": [1 / 15] * 5,
    "sequence_mean": [1 / 8, 1 / 20, 1 / 16, 1 / 16, 1 / 16],
    "constant": [1 / 40] * 5,  # N = 4, M = 10
    "sequence_sum": [1 / 4] * 5,
}


@pytest.mark.parametrize("name", sorted(REDUCTIONS))
def test_reduction_weights_by_hand(name: str) -> None:
    """Each reduction on the five trajectories with a reward."""
    known = [t for t in batch() if t.reward is not None]
    assert REDUCTIONS[name](known, MAX_TOKENS) == pytest.approx(WEIGHTS_BY_HAND[name], abs=1e-15)


GROUPED = sorted(
    one.name for one in ADVANTAGES.classes() if not one.of_batch and one.name != "group_mean_batch_std"
)  # its deviation is the batch's


@given(st.lists(REWARDS, min_size=1, max_size=3), st.integers(-5, 5), st.sampled_from(GROUPED))
def test_shifting_a_groups_rewards_changes_no_advantage(
    rewards: list[list[float | None]], shift: int, name: str
) -> None:
    """A group baseline takes any constant out, of that group and of no other."""
    before = advantages(name, groups_of(rewards))
    moved = [[None if r is None else r + shift for r in rewards[0]], *rewards[1:]]
    # Rounding of a mean (1e-15) is divided by as little as the 1e-6 of a group, or a batch, without spread.
    assert advantages(name, groups_of(moved)) == pytest.approx(before, abs=1e-8)


@given(st.lists(REWARDS, min_size=1, max_size=4))
def test_group_means_of_advantages_are_zero(rewards: list[list[float | None]]) -> None:
    """Within a group, and over the batch for a batch baseline, the known advantages sum to nothing."""
    trajectories = groups_of(rewards)
    advantages("group_mean", trajectories)
    for g in range(len(rewards)):
        assert sum(t.advantage for t in trajectories if t.group_id == f"g{g}") == pytest.approx(0.0, abs=1e-12)
    assert sum(advantages("batch_mean", trajectories)) == pytest.approx(0.0, abs=1e-12)


@given(
    st.floats(-1e6, 1e6, allow_subnormal=False),
    st.integers(1, 9),
    st.sampled_from([*GROUPED, "group_mean_batch_std", "batch_mean", "batch_normalized", "token_normalized"]),
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


def test_the_moving_baseline_by_hand_over_four_batches() -> None:
    """Decay 0.9, batch means 1/2, 1, none, 0: baselines 1/2 (its own), 1/2, 0.55 twice; after the last 0.495."""
    row, memory = resolve_algorithm("reinforce_ema", baseline_decay=0.9), RunningBaseline(0.9)
    batches: list[list[float | None]] = [[1.0, 0.0], [1.0, 1.0], [None, None], [0.0, 0.0]]
    found: list[list[float]] = []
    for rewards in batches:
        trajectories = groups_of([rewards])
        row.select(trajectories, memory)
        found.append([t.advantage for t in trajectories])
    expected = [[0.5, -0.5], [0.5, 0.5], [0.0, 0.0], [-0.55, -0.55]]
    assert [a for f in found for a in f] == pytest.approx([a for e in expected for a in e], abs=1e-15)
    assert memory.value == pytest.approx(0.9 * 0.55)


def test_the_moving_baseline_counts_a_rollout_once_and_what_it_earned() -> None:
    """Rollouts of 1 (in two parts, penalty 1/2) and 0: the mean is 1/4."""
    items = [trajectory("g", "0", 1.0, 1), trajectory("g", "0", 1.0, 1), trajectory("g", "1", 0.0, 1)]
    items[0].penalty = items[1].penalty = 0.5
    memory = RunningBaseline()
    memory.observe(items)
    assert memory.value == 0.25


# Group a earned 1, 1/2; group b 1/4 - 1/4 = 0 and 1/4. Their means 3/4, 1/8; of all four 7/16.
PENALTY = [0.0, 0.25, 0.5, 0.0]
EARNED_BY_HAND = {
    "group_mean": [1 / 4, -1 / 8, -1 / 4, 1 / 8],
    "group_normalized": [0.25 / 0.250001, -0.125 / 0.125001, -0.25 / 0.250001, 0.125 / 0.125001],
    # x, -y, -x, y with x and y as in group_normalized: mean 0
    "reward_normalized": [
        a / (math.hypot(0.25 / 0.250001, 0.125 / 0.125001) / math.sqrt(2) + 1e-6)
        for a in (0.25 / 0.250001, -0.125 / 0.125001, -0.25 / 0.250001, 0.125 / 0.125001)
    ],
    "group_mean_batch_std": [x / (math.sqrt(35 / 256) + 1e-6) for x in (1 / 4, -1 / 8, -1 / 4, 1 / 8)],
    "group_mean_token_normalized": [x / (math.sqrt(5 / 128) + 1e-6) for x in (1 / 4, -1 / 8, -1 / 4, 1 / 8)],
    "leave_one_out": [1 / 2, -1 / 4, -1 / 2, 1 / 4],
    "batch_mean": [9 / 16, -7 / 16, 1 / 16, -3 / 16],
    # squares 81, 49, 1, 9 over 256 sum to 140/256; over four 35/256
    "batch_normalized": [x / (math.sqrt(35 / 256) + 1e-6) for x in (9 / 16, -7 / 16, 1 / 16, -3 / 16)],
    "token_normalized": [
        x / (math.sqrt(35 / 256) + 1e-6) for x in (9 / 16, -7 / 16, 1 / 16, -3 / 16)
    ],  # each has one token
    "ema": [9 / 16, -7 / 16, 1 / 16, -3 / 16],
    "role_group_mean": [1 / 4, -1 / 8, -1 / 4, 1 / 8],
    "role_prompt_mean": [1 / 4, -1 / 8, -1 / 4, 1 / 8],
    "role_baseline": [1.0, -0.05, 0.4525, 0.179875],  # b: 0.05, 0.0475, 0.045125 + 0.025
    "raw": [1.0, 0.0, 0.5, 0.25],
    "zero": [0.0] * 4,
    "acceptance": [1.0, 0.0, 0.0, 0.0],
    "verdict": [1.0, -1.0, -1.0, -1.0],
    "pass_at_k": [1.0, 0.0, 0.0, 0.5],
    "process_normalized": [0.25 / 0.250001, -0.125 / 0.125001, -0.25 / 0.250001, 0.125 / 0.125001],
    "gae": [3 / 4, -1 / 4, 1 / 4, 0.0],  # less the value 1/4
}


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_every_estimator_judges_the_reward_less_its_penalty(name: str) -> None:
    """Two groups whose rewards are equal and whose penalties are not."""
    items = [trajectory(g, f"{g}{i}", r, 1) for i, (g, r) in enumerate((("a", 1.0), ("b", 0.25)) * 2)]
    for item, penalty in zip(items, PENALTY, strict=True):
        item.penalty = penalty
    assert advantages(name, items) == pytest.approx(EARNED_BY_HAND[name], abs=1e-15)


def test_reinforce_plus_plus_by_hand_on_two_completions_of_three_tokens() -> None:
    """A_t = r - beta (KL of t and after it), standardized over the six tokens: 0, 1/2, 1/2 and -1, -1, 0.

    beta 1/2, rewards 1 and 0, log p - log ref 1, 0, 1 and 0, 2, 0. The mean is -1/6, the squared deviations 84/36.
    """
    spec = resolve_algorithm("reinforce_pp", kl_coef=0.5)
    items = [trajectory("a", "a0", 1.0, 3), trajectory("a", "a1", 0.0, 3)]
    for t, k in zip(items, ([1.0, 0.0, 1.0], [0.0, 2.0, 0.0]), strict=True):
        t.reference_logprobs = [q - x for q, x in zip(t.logprobs, k, strict=True)]
    penalize(items, spec, MAX_TOKENS)
    assert spec.select(items) == items
    scale = 6 * (math.sqrt(7 / 18) + 1e-6)
    expected = [[x / scale for x in row] for row in ([1, 4, 4], [-5, -5, 1])]
    assert [t.token_advantages for t in items] == [pytest.approx(row, abs=1e-15) for row in expected]
    assert [t.advantage for t in items] == pytest.approx([9 / 3 / scale, -9 / 3 / scale], abs=1e-15)


def test_the_kl_to_go_runs_over_the_parts_of_a_rollout_and_leaves_written_tokens_out() -> None:
    """One rollout of two parts, returns 1 less 1/8 a token: 5/8, 6/8 and, behind them, 7/8; the other earned 0."""
    parts = [trajectory("a", "a0", 1.0, 2, written=1), trajectory("a", "a0", 1.0, 1), trajectory("a", "a1", 0.0, 1)]
    for t, cost in zip(parts, ([1 / 8, 1 / 8, 0.0], [1 / 8], [0.0]), strict=True):
        t.token_penalties = cost
    parts[0].penalty = parts[1].penalty = 3 / 8
    advantages("token_normalized", [*parts, trajectory("a", "a2", None, 4)])
    mean, std = 9 / 16, math.sqrt((1 + 9 + 25 + 81) / 4) / 16  # 10, 12, 14 and 0 sixteenths, mean 9
    expected = [[1 / 16, 3 / 16, 0.0], [5 / 16], [-mean]]
    assert [t.token_advantages for t in parts] == [
        pytest.approx([x / (std + 1e-6) for x in row], abs=1e-15) for row in expected
    ]


@given(st.lists(REWARDS, min_size=1, max_size=3))
def test_leaving_one_out_is_the_mean_of_the_others(rewards: list[list[float | None]]) -> None:
    """RLOO as the paper writes it, answer by answer; one known reward has no others and gets 0."""
    items = groups_of(rewards)
    found = advantages("leave_one_out", items)
    for i, t in enumerate(items):
        others = [o.reward for o in items if o.group_id == t.group_id and o is not t and o.reward is not None]
        expected = t.reward - sum(others) / len(others) if t.reward is not None and others else 0.0
        assert found[i] == pytest.approx(expected, abs=1e-12)


def test_a_group_has_mixed_rewards_when_known_ones_differ() -> None:
    """Equal rewards, one rollout (even of two trajectories), or only unknown others: nothing to learn."""
    assert has_mixed_rewards([trajectory("g", "0", 1.0, 1), trajectory("g", "1", 0.0, 1)])
    assert not has_mixed_rewards([trajectory("g", "0", 1.0, 1), trajectory("g", "1", 1.0, 1)])
    assert not has_mixed_rewards([trajectory("g", "0", 1.0, 1), trajectory("g", "1", None, 1)])
    assert not has_mixed_rewards([trajectory("g", "0", 1.0, 1), trajectory("g", "0", 1.0, 1)])


def test_trajectories_without_rollout_id_are_rollouts_of_their_own() -> None:
    """Seed 000's trajectories carry no ids: each counts."""
    items = [trajectory("", "", r, 1) for r in (1.0, 0.0, 0.0, 0.0)]
    assert advantages("group_mean", items) == [0.75, -0.25, -0.25, -0.25]


def test_a_custom_advantage_receives_the_rewards() -> None:
    """Called a group at a time with reward less penalty, one value a rollout; unknown rewards get 0."""
    seen: list[list[float]] = []

    @register_advantage("test_best_of")
    def best_of(earned: list[float]) -> list[float]:
        seen.append(earned)
        return [float(x == max(earned)) for x in earned]

    items = batch()
    items[0].penalty = 0.25
    assert advantages("test_best_of", items) == [1.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    assert seen == [[0.75, 0.0], [0.25, 0.25]]
    assert resolve_algorithm("ppo", advantage="test_best_of").has_group_baseline
    with pytest.raises(ValueError, match="'test_best_of' is registered already"):
        register_advantage("test_best_of")(best_of)
    with pytest.raises(ValueError, match="'group_mean' is registered already"):
        register_advantage("group_mean")(best_of)


def test_a_batch_advantage_and_its_invalid_results() -> None:
    register_advantage("test_ranks", baseline="batch")(lambda earned: [float(sorted(earned).index(x)) for x in earned])
    assert advantages("test_ranks", batch()) == [3.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    assert not resolve_algorithm("ppo", advantage="test_ranks").has_group_baseline
    register_advantage("test_short", baseline="batch")(lambda earned: earned[1:])
    with pytest.raises(ValueError, match=r"'test_short': expected 4 finite numbers, got \[0.25, 0.0, 0.25\]"):
        advantages("test_short", batch())
    with pytest.raises(ValueError, match="expected group or batch"):
        register_advantage("test_other", baseline="token")


def branched() -> list[Trajectory]:
    """A rollout of two branches with the rewards 1 and 0, whose first turn both have and which is in the first row, so
    that its credit is 1/2; and a rollout of one branch with the reward 1/2."""
    first = trajectory("a", "a0", 0.25, 4)
    first.action_mask, first.turn_starts, first.turn_credits = [1, 1, 0, 1], [0, 3], [0.5, 1.0]
    second, other = trajectory("a", "a0", 0.25, 1), trajectory("a", "a1", 0.5, 2)
    second.turn_starts, second.turn_credits = [0], [0.0]
    return [first, second, other]


# Each branch counts in the baseline, and the shared turn does not: 1, 0 and 1/2, with mean 1/2 and variance 1/6. Of the
# six sampled tokens four have 1/2, one 1 and one 0: mean 1/2, variance 1/12. Those of the first row are 2, 1 and 1.
_STD, _STD_TOKENS = math.sqrt(1 / 6) + 1e-6, math.sqrt(1 / 12) + 1e-6
BRANCHES_BY_HAND = {
    "group_mean": (0.0, 0.5, -0.5, 0.0),
    "group_normalized": (0.0, 0.5 / _STD, -0.5 / _STD, 0.0),
    "group_mean_batch_std": (0.0, 0.5 / _STD, -0.5 / _STD, 0.0),
    "leave_one_out": (0.0, 0.75, -0.75, 0.0),  # 1 less the mean of 0 and 1/2
    "batch_mean": (0.0, 0.5, -0.5, 0.0),
    "batch_normalized": (0.0, 0.5 / _STD, -0.5 / _STD, 0.0),
    "token_normalized": (0.0, 0.5 / _STD_TOKENS, -0.5 / _STD_TOKENS, 0.0),
    "group_mean_token_normalized": (0.0, 0.5 / _STD_TOKENS, -0.5 / _STD_TOKENS, 0.0),
    "ema": (0.0, 0.5, -0.5, 0.0),
    "role_group_mean": (0.0, 0.5, -0.5, 0.0),
    "role_prompt_mean": (0.0, 0.5, -0.5, 0.0),
    "role_baseline": (0.5, 1.0, 0.0, 0.45),  # an episode of a role moves b once, by its first row: 0.05
    "raw": (0.5, 1.0, 0.0, 0.5),
    "zero": (0.0, 0.0, 0.0, 0.0),
}


def test_branches_by_hand() -> None:
    """Of the shared turn, of the rest of the first branch, of the second branch, and of the other rollout."""
    readers = {one.name for one in ADVANTAGES.classes() if one.reads_branches and ADVANTAGES.is_built_in(one.name)}
    assert readers == set(BRANCHES_BY_HAND)
    for name, (shared, own, second, other) in BRANCHES_BY_HAND.items():
        items = branched()
        advantages(name, items)
        given = [a for t in items for a, acted in zip(t.response_advantages, t.action_mask, strict=True) if acted]
        assert given == pytest.approx([shared, shared, own, second, other, other], abs=1e-15), name
        assert items[0].advantage == pytest.approx((2 * shared + own) / 3, abs=1e-15), name


def test_an_advantage_that_reads_no_branches_refuses_their_rewards() -> None:
    assert len(resolve_algorithm("grpo").select(branched())) == 3
    with pytest.raises(ValueError, match=r"algorithm\.advantage=acceptance cannot read rewards of branches"):
        resolve_algorithm("raft").select(branched())
    equal = branched()
    equal[0].turn_credits, equal[1].turn_credits, equal[2].reward = [0.5, 0.5], [0.5], 0.5
    assert has_mixed_rewards(branched()) and not has_mixed_rewards(equal)
