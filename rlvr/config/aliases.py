"""The table of aliases: words that other systems use for our keys, and where a config may use them.

`ALIASES` lists the words, `SECTIONS` the sections that stand for one of ours; `docs/reference/configuration.md` shows
both. A word means the same at the top of a config, in `training`, `algorithm` and `rollout`, in `rlvr` and what it
holds, and in `rlvr_training`; where a section of ours has a key of that name, the key is meant. How values travel is
`rlvr.config.alias_translation`; the words of TRL and verl are in `rlvr.config.foreign_words`.
`num_iterations` is the number of training steps; beside other words of TRL it is TRL's (`rlvr.config.trl_defaults`).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from functools import cache
from typing import Any

from rlvr.config.alias import Alias, keep_value, to_number
from rlvr.config.choices import FLAT, full_key
from rlvr.config.foreign_words import FOREIGN, VERL_SECTIONS
from rlvr.config.schema import RunConfig
from rlvr.config.validate import list_keys
from rlvr.config.word_tables import choose


def _below(value: Any) -> float:
    """0.8 -> 0.2, as it is written: in decimals, since 1 - 0.8 is 0.19999999999999996 in floating point."""
    return _distance(value, -1, "a ratio from 0 to 1, e.g. 0.8")


def _above(value: Any) -> float:
    return _distance(value, 1, "a ratio of at least 1, e.g. 1.2")


def _distance(value: Any, sign: int, expected: str) -> float:
    to_number(value)
    distance = (Decimal(str(value)) - 1) * sign
    if not distance.is_finite() or distance < 0 or (sign < 0 and distance > 1):
        raise ValueError(expected)
    return float(distance)


def _words(words: str, targets: str, meaning: str, convert: Callable[[Any], Any] = keep_value) -> list[Alias]:
    return [Alias(word, tuple(targets.split()), meaning, convert) for word in words.split()]


_CLIP = "algorithm.clip_low algorithm.clip_high"


def _top_k(value: Any) -> Any:
    return -1 if type(value) is int and value == 0 else value


ALIASES: tuple[Alias, ...] = (
    # sizes and lengths
    *_words("num_iterations", "training.steps", "training steps; beside other words of TRL training.ppo_epochs"),
    *_words("max_steps", "training.steps", "training steps; -1 leaves it to epochs", lambda n: None if n == -1 else n),
    *_words("num_epochs", "~num_epochs", "with samples_per_epoch: steps = num_epochs x samples_per_epoch / batch_size"),
    *_words("samples_per_epoch", "~samples_per_epoch", "completions sampled in an epoch; see num_epochs"),
    *_words("batch_size", "~batch_size", "completions of a step: prompts_per_step = batch_size / group_size"),
    *_words("mini_batch_size", "~mini_batch_size", "completions of an update: num_substeps = batch_size / this"),
    *_words("problems_per_iteration prompts_per_step", "training.prompts_per_step", "prompts of a step"),
    *_words("samples_per_problem num_generations group_size", "training.group_size", "completions of a prompt"),
    *_words("groups_per_batch", "training.prompts_per_step", "prompts of a step, each with a group of completions"),
    *_words("num_substeps", "training.num_substeps", "optimizer steps into which a batch is cut"),
    *_words("num_minibatches", "training.num_minibatches", "forward-backward calls of an optimizer step, streamed"),
    *_words("max_steps_off_policy", "training.max_steps_off_policy", "steps by which completions may be stale"),
    *_words("ppo_epochs", "training.ppo_epochs", "how often a batch is used"),
    *_words("max_prompt_length", "training.max_prompt_tokens", "longest prompt, in tokens"),
    *_words(
        "max_new_tokens max_generation_length max_completion_length max_tokens",
        "rollout.max_tokens", "longest completion, in tokens, without its prompt",
    ),
    # sampling
    *_words("temperature", "rollout.temperature", "sampling temperature"),
    *_words("top_p", "rollout.top_p", "nucleus sampling"),
    *_words("top_k", "rollout.top_k", "sampling from the k most likely tokens; 0 is off", _top_k),
    # the update
    *_words("learning_rate", "training.optimizer.learning_rate", "AdamW's rate in reinforcement learning"),
    *_words("clip_range cliprange", _CLIP, "epsilon around 1, both sides: 0.2 clips at 0.8 and 1.2", to_number),
    *_words("epsilon", _CLIP, "the same; together with epsilon_high only the lower side", to_number),
    *_words("epsilon_high", "algorithm.clip_high", "epsilon above 1: 0.28 clips at 1.28", to_number),
    *_words("ppo_clip_low clip_low_threshold", "algorithm.clip_low", "the lowest ratio: 0.8 is 0.2", _below),
    *_words("ppo_clip_high clip_high_threshold", "algorithm.clip_high", "the highest ratio: 1.2 is 0.2", _above),
    *_words("target_kl", "training.target_kl", "no further update of a step beyond this divergence"),
    *_words("entropy_coef", "algorithm.entropy_coef", "weight of the entropy bonus"),
    *_words("baseline_decay", "algorithm.baseline_decay", "decay of the moving-average baseline"),
    *_words("use_baseline", "~use_baseline", "subtract a moving average (advantage ema), or nothing (raw)"),
    *_words("normalize_advantages", "~normalize_advantages", "centre and scale over the batch (batch_normalized)"),
    *_words(
        "advantage_estimator",
        "algorithm.advantage",
        "OpenRLHF's: reinforce is token_normalized (REINFORCE++), reinforce_baseline group_mean_token_normalized, "
        "rloo leave_one_out, group_norm group_normalized, dr_grpo group_mean, gae gae",
        choose(
            reinforce="token_normalized",
            reinforce_baseline="group_mean_token_normalized",
            rloo="leave_one_out",
            group_norm="group_normalized",
            dr_grpo="group_mean",
            gae="gae",
        ),
    ),
    *_words("mask_truncated_completions mask_truncated", "algorithm.mask_truncated", "leave truncated ones out"),
    *_words("lora_rank", "model.lora.rank", "train an adapter of this rank"),
    *_words("base_model", "model.name", "a model's folder or hub name"),
    *_words("base_url", "model.base_url", "the address of a Tinker server, with client=tinker"),
    *_words("api_key", "model.api_key", "its API key; better given in TINKER_API_KEY"),
    *_words("start_from_checkpoint", "model.start_from", "weights to start from: a run, checkpoint, model or adapter"),
    # tasks and rewards
    *_words("num_train_problems", "env.kwargs.num_train_problems", "train on the first N problems"),
    *_words("complexity_range", "env.kwargs.complexity", "[lowest, highest] complexity of arithmetic problems"),
    *_words("reward_type", "reward.type", "a reward by name"),
    *_words("boxed_weight", "reward.kwargs.boxed_weight", "weight of the format in the reward combined"),
    *_words("correct_weight", "reward.kwargs.correct_weight", "weight of the answer in the reward combined"),
    # the run
    *_words("seed", "seed", "the seed of all random draws"),
    Alias("mode", ("training.mode",), "rlvr, or sft for supervised learning alone", only_at_top=True),
    Alias("control", ("training.control",), "random_reward: coin flips; equal_rewards: all 1", only_at_top=True),
    Alias("experiment_name", ("tracking.experiment",), "the project (W&B) or experiment (MLflow)", only_at_top=True),
    Alias("run_name", ("run.name",), "the run's name, and its folder's", only_at_top=True),
)  # fmt: skip
ALIASES_BY_WORD = {alias.word: alias for alias in ALIASES}

# Sections of other systems, and ours that their keys may belong to ("" is the top of the config).
SECTIONS: dict[str, tuple[str, ...]] = {
    "rlvr_training": ("training", ""),
    "training_data_generator": ("env",),
    "predictive_model": ("model",),
    "logging": ("tracking",),
    "teachers": ("teacher.for_tasks",),
    "rlvr": ("", "training", "algorithm"),
    "rlvr.rollout": ("rollout",),
    "rlvr.reward": ("reward",),
    "rlvr.algorithm_config": ("algorithm", "training"),
    "training": ("",),  # a training group may hold sft and evaluation settings
}
OURS_FIRST = ("training", "algorithm", "rollout")
PLACES = ("", *OURS_FIRST, "rlvr", "rlvr.algorithm_config", "rlvr.rollout", "rlvr.reward", "rlvr_training")


@cache
def _schema_keys() -> tuple[frozenset[str], frozenset[str]]:
    """The keys of the schema, and those of them that hold any keys."""
    every = frozenset(list_keys(RunConfig))
    return every, frozenset(("env.kwargs", "reward.kwargs", "model.config", "teacher.for_tasks"))


def is_ours(key: str) -> bool:
    every, free = _schema_keys()
    return key in every or any(key.startswith(f"{mapping}.") for mapping in free)


def find_alias(key: str) -> Alias | None:
    """The alias that a dotted key is, or None if it is one of ours. ValueError if its section has no such word.

    `find_alias("rlvr_training.cliprange")` is the alias `cliprange`; that of `"rlvr.rollout.top_k"` only renames.
    """
    if (full := full_key(key)) != key:
        return Alias(key.rpartition(".")[2], (full,), "")
    if is_ours(key):
        return None
    if key in FOREIGN:
        return _in_full(FOREIGN[key])
    parent, _, word = key.rpartition(".")
    if (first := key.partition(".")[0]) in VERL_SECTIONS:
        near = difflib.get_close_matches(key, FOREIGN, n=1)
        raise ValueError(
            f"{first} is a section of verl's; "
            + (
                f"did you mean {near[0]}?"
                if near
                else "its words that have a counterpart are in docs/reference/coming-from.md"
            )
        )
    if key == "model.client":
        return Alias(word, ("client.name",), "the client that samples and learns")
    if key == "rlvr.algorithm":
        return Alias(word, ("~algorithm",), "reinforce, ppo, or an algorithm spec")
    alias = ALIASES_BY_WORD.get(word)
    if alias and parent in PLACES and (parent == "" or not alias.only_at_top):
        return _in_full(alias)
    section = max((s for s in SECTIONS if key.startswith(f"{s}.")), key=len, default=None)
    if section is None:
        return None
    rest = key[len(section) + 1 :]
    for ours in SECTIONS[section]:
        candidate = f"{ours}.{rest}" if ours else rest
        if is_ours(full_key(candidate)):
            return Alias(word, (full_key(candidate),), "")
    if section in OURS_FIRST:
        return None  # the schema reports it
    raise ValueError(_about(section, rest))


def _in_full(alias: Alias) -> Alias:
    return replace(alias, targets=tuple(map(full_key, alias.targets)))


def _about(section: str, rest: str) -> str:
    every, _ = _schema_keys()
    words = {w for w, s in ALIASES_BY_WORD.items() if section in PLACES and not s.only_at_top}
    for ours in SECTIONS[section]:
        words |= {k[len(ours) + 1 :] for k in (*every, *FLAT) if ours and k.startswith(f"{ours}.")}
    near = difflib.get_close_matches(rest, words, n=1)
    return f"did you mean {section}.{near[0]}?" if near else f"known there: {', '.join(sorted(words))}"
