"""Recipes that are refused or advised against when a trainer is made, and the control that rewards by coin."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from rlvr.algorithms import ALGORITHMS
from rlvr.clients.mock.mock_client import MockTrainingClient, TablePolicy
from rlvr.core.types import Task, Trajectory
from rlvr.training.collector import flip_coins
from tests.kit.table_trainer import Letters, collect, make_trainer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_size": 1}, "group_size >= 2"),
        ({"target_kl": -1.0, "ppo_epochs": 4}, "expected 0"),
        ({"algorithm": "importance_sampling", "ppo_epochs": 4}, "does not clip"),
        ({"algorithm": "reinforce", "dynamic_sampling": 3}, "has no effect"),
        ({"temperature": 0.0}, "nothing is learned"),
        ({"target_kl": 0.1}, "no effect"),
        ({"gap_warn": 0.5}, "0 < warn <= stop"),
        ({"prompts_per_step": 0}, "at least 1"),
        ({"mode": "dpo"}, "rlvr or sft"),
        ({"control": "random"}, "none, random_reward or equal_rewards"),
        ({"kl_warn": 0.0}, "above 0"),
        ({"target_kl": math.nan, "ppo_epochs": 4}, "target_kl=nan"),
        ({"max_prompt_tokens": 0}, "at least 1, or null"),
        ({"cells": {"overlong_buffer": 2}}, "longer than the budget rollout.max_tokens=1.*a fifth of the budget"),
        (
            {"cells": {"entropy_coef": 0.1, "entropy": "exact"}},
            "entropy=exact.*client=mock.*use entropy=sampled",
        ),
        ({"sampling": {"max_tokens": None}}, "rollout.max_tokens is missing"),
        ({"algorithm": "rloo", "group_size": 1}, "group baseline 'leave_one_out'.*algorithm.name=reinforce"),
        (
            {"algorithm": "dpo", "group_size": 1},
            "algorithm.loss=dpo, which compares the completions of a group in pairs",
        ),
        (
            {"algorithm": "dapo", "false_positives": 0.1, "noise_correction": True},
            "advantage=group_normalized, which div",
        ),
        (
            {"algorithm": "raft", "false_positives": 0.1, "noise_correction": True},
            "advantage=acceptance, which asks only",
        ),
        (
            {"algorithm": "distillation", "false_positives": 0.1, "false_negatives": 0.1},
            "training.false_positives has no effect with algorithm.advantage=zero",
        ),
        ({"algorithm": "distillation", "control": "random_reward"}, "training.control has no effect"),
        ({"algorithm": "reinforce", "temperature": 0.0}, "use a temperature above 0"),
    ],
)
def test_settings_that_cannot_teach_are_refused_with_the_remedy(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(**change)


@pytest.mark.parametrize(
    "name",
    sorted(n for n, spec in ALGORITHMS.items() if not spec.advantage.takes_critic and not spec.advantage.needs_roles),
)
def test_groups_of_one_are_refused_under_a_group_baseline_and_under_no_other(name: str) -> None:
    spec = ALGORITHMS[name]
    if spec.has_group_baseline or any(part.least_group > 1 for part in (spec.advantage, *spec.terms)):
        with pytest.raises(ValueError, match=r"group_size=1 has no signal.*use group_size >= 2"):
            make_trainer(algorithm=name, group_size=1)
    else:
        t = make_trainer(algorithm=name, group_size=1, prompts_per_step=30)
        t.reference = t.parts.client.save_weights_and_get_sampling_client()
        teacher = MockTrainingClient(TablePolicy(["say", "a", "b"], seed=5)).create_sampling_client()
        t.parts = replace(t.parts, teacher=teacher)
        turns_differ = 0 if name == "grpo_process" else 1  # an episode of one turn has nothing to compare it with
        assert t.update(0, collect(t, 0))["updates"] == turns_differ


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampling": {"top_p": 0.9}}, "top_p, top_k or min_p cut the sampling distribution"),
        ({"sampling": {"top_k": 5}}, "top_p, top_k or min_p"),
        ({"sampling": {"min_p": 0.1}}, "top_p, top_k or min_p"),
        (
            {"cells": {"kl_coef": 0.1, "kl_in": "loss"}},
            "its gradient is 0 on average.*use k2 in the loss, or k1 in the",
        ),
        ({"cells": {"kl_coef": 0.1, "kl_estimator": "k2"}}, "gradient is that of no KL; use k1 in the reward"),
        ({"cells": {"kl_coef": 0.1, "kl_estimator": "k3"}}, "gradient is that of no KL; use k1 in the reward"),
    ],
)
def test_recipes_that_disappoint_run_with_advice(change: dict[str, Any], message: str) -> None:
    warnings: list[str] = []
    make_trainer(warnings=warnings, **change)
    assert len(warnings) == 1 and re.search(message, warnings[0])


def test_good_recipes_get_no_advice() -> None:
    warnings: list[str] = []
    for estimator, where in (("k1", "reward"), ("k2", "loss"), ("k3", "loss")):
        make_trainer(warnings=warnings, cells={"kl_coef": 0.1, "kl_in": where, "kl_estimator": estimator})
    assert warnings == []


def test_supervised_runs_ask_nothing_of_the_recipe() -> None:
    """mode=sft uses none of it: a group of one is no mistake there."""
    make_trainer(mode="sft", group_size=1)


# The control: rewards by coin


def test_the_control_rewards_coins_and_reports_verdicts() -> None:
    """Every answer is right; rewards are 0 or 1 with about equal chance, and correctness stays the verifier's."""
    policy = TablePolicy(["say", "a", "b"])
    policy.logits[policy.tokenizer.ids["a"]] = 40.0
    t = make_trainer(MockTrainingClient(policy), control="random_reward", prompts_per_step=40)
    collected = collect(t, 0)
    coins = [x.reward for x in collected.all]
    assert set(coins) == {0.0, 1.0} and 0.3 < sum(coins) / len(coins) < 0.7
    assert {x.scores["exact_match"].value for x in collected.all} == {1.0}
    metrics = t.update(0, collected)
    assert metrics["env/all/correct"] == 1.0, "the verdicts are the verifier's"
    assert metrics["updates"] == 1, "groups are told apart by their coins"


