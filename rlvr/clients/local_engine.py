"""`client=local`: the engine in this process, built from the options of a run.

torch is imported when the engine is built, so that a run can be planned without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvr.clients.client_spec import ClientRequest, ClientSpec
from rlvr.clients.local_capabilities import LOCAL_CAPABILITIES
from rlvr.core.cpu_budget import spinning_warning
from rlvr.core.protocols import TrainingClient
from rlvr.core.weights_place import WeightsKind, WeightsPlace, list_expected

if TYPE_CHECKING:
    from rlvr.clients.local import LocalSamplingClient

EXTRA = "pip install 'rlvr[train]'"
BUILT_TOKENIZERS = ("words", "characters", "pieces")
_EXPECTED = list_expected(WeightsKind.RUN, WeightsKind.CHECKPOINT, WeightsKind.MODEL, WeightsKind.ADAPTER)


def load_named_tokenizer(name: str, request: ClientRequest) -> Any:
    """A tokenizer from a folder or the hub, or, by its kind, built from the words of the environment."""
    from rlvr.engine.tokenizer import build_tokenizer, load_tokenizer

    if name not in BUILT_TOKENIZERS:
        return load_tokenizer(name)
    source = request.source
    if not source.vocabulary:
        raise ValueError(
            f"model.tokenizer={name}: the environment {request.environment!r} has no `vocabulary` to build it from; "
            "name a tokenizer's folder or hub name instead"
        )
    ends = {"end": source.end_word or "<end>", "pad": source.pad_word or "<pad>"}
    return build_tokenizer(name, source.vocabulary, **ends)


def _find_start(request: ClientRequest) -> WeightsPlace:
    """The weights that `model.start_from` names; ValueError if it holds none."""
    given, path = request.model.start_from, request.find_start()
    place = WeightsPlace.of(path)
    if place.kind is WeightsKind.SERVER:
        raise ValueError(
            f"model.start_from={given!r}: weights that a server keeps, which no engine in this process reads: give "
            f"client=tinker with the server's model.base_url, or download them and give {_EXPECTED}"
        )
    if not (place.is_model or place.is_adapter):
        raise ValueError(f"model.start_from={given!r}: {place.problem}; expected {_EXPECTED}")
    if (place.folder / "value_head.safetensors").exists():
        raise ValueError(
            f"model.start_from={given!r}: the checkpoint is a critic's, which predicts values; give the policy's folder"
        )
    if place.damage:
        raise ValueError(f"model.start_from={given!r}: the checkpoint is damaged: {place.damage}; give another one")
    return place


def base_names(request: ClientRequest) -> tuple[str | None, str]:
    """(model, tokenizer): where to load each from. A whole model to start from brings its own tokenizer, unless another
    one is named."""
    name, tokenizer = request.model.name, request.model.tokenizer
    place = _find_start(request) if request.model.start_from else None
    if place is None or not place.is_model:
        return name, tokenizer or name or ""
    own = place.find_tokenizer() or name or str(place.folder)
    return str(place.folder), own if tokenizer in (None, *BUILT_TOKENIZERS) else tokenizer


def _build_engine(request: ClientRequest) -> Any:
    try:
        import torch

        from rlvr.engine.engine import Engine
        from rlvr.engine.tokenizer import silence_transformers
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; training needs the extra: {EXTRA}") from error
    silence_transformers()
    torch.set_num_threads(request.cores.threads)
    return Engine(plan_model(request).load(), request.limits)


@dataclass(frozen=True)
class ModelBuild:
    """What a model is made from, in a form that another process can read: a name to load, or a config and a seed."""

    name: str | None
    config: dict[str, Any]
    tokenizer: Any
    seed: int
    device: str
    dtype: str

    def load(self) -> Any:
        """The model before it is trained: pretrained, or with the random weights of the run's seed."""
        from rlvr.engine.model_loading import build_model, load_model

        where = {"device": self.device, "dtype": self.dtype}
        if self.name:
            return load_model(self.name, self.tokenizer, **where)
        return build_model(self.config, self.tokenizer, seed=self.seed, **where)


def plan_model(request: ClientRequest) -> ModelBuild:
    """What the run's model is made from, with its tokenizer."""
    from rlvr.engine.tokenizer import load_tokenizer

    options = request.model
    name, tokenizer = base_names(request)
    if not name and not options.tokenizer:
        raise ValueError("model.tokenizer is missing; give words, characters, or a tokenizer's folder or hub name")
    loaded = load_tokenizer(tokenizer) if name else load_named_tokenizer(options.tokenizer or "", request)
    return ModelBuild(name, options.config, loaded, request.seed, options.device, options.dtype)


def find_adapter_start(request: ClientRequest) -> Path | None:
    """The folder of the adapter that a fresh run starts from; None if it starts from a model."""
    if not (request.fresh and request.model.start_from):
        return None
    place = _find_start(request)
    return None if place.is_model else place.folder


def warn_of_threads(request: ClientRequest) -> None:
    """Warn of settings under which torch's threads wait for each other."""
    for text in (request.cores.warning, spinning_warning() if request.cores.threads > 1 else ""):
        if text:
            request.warn(text)


def _build(request: ClientRequest) -> TrainingClient:
    engine = _build_engine(request)
    warn_of_threads(request)
    from rlvr.clients.local import LocalTrainingClient

    policy = engine.create_policy("policy", lora=request.model.lora, seed=request.seed)
    for note in engine.model.notes:
        request.warn(note)
    request.log(
        f"{sum(p.numel() for p in policy.parameters.values()):,} trainable parameters, {engine.model.dtype} on "
        f"{engine.model.device}".replace("torch.", "")
    )
    if folder := find_adapter_start(request):
        from rlvr.engine.checkpoint import load_adapter

        load_adapter(folder, policy)
    return LocalTrainingClient(engine, policy, request.folder)


def build_sampler(request: ClientRequest, adapter: Path | None = None) -> LocalSamplingClient:
    """A sampler of a model as it is, or of an adapter on it; no weight can be trained."""
    engine = _build_engine(request)
    from rlvr.clients.local import LocalSamplingClient

    for note in engine.model.notes:
        request.warn(note)
    return LocalSamplingClient(engine, engine.load_snapshot(adapter) if adapter else engine.base_snapshot())


def describe_model(request: ClientRequest) -> str:
    options = request.model
    model = options.name or f"{options.config.get('model_type', '?')} from random weights"
    if options.start_from:
        place = _find_start(request)
        model = str(place.folder) if place.is_model else f"{model} with the adapter {place.folder}"
    return model + (f", LoRA rank {options.lora.rank}" if options.lora else ", all weights")


LOCAL = ClientSpec(LOCAL_CAPABILITIES, _build, describe_model)
