"""What `benchmarks.gpu_first_hour` measures: one function for each, which returns the figures of its row.

Nothing here has run on a GPU; all of it runs on the processor with `--dry-run`.
"""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.learner import ADAM, BatchShape, rows
from benchmarks.measure import peak_bytes
from benchmarks.sampler import SamplingShape, draw_prompts, peak
from benchmarks.vllm_process import ADAPTERS, MISSING, PYTHON, VllmProcess
from benchmarks.workloads import QWEN_25M, WORDS, build_folder
from rlvr.core.messages import Datum, ModelInput, SamplingParams
from rlvr.engine.capacity import KNOWN_MODELS

TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 128, "max_position_embeddings": 512, "vocab_size": 256,
        "tie_word_embeddings": True}  # fmt: skip
FAMILIES = {"qwen2": "Qwen2.5-0.5B", "qwen3": "Qwen3-0.6B", "llama": "Llama-3.2-1B"}
SPECIAL = 64  # places of the vocabulary for special tokens; a family's tokenizer may add some of its own
EDGES = (0.0, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)  # nats, of the histogram of gaps


class NotHere(Exception):
    """Raised by a measurement that needs what this machine does not have."""


@dataclass(frozen=True)
class HourSettings:
    """The folder of the results; the model (empty: random weights); sizes and devices of a dry run; a vLLM server."""

    out: str
    model: str = ""
    is_dry: bool = False
    vllm_url: str = ""

    @property
    def folder(self) -> Path:
        return Path(self.out)

    @property
    def device(self) -> str:
        return "cpu" if self.is_dry else "cuda"

    @property
    def dtype(self) -> str:
        return "bfloat16"

    def main_model(self) -> str:
        """The folder of the model that most measurements take."""
        return self.model or str(self.build_model("qwen2", "main"))

    def build_model(self, family: str, name: str) -> Path:
        """A folder with random weights of a family's model, written once."""
        config = {**TINY, "model_type": family} if self.is_dry else dict(KNOWN_MODELS[FAMILIES[family]])
        words = [f"w{i}" for i in range(config["vocab_size"] - SPECIAL)]
        return build_folder(self.folder / "models" / name, config, "words", words)

    def pick(self, real: Any, dry: Any) -> Any:
        return dry if self.is_dry else real


@dataclass(frozen=True)
class Measurement:
    """A measurement by name, the seconds that it may take on a card, and the function that makes its figures."""

    name: str
    limit_s: float
    measure: Callable[[HourSettings], dict[str, Any]]


def load(setting: HourSettings, folder: str | None = None, dtype: str = "") -> Any:
    """A model on the device of the settings."""
    from rlvr.engine.model_loading import load_model
    from rlvr.engine.tokenizer import load_tokenizer

    folder = folder or setting.main_model()
    return load_model(folder, load_tokenizer(folder), device=setting.device, dtype=dtype or setting.dtype)


def make_client(setting: HourSettings, model: Any, name: str = "policy", lora: Any = None, **limits: Any) -> Any:
    """A trainer of all weights, or of an adapter, in an engine of its own."""
    from rlvr.clients.local import LocalTrainingClient
    from rlvr.engine.engine import Engine
    from rlvr.engine.engine_options import EngineLimits

    engine = Engine(model, EngineLimits(**limits))
    return LocalTrainingClient(engine, engine.create_policy(name, lora=lora), setting.folder / "weights" / name)


def wait_for_device(model: Any) -> None:
    if model.device.type == "cuda":
        import torch

        torch.cuda.synchronize()


