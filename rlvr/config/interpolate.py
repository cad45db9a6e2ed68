"""Resolving `${...}` in a composed configuration, and knowing of every value what it depends on.

`${key}` names another value, `${now:%Y-%m-%d}` the instant of loading, `${oc.env:NAME,default}` the environment. What
depends on the environment may be a secret and is kept as it was written; what depends on the clock is not a
difference between two runs. Both hold at any remove: `b: ${a}`, `a: ${oc.env:KEY}` makes `b` a secret too.

Exercised by `python -m pytest tests/test_config.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException


@dataclass
class _Tracking:
    """What resolving the current value has touched. `now` is one instant for the whole load."""

    now: datetime = field(default_factory=datetime.now)
    touched: set[str] = field(default_factory=set[str])


_tracking: ContextVar[_Tracking] = ContextVar("tracking")
_REQUIRED = object()


def _now(pattern: str) -> str:
    tracking = _tracking.get()
    tracking.touched.add("now")
    return tracking.now.strftime(pattern)


def _env(name: str, default: Any = _REQUIRED) -> str | None:
    _tracking.get().touched.add("env")
    if name in os.environ:
        return os.environ[name]
    if default is _REQUIRED:
        raise ValueError(f"environment variable {name!r} is not set; set it, or write ${{oc.env:{name},default}}")
    return None if default is None else str(default)


# Ours under names of our own: a resolver is global to the process, and the originals may be in use by others.
OmegaConf.register_resolver("rlvr.env", _env, replace=True)
OmegaConf.register_resolver("rlvr.now", _now, replace=True)


def _renamed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _renamed(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_renamed(child) for child in value]
    if isinstance(value, str):
        return re.sub(r"\$\{\s*(?:oc\.(env)|(now))\s*:", lambda m: f"${{rlvr.{m[1] or m[2]}:", value)
    return value


def resolve(config: DictConfig, origin: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
    """(values, raw, timed) of `Loaded`: every leaf is resolved by itself, watching what it touches."""
    tracking = _Tracking()
    timed: list[str] = []

    def walk(node: Any, path: str, depth: int) -> tuple[Any, Any]:
        listed = isinstance(node, ListConfig)
        texts: Any = OmegaConf.to_container(node, resolve=False)
        values: dict[Any, Any] = {}
        raws: dict[Any, Any] = {}
        for key, text in enumerate(texts) if listed else texts.items():
            dotted = f"{path}[{key}]" if listed else f"{path}.{key}" if path else str(key)
            if isinstance(text, str):
                text = text.replace("${rlvr.env:", "${oc.env:").replace("${rlvr.now:", "${now:")
            tracking.touched.clear()
            try:
                value = raw = node[key]
                if depth > 50:
                    raise RecursionError
            except (OmegaConfBaseException, RecursionError) as error:
                raise ValueError(_explain(dotted, text, origin.get(dotted), error)) from None
            touched = set(tracking.touched)
            if "now" in touched:
                timed.append(dotted)
            if OmegaConf.is_config(value):
                value, raw = walk(value, dotted, depth + 1)
            elif isinstance(value, str):
                raw = value.replace("${", r"\${")
            values[key], raws[key] = value, text if "env" in touched else raw
        return (list(values.values()), list(raws.values())) if listed else (values, raws)

    token = _tracking.set(tracking)
    try:
        values, raws = walk(OmegaConf.create(_renamed(OmegaConf.to_container(config))), "", 0)
    finally:
        _tracking.reset(token)
    return values, raws, tuple(timed)


def _explain(dotted: str, text: Any, source: str | None, error: BaseException) -> str:
    message = str(error).splitlines()[0] if str(error) else "circular interpolation"
    if "recursi" in message.lower() or "Interpolation to parent node" in message:
        message = "circular interpolation"
    elif "Missing mandatory value" in message:
        message = f"has to be given; add {dotted}=... to the command line"
    message = re.sub(r"^ValueError raised while resolving interpolation: ", "", message)
    where = " (from the command line)" if source == "cli" else f" (from {source})" if source else ""
    given = f" {text!r}" if isinstance(text, str) and text != "???" else ""
    return f"{dotted}{given}{where}: {message}"
