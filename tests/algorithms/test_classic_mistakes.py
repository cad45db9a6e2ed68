"""What users get wrong with `REINFORCE` and `PPO` is said in terms of what they typed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from rlvr import PPO, REINFORCE, MockRolloutSampler, PPOConfig, REINFORCEConfig


def batch_and_client() -> tuple[Any, Any, Any]:
    sampler = MockRolloutSampler(max_new_tokens=4)
    return sampler.generate_trajectories(["say"] * 4), sampler.training_client(), sampler


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            lambda b, c, s: (b, s),
            "second argument is of type MockRolloutSampler, expected a training client, e.g. sampler",
        ),
        (lambda b, c, s: (b, s.training_client), "second argument is of type method, expected a training client"),
        (lambda b, c, s: (c, b), "second argument is of type TrajectoryBatch, expected a training client"),
        (lambda b, c, s: (3, c), "the batch is of type int, expected a TrajectoryBatch"),
    ],
)
def test_arguments_that_were_mixed_up(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REINFORCE().update(*arguments(*batch_and_client()))


@pytest.mark.parametrize("reward", ["high", "1.5", math.nan, math.inf, [1.0, 2.0], {}, 10**400])
def test_a_reward_that_is_no_number_is_named(reward: Any) -> None:
    batch, client, _ = batch_and_client()
    batch[2].reward = reward
    with pytest.raises(ValueError, match=r"trajectory 2 has the reward .*, expected a finite number, or None"):
        PPO().update(batch, client)
    assert client.policy.version == 0


def test_numpy_rewards_are_numbers() -> None:
    batch, client, _ = batch_and_client()
    for i, t in enumerate(batch):
        t.reward = np.float32(i)
    assert REINFORCE().update(batch, client).trajectories_used == 4


@pytest.mark.parametrize(("make", "config"), [(REINFORCE, PPOConfig()), (PPO, REINFORCEConfig()), (PPO, {"a": 1})])
def test_the_config_of_another_class(make: Any, config: Any) -> None:
    said = f"the config is of type {type(config).__name__}, expected a {make.name}Config"
    with pytest.raises(ValueError, match=said):
        make(config)


def test_a_state_of_other_settings_is_refused_with_the_difference() -> None:
    state = PPO(PPOConfig(clip_range=0.1, ppo_epochs=2)).get_state()
    with pytest.raises(ValueError, match=r"it was saved with clip_range=0\.1, ppo_epochs=2, other settings"):
        PPO().load_state(state)
    del state["config"]
    PPO().load_state(state)
