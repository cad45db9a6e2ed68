"""Turns composed values into a checked `RunConfig`, and back into what `resolved.yaml` holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from rlvr.config.choices import drop_options_of_others, list_secret_keys, move_flat
from rlvr.config.compose import LoadedConfig
from rlvr.config.schema import EnvOptions, RunConfig
from rlvr.config.unused_keys import drop_target_kl, drop_unused, find_unused, report_unused
from rlvr.config.validate import validate


def build_config(loaded: LoadedConfig, warn: Callable[[str], None] = lambda text: None) -> RunConfig:
    """Build the checked config from composed values; ValueError naming every key that does not fit.

    A key without effect in this run is an error if it was typed and a warning if it came from a file, which other runs
    may share.
    """
    values, unlooked = drop_target_kl(loaded.values)
    config = validate(values, RunConfig, loaded.origin, loaded.typed)
    if config.training.mode == "sft" and config.sft.steps == 0:
        raise ValueError("training.mode=sft with sft.steps=0: nothing to train; give sft.steps=1000, for example")
    config, unused = drop_unused(config)
    left_out, now = asdict(RunConfig(EnvOptions(config.env.name), client="mock")), asdict(config)
    taken_out = {key for key, _ in (*unused, *unlooked)}

    def same(key: str) -> bool:
        """Whether a key has its default value."""
        value, default = now, left_out
        if key in taken_out:
            return False
        for part in key.split("."):
            if not (isinstance(value, dict) and isinstance(default, dict) and part in value and part in default):
                return False
            value, default = value[part], default[part]
        return not isinstance(value, dict) and value == default

    for note in loaded.notes:
        warn(note)
    report_unused([*find_unused(config), *unused, *unlooked], loaded, same, warn)
    return config


def add_defaults(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The content of an older `resolved.yaml` with the default of each key that has been added since.

    The default of a new key does what was done before there was the key, and an algorithm has its present name.
    """

    def merge(default: Any, held: Any) -> Any:
        if not isinstance(default, Mapping) or not isinstance(held, Mapping):
            return held
        return {**held, **{k: merge(value, held[k]) if k in held else value for k, value in default.items()}}

    stored = drop_options_of_others(move_flat(stored))
    values = merge(asdict(RunConfig(EnvOptions("any"), client="mock")), stored)
    if "thinking" not in stored.get("prompt", {}):  # older than the name `grpo` for the default
        name = values["algorithm"]["name"]
        values["algorithm"]["name"] = {"grpo": "grpo_original", "ppo": "grpo"}.get(name, name)
    return values


def resolved_values(config: RunConfig, loaded: LoadedConfig) -> dict[str, Any]:
    """The content of `resolved.yaml`: every key with its value; what comes from the environment stays `${...}`."""

    secrets = list_secret_keys(config.client.name)

    def merge(full: Any, raw: Any, key: str) -> Any:
        if isinstance(raw, str) and "${" in raw:
            return raw
        if key[1:] in secrets:
            return None  # never written; a resumed run needs it again
        held: Mapping[str, Any] = raw if isinstance(raw, Mapping) else {}
        if is_dataclass(full) and not isinstance(full, type):  # a field that is not in `raw` has its default
            check_shape(raw is None or isinstance(raw, Mapping), key)
            return {f.name: merge(getattr(full, f.name), held.get(f.name), f"{key}.{f.name}") for f in fields(full)}
        if isinstance(full, Mapping):
            check_shape(raw is None or (isinstance(raw, Mapping) and (not raw or full.keys() <= raw.keys())), key)
            return {k: merge(value, held.get(k), f"{key}.{k}") for k, value in full.items()}
        if isinstance(full, (list, tuple)):
            check_shape(raw is None or (isinstance(raw, list) and len(raw) == len(full)), key)
            raws = [None] * len(full) if raw is None else raw
            return [merge(value, text, f"{key}[{i}]") for i, (value, text) in enumerate(zip(full, raws, strict=True))]
        check_shape(not isinstance(raw, (Mapping, list)), key)
        return full

    def check_shape(same: bool, key: str) -> None:
        if not same:  # never write a value of unknown origin: it may be a secret
            raise ValueError(
                f"{key[1:]}: the checked value has another shape than the given one; write its keys as text"
            )

    return merge(config, loaded.raw, "")
