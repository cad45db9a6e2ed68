"""Checks a config against the schema of a run, and reports every key and value that does not fit.

The schema consists of the dataclasses of the lower layers, with their defaults. Values keep their type: "3" is not a
number and 1 is not a truth value; the exceptions are
integers where a float is wanted, and text such as `1e-5`, which YAML 1.1 does not read as a number.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from pydantic import TypeAdapter, ValidationError

from rlvr.config import compose
from rlvr.config.choices import FLAT
from rlvr.config.interpolate import describe_origin, mask_secrets

T = TypeVar("T")
_NAMING = ("name", "type", "by")  # the keys of sections that name what is chosen in them
_FLOAT = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?\.?(inf|nan)", re.IGNORECASE)


def load_settings(
    schema: type[T],
    words: Sequence[str],
    file: Path | None = None,
    defaults: Mapping[str, Mapping[str, Any]] | None = None,
    renamed: Mapping[str, str] | None = None,
) -> T:
    """Settings beside those of a run: `key=value` words over a YAML file over the `defaults` of its sections over those
    of the `schema`; ValueError names every wrong one. `renamed` has the earlier names of keys, which are read too."""
    loaded = compose.load(None, None if file is None else str(file), words)
    for old, new in (renamed or {}).items():
        _rename(loaded, old, new)
    for section, given in (defaults or {}).items():
        held = loaded.values.get(section)
        if held is None or isinstance(held, dict):
            loaded.values[section] = {**given, **(held or {})}
    return validate(loaded.values, schema, loaded.origin, loaded.typed)


def _rename(loaded: compose.LoadedConfig, old: str, new: str) -> None:
    """Move the value of a key that has another name now; ValueError if both names are given."""
    (section, earlier), (_, now) = old.split("."), new.split(".")
    held = loaded.values.get(section)
    if not isinstance(held, dict) or earlier not in held:
        return
    if now in held:
        raise ValueError(f"{old} is the earlier name of {new}; give {new} alone")
    held[now] = held.pop(earlier)
    loaded.typed[new] = old
    if old in loaded.origin:
        loaded.origin[new] = loaded.origin.pop(old)


def validate(
    values: Mapping[str, Any],
    schema: type[T],
    origin: Mapping[str, str] | None = None,
    typed: Mapping[str, str] | None = None,
) -> T:
    """Build `schema` (a dataclass of dataclasses) from nested values, or raise a ValueError that lists every mistake.

    An unknown key is named in full, with where it came from and the nearest known key; a value of the wrong type with
    what was given and what was expected. Fields typed `dict[str, Any]` take any keys. `typed` says of a key by which
    other spelling the user gave it.
    """
    came = Origins(origin or {}, typed or {})
    unknown = list(_unknown(values, schema, ""))
    if unknown:
        known = list(list_keys(schema))
        raise ValueError("\n".join(_about_unknown(key, siblings, known, came) for key, siblings in unknown))
    prepared = _floats(values, schema)
    try:
        text = json.dumps(prepared)
    except TypeError as error:
        raise ValueError(f"config: a value is not text, number, list or mapping: {error}") from None
    try:
        return _get_adapter(schema).validate_json(text, strict=True)
    except ValidationError as error:
        raise ValueError("\n".join(_about_errors(error, prepared, schema, came))) from None


class Origins:
    """Describes where a key was set: its own entry, else that of a key in it or of its section; and under which
    alias."""

    def __init__(self, origin: Mapping[str, str], typed: Mapping[str, str]) -> None:
        self.origin, self.typed = origin, typed

    def __call__(self, key: str) -> str:
        spelled = f", as {self.typed[key]}" if key in self.typed else ""
        origin = self.origin.get(key)
        if origin is None:
            origin = next((v for k, v in self.origin.items() if k.startswith((f"{key}.", f"{key}["))), None)
        while origin is None and key:
            key = re.sub(r"(^|\.)[^.\[]*$|\[\d+\]$", "", key)
            origin = self.origin.get(key)
        return describe_origin(origin, spelled)

    def of_message(self, section: str, message: str) -> str:
        """The origin of the key that a message names as `key=value`, else of the section."""
        prefix = f"{section}." if section else ""
        for key in (*self.typed, *self.origin):
            if key.startswith(prefix) and re.search(rf"\b{re.escape(key.rpartition('.')[2])}=", message):
                return self(key)
        return self(section)


@cache
def _get_adapter(schema: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(schema)


@cache
def _fields(schema: type) -> dict[str, Any]:
    """Name -> type of a dataclass's fields that a config can set."""
    hints = typing.get_type_hints(schema)
    return {f.name: hints[f.name] for f in dataclasses.fields(schema) if f.init}


