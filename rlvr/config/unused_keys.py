"""Finds keys that have no effect in a run: an error if typed on the command line, one warning if set in a file.

`drop_unused` also removes those that the parts below would refuse, when they came from a file that other runs may share
(clip bounds of a file under an algorithm that does not clip, the weights of another reward).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from rlvr.algorithms.advantages import ADVANTAGES
from rlvr.algorithms.losses import LOSSES
from rlvr.algorithms.optimizers import OPTIMIZERS
from rlvr.algorithms.registry import find_algorithm
from rlvr.algorithms.terms import TERMS
from rlvr.clients.registry import CLIENTS
from rlvr.clients.samplers import SAMPLERS
from rlvr.config.choices import get_at, list_given, set_at
from rlvr.config.compose import CLI, SHIPPED_FILES, LoadedConfig
from rlvr.config.schema import RunConfig
from rlvr.core.variants import Variants
from rlvr.envs.environment_references import is_reference
from rlvr.envs.registry import known_environments
from rlvr.envs.registry import options_of as environment_options
from rlvr.reward import known_rewards, options_of
from rlvr.training.curriculum import CURRICULA
from rlvr.training.schedules import SCHEDULES
from rlvr.training.training_options import TrainingOptions

UnusedKeys = list[tuple[str, str]]
_ENVIRONMENT_REWARD = "env.kwargs.reward"


def drop_target_kl(values: Mapping[str, Any]) -> tuple[dict[str, Any], UnusedKeys]:
    """Remove a `training.target_kl` without effect: a step of one update cannot stop early."""
    training = values.get("training")
    if not isinstance(training, Mapping) or not training.get("target_kl"):
        return dict(values), []
    defaults = {f.name: f.default for f in fields(TrainingOptions)}
    if any(training.get(key, defaults[key]) != 1 for key in ("ppo_epochs", "num_substeps")):
        return dict(values), []
    others = {key: value for key, value in training.items() if key != "target_kl"}
    return {**values, "training": others}, [("training.target_kl", "there is one update a step")]


def drop_unused(config: RunConfig) -> tuple[RunConfig, UnusedKeys]:
    """Remove what the algorithm and the reward of the config cannot use."""
    idle: UnusedKeys = []
    given, spec = config.algorithm, find_algorithm(config.algorithm.name)
    dropped: dict[str, str] = {}
    for part, variants in (("loss", LOSSES), ("advantage", ADVANTAGES)):
        options = getattr(given, part)
        chosen = variants.find(options.name) if options.name else type(getattr(spec, part))
        for option in list_given(options):
            key, taken = f"algorithm.{part}.{option}", {one.name for one in fields(chosen)}
            if option == "kwargs":
                if variants.is_built_in(chosen.name):
                    dropped[key] = f"the {part} {chosen.name} has its options beside its name"
            elif option not in (*taken, "name"):
                takers = ", ".join(variants.list_takers(option))
                dropped[key] = f"the {part} {chosen.name} has no {option}, an option of {takers}"
    if config.training.completions == "given" and given.advantage.threshold is not None:
        why = "training.completions=given: the tasks say which completion is preferred"
        dropped.setdefault("algorithm.advantage.threshold", why)
    idle += dropped.items()
    for key in dropped:
        config = set_at(config, key, None)
    if why := _without_dynamic_sampling(config):
        idle.append(("training.dynamic_sampling", why))
        config = replace(config, training=replace(config.training, dynamic_sampling=0))
    if config.training.order.minibatches > 1 and given.reduction is None and spec.reduction == "token_mean":
        # The tokens of a batch that is still arriving cannot be counted, so the denominator is constant.
        config = replace(config, algorithm=replace(config.algorithm, reduction="constant"))
    if _needs_importance_cap(config):
        config = set_at(config, "algorithm.terms.importance.cap", config.sampler_options.correction)
    if others := _kwargs_of_others(config.reward.type, config.reward.kwargs, options_of, known_rewards()):
        idle += [(f"reward.kwargs.{key}", f"the reward {config.reward.type} has no such option") for key in others]
        config = replace(config, reward=replace(config.reward, kwargs=_without(config.reward.kwargs, others)))
    environment = config.env.name
    if (environment in known_environments() or is_reference(environment)) and (
        others := _kwargs_of_others(environment, config.env.kwargs, environment_options, known_environments())
    ):
        takes = ", ".join(sorted(environment_options(environment) or ()))
        idle += [
            (f"env.kwargs.{key}", f"the environment {environment} has no such option; it takes: {takes}")
            for key in others
        ]
        config = replace(config, env=replace(config.env, kwargs=_without(config.env.kwargs, others)))
    return config, idle


def _needs_importance_cap(config: RunConfig) -> bool:
    """Whether another engine samples than trains, and the algorithm says nothing about the difference."""
    training = config.training
    if not config.sampler_options.correction or training.mode != "rlvr":
        return False
    if training.order.minibatches > 1 and training.num_substeps > 1:  # `rlvr.training.compatibility` refuses both
        return False
    algorithm = config.algorithm.resolve()
    return not any(term.bounds_ratio for term in algorithm.terms) and not algorithm.loss.compares_completions


def _without_dynamic_sampling(config: RunConfig) -> str:
    """Why groups without signal cannot be replaced in this run, '' if they can."""
    if not config.training.dynamic_sampling:
        return ""
    if config.training.order.samples_ahead:
        return (
            f"under training.schedule={config.training.order.name} the next prompts are drawn before a batch is sampled"
        )
    algorithm = config.algorithm.resolve()
    if algorithm.has_group_baseline and algorithm.drop_equal_groups:
        return ""
    return f"{algorithm.name} with {algorithm.advantage.name} keeps every group"


def _kwargs_of_others(
    name: str | None,
    kwargs: Mapping[str, Any],
    options: Callable[[str], set[str] | None],
    registered: Iterable[str],
) -> list[str]:
    """Options that another registered one takes and this one does not. (Options that none takes are an error.)"""
    if name is None or not kwargs or (mine := options(name)) is None:
        return []
    others = set[str]().union(*(options(other) or set[str]() for other in registered))
    return [key for key in kwargs if key not in mine and key in others]


def _without(kwargs: Mapping[str, Any], dropped: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key not in dropped}


def find_unused(config: RunConfig) -> UnusedKeys:
    """Keys that cannot change what this config does, each with the reason."""
    idle = [("rollout.seed", "all random draws of a run depend on seed")]
    if config.reward.type:
        idle.append((_ENVIRONMENT_REWARD, f"reward.type={config.reward.type} is given"))
    idle += config.client_options.unread().items()
    if config.client_options.trains_adapters and config.model.start_from:
        idle.append(("model.lora", "the weights of model.start_from bring their adapter"))
    idle += list_options_of_others("client", CLIENTS, config.client.name, shares=False)
    idle += list_options_of_others("sampler", SAMPLERS, config.sampler.name)
    if config.sft.steps == 0:
        decided = ("batch_size", "until", "until_each", "optimizer", "curriculum")
        idle += [(f"sft.{key}", "sft.steps is 0") for key in decided]
    phases = {"sft": config.sft, "training": config.training, "training.critic": config.training.critic}
    for phase, options in phases.items():
        idle += list_options_of_others(f"{phase}.optimizer", OPTIMIZERS, options.optimizer.name)
    idle += list_options_of_others("curriculum", CURRICULA, config.curriculum.by, "by")
    if config.evaluation.every == 0:
        by_interim = ("training.until", "training.patience", "run.keep_best", "evaluation.report")
        idle += [(key, "evaluation.every is 0: there is no interim evaluation") for key in by_interim]
    if config.sft.until == 0:
        idle += [(f"sft.{key}", "sft.until is 0") for key in ("check_every", "until_each")]
        if config.evaluation.every == 0:
            idle += [
                (f"evaluation.{key}", "neither evaluation.every nor sft.until needs an interim evaluation")
                for key in ("interim_tasks", "interim_samples")
            ]
    idle += config.tracking.unread().items()
    schedule = config.training.order
    idle += list_options_of_others("training.schedule", SCHEDULES, schedule.name)
    idle += [(f"training.schedule.{option}", why) for option, why in schedule.unread().items()]
    if config.training.completions == "given":
        keys = ("training.dynamic_sampling", "algorithm.mask_truncated", "rollout.top_p")
        keys += ("curriculum.replay", "curriculum.hint_step")
        idle += [(key, "training.completions=given: no completion is sampled to learn from") for key in keys]
    if config.training.is_control:
        stops = ("training.until", "training.patience")
        idle += [(key, "a control run must not stop by the verifier's verdicts") for key in stops]
        by_verdicts = (
            "curriculum.replay",
            *(("curriculum.by",) if config.curriculum.variant.learns_from_verdicts else ()),
        )
        idle += [(key, "a control run must not choose tasks by the verifier's verdicts") for key in by_verdicts]
    if config.training.mode == "sft":
        used = ("mode", "error_budget", "max_prompt_tokens", "long_prompts")  # of evaluation, and of all prompts
        learned = [f"training.{f.name}" for f in fields(TrainingOptions) if f.name not in used]
        sections = ("algorithm", "teacher", "curriculum")
        idle += [
            (key, "training.mode is sft, which reads sft.*")
            for key in (*learned, *sections, "evaluation.every", "evaluation.report", "run.keep_best")
        ]
        return idle
    if not (advantage := config.algorithm.resolve().advantage).takes_critic:
        idle.append(("training.critic", f"the advantage {advantage.name} takes no critic"))
    return idle + _unused_algorithm_keys(config)


def list_options_of_others(
    section: str, variants: Variants[Any], chosen: str, tag: str = "", shares: bool = True
) -> UnusedKeys:
    """The options of a section that its chosen variant does not have; `tag` is the key of the variant's name.

    A variant from outside the package has its options in `kwargs`; where it `shares`, those that others have as well
    may stand beside its name.
    """
    named = f"{section}.{tag}" if tag else section
    own = (
        {option.name for option in fields(variants.find(chosen))}
        if shares or variants.is_built_in(chosen)
        else set[str]()
    )
    others = dict.fromkeys(
        option.name for one in variants.classes() for option in fields(one) if option.name not in own
    )
    unused = [
        (
            f"{section}.{option}",
            f"{named}={chosen} has no {option}, an option of {', '.join(variants.list_takers(option))}",
        )
        for option in others
    ]
    if variants.is_built_in(chosen):
        unused.append((f"{section}.kwargs", f"{named}={chosen} has its options beside its name"))
    return unused


def _unused_algorithm_keys(config: RunConfig) -> UnusedKeys:
    spec = config.algorithm.resolve()
    idle: UnusedKeys = []
    for term in TERMS.classes():
        if spec.term(term) is None:
            key = f"algorithm.{term.place()}"
            switch = get_at(config, f"{key}.{term.switch}")
            why = f"{term.key(term.switch)} is {'not given' if switch is None else switch}"
            idle += [(f"{key}.{option.name}", why) for option in fields(term) if option.name != term.switch]
    if not any(term.is_known_when_judged for term in spec.terms):
        idle.append(("algorithm.equal_by", "algorithm.overlong_buffer is not given"))
    elif not spec.drop_equal_groups:
        idle.append(("algorithm.equal_by", "algorithm.drop_equal_groups is false"))
    # What a spec can do without: a file may say the default aloud.
    idle = [(key, why) for key, why in idle if get_at(config, key) is not None]
    if not config.algorithm.for_tasks:
        idle.append(("algorithm.task_key", "algorithm.for_tasks is empty"))
    if not config.teacher.for_tasks:
        idle.append(("teacher.task_key", "teacher.for_tasks is empty"))
    return idle if spec.needs_teacher else [*idle, ("teacher", "algorithm.teacher_coef is 0")]


def report_unused(
    idle: UnusedKeys, loaded: LoadedConfig, same: Callable[[str], bool], warn: Callable[[str], None]
) -> None:
    """Raise ValueError for unused keys of the command line; warn of each key of a file, once for a shipped file.

    A key for which `same` is true has its default value and is not reported: `until=0` turns off what a file turned on.
    """
    reasons: dict[str, str] = {}
    for key, why in idle:
        reasons.setdefault(key, why)
    unused: dict[str, tuple[str, str]] = dict(loaded.unused)
    for key, why in reasons.items():
        for given, origin in loaded.origin.items():
            if not (given == key or given.startswith((f"{key}.", f"{key}["))) or same(given):
                continue
            if key == "tracking.experiment" and loaded.typed.get(given) == "experiment_name" and origin != CLI:
                continue  # other values may contain this name
            if key == _ENVIRONMENT_REWARD and origin.startswith(SHIPPED_FILES):
                continue  # it is that file's default, which reward.type is there to replace
            named = loaded.typed.get(given, given)
            if origin == CLI:
                leaf = not any(other.startswith(f"{given}.") for other in loaded.origin)
                if leaf:
                    unused[named] = (origin, why)
            else:
                section = key if given not in loaded.typed else named
                unused.setdefault(section, (origin, why))
    typed = [f"{key} ({why})" for key, (origin, why) in unused.items() if origin == CLI]
    if typed:
        raise ValueError(f"no effect in this run: {'; '.join(typed)}. Leave it out")
    shipped: dict[str, dict[str, list[str]]] = {}
    for key, (origin, why) in unused.items():
        if origin.startswith(SHIPPED_FILES):
            shipped.setdefault(origin, {}).setdefault(why, []).append(key)
        else:
            warn(f"{key}{f' (from {origin})' if origin else ''} has no effect in this run: {why}")
    for origin, by_reason in shipped.items():
        listed = "; ".join(f"{', '.join(keys)} ({why})" for why, keys in by_reason.items())
        warn(f"of {origin}, no effect in this run: {listed}")
