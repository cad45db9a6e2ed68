"""One table of the words that other systems use for our keys, and where a config may use them.

`TABLE` lists the words, `SECTIONS` the sections that stand for one of ours; `docs/configuration.md` shows both as they
are. A word means the same at the top of a config, in `training`, `algorithm` and `rollout`, in `rlvr` and what it
holds, and in `rlvr_training`; where a section of ours has a key of that name, the key is meant. How values travel is
`rlvr.config.translate`. Left out on purpose: words that mean different things in different places (TRL's `beta`, and
its `num_iterations`, which here are training steps). Exercised by `python -m pytest tests/test_spellings.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from typing import Any

from rlvr.config.schema import Config
from rlvr.config.validate import keys


def _same(value: Any) -> Any:
    return value


def number(value: Any) -> float:
    """A number, also one written as text (`1e-5`, or what comes from the environment)."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError("a number")
    try:
        return float(value)
    except ValueError:
        raise ValueError("a number") from None


def _below(value: Any) -> float:
    """0.8 -> 0.2, as it is written: in decimals, since 1 - 0.8 is 0.19999999999999996 in floating point."""
    return _distance(value, -1, "a ratio from 0 to 1, e.g. 0.8")


def _above(value: Any) -> float:
    return _distance(value, 1, "a ratio of at least 1, e.g. 1.2")


def _distance(value: Any, sign: int, expected: str) -> float:
    number(value)
    distance = (Decimal(str(value)) - 1) * sign
    if not distance.is_finite() or distance < 0 or (sign < 0 and distance > 1):
        raise ValueError(expected)
    return float(distance)


@dataclass(frozen=True)
class Spelling:
    """`word` sets `targets`; `meaning` says how in a line. A target `~word` is worked out from several words.

    `convert` turns the value into ours; the text of its ValueError says what was expected.
    """

    word: str
    targets: tuple[str, ...]
    meaning: str
    convert: Callable[[Any], Any] = _same
    only_at_top: bool = False

    @property
    def key(self) -> str:
        """The keys of ours that it sets, for people."""
        ours = {"~batch_size": "training.prompts_per_step", "~mini_batch_size": "training.num_substeps"}
        ours |= dict.fromkeys(("~num_epochs", "~samples_per_epoch"), "training.steps")
        ours |= dict.fromkeys(("~use_baseline", "~normalize_advantages"), "algorithm.advantage")
        return ", ".join(ours.get(target, target) for target in self.targets)


def _words(words: str, targets: str, meaning: str, convert: Callable[[Any], Any] = _same) -> list[Spelling]:
    return [Spelling(word, tuple(targets.split()), meaning, convert) for word in words.split()]


_CLIP = "algorithm.clip_low algorithm.clip_high"
TABLE: tuple[Spelling, ...] = (
    # sizes and lengths
    *_words("num_iterations max_steps", "training.steps", "training steps"),
    *_words("num_epochs", "~num_epochs", "with samples_per_epoch: steps = num_epochs x samples_per_epoch / batch_size"),
    *_words("samples_per_epoch", "~samples_per_epoch", "answers sampled in an epoch; see num_epochs"),
    *_words("batch_size", "~batch_size", "answers of a step: prompts_per_step = batch_size / group_size"),
    *_words("mini_batch_size", "~mini_batch_size", "answers of an update: num_substeps = batch_size / this"),
    *_words("problems_per_iteration prompts_per_step", "training.prompts_per_step", "prompts of a step"),
    *_words("samples_per_problem num_generations group_size", "training.group_size", "answers to a prompt"),
    *_words("groups_per_batch", "training.prompts_per_step", "prompts of a step, each with a group of answers"),
    *_words("num_substeps", "training.num_substeps", "optimizer steps into which a batch is cut"),
    *_words("num_minibatches", "training.num_minibatches", "forward-backward calls of an optimizer step, streamed"),
    *_words("max_steps_off_policy", "training.max_steps_off_policy", "steps by which answers may be too old"),
    *_words("ppo_epochs", "training.ppo_epochs", "how often a batch is used"),
    *_words("max_prompt_length", "training.max_prompt_tokens", "longest prompt, in tokens"),
    *_words(
        "max_new_tokens max_generation_length max_completion_length max_tokens",
        "rollout.max_tokens", "longest answer, in tokens, without its prompt",
    ),
    # sampling
    *_words("temperature", "rollout.temperature", "sampling temperature"),
    *_words("top_p", "rollout.top_p", "nucleus sampling"),
    *_words("top_k", "rollout.top_k", "sampling from the k most likely tokens"),
    # the update
    *_words("learning_rate", "training.optimizer.learning_rate", "AdamW's rate in reinforcement learning"),
    *_words("clip_range cliprange", _CLIP, "epsilon around 1, both sides: 0.2 clips at 0.8 and 1.2", number),
    *_words("epsilon", _CLIP, "the same; with epsilon_high beside it the lower side alone", number),
    *_words("epsilon_high", "algorithm.clip_high", "epsilon above 1: 0.28 clips at 1.28", number),
    *_words("ppo_clip_low clip_low_threshold", "algorithm.clip_low", "the lowest ratio: 0.8 is 0.2", _below),
    *_words("ppo_clip_high clip_high_threshold", "algorithm.clip_high", "the highest ratio: 1.2 is 0.2", _above),
    *_words("target_kl", "training.target_kl", "no further update of a step beyond this divergence"),
    *_words("entropy_coef", "algorithm.entropy_coef", "weight of the entropy bonus"),
    *_words("baseline_decay", "algorithm.baseline_decay", "of the moving-average baseline"),
    *_words("use_baseline", "~use_baseline", "subtract a moving average (advantage ema), or nothing (raw)"),
    *_words("normalize_advantages", "~normalize_advantages", "centre and scale over the batch (batch_normalized)"),
    *_words("mask_truncated_completions mask_truncated", "algorithm.mask_truncated", "answers cut short teach nothing"),
    *_words("lora_rank", "model.lora.rank", "train an adapter of this rank"),
    *_words("base_model", "model.name", "a model's folder or hub name"),
    *_words("base_url", "model.base_url", "the address of a Tinker server, with client=tinker"),
    *_words("api_key", "model.api_key", "the key for it; better in TINKER_API_KEY"),
    *_words("start_from_checkpoint", "model.start_from", "weights to start from: a run, checkpoint, model or adapter"),
    # tasks and rewards
    *_words("num_train_problems", "env.kwargs.num_train_problems", "train on the first so many problems"),
    *_words("complexity_range", "env.kwargs.complexity", "[lowest, highest] complexity of arithmetic problems"),
    *_words("reward_type", "reward.type", "a reward by name"),
    *_words("boxed_weight", "reward.kwargs.boxed_weight", "weight of the format in the reward combined"),
    *_words("correct_weight", "reward.kwargs.correct_weight", "weight of the answer in the reward combined"),
    # the run
    *_words("seed", "seed", "of every draw"),
    Spelling("mode", ("training.mode",), "rlvr, or sft for supervised learning alone", only_at_top=True),
    Spelling("control", ("training.control",), "random_reward: a gain without signal", only_at_top=True),
    Spelling("experiment_name", ("tracking.experiment",), "the experiment's name in MLflow", only_at_top=True),
    Spelling("run_name", ("run.name",), "the run's name, and its folder's", only_at_top=True),
)  # fmt: skip
WORDS = {spelling.word: spelling for spelling in TABLE}

