"""Sampling beside vLLM for CPUs, which serves the same weights over HTTP: `rlvr bench vllm`.

Both sides sample at temperature 1 from the same weights in float32 on the same number of cores, return the log-prob of
every token, and never end an answer early; a unit is a token of an answer. vLLM is asked as `sampler.name=vllm` asks
it, all prompts of a turn at once. Needs RLVR_VLLM, the python of vLLM's environment (`make vllm-env`). Left out on
purpose: the memory of the server, which is a process of its own, and GPUs.
"""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from functools import partial
from multiprocessing import util
from typing import Any

from benchmarks.measure import BenchmarkCase, BenchSettings, SideUnavailable, Turn, TurnResult
from benchmarks.sampler import SamplingShape, build_shape_folder, draw_prompts, ours
from benchmarks.vllm_process import MISSING, PYTHON, VllmProcess
from benchmarks.workloads import QWEN_3M, QWEN_25M

MODELS = {"3 M": QWEN_3M, "25 M": QWEN_25M}
BATCHES = (16, 64, 256)  # sequences
SHAPE = SamplingShape("", 0, 32, 32, 4, 64)


def cases(setting: BenchSettings) -> list[BenchmarkCase]:
    """Three batch sizes on two models, four answers a prompt."""
    shapes = [
        replace(SHAPE, name=f"{size}, batch {batch}", prompts=batch // SHAPE.samples, model=model)
        for size, model in MODELS.items()
        for batch in BATCHES
    ]
    if setting.quick:
        shapes = [replace(shape, new=16) for shape in shapes[:2]]
    return [
        BenchmarkCase(
            name=shape.name,
            unit="tokens",
            work=f"{shape.prompts} prompts of {shape.most} tokens x {shape.samples} answers of {shape.new}",
            ours=partial(ours, setting, shape),
            peers={"vLLM": partial(vllm, setting, shape)},
        )
        for shape in shapes
    ]


def vllm(setting: BenchSettings, shape: SamplingShape) -> Turn:
    if not PYTHON:
        raise SideUnavailable(MISSING)
    from rlvr.clients.vllm import VllmOptions
    from rlvr.clients.vllm.vllm_server import VllmServer, read_completion
    from rlvr.engine.tokenizer import load_tokenizer

    folder = build_shape_folder(setting, shape)
    prompts = draw_prompts(shape, len(load_tokenizer(str(folder))))
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: setting.threads]))
    process = VllmProcess(
        folder, folder / "vllm.log", max_model_len=shape.most + shape.new, VLLM_CPU_OMP_THREADS_BIND=cores
    )
    util.Finalize(None, process.stop, (signal.SIGKILL,), exitpriority=1)  # when this side ends
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also when it is ended
    process.launch()
    process.wait_until_ready()
    loop = asyncio.Runner()
    server = VllmServer(process.url, VllmOptions([process.url], concurrency=len(prompts)))
    loop.run(server.check())
    fixed: dict[str, Any] = {"n": shape.samples, "max_tokens": shape.new, "temperature": 1.0, "logprobs": 0}

    async def sample() -> int:
        asked = [{**fixed, "seed": shape.samples * i, "ignore_eos": True} for i in range(len(prompts))]
        calls = [server.generate(server.base, p, a, "bench") for p, a in zip(prompts, asked, strict=True)]
        answers = await asyncio.gather(*calls)
        return sum(len(read_completion(choice).tokens) for answer in answers for choice in answer["choices"])

    return lambda: TurnResult(loop.run(sample()))
