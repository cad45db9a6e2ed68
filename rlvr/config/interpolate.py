"""Resolves `${...}` in a composed configuration, and tracks what each value depends on.

`${key}` names another value, `${now:%Y-%m-%d}` the instant of loading, `${oc.env:NAME,default}` the environment. What
depends on the environment may be a secret and is kept as it was written; what depends on the clock is not a difference
between two runs. Both hold at any remove: `b: ${a}`, `a: ${oc.env:KEY}` makes `b` a secret too. No other resolver
works, and none whose name is itself worked out: it could read the environment unseen. `mask_secrets` takes out of a
message what the environment gave.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.grammar_parser import parse

from rlvr.config.document_limits import DEEPEST, TOO_DEEP, Budget, with_text_keys

CLI = "cli"  # the origin of what the caller gave, and no file
CALLER: ContextVar[str] = ContextVar("CALLER", default="the command line")  # how messages name the caller


def describe_origin(origin: str | None, spelled: str = "") -> str:
    """Where a key was set, as messages say it after the key: " (from FILE)", or "" if that is not known."""
    return f" (from {CALLER.get() if origin == CLI else origin}{spelled})" if origin else ""


@dataclass
class _Tracking:
    """What the current value depends on. `now` is one instant for the whole load."""

    now: datetime = field(default_factory=datetime.now)
    touched: set[str] = field(default_factory=set[str])


_tracking: ContextVar[_Tracking] = ContextVar("tracking")
_REQUIRED = object()
_SHORTEST = 6  # characters; shorter values occur in messages by chance
_secrets: dict[str, str] = {}  # what the environment gave in this process -> the variable's name


def _now(pattern: str) -> str:
    tracking = _tracking.get()
    tracking.touched.add("now")
    return tracking.now.strftime(pattern)


def _env(name: str, default: Any = _REQUIRED) -> str | None:
    _tracking.get().touched.add("env")
    if name in os.environ:
        if len(os.environ[name]) >= _SHORTEST:
            _secrets[os.environ[name]] = name
        return os.environ[name]
    if default is _REQUIRED:
        raise ValueError(f"environment variable {name!r} is not set; set it, or write ${{oc.env:{name},default}}")
    return None if default is None else str(default)


# Under names of our own: resolvers are global to the process, and other libraries may use the originals.
OmegaConf.register_resolver("rlvr.env", _env, replace=True)
OmegaConf.register_resolver("rlvr.now", _now, replace=True)


_WORKS = "supported are ${key}, ${now:%Y-%m-%d} and ${oc.env:NAME,default}; for plain text write \\${"


def mask_secrets(text: str) -> str:
    """Replace every value that a config of this process got from the environment by `${oc.env:NAME}`."""
    for value, name in sorted(_secrets.items(), key=lambda item: -len(item[0])):
        for spelled in (value, repr(value)[1:-1], json.dumps(value)[1:-1]):
            text = text.replace(spelled, f"${{oc.env:{name}}}")
    return text


def _use_own_resolvers(value: Any, origin: Mapping[str, str], dotted: str = "") -> Any:
    """Replace the original resolvers by ours; ValueError for any other."""
    if isinstance(value, dict):
        return {k: _use_own_resolvers(child, origin, f"{dotted}.{k}" if dotted else k) for k, child in value.items()}
    if isinstance(value, list):
        return [_use_own_resolvers(child, origin, f"{dotted}[{index}]") for index, child in enumerate(value)]
    if not isinstance(value, str) or "${" not in value:
        return value
    renamed = re.sub(r"\$\{\s*(?:oc\.(env)|(now))\s*:", lambda m: f"${{rlvr.{m[1] or m[2]}:", value)
    try:
        for node in _nodes(parse(renamed)):
            if type(node).__name__ == "InterpolationResolverContext":
                name = node.resolverName().getText()
                if name not in ("rlvr.env", "rlvr.now"):
                    raise ValueError(f"${{{name}:...}} is not supported; {_WORKS}")
    except (OmegaConfBaseException, ValueError, RecursionError) as error:
        raise ValueError(_explain(dotted, value, origin.get(dotted), error, {})) from None
    return renamed


def _original(text: str) -> str:
    return text.replace("${rlvr.env:", "${oc.env:").replace("${rlvr.now:", "${now:")


def _nodes(tree: Any) -> Iterator[Any]:
    """Every node of a parsed text."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(getattr(node, "children", None) or ())


