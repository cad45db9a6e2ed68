"""Memory and time of training a model of 100 million weights, in one process and cut over ranks, beside `rlvr plan`.

    python -m benchmarks.sharded_memory                    # one process, then 1, 2 and 4 ranks: prints a table
    python -m benchmarks.sharded_memory --ranks 0 2 --rows 4 --tokens 128

Each case runs in new processes with one thread each. Memory is that of the system (resident), with Python and torch
themselves. A step is one forward-backward call and an optimizer step of AdamW in fp32. The plan is given what as many
processes reach at once in products of matrices, reading and exchange (`sharded_peaks`), and its memory the libraries'.
One rank is planned as one process: what `fully_shard` costs without a second rank is no part of a plan.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.sharded_peaks import MachinePeaks, measure_peaks
from rlvr.clients.local_engine import ModelBuild
from rlvr.clients.sharded.rank_worker import RankWorker
from rlvr.clients.sharded.sharded_client import ShardedPolicy, ShardedTrainingClient, start_ranks
from rlvr.clients.sharded.sharding_options import ShardingOptions
from rlvr.core.messages import AdamParams, Datum, ModelInput
from rlvr.engine.capacity import ClusterOptions, StepWork, estimate_step
from rlvr.engine.engine_options import EngineLimits, LoraConfig
from rlvr.engine.memory import read_shape

CONFIG = {
    "model_type": "qwen3", "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}  # fmt: skip
WORDS = 16_000


def make_rows(count: int, tokens: int) -> list[Datum]:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, WORDS, (count, tokens + 1))
    return [
        Datum(ModelInput(row[:-1].tolist()), {"target_tokens": row[1:], "weights": np.ones(tokens) / rows.size})
        for row in rows
    ]


def plan_policy(tokens: int, lora: int) -> ShardedPolicy:
    from rlvr.engine.tokenizer import build_tokenizer

    tokenizer = build_tokenizer("words", [f"w{i}" for i in range(WORDS - 2)], end="<end>", pad="<pad>")
    build = ModelBuild(None, CONFIG, tokenizer, 0, "cpu", "float32")
    limits = EngineLimits(micro_tokens=tokens, logit_elements=1 << 22, pack=False)
    return ShardedPolicy(build, LoraConfig(lora, lora) if lora else None, 0, limits)


class AloneWorker(RankWorker):
    """The learner without shards, in a process of its own: the same commands, so the same measure."""

    def join(self, rank: int, size: int, **given: Any) -> str:
        import torch

        from rlvr.engine.sharding import Ranks

        torch.set_num_threads(given["threads"])
        self.device, self.ranks = "cpu", Ranks()
        return "none"

    def build(self, **given: Any) -> Any:
        from rlvr.engine import sharding

        sharding.shard_model = lambda model, ranks: None
        return super().build(**given)


def measure(ranks: int, rows: list[Datum], steps: int, lora: int, tokens: int) -> dict[str, Any]:
    """Resident MiB of each rank, and seconds of each step."""
    from rlvr.clients.sharded.rank_processes import RankProcesses

    start = None if ranks else lambda options: RankProcesses(options.ranks, "benchmarks.sharded_alone")
    with tempfile.TemporaryDirectory() as folder:
        options = ShardingOptions(max(1, ranks))
        client = start_ranks(plan_policy(tokens, lora), options, Path(folder), start=start)
        try:
            return _measure_steps(client, rows, steps)
        finally:
            client.close()


def _measure_steps(client: ShardedTrainingClient, rows: list[Datum], steps: int) -> dict[str, Any]:
    def train() -> None:
        client.forward_backward(rows, "cross_entropy").result()
        client.optim_step(AdamParams(1e-4)).result()

    loaded = client.group.call("measure_memory")
    train()  # makes the optimizer's state
    client.group.call("measure_memory")
    seconds: list[float] = []
    for _ in range(steps):
        began = time.perf_counter()
        train()
        seconds.append(time.perf_counter() - began)
    trained = client.group.call("measure_memory")
    return {
        "weights": client.facts.trainable,
        "loading": max(m["most"] for m in loaded),
        "between": max(m["now"] for m in trained),
        "peak": max(m["most"] for m in trained),
        "seconds": statistics.median(seconds),
    }


def plan(ranks: int, rows: int, tokens: int, lora: int, peaks: MachinePeaks) -> tuple[float, float]:
    """MiB of a rank at its peak and seconds of a step, by the formulas of `rlvr plan`."""
    shape = read_shape(CONFIG | {"vocab_size": WORDS})
    assert shape is not None
    adapter = LoraConfig(lora, lora) if lora else None
    work = StepWork(rows, 1, 1, tokens - 1, tokens - 1, dtype="float32", lora=adapter)
    cluster = ClusterOptions(
        "cpu", memory_gib=1024.0, tflops=peaks.flops / 1e12, memory_gb_s=peaks.memory / 1e9, trainers=max(1, ranks),
        samplers=1, network_gb_s=peaks.network / 1e9, compute_efficiency=1.0, memory_efficiency=1.0,
    )  # fmt: skip
    estimate = estimate_step(shape, work, plan_policy(tokens, lora).limits, cluster)
    return sum(part.value for part in estimate.trainer) / 2**20 + peaks.libraries, estimate.phases["training"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[0, 1, 2, 4], help="0: one process without shards")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lora", type=int, default=0, help="the rank of an adapter; 0 trains all weights")
    given = parser.parse_args()
    rows = make_rows(given.rows, given.tokens)
    heads = ("weights trained", "MiB while loading", "between steps", "peak of a step", "planned", "seconds a step")
    print(f"| | {' | '.join(heads)} | planned |\n|---|{'--:|' * 7}")
    for ranks in given.ranks:
        found = measure(ranks, rows, given.steps, given.lora, given.tokens)
        peaks = measure_peaks(max(1, ranks), given.tokens, CONFIG["hidden_size"], CONFIG["intermediate_size"])
        memory, seconds = plan(ranks, given.rows, given.tokens, given.lora, peaks)
        name = f"{ranks} ranks, each" if ranks > 1 else "1 rank" if ranks else "one process"
        cells = [f"{found[key]:,.0f}" for key in ("weights", "loading", "between", "peak")]
        cells += [f"{memory:,.0f}", f"{found['seconds']:.2f}", f"{seconds:.2f}"]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
        print(
            f"  a process reached {peaks.flops / 1e9:.0f} GFLOP/s, read {peaks.memory / 1e9:.1f} GB/s, was sent "
            f"{peaks.network / 1e9:.2f} GB/s; libraries {peaks.libraries:.0f} MiB", file=sys.stderr, flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
