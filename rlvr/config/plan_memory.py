"""The memory of a run, for its plan: the estimate of `rlvr.engine.memory` where the model's config is on this machine.

Nothing is downloaded. Exercised by `python -m pytest tests/test_memory.py`.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlvr.clients.registry import resolve_client
from rlvr.config.build_client import uses_device
from rlvr.config.schema import RunConfig
from rlvr.core.machine import free_memory
from rlvr.engine.gguf_files import open_gguf
from rlvr.engine.memory import (
    DTYPE_BYTES,
    GIB,
    MemoryEstimate,
    ModelShape,
    count_gathered,
    estimate_memory,
    read_shape,
)

PROMPT = 512  # tokens, where `training.max_prompt_tokens` does not say


def find_shape(name: str) -> ModelShape | None:
    """The shape of a model in a folder, or of a hub's model that was downloaded before; None if it is not known."""
    config = find_config(name)
    return None if config is None else read_shape(config)


def find_config(name: str) -> dict[str, Any] | None:
    """The config of a model in a folder or GGUF file, or of a hub's model that was downloaded before; None if there is
    none."""
    file: object = Path(open_gguf(name)).expanduser() / "config.json"
    if not Path(str(file)).is_file() and find_spec("huggingface_hub"):
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            file = try_to_load_from_cache(name, "config.json")
        except HFValidationError:  # a path that names no model
            return None
    try:
        config = json.loads(Path(str(file)).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def describe_memory(config: RunConfig) -> str:
    """What the run holds at its peak, in words; empty if the client computes elsewhere or the model is not known."""
    model, training = config.model, config.training
    if not (model.name and resolve_client(config.client.name).capabilities.runs_in_process):
        return ""
    if (shape := find_shape(model.name)) is None:
        return ""
    if model.dtype not in ("auto", *DTYPE_BYTES):
        raise ValueError(f"model.dtype={model.dtype}: expected auto, {' or '.join(DTYPE_BYTES)}")
    dtype = model.dtype if model.dtype != "auto" else "bfloat16" if uses_device(config) else "float32"
    prompt = training.max_prompt_tokens or PROMPT
    estimate = estimate_memory(
        shape,
        config.engine,
        dtype=dtype,
        row_tokens=prompt + (config.rollout.max_tokens or 0),
        rows=training.prompts_per_step * training.group_size,
        lora=model.lora,
        optimizer=training.optimizer.chosen,
        copies=config.algorithm.resolve().needs_reference + bool(training.order.max_lag),
        critic=config.algorithm.resolve().advantage.takes_critic,
    )
    if config.client_options.shares_weights:
        return describe_ranks(estimate, shape, config, DTYPE_BYTES[dtype])
    cache, state = estimate.cache / GIB, (estimate.persistent - estimate.cache) / GIB
    free = free_memory()
    short = (
        f"; only {free / GIB:.1f} GiB are free here: {_say_remedies(config, prompt)}"
        if estimate.total > free and not uses_device(config)
        else ""
    )
    return (
        f"about {estimate.total / GIB:.1f} GiB in {dtype}, computed for prompts of up to {prompt} tokens: weights and "
        f"optimizer {state:.1f}, KV cache {cache:.1f}, a pass {estimate.total / GIB - state - cache:.1f}{short}"
    )


def _say_remedies(config: RunConfig, prompt: int) -> str:
    """What takes less memory, first what changes no result."""
    return (
        f"a smaller engine.micro_tokens (now {config.engine.micro_tokens:,}), the length of the longest prompt as "
        f"training.max_prompt_tokens (now {prompt} are assumed), fewer training.prompts_per_step, or a smaller model"
    )


def describe_ranks(estimate: MemoryEstimate, shape: ModelShape, config: RunConfig, size: int) -> str:
    """The same for a client of several processes: what a rank holds, and the driver."""
    cut, whole = estimate.weights, estimate.adapter
    of_trained = estimate.state + estimate.gradients
    cut, whole = (cut, whole + of_trained) if config.model.lora else (cut + of_trained, whole)
    gathered = size * count_gathered(shape, has_adapter=config.model.lora is not None)
    rank = cut / config.client_options.processes + whole + gathered + estimate.activations + estimate.logits
    samples = not config.sampler_options.servers
    driver = estimate.weights + estimate.adapter + estimate.copies + estimate.cache + estimate.sampling_tables
    sampler = f", the driver's sampler {driver / GIB:.1f}" if samples else ""
    parts = (cut / config.client_options.processes + whole) / GIB
    return (
        f"about {rank / GIB:.1f} GiB a rank, {parts:.1f} of it its part of weights, gradients and optimizer{sampler}; "
        "the libraries of each process add 0.4"
    )
