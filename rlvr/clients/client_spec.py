"""What a client is made of: its capabilities, and the functions that describe and build it from a run's request.

A client's file has a `ClientSpec`, and `rlvr.clients.registry` has its name. This file imports nothing heavy: a client
with light imports of its own may declare its options beside its spec.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlvr.clients.client_options import ClientOptions, ModelOptions
from rlvr.core.cpu_budget import CoreShares
from rlvr.core.protocols import ClientCapabilities, TaskSource, TrainingClient
from rlvr.engine.engine_options import EngineLimits

_ONE_CORE = CoreShares(1, 1, 1)


def _ignore(text: str) -> None:
    """Take a message that is not shown."""


@dataclass(frozen=True)
class ClientRequest:
    """What a run gives to build its client: the model, the environment, the folder and the options.

    The client saves in `folder`; `log` and `warn` take messages about the model. Unless the run is `fresh`, weights are
    loaded right after, and `model.start_from` need not exist any more. `resolve_start` turns a run's folder into its
    newest weights, a folder or a path at a server; other values stay as they are.
    """

    model: ModelOptions
    source: TaskSource
    environment: str
    seed: int
    limits: EngineLimits
    options: ClientOptions
    resolve_start: Callable[[str], str]
    cores: CoreShares = _ONE_CORE
    folder: Path = Path()
    fresh: bool = True
    log: Callable[[str], None] = _ignore
    warn: Callable[[str], None] = _ignore

    def vocabulary(self) -> list[str]:
        """The words of the environment, for a policy or tokenizer made of them."""
        if not self.source.vocabulary:
            raise ValueError(
                f"client=mock: the environment {self.environment!r} has no `vocabulary` to make a table of logits "
                "over; use env.name=toy, give the environment a `vocabulary` (a list of words), or use client=local"
            )
        return list(self.source.vocabulary)

    def find_start(self) -> str:
        """Where the weights of `model.start_from` are: a folder, or a path at a server."""
        assert self.model.start_from is not None
        return self.resolve_start(self.model.start_from)


@dataclass(frozen=True)
class ClientSpec:
    """One client. `describe` gives the model's line in a run's plan; `check` runs before anything is loaded.

    The functions raise ValueError for options that the client cannot work with. Only `build` may read the request's
    `cores` and `folder`.
    """

    capabilities: ClientCapabilities
    build: Callable[[ClientRequest], TrainingClient]
    describe: Callable[[ClientRequest], str]
    check: Callable[[ClientRequest], object] = lambda request: None
    options: type[ClientOptions] = ClientOptions
