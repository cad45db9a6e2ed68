"""The toy policy and its sampler: a table of token logits that learns in seconds, without torch or a model.

For example:

    sampler = MockRolloutSampler(max_new_tokens=64, seed=42)
    batch = sampler.generate_trajectories(["Explain quantum computing"] * 4)
    client = sampler.training_client()          # trains what the sampler samples from
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

from rlvr.clients.mock.mock_client import MockSamplingClient, MockTrainingClient
from rlvr.clients.mock.tabular_policy import toy_policy
from rlvr.core import rng
from rlvr.core.messages import SamplingParams
from rlvr.core.types import Task, TrajectoryBatch
from rlvr.envs import PromptEnv
from rlvr.envs.toy import WORDS, check_words
from rlvr.rollout import Group, rollout


class MockRolloutSampler:
    """Samples completions from a toy policy of its own, which `training_client()` trains.

    `seed` makes the untrained table and every draw; `words` are added to the vocabulary. The draws of
    `generate_trajectories` depend on the seed and on `calls`, the number of calls before it, which may be set to resume
    where another sampler stopped.
    """

    def __init__(
        self, max_new_tokens: int = 64, seed: int = 42, temperature: float = 1.0, words: Sequence[str] | None = None
    ) -> None:
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"MockRolloutSampler: max_new_tokens={max_new_tokens!r}, expected an integer, at least 1")
        if not 0 < temperature < math.inf:
            raise ValueError(
                f"MockRolloutSampler: temperature={temperature!r}, expected a number above 0: at 0 all completions are "
                "equal and nothing can be learned from comparing them"
            )
        self.policy = toy_policy([*WORDS, *check_words(words or ())], seed)
        self.params = SamplingParams(max_tokens=max_new_tokens, temperature=temperature)
        self.seed = seed
        self.calls = 0

    def generate_trajectories(self, prompts: Sequence[str]) -> TrajectoryBatch:
        """Sample one completion of each prompt with the current policy; rewards are 0.0 until you set them.

        Equal neighbouring prompts are one group (`group_id`), whose rewards an algorithm may compare.
        """
        groups = [
            Group(f"{self.calls}/{number}", task, [PromptEnv(task, self.policy.tokenizer) for _ in same])
            for number, (prompt, same) in enumerate(itertools.groupby(_check_prompts(prompts)))
            for task in [Task(f"toy-{self.calls}-{number}", prompt)]
        ]
        sampler = MockSamplingClient(self.policy)
        seed = rng.key("toy-rollout", self.seed)
        trajectories = rollout(groups, sampler, self.params, seed=seed, version=self.policy.version)
        self.calls += 1
        return TrajectoryBatch(trajectories)

    def training_client(self, folder: str | Path | None = None) -> MockTrainingClient:
        """The client that trains this sampler's policy; `folder` is where it saves states."""
        return MockTrainingClient(self.policy, None if folder is None else Path(folder))


def _check_prompts(prompts: Sequence[str]) -> list[str]:
    if isinstance(prompts, str):
        raise ValueError(f"generate_trajectories: prompts={prompts!r} is one text, expected a list: [{prompts!r}]")
    if not prompts:
        raise ValueError("generate_trajectories: the list of prompts is empty; give one prompt or more")
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, str) or not prompt.strip():  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"generate_trajectories: prompt {number} is {prompt!r}, expected a text that is not empty")
    return list(prompts)
