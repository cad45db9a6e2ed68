"""What a run will do and what it takes, before it starts: its plan in words, its memory, and `rlvr plan` for clusters.

    plan(assemble(config))                  # the lines that `rlvr train` prints first; ValueError if it could not train
    describe_capacity(config, cluster)      # memory, time and bottleneck on many devices, each figure with its formula

Nothing is computed on a device and nothing is downloaded.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlvr.algorithms.capabilities import check_supported
from rlvr.algorithms.losses import LOSSES
from rlvr.algorithms.losses.custom import FunctionLoss
from rlvr.algorithms.optimizers import AdamW
from rlvr.algorithms.specs import Algorithm
from rlvr.algorithms.task_teachers import describe_missing
from rlvr.algorithms.terms.importance import Importance
from rlvr.clients.custom_loss import try_custom_loss
from rlvr.clients.registry import resolve_client
from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.config.schema import RunConfig
from rlvr.config.validate import load_settings
from rlvr.core.cpu_budget import VARIABLE
from rlvr.core.machine import free_memory
from rlvr.core.registry import show_names
from rlvr.core.types import Task
from rlvr.engine.capacity import (
    FRAGMENTATION,
    KNOWN_MODELS,
    LIBRARIES,
    ClusterOptions,
    PlanLine,
    StepEstimate,
    StepWork,
    count_needed,
    estimate_step,
    find_known_config,
    read_planned_shape,
)
from rlvr.engine.engine_options import EngineLimits
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
from rlvr.envs.long_prompts import list_train
from rlvr.runs.assembly import Assembly, has_interim, uses_device
from rlvr.runs.run_tasks import check_completions, check_demonstrations, count_tasks
from rlvr.runs.weights import find_teacher_model
from rlvr.training.compatibility import check_compatibility, check_roles, check_temperatures
from rlvr.training.evaluate import heldout_split

LOOKED_AT = 256  # training tasks, to see which algorithm they have
PROMPT = 512  # tokens, where `training.max_prompt_tokens` does not say


def plan(assembly: Assembly) -> dict[str, str]:
    """Describe the run in words and numbers, as printed before it starts; ValueError if it could not train."""
    config, source, algorithm = assembly.config, assembly.source, assembly.algorithm
    if not source.levels:
        raise ValueError(f"env.name={config.env.name} is a test set without training tasks: use it with rlvr evaluate")
    t, e = config.training, config.evaluation
    _check_optimizers(assembly)
    check_demonstrations(config, source)
    if t.mode == "rlvr":
        for one in algorithm.every:
            check_compatibility(one, config.rollout, t)
            check_roles(one, source)
            check_supported(one, assembly.spec.capabilities)
        check_temperatures(algorithm, config.rollout, t, assembly.spec.capabilities)
        check_teacher(assembly)
        for term in (term for one in algorithm.every for term in one.terms):
            term.check_turns(source.max_turns)
        is_own = not LOSSES.is_built_in(algorithm.loss.name) and not algorithm.loss.needs_whole_step
        if isinstance(algorithm.loss, FunctionLoss) or (is_own and assembly.spec.capabilities.is_remote):
            try_custom_loss(algorithm)
    check_completions(config, source)
    completions = t.prompts_per_step * t.group_size
    updates = t.ppo_epochs * t.num_substeps
    tokens = t.steps * completions * source.max_turns * (config.rollout.max_tokens or 0)
    until = f", or until {100 * t.until:g}% of held-out completions pass" if t.until and e.every else ""
    if t.patience and e.every:
        until += f", or until {t.patience} interim evaluations in a row are no new best"
    waves = f", up to {1 + t.dynamic_sampling} waves of prompts" if t.dynamic_sampling else ""
    lines = {
        "model": assembly.spec.describe(assembly.request),
        **({"memory": memory} if (memory := describe_memory(config)) else {}),
        "environment": config.env.name + (f", levels {', '.join(source.levels)}" if any(source.levels) else ""),
        **({"data": data} if (data := source.describe_data()) else {}),
        "reward": assembly.reward.formula,
    }
    if config.sft.steps:
        goal = f", or until {100 * config.sft.until:g}% of held-out completions pass" if config.sft.until else ""
        if config.sft.until and config.sft.until_each:
            goal += f" (of each kind of task {100 * config.sft.until_each:g}%)"
        lines["fine-tuning"] = (
            f"{config.sft.steps} steps x {config.sft.batch_size} demonstrations{goal}; {config.sft.optimizer.variant}"
        )
    if servers := config.sampler_options.servers:
        importance = algorithm.term(Importance)
        correction = importance.describe() if importance else "no importance correction"
        lines["sampler"] = (
            f"{config.sampler_options.title} at {', '.join(servers)}; sampler against trainer: {correction}"
        )
    share = assembly.core_shares
    if share.concurrent or (share.given_by == VARIABLE and assembly.spec.capabilities.runs_in_process):
        lines["cores"] = str(share)
    if t.mode == "rlvr":
        lines |= {
            "algorithm": _describe_algorithm(algorithm),
            **_describe_others(assembly),
            **(describe_teachers(assembly) if algorithm.needs_teacher else {}),
            "training": f"{t.steps} steps x {t.prompts_per_step} prompts x {t.group_size} completions = "
            f"{t.steps * completions:,} completions, at most {tokens:,} tokens"
            f"{f' in {source.max_turns} turns' if source.max_turns > 1 else ''}{waves}{until}",
            "updates": f"{updates} a step, {t.steps * updates} in all; {t.optimizer.variant}",
        }
        if algorithm.advantage.takes_critic:
            kind = (
                "a second adapter" if config.model.lora or config.client_options.trains_adapters else "a second model"
            )
            alone = f", alone for {t.critic.warmup_steps} steps" if t.critic.warmup_steps else ""
            lines["critic"] = f"{kind}{alone}; {t.critic.optimizer.variant}"
        if tasks := count_tasks(source):
            lines["epochs"] = f"{t.steps * t.prompts_per_step / tasks:.3g} over {tasks:,} training tasks"
    heldout, interim = heldout_split(source, e, has_interim=has_interim(config))
    # Tasks are set aside even where `sft.steps=0` leaves no interim evaluation: runs with and without it compare.
    has_others = ((config.sft.steps and config.sft.until) or e.every) and interim and interim != heldout
    others = f"; {len(interim)} others for interim evaluations" if has_others else ""
    tasks = f"{len(heldout)} held-out tasks"
    if len(heldout) < e.tasks:
        tasks += f" (all there are; evaluation.tasks={e.tasks:,})"
    lines["evaluation"] = f"{tasks} x {e.samples} completions, before and after{others}"
    return {name: show_names(line) for name, line in lines.items()}


def _check_optimizers(assembly: Assembly) -> None:
    """ValueError if a phase of the run needs what the optimizer of its client does not have."""
    config = assembly.config
    used = {"sft": config.sft} if config.sft.steps else {}
    if config.training.mode == "rlvr":
        used |= {"training": config.training}
        used |= {"training.critic": config.training.critic} if assembly.algorithm.advantage.takes_critic else {}
    client = assembly.spec.capabilities
    optimizers = {f"{name}.optimizer.name": phase.optimizer.variant for name, phase in used.items()}
    clipped = [f"{name}.optimizer.grad_clip=0" for name, phase in used.items() if phase.optimizer.grad_clip]
    if clipped and not client.clips_gradients:
        raise ValueError(
            f"client={config.client.name} does not bound the norm of a gradient; give {' and '.join(clipped)}"
        )
    if (minibatches := config.training.order.minibatches) > 1 and not client.accumulates:
        raise ValueError(
            f"training.num_minibatches={minibatches}: client={config.client.name} takes one "
            "forward-backward call for each optimizer step; leave it out"
        )
    if config.training.mode == "rlvr" and not client.features.issuperset(config.training.order.needs):
        raise ValueError(
            f"training.schedule={config.training.order.name} is not supported by client={config.client.name}: it needs "
            f"{' and '.join(one.value for one in config.training.order.needs)}; use schedule=sync, or client=local"
        )
    of_client = {key: one for key, one in optimizers.items() if not client.features.issuperset(one.needs)}
    of_weights = {key: one for key, one in optimizers.items() if config.model.lora and one.needs_matrices}
    for wrong in filter(None, (of_client, of_weights)):
        (key, first), *_ = wrong.items()
        instead = " and ".join(f"{other}={AdamW.name}" for other in wrong)
        if wrong is of_client:
            raise ValueError(
                f"{key}={first.name} is not supported by client={config.client.name}, which has AdamW; use {instead}"
            )
        raise ValueError(
            f"{key}={first.name} with model.lora: {first.needs_matrices}; use {instead}, or train all weights (leave "
            "model.lora out)"
        )


def _describe_algorithm(algorithm: Algorithm) -> str:
    return (
        f"{algorithm.name}: {algorithm.advantage.name}, loss {algorithm.loss.name}{algorithm.loss.remark(algorithm)}, "
        f"{algorithm.reduction}" + "".join(f", {text}" for term in algorithm.terms if (text := term.describe()))
    )


def _describe_others(assembly: Assembly) -> dict[str, str]:
    """The algorithms for some tasks; ValueError if no task that was looked at has the key."""
    algorithm = assembly.algorithm
    if not algorithm.for_tasks:
        return {}
    tasks = _look_at_tasks(assembly)
    by_level, levels = algorithm.task_key == "level", assembly.source.levels
    if unknown := [value for value, _ in algorithm.for_tasks if by_level and value not in levels]:
        raise ValueError(
            f"algorithm.for_tasks.{unknown[0]}: no task has that level; levels: {', '.join(levels)} (or choose another "
            "algorithm.task_key)"
        )
    has_key = by_level or any(algorithm.task_key in task.meta for task in tasks)
    found = [algorithm.of_task(task) for task in tasks]
    lines = {
        f"  {algorithm.task_key}={value}": f"{_describe_algorithm(one)}; {sum(other is one for other in found)} of "
        f"{len(tasks)} tasks that were looked at"
        for value, one in algorithm.for_tasks
    }
    if not has_key:
        raise ValueError(
            f"algorithm.task_key={algorithm.task_key}: none of {len(tasks)} tasks has that key in its meta "
            f"(the first has {', '.join(sorted(tasks[0].meta)) or 'none'}); choose one that tasks have, or `level`"
        )
    return lines


def _look_at_tasks(assembly: Assembly) -> list[Task]:
    """The first training tasks of each level."""
    source, levels = assembly.source, assembly.source.levels
    share = max(1, LOOKED_AT // len(levels))
    return [source.train(assembly.config.seed, i, level) for level in levels for i in range(share)]


def describe_teachers(assembly: Assembly) -> dict[str, str]:
    """The teachers with their memory; ValueError if a task that learns from one has none.

    Of generated tasks the first are looked at, of others all.
    """
    config, options, algorithm = assembly.config, assembly.config.teacher, assembly.algorithm
    models = {one.weights_source: one.model for one in options.every if one.model}
    memory = f"; in this process {describe_teacher_memory(config, list(models.values()))}" if models else ""
    if not options.for_tasks:
        return {"teacher": f"{options}{memory}"}
    tasks = list_train(assembly.source) if assembly.source.size else _look_at_tasks(assembly)
    counts = Counter(task.value_of(options.task_key) for task in tasks if algorithm.of_task(task).needs_teacher)
    lines = {"teacher": f"{len({one.weights_source for one in options.every})} teachers{memory}"}
    for value, one in options.of_values.items():
        lines[f"  {options.task_key}={value}"] = f"{one}; {counts.pop(value, 0):,} of {len(tasks):,} tasks"
    if options.is_given:
        return lines | {f"  other {options.task_key}": f"{options}; {counts.total():,} of {len(tasks):,} tasks"}
    for task in tasks:
        if algorithm.of_task(task).needs_teacher and task.value_of(options.task_key) in counts:
            raise ValueError(describe_missing(task, options.task_key, list(options.of_values)))
    return lines


def describe_teacher_memory(config: RunConfig, models: Sequence[str]) -> str:
    """What the weights of teachers take beside the policy, each once, in words."""
    if config.model.dtype == "auto":
        dtype = "bfloat16" if uses_device(config) else "float32"
    else:
        dtype = config.model.dtype
    shapes = [find_shape(find_teacher_model(model)) for model in models]
    known = [shape.parameters * DTYPE_BYTES[dtype] for shape in shapes if shape is not None]
    unknown = f", and {len(shapes) - len(known)} of unknown size" if len(known) < len(shapes) else ""
    return f"about {sum(known) / GIB:.2g} GiB of weights in {dtype} beside the policy{unknown}"


def check_teacher(assembly: Assembly) -> None:
    """ValueError if the run needs a teacher that it does not name, or that cannot score its completions."""
    if not assembly.has_teacher:
        return
    config = assembly.config
    options, teacher = config.teacher, next(t for one in assembly.algorithm.every for t in one.terms if t.needs_teacher)
    if not options.every:
        raise ValueError(
            f"{teacher.key(teacher.switch)}={teacher.strength:g} without a teacher; give teacher.model (a run, a model "
            "folder or a hub name), teacher.url and teacher.name (an endpoint), or teacher.for_tasks (several)"
        )
    if any(one.url for one in options.every) and (
        config.rollout.temperature != 1 or config.training.temperature_end is not None
    ):
        raise ValueError(
            f"rollout.temperature={config.rollout.temperature:g} with teacher.url: an endpoint scores a prompt at "
            "temperature 1; use rollout.temperature=1 without training.temperature_end, or a teacher in this process "
            "(teacher.model)"
        )


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
        optimizer=training.optimizer.variant,
        copies=config.algorithm.resolve().needs_reference + bool(training.order.max_lag),
        critic=config.algorithm.resolve().advantage.takes_critic,
        evaluated_rows=config.evaluation.tasks * config.evaluation.samples,
    )
    if config.client_options.shares_weights:
        return describe_ranks(estimate, shape, config, DTYPE_BYTES[dtype])
    cache, state = estimate.cache / GIB, (estimate.persistent - estimate.cache) / GIB
    total = estimate.total * FRAGMENTATION + LIBRARIES
    needed, free, where = total, free_memory(), "here"
    if uses_device(config):  # where the KV cache gets what is left
        needed, free, where = total - estimate.cache * FRAGMENTATION, _free_on_gpu(config), "on the GPU"
    short = ""
    if free is not None and needed > free:
        short = f"; only {free / GIB:.1f} GiB are free {where}: {_say_remedies(config, prompt)}"
    return (
        f"about {total / GIB:.1f} GiB in {dtype}, computed for prompts of up to {prompt} tokens: weights and optimizer "
        f"{state:.1f}, KV cache {cache:.1f}, a pass {estimate.total / GIB - state - cache:.1f}, libraries and what the "
        f"allocator loses {(total - estimate.total) / GIB:.1f}{short}"
    )


def _free_on_gpu(config: RunConfig) -> int | None:
    """The free memory of the run's GPU; None if torch sees no such GPU here."""
    if find_spec("torch") is None:
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    from rlvr.engine.kv_cache import free_bytes
    from rlvr.engine.model_loading import pick_device

    return free_bytes(pick_device(config.model.device))


def _say_remedies(config: RunConfig, prompt: int) -> str:
    """What takes less memory, first what changes no result."""
    return (
        f"a smaller engine.micro_tokens (now {config.engine.micro_tokens:,}), the length of the longest prompt as "
        f"training.max_prompt_tokens (now {prompt} are assumed), fewer training.prompts_per_step, or a smaller model"
    )


def describe_ranks(estimate: MemoryEstimate, shape: ModelShape, config: RunConfig, size: int) -> str:
    """The memory estimate for a client of several processes: what each rank and the driver hold."""
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
    options = load_settings(PlanOptions, ours)
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
        optimizer=training.optimizer.variant,
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
