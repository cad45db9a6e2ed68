"""`ServiceClient`: training and sampling clients by name of base model or by path of saved weights.

Each base model is loaded once; its adapters and samplers share one engine and its batches. Saved weights are folders in
peft's format under `folder`, and their paths are what `.path` of a save gives. Left out on purpose: `base_url` and keys
(the `tinker` SDK itself speaks to servers).
"""

from __future__ import annotations

import threading
import uuid
from pathlib import Path
from typing import Any

from rlvr.clients.local.clients import LocalSamplingClient, LocalTrainingClient, make_async
from rlvr.clients.local.types import GetServerCapabilitiesResponse, SupportedModel
from rlvr.core.files import find_damage, read_json
from rlvr.core.weights_place import ADAPTER_CONFIG
from rlvr.engine.checkpoint import PEFT_PREFIX, load_policy
from rlvr.engine.engine import Engine
from rlvr.engine.engine_options import EngineLimits, LoraConfig
from rlvr.engine.lora import lora_targets
from rlvr.engine.model_loading import load_model
from rlvr.engine.tokenizer import load_tokenizer, silence_transformers

_CURE = "give the path that save_state or save_weights_for_sampler returned"


class ServiceClient:
    """Makes clients on engines of this process. `base_model` is a model's folder, or its name on the hub.

    Weights are saved in a new folder under `folder`. `user_metadata` is kept with the clients and sent nowhere.
    """

    def __init__(
        self,
        user_metadata: dict[str, str] | None = None,
        *,
        folder: str | Path = "runs/tinker",
        device: str = "auto",
        dtype: str = "auto",
        limits: EngineLimits = EngineLimits(),
    ) -> None:
        self.user_metadata = dict(user_metadata or {})
        self.session_id = uuid.uuid4().hex[:12]
        self._folder = Path(folder).expanduser().absolute() / self.session_id
        self._where = {"device": device, "dtype": dtype}
        self._limits = limits
        self._engines: dict[str, Engine] = {}
        self._count = 0
        self._lock = threading.Lock()

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, str] | None = None,
    ) -> LocalTrainingClient:
        """An adapter that starts as the base model. The same `seed` (None: 0) gives the same one.

        `train_mlp`, `train_attn` and `train_unembed` choose the linear layers that it adapts.
        """
        engine = self._engine(base_model)
        targets = lora_targets(engine.model, attn=train_attn, mlp=train_mlp, unembed=train_unembed)
        return self._client(engine, LoraConfig(rank, targets=targets), seed or 0, user_metadata)

    def create_training_client_from_state(
        self, path: str, base_model: str | None = None, user_metadata: dict[str, str] | None = None
    ) -> LocalTrainingClient:
        """An adapter that starts from saved weights, with a fresh optimizer."""
        return self._from_state(path, base_model, user_metadata, optimizer=False)

    def create_training_client_from_state_with_optimizer(
        self, path: str, base_model: str | None = None, user_metadata: dict[str, str] | None = None
    ) -> LocalTrainingClient:
        """Go on from a saved state as if training had never stopped."""
        return self._from_state(path, base_model, user_metadata, optimizer=True)

    def create_sampling_client(
        self, model_path: str | None = None, base_model: str | None = None
    ) -> LocalSamplingClient:
        """A sampler of saved weights, or of a base model as it is."""
        if (model_path is None) == (base_model is None):
            raise ValueError("create_sampling_client: give either model_path (saved weights) or base_model")
        if model_path is None:
            engine = self._engine(str(base_model))
            return LocalSamplingClient(engine, engine.base_snapshot())
        engine = self._engine(_base_of(Path(model_path)))
        return LocalSamplingClient(engine, engine.load_snapshot(Path(model_path)))

    def get_server_capabilities(self) -> GetServerCapabilitiesResponse:
        with self._lock:
            return GetServerCapabilitiesResponse(
                [SupportedModel(name, engine.model.context) for name, engine in self._engines.items()]
            )

    create_lora_training_client_async = make_async(create_lora_training_client)
    create_training_client_from_state_async = make_async(create_training_client_from_state)
    create_training_client_from_state_with_optimizer_async = make_async(
        create_training_client_from_state_with_optimizer
    )
    create_sampling_client_async = make_async(create_sampling_client)
    get_server_capabilities_async = make_async(get_server_capabilities)

    def _engine(self, base_model: str) -> Engine:
        with self._lock:
            if base_model not in self._engines:
                silence_transformers()
                self._engines[base_model] = Engine(
                    load_model(base_model, load_tokenizer(base_model), **self._where), self._limits
                )
            return self._engines[base_model]

    def _client(
        self, engine: Engine, lora: LoraConfig, seed: int, user_metadata: dict[str, str] | None
    ) -> LocalTrainingClient:
        with self._lock:
            number, self._count = self._count, self._count + 1
        policy = engine.create_policy(f"{self.session_id}:train:{number}", lora=lora, seed=seed)
        own = self._folder / f"train-{number}"
        metadata = {**self.user_metadata, **(user_metadata or {})}
        return LocalTrainingClient(engine, policy, own / "weights", own / "sampler_weights", metadata)

    def _from_state(
        self, path: str, base_model: str | None, user_metadata: dict[str, str] | None, *, optimizer: bool
    ) -> LocalTrainingClient:
        folder = Path(path)
        engine = self._engine(base_model or _base_of(folder))
        client = self._client(engine, _lora_of(folder), 0, user_metadata)
        with engine.lock:
            load_policy(folder, client.policy, engine.model, optimizer=optimizer)
        return client


def _base_of(folder: Path) -> str:
    """The base model of a saved adapter."""
    if wrong := find_damage(folder):
        raise ValueError(f"no complete checkpoint at {folder}: {wrong}; {_CURE}")
    config = read_json(folder / ADAPTER_CONFIG, "the config of an adapter", _CURE)
    if not isinstance(name := config.get("base_model_name_or_path"), str):
        raise ValueError(f"{folder / ADAPTER_CONFIG} names no base model; give base_model=")
    return name


def _lora_of(folder: Path) -> LoraConfig:
    """Rank, scale and adapted layers of a saved adapter."""
    from safetensors import SafetensorError, safe_open

    config: dict[str, Any] = read_json(folder / ADAPTER_CONFIG, "the config of an adapter", _CURE)
    try:
        with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
            names = [str(key).removeprefix(PEFT_PREFIX) for key in file.keys()]  # noqa: SIM118 (no mapping)
        layers = dict.fromkeys(name.rsplit(".lora_", 1)[0] for name in names)
        return LoraConfig(int(config["r"]), float(config["lora_alpha"]), tuple(layers))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"adapter {folder} cannot be read: {error}; {_CURE}") from error
