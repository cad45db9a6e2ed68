"""A policy: one trainable set of weights on the engine's model (all of it, or one adapter), and snapshots of it.

A sampling client is bound to immutable weights. A `Snapshot` aliases the live weights until they change: just before
the next optimizer step it gets a copy. A loop that drops its sampling client before it steps never pays for one.
"""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from rlvr.engine.engine_options import LoraConfig
from rlvr.engine.sharding import gather_whole, is_sharded, local_part

_EDITS = itertools.count(1)
VALUE_HEAD = "value_head.weight"  # [1, D] in fp32: a critic's value is its product with the last hidden state
VALUE_HEAD_FILE = "value_head.safetensors"  # in a critic's checkpoint, beside the weights that any policy has


def name_weights(name: str, version: Any, edits: Any) -> str:
    """The fingerprint of a policy's weights, `name@version.edits`. The counters may come from a file, unchecked."""
    return f"{name}@{version}{f'.{edits}' if type(edits) is int and edits else ''}"


class Policy:
    """A set of trainable weights (an adapter, or all of the model's) with its optimizer.

    `parameters` are the live trainable tensors by name; `version` counts optimizer steps. `matrices` names the
    weights of the linear layers inside the model, each with whether it is stored as [in, out]; `momenta` is the state
    of an optimizer besides AdamW. A weight has the state of one optimizer only, the last that stepped it.
    """

    def __init__(
        self,
        name: str,
        parameters: dict[str, nn.Parameter],
        lora: LoraConfig | None,
        matrices: Mapping[str, bool] | None = None,
    ) -> None:
        self.name = name
        self.parameters = parameters
        self.lora = lora
        self.matrices = matrices or {}
        self.momenta: dict[str, Tensor] = {}
        self.version = 0
        self._changes: int | None = None  # of the weights in memory, as torch counts them, at the last one of ours
        self.edits = 0  # by something else, such as an optimizer of a program's own: a number that no other edit has
        self._optimizer: torch.optim.AdamW | None = None
        self._snapshots: weakref.WeakSet[Snapshot] = weakref.WeakSet()

    @property
    def is_critic(self) -> bool:
        """Whether the policy has a value head, so that it predicts values instead of tokens."""
        return VALUE_HEAD in self.parameters

    @cached_property
    def masters(self) -> dict[str, nn.Parameter]:
        """What the optimizer works on, in fp32: low-precision weights lose small updates. Made when training begins.

        Of a sharded weight it is the part that this process holds; in fp32 the two share their memory.
        """
        return {
            key: p if p.dtype == torch.float32 and not is_sharded(p) else nn.Parameter(local_part(p.detach()).float())
            for key, p in self.parameters.items()
        }

    @property
    def optimizer(self) -> torch.optim.AdamW:
        """AdamW over the masters (fused), made at first use: a policy that only samples has none."""
        if self._optimizer is None:
            self._optimizer = torch.optim.AdamW(list(self.masters.values()), lr=0.0, weight_decay=0.0, fused=True)
        return self._optimizer

    @property
    def fingerprint(self) -> str:
        """Identifies the live weights by policy and optimizer steps. Saved and restored weights keep theirs.

        Weights that a program has changed since by other means end in a number of their own, `policy@3.1`. Torch counts
        these changes, but for fused optimizers and `.data`: after those call `mark_changed`.
        """
        self.notice_changes()
        return name_weights(self.name, self.version, self.edits)

    @property
    def scale(self) -> float:
        return self.lora.alpha / self.lora.rank if self.lora else 1.0

    def snapshot(self) -> Snapshot:
        snapshot = Snapshot(self.fingerprint, policy=self, scale=self.scale)
        self._snapshots.add(snapshot)
        return snapshot

    def note_change(self) -> None:
        """Take the weights as they are for those of this version."""
        self._changes, self.edits = self._count_changes(), 0

    def notice_changes(self) -> None:
        """Give the weights another fingerprint if something else than the engine changed them."""
        if self._changes is not None and self._changes != self._count_changes():
            self.mark_changed()
        self._changes = self._count_changes()

    def mark_changed(self) -> None:
        """Give the weights, which something else than the engine changed, another fingerprint."""
        self.edits = next(_EDITS)

    def _count_changes(self) -> int:
        pairs = [(p, self.__dict__.get("masters", {}).get(name, p)) for name, p in self.parameters.items()]
        counted = [*self.parameters.values(), *(master for p, master in pairs if master.dtype != p.dtype)]
        return sum(p._version for p in counted if not p.is_inference())

    def preserve_snapshots(self) -> None:
        """Give the snapshots of the live weights one shared copy, before these change."""
        holders = [s for s in self._snapshots if s.copy is None]
        if holders:
            copy = {name: p.detach().clone() for name, p in self.parameters.items()}
            for holder in holders:
                holder.copy = copy

    def adopt(self, snapshot: Snapshot) -> None:
        """Make a snapshot's weights the live ones, without a copy. Snapshots of the live weights keep these."""
        assert snapshot.copy is not None and "masters" not in self.__dict__, "these weights are trained"
        replaced = {name: p.data for name, p in self.parameters.items()}
        for holder in [s for s in self._snapshots if s.copy is None]:
            holder.copy = replaced
        for name, p in self.parameters.items():
            p.data = snapshot.copy[name]
        snapshot.copy = None
        self._snapshots.add(snapshot)

    def widen_gradients(self) -> None:
        """Add the gradients of the weights to those of their fp32 masters: a bf16 sum loses small terms."""
        for name, p in self.parameters.items():
            master = self.masters[name]
            if master is not p and p.grad is not None:
                part = local_part(p.grad)
                master.grad = part.float() if master.grad is None else master.grad.add_(part)
                p.grad = None

    def has_finite_weights(self) -> bool:
        """Whether every weight is finite. A step with an enormous learning rate can leave nan or infinity."""
        return bool(torch.stack([p.detach().isfinite().all() for p in self.parameters.values()]).all())

    def clear_gradients(self) -> None:
        for p in (*self.parameters.values(), *self.masters.values()):
            p.grad = None

    @property
    def is_sharded(self) -> bool:
        """Whether this process holds only a part of each weight."""
        return any(is_sharded(p) for p in self.parameters.values())

    def sha256(self) -> str:
        """A hash over the weights' names, dtypes, shapes and bytes, in order of name."""
        return tensors_sha256(self.parameters)


class Snapshot:
    """Immutable weights: a policy's at one moment, a saved adapter's, or those of the base model.

    `copy` is None while they equal the live weights of `policy`.
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
    def is_full(self) -> bool:
        """Whether these are all weights of the model, not an adapter."""
        return self.policy is not None and self.policy.lora is None

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        if self.copy is not None:
            return self.copy
        assert self.policy is not None
        return self.policy.parameters

    @property
    def batch_key(self) -> int:
        """Rows of equal keys may share a batch: adapters of one base, and the base itself, always may."""
        if not self.is_full:
            return 0
        return id(self.policy) if self.copy is None else id(self.copy)


NO_ADAPTER: Mapping[str, Tensor] = {}  # the adapter weights of the base model's snapshot


@contextmanager
def use_full_weights(snapshot: Snapshot) -> Iterator[None]:
    """Put a snapshot's full weights into the model in this context. Does nothing for adapters or live weights."""
    if not snapshot.is_full or snapshot.copy is None:
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
        tensor = gather_whole(local_part(tensors[name].detach()), tensors[name]).cpu().contiguous()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
