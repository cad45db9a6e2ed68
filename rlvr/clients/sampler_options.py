"""Which part samples, and its options: what `sampler: {name: ..., ...}` may hold. No network, no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

from rlvr.core.messages import SamplingParams
from rlvr.core.protocols import SamplingClient, TrainingClient
from rlvr.core.variants import Variant


@dataclass(frozen=True)
class SamplerOptions(Variant):
    """The options of a sampler. A new one is a class with `attach` and its entry in `SAMPLERS`."""

    kind = "sampler"

    title: ClassVar[str] = ""
    """Its name for people."""
    needs_folders: ClassVar[bool] = False
    """It loads the policy's weights from folders that the client writes."""
    uncompared: ClassVar[tuple[str, ...]] = ()
    """Options that change nothing that is computed: a run may be resumed with others."""

    @property
    def servers(self) -> Sequence[str]:
        """The addresses of the servers that sample; none if the client that trains does."""
        return ()

    @property
    def correction(self) -> float:
        """The cap of the importance weights between sampler and trainer where the algorithm gives none; 0: no weights.

        Two engines round differently.
        """
        return 0.0

    def check_sampling(self, params: SamplingParams) -> None:
        """ValueError for what it cannot sample."""

    def attach(
        self, client: TrainingClient, *, has_adapter: bool, keep: int, warn: Callable[[str], None]
    ) -> TrainingClient:
        """The client whose samples come from this sampler; it keeps the last `keep` versions of the weights."""
        return client

    def open_served(self, tokenizer: Any, warn: Callable[[str], None]) -> AbstractContextManager[SamplingClient]:
        """A sampler of the model that the servers were started with, until the block ends."""
        raise ValueError(
            f"sampler.name={self.name} needs a training client to sample from, and there is none here; use "
            "sampler.name=vllm"
        )


@dataclass(frozen=True)
class TrainerSampler(SamplerOptions):
    """The client that trains samples too."""

    name = "trainer"
