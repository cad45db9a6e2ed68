"""An alias: a word of another system that sets keys of ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# What is worked out from several words (`rlvr.config.alias_values`), and the key that it ends up in.
_DERIVED = {
    "~batch_size": "training.prompts_per_step",
    "~device_batch": "training.prompts_per_step",
    "~accumulation": "training.prompts_per_step",
    "~mini_batch_size": "training.num_substeps",
    "~mini_batch_prompts": "training.num_substeps",
    "~num_epochs": "training.steps",
    "~samples_per_epoch": "training.steps",
    "~use_baseline": "algorithm.advantage",
    "~normalize_advantages": "algorithm.advantage",
    "~beta": "algorithm.kl_coef",
    "~kl_loss_coef": "algorithm.kl_coef",
    "~use_kl_loss": "algorithm.kl_coef",
    "~loss_mode": "algorithm.clip_cov_ratio",
    "~clip_cov_ratio": "algorithm.clip_cov_ratio",
    "~importance": "algorithm.importance_mode, algorithm.importance_cap",
    "~rollout_is": "algorithm.importance_mode",
    "~rollout_is_threshold": "algorithm.importance_cap, algorithm.importance_floor",
    "~report_to": "tracking.wandb, tracking.mlflow, tracking.tensorboard",
    "~filter_long_prompts": "training.long_prompts",
    "~truncation": "training.long_prompts",
    "~reward_model": "reward.type, reward.kwargs.model",
}


class NotSupportedError(ValueError):
    """A value that has no counterpart here; the text says what to do instead."""


class SeveralKeys(dict[str, Any]):
    """What one word means for several keys of ours, each with a value of its own."""


def keep_value(value: Any) -> Any:
    return value


def to_number(value: Any) -> float:
    """A number, also one written as text (`1e-5`, or what comes from the environment)."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError("a number")
    try:
        return float(value)
    except ValueError:
        raise ValueError("a number") from None


@dataclass(frozen=True)
class Alias:
    """Another system's word for keys of a config: `word` sets `targets`; `meaning` says how in a line. A target
    `~word` is worked out from several words.

    `convert` turns the value into ours (None: ours stays), or into a value for each key (`SeveralKeys`); the text of
    its ValueError says what was expected. Without targets it only checks the value.
    """

    word: str
    targets: tuple[str, ...]
    meaning: str
    convert: Callable[[Any], Any] = keep_value
    only_at_top: bool = False

    @property
    def key(self) -> str:
        """The keys of ours that it sets, for people."""
        return ", ".join(_DERIVED.get(target, target) for target in self.targets)