def _references(text: str) -> list[str]:
    """The names of other values in a text: `x ${a.b} ${.c}` -> a.b, .c"""
    names = (node.getText() for node in _nodes(parse(text)) if type(node).__name__ == "InterpolationNodeContext")
    return [re.sub(r"^\$\{\s*|\s*\}$", "", name) for name in names]


def resolve(config: DictConfig, origin: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
    """(values, raw, timed) of `Loaded`: every leaf is resolved by itself, to see what it depends on."""
    tracking = _Tracking()
    timed: list[str] = []

    def walk(node: Any, path: str, depth: int) -> tuple[Any, Any]:
        listed = isinstance(node, ListConfig)
        texts: Any = OmegaConf.to_container(node, resolve=False)
        values: dict[Any, Any] = {}
        raws: dict[Any, Any] = {}
        for key, text in enumerate(texts) if listed else texts.items():
            dotted = f"{path}[{key}]" if listed else f"{path}.{key}" if path else str(key)
            tracking.touched.clear()
            try:
                if depth > DEEPEST:
                    raise ValueError(f"the resolved value is {TOO_DEEP}; does a value contain itself?")
                budget.before(text)
                text = _original(text) if isinstance(text, str) else text
                value = raw = node[key]
            except (OmegaConfBaseException, ValueError, RecursionError) as error:
                raise ValueError(_explain(dotted, text, origin.get(dotted), error, tree)) from None
            touched = set(tracking.touched)
            if "now" in touched:
                timed.append(dotted)
            if OmegaConf.is_config(value):
                value, raw = walk(value, dotted, depth + 1)
            elif isinstance(value, str):
                value = _original(value)  # in text that was escaped
                raw = value.replace("${", r"\${")
            values[key], raws[key] = value, text if "env" in touched else raw
        return (list(values.values()), list(raws.values())) if listed else (values, raws)

    token = _tracking.set(tracking)
    try:
        tree = _use_own_resolvers(with_text_keys(OmegaConf.to_container(config)), origin)
        budget = Budget(tree, _references)
        values, raws = walk(OmegaConf.create(tree), "", 0)
    finally:
        _tracking.reset(token)
    return values, raws, tuple(timed)


def _circle(dotted: str, tree: Mapping[str, Any]) -> str:
    """`a -> b -> a`: the keys that refer to each other, as far as plain references go."""
    chain = [dotted]
    while chain[-1] not in chain[:-1] and len(chain) < 20:
        node: Any = tree
        for part in chain[-1].split("."):
            node = node.get(part) if isinstance(node, dict) else None
        match = re.search(r"\$\{\s*([\w.-]+)\s*\}", node) if isinstance(node, str) else None
        if match is None:
            break
        chain.append(match[1])
    return "circular interpolation" + (f": {' -> '.join(chain)}" if len(chain) > 1 else "")


def _explain(dotted: str, text: Any, source: str | None, error: BaseException, tree: Mapping[str, Any]) -> str:
    message = mask_secrets(str(error)).splitlines()[0] if str(error) else ""
    if not message or "recursi" in message.lower() or "Interpolation to parent node" in message:
        message = _circle(dotted, tree)
    elif "Missing mandatory value" in message:
        message = f"has to be given; add {dotted}=... to {CALLER.get()}"
    message = re.sub(r"^ValueError raised while resolving interpolation: ", "", message)
    where = describe_origin(source)
    shown = text if not isinstance(text, str) or len(text) <= 200 else f"{text[:200]}..."
    given = f" {shown!r}" if isinstance(text, str) and text != "???" else ""
    return f"{dotted}{given}{where}: {message}"
