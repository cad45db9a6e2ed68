"""A model at a Tinker server that the replicas of a service train together: `RLVR_MODEL=tinker:...` with PostgreSQL.

A replica that learns has a training run at the server; the others only sample, and have none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlvr.clients.tinker import SCHEME, TinkerTrainingClient, connect
from rlvr.clients.tinker_sampler import TIMEOUT, TinkerSamplers, TinkerSamplingClient
from rlvr.clients.tinker_sdk import expire_weights
from rlvr.core.protocols import TrainingClient
from rlvr.engine.engine_options import LoraConfig
from rlvr.service.learning.session_learner import POINTER, LearnerOptions
from rlvr.service.learning.shared_learner import SharedLearner
from rlvr.service.models.served_models import LORA_RANK, Say, ServedModel
from rlvr.store import ExperienceStore

RETIRED_S = 3_600  # how long weights stay after newer ones were published: a replica may be in a long session


class TinkerPolicyServer:
    """`rlvr.service.learning.shared_learner.PolicyServer` at the server of TINKER_BASE_URL.

    The first learner goes on from what this instance has learned in `folder`, if it has learned alone before.
    """

    def __init__(self, given: str, folder: Path, seed: int) -> None:
        self._given, self._folder, self._seed = given, folder, seed
        self._samplers: TinkerSamplers | None = None

    def open_trainer(self, path: str | None) -> TinkerTrainingClient:
        if path := path or self._own_path():
            return connect(None, start_from=path, has_optimizer=True)
        start = self._given if self._given.startswith(SCHEME) else None
        base = None if start else self._given.removeprefix("tinker:")
        return connect(base, start_from=start, lora=LoraConfig(rank=LORA_RANK), seed=self._seed)

    def _own_path(self) -> str | None:
        """What this instance saved last when it learned alone."""
        try:
            path = json.loads((self._folder / POINTER).read_text(encoding="utf-8"))["path"]
        except (OSError, ValueError, KeyError):
            return None
        return path if str(path).startswith(SCHEME) else None

    def retire(self, paths: Sequence[str]) -> None:
        for path in paths:
            with suppress(RuntimeError, ValueError):  # of a server without this call: the weights stay
                expire_weights(path, RETIRED_S, TIMEOUT)

    def describe(self, trainer: TrainingClient) -> dict[str, Any]:
        assert isinstance(trainer, TinkerTrainingClient)
        return {"base_model": trainer.base_model, "rank": trainer.lora_rank}

    def check(self, state: dict[str, Any]) -> None:
        if not self._given.startswith(SCHEME) and state["rank"] not in (None, LORA_RANK):
            raise ValueError(
                f"RLVR_MODEL={self._given}: the adapter that replicas share has rank {state['rank']}, and this version "
                f"of rlvr trains rank {LORA_RANK}; run one version everywhere, or give another DATABASE_URL"
            )

    def open_sampler(self, path: str) -> TinkerSamplingClient:
        self._samplers = self._samplers or TinkerSamplers()
        return self._samplers.open(path)

    def close(self) -> None:
        samplers, self._samplers = self._samplers, None
        if samplers is not None:
            samplers.close()


def open_shared(
    given: str,
    folder: Path,
    store: ExperienceStore,
    instance: str,
    options: LearnerOptions,
    *,
    seed: int,
    say: Say,
    warn: Callable[[str], None],
) -> ServedModel:
    """Wait until the policy's weights are published, by this instance if no other one learns."""
    learner = SharedLearner(store, given, instance, TinkerPolicyServer(given, folder, seed), options, warn=warn)
    learner.restore(say)
    return ServedModel(learner.sampler, learner.model, "tinker", learner=learner)
