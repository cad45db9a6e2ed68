"""Other systems' words in a composed config become our keys, before the schema looks at it.

    loaded = load("train_rlvr", None, ["rlvr.algorithm=ppo"])   # compose, then `spelled`

Files and the command line are treated alike. Two spellings of one key that disagree are an error naming both, except
that the command line overrides files, and a user's file the shipped ones, whatever the spelling. Where a key came from,
and as what it was typed, stays known. What words mean stands in `rlvr.config.spellings`, what several words make
together in `rlvr.config.derived`. Exercised by `python -m pytest tests/test_spellings.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from rlvr.config import compose
from rlvr.config.compose import CLI, Loaded
from rlvr.config.derived import derive
from rlvr.config.pool import DEFAULT, Given, Pool, came, rank
from rlvr.config.spellings import SECTIONS, Spelling, place


def load(config_name: str | None = None, config_path: str | None = None, overrides: Sequence[str] = ()) -> Loaded:
    """Compose a config (see `rlvr.config.compose.load`) and put our keys for every other spelling in it."""
    return spelled(compose.load(config_name, config_path, overrides))


def spelled(loaded: Loaded) -> Loaded:
    """The config in our keys. What is ours already stays as it is; what nobody knows is left for the schema."""
    pool = Pool()
    moved: dict[str, tuple[str, ...]] = {}
    values, raw = deepcopy(loaded.values), deepcopy(loaded.raw)
    for key, value, text in list(_leaves(loaded.values, loaded.raw)):
        origin = _origin(loaded.origin, key)
        if (found := _placed(key, value, origin)) is None:
            continue
        moved[key] = found.targets
        _delete(values, key)
        _delete(raw, key)
        said = text if isinstance(text, str) and "${" in text else value  # no message shows what the environment holds
        given = Given(key, said, value, text, origin, rank(origin))
        for target in found.targets if value != {} else ():
            try:
                meant = value if value is None else found.convert(value)
            except ValueError as expected:
                raise ValueError(f"{given.words}: expected {expected}") from None
            pool.add(target, given if meant is value else replace(given, value=meant, raw=meant))
    for section in SECTIONS.keys() - {"training"}:  # those that were empty from the start
        _delete(values, section)
        _delete(raw, section)

    def ours(target: str) -> Given | None:
        if (value := _at(values, target, _MISSING)) is _MISSING:
            return None
        origin = _origin(loaded.origin, target)
        return Given(target, value, value, _at(raw, target), origin, rank(origin))

    derive(pool, ours, any(key.startswith("rlvr.") for key in moved))
    origin = {k: v for k, v in loaded.origin.items() if _at(values, re.sub(r"\[.*", "", k), _MISSING) is not _MISSING}
    typed: dict[str, str] = {}
    for target in [target for target in pool.given if not target.startswith("~")]:
        if (own := ours(target)) is not None and own not in pool.given[target]:
            pool.add(target, own)
        winner = pool.pick(target)
        if winner is None or winner.key == target or winner.value is None:  # `word=null` takes the word back
            continue
        _put(values, target, winner.value)
        _put(raw, target, winner.raw)
        origin.pop(target, None)
        if winner.rank != DEFAULT:
            origin[target], typed[target] = winner.origin, winner.key
    timed = [new for key in loaded.timed for new in _renamed(key, moved)]
    return replace(
        loaded,
        values=values,
        raw=_referring(raw, moved),
        origin=origin,
        timed=tuple(timed),
        typed=typed,
        idle=pool.idle,
    )


_MISSING: Any = object()


def _placed(key: str, value: Any, origin: str) -> Spelling | None:
    if key in SECTIONS and key != "training":
        if value is None or value == {}:
            return None
        said = Given(key, value, value, value, origin, 0).words
        raise ValueError(f"{said}: expected a section of `key: value` lines")
    try:
        return place(key)
    except ValueError as known:
        raise ValueError(f"unknown key {key}{came(origin)}: {known}") from None


def _origin(origin: Mapping[str, str], key: str) -> str:
    """Who set a key: its own entry, or that of an element of the list it holds, or that of what holds it."""
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


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for part in parents:
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    tree[last] = value


def _delete(tree: dict[str, Any], key: str) -> None:
    """Take a key out, and the mappings that it leaves empty."""
    parent, _, last = key.rpartition(".")
    holder = _at(tree, parent) if parent else tree
    if isinstance(holder, dict) and last in holder:
        del holder[last]
        if parent and not holder:
            _delete(tree, parent)


def _renamed(key: str, moved: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    name, bracket, rest = key.partition("[")
    for target in moved.get(name, (name,)):
        yield f"{target}{bracket}{rest}"


def _referring(raw: Any, moved: Mapping[str, tuple[str, ...]]) -> Any:
    """What stays unresolved refers to our keys, by which it will be read back."""
    if isinstance(raw, dict):
        return {key: _referring(value, moved) for key, value in raw.items()}
    if isinstance(raw, list):
        return [_referring(value, moved) for value in raw]
    if isinstance(raw, str) and "${" in raw:
        return re.sub(r"\$\{([\w.]+)\}", lambda m: f"${{{moved.get(m[1], (m[1],))[0]}}}", raw)
    return raw