# Sections of other systems, and ours that their keys may belong to ("" is the top of the config).
SECTIONS: dict[str, tuple[str, ...]] = {
    "rlvr_training": ("training", ""),
    "training_data_generator": ("env",),
    "predictive_model": ("model",),
    "logging": ("tracking",),
    "rlvr": ("", "training", "algorithm"),
    "rlvr.rollout": ("rollout",),
    "rlvr.reward": ("reward",),
    "rlvr.algorithm_config": ("algorithm", "training"),
    "training": ("",),  # a training group may bring a warm-up and evaluation along
}
OURS_FIRST = ("training", "algorithm", "rollout")
PLACES = ("", *OURS_FIRST, "rlvr", "rlvr.algorithm_config", "rlvr.rollout", "rlvr.reward", "rlvr_training")


@cache
def _known() -> tuple[frozenset[str], frozenset[str]]:
    """The keys of the schema, and those of them that hold any keys."""
    every = frozenset(keys(Config))
    return every, frozenset(("env.kwargs", "reward.kwargs", "model.config"))


def is_ours(key: str) -> bool:
    every, free = _known()
    return key in every or any(key.startswith(f"{mapping}.") for mapping in free)


def place(key: str) -> Spelling | None:
    """What a dotted key means, if it is not one of ours as it stands. ValueError where its section has no such word.

    `place("rlvr_training.cliprange")` is the row of `cliprange`; `place("rlvr.rollout.top_k")` a plain renaming.
    """
    if is_ours(key):
        return None
    parent, _, word = key.rpartition(".")
    if key == "model.client":
        return Spelling(word, ("client",), "who samples and learns")
    if key == "rlvr.algorithm":
        return Spelling(word, ("~algorithm",), "reinforce, ppo, or a row of the algorithm table")
    found = WORDS.get(word)
    if found and parent in PLACES and (parent == "" or not found.only_at_top):
        return found
    section = max((s for s in SECTIONS if key.startswith(f"{s}.")), key=len, default=None)
    if section is None:
        return None
    rest = key[len(section) + 1 :]
    for ours in SECTIONS[section]:
        candidate = f"{ours}.{rest}" if ours else rest
        if is_ours(candidate):
            return Spelling(word, (candidate,), "")
    if section in OURS_FIRST:
        return None  # the schema says what it thinks of it
    raise ValueError(_about(section, rest))


def _about(section: str, rest: str) -> str:
    every, _ = _known()
    there = {w for w, s in WORDS.items() if section in PLACES and not s.only_at_top}
    for ours in SECTIONS[section]:
        there |= {k[len(ours) + 1 :] for k in every if ours and k.startswith(f"{ours}.")}
    near = difflib.get_close_matches(rest, there, n=1)
    return f"did you mean {section}.{near[0]}?" if near else f"known there: {', '.join(sorted(there))}"
