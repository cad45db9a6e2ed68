"""What tests of an engine that is driven in steps share: running it to the end, and a trained adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlvr.clients.local import LocalTrainingClient
from rlvr.core.messages import AdamParams
from rlvr.engine.engine_options import LoraConfig
from tests.kit.tiny import data


def drain(engine: Any) -> list[Any]:
    """Every request that ends, in the order of their ends."""
    ended: list[Any] = []
    while not engine.idle:
        ended += engine.advance()
    return ended


def train_adapter(engine: Any, name: str, folder: Path, *, seed: int = 0, rank: int = 4) -> LocalTrainingClient:
    """An adapter that has learned something, so that it is not the base model."""
    trainer = LocalTrainingClient(
        engine, engine.create_policy(name, lora=LoraConfig(rank, 8.0), seed=seed), folder / name
    )
    trainer.forward_backward(data(seed=seed), "cross_entropy")
    trainer.optim_step(AdamParams(5e-2))
    return trainer
