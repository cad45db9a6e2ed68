"""The options of each client that comes with the package: what `client: {name: ..., ...}` may hold. No torch here.

A client with options declares them here or in its own folder; `rlvr.clients.registry` has the entry of each client.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rlvr.core.variants import Variant, setting
from rlvr.engine.engine_options import LoraConfig


@dataclass(frozen=True)
class ModelOptions:
    """`name` is a local folder or hub name; without it `config` builds a model from random weights.

    `start_from` is where the weights start instead: a run or checkpoint of ours, a model folder or a peft adapter.
    `tokenizer` is a folder or hub name, or `words`, `characters` or `pieces` for one built from the environment's
    vocabulary. `lora` trains an adapter instead of all weights. `device` and `dtype`: auto, or cpu, cuda, float32,
    bfloat16. With client=tinker and client=skyrl `name` and `start_from` (tinker://...) are the server's.
    """

    name: str | None = None
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    tokenizer: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    lora: LoraConfig | None = None
    start_from: str | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"auto|cpu|(cuda|mps|xpu)(:\d+)?", self.device):
            raise ValueError(
                f"model.device={self.device!r}, expected one device: auto, cpu, cuda or cuda:N (a run computes on one)"
            )


@dataclass(frozen=True)
class ClientOptions(Variant):
    """The options of a client; its class says what else of a config depends on the choice."""

    kind = "client"

    writes_folders: ClassVar[bool] = True
    """It writes its weights to folders, which a sampling server can load."""
    trains_adapters: ClassVar[bool] = False
    """It trains an adapter whether or not `model.lora` is given."""
    shares_weights: ClassVar[bool] = False
    """Several processes share the weights."""
    uncompared: ClassVar[tuple[str, ...]] = ()
    """Options that change nothing that is computed: a run may be resumed with others."""
    evaluates_as: ClassVar[str] = ""
    """The client that loads the same checkpoint to evaluate it, if it is not this one."""

    def unread(self) -> Mapping[str, str]:
        """Keys of a config that have no effect with this client, and why."""
        return {}

    def check_model(self, model: ModelOptions) -> None:
        """ValueError for a model that the client cannot have."""

    @property
    def processes(self) -> int:
        """How many processes share the weights."""
        return 1

    @property
    def cluster(self) -> str | None:
        """The address of the Ray cluster that it takes processes of."""
        return None

    def list_uncompared(self) -> Sequence[str]:
        """The options that a resumed run may have another value of."""
        return self.uncompared

    def explain_change(self, changed: Sequence[str], folder: Path) -> str:
        """Why the run in a folder cannot be resumed with other values of these options; "" if their names say it."""
        return ""


@dataclass(frozen=True)
class ModelInProcess(ClientOptions):
    """A client that loads or builds its model."""

    def check_model(self, model: ModelOptions) -> None:
        if model.name and model.config:
            raise ValueError(
                "model: both name and config are given; give name (a folder or hub model) or config (a model to build)"
            )
        if not (model.name or model.config or model.start_from):
            raise ValueError(
                "model: neither name nor config is given; give name (a folder or hub model) or config (to build one)"
            )


@dataclass(frozen=True)
class LocalOptions(ModelInProcess):
    """The engine in this process."""

    name = "local"


@dataclass(frozen=True)
class MockOptions(ClientOptions):
    """A table of logits that needs no model."""

    name = "mock"
    writes_folders = False

    def unread(self) -> Mapping[str, str]:
        return dict.fromkeys(("model", "engine"), "client=mock is a table of logits, without a model")


@dataclass(frozen=True)
class AtServer(ClientOptions):
    """A client of a server, which has the model."""

    writes_folders = False
    trains_adapters = True
    uncompared = ("base_url", "api_key", "answer_timeout_s")

    base_url: str | None = setting(None, flat="model.base_url")
    api_key: str | None = setting(None, flat="model.api_key", is_secret=True)
    answer_timeout_s: float = setting(
        1800.0, low=math.ulp(0.0), expected="seconds above 0", flat="model.timeout_s", may_be_infinite=True
    )

    def unread(self) -> Mapping[str, str]:
        there = ("model.config", "model.device", "model.dtype", "model.lora.alpha", "engine")
        return dict.fromkeys(there, f"client={self.name}: the model is at a server, which decides this")

    def check_model(self, model: ModelOptions) -> None:
        if not (model.name or model.start_from):
            raise ValueError(
                f"client={self.name}: model.name is missing; give the model's name at the server, or "
                "model.start_from=tinker://..."
            )


@dataclass(frozen=True)
class TinkerOptions(AtServer):
    """A server of the Tinker protocol at `base_url` learns and samples. The `api_key` is never written down. Without
    them the `tinker` SDK looks where it always does (TINKER_BASE_URL, TINKER_API_KEY). `answer_timeout_s` is the
    longest wait for one answer.
    """

    name = "tinker"


@dataclass(frozen=True)
class SkyrlOptions(AtServer):
    """A SkyRL server, whose losses are means; its options are those of `tinker`."""

    name = "skyrl"
