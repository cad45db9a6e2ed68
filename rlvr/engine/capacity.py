"""Estimate the memory, time and bottleneck of a step on many devices from a model's shape and a cluster's figures.

    cluster = ClusterOptions(device="h100", trainers=8, samplers=8)
    work = StepWork(prompts=64, group_size=8, prompt_tokens=512, completion_tokens=1024, longest_completion=2048)
    estimate = estimate_step(shape, work, EngineLimits(), cluster)
    estimate.seconds, estimate.bottleneck

Each figure comes with its formula as a `PlanLine`. Programs reach only a share of a device's peaks. The shares are
options, because they depend on kernels and lengths more than on any of these formulas. Left out: pipeline and expert
parallelism, several machines behind one network switch, and the start of a run. No torch here.
`KNOWN_MODELS` has the shapes of known models, of which no file needs to be on this machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rlvr.algorithms.optimizers import Optimizer
from rlvr.engine.engine_options import EngineLimits, LoraConfig
from rlvr.engine.memory import ADAMW, DTYPE_BYTES, FP32, GIB, ModelShape, count_gathered, estimate_memory, read_shape

# GiB of memory that a program sees, 10^12 FLOP/s of dense bfloat16, 10^9 bytes/s of memory, by the makers' data sheets.
DEVICES: Mapping[str, tuple[float, float, float]] = {
    "a100": (79.2, 312, 2039),
    "a6000": (47.5, 155, 768),
    "b200": (178.4, 2250, 8000),
    "h100": (79.2, 989, 3350),
    "h200": (139.8, 989, 4800),
    "l4": (22.5, 121, 300),
    "l40s": (44.5, 362, 864),
    "rtx4090": (23.5, 165, 1008),
}
FRAGMENTATION, LIBRARIES = 1.1, GIB  # the factor that an allocator loses, and the bytes of loaded libraries
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


class DeviceFigures(NamedTuple):
    """What one device holds and what programs reach on it: bytes of `memory`, FLOP/s, bytes/s of `bandwidth`."""

    memory: float
    flops: float
    bandwidth: float


@dataclass(frozen=True)
class ClusterOptions:
    """Where a planned run computes.

    `device` is a known GPU; `memory_gib`, `tflops` (of the model's dtype) and `memory_gb_s` replace its figures, or
    give those of any other device. `trainers` devices train, each with a share of the weights (FSDP). `samplers`
    engines sample, each on `tensor_parallel` devices; with 0, one of the trainers' devices samples before they train.
    A device sends `network_gb_s` to the others, at the same time as it computes unless it is a CPU (`device=cpu`).
    New weights reach all samplers at `transfer_gb_s`. `verifiers` cores take `verify_s` seconds for a completion.
    `prompt_tokens` and `completion_tokens` are means; without them the run's largest are taken. Training and prefill
    reach the share `compute_efficiency` of `tflops`. A decoding step reaches the share `memory_efficiency` of
    `memory_gb_s`, and takes `overhead_ms` more.
    """

    device: str = "h100"
    memory_gib: float | None = None
    tflops: float | None = None
    memory_gb_s: float | None = None
    trainers: int = 1
    samplers: int = 0
    tensor_parallel: int = 1
    network_gb_s: float = 50.0
    transfer_gb_s: float = 2.0
    verifiers: int = 8
    verify_s: float = 0.004
    prompt_tokens: float | None = None
    completion_tokens: float | None = None
    compute_efficiency: float = 0.3
    memory_efficiency: float = 0.6
    overhead_ms: float = 3.0

    def __post_init__(self) -> None:
        given = (self.memory_gib, self.tflops, self.memory_gb_s)
        if self.device not in DEVICES and None in given:
            raise ValueError(
                f"cluster.device={self.device!r}: known are {', '.join(DEVICES)}; for another one give "
                "cluster.memory_gib, cluster.tflops and cluster.memory_gb_s"
            )
        for name, least in (("trainers", 1), ("samplers", 0), ("tensor_parallel", 1), ("verifiers", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"cluster.{name}={getattr(self, name)}, expected at least {least}")
        if not self.samplers and self.tensor_parallel > 1:
            raise ValueError(
                f"cluster.tensor_parallel={self.tensor_parallel} has no effect without cluster.samplers: one device "
                "samples, beside the trainers; give cluster.samplers too"
            )
        for name in ("memory_gib", "tflops", "memory_gb_s", "network_gb_s", "transfer_gb_s", "prompt_tokens",
                     "completion_tokens", "compute_efficiency", "memory_efficiency"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"cluster.{name}={value}, expected a finite number above 0")
        for name in ("compute_efficiency", "memory_efficiency"):
            if getattr(self, name) > 1:
                raise ValueError(f"cluster.{name}={getattr(self, name)}, expected a share of at most 1")
        for name in ("verify_s", "overhead_ms"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"cluster.{name}={getattr(self, name)}, expected a finite number of at least 0")

    @property
    def figures(self) -> DeviceFigures:
        memory, tflops, bandwidth = DEVICES.get(self.device, (0.0, 0.0, 0.0))
        return DeviceFigures(
            (self.memory_gib or memory) * GIB,
            (self.tflops or tflops) * 1e12 * self.compute_efficiency,
            (self.memory_gb_s or bandwidth) * 1e9 * self.memory_efficiency,
        )

    @property
    def engines(self) -> int:
        return self.samplers or 1

    @property
    def devices(self) -> int:
        return self.trainers + self.samplers * self.tensor_parallel


@dataclass(frozen=True)
class StepWork:
    """The work of one step. Lengths are mean numbers of tokens, except `longest_completion`.

    The batch is trained on `epochs` times, in `updates` optimizer steps in all, with `references` extra forward passes.
    `ahead`: the samplers sample while the batch before is trained on.
    """

    prompts: int
    group_size: int
    prompt_tokens: float
    completion_tokens: float
    longest_completion: float
    dtype: str = "bfloat16"
    lora: LoraConfig | None = None
    optimizer: Optimizer = ADAMW
    epochs: int = 1
    updates: int = 1
    references: int = 0
    ahead: bool = False

    @property
    def rows(self) -> int:
        return self.prompts * self.group_size


@dataclass(frozen=True)
class PlanLine:
    """A line of the plan: a figure in bytes or seconds, and how it was computed."""

    name: str
    value: float
    formula: str


@dataclass(frozen=True)
class StepEstimate:
    """The plan of a step.

    `trainer` and `sampler` are the memory of a device, without allocator and libraries; `sampler` is empty if a trainer
    samples. `phases` are the seconds of sampling, training, transfer and verification, each the sum of its `details`.
    `rows_at_once` completions are sampled by an engine at a time. `seconds` are those of the whole step.
    """

    trainer: list[PlanLine]
    sampler: list[PlanLine]
    phases: dict[str, float]
    details: dict[str, list[PlanLine]]
    rows_at_once: int
    seconds: float
    bottleneck: str

    def fits(self, cluster: ClusterOptions) -> bool:
        """Whether the memory of trainers and of samplers is large enough."""
        return all(count_needed(parts) <= cluster.figures.memory for parts in (self.trainer, self.sampler))


def count_needed(parts: list[PlanLine]) -> float:
    """The bytes that a device needs for these parts, with the allocator's loss and the libraries."""
    return sum(part.value for part in parts) * FRAGMENTATION + LIBRARIES


def read_planned_shape(config: Mapping[str, Any]) -> ModelShape | None:
    """`read_shape` that also knows Qwen3's mixtures of experts, as if all their layers had experts; None if unknown."""
    if config.get("model_type") != "qwen3_moe":
        return read_shape(config)
    dense = read_shape({**config, "model_type": "qwen3", "intermediate_size": config.get("moe_intermediate_size")})
    experts, active = config.get("num_experts"), config.get("num_experts_per_tok")
    if dense is None or not isinstance(experts, int) or not isinstance(active, int):
        return None
    return replace(dense, experts=experts, active_experts=active)


def estimate_step(shape: ModelShape, work: StepWork, limits: EngineLimits, cluster: ClusterOptions) -> StepEstimate:
    """Estimate one step; ValueError if a sampler's device cannot hold the weights and one completion."""
    at_once = _rows_at_once(shape, work, limits, cluster)
    details = {
        "sampling": _time_sampling(shape, work, limits, cluster, at_once),
        "training": _time_training(shape, work, limits, cluster),
        "transfer": _time_transfer(shape, work, cluster),
        "verification": [_time_verification(work, cluster)],
    }
    phases = {name: sum(part.value for part in parts) for name, parts in details.items()}
    first = max(phases["sampling"], phases["verification"])
    is_parallel = work.ahead and cluster.samplers
    seconds = max(first, phases["training"]) if is_parallel else first + phases["training"]
    return StepEstimate(
        *_estimate_devices(shape, work, limits, cluster, at_once), phases, details, at_once,
        seconds + phases["transfer"], max(phases, key=lambda name: phases[name]),
    )  # fmt: skip


def _rows_at_once(shape: ModelShape, work: StepWork, limits: EngineLimits, cluster: ClusterOptions) -> int:
    """How many completions one engine samples at a time: its share, as far as limits and memory allow."""
    size, tokens = DTYPE_BYTES[work.dtype], work.prompt_tokens + work.longest_completion
    share = min(math.ceil(work.rows / cluster.engines), limits.max_rows)
    if not cluster.samplers:  # the trainer's memory, which the estimate of its device counts
        return share
    weights = shape.parameters * size
    room = (cluster.figures.memory - LIBRARIES) / FRAGMENTATION * cluster.tensor_parallel - weights
    fitting = int(room // (tokens * cache_bytes(shape, size)))
    if fitting < 1:
        raise ValueError(
            f"an engine of {cluster.tensor_parallel} x {cluster.figures.memory / GIB:.0f} GiB cannot hold "
            f"{weights / GIB:.0f} GiB of weights and the KV cache of one completion; give "
            f"cluster.tensor_parallel={2 * cluster.tensor_parallel}, or devices with more memory"
        )
    return min(share, fitting)


def cache_bytes(shape: ModelShape, size: int) -> int:
    """Bytes of the KV cache of one token; `size` is the bytes of a number."""
    return 2 * shape.keys * shape.layers * size


def _time_sampling(
    shape: ModelShape, work: StepWork, limits: EngineLimits, cluster: ClusterOptions, at_once: int
) -> list[PlanLine]:
    _, flops, bandwidth = cluster.figures
    size, wide = DTYPE_BYTES[work.dtype], cluster.tensor_parallel
    share = work.rows / cluster.engines
    prompts = work.prompts / cluster.engines
    prefill = 2 * shape.active_weights * prompts * work.prompt_tokens / (wide * flops)

    def decode(rows: float) -> float:
        """Seconds of one step of decoding."""
        tokens = rows * (work.prompt_tokens + work.completion_tokens / 2)
        read = count_read(shape, rows) * size + tokens * cache_bytes(shape, size)
        computed = 2 * shape.active_weights * rows / (wide * flops)
        return max(read / (wide * bandwidth), computed) + cluster.overhead_ms / 1e3

    steps = work.completion_tokens * max(1.0, share / at_once)
    tail = max(0.0, work.longest_completion - work.completion_tokens)
    return [
        PlanLine("prefill", prefill, f"2 x {_count(shape.active_weights)} active x {prompts:,.4g} prompts x "
                 f"{work.prompt_tokens:,.4g} tokens / {_rate(wide * flops, 'FLOP/s')}"),
        PlanLine("decode", steps * decode(at_once), f"{steps:,.0f} steps x {1e3 * decode(at_once):.1f} ms: weights "
                 f"{count_read(shape, at_once) * size / GIB:.1f} GiB and the cache of {at_once} rows / "
                 f"{_rate(wide * bandwidth, 'B/s')} + {cluster.overhead_ms:g} ms"),
        PlanLine("longest completion", tail * decode(1),
                 f"{tail:,.0f} more steps x {1e3 * decode(1):.1f} ms for the last row"),
    ]  # fmt: skip


def count_read(shape: ModelShape, rows: float) -> float:
    """How many weights a decoding step reads: all but the embedding, and of the experts those that any row chooses."""
    expert = 3 * shape.width * shape.inner * shape.layers
    chosen = shape.experts * (1 - (1 - shape.active_experts / shape.experts) ** rows)
    return shape.active_weights + (chosen - shape.active_experts) * expert


def _time_training(shape: ModelShape, work: StepWork, limits: EngineLimits, cluster: ClusterOptions) -> list[PlanLine]:
    _, flops, bandwidth = cluster.figures
    n, size, completion = cluster.trainers, DTYPE_BYTES[work.dtype], work.completion_tokens
    length = work.prompt_tokens + completion
    tokens = work.prompts * (work.prompt_tokens + work.group_size * completion) if limits.tree else work.rows * length
    adapter = shape.count_adapter(work.lora) if work.lora else 0
    passes = (4 if work.lora else 6) + (2 if limits.gradient_checkpointing else 0)
    attention = (6 + (2 if limits.gradient_checkpointing else 0)) * shape.layers * shape.queries * length
    forward = 2 * shape.active_weights + 2 * shape.layers * shape.queries * length
    a_token = work.epochs * (passes * shape.active_weights + 6 * adapter + attention) + work.references * forward
    compute = a_token * tokens / (n * flops)
    trained = adapter or shape.parameters
    moved = 7 * FP32 * trained / (1 if work.lora else n) * work.updates
    micro = max(1, math.ceil(tokens / n / limits.micro_tokens))
    sent = work.epochs * micro * count_exchanged(shape, size, trains_base=not adapter)
    sent += work.references * micro * shape.parameters * size + 2 * FP32 * adapter * work.updates
    sent *= (n - 1) / n
    network = sent / (cluster.network_gb_s * 1e9)
    hidden = 0.0 if cluster.device == "cpu" else compute
    return [
        PlanLine("passes", compute, f"{tokens:,.0f} tokens x {a_token:.3g} FLOP ({passes} x "
                 f"{_count(shape.active_weights)} active + attention {attention:.2g}) / "
                 f"({n} x {_rate(flops, 'FLOP/s')})"),
        PlanLine("waiting for the network", max(0.0, network - hidden), f"{sent / 1e9:,.1f} GB in "
                 f"{micro * (work.epochs + work.references)} micro-batches / "
                 f"{cluster.network_gb_s:.3g} GB/s = {network:,.2f} s, as far as the passes do not hide it"),
        PlanLine("optimizer", moved / bandwidth,
                 f"7 x 4 bytes x {_count(trained)} trained / {_rate(bandwidth, 'B/s')}"),
    ]  # fmt: skip


def count_exchanged(shape: ModelShape, size: int, *, trains_base: bool) -> int:
    """Bytes that FSDP moves for one micro-batch: blocks are gathered for the forward and for the backward pass,
    embedding and head once; gradients are reduce-scattered in float32. `size` is the bytes of a weight."""
    once = shape.embedding_weights + shape.width
    return (2 * shape.parameters - once) * size + (FP32 * shape.parameters if trains_base else 0)


def _time_transfer(shape: ModelShape, work: StepWork, cluster: ClusterOptions) -> list[PlanLine]:
    sent = shape.count_adapter(work.lora) * FP32 if work.lora else shape.parameters * DTYPE_BYTES[work.dtype]
    if cluster.samplers:
        rate = cluster.transfer_gb_s
    else:
        rate, sent = cluster.network_gb_s, 0 if work.lora else sent * (cluster.trainers - 1) / cluster.trainers
    what = "the adapter" if work.lora else "all weights"
    return [PlanLine("new weights", sent / (rate * 1e9), f"{what}, {sent / 1e9:,.3g} GB / {rate:g} GB/s")]


def _time_verification(work: StepWork, cluster: ClusterOptions) -> PlanLine:
    formula = f"{work.rows:,} completions x {cluster.verify_s:g} s / {cluster.verifiers} cores"
    return PlanLine("verifying", work.rows * cluster.verify_s / cluster.verifiers, formula)


def _estimate_devices(
    shape: ModelShape, work: StepWork, limits: EngineLimits, cluster: ClusterOptions, at_once: int
) -> tuple[list[PlanLine], list[PlanLine]]:
    """The memory of a trainer and of a sampler; no lines for a sampler if a trainer samples."""
    n, size = cluster.trainers, DTYPE_BYTES[work.dtype]
    row = math.ceil(work.prompt_tokens + work.longest_completion)
    one = estimate_memory(
        shape, limits, dtype=work.dtype, row_tokens=row, rows=max(1, math.ceil(work.rows / n)), lora=work.lora,
        optimizer=work.optimizer, copies=work.references,
    )  # fmt: skip
    mine = 1 if work.lora else n  # adapters are replicated, with their gradients and moments
    gathered = count_gathered(shape, has_adapter=work.lora is not None)
    experts = shape.active_experts * 4 * shape.inner * size * shape.layers if shape.experts > 1 else 0
    micro = min(max(limits.micro_tokens, row), math.ceil(work.rows / n) * row)
    trainer = [
        PlanLine("weights", one.weights / n + one.adapter, f"{_count(shape.parameters)} x {size} bytes / {n}"),
        PlanLine("optimizer state", (one.state + one.copies) / mine, f"moments, fp32 masters and copies / {mine}"),
        PlanLine("gradients", one.gradients / mine, f"of what is trained / {mine}"),
        PlanLine("gathered layers", gathered * size if n > 1 else 0, "embedding, head and two blocks, with gradients"),
        PlanLine("activations", one.activations + (0 if limits.gradient_checkpointing else micro * experts),
                 f"of {micro:,} tokens at a time"),
        PlanLine("logits", one.logits, "of a chunk of tokens"),
    ]  # fmt: skip
    keys = at_once * row * cache_bytes(shape, size) / cluster.tensor_parallel
    cache = PlanLine("KV cache", keys, f"{at_once} rows x {row:,} tokens x {cache_bytes(shape, size):,} bytes")
    if not cluster.samplers:
        held = PlanLine("weights to sample", shape.parameters * size, "all of them, gathered")
        return [*trainer, cache, *([held] if n > 1 else [])], []
    weights = shape.parameters * size / cluster.tensor_parallel
    whole = f"{_count(shape.parameters)} x {size} bytes / {cluster.tensor_parallel}"
    return trainer, [PlanLine("weights", weights, whole), cache]


def _count(number: float) -> str:
    return f"{number / 1e9:.3g} B" if number >= 1e8 else f"{number / 1e6:.3g} M"


def _rate(number: float, unit: str) -> str:
    for power, prefix in ((1e12, "T"), (1e9, "G")):
        if number >= power:
            return f"{number / power:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}"


def _make_config(kind: str, vocabulary: int, sizes: tuple[int, ...], is_tied: bool, **more: Any) -> Mapping[str, Any]:
    named = dict(zip(_SIZES, sizes, strict=True))
    return {"model_type": kind, "vocab_size": vocabulary, **named, "tie_word_embeddings": is_tied, **more}


KNOWN_MODELS: Mapping[str, Mapping[str, Any]] = {
    "Qwen2.5-0.5B": _make_config("qwen2", 151936, (896, 4864, 24, 14, 2), True),
    "Qwen3-0.6B": _make_config("qwen3", 151936, (1024, 3072, 28, 16, 8), True, head_dim=128),
    "Llama-3.2-1B": _make_config("llama", 128256, (2048, 8192, 16, 32, 8), True),
    "Qwen2.5-1.5B": _make_config("qwen2", 151936, (1536, 8960, 28, 12, 2), True),
    "Qwen2.5-3B": _make_config("qwen2", 151936, (2048, 11008, 36, 16, 2), True),
    "Qwen3-4B": _make_config("qwen3", 151936, (2560, 9728, 36, 32, 8), True, head_dim=128),
    "Qwen2.5-7B": _make_config("qwen2", 152064, (3584, 18944, 28, 28, 4), False),
    "Llama-3.1-8B": _make_config("llama", 128256, (4096, 14336, 32, 32, 8), False),
    "Qwen2.5-14B": _make_config("qwen2", 152064, (5120, 13824, 48, 40, 8), False),
    "Qwen3-30B-A3B": _make_config(
        "qwen3_moe", 151936, (2048, 6144, 48, 32, 4), False,
        head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
    ),
    "Qwen3-32B": _make_config("qwen3", 151936, (5120, 25600, 64, 64, 8), False, head_dim=128),
    "Llama-3.1-70B": _make_config("llama", 128256, (8192, 28672, 80, 64, 8), False),
    "Qwen2.5-72B": _make_config("qwen2", 152064, (8192, 29568, 80, 64, 8), False),
}  # fmt: skip


def find_known_config(name: str) -> Mapping[str, Any] | None:
    """The config of a known model by its name, with or without its maker's: `Qwen2.5-0.5B`, `qwen/qwen2.5-0.5b`."""
    wanted = name.rpartition("/")[2].lower()
    return next((config for known, config in KNOWN_MODELS.items() if known.lower() == wanted), None)
