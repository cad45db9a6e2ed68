"""Registries of names that users may extend: rewards, environments and the like.

A name is either registered (`@register_reward("mine")`) or a path `package.module:function`, imported with the current
directory importable. The error for an unknown name shows the nearest one and all names. Paths are for users at the
command line: a service must accept names of `names()` only.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, Generic, TypeVar

T = TypeVar("T")
GIVEN = "given"  # begins the path of an object that a program gave, and that no import leads to
_given: dict[str, Any] = {}


class Registry(Generic[T]):
    """A dictionary of entries by name, e.g. `Registry("reward")`; `kind` is the word its errors use."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, tuple[T, Callable[..., Any]]] = {}

    def add(self, name: str, entry: T, function: Callable[..., Any]) -> None:
        """Register `entry` under `name`. The same function may come again (a reloaded module, a notebook cell)."""
        if not name or ":" in name or name != name.strip():
            raise ValueError(f"{self.kind} name {name!r}: expected a non-empty word without ':' or outer spaces")
        taken = self._entries.get(name)
        if taken is not None and not _same_function(taken[1], function):
            raise ValueError(
                f"{self.kind} {name!r} is already registered by {_where(taken[1])}; "
                f"give {_where(function)} another name"
            )
        self._entries[name] = (entry, function)

    def get(self, name: str) -> T:
        if name not in self._entries:
            raise ValueError(
                f"unknown {self.kind} {name!r}{did_you_mean(str(name), self._entries)}; known: "
                f"{', '.join(self.names())}; or a path 'package.module:function'"
            )
        return self._entries[name][0]

    def names(self) -> list[str]:
        return sorted(self._entries)

    def entry_of(self, function: Callable[..., Any]) -> T | None:
        """The entry that `function` was registered with, if it was."""
        return next((entry for entry, registered in self._entries.values() if registered is function), None)


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """` (did you mean 'boxed'?)`, or "" if no known name is as near as `cutoff`, at most 1."""
    by_lower = {k.lower(): k for k in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return f" (did you mean {by_lower[close[0]]!r}?)" if close else ""


def load_path(kind: str, path: str) -> Callable[..., Any]:
    """The function at `package.module:function`; ValueError, with what to do, if it cannot be loaded."""
    found = load_object(kind, path)
    if not callable(found):
        raise ValueError(f"{kind} {path!r}: it is of type {type(found).__name__}, expected a function")
    return found


def load_object(kind: str, path: str) -> Any:
    """The object at `package.module:name`; ValueError, with what to do, if it cannot be loaded."""
    module_name, _, attribute = path.partition(":")
    if module_name == GIVEN:
        if attribute not in _given:
            raise ValueError(
                f"{kind} {path!r} was given as an object by a Python program, and is not in this process; run that "
                "program again, or put the object into a module and name it by 'package.module:name'"
            )
        return _given[attribute]
    if not all(part.isidentifier() for part in (*module_name.split("."), *attribute.split("."))):
        raise ValueError(f"{kind} {path!r} is not of the form 'package.module:function'")
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    importlib.invalidate_caches()
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{kind} {path!r}: importing {module_name!r} failed ({type(error).__name__}: {error}); "
            "run from the folder that holds it, or install it"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [n for n in vars(found) if not n.startswith("_")]
            raise ValueError(f"{kind} {path!r}: {module_name!r} has no {attribute!r}{did_you_mean(part, names)}")
        found = getattr(found, part)
    return found


def name_object(found: Any, use: Any = None) -> str:
    """A path by which `load_object` finds an object: `package.module:name` where an import leads to it.

    Else, for what a script, a notebook or a function made, `given:name_hash`, which holds in this process. The hash is
    that of its code: after a change it has another path. `use` is loaded in its place, if given.
    """
    module, name = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
    if name and module in sys.modules and module != "__main__":
        held: Any = sys.modules[module]
        for part in name.split("."):
            held = getattr(held, part, None)
        if held is found and use is None:
            return f"{module}:{name}"
    label = re.sub(r"\W+", "_", str(name or type(found).__qualname__).rpartition(".")[2]).strip("_")
    path = f"{label}_{hashlib.sha256(repr(_describe_code(found)).encode()).hexdigest()[:8]}"
    _given[path] = found if use is None else use
    return f"{GIVEN}:{path}"


def _describe_code(found: Any) -> Any:
    """Plain values that change with what a function, or an object of a class, computes; equal in every process."""
    if isinstance(found, CodeType):
        return found.co_code, found.co_names, [_describe_code(value) for value in found.co_consts]
    if isinstance(found, FunctionType):
        cells = [cell.cell_contents for cell in found.__closure__ or () if _is_plain(cell.cell_contents)]
        return _describe_code(found.__code__), found.__defaults__ and [*map(_describe_code, found.__defaults__)], cells
    if isinstance(found, partial):
        return _describe_code(found.func), [*map(_describe_code, found.args)], sorted(found.keywords)
    if isinstance(found, MethodType):
        return _describe_code(found.__func__), _describe_code(found.__self__)
    if isinstance(found, type):
        methods = {name: member for name, member in vars(found).items() if isinstance(member, FunctionType)}
        return found.__qualname__, {name: _describe_code(methods[name]) for name in sorted(methods)}
    if isinstance(found, (set, frozenset)):
        return sorted(map(repr, found))
    if _is_plain(found):
        return found
    if isinstance(found, (tuple, list)):
        return [_describe_code(value) for value in found]
    held = {name: value for name, value in getattr(found, "__dict__", {}).items() if _is_plain(value)}
    return _describe_code(type(found)), held


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, bytes))


def check_kwargs(
    what: str,
    function: Callable[..., Any],
    kwargs: Mapping[str, Any],
    supplied: Collection[str] = (),
    complete: bool = True,
) -> None:
    """ValueError if `function` does not take `kwargs` or, if they should be `complete`, needs more of them.

    `supplied` are parameters that the caller fills, so users cannot set them.
    """
    named = named_parameters(function)
    accepted = {n: p for n, p in named.items() if n not in supplied}
    unknown = [n for n in kwargs if n not in accepted]
    if unknown and (not takes_any(function) or set(unknown) & set(supplied)):
        takes = ", ".join(accepted) or "no options"
        raise ValueError(f"{what} does not take {unknown[0]!r}{did_you_mean(unknown[0], accepted)}; it takes: {takes}")
    missing = [n for n, p in accepted.items() if p.default is p.empty and n not in kwargs]
    if complete and missing:
        raise ValueError(f"{what} needs {', '.join(map(repr, missing))}; it takes: {', '.join(accepted)}")


def named_parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters that can be given by name."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {n: p for n, p in parameters(function).items() if p.kind in kinds}


def takes_any(function: Callable[..., Any]) -> bool:
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters(function).values())


def parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{_where(function)}: its parameters cannot be read ({error}); wrap it in a function"
        ) from error


def _same_function(a: Callable[..., Any], b: Callable[..., Any]) -> bool:
    named = hasattr(a, "__qualname__") and hasattr(b, "__qualname__")
    return a is b or (named and _where(a) == _where(b) and "<" not in _where(a))


def _where(function: Callable[..., Any]) -> str:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '?')}.{name}"
