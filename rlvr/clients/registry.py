"""Training clients by name: `client=local`, `tinker`, `skyrl`, `mock`, one of your own.

    register_client("mine", ClientSpec(MyClient.capabilities, build, describe))      # or client=package.module:SPEC

A spec holds the client's capabilities and the functions that describe and build it from a `ClientRequest`, so that a
run can be checked and planned before anything heavy is loaded. A new client is one file and one entry in `_BUILT_IN`.
Exercised by `tests/test_client_registry.py`. Left out on purpose: samplers that cannot train (`rlvr.clients.endpoint`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlvr.clients.sharded.sharding_options import ShardingOptions
from rlvr.core.cpu_budget import CoreShares
from rlvr.core.protocols import ClientCapabilities, TaskSource, TrainingClient
from rlvr.core.registry import did_you_mean, load_object
from rlvr.engine.engine_options import EngineLimits, LoraConfig

# Loaded when they are asked for: none imports torch before its model is built.
_BUILT_IN = {
    "local": "rlvr.clients.local_engine:LOCAL",
    "mock": "rlvr.clients.mock.mock_client:MOCK",
    "tinker": "rlvr.clients.tinker:TINKER",
    "skyrl": "rlvr.clients.skyrl:SKYRL",
    "sharded": "rlvr.clients.sharded.sharded_client:SHARDED",
}
AT_A_SERVER = ("tinker", "skyrl")  # clients of servers of the Tinker protocol
_registered: dict[str, ClientSpec] = {}
_ONE_CORE = CoreShares(1, 1, 1)


@dataclass(frozen=True)
class ModelOptions:
    """`name` is a local folder or hub name; without it `config` builds a model from random weights.

    `start_from` is where the weights start instead: a run or checkpoint of ours, a model folder or a peft adapter.
    `tokenizer` is a folder or hub name, or `words`, `characters` or `pieces` for one built from the environment's
    vocabulary. `lora` trains an adapter instead of all weights. `device` and `dtype`: auto, or cpu, cuda, float32,
    bfloat16. With client=tinker and client=skyrl `name` and `start_from` (tinker://...) are the server's, at
    `base_url`; the `api_key` is never written down. Without them the `tinker` SDK looks where it always does
    (TINKER_BASE_URL, TINKER_API_KEY). `timeout_s` is the longest wait for one answer of such a server.
    """

    name: str | None = None
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    tokenizer: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    lora: LoraConfig | None = None
    start_from: str | None = None
    base_url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise ValueError(f"model.timeout_s={self.timeout_s}, expected seconds above 0")
        if not re.fullmatch(r"auto|cpu|(cuda|mps|xpu)(:\d+)?", self.device):
            raise ValueError(
                f"model.device={self.device!r}, expected one device: auto, cpu, cuda or cuda:N (a run computes on one)"
            )


def _ignore(text: str) -> None:
    """Take a message that is not shown."""


@dataclass(frozen=True)
class ClientRequest:
    """What a run asks of its client.

    The client saves in `folder`; `say` and `warn` take messages about the model. Unless the run is `fresh`, weights are
    loaded right after, and `model.start_from` need not exist any more. `resolve_start` turns a run's folder into its
    newest weights, a folder or a path at a server; other values stay as they are.
    """

    model: ModelOptions
    source: TaskSource
    environment: str
    seed: int
    limits: EngineLimits
    sharding: ShardingOptions
    resolve_start: Callable[[str], str]
    cores: CoreShares = _ONE_CORE
    folder: Path = Path()
    fresh: bool = True
    say: Callable[[str], None] = _ignore
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


def register_client(name: str, spec: ClientSpec) -> None:
    """Make `spec` available as `client=name`."""
    if name in _BUILT_IN or _registered.get(name, spec) != spec:
        raise ValueError(f"client {name!r} is registered already; choose another name")
    _registered[name] = spec


def resolve_client(name: str) -> ClientSpec:
    """The spec of a registered client, or the one at `package.module:SPEC`."""
    check_client(name)
    if name in _registered:
        return _registered[name]
    spec = load_object("client", _BUILT_IN.get(name, name))
    if not isinstance(spec, ClientSpec):
        raise ValueError(f"client={name!r}: it is of type {type(spec).__name__}, expected a ClientSpec(...)")
    return spec


def check_client(name: str) -> None:
    """ValueError for a name that is neither registered nor a path; nothing is imported."""
    names = known_clients()
    if name not in names and ":" not in name:
        expected = f"expected {', '.join(names)}; or a path 'package.module:SPEC'"
        raise ValueError(f"client={name!r}{did_you_mean(name, names)}; {expected}")


def known_clients() -> list[str]:
    return [*_BUILT_IN, *_registered]


def close_client(client: TrainingClient) -> None:
    """Close a client at the end of a run; a server that is gone by now is no error."""
    with suppress(ValueError, RuntimeError, OSError):
        client.close()