def free_device() -> None:
    """Give back what no object holds, between settings of one measurement."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def make_rows(setting: HourSettings, vocabulary: int, groups: int = 4) -> list[Datum]:
    """Rows of a step: `groups` of eight completions."""
    prompt, answer = setting.pick(((256, 256), (64, 512)), ((24, 24), (4, 16)))
    return rows(BatchShape("", setting.pick(groups, 2), 8, prompt, answer, {}), vocabulary)


def measure_resume(setting: HourSettings) -> dict[str, Any]:
    """Two steps, save, load elsewhere, a third step of both with one gradient: the weights have to be equal."""
    import torch

    config = setting.pick(QWEN_25M, {**TINY, "model_type": "qwen3"})
    folder = build_folder(setting.folder / "models" / "small", config, "words", WORDS[:100])
    facts: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        models = [load(setting, str(folder), dtype) for _ in range(2)]
        whole, resumed = (make_client(setting, m, name) for m, name in zip(models, ("whole", "resumed"), strict=True))
        data = make_rows(setting, models[0].vocabulary)
        for _ in range(2):
            whole.forward_backward(data, "ppo").result()
            whole.optim_step(ADAM).result()
        resumed.load_state_with_optimizer(whole.save_state(f"half-{dtype}").result().path).result()
        for client in (whole, resumed):
            client.forward_backward(data, "ppo").result()
        for name, master in resumed.policy.masters.items():
            master.grad = whole.policy.masters[name].grad.clone()
        for client in (whole, resumed):
            client.optim_step(ADAM).result()
        pairs = [(master, whole.policy.masters[name]) for name, master in resumed.policy.masters.items()]
        facts[dtype] = {
            "equal": all(torch.equal(a, b) for a, b in pairs),
            "largest difference": max(float((a - b).abs().max()) for a, b in pairs),
            "step on": str(next(iter(resumed.policy.optimizer.state.values()))["step"].device),
        }
        if not facts[dtype]["equal"]:
            raise AssertionError(f"a resumed run goes elsewhere: {facts}")
    return facts


def measure_tests(setting: HourSettings) -> dict[str, Any]:
    """The tests marked `gpu`; in a dry run two of those on the pretended device."""
    words = ["-p", "no:cacheprovider", "-q", "-rs", *setting.pick(["-m", "gpu", "--timeout=300"], [])]
    words += setting.pick([], ["tests/engine/test_gpu.py", "-k", "pretended and gradients"])
    variables = {**os.environ, **setting.pick({"RLVR_TEST_GPU": "1"}, {})}
    root = Path(__file__).parents[1]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=root, env=variables, capture_output=True, text=True
    )
    print(ran.stdout[-20_000:], ran.stderr[-2_000:])
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", ran.stdout)}
    if ran.returncode or not counts.get("passed"):
        raise AssertionError(f"pytest ended with {ran.returncode}: {counts}")
    return counts


def measure_probe(setting: HourSettings) -> dict[str, Any]:
    """What the probe at load finds of three models in bf16: which shortcuts they get, and its notes."""
    facts: dict[str, Any] = {}
    for family in FAMILIES:
        began = time.perf_counter()
        model = load(setting, str(setting.build_model(family, "main" if family == "qwen2" else family)))
        facts[family] = {
            "cache": model.can_cache, "shared prompts": model.can_share_prompts, "tree": model.can_pack,
            "notes": model.notes, "load_s": time.perf_counter() - began,
        }  # fmt: skip
        del model
        free_device()
    return facts


def measure_gap(setting: HourSettings) -> dict[str, Any]:
    """How far the trainer's log-probs of sampled tokens are from the sampler's, both in bf16."""
    client = make_client(setting, load(setting))
    sampler = client.create_sampling_client()
    prompts, count, new = setting.pick((16, 8, 256), (4, 4, 16))
    shape = SamplingShape("", prompts, setting.pick(256, 40), setting.pick(256, 40), count, new)
    asked = draw_prompts(shape, client._engine.model.vocabulary)
    futures = [sampler.sample(ModelInput(p), count, SamplingParams(new, seed=i, stop=[])) for i, p in enumerate(asked)]
    gaps: list[float] = []
    for prompt, future in zip(asked, futures, strict=True):
        sequences = future.result().sequences
        data = [Datum.from_completion(prompt, s.tokens) for s in sequences]
        scored = client.forward(data, "cross_entropy").result().loss_fn_outputs
        for sequence, output in zip(sequences, scored, strict=True):
            learned = output["logprobs"].tolist()[len(prompt) - 1 :]
            gaps += [abs(a - b) for a, b in zip(sequence.logprobs, learned, strict=True)]
    found = np.array(gaps)
    counts = np.histogram(found, [*EDGES, np.inf])[0]
    return {
        "tokens": len(gaps), "mean": float(found.mean()), "p50": float(np.quantile(found, 0.5)),
        "p99": float(np.quantile(found, 0.99)), "max": float(found.max()),
        "histogram": {f">= {edge:g}": int(n) for edge, n in zip(EDGES, counts, strict=True)},
    }  # fmt: skip


def row_counts(setting: HourSettings) -> Sequence[int]:
    return setting.pick((1, 16, 64, 256, 512), (1, 4))


def measure_decode(setting: HourSettings) -> dict[str, Any]:
    """Milliseconds of a step of decoding by the number of rows, eight of a prompt; and a profile of 64 rows."""
    from rlvr.engine.engine import Engine
    from rlvr.engine.engine_options import LoraConfig

    model, facts = load(setting), dict[str, Any]()
    steps, length = setting.pick((32, 512), (3, 40))

    def start(engine: Engine, snapshot: Any, count: int) -> None:
        """Let `count` rows run, and warm up."""
        prompts = draw_prompts(SamplingShape("", -(-count // 8), length, length, 0, 0), model.vocabulary)
        for i, prompt in enumerate(prompts):
            params = SamplingParams(4 * steps + 8, seed=i, stop=[])
            engine.enqueue(snapshot, ModelInput(prompt), min(8, count - 8 * i), params)
        while len(engine._sampler.scheduler.rows) < count:
            engine.advance()
        for _ in range(4):
            engine.advance()

    def time_steps(engine: Engine) -> float:
        wait_for_device(model)
        began = time.perf_counter()
        for _ in range(steps):
            engine.advance()
        wait_for_device(model)
        return 1e3 * (time.perf_counter() - began) / steps

    for count in row_counts(setting):
        engine = Engine(model)
        start(engine, engine.base_snapshot(), count)
        took = time_steps(engine)
        facts[f"{count} rows"] = {"ms": took, "tokens/s": 1e3 * count / took}
        del engine
        free_device()
    count = setting.pick(64, 4)
    engine = Engine(model)
    start(engine, engine.base_snapshot(), count)
    facts["profile"] = _profile(setting, engine, count)
    del engine
    free_device()
    engine = Engine(model)
    policy = engine.create_policy("adapter", lora=LoraConfig(rank=16))
    start(engine, policy.snapshot(), count)
    facts[f"{count} rows, adapter"] = {"ms": time_steps(engine)}
    return facts


def _profile(setting: HourSettings, engine: Any, count: int) -> dict[str, Any]:
    """Operations a step and the five that take most, of four steps; the trace is in the folder of the results."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *setting.pick([ProfilerActivity.CUDA], [])]
    with profile(activities=activities) as profiler:
        for _ in range(4):
            engine.advance()
        wait_for_device(engine.model)
    profiler.export_chrome_trace(str(setting.folder / f"decode-{count}-rows.trace.json"))
    averages: list[Any] = list(profiler.key_averages())
    measured = setting.pick("self_device_time_total", "self_cpu_time_total")
    top = sorted(averages, key=lambda event: -getattr(event, measured))[:5]
    return {
        "operations a step": sum(event.count for event in averages if event.key.startswith("aten::")) / 4,
        "longest, us a step": {event.key[:60]: getattr(event, measured) / 4 for event in top},
    }


