"""From a config to the teacher of on-policy distillation: a model loaded beside the policy, or an endpoint.

Exercised by `python -m pytest tests/test_teacher.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlvr.clients.client_options import LocalOptions, ModelOptions
from rlvr.clients.local_engine import build_sampler, is_model
from rlvr.clients.sampler_options import TrainerSampler
from rlvr.clients.teacher import EndpointTeacher, check_same_tokens
from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.config.schema import RunConfig
from rlvr.core.protocols import TaskSource
from rlvr.envs import resolve_environment
from rlvr.runs.build_client import build_client, client_request, core_shares, find_base
from rlvr.training.best_checkpoint import resolve_best
from rlvr.training.initial_weights import newest_weights
from rlvr.training.journal import weights_path


def has_teacher(config: RunConfig) -> bool:
    """Whether the run learns from a teacher."""
    return config.training.mode == "rlvr" and config.algorithm.resolve().has_teacher


def check_teacher(config: RunConfig) -> None:
    """ValueError if the run needs a teacher that it does not name, or that cannot score its completions."""
    if not has_teacher(config):
        return
    options, teacher = config.teacher, next(t for t in config.algorithm.resolve().terms if t.teaches)
    if not (options.model or options.url):
        raise ValueError(
            f"{teacher.key(teacher.switch)}={teacher.strength:g} without a teacher; give teacher.model (a run, a model "
            "folder or a hub name), or teacher.url and teacher.name (an endpoint)"
        )
    if options.url and (config.rollout.temperature != 1 or config.training.temperature_end is not None):
        raise ValueError(
            f"rollout.temperature={config.rollout.temperature:g} with teacher.url: an endpoint scores a prompt at "
            "temperature 1; use rollout.temperature=1 without training.temperature_end, or a teacher in this process "
            "(teacher.model)"
        )


def build_teacher(config: RunConfig, source: TaskSource, tokenizer: Any, say: Callable[[str], None]) -> Any:
    """The teacher, checked: ValueError if its tokenizer is not the policy's, or it gives no log-probs."""
    options, model = config.teacher, config.model
    named = ((key, getattr(model, key)) for key in ("start_from", "name", "tokenizer"))
    policy = next((f"model.{key}={value}" for key, value in named if value), f"client={config.client.name}")
    say(f"loading the teacher {options}" if options.model else f"the teacher is {options}")
    if options.url:
        teacher = EndpointTeacher(options)
        try:
            teacher.check(tokenizer, policy)
        except BaseException:
            teacher.close()
            raise
        return teacher
    assert options.model is not None
    sampler = _load(options.model, config, source)
    check_same_tokens(tokenizer, sampler.get_tokenizer(), options.model, policy)
    return sampler


def _load(given: str, config: RunConfig, source: TaskSource) -> Any:
    """A sampler of a run's weights, a checkpoint's, a model's or an adapter's."""
    place = resolve_best(Path(given).expanduser())
    run = place.parent.parent if place.parent.name == "checkpoints" else place
    if (run / "resolved.yaml").exists():
        weights = newest_weights(given, "teacher.model") if place == run else place
        begun = build_config(load(None, str(run / "resolved.yaml"), []))
        begun = replace(begun, model=replace(begun.model, device=config.model.device))
        tasks = resolve_environment(begun.env.name, **begun.env.kwargs)
        client = build_client(begun, tasks, run / "checkpoints", _ignore, _ignore, fresh=False)
        return client.create_sampling_client(weights_path(weights))
    model = ModelOptions(name=given, device=config.model.device, dtype=config.model.dtype)
    adapter = place if (place / "adapter_config.json").exists() and not is_model(place) else None
    if adapter is not None:
        base = find_base(adapter, None)
        own = str(adapter) if (adapter / "tokenizer_config.json").exists() else None
        model = replace(model, name=base, tokenizer=own)
    elif place.is_dir():
        model = replace(model, name=str(place))
    teacher = replace(
        config,
        client=replace(config.client, name=LocalOptions.name),
        model=model,
        sampler=replace(config.sampler, name=TrainerSampler.name),
    )
    request = client_request(teacher, source)
    return build_sampler(replace(request, cores=core_shares(teacher, source), warn=_ignore), adapter)


def _ignore(text: str) -> None:
    """Take a message that is not shown."""