def _alternatives(hint: Any) -> list[Any]:
    """The members of a union, or the type itself."""
    return list(typing.get_args(hint)) if typing.get_origin(hint) in (Union, types.UnionType) else [hint]


def _sections(hint: Any) -> list[type]:
    return [a for a in _alternatives(hint) if isinstance(a, type) and dataclasses.is_dataclass(a)]


def _children(value: Any, hint: Any, prefix: str) -> Iterator[tuple[Any, str, Any, Any]]:
    """(key, dotted key, value, type) of what a mapping or list holds, where the type of it is known."""
    if isinstance(value, Mapping):
        fields = {name: field for section in _sections(hint) for name, field in _fields(section).items()}
        mapped = [typing.get_args(a)[1] for a in _alternatives(hint) if typing.get_origin(a) is dict]
        for key, child in value.items():
            if key in fields or mapped:
                yield (
                    key,
                    f"{prefix}.{key}" if prefix else str(key),
                    child,
                    fields.get(key, mapped[0] if mapped else Any),
                )
    elif isinstance(value, (list, tuple)):
        args = [typing.get_args(a) for a in _alternatives(hint) if typing.get_origin(a) in (list, tuple)]
        inner: list[Any] = [a for a in args[0] if a is not Ellipsis] if args else []
        for index, child in enumerate(value):
            yield index, f"{prefix}[{index}]", child, inner[min(index, len(inner) - 1)] if inner else Any


def _unknown(value: Any, hint: Any, prefix: str) -> Iterator[tuple[str, list[str]]]:
    """(dotted key, possible names) for every key that the schema does not have."""
    sections = _sections(hint)
    if isinstance(value, Mapping) and sections and not any(typing.get_origin(a) is dict for a in _alternatives(hint)):
        names = list(dict.fromkeys(name for section in sections for name in _fields(section)))
        for key in value:
            if key not in names:
                yield f"{prefix}.{key}" if prefix else str(key), names
    for _, dotted, child, inner in _children(value, hint, prefix):
        yield from _unknown(child, inner, dotted)


