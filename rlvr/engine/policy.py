"""A policy: one trainable set of weights on the engine's model (all of it, or one adapter), and views of its past.

A sampling client is bound to immutable weights. A `Snapshot` aliases the live ones as long as they stay what they
were, and is given a copy just before the next optimizer step: a loop that drops its sampling client before it steps
never pays for one.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rlvr.engine.model import LanguageModel
from rlvr.engine.options import LoraConfig


class Policy:
    """`parameters` are the live trainable tensors by name; `version` counts optimizer steps."""

    def __init__(self, name: str, parameters: dict[str, nn.Parameter], lora: LoraConfig | None) -> None:
        self.name = name
        self.parameters = parameters
        self.lora = lora
        self.version = 0
        # Low-precision weights lose small updates: the optimizer then works on fp32 masters.
        self.masters: dict[str, nn.Parameter] = {
            key: p if p.dtype == torch.float32 else nn.Parameter(p.detach().float()) for key, p in parameters.items()
        }
        self._optimizer: torch.optim.AdamW | None = None
        self._snapshots: weakref.WeakSet[Snapshot] = weakref.WeakSet()

    @property
    def optimizer(self) -> torch.optim.AdamW:
        """AdamW over the masters, made at first use: a policy that only samples pays no memory for it."""
        if self._optimizer is None:
            self._optimizer = torch.optim.AdamW(list(self.masters.values()), lr=0.0, weight_decay=0.0)
        return self._optimizer

    @property
    def fingerprint(self) -> str:
        """Names the live weights: the policy and its optimizer steps. Saved and restored weights keep theirs."""
        return f"{self.name}@{self.version}"

    @property
    def scale(self) -> float:
        return self.lora.alpha / self.lora.rank if self.lora else 1.0

    def snapshot(self) -> Snapshot:
        snapshot = Snapshot(self)
        self._snapshots.add(snapshot)
        return snapshot

    def about_to_change(self) -> None:
        """Give every snapshot of the live weights its (shared) copy."""
        holders = [s for s in self._snapshots if s.copy is None]
        if holders:
            copy = {name: p.detach().clone() for name, p in self.parameters.items()}
            for holder in holders:
                holder.copy = copy

    def widen_gradients(self) -> None:
        """Add the gradients of narrow weights to their fp32 masters': a bf16 sum loses small terms."""
        for name, p in self.parameters.items():
            master = self.masters[name]
            if master is not p and p.grad is not None:
                master.grad = p.grad.float() if master.grad is None else master.grad.add_(p.grad)
                p.grad = None

    def clear_gradients(self) -> None:
        for p in (*self.parameters.values(), *self.masters.values()):
            p.grad = None

    def sha256(self) -> str:
        """A hash over names, dtypes, shapes and bytes of the weights, in order of name."""
        return tensors_sha256(self.parameters)


class Snapshot:
    """The weights of a policy at one moment; `copy` is None while they are still the live ones."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.version = policy.version
        self.fingerprint = policy.fingerprint
        self.copy: dict[str, Tensor] | None = None

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return self.policy.parameters if self.copy is None else self.copy

    @property
    def batch_key(self) -> int:
        """Rows may share a batch when this is equal: adapters of one base always may."""
        if self.policy.lora:
            return 0
        return id(self.policy) if self.copy is None else id(self.copy)


@contextmanager
def weights_of(model: LanguageModel, snapshot: Snapshot) -> Iterator[None]:
    """Run the base model with a snapshot's full weights. Does nothing for adapters or live weights."""
    if snapshot.policy.lora or snapshot.copy is None:
        yield
        return
    live = {name: p.data for name, p in snapshot.policy.parameters.items()}
    try:
        for name, p in snapshot.policy.parameters.items():
            p.data = snapshot.copy[name]
        yield
    finally:
        for name, p in snapshot.policy.parameters.items():
            p.data = live[name]


def tensors_sha256(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
