"""The text of `rlvr plan`: memory, time and bottleneck of a run on many devices, each figure with its formula.

Nothing is computed on a device and nothing is downloaded. Exercised by `python -m pytest tests/test_capacity.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.config.plan_memory import PROMPT, find_config
from rlvr.config.schema import RunConfig
from rlvr.config.validate import validate
from rlvr.engine.capacity import (
    ClusterOptions,
    PlanLine,
    StepEstimate,
    StepWork,
    count_needed,
    estimate_step,
    read_planned_shape,
)
from rlvr.engine.engine_options import EngineLimits
from rlvr.engine.known_models import KNOWN_MODELS, find_known_config
from rlvr.engine.memory import DTYPE_BYTES, GIB, ModelShape


@dataclass(frozen=True)
class PlanOptions:
    """What `rlvr plan` takes beside a run's settings."""

    cluster: ClusterOptions = field(default_factory=ClusterOptions)


def read_words(
    words: Sequence[str], config_name: str | None, config: str | None, warn: Callable[[str], None]
) -> tuple[RunConfig, ClusterOptions]:
    """Read the arguments: `cluster.KEY=VALUE` for the cluster, the others as settings of a run for `rlvr train`."""
    ours = [word for word in words if word.startswith("cluster.")]
    others = [word for word in words if word not in ours]
    loaded = load(None, None, ours)
    options = validate(loaded.values, PlanOptions, loaded.origin, loaded.typed)
    if config_name is None and config is None and not any(word.startswith("env") for word in others):
        others.append("env.name=dataset")  # a run has tasks; which ones says nothing about its capacity
    run = build_config(load(config_name, config, others), warn)
    return run, find_processes(run, options.cluster, [word.partition("=")[0] for word in ours])


def find_processes(run: RunConfig, cluster: ClusterOptions, typed: Sequence[str]) -> ClusterOptions:
    """Take `trainers` and `samplers` from the run's own settings; ValueError if `cluster.*` gives other numbers."""
    named: dict[str, tuple[str, int]] = {}
    if run.client_options.shares_weights:
        named["trainers"] = (run.client_options.key("ranks"), run.client_options.processes)
    if servers := run.sampler_options.servers:
        named["samplers"] = ("sampler.urls", len(servers))
    for name, (key, count) in named.items():
        if f"cluster.{name}" in typed and getattr(cluster, name) != count:
            raise ValueError(
                f"cluster.{name}={getattr(cluster, name)}, and {key} gives {count}: they are the same processes; leave "
                f"cluster.{name} out"
            )
    return replace(cluster, **{name: count for name, (_, count) in named.items()})


def find_planned_shape(config: RunConfig) -> ModelShape:
    """The shape of the run's model; ValueError if it is not known."""
    name = config.model.name or ""
    found = config.model.config or find_config(name) or find_known_config(name)
    shape = read_planned_shape(found) if found else None
    if shape is None:
        given = f"model.name={name}" if name else "model.config" if config.model.config else "model.name"
        built = " A config without vocab_size gets its vocabulary when a run begins: give model.config.vocab_size."
        raise ValueError(
            f"{given}: its shape is not known. Give a folder with a config.json of llama, mistral, "
            f"qwen2, qwen3 or qwen3_moe, or one of {', '.join(KNOWN_MODELS)}."
            f"{built if config.model.config and 'vocab_size' not in config.model.config else ''}"
        )
    return shape


def describe_work(config: RunConfig, cluster: ClusterOptions) -> StepWork:
    """The work of a step of this run; ValueError if a length is not known."""
    training, dtype = config.training, config.model.dtype
    if config.rollout.max_tokens is None:
        raise ValueError("rollout.max_tokens is missing: the plan needs the longest completion")
    longest = config.rollout.max_tokens
    if (mean := cluster.completion_tokens or longest) > longest:
        raise ValueError(f"cluster.completion_tokens={mean:g} is a mean, and rollout.max_tokens={longest} the longest")
    if dtype == "auto":
        dtype = "float32" if cluster.device == "cpu" else "bfloat16"
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"model.dtype={dtype}: expected auto, {' or '.join(DTYPE_BYTES)}")
    if dtype == "float32" and cluster.tflops is None:
        raise ValueError(
            "model.dtype=float32: the figures of known devices are bfloat16's; give cluster.tflops for float32"
        )
    return StepWork(
        prompts=training.prompts_per_step,
        group_size=training.group_size,
        prompt_tokens=cluster.prompt_tokens or training.max_prompt_tokens or PROMPT,
        completion_tokens=mean,
        longest_completion=longest,
        dtype=dtype,
        lora=config.model.lora,
        optimizer=training.optimizer.chosen,
        epochs=training.ppo_epochs,
        updates=training.ppo_epochs * training.num_substeps,
        references=int(any(term.needs_reference for term in config.algorithm.resolve().terms)),
        ahead=bool(training.order.max_lag),
    )


