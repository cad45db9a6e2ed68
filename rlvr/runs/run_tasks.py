"""Makes the tasks of a source fit a run: how many there are, how long their prompts may be, what can be imitated."""

from __future__ import annotations

import hashlib
import json
import math
import traceback
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

from rlvr.config.compose import LoadedConfig
from rlvr.config.epochs import EPOCHS, STEPS, set_length
from rlvr.config.schema import RunConfig
from rlvr.core.protocols import TaskSource
from rlvr.envs.long_prompts import leave_out_long_demonstrations, limit_prompts, list_train
from rlvr.envs.registry import takes_option
from rlvr.reward import Reward
from rlvr.reward.references import find_reference_text
from rlvr.reward.signatures import Case
from rlvr.training.given_completions import check_contents, check_lengths, read_completions
from rlvr.training.sft import name_task


def count_tasks(source: TaskSource) -> int | None:
    """The number of training tasks, which is an epoch; None if they are generated."""
    return None if source.size is None else sum(source.size(level) for level in source.levels)


def hash_tasks(source: TaskSource) -> str | None:
    """The SHA-256 of all training and held-out tasks; None if they are generated, and so follow from the config."""
    if source.size is None:
        return None
    digest = hashlib.sha256()
    for task in (*list_train(source), *source.heldout(None)):
        digest.update(json.dumps([task.id, task.prompt, task.meta], sort_keys=True, default=str).encode())
    return digest.hexdigest()


def resolve_epochs(loaded: LoadedConfig, config: RunConfig, source: TaskSource) -> tuple[LoadedConfig, RunConfig]:
    """The config with the number of steps that its epochs come to; ValueError if the source has no fixed tasks.

    This comes before `resolved.yaml` is written: a resumed run compares steps, and other data under the same name are
    another config. Prompts that are too long for the run count: which these are is known once there is a tokenizer.
    """
    epochs = config.training.epochs
    if epochs is None:
        return loaded, config
    if (tasks := count_tasks(source)) is None:
        raise ValueError(
            f"training.epochs={epochs:g}: the environment {config.env.name!r} generates its tasks without a fixed "
            "number; give training.steps"
        )
    # Exact: as a float, 1.1 x 100 / 10 is a little over 11.
    steps = math.ceil(Fraction(str(epochs)) * tasks / config.training.prompts_per_step)
    training = replace(config.training, steps=steps, epochs=None)
    return set_length(loaded, {STEPS: steps, EPOCHS: None}), replace(config, training=training)


def fit_prompts(config: RunConfig, source: TaskSource, tokenizer: Any, say: Callable[[str], None]) -> TaskSource:
    """The source with no prompt that is too long for the run or the model (`training.long_prompts`)."""
    t, room = config.training, config.rollout.max_tokens or 0
    context = getattr(tokenizer, "model_max_length", None)
    context = context if context is not None and context < 1 << 30 else None  # transformers: none is a huge number
    key = f"training.max_prompt_tokens={t.max_prompt_tokens}"
    limit = t.max_prompt_tokens
    if context is not None and (limit is None or limit >= context):
        limit, key = context - max(1, room), f"the model's context of {context:,} less rollout.max_tokens={room}"
        if limit < 1:
            raise ValueError(
                f"rollout.max_tokens={room} leaves no room for a prompt in the model's context of {context:,} tokens; "
                "lower it"
            )
    if limit is not None:
        is_given = limit == t.max_prompt_tokens
        source = limit_prompts(source, tokenizer, limit, t.long_prompts, say, key, is_strict=is_given)
    if config.sft.steps and context is not None:
        leave_out_long_demonstrations(source, tokenizer, context, say)
    if t.mode == "rlvr" and t.completions == "given" and context is not None and source.size is not None:
        is_paired = config.algorithm.resolve().loss.is_paired
        check_lengths(list_train(source), tokenizer, source.prompt_limit, context, is_paired)
    return source


# What a mistake in a reward function raises, whatever the completion is.
_MISTAKES = (KeyError, NameError, ImportError, TypeError, AttributeError)


def check_reward(reward: Reward, source: TaskSource, seed: int) -> None:
    """ValueError if a reward function raises on the first task what no completion is to blame for, such as a KeyError.

    A verifier that waits for processes or a network is not tried.
    """
    if reward.waits_for or not source.levels:
        return
    task = source.train(seed, 0, source.levels[0])
    text = find_reference_text(task.meta) or "0"
    try:
        reward.judge(Case.of_task(task, text))
    except _MISTAKES as error:
        if "NoneType" in str(error):  # nothing was found in the text
            return
        frame = traceback.extract_tb(error.__traceback__)[-1]
        columns = ", ".join(map(repr, task.meta or {})) or "no keys"
        hint = ""
        if "string indices" in str(error):
            hint = "; prompts and completions are text here, and messages where a row's prompt is a list of messages"
        raise ValueError(
            f"reward {reward.name!r} raised {type(error).__name__}: {error} on the first task ({task.id}), in "
            f"{frame.name} at {frame.filename}:{frame.lineno}; its meta has {columns}{hint}. Correct the function"
        ) from error
    except Exception:  # perhaps the completion's doing, which the run counts
        return


def check_completions(config: RunConfig, source: TaskSource) -> str:
    """ValueError if a run could not learn from its given completions; what else they lack, in words, '' for nothing.

    Of tasks that are generated only the first of each level is read.
    """
    if config.training.mode != "rlvr" or config.training.completions != "given":
        return ""
    is_paired = config.algorithm.resolve().loss.is_paired
    if source.size is not None:
        return check_contents(list_train(source), is_paired)
    for level in source.levels:
        read_completions(source.train(config.seed, 0, level), is_paired)
    return ""


def check_demonstrations(config: RunConfig, source: TaskSource) -> None:
    """ValueError if supervised fine-tuning or a hint would come to a task without a demonstration."""
    keys = [f"sft.steps={config.sft.steps}"] if config.sft.steps else []
    if config.training.mode == "rlvr" and config.curriculum.hint_step:
        keys.append(f"curriculum.hint_step={config.curriculum.hint_step:g}")
    if not keys:
        return
    for level in source.levels:
        for index in range(source.size(level) if source.size else 1):
            task = source.train(config.seed, index, level)
            if source.demonstration(task, 0) is None:
                raise ValueError(
                    f"{keys[0]}: the environment {config.env.name!r} has no demonstration for task "
                    f"{name_task(source, task)}; {_how_to_demonstrate(config.env.name)}, or give "
                    f"{keys[0].partition('=')[0]}=0"
                )


def _how_to_demonstrate(environment: str) -> str:
    if takes_option(environment, "demonstration_field"):
        return "name a column of text by env.kwargs.demonstration_field where there is one"
    return "let env.kwargs leave such tasks out"
