"""A learner's step (`forward_backward` and `optim_step`) beside a plain one, and the memory that a large step takes.

The plain step is that of a trainer without shortcuts: the `transformers` model on rows padded to the longest, all
logits at once, torch's AdamW. Both learn from the same rows with the same clipped loss and report the norm of their
gradient, so a wrong one would show. Rates count the tokens of the rows: neither padding nor the repeated prompts of a
group. Run by `rlvr bench learner`. Left out on purpose: sampling (`benchmarks.end_to_end` measures the whole step).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.growth import SIZES, growth_case
from benchmarks.measure import BenchmarkCase, BenchSettings, Turn, TurnResult, peak_bytes
from benchmarks.workloads import QWEN_3M, QWEN_25M, QWEN_500M, WORDS, build_folder
from rlvr.core.cpu_budget import restore_spinning
from rlvr.core.messages import AdamParams, Datum
from rlvr.core.types import Trajectory

ADAM = AdamParams(learning_rate=1e-5)
LOW, HIGH = 0.8, 1.28
BYTES = 16  # of a parameter in fp32: weight, gradient and AdamW's two moments


@dataclass(frozen=True)
class BatchShape:
    """Rows of one step: `groups` prompts x `size` answers; prompts and answers of `least` to `most` tokens each.

    `model` is a `transformers` config, `vocabulary` its number of words.
    """

    name: str
    groups: int
    size: int
    prompt: tuple[int, int]
    answer: tuple[int, int]
    model: dict[str, Any]
    vocabulary: int = len(WORDS)


GROUP = BatchShape("groups", 2, 8, (256, 256), (8, 64), QWEN_25M)
MIXED = BatchShape("mixed lengths", 16, 1, (16, 256), (8, 256), QWEN_25M)
WIDE = BatchShape("large vocabulary", 4, 4, (64, 64), (8, 128), QWEN_3M, 50_000)
GROWTH = BatchShape("growth", 2, 8, (64, 64), (8, 32), QWEN_3M)
LARGE = BatchShape("memory", 8, 7, (256, 256), (256, 256), QWEN_500M, 150_000)  # 16,384 different tokens


def cases(setting: BenchSettings) -> list[BenchmarkCase]:
    """Groups that share a prompt, rows that share nothing, a large vocabulary, growth, and the memory of 0.5 B."""
    shapes = [GROUP, MIXED, WIDE]
    if setting.quick:
        shapes = [replace(GROUP, groups=1), replace(MIXED, groups=8), replace(WIDE, groups=2)]
    found = [
        BenchmarkCase(
            name=shape.name,
            unit="tokens",
            work=f"{shape.groups} x {shape.size} rows of {_range(shape.prompt)} + {_range(shape.answer)} tokens, AdamW",
            ours=partial(ours, setting, shape),
            peers={"padded plain step": partial(plain, setting, shape)},
            aim=0.8,
            of_bound=True,
        )
        for shape in shapes
    ]
    if setting.model is not None:
        return found[:2]
    growth = growth_case(
        GROWTH.name,
        "tokens",
        f"{GROWTH.groups} x {GROWTH.size} rows and more of them, 3 M parameters",
        lambda size: partial(ours, setting, replace(GROWTH, groups=GROWTH.groups * size)),
        SIZES[:2] if setting.quick else SIZES,
    )
    return [*found, growth] if setting.quick else [*found, growth, memory_case(setting)]


def memory_case(setting: BenchSettings) -> BenchmarkCase:
    """Full fine-tuning of a 0.5-billion-parameter model on 16,384 tokens in one call. Minutes, and 14 GB."""
    return BenchmarkCase(
        name=LARGE.name,
        unit="tokens",
        work=f"0.5 B parameters, vocabulary {LARGE.vocabulary:,}, 16,384 tokens in one call, gradient checkpointing",
        ours=partial(memory_turn, setting, LARGE),
        peers={},
        most_rounds=1,
    )


def _range(bounds: tuple[int, int]) -> str:
    return str(bounds[0]) if bounds[0] == bounds[1] else f"{bounds[0]}..{bounds[1]}"


def rows(shape: BatchShape, vocabulary: int) -> list[Datum]:
    """The step's rows: random tokens, evenly spread lengths, normal advantages, old log-probs of -log(vocabulary)."""
    rng = np.random.default_rng(0)

    def lengths(bounds: tuple[int, int], count: int) -> np.ndarray:
        return rng.permutation(np.linspace(*bounds, count).round().astype(int))

    prompts = [rng.integers(0, vocabulary, n).tolist() for n in lengths(shape.prompt, shape.groups)]
    answers = lengths(shape.answer, shape.groups * shape.size)
    total, guess = int(answers.sum()), -float(np.log(vocabulary))
    data: list[Datum] = []
    for i, n in enumerate(answers):
        response = rng.integers(0, vocabulary, n).tolist()
        row = Trajectory("", prompts[i // shape.size], "", response, [guess] * n, advantage=float(rng.normal()))
        data.append(Datum.from_trajectory(row, 1.0 / total))
    return data


def _tokens(data: Sequence[Datum]) -> int:
    return sum(datum.model_input.length for datum in data)


def _distinct(shape: BatchShape, data: Sequence[Datum]) -> int:
    """The tokens to compute: each group's prompt once."""
    prompts = [int((d.loss_fn_inputs["advantages"].data == 0).sum()) + 1 for d in data]
    return _tokens(data) - sum(n for i, n in enumerate(prompts) if i % shape.size)


def _folder(setting: BenchSettings, shape: BatchShape) -> Path:
    if setting.model is not None:
        return setting.model
    words = [f"w{i}" for i in range(shape.vocabulary)] if shape.vocabulary > len(WORDS) else WORDS
    name = f"learner-{shape.model['hidden_size']}-{len(words)}"
    return build_folder(setting.scratch / name, shape.model, "words", words)


def load_shape_model(setting: BenchSettings, shape: BatchShape) -> Any:
    """The shape's model, or the user's (`--model`), as the engine loads it."""
    from rlvr.engine.model_loading import load_model
    from rlvr.engine.tokenizer import load_tokenizer

    folder = str(_folder(setting, shape))
    return load_model(folder, load_tokenizer(folder), device="auto", dtype=setting.dtype)


def learner_turn(
    setting: BenchSettings, model: Any, data: list[Datum], units: float, cost: float = 0.0, **limits: Any
) -> Callable[..., TurnResult]:
    """The engine's step on the rows of `data`, or on those passed to the turn, with these limits."""
    import torch

    from rlvr.clients.local import LocalTrainingClient
    from rlvr.engine.engine import Engine
    from rlvr.engine.engine_options import EngineLimits

    torch.set_num_threads(setting.threads)
    engine = Engine(model, EngineLimits(threads=setting.threads, **limits))
    client = LocalTrainingClient(engine, engine.create_policy("policy"), setting.scratch)

    def turn(data: list[Datum] = data) -> TurnResult:
        client.forward_backward(data, "ppo", {"clip_low_threshold": LOW, "clip_high_threshold": HIGH}).result()
        stepped = client.optim_step(ADAM).result()
        return TurnResult(units, cost=cost, facts={"gradient norm": stepped.metrics["grad_norm"], **_gpu_memory()})

    return turn


def ours(setting: BenchSettings, shape: BatchShape) -> Turn:
    model = load_shape_model(setting, shape)
    data = rows(shape, model.vocabulary)
    return learner_turn(setting, model, data, _tokens(data), 3.0 * _distinct(shape, data))


def plain(setting: BenchSettings, shape: BatchShape) -> Turn:
    """The padded step: `transformers`, a whole table of logits, torch's AdamW."""
    restore_spinning()  # before torch is loaded
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(setting.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded: Any = AutoModelForCausalLM.from_pretrained(_folder(setting, shape), dtype=torch.float32)
    model = loaded.to(device)
    betas = (ADAM.beta1, ADAM.beta2)
    optimizer = torch.optim.AdamW(model.parameters(), ADAM.learning_rate, betas, ADAM.eps, weight_decay=0.0, fused=True)
    data = rows(shape, model.get_input_embeddings().num_embeddings)

    def padded(name: str, kind: torch.dtype) -> torch.Tensor:
        lists = [np.asarray(d.model_input.tokens if not name else d.loss_fn_inputs[name].data) for d in data]
        row_tensors = [torch.as_tensor(row).to(kind) for row in lists]
        return torch.nn.utils.rnn.pad_sequence(row_tensors, batch_first=True).to(device)

    tokens_BT, targets_BT = padded("", torch.int64), padded("target_tokens", torch.int64)
    old_BT, advantages_BT = padded("logprobs", torch.float32), padded("advantages", torch.float32)
    lengths = torch.tensor([d.model_input.length for d in data], device=device)
    mask_BT = (torch.arange(tokens_BT.shape[1], device=device) < lengths[:, None]).long()

    def turn() -> TurnResult:
        with torch.autocast(device.type, torch.bfloat16, enabled=setting.dtype == "bfloat16"):
            logits_BTV = model(input_ids=tokens_BT, attention_mask=mask_BT, use_cache=False).logits
        logprobs_BT = logits_BTV.float().log_softmax(-1).gather(-1, targets_BT[..., None])[..., 0]
        ratio_BT = torch.exp(logprobs_BT - old_BT)
        terms_BT = torch.minimum(ratio_BT * advantages_BT, ratio_BT.clamp(LOW, HIGH) * advantages_BT)
        (-(terms_BT * (advantages_BT != 0)).sum()).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
        return TurnResult(
            _tokens(data), cost=3.0 * tokens_BT.numel(), facts={"gradient norm": float(norm), **_gpu_memory()}
        )

    return turn


def memory_turn(setting: BenchSettings, shape: BatchShape) -> Turn:
    """Peak memory of a step, less what the process held before the model, over weights, gradients and moments.

    A step takes minutes, so it runs once, in the warm-up turn, and the round reports that result. A step on one row
    comes first and creates the optimizer's moments.
    """
    import torch

    from rlvr.engine.model_loading import build_model
    from rlvr.engine.tokenizer import build_tokenizer

    import transformers.models.qwen3.modeling_qwen3  # noqa: F401  # isort: skip - part of what the import takes

    before = _resident_bytes()
    words = [f"w{i}" for i in range(shape.vocabulary)]
    tokenizer = build_tokenizer("words", words, end="<end>", pad="<pad>")
    model = build_model(shape.model, tokenizer, seed=0, device="auto", dtype="float32")
    count = sum(p.numel() for p in model.module.parameters())
    data = rows(shape, model.vocabulary)
    cost = 3.0 * _distinct(shape, data)
    step = learner_turn(setting, model, data, _tokens(data), cost, gradient_checkpointing=True, micro_tokens=2048)
    results: list[TurnResult] = []

    def turn() -> TurnResult:
        import time

        if results:
            return results[0]
        step(data[:1])
        began = time.perf_counter()
        done = step()
        seconds = time.perf_counter() - began
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else peak_bytes() - before
        facts = {
            "peak over weights, gradients and moments": peak / (BYTES * count),
            "GB beyond the libraries": peak / 1e9,
        }
        results.append(TurnResult(done.units, seconds, done.cost, {**done.facts, **facts, "M parameters": count / 1e6}))
        return results[0]

    return turn


def _resident_bytes() -> int:
    """Resident bytes of this process; its peak so far where the system does not report them."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmRSS:"):
                return 1024 * int(line.split()[1])
    return peak_bytes()


def _gpu_memory() -> dict[str, float]:
    """The most memory allocated on a GPU; nothing without one (the process's peak is always measured)."""
    import torch

    return {"GPU memory, GB": torch.cuda.max_memory_allocated() / 1e9} if torch.cuda.is_available() else {}