def describe_capacity(config: RunConfig, cluster: ClusterOptions) -> str:
    """The whole plan as text; ValueError if a setting that it needs is missing."""
    shape, work = find_planned_shape(config), describe_work(config, cluster)
    estimate = estimate_step(shape, work, config.engine, cluster)
    memory, flops, bandwidth = cluster.figures
    active = f"{shape.parameters / 1e9:.3g} B weights, {shape.active_weights / 1e9:.3g} B multiplied for a token"
    trained = f"an adapter of rank {work.lora.rank}" if work.lora else "all weights"
    alone = cluster.trainers == 1
    trainers = "1 trainer" if alone else f"{cluster.trainers} trainers"
    engines = f"{cluster.samplers} samplers of {cluster.tensor_parallel}" if cluster.samplers else (
        "which also samples" if alone else "one of which also samples"
    )  # fmt: skip
    lines = [
        f"model    {active}, {work.dtype}; {trained} trained",
        f"a step   {work.prompts} prompts x {work.group_size} completions; prompts of {work.prompt_tokens:,.4g} "
        f"tokens, completions of {work.completion_tokens:,.5g}, the longest {work.longest_completion:,.5g}",
        f"devices  {trainers}, {engines}; each device has {memory / GIB:.0f} GiB, {flops / 1e12:.3g} "
        f"TFLOP/s and {bandwidth / 1e9:,.4g} GB/s reached",
    ]
    trainer = "a trainer" if alone or cluster.samplers else "the trainer that also samples"
    for name, parts in ((trainer, estimate.trainer), ("a sampler", estimate.sampler)):
        if parts:
            needed = count_needed(parts)
            fit = "" if needed <= memory else ": DOES NOT FIT"
            head = f"{needed / GIB:.1f} of {memory / GIB:.0f} GiB, with 10 % for the allocator and 1 GiB{fit}"
            lines += ["", f"memory of {name}: {head}", *_list_parts(parts, GIB, "GiB")]
    total = sum(estimate.phases.values())
    order = "sampling and training at once, then transfer" if work.ahead and cluster.samplers else (
        "sampling (verification at the same time), then training, then transfer"
    )  # fmt: skip
    lines += ["", f"time of a step: {estimate.seconds:,.1f} s; {order}"]
    for phase, parts in estimate.details.items():
        lines += [f"  {phase} {estimate.phases[phase]:,.2f} s", *_list_parts(parts, 1.0, "s")]
    tokens = work.rows * (work.prompt_tokens + work.completion_tokens) / estimate.seconds
    share = estimate.phases[estimate.bottleneck] / total if total else 0.0
    return "\n".join(
        [
            *lines,
            "",
            f"{tokens:,.0f} tokens/s, {tokens / cluster.devices:,.0f} for each of {cluster.devices} devices; "
            f"{config.training.steps} steps take {config.training.steps * estimate.seconds / 3600:.3g} hours",
            f"bottleneck: {estimate.bottleneck}, {100 * share:.0f} % of the time of all parts. "
            f"{advise(estimate, work, cluster)}",
            *([advise_memory(estimate, config.engine, work, cluster)] if not estimate.fits(cluster) else []),
        ]
    )


def _list_parts(parts: Sequence[PlanLine], unit: float, word: str) -> list[str]:
    return [f"    {part.name:24} {part.value / unit:8.2f} {word:3}  {part.formula}" for part in parts if part.value]


# What makes the lines of a device's memory smaller, in the order in which to try it.
_SMALLER = {
    "engine.gradient_checkpointing=true": ("activations",),
    "a lower engine.micro_tokens": ("activations", "logits"),
    "model.lora": ("optimizer state", "gradients"),
    "more cluster.trainers": ("weights", "optimizer state", "gradients"),
    "cluster.samplers of their own": ("KV cache", "weights to sample"),
}


def advise_memory(estimate: StepEstimate, limits: EngineLimits, work: StepWork, cluster: ClusterOptions) -> str:
    """What would make a trainer that is too large fit: remedies for the lines of more than a tenth of its memory."""
    memory = cluster.figures.memory
    large = {line.name for line in estimate.trainer if line.value > memory / 10}
    useless = {"engine.gradient_checkpointing=true"} if limits.gradient_checkpointing else set[str]()
    useless |= {"model.lora"} if work.lora else set()
    remedies = [name for name, lines in _SMALLER.items() if large & set(lines) and name not in useless]
    if any(line.name == "weights to sample" and line.value > memory / 2 for line in estimate.trainer):
        remedies[-1] += " with cluster.tensor_parallel devices each"
    return f"It does not fit: {', '.join(remedies) or 'a smaller model'}."


def advise(estimate: StepEstimate, work: StepWork, cluster: ClusterOptions) -> str:
    """What would make the bottleneck shorter."""
    slowest = max(estimate.details[estimate.bottleneck], key=lambda part: part.value).name
    if estimate.bottleneck == "verification":
        return "More cores verify in less time: reward.kwargs.sandbox={ray: auto, workers: N}, cluster.verifiers=N."
    if estimate.bottleneck == "transfer":
        return "An adapter (model.lora) has about a hundredth of the weights; or send them to the samplers faster."
    if estimate.bottleneck == "training":
        if slowest == "waiting for the network":
            return (
                "Fewer, larger micro-batches gather the weights less often: engine.micro_tokens; or a faster network."
            )
        return "More cluster.trainers; an adapter (model.lora) saves a third of the work."
    if slowest == "longest completion":
        return "Few long completions hold up the step: a lower rollout.max_tokens, or training.schedule=completion."
    if estimate.rows_at_once < work.rows / cluster.engines:
        return (
            f"An engine samples {estimate.rows_at_once} completions at a time: more cluster.samplers, or more memory."
        )
    step = 1e3 * estimate.details["sampling"][1].value / work.completion_tokens
    if cluster.overhead_ms > step / 2:
        fewer = ", or fewer samplers" if cluster.samplers > 1 else ""
        return f"A decoding step takes as long with more completions: a larger training.group_size{fewer}."
    return "More cluster.samplers, or shorter completions."
