"""Opens the weights at a path or an address: to sample, to train on, to teach; or says in one message why it cannot.

    place = WeightsPlace.of("runs/arithmetic")          # of rlvr.core.weights_place: says what is there
    client = open_to_train(assemble(read_run(place.run)), checkpoint, folder, warn)

The REST service (`rlvr.service.generators.served_models`, for its model and its judge) and the Tinker server
(`rlvr.tinker_server.sampling.served_runs`) serve what these open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlvr.clients.client_options import LocalOptions, ModelOptions
from rlvr.clients.local_engine import BUILT_TOKENIZERS
from rlvr.clients.registry import resolve_client
from rlvr.clients.sampler_options import TrainerSampler
from rlvr.config import CLI, LoadedConfig, load
from rlvr.config.build_config import build_config
from rlvr.config.schema import RunConfig
from rlvr.core.files import read_json
from rlvr.core.model_files import find_broken_file, find_broken_tokenizer
from rlvr.core.protocols import TrainingClient
from rlvr.core.weights_place import (
    CHECKPOINTS,
    EXPECTED,
    MODEL_CONFIG,
    SETTINGS,
    WeightsKind,
    WeightsPlace,
    find_near_folder,
    list_expected,
)
from rlvr.runs.assembly import Assembly, assemble
from rlvr.training.best_checkpoint import resolve_best
from rlvr.training.initial_weights import newest_weights
from rlvr.training.journal import weights_path

# What of the section `model` counts for a model from elsewhere, beside its name.
MODEL_KEYS = ("tokenizer", "device", "dtype")


def read_run(run: Path, overrides: Sequence[str] | Mapping[str, Any] = ()) -> RunConfig:
    """The settings of a run, from its folder."""
    return build_config(load(None, str(run / SETTINGS), overrides))


def open_to_train(
    assembly: Assembly, checkpoint: Path, folder: Path, warn: Callable[[str], None] = lambda text: None
) -> TrainingClient:
    """The training client of a run, with the weights of one of its checkpoints; it saves in `folder`."""
    client = assembly.build_client(folder, lambda text: None, warn, fresh=False)
    client.load_state(weights_path(checkpoint)).result()
    return client


def open_weights(given: str, assembly: Assembly, key: str) -> Any:
    """A sampler of a run's weights, a checkpoint's, a model's or an adapter's, to teach another run or to play against
    it; `key` is for messages."""
    config, place = assembly.config, WeightsPlace.of(resolve_best(Path(given).expanduser()))
    if place.run:
        weights = newest_weights(given, key) if place.kind is WeightsKind.RUN else place.folder
        begun = read_run(place.run)
        begun = replace(begun, model=replace(begun.model, device=config.model.device))
        client = assemble(begun).build_client(place.run / CHECKPOINTS, _ignore, _ignore, fresh=False)
        return client.create_sampling_client(weights_path(weights))
    place = WeightsPlace.of(given)
    name, tokenizer = name_model(place)
    teacher = replace(
        config,
        client=replace(config.client, name=LocalOptions.name),
        model=ModelOptions(name=name, tokenizer=tokenizer, device=config.model.device, dtype=config.model.dtype),
        sampler=replace(config.sampler, name=TrainerSampler.name),
    )
    return replace(assembly, config=teacher).build_sampler(place.adapter, _ignore)


def find_teacher_model(given: str) -> str:
    """The model of a teacher, whose shape says what it needs in memory: of a run that of its newest checkpoint."""
    place = WeightsPlace.of(resolve_best(Path(given).expanduser()))
    if place.kind is WeightsKind.RUN:
        place = WeightsPlace.of(newest_weights(given, "teacher.model"))
    return name_model(place)[0]


def _ignore(text: str) -> None:
    """Take a message that is not shown."""


def name_model(place: WeightsPlace, base: str | None = None) -> tuple[str, str | None]:
    """(model, tokenizer): what to load to sample from weights as they are. An adapter's model is its `base`, which it
    may name itself, and it may bring a tokenizer; others have none but the model's."""
    if place.is_adapter:
        return place.find_base(base), place.find_tokenizer()
    return str(place.folder) if place.folder.exists() else place.given, None


