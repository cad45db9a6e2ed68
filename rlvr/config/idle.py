"""Keys that a config sets and that cannot change what it does: an error where typed, one warning where from a file.

`settle` also takes out those that the parts below would refuse, when they came from a file that other runs may share
(clip bounds of a file under an algorithm that does not clip, the weights of another reward). Exercised by
`python -m pytest tests/test_idle.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from rlvr.algorithms.rows import CLIPPED, row_named
from rlvr.config.compose import CLI, Loaded
from rlvr.config.pool import SHIPPED_FILES
from rlvr.reward import known_rewards, options_of
from rlvr.training.options import TrainingOptions

if TYPE_CHECKING:
    from rlvr.config.schema import Config

Idle = list[tuple[str, str]]


def without_divergence_limit(values: Mapping[str, Any]) -> tuple[dict[str, Any], Idle]:
    """The values without a `training.target_kl` that nothing would look at: a step of one update cannot stop early."""
    training = values.get("training")
    if not isinstance(training, Mapping) or not training.get("target_kl"):
        return dict(values), []
    defaults = {f.name: f.default for f in fields(TrainingOptions)}
    if any(training.get(key, defaults[key]) != 1 for key in ("ppo_epochs", "num_substeps")):
        return dict(values), []
    kept = {key: value for key, value in training.items() if key != "target_kl"}
    return {**values, "training": kept}, [("training.target_kl", "there is one update a step")]


def settle(config: Config) -> tuple[Config, Idle]:
    """The config without what its algorithm and its reward cannot use."""
    idle: Idle = []
    cells = config.algorithm
    row = row_named(cells.name)
    loss = cells.loss or row.loss
    dropped: dict[str, Any] = {}
    if loss not in CLIPPED:
        dropped |= dict.fromkeys(("clip_low", "clip_high"), f"the loss {loss} does not clip")
    if loss != "dro":
        dropped["beta"] = f"the loss {loss} has no beta"
    dropped = {cell: why for cell, why in dropped.items() if getattr(cells, cell) is not None}
    if dropped:
        idle += [(f"algorithm.{cell}", why) for cell, why in dropped.items()]
        config = replace(config, algorithm=replace(cells, **dict.fromkeys(dropped)))
    if why := _without_refill(config):
        idle.append(("training.refill", why))
        config = replace(config, training=replace(config.training, refill=0))
    if config.training.num_minibatches > 1 and cells.reduction is None and row.reduction == "token_mean":
        # Tokens of a batch that is not there yet cannot be counted: what is streamed has a constant denominator.
        config = replace(config, algorithm=replace(config.algorithm, reduction="constant"))
    others = _kwargs_of_other_rewards(config.reward.type, config.reward.kwargs)
    if others:
        idle += [(f"reward.kwargs.{key}", f"the reward {config.reward.type} has no such option") for key in others]
        kept = {key: value for key, value in config.reward.kwargs.items() if key not in others}
        config = replace(config, reward=replace(config.reward, kwargs=kept))
    return config, idle


def _without_refill(config: Config) -> str:
    """Why groups that teach nothing are not replaced, '' where they may be."""
    if not config.training.refill:
        return ""
    if config.training.order != "sync":
        return f"under training.schedule={config.training.order} the next prompts are drawn before a batch is known"
    algorithm = config.algorithm.resolve()
    if algorithm.uses_groups and algorithm.drop_equal_groups:
        return ""
    return f"{algorithm.name} with {algorithm.advantage} keeps every group"


def _kwargs_of_other_rewards(name: str | None, kwargs: Mapping[str, Any]) -> list[str]:
    """Options that another registered reward takes and this one does not. What none takes is a mistake, not idle."""
    if name is None or not kwargs or (mine := options_of(name)) is None:
        return []
    others = set[str]().union(*(options_of(other) or set[str]() for other in known_rewards()))
    return [key for key in kwargs if key not in mine and key in others]


def without_effect(config: Config) -> Idle:
    """Keys that cannot change what this config does, with the reason."""
    idle = [("rollout.seed", "every draw of a run follows from seed")]
    if config.client == "mock":
        idle += [(key, "client=mock is a table of logits and builds no model") for key in ("model", "engine")]
    if config.client == "tinker":
        there = ("model.config", "model.device", "model.dtype", "model.lora.alpha", "engine")
        idle += [(key, "client=tinker: the model is at a server, which decides this") for key in there]
        if config.model.start_from:
            idle.append(("model.lora", "the weights of model.start_from bring their adapter"))
    else:
        idle += [(key, "only client=tinker speaks to a server") for key in ("model.base_url", "model.api_key")]
    if config.sft.steps == 0:
        idle += [(f"sft.{key}", "sft.steps is 0") for key in ("batch_size", "until", "optimizer", "curriculum")]
    if config.curriculum.by != "pass_rate":
        idle += [(f"curriculum.{key}", "curriculum.by is not pass_rate") for key in ("floor", "decay")]
    if config.curriculum.by != "threshold":
        opens = ("first", "every", "highest")
        idle += [(f"curriculum.{key}", "curriculum.by is not threshold") for key in opens]
    if config.evaluation.every == 0:
        idle.append(("training.until", "evaluation.every is 0: nothing looks at held-out tasks"))
    if config.sft.until == 0:
        idle.append(("sft.check_every", "sft.until is 0"))
        if config.evaluation.every == 0:
            idle += [
                (f"evaluation.{key}", "neither evaluation.every nor sft.until asks for quick looks")
                for key in ("quick_tasks", "quick_samples")
            ]
    if not config.tracking.mlflow:
        idle += [(f"tracking.{key}", "tracking.mlflow is false") for key in ("mlflow_uri", "experiment")]
    if config.training.order != "completion":
        idle.append(("training.stale", "training.schedule is not completion: no group is ever too old"))
    elif config.training.max_steps_off_policy == 0:
        idle.append(("training.stale", "training.max_steps_off_policy is 0: every group is waited for"))
    if config.training.control != "none":
        idle.append(("training.until", "a control run must not stop by the verifier's verdicts"))
    if config.training.mode == "sft":
        used = ("mode", "error_budget")  # evaluation has verifiers too
        learned = [f"training.{f.name}" for f in fields(TrainingOptions) if f.name not in used]
        idle += [
            (key, "training.mode is sft, which reads sft.*")
            for key in (*learned, "algorithm", "curriculum", "evaluation.every")
        ]
        return idle
    return idle + _idle_cells(config)


def _idle_cells(config: Config) -> Idle:
    cells, row = config.algorithm, config.algorithm.resolve()
    idle: Idle = []
    if row.advantage != "ema":
        idle.append(("algorithm.baseline_decay", f"the advantage {row.advantage} keeps no moving average"))
    if not row.kl_coef:
        idle += [(f"algorithm.{key}", "algorithm.kl_coef is 0") for key in ("kl_estimator", "kl_in")]
    if not row.entropy_coef:
        idle.append(("algorithm.entropy", "algorithm.entropy_coef is 0"))
    if row.overlong_buffer is None:
        idle.append(("algorithm.overlong_penalty", "algorithm.overlong_buffer is not given"))
    # What a row can do without: a file may say the default aloud.
    return [(key, why) for key, why in idle if getattr(cells, key.partition(".")[2]) is not None]


def report(idle: Idle, loaded: Loaded, same: Callable[[str], bool], warn: Callable[[str], None]) -> None:
    """ValueError for what was typed and does nothing; a line for each key of a file, one in all for a shipped file.

    A key for which `same` holds, having the value it would have without being set, is left in peace: `until=0` turns
    off what a file turned on.
    """
    reasons: dict[str, str] = {}
    for key, why in idle:
        reasons.setdefault(key, why)
    found: dict[str, tuple[str, str]] = dict(loaded.idle)
    for key, why in reasons.items():
        for given, origin in loaded.origin.items():
            if not (given == key or given.startswith((f"{key}.", f"{key}["))) or same(given):
                continue
            if key == "tracking.experiment" and loaded.typed.get(given) == "experiment_name" and origin != CLI:
                continue  # a name that other values may be made of
            named = loaded.typed.get(given, given)
            if origin == CLI:
                leaf = not any(other.startswith(f"{given}.") for other in loaded.origin)
                if leaf:
                    found[named] = (origin, why)
            else:
                section = key if given not in loaded.typed else named
                found.setdefault(section, (origin, why))
    typed = [f"{key} ({why})" for key, (origin, why) in found.items() if origin == CLI]
    if typed:
        raise ValueError(f"no effect in this run: {'; '.join(typed)}. Leave it out")
    shipped: dict[str, dict[str, list[str]]] = {}
    for key, (origin, why) in found.items():
        if origin.startswith(SHIPPED_FILES):
            shipped.setdefault(origin, {}).setdefault(why, []).append(key)
        else:
            warn(f"{key}{f' (from {origin})' if origin else ''} has no effect in this run: {why}")
    for origin, by_reason in shipped.items():
        told = "; ".join(f"{', '.join(found)} ({why})" for why, found in by_reason.items())
        warn(f"of {origin}, no effect in this run: {told}")
