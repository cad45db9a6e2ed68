"""One rank: a process that holds a part of every weight and runs the learner on its share of the data.

    python -m rlvr.clients.sharded.rank_worker DESCRIPTOR         # started by `rank_processes`

It takes commands one by one from the driver, and ends at once when the driver is gone, whatever it computes. On the
signal USR1 it writes its stack to stderr. On a Ray cluster `ray_ranks` has the same worker.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from rlvr.clients.local_engine import ModelBuild
from rlvr.clients.sharded.rank_channel import RankChannel, RankCommand, RankFacts, RankFailure, RankReply
from rlvr.core.machine import describe_code
from rlvr.core.messages import AdamParams, Datum, ForwardBackwardOutput, NonFiniteError, OptimStepResponse
from rlvr.engine.engine_options import EngineLimits, LoraConfig

PACKAGES = ("torch", "transformers")  # that must be the same on every rank


class RankWorker:
    """The commands: first `listen` (rank 0) and `join`, then `build` for one policy, or `build_base` for the adapters
    that `set_adapter` gives one after the other. All other commands are sent to every rank.

    `host`: the address of this machine at which the other ranks reach it. `own_gpus`: the GPUs that this rank alone
    sees, as Ray gives them; None where the ranks share those of one machine.
    """

    def __init__(self, host: str = "127.0.0.1", own_gpus: int | None = None) -> None:
        self._host, self._own_gpus = host, own_gpus

    def listen(self, port: int) -> tuple[str, int]:
        """Open the rendezvous of the ranks on `port`, 0 for a free one; ValueError if it is in use."""
        import torch.distributed as dist

        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self._host, port))
        except OSError as error:
            listener.close()
            raise ValueError(f"sharding.port={port}: {error.strerror}; leave it out to take a free one") from error
        listener.listen()
        chosen = listener.getsockname()[1]
        store: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
        self._store = store(
            self._host, chosen, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return self._host, chosen

    def join(self, rank: int, size: int, host: str, port: int, device: str, threads: int, timeout_s: float) -> str:
        """Join the process group at the rendezvous of rank 0; the name of the backend."""
        import torch
        import torch.distributed as dist

        from rlvr.engine import malloc
        from rlvr.engine.model_loading import pick_device
        from rlvr.engine.sharding import Ranks
        from rlvr.engine.tokenizer import silence_transformers

        silence_transformers()
        malloc.return_freed_memory()
        torch.set_num_threads(threads)
        kind = pick_device(device).type
        self.device = self._take_gpu(rank, size) if kind == "cuda" else kind
        if kind == "cpu" and self._own_gpus:
            raise ValueError("Ray gave this rank a GPU, and its torch sees none; install a CUDA build of torch there")
        patience = timedelta(seconds=timeout_s)
        store = dist.TCPStore(host, port, is_master=False, timeout=patience)  # pyright: ignore[reportPrivateImportUsage]
        backend = "nccl" if kind == "cuda" else "gloo"  # NCCL has not been run yet
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=patience,
            device_id=torch.device(self.device) if kind == "cuda" else None,
        )  # fmt: skip
        self.ranks = Ranks(rank, size, self.device)
        return backend

    def _take_gpu(self, rank: int, size: int) -> str:
        """Make a GPU of its own the current one, to which FSDP moves parameters; its name. ValueError if too few.

        NCCL refuses two ranks on one GPU.
        """
        import torch

        here = torch.cuda.device_count()
        if self._own_gpus is None and size > here:
            raise ValueError(f"sharding.ranks={size}: this machine has {here} GPUs, and each rank needs its own")
        device = "cuda:0" if self._own_gpus else f"cuda:{rank}"
        torch.cuda.set_device(device)
        return device

    def has_file(self, path: Path) -> bool:
        """Whether this process sees a file that the driver has written, in a folder in which it can write too."""
        return path.is_file() and os.access(path.parent, os.W_OK)

    def build(
        self, model: ModelBuild, lora: LoraConfig | None, seed: int, limits: EngineLimits, adapter: Path | None
    ) -> RankFacts:
        """Load the model, keep this rank's part of it and make the policy. No collective, so ranks may take turns."""
        from rlvr.engine.checkpoint import load_adapter
        from rlvr.engine.muon import hidden_matrices
        from rlvr.engine.policy import Policy

        bank, code = self._load(model, trains_base=lora is None)
        adapter_weights = None if lora is None else bank.init_weights(lora, seed)
        matrices = hidden_matrices(self.model.module) if lora is None else None
        self._shard(bank, limits)
        self.policy = Policy("policy", adapter_weights or self.model.parameters(), lora, matrices)
        if adapter is not None:
            load_adapter(adapter, self.policy)
        return self._describe(sum(p.numel() for p in self.policy.parameters.values()), code)

    def build_base(self, model: ModelBuild, limits: EngineLimits) -> RankFacts:
        """Load the model and keep this rank's part of it, for adapters to come. No collective."""
        bank, code = self._load(model, trains_base=False)
        bank.install()
        self._shard(bank, limits)
        return self._describe(0, code)

    def _load(self, model: ModelBuild, *, trains_base: bool) -> tuple[Any, dict[str, str]]:
        """Load the whole model: the bank of its adapters, and what must be equal on all ranks."""
        from dataclasses import replace

        from rlvr.engine.lora import LoraBank
        from rlvr.engine.policy import tensors_sha256

        self.model = replace(model, device=self.device).load()
        for weight in self.model.parameters().values():
            weight.requires_grad_(trains_base)
        return LoraBank(self.model), {
            **describe_code(*PACKAGES),
            "weights": tensors_sha256(self.model.parameters()),
        }

    def _shard(self, bank: Any, limits: EngineLimits) -> None:
        from rlvr.engine.learner import Learner
        from rlvr.engine.sharding import shard_model

        shard_model(self.model, self.ranks)
        self.learner = Learner(self.model, bank, limits, self.ranks)

    def _describe(self, trainable: int, code: dict[str, str]) -> RankFacts:
        from rlvr.engine.model_loading import describe_device

        return RankFacts(
            trainable,
            str(self.model.dtype).removeprefix("torch."),
            self.model.context,
            self.model.vocabulary,
            self.model.notes,
            describe_device(self.model.device),
            code,
        )

    def set_adapter(self, lora: LoraConfig, weights: dict[str, np.ndarray]) -> None:
        """Take an adapter with these weights in place of the one before."""
        import torch

        from rlvr.engine.policy import Policy

        parameters = {n: torch.nn.Parameter(torch.from_numpy(w).to(self.device)) for n, w in weights.items()}
        self.policy = Policy("adapter", parameters, lora)

    def take_gradients(self) -> dict[str, np.ndarray]:
        """The gradients of the adapter, from rank 0 alone, which are then cleared."""
        masters = self.policy.masters if self.ranks.rank == 0 else {}
        gradients = {name: m.grad.cpu().numpy() for name, m in masters.items() if m.grad is not None}
        self.policy.clear_gradients()
        return gradients

    def forward_backward(
        self, data: list[Datum], loss_fn: str, config: dict[str, float] | None, backward: bool
    ) -> ForwardBackwardOutput:
        return self.learner.forward_backward(self.policy, data, loss_fn, config, backward=backward)

    def optim_step(self, params: AdamParams) -> tuple[OptimStepResponse, int]:
        return self.learner.optim_step(self.policy, params), self.policy.version

    def save(self, folder: Path, optimizer: bool, gradients: bool = False) -> None:
        from rlvr.engine.checkpoint import save_policy

        first = self.ranks.rank == 0
        save_policy(folder, self.policy, self.model, optimizer=optimizer, gradients=gradients, writes=first)

    def load(self, folder: Path, optimizer: bool) -> int:
        from rlvr.engine.checkpoint import load_policy

        load_policy(folder, self.policy, self.model, optimizer=optimizer)
        return self.policy.version

    def gather(self) -> dict[str, np.ndarray]:
        """The whole weights of the policy, as bytes by name; from rank 0 alone."""
        import torch

        from rlvr.engine.sharding import gather_whole, local_part

        weights: dict[str, np.ndarray] = {}
        for name, p in self.policy.parameters.items():
            whole = gather_whole(local_part(p.detach()), p)
            if self.ranks.rank == 0:
                weights[name] = whole.cpu().contiguous().view(-1).view(torch.uint8).numpy()
        return weights

    def sha256(self) -> str:
        return self.policy.sha256()

    def measure_memory(self) -> dict[str, float]:
        """MiB of this process: `now` resident, and the `most` since the last call (Linux)."""
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        found = {name: int(lines[key].split()[0]) / 1024 for name, key in (("now", "VmRSS"), ("most", "VmHWM"))}
        Path("/proc/self/clear_refs").write_text("5")
        return found