@contextmanager
def open_vllm(setting: HourSettings, *flags: str) -> Iterator[str]:
    """The address of a vLLM server of the main model in bf16: the one of the settings, or one that is started."""
    if setting.vllm_url:
        yield setting.vllm_url
        return
    if not PYTHON:
        raise NotHere(f"{MISSING}, or give --vllm-url")
    log = setting.folder / "vllm.log"
    # The last of several flags counts: in `VllmProcess` a server computes in float32, without graphs.
    words = ("--dtype", setting.dtype, "--no-enforce-eager", "--gpu-memory-utilization", "0.35", *flags)
    process = VllmProcess(Path(setting.main_model()), log, *words, max_model_len=1024)
    process.launch()
    try:
        process.wait_until_ready()
        yield process.url
    finally:
        process.stop(signal.SIGKILL)


def measure_vllm(setting: HourSettings) -> dict[str, Any]:
    """The rows of `decode` by vLLM, with a seed in each request, as `sampler.name=vllm` sends it, and without."""
    from rlvr.clients.vllm import VllmOptions
    from rlvr.clients.vllm.vllm_server import VllmServer, read_completion
    from rlvr.engine.tokenizer import load_tokenizer

    vocabulary = len(load_tokenizer(setting.main_model()))
    new, length = setting.pick((128, 512), (4, 24))
    facts: dict[str, Any] = {}
    with open_vllm(setting) as url, asyncio.Runner() as loop:
        server = VllmServer(url, VllmOptions([url], concurrency=256))
        loop.run(server.check())

        async def sample(count: int, seeds: bool) -> int:
            prompts = draw_prompts(SamplingShape("", -(-count // 8), length, length, 0, 0), vocabulary)
            fixed = {"max_tokens": new, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}
            calls = [
                server.generate(
                    server.base, prompt,
                    {**fixed, "n": min(8, count - 8 * i), **({"seed": 8 * i} if seeds else {})}, "hour",
                )
                for i, prompt in enumerate(prompts)
            ]  # fmt: skip
            answers = await asyncio.gather(*calls)
            return sum(len(read_completion(choice).tokens) for answer in answers for choice in answer["choices"])

        for count in row_counts(setting):
            for seeds in (True, False):
                loop.run(sample(count, seeds))  # graphs, caches
                began = time.perf_counter()
                tokens = loop.run(sample(count, seeds))
                took = time.perf_counter() - began
                name = f"{count} rows{'' if seeds else ', no seeds'}"
                facts[name] = {"ms": 1e3 * took / new, "tokens/s": tokens / took}
    return facts


def measure_training(setting: HourSettings) -> dict[str, Any]:
    """Tokens a second of a whole step of all weights: trees and packing, logits at once, tokens of a micro-batch."""
    import torch

    model = load(setting)
    data = make_rows(setting, model.vocabulary, groups=8)
    tokens = sum(datum.model_input.length for datum in data)
    best, weights = peak(model.device, model.dtype), sum(p.numel() for p in model.parameters().values())
    facts: dict[str, Any] = {"tokens": tokens, "matrix product, FLOP/s": best}
    small, large = setting.pick((4096, 16_384), (64, 256))
    for tree in (True, False):
        for logits in (1 << 25, 1 << 29):
            for micro in (small, large):
                name = f"{'tree' if tree else 'plain'}, logits 2^{logits.bit_length() - 1}, micro {micro}"
                limits: dict[str, Any] = {"micro_tokens": micro, "logit_elements": logits}
                client = make_client(setting, model, tree=tree, pack=tree, **limits)
                try:
                    times: list[float] = []
                    for _ in range(3):
                        wait_for_device(model)
                        began = time.perf_counter()
                        client.forward_backward(data, "ppo").result()
                        client.optim_step(ADAM).result()
                        wait_for_device(model)
                        times.append(time.perf_counter() - began)
                    rate = tokens / min(times[1:])
                    facts[name] = {"tokens/s": rate, "share of the matrix product": 6 * weights * rate / best}
                except torch.OutOfMemoryError as error:
                    facts[name] = f"out of memory: {str(error)[:100]}"
                del client
                free_device()
    return facts


def measure_memory(setting: HourSettings) -> dict[str, Any]:
    """The peak of a step of sampling and training beside what the plan of a run says."""
    import torch

    from rlvr.engine.engine_options import EngineLimits
    from rlvr.engine.memory import estimate_memory, read_shape

    on_gpu = setting.device == "cuda"
    model = load(setting)
    before = torch.cuda.memory_allocated() if on_gpu else peak_bytes()
    client = make_client(setting, model)
    data = make_rows(setting, model.vocabulary, groups=8)
    prompt, new = setting.pick((256, 512), (24, 16))
    shape = SamplingShape("", len(data) // 8, prompt, prompt, 8, new)

    def take_peak() -> int:
        if not on_gpu:
            return peak_bytes()
        found = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return found

    facts: dict[str, Any] = {"model": before}
    for step in ("first", "second"):  # the optimizer's state is there from the first on
        sampler = client.create_sampling_client()
        asked = draw_prompts(shape, model.vocabulary)
        params = SamplingParams(new, seed=0, stop=[])
        for future in [sampler.sample(ModelInput(row), 8, params) for row in asked]:
            future.result()
        facts[f"{step} sampling"] = take_peak()
        del sampler
        client.forward_backward(data, "ppo").result()
        client.optim_step(ADAM).result()
        facts[f"{step} training"] = take_peak()
    if on_gpu:
        facts["reserved"] = torch.cuda.max_memory_reserved()
        free, total = torch.cuda.mem_get_info()  # of other processes too
        facts["context and libraries"] = total - free - torch.cuda.memory_reserved()
    sizes = read_shape(model.module.config.to_dict())
    if sizes is not None:
        plan = estimate_memory(sizes, EngineLimits(), dtype=setting.dtype, row_tokens=prompt + new, rows=len(data))
        facts["plan"] = {"total": plan.total, "KV cache": plan.cache, "persistent": plan.persistent}
    return facts


def measure_checkpoint(setting: HourSettings) -> dict[str, Any]:
    """Seconds to save and to load a policy of all weights with its optimizer."""
    client = make_client(setting, load(setting), "checkpoint")
    client.forward_backward(make_rows(setting, client._engine.model.vocabulary), "ppo").result()
    client.optim_step(ADAM).result()
    wait_for_device(client._engine.model)
    began = time.perf_counter()
    path = Path(client.save_state("one").result().path)
    saved = time.perf_counter() - began
    size = sum(file.stat().st_size for file in path.iterdir())
    began = time.perf_counter()
    client.load_state_with_optimizer(str(path)).result()
    wait_for_device(client._engine.model)
    loaded = time.perf_counter() - began
    return {"bytes": size, "save_s": saved, "load_s": loaded, "save, GB/s": size / saved / 1e9}


def measure_colocated(setting: HourSettings) -> dict[str, Any]:
    """Steps of a run whose completions come from a vLLM server on the same card: an adapter, then all weights."""
    from rlvr.clients.registry import close_client
    from rlvr.clients.vllm import VllmOptions
    from rlvr.clients.vllm.vllm_clients import sample_from_vllm
    from rlvr.core.types import Trajectory
    from rlvr.engine.engine_options import LoraConfig

    steps, groups, prompt, new = setting.pick((20, 8, 256, 256), (2, 2, 24, 4))
    facts: dict[str, Any] = {}
    with open_vllm(setting, *ADAPTERS) as url:
        for name, lora in (("adapter", LoraConfig(rank=16)), ("all weights", None)):
            trainer = make_client(setting, load(setting), name.replace(" ", "-"), lora=lora)
            vocabulary = trainer._engine.model.vocabulary
            client: Any = sample_from_vllm(trainer, VllmOptions([url]), has_adapter=lora is not None, keep=2)
            asked = draw_prompts(SamplingShape("", groups, prompt, prompt, 8, new), vocabulary)
            parts: dict[str, list[float]] = {"publish_s": [], "sample_s": [], "train_s": []}
            try:
                for step in range(steps):
                    marks = [time.perf_counter()]
                    sampler = client.save_weights_and_get_sampling_client()
                    marks.append(time.perf_counter())
                    how = SamplingParams(new, seed=step, stop=[])
                    futures = [sampler.sample(ModelInput(row), 8, how) for row in asked]
                    answers = [(row, s) for row, f in zip(asked, futures, strict=True) for s in f.result().sequences]
                    marks.append(time.perf_counter())
                    trained = [
                        Trajectory("", row, "", s.tokens, s.logprobs or [], advantage=(-1.0) ** i)
                        for i, (row, s) in enumerate(answers)
                    ]
                    data = [Datum.from_trajectory(row, 1.0 / len(answers)) for row in trained]
                    client.forward_backward(data, "ppo").result()
                    client.optim_step(replace(ADAM, learning_rate=1e-6)).result()
                    marks.append(time.perf_counter())
                    for values, a, b in zip(parts.values(), marks, marks[1:], strict=False):
                        values.append(b - a)
            finally:
                close_client(client)
            later = {part: float(np.median(values[1:] or values)) for part, values in parts.items()}
            facts[name] = {**later, "steps": steps, "tokens/s": groups * 8 * new / sum(later.values())}
            del trainer, client
            free_device()
    return facts


MEASUREMENTS = {
    one.name: one
    for one in (
        Measurement("resume", 120, measure_resume),
        Measurement("tests", 480, measure_tests),
        Measurement("probe", 180, measure_probe),
        Measurement("gap", 150, measure_gap),
        Measurement("decode", 240, measure_decode),
        Measurement("vllm", 420, measure_vllm),
        Measurement("training", 360, measure_training),
        Measurement("memory", 150, measure_memory),
        Measurement("checkpoint", 180, measure_checkpoint),
        Measurement("colocated", 480, measure_colocated),
    )
}
