"""What the tests of `client=sharded` share: a tiny policy, started on ranks and in this process, and rows."""

from __future__ import annotations

import math
import socket
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import load_file

from rlvr.clients.local import LocalTrainingClient
from rlvr.clients.local_engine import ModelBuild
from rlvr.clients.sharded.rank_processes import RankProcesses
from rlvr.clients.sharded.sharded_client import ShardedPolicy, ShardedTrainingClient, start_ranks
from rlvr.clients.sharded.sharding_options import ShardingOptions
from rlvr.core.messages import Datum, ModelInput
from rlvr.engine.engine import Engine
from rlvr.engine.engine_options import EngineLimits, LoraConfig
from rlvr.engine.tokenizer import build_tokenizer
from tests.kit.forked_process import Program
from tests.kit.tiny import CONFIGS, END, PAD, WORDS, data, with_inputs

LORA = LoraConfig(4, 8.0)
PROMPT = 5  # tokens that the rows of a group share


def tiny_policy(kind: str = "qwen3", lora: LoraConfig | None = None, dtype: str = "float32", **limits: Any):
    tokenizer = build_tokenizer("words", WORDS, end=END, pad=PAD)
    build = ModelBuild(None, {**CONFIGS[kind], "initializer_range": 0.2}, tokenizer, 1, "cpu", dtype)
    return ShardedPolicy(build, lora, 0, EngineLimits(**limits))


class ForkedRanks(RankProcesses):
    """Ranks that need not import torch: tests of whole runs start them as a user's are."""

    def _run(self, words: list[str], env: dict[str, str], log: IO[bytes], connection: socket.socket) -> Any:
        return Program(words, env=env, stdout=log, stderr=log, connection=connection)


def fork_ranks(options: ShardingOptions) -> ForkedRanks:
    return ForkedRanks(options.ranks)


def start(policy: ShardedPolicy, folder: Path, ranks: int = 2, timeout_s: float = 600.0) -> ShardedTrainingClient:
    return start_ranks(policy, ShardingOptions(ranks, timeout_s), folder / f"{ranks}-ranks", start=fork_ranks)


def start_alone(policy: ShardedPolicy, folder: Path) -> LocalTrainingClient:
    """The same policy in this process."""
    engine = Engine(policy.model.load(), policy.limits)
    return LocalTrainingClient(engine, engine.create_policy("policy", lora=policy.lora, seed=policy.seed), folder / "1")


def move_adapter(client: LocalTrainingClient) -> None:
    """Change every weight of an adapter: as it begins, half of its gradient is 0."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in client.policy.parameters.values():
            p.add_(torch.randn(p.shape, generator=generator) * 0.1)


def group_rows(lengths: list[int], seed: int = 0) -> list[Datum]:
    """Rows of which each three begin with the same prompt, if they are long enough; some begin with a weight."""
    rows = data(lengths, seed)
    for row in rows[::2]:
        for name in ("advantages", "weights"):
            row.loss_fn_inputs[name].data[0] = 0.5
    for i in range(len(rows)):
        first = rows[i - i % 3].model_input.tokens[:PROMPT]
        if i % 3 and len(rows[i].model_input.tokens) > PROMPT and len(first) == PROMPT:
            rows[i] = Datum(ModelInput([*first, *rows[i].model_input.tokens[PROMPT:]]), rows[i].loss_fn_inputs)
    return rows


def measure_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The norm of the difference, as a share of the norm."""
    assert found.keys() == expected.keys()
    gap = math.fsum(float((found[k].double() - expected[k].double()).square().sum()) for k in expected)
    return math.sqrt(gap / math.fsum(float(g.double().square().sum()) for g in expected.values()))


def read_gradients(client: ShardedTrainingClient, folder: Path) -> dict[str, torch.Tensor]:
    """The ranks' gradients, as a checkpoint in the new `folder` holds them."""
    folder.mkdir()
    client.group.call("save", folder=folder, optimizer=False, gradients=True)
    return load_file(folder / "gradients.safetensors")


def with_kl(rows: list[Datum]) -> list[Datum]:
    """The rows with a KL to a reference and an exact entropy bonus."""
    return [
        with_inputs(
            row,
            reference_logprobs=row.loss_fn_inputs["logprobs"],
            kl_weights=row.loss_fn_inputs["weights"],
            entropy_weights=row.loss_fn_inputs["weights"],
        )
        for row in rows
    ]
