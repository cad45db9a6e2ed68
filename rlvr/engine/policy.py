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
        """AdamW over the masters, in one pass over memory; made at first use: a policy that only samples has none."""
        if self._optimizer is None:
            self._optimizer = torch.optim.AdamW(list(self.masters.values()), lr=0.0, weight_decay=0.0, fused=True)
        return self._optimizer

    @property
    def fingerprint(self) -> str:
        """Names the live weights: the policy and its optimizer steps. Saved and restored weights keep theirs."""
        return f"{self.name}@{self.version}"

    @property
    def scale(self) -> float:
        return self.lora.alpha / self.lora.rank if self.lora else 1.0

    def snapshot(self) -> Snapshot:
        snapshot = Snapshot(self.fingerprint, policy=self, scale=self.scale)
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

    def finite(self) -> bool:
        """Whether every weight is a number: a step with an enormous learning rate leaves others."""
        return bool(torch.stack([p.detach().isfinite().all() for p in self.parameters.values()]).all())

    def clear_gradients(self) -> None:
        for p in (*self.parameters.values(), *self.masters.values()):
            p.grad = None

    def sha256(self) -> str:
        """A hash over names, dtypes, shapes and bytes of the weights, in order of name."""
        return tensors_sha256(self.parameters)


class Snapshot:
    """Weights that stay what they are: a policy's at one moment, a saved adapter's, or those of the base model alone.

    `copy` is None while they are still the live ones of `policy`.
    """

    def __init__(
        self,
        fingerprint: str,
        *,
        policy: Policy | None = None,
        copy: Mapping[str, Tensor] | None = None,
        scale: float = 1.0,
    ) -> None:
        assert policy is not None or copy is not None
        self.policy = policy
        self.copy = copy
        self.scale = scale
        self.fingerprint = fingerprint

    @property
    def full(self) -> bool:
        """Whether these are all the model's weights, not an adapter beside them."""
        return self.policy is not None and self.policy.lora is None

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        if self.copy is not None:
            return self.copy
        assert self.policy is not None
        return self.policy.parameters

    @property
    def batch_key(self) -> int:
        """Rows may share a batch when this is equal: adapters of one base, and the base itself, always may."""
        if not self.full:
            return 0
        return id(self.policy) if self.copy is None else id(self.copy)


NO_ADAPTER: Mapping[str, Tensor] = {}  # what a snapshot of the base model adds to it


@contextmanager
def weights_of(snapshot: Snapshot) -> Iterator[None]:
    """Run the base model with a snapshot's full weights. Does nothing for adapters or live weights."""
    if not snapshot.full or snapshot.copy is None:
        yield
        return
    assert snapshot.policy is not None
    parameters = snapshot.policy.parameters
    live = {name: p.data for name, p in parameters.items()}
    try:
        for name, p in parameters.items():
            p.data = snapshot.copy[name]
        yield
    finally:
        for name, p in parameters.items():
            p.data = live[name]


def tensors_sha256(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