def list_keys(hint: Any, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the schema, sections included."""
    for section in _sections(hint):
        for name, inner in _fields(section).items():
            dotted = f"{prefix}.{name}" if prefix else name
            yield dotted
            yield from list_keys(inner, dotted)


def _about_unknown(key: str, siblings: list[str], known: list[str], came: Origins) -> str:
    if any(flat.startswith(f"{key}.") for flat in FLAT):  # a section of flat keys alone: what is in it is unknown
        key = next((given for given in came.origin if given.startswith(f"{key}.")), key)
        siblings = []
    parent, _, leaf = key.rpartition(".")
    siblings = [*siblings, *(flat.rpartition(".")[2] for flat in FLAT if flat.rpartition(".")[0] == parent)]
    near = difflib.get_close_matches(leaf, siblings, n=1) or [n for n in _NAMING if leaf in _NAMING and n in siblings]
    if near:
        hint = f"did you mean {f'{parent}.{near[0]}' if parent else near[0]}?"
    else:
        leaves: dict[str, str] = {}
        for other in sorted(known, key=lambda other: not other.startswith(f"{parent}.")):  # those of the section first
            leaves.setdefault(other.rpartition(".")[2], other)
        elsewhere = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.8)
        listed = f"known here: {', '.join(sorted(siblings))}"
        hint = f"did you mean {leaves[elsewhere[0]]}?" if elsewhere else listed
    return f"unknown key {key}{came(key)}: {hint}"


def _floats(value: Any, hint: Any) -> Any:
    """Convert text to a number if the schema expects a float and not text."""
    if isinstance(value, str):
        types_ = _alternatives(hint)
        number = float in types_ and str not in types_ and _FLOAT.fullmatch(value)
        return float(re.sub(r"\.(?=inf|nan)", "", value.lower())) if number else value
    children = {key: _floats(child, inner) for key, _, child, inner in _children(value, hint, "")}
    if isinstance(value, Mapping):
        return {key: children.get(key, child) for key, child in value.items()}
    return list(children.values()) if isinstance(value, (list, tuple)) else value


def _about_errors(error: ValidationError, values: Any, schema: Any, came: Origins) -> Iterator[str]:
    reported: set[str] = set()
    for item in error.errors():
        path, value, hint = "", values, schema
        for part in item["loc"]:  # other parts are pydantic's names for the members of a union
            for key, dotted, child, inner in _children(value, hint, path):
                if key == part:
                    path, value, hint = dotted, child, inner
                    break
        if item["type"] == "missing":
            name = str(item["loc"][-1])
            hint = next((_fields(s)[name] for s in _sections(hint) if name in _fields(s)), Any)
            path = f"{path}.{name}" if path else name
            message = f"{path}: has to be given, expected {_name(hint)}"
        elif item["type"] in ("value_error", "assertion_error"):
            reason = item["msg"].removeprefix("Value error, ").removeprefix(f"{path}: ")
            message = f"{path}{came.of_message(path, reason)}: {reason}" if path else reason
        elif re.search(r"_(type|parsing|from_float)$|^(literal_error|enum|none_required)$", item["type"]):
            message = f"{path}: {_describe_value(value)} given{came(path)}, expected {_name(hint)}"
            if isinstance(value, str) and (naming := _find_naming(hint)):
                message += f"; a name is given as {path}.{naming}"
        else:
            message = f"{path}: {_describe_value(value)} given{came(path)}: {item['msg'][:1].lower()}{item['msg'][1:]}"
        if path not in reported:
            reported.add(path)
            yield message


def _find_naming(hint: Any) -> str:
    """The key of a section that names what is chosen in it; "" if there is none."""
    fields = {name for section in _sections(hint) for name in _fields(section)}
    return next((name for name in _NAMING if name in fields), "")


def _describe_value(value: Any) -> str:
    text = mask_secrets(json.dumps(value))  # before it is shortened: half a secret would not be recognised
    kind = {str: "text", bool: "a truth value", int: "an integer", float: "a number", list: "a list", dict: "a mapping"}
    return (text if len(text) <= 80 else f"{text[:77]}...") + (f" ({kind[type(value)]})" if type(value) in kind else "")


def _name(hint: Any) -> str:
    """A type in words: `float | None` is "a number or null"."""
    plain = {
        int: "an integer",
        float: "a number",
        str: "text",
        bool: "true or false",
        type(None): "null",
        Any: "anything",
    }
    if len(parts := _alternatives(hint)) > 1:
        return " or ".join(_name(part) for part in parts)
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, typing.get_args(hint)))}"
    if typing.get_origin(hint) in (list, tuple):
        inner = [a for a in typing.get_args(hint) if a is not Ellipsis]
        return f"a list of {' and '.join(_name(a) for a in inner)}" if inner else "a list"
    if typing.get_origin(hint) is dict or (isinstance(hint, type) and dataclasses.is_dataclass(hint)):
        return "a mapping"
    if isinstance(hint, type) and hasattr(hint, "__members__"):
        return f"one of {', '.join(str(m.value) for m in hint)}"  # type: ignore[attr-defined]
    return plain.get(hint) or str(getattr(hint, "__name__", hint))
