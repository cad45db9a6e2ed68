"""The cookbook's two names for how sampling and training take turns, and the settings of `rlvr train` they stand for.

    AsyncConfig(max_steps_off_policy=3, groups_per_batch=64).settings()
    # ["training.prompts_per_step=64", "training.max_steps_off_policy=3"]

`math_rl` takes them as words: `async_config.max_steps_off_policy=3`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StreamMinibatchConfig:
    """Gradients of `num_minibatches` parts of a batch add up as their groups finish: overlapped, still on-policy."""

    groups_per_batch: int
    num_minibatches: int

    def settings(self) -> list[str]:
        return [
            f"training.prompts_per_step={self.groups_per_batch}",
            f"training.num_minibatches={self.num_minibatches}",
        ]


@dataclass(frozen=True)
class AsyncConfig:
    """Answers may be up to `max_steps_off_policy` batches older than the policy that learns from them."""

    max_steps_off_policy: int
    groups_per_batch: int

    def settings(self) -> list[str]:
        return [
            f"training.prompts_per_step={self.groups_per_batch}",
            f"training.max_steps_off_policy={self.max_steps_off_policy}",
        ]