def with_model(loaded: LoadedConfig, place: WeightsPlace) -> LoadedConfig:
    """The config with the section `model` of weights that no run made."""
    given: dict[str, Any] = loaded.values.get("model") or {}
    typed = [key for key, origin in loaded.origin.items() if key.startswith("model.") and origin == CLI]
    usable = [f"model.{key}" for key in (*MODEL_KEYS, *(["name"] if place.is_adapter else []))]
    if wrong := [key for key in typed if key not in usable]:
        raise ValueError(
            f"{wrong[0]} has no effect here: {place.given} is evaluated as it is; {', '.join(usable)} may be given"
        )
    model = {key: given[key] for key in ("device", "dtype") if key in given}
    model["name"], tokenizer = name_model(place, given["name"] if "model.name" in typed else None)
    if "model.tokenizer" in typed:
        model["tokenizer"] = given["tokenizer"]
    elif tokenizer:
        model["tokenizer"] = tokenizer
    origin = {key: source for key, source in loaded.origin.items() if not key.startswith("model.") or key in typed}
    client = {**(loaded.values.get("client") or {}), "name": LocalOptions.name}
    return replace(loaded, values={**loaded.values, "model": model, "client": client}, origin=origin)


def check_to_sample(place: WeightsPlace, note: Callable[[str], None]) -> None:
    """ValueError if no language model is there. A hub is not asked; a name of it that looks like a folder is noted."""
    if place.kind is WeightsKind.GGUF:
        return
    if place.kind is WeightsKind.HUB:
        if near := find_near_folder(place.folder):
            note(f"{place.given}: there is no such folder{near}; it is looked for on the hub, as OWNER/NAME")
        return
    if not (place.is_model or place.is_adapter):
        raise ValueError(f"{place.given}: {place.problem}; expected {list_expected(*EXPECTED)}")
    config = read_json(place.folder / MODEL_CONFIG, "the config of a model") if place.is_model else {}
    for kind in config.get("architectures") or ():
        if "Classification" in str(kind):
            raise ValueError(
                f"{place.given} is a {kind}, which writes no text; expected a language model. As a reward it is "
                f"reward.type=classifier reward.kwargs.model={place.given}"
            )
    if place.is_model and (wrong := find_broken_file(place.folder)):
        raise ValueError(f"{place.given}: {wrong}")


def _check_there(key: str, given: str, note: Callable[[str], None]) -> None:
    """ValueError for a missing folder whose name no hub has. A hub name has no slash or one."""
    place = WeightsPlace.of(resolve_best(Path(given).expanduser()) if "://" not in given else given)
    if place.folder.exists() or place.kind not in (WeightsKind.HUB, WeightsKind.UNKNOWN):
        return
    near = find_near_folder(place.folder)
    if place.kind is WeightsKind.UNKNOWN and (place.is_written_as_path or "/" in given or "\\" in given):
        raise ValueError(
            f"{key}={given}: no such folder{near}; give a folder that `save_pretrained` wrote, or a hub name"
        )
    if near or place.kind is WeightsKind.UNKNOWN:
        note(f"{key}={given}: there is no such folder{near}; it is looked for on the hub")


def check_model_folder(config: RunConfig, note: Callable[[str], None] = lambda text: None) -> None:
    """ValueError if `model.name` is written as a path, or is a folder, and no model is there; or if another folder is
    missing that the run loads. A hub is not asked; a name of it that may be meant as a folder is noted."""
    name = config.model.name
    if not resolve_client(config.client.name).capabilities.runs_in_process:
        return
    tokenizer = config.model.tokenizer if config.model.tokenizer not in BUILT_TOKENIZERS else None
    named = {"model.tokenizer": tokenizer, "model.name": name, "teacher.model": config.teacher.model}
    named |= {f"teacher.for_tasks.{value}": one.model for value, one in config.teacher.of_values.items()}
    for key, given in named.items():
        if given:
            _check_there(key, given, note)
    if not name:
        return
    place = WeightsPlace.of(name)
    is_path = place.is_written_as_path or place.folder.is_dir()
    if place.is_model:
        own_tokenizer = "" if config.model.tokenizer else find_broken_tokenizer(place.folder)
        if wrong := find_broken_file(place.folder) or own_tokenizer:
            raise ValueError(f"model.name={name}: {wrong}")
    if not is_path or place.is_model or place.kind is WeightsKind.GGUF:
        return
    if place.kind is WeightsKind.RUN:
        raise ValueError(f"model.name={name} is a run; give model.start_from={name} to start from its weights")
    found = f"no {MODEL_CONFIG}" if place.folder.is_dir() else f"no such folder{find_near_folder(place.folder)}"
    raise ValueError(
        f"model.name={name}: {found}; give a folder that `save_pretrained` wrote, a GGUF file, or a hub name"
    )