def describe_failure(error: Exception) -> RankFailure:
    text, trace = str(error), traceback.format_exc()
    if isinstance(error, NonFiniteError):
        return RankFailure("non_finite", text.partition(" is not finite")[0], trace, error.rows)
    if isinstance(error, OSError) and error.errno:
        return RankFailure("system", f"{error.filename or ''}", trace, number=error.errno)
    return RankFailure("value" if isinstance(error, ValueError) else "other", text, trace)


def answer(worker: Any, command: RankCommand) -> RankReply:
    """Carry out a command; an exception becomes the reply's `failure`."""
    began, ranks = time.perf_counter(), getattr(worker, "ranks", None)
    waited = ranks.waited if ranks else 0.0
    try:
        reply = RankReply(getattr(worker, command.name)(**command.arguments))
    except Exception as error:
        reply = RankReply(failure=describe_failure(error))
    spent = (worker.ranks.waited - waited) if ranks else 0.0
    return RankReply(reply.value, reply.failure, time.perf_counter() - began, spent)


def serve(channel: RankChannel, worker: Any) -> None:
    """Answer commands until the driver is gone."""
    commands: queue.Queue[RankCommand] = queue.Queue()

    def read() -> None:
        try:
            while True:
                commands.put(channel.receive())
        except (EOFError, OSError):
            os._exit(1)  # whatever the other thread computes, or waits for

    threading.Thread(target=read, daemon=True).start()
    while True:
        channel.send(answer(worker, commands.get()))


def run_rank(worker: RankWorker) -> None:
    """Run this process as a rank until the driver is gone."""
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    serve(RankChannel(int(sys.argv[1])), worker)


if __name__ == "__main__":
    run_rank(RankWorker())
