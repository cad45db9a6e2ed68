"""Translates the words of other systems in a composed config into our keys, before the schema checks it.

    loaded = load("train_rlvr", None, ["rlvr.algorithm=ppo"])   # compose, then `translate`

Files and the command line are treated alike. Messages name a key as the user gave it. `rlvr.config.aliases` has the
words, `rlvr.config.alias_values` decides between several values for one key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from rlvr.config import compose
from rlvr.config.alias import Alias, NotSupportedError, SeveralKeys
from rlvr.config.alias_values import DEFAULT, FILE, Candidate, Candidates, derive, rank
from rlvr.config.aliases import SECTIONS, find_alias
from rlvr.config.choices import full_key
from rlvr.config.compose import CLI, LoadedConfig
from rlvr.config.epochs import choose_length
from rlvr.config.interpolate import describe_origin
from rlvr.config.trl_defaults import WORDS, choose_weights, read_num_iterations
from rlvr.core.plugins import import_modules


def load(
    config_name: str | None = None, config_path: str | None = None, overrides: Sequence[str] | Mapping[str, Any] = ()
) -> LoadedConfig:
    """Compose a config (see `rlvr.config.compose.load`) and put our keys for every other spelling in it.

    Of `training.steps` and `training.epochs` one is left. What `imports` names is imported.
    """
    loaded = choose_length(translate(compose.load(config_name, config_path, overrides, full_key)))
    if isinstance(modules := loaded.values.get("imports"), list):
        import_modules(modules)
    return loaded


def translate(loaded: LoadedConfig) -> LoadedConfig:
    """The config in our keys; ValueError that names every word that is refused.

    Our own keys stay; unknown ones are left for the schema to report.
    """
    candidates = Candidates()
    moved: dict[str, tuple[str, ...]] = {}
    refused: list[str] = []
    words: list[Candidate] = []  # TRL's, of the user
    values, raw = deepcopy(loaded.values), deepcopy(loaded.raw)
    for key, value, text in list(_leaves(loaded.values, loaded.raw)):
        origin = _origin(loaded.origin, key)
        if (alias := _lookup(key, value, origin)) is None:
            continue
        moved[key] = alias.targets
        _delete(values, key)
        _delete(raw, key)
        shown = text if isinstance(text, str) and "${" in text else value  # no message shows what the environment holds
        given = Candidate(key, shown, value, text, origin, rank(origin))
        if key in WORDS and value is not None and given.rank >= FILE:
            words.append(given)
        try:
            converted = value if value is None else alias.convert(value)
        except ValueError as why:
            refused.append(f"{given.words}: {'' if isinstance(why, NotSupportedError) else 'expected '}{why}")
            continue
        if isinstance(converted, SeveralKeys):
            for target, part in converted.items():
                candidates.add(target, replace(given, value=part, raw=part))
            continue
        for target in alias.targets if value != {} and (converted is not None or value is None) else ():
            candidates.add(target, given if converted is value else replace(given, value=converted, raw=converted))
    if refused:
        raise ValueError("\n".join(refused))
    if notes := read_num_iterations(candidates, words):
        moved["num_iterations"] = ("training.ppo_epochs",)
    for section in SECTIONS.keys() - {"training"}:  # those that were empty
        _delete(values, section)
        _delete(raw, section)

    def ours(target: str) -> Candidate | None:
        if (value := _at(values, target, _MISSING)) is _MISSING:
            return None
        origin = _origin(loaded.origin, target)
        given = loaded.typed.get(target, target)
        return Candidate(given, value, value, _at(raw, target), origin, rank(origin))

    derive(candidates, ours, any(key.startswith("rlvr.") for key in moved))
    origin = {k: v for k, v in loaded.origin.items() if _at(values, re.sub(r"\[.*", "", k), _MISSING) is not _MISSING}
    typed = dict(loaded.typed)
    for target in [target for target in candidates.by_key if not target.startswith("~")]:
        if (own := ours(target)) is not None and own not in candidates.by_key[target]:
            candidates.add(target, own)
        winner = candidates.pick(target)
        if winner is None or winner == own or winner.value is None:  # `word=null` takes the word back
            continue
        _set(values, target, winner.value)
        _set(raw, target, winner.raw)
        origin.pop(target, None)
        typed.pop(target, None)
        if winner.rank != DEFAULT:
            origin[target], typed[target] = winner.origin, winner.key
    notes += choose_weights(values, raw, origin, words)
    timed = [new for key in loaded.timed for new in _target_keys(key, moved)]
    return replace(
        loaded,
        values=values,
        raw=_referring(raw, moved),
        origin=origin,
        timed=tuple(timed),
        typed=typed,
        unused=candidates.unused,
        trl_words=tuple(word.key for word in words),
        notes=tuple(notes),
    )


_MISSING: Any = object()


def _lookup(key: str, value: Any, origin: str) -> Alias | None:
    if key in SECTIONS and key != "training":
        if value is None or value == {}:
            return None
        given = Candidate(key, value, value, value, origin, 0).words
        raise ValueError(f"{given}: expected a section of `key: value` lines")
    try:
        return find_alias(key)
    except ValueError as known:
        raise ValueError(f"unknown key {key}{describe_origin(origin)}: {known}") from None


def _origin(origin: Mapping[str, str], key: str) -> str:
    """Where a key was set: its own entry, that of an element of its list, or that of its section."""
    if CLI in (v for k, v in origin.items() if k.startswith((f"{key}[", f"{key}."))):
        return CLI
    while key not in origin and "." in key:
        key = key.rpartition(".")[0]
    return origin.get(key, "")


def _leaves(values: Any, raw: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    for key, value in values.items():
        dotted = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, dict) and value:
            yield from _leaves(value, raw[key], dotted)
        else:
            yield dotted, value, raw[key]


def _at(tree: Any, key: str, otherwise: Any = None) -> Any:
    for part in key.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return otherwise
        tree = tree[part]
    return tree


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for part in parents:
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    tree[last] = value


def _delete(tree: dict[str, Any], key: str) -> None:
    """Delete a key, and the mappings that it leaves empty."""
    parent, _, last = key.rpartition(".")
    holder = _at(tree, parent) if parent else tree
    if isinstance(holder, dict) and last in holder:
        del holder[last]
        if parent and not holder:
            _delete(tree, parent)


def _target_keys(key: str, moved: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    name, bracket, rest = key.partition("[")
    for target in moved.get(name, (name,)):
        yield f"{target}{bracket}{rest}"


def _referring(raw: Any, moved: Mapping[str, tuple[str, ...]]) -> Any:
    """Let unresolved references name our keys: they are read back under these."""
    if isinstance(raw, dict):
        return {key: _referring(value, moved) for key, value in raw.items()}
    if isinstance(raw, list):
        return [_referring(value, moved) for value in raw]
    if isinstance(raw, str) and "${" in raw:
        return re.sub(r"\$\{([\w.]+)\}", lambda m: f"${{{(moved.get(m[1]) or (m[1],))[0]}}}", raw)
    return raw
