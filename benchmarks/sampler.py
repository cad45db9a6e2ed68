"""Sampling beside `transformers`: `generate` on a padded batch, and its continuous batching (`generate_batch`).

All sides sample at temperature 1 without filters from the same weights in the same dtype, and a unit is a token of an
answer. Where answers end early, a share of the vocabulary ends them, so that their lengths are geometric. Ours reports
its share of the matrix product's peak: two operations for each weight and token, prompts included, over a product of
two 2048-square matrices timed around the turns. Exercised by `rlvr bench sampler`. Left out on purpose: log-probs,
which ours returns and the peers do not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.growth import SIZES, growth_case
from benchmarks.measure import BenchmarkCase, BenchSettings, Turn, TurnResult
from benchmarks.workloads import QWEN_3M, QWEN_25M, QWEN_500M, WORDS, build_folder
from rlvr.core import rng
from rlvr.core.cpu_budget import restore_spinning


@dataclass(frozen=True)
class SamplingShape:
    """`prompts` of `least` to `most` tokens, `samples` answers each, of at most `new` tokens.

    An answer ends with chance 1 / `mean` at each token; 0: never before `new`.
    """

    name: str
    prompts: int
    least: int
    most: int
    samples: int
    new: int
    mean: int = 0
    model: Any = None
    vocabulary: int = len(WORDS)
    aim: float | None = None


SHAPES = (
    SamplingShape("one prompt", 1, 256, 256, 16, 64, aim=4.0),
    SamplingShape("short prompts", 256, 8, 8, 1, 64, aim=1.5),
    SamplingShape("mixed lengths", 64, 16, 128, 2, 256, mean=32, aim=3.0),
)
LARGE = SamplingShape("one prompt, 0.5 B", 1, 256, 256, 16, 16, model=QWEN_500M, vocabulary=150_000, aim=4.0)
GROWTH = SamplingShape("growth", 16, 16, 16, 4, 16, model=QWEN_3M)


def cases(setting: BenchSettings) -> list[BenchmarkCase]:
    """One prompt with many answers, many short prompts, mixed lengths, a large vocabulary, and growth."""
    shapes = list(SHAPES)
    if setting.quick:
        shapes = [replace(SHAPES[0], new=16), replace(SHAPES[1], prompts=32, new=16), replace(SHAPES[2], prompts=8)]
    elif setting.model is None:
        shapes.append(LARGE)
    found = [
        BenchmarkCase(
            name=shape.name,
            unit="tokens",
            work=_work(shape),
            ours=partial(ours, setting, shape),
            peers={
                "transformers generate": partial(generate, setting, shape),
                "transformers continuous batching": partial(continuous, setting, shape),
            },
            aim=shape.aim,
        )
        for shape in shapes
    ]
    if setting.model is not None:
        return found
    growth = growth_case(
        GROWTH.name,
        "tokens",
        f"{_work(GROWTH)}, 3 M parameters",
        lambda size: partial(ours, setting, replace(GROWTH, prompts=GROWTH.prompts * size)),
        SIZES[:2] if setting.quick else SIZES,
    )
    return [*found, growth]


def _work(shape: SamplingShape) -> str:
    prompt = str(shape.most) if shape.least == shape.most else f"{shape.least}..{shape.most}"
    ends = f", {shape.mean} on average" if shape.mean else ""
    return f"{shape.prompts} prompts of {prompt} tokens x {shape.samples} answers of at most {shape.new}{ends}"


def build_shape_folder(setting: BenchSettings, shape: SamplingShape) -> Path:
    if setting.model is not None:
        return setting.model
    words = [f"w{i}" for i in range(shape.vocabulary)] if shape.vocabulary > len(WORDS) else WORDS
    config = shape.model or QWEN_25M
    return build_folder(setting.scratch / f"sampler-{config['hidden_size']}-{len(words)}", config, "words", words)


def draw_prompts(shape: SamplingShape, vocabulary: int) -> list[list[int]]:
    span = shape.most - shape.least + 1
    lengths = [shape.least + rng.integer(span, rng.key("bench-length"), i) for i in range(shape.prompts)]
    return [[rng.integer(vocabulary, rng.key("bench-tokens", i), t) for t in range(n)] for i, n in enumerate(lengths)]


def _ends(shape: SamplingShape, vocabulary: int) -> list[int]:
    """Tokens that end an answer: of a random model's tokens about one in `mean`."""
    return list(range(vocabulary // shape.mean)) if shape.mean else []


def ours(setting: BenchSettings, shape: SamplingShape) -> Turn:
    import torch

    from rlvr.core.messages import ModelInput, SamplingParams
    from rlvr.engine.engine import Engine
    from rlvr.engine.engine_options import EngineLimits
    from rlvr.engine.model_loading import load_model
    from rlvr.engine.tokenizer import load_tokenizer

    torch.set_num_threads(setting.threads)
    folder = str(build_shape_folder(setting, shape))
    model = load_model(folder, load_tokenizer(folder), device="auto", dtype=setting.dtype)
    engine = Engine(model, EngineLimits(threads=setting.threads))
    snapshot = engine.base_snapshot()
    prompts, ends = draw_prompts(shape, model.vocabulary), _ends(shape, model.vocabulary)
    head = model.module.get_output_embeddings().weight.numel()
    tables = {
        id(table.weight): table.weight.numel()
        for table in (model.module.get_input_embeddings(), model.module.get_output_embeddings())
    }
    inner = sum(p.numel() for p in model.module.parameters()) - sum(tables.values())
    asked, rows = sum(map(len, prompts)), len(prompts) * shape.samples

    def turn() -> TurnResult:
        before = peak(model.device, model.dtype)
        began = time.perf_counter()
        futures = [
            engine.sample(snapshot, ModelInput(p), shape.samples, SamplingParams(shape.new, seed=i, stop=ends))
            for i, p in enumerate(prompts)
        ]
        tokens = sum(len(s.tokens) for future in futures for s in future.result().sequences)
        seconds = time.perf_counter() - began
        best = max(before, peak(model.device, model.dtype))
        # A row's first token comes from its prompt's pass, and the head reads what draws a token alone.
        done = 2 * (inner * (asked + tokens - rows) + head * tokens)
        return TurnResult(tokens, seconds, facts={"share of the matrix peak": done / seconds / best})

    return turn


def peak(device: Any, dtype: Any) -> float:
    """Operations a second of the product of two 2048-square matrices, the best of three."""
    import torch

    a, b = (torch.randn(2048, 2048, device=device).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(4):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        torch.mm(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return 2 * 2048**3 / best


def _peer(
    setting: BenchSettings, shape: SamplingShape, run: Callable[[Any, list[list[int]], list[int]], list[int]]
) -> Turn:
    """`run` gives the length of each answer."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(setting.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        build_shape_folder(setting, shape), dtype=getattr(torch, setting.dtype)
    )
    model = loaded.to(device).eval().requires_grad_(False)
    model.generation_config.eos_token_id = None
    vocabulary = model.get_input_embeddings().num_embeddings
    prompts, ends = draw_prompts(shape, vocabulary), _ends(shape, vocabulary)
    torch.manual_seed(0)
    return lambda: TurnResult(sum(run(model, prompts, ends)))


def generate(setting: BenchSettings, shape: SamplingShape) -> Turn:
    restore_spinning()  # before torch is loaded
    import torch

    def run(model: Any, prompts: list[list[int]], ends: list[int]) -> list[int]:
        longest = max(map(len, prompts))
        tokens = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=model.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
        found = model.generate(
            tokens,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            top_p=1.0,
            max_new_tokens=shape.new,
            num_return_sequences=shape.samples,
            eos_token_id=ends or None,
            pad_token_id=0,
        )
        answers = found[:, longest:]
        ended = torch.isin(answers, torch.tensor(ends, device=model.device)) if ends else answers < 0
        first = torch.where(ended.any(1), ended.int().argmax(1) + 1, answers.shape[1])
        return first.tolist()

    return _peer(setting, shape, run)


def continuous(setting: BenchSettings, shape: SamplingShape) -> Turn:
    """With a cache for exactly the rows there are: by default it takes half of the machine's memory, and fills it."""
    restore_spinning()  # before torch is loaded
    from transformers import ContinuousBatchingConfig, GenerationConfig

    rows, page = shape.prompts * shape.samples, 16
    blocks = rows * (-(-(shape.most + shape.new) // page) + 1)
    room = ContinuousBatchingConfig(
        page_size=page, num_blocks=blocks, max_batch_tokens=min(8192, rows * (shape.most + shape.new))
    )

    def run(model: Any, prompts: list[list[int]], ends: list[int]) -> list[int]:
        config = GenerationConfig(
            do_sample=True, top_k=0, top_p=1.0, max_new_tokens=shape.new, eos_token_id=ends or [-1], pad_token_id=0
        )
        asked = [prompt for prompt in prompts for _ in range(shape.samples)]
        found = model.generate_batch(asked, config, room, progress_bar=False)
        return [len(answer.generated_tokens) for answer in found.values()]

    return _peer(setting, shape, run)