def test_the_control_of_equal_rewards_gives_the_default_nothing_to_learn() -> None:
    """Half of the answers are right, all are paid 1: no group has signal, and the metrics still say what passed."""
    t = make_trainer(control="equal_rewards", prompts_per_step=20)
    collected = collect(t, 0)
    assert {x.reward for x in collected.all} == {1.0}
    assert {x.scores["exact_match"].value for x in collected.all} == {0.0, 1.0}
    metrics = t.update(0, collected)
    assert metrics["updates"] == 0 and 0 < metrics["env/all/correct"] < 1


def test_coins_are_the_same_after_a_restart_and_others_in_another_step_or_run() -> None:
    def coins(step: int, seed: int = 1) -> list[float | None]:
        t = make_trainer(control="random_reward", prompts_per_step=20, seed=seed)
        return [x.reward for x in collect(t, step).all]

    first = coins(3)
    assert coins(3) == first
    assert coins(4) != first
    assert coins(3, seed=2) != first


def test_coins_know_nothing_of_the_verdicts() -> None:
    """The same rollouts, judged right or wrong the other way round: the same coins. Unknown ones stay unknown."""
    made = [
        [Trajectory("p", [1], "r", [2], [-1.0], reward=r, rollout_id=f"0/{i}") for i, r in enumerate(rewards)]
        for rewards in ([1.0, 0.0, 1.0, None] * 50, [0.0, 1.0, 1.0, None] * 50)
    ]
    for items in made:
        for t in items:
            t.reward_parts = {"math": [1.0, t.reward or 0.0]}
        flip_coins(items, 7)
        assert not any(t.reward_parts for t in items if t.reward is not None)
    assert [t.reward for t in made[0]] == [t.reward for t in made[1]]
    assert all(t.reward is None for t in made[0][3::4])
    known = [t.reward for t in made[0] if t.reward is not None]
    assert 0.35 < sum(known) / len(known) < 0.65


def test_the_parts_of_a_rollout_share_a_coin() -> None:
    items = [
        Trajectory("p", [1], "r", [2], [-1.0], reward=1.0, rollout_id=f"0/{i}", group_id="g")
        for i in range(40)
        for _ in range(2)
    ]
    flip_coins(items, 7)
    assert [t.reward for t in items[::2]] == [t.reward for t in items[1::2]]
    assert {t.reward for t in items} == {0.0, 1.0}


def test_a_control_run_does_not_learn_from_verdicts_which_tasks_to_draw() -> None:
    """Every answer is right: a pass-rate curriculum would know, one under the control stays as it was."""

    class Levels(Letters):
        levels = ("1", "2")

        def train(self, seed: int, index: int, level: str) -> Task:
            return replace(super().train(seed, index, level), level=level)

    def pass_rate(control: str) -> float:
        policy = TablePolicy(["say", "a", "b"])
        policy.logits[policy.tokenizer.ids["a"]] = 40.0
        t = make_trainer(MockTrainingClient(policy), source=Levels(), control=control)
        collect(t, 0)
        return min(t.parts.curriculum.pass_rate.values())

    assert pass_rate("random_reward") == 0.5 < pass_rate("none")
