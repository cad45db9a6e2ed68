"""The toy policy and its sampler: a table of token logits that learns in seconds, without torch or a model.

    sampler = MockRolloutSampler(max_new_tokens=64, seed=42)
    batch = sampler.generate_trajectories(["Explain quantum computing"] * 4)
    client = sampler.training_client()          # trains what the sampler samples from

`toy_policy` makes the table, for the sampler here and for `client=mock` in a config. Exercised by
`python -m pytest tests/test_toy.py` and `examples/rlvr_toy_task/run_toy_rlvr.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

from rlvr import draws
from rlvr.clients.mock import MockSamplingClient, MockTrainingClient, TablePolicy
from rlvr.envs import PromptEnv
from rlvr.envs.toy import WORDS, checked_words
from rlvr.messages import SamplingParams
from rlvr.rollout import Group, rollout
from rlvr.types import Task, TrajectoryBatch

# A token in so many ends an untrained answer, so that lengths vary; a small vocabulary says its end more often anyway.
MEAN_LENGTH = 50
# How far a table goes at a network's learning rate: 1e-5 moves a logit by about 0.01 a step.
RATE = 1000.0


def toy_policy(words: Sequence[str], seed: int, end: str = "<end>") -> TablePolicy:
    """An untrained table over `words`: nearly uniform, but for the end token of a large vocabulary."""
    policy = TablePolicy(words, seed, end=end, rate=RATE)
    said = len(policy.tokenizer.words) - 2  # all but the end and the unknown word
    policy.logits[0] += math.log(max(1.0, said / (MEAN_LENGTH - 1)))
    return policy


class MockRolloutSampler:
    """Samples answers from a toy policy of its own, which `training_client()` trains.

    `seed` makes the untrained table and every draw; `words` are added to the vocabulary. Each call of
    `generate_trajectories` draws anew: what it draws is a function of the seed and of `calls`, the number of calls
    before it, which may be set to go on where another sampler stopped.
    """

    def __init__(
        self,
        max_new_tokens: int = 64,
        seed: int = 42,
        temperature: float = 1.0,
        words: Sequence[str] | None = None,
    ) -> None:
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"MockRolloutSampler: max_new_tokens={max_new_tokens!r}, expected an integer, at least 1")
        if not 0 < temperature < math.inf:
            raise ValueError(
                f"MockRolloutSampler: temperature={temperature!r}, expected a number above 0: at 0 every answer is the "
                "same and nothing can be learned from comparing them"
            )
        self.policy = toy_policy([*WORDS, *checked_words(words or ())], seed)
        self.params = SamplingParams(max_tokens=max_new_tokens, temperature=temperature)
        self.seed = seed
        self.calls = 0

    def generate_trajectories(self, prompts: Sequence[str]) -> TrajectoryBatch:
        """One answer to each prompt by the policy as it is now; rewards are 0.0 until you set them.

        Equal prompts beside each other are one group (`group_id`), whose rewards an algorithm may compare.
        """
        groups = [
            Group(f"{self.calls}/{number}", task, [PromptEnv(task, self.policy.tokenizer) for _ in same])
            for number, (prompt, same) in enumerate(itertools.groupby(_checked(prompts)))
            for task in [Task(f"toy-{self.calls}-{number}", prompt)]
        ]
        sampler = MockSamplingClient(self.policy)
        seed = draws.key("toy-rollout", self.seed)
        trajectories = rollout(groups, sampler, self.params, seed=seed, version=self.policy.version)
        self.calls += 1
        return TrajectoryBatch(trajectories)

    def training_client(self, folder: str | Path | None = None) -> MockTrainingClient:
        """The client that trains this sampler's policy; `folder` is where it saves states."""
        return MockTrainingClient(self.policy, None if folder is None else Path(folder))


def _checked(prompts: Sequence[str]) -> list[str]:
    if isinstance(prompts, str):
        raise ValueError(f"generate_trajectories: prompts={prompts!r} is one text, expected a list: [{prompts!r}]")
    if not prompts:
        raise ValueError("generate_trajectories: the list of prompts is empty; give one prompt or more")
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, str) or not prompt.strip():  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"generate_trajectories: prompt {number} is {prompt!r}, expected a text that is not empty")
    return list(prompts)
