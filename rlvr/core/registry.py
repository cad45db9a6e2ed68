"""Registries of names that users may extend: rewards, environments and the like.

A name is either registered (`@register_reward("mine")`), by a plug-in too (`rlvr.core.plugins`), or a path
`package.module:function`, imported with the current directory importable. The error for an unknown name shows the
nearest one and all names. Paths are for users at the command line: a service must accept names of `names()` only.
"""

from __future__ import annotations

import difflib
import dis
import hashlib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, Generic, TypeVar

from rlvr.core.plugins import describe_plugins, load_plugins

T = TypeVar("T")
GIVEN = "given"  # begins the path of an object that a program gave, and that no import leads to
_given: dict[str, Any] = {}
_own_names = set[str]()  # that the program itself registered, which no other process knows
# The objects that have a path, by their identity, with the constants that they had then.
_named: dict[int, tuple[Any, str, dict[str, Any]]] = {}


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
        note_own_name(name, getattr(function, "__module__", None))

    def get(self, name: str) -> T:
        if name not in self._entries:
            load_plugins()
        if name not in self._entries:
            if (file := Path(name)).suffix == ".py":
                raise ValueError(f"unknown {self.kind} {name!r}: {_name_module(file, 'NAME')}, a name of that file")
            raise ValueError(
                f"unknown {self.kind} {name!r}{did_you_mean(name, self._entries)}; known: "
                f"{', '.join(self.names())}; or a path 'package.module:function'{describe_plugins()}"
            )
        return self._entries[name][0]

    def names(self) -> list[str]:
        return sorted(self._entries)

    def entry_of(self, function: Callable[..., Any]) -> T | None:
        """The entry that `function` was registered with, if it was."""
        return next((entry for entry, registered in self._entries.values() if registered is function), None)


def did_you_mean(name: object, known: Iterable[str], cutoff: float = 0.5) -> str:
    """` (did you mean 'boxed'?)`, or "" if no known name is as near as `cutoff`, at most 1."""
    by_lower = {k.lower(): k for k in known}
    close = difflib.get_close_matches(str(name).lower(), by_lower, n=1, cutoff=cutoff)
    return f" (did you mean {by_lower[close[0]]!r}?)" if close else ""


def load_path(kind: str, path: str) -> Callable[..., Any]:
    """The function at `package.module:function`; ValueError, with what to do, if it cannot be loaded."""
    found = load_object(kind, path)
    if not callable(found):
        raise ValueError(f"{kind} {path!r}: the object is of type {type(found).__name__}, expected a function")
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
    if (file := Path(module_name)).suffix == ".py":
        raise ValueError(f"{kind} {path!r}: {_name_module(file, attribute)}")
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
            "run from the folder that holds the module, or install the module"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [name for name, one in vars(found).items() if name[0] != "_" and not isinstance(one, ModuleType)]
            raise ValueError(f"{kind} {path!r}: {module_name!r} has no {attribute!r}{did_you_mean(part, names)}")
        found = getattr(found, part)
    return found


def _name_module(file: Path, attribute: str) -> str:
    """What to write instead of a file's name: its module, seen from here or from the folder that holds the file."""
    parts = file.with_suffix("").parts
    is_below = all(part.isidentifier() for part in parts)
    module, place = (".".join(parts), "") if is_below else (file.stem, f", and run from {file.parent}")
    return f"a module is expected, not a file name; give {module}:{attribute}{place}"


def name_object(found: Any, use: Any = None, *, is_shared: bool = True) -> str:
    """A path by which `load_object` finds an object: `package.module:name` where an import leads to it.

    Else, for what a script, a notebook or a function made, `given:name_hash`, which holds in this process. The hash is
    that of what the object computes (`_Description`): after a change it has another path. An object keeps its path,
    whatever state it comes to; a function until its program changes a constant or a helper of it. `use` is loaded in
    its place, if given. Two objects that compute the same have one path, that of the one named last, unless `is_shared`
    is false.
    """
    if use is None and (path := _find_import(found)):
        return path
    constants = _read_constants(found)
    if (known := _named.get(id(found))) is not None and known[0] is found and known[2] == constants:
        _given[known[1].partition(":")[2]] = found if use is None else use
        return known[1]
    name = getattr(found, "__qualname__", None) or type(found).__qualname__
    label = re.sub(r"\W+", "_", str(name).rpartition(".")[2]).strip("_")
    description = _Description()
    path = f"{label}_{hashlib.sha256(repr(description.of(found)).encode()).hexdigest()[:8]}"
    while path in _given and (description.is_partial or not is_shared):  # what is not described may differ
        path += "_2"
    _given[path] = found if use is None else use
    _named[id(found)] = found, f"{GIVEN}:{path}", constants
    return f"{GIVEN}:{path}"


def note_own_name(name: str, module: str | None) -> None:
    """Remember the name of what the program that runs registered, which no import leads to."""
    if module == "__main__":
        _own_names.add(name)


def find_own(value: Any) -> str:
    """The first name in a value, mappings and lists included, that other processes cannot resolve; "" if there is none.

    That is the path of an object that `name_object` named, or what a script or a notebook registered.
    """
    if isinstance(value, str):
        return show_names(value) if value.startswith(f"{GIVEN}:") else value if value in _own_names else ""
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return next(filter(None, map(find_own, inner)), "")


def show_names(text: str) -> str:
    """The text with each function that a program gave by its name there, and not by its path."""
    return re.sub(rf"\b{GIVEN}:(\w+?)_[0-9a-f]{{8}}(_2)*\b", r"\1", text)


def _find_import(found: Any) -> str:
    """`package.module:name` where that leads to an object, else ""."""
    module, name = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
    if not name or module not in sys.modules or module == "__main__":
        return ""
    held: Any = sys.modules[module]
    for part in name.split("."):
        held = getattr(held, part, None)
    return f"{module}:{name}" if held is found else ""


class _Description:
    """Plain values that change with what an object computes, and are equal in every process.

    Described are code, defaults, closures, and the globals that code names; of an object its attributes and the
    methods of its class. What an import leads to stands under its path. `is_partial`: something was of a kind that
    cannot be described, and stands under its type alone.
    """

    def __init__(self) -> None:
        self.is_partial = False
        self._inside: list[int] = []

    def of(self, found: Any) -> Any:
        if found is None or isinstance(found, (bool, int, float, str, bytes)):
            return found
        if id(found) in self._inside:
            return "recursive"
        if isinstance(found, ModuleType):
            return found.__name__
        if path := _find_import(found):
            return path
        self._inside.append(id(found))
        try:
            return self._of_parts(found)
        finally:
            self._inside.pop()

    def _of_parts(self, found: Any) -> Any:
        if isinstance(found, CodeType):
            names = found.co_varnames[: found.co_argcount + found.co_kwonlyargcount]
            return found.co_code, found.co_names, names, [self.of(value) for value in found.co_consts]
        if isinstance(found, FunctionType):
            return self._of_function(found)
        if isinstance(found, MethodType):
            return self.of(found.__func__), self.of(found.__self__)
        if isinstance(found, (staticmethod, classmethod)):
            return self.of(found.__func__)
        if isinstance(found, property):
            return [self.of(part) for part in (found.fget, found.fset)]
        if isinstance(found, partial):
            return self.of(found.func), self.of(found.args), self.of(found.keywords)
        if isinstance(found, (tuple, list)):
            return [self.of(value) for value in found]
        if isinstance(found, (set, frozenset)):
            return sorted(repr(self.of(value)) for value in found)
        if isinstance(found, (dict, MappingProxyType)):
            return [(repr(self.of(key)), self.of(value)) for key, value in found.items()]
        if isinstance(found, type):
            if not _is_python(found):  # its methods are wrappers of C, which lead to all the other types of their kind
                return f"{found.__module__}:{found.__qualname__}"
            own = {name: value for name, value in vars(found).items() if name not in _OF_CLASSES}
            return found.__qualname__, [self.of(base) for base in found.__bases__], self.of(own)
        if wrapped := getattr(found, "__wrapped__", None):
            return self.of(wrapped)
        held = {**getattr(found, "__dict__", {})}
        held |= {name: getattr(found, name, None) for name in getattr(type(found), "__slots__", ())}
        self.is_partial |= not held and not _is_python(type(found))
        return self.of(type(found)), self.of(held)

    def _of_function(self, found: FunctionType) -> Any:
        cells: list[Any] = []
        for cell in found.__closure__ or ():
            try:
                cells.append(self.of(cell.cell_contents))
            except ValueError:  # it is empty until a later statement
                cells.append("empty")
        names = dict.fromkeys(name for code in _all_code(found) for name in code.co_names)
        used = {name: self.of(found.__globals__[name]) for name in names if name in found.__globals__}
        return self.of(found.__code__), self.of(found.__defaults__), self.of(found.__kwdefaults__), cells, used


def _all_code(function: FunctionType) -> list[CodeType]:
    """The code of a function, and of the functions and comprehensions inside, which name globals too."""
    found = [function.__code__]
    for code in found:
        found += [value for value in code.co_consts if isinstance(value, CodeType)]
    return found


def _read_constants(found: Any) -> dict[str, Any]:
    """What a program may change about a function that exists, or about the methods of a class or an object: the plain
    globals that it names, and the code of the functions that it calls, with theirs. A global that the function assigns
    itself is its state."""
    constants: dict[str, Any] = {}
    functions = _list_functions(found)
    for function in functions:
        code = _all_code(function)
        named = {name for part in code for name in part.co_names}
        state = {i.argval for part in code for i in dis.get_instructions(part) if i.opname == "STORE_GLOBAL"}
        for name in sorted(named & function.__globals__.keys() - state):
            value = function.__globals__[name]
            if value is None or isinstance(value, (bool, int, float, str, bytes)):
                constants[name] = value
            elif isinstance(value, FunctionType) and value not in functions and not _find_import(value):
                functions.append(value)
                constants[name] = _Description().of(value.__code__)
    return constants


def _list_functions(found: Any) -> list[FunctionType]:
    """A function itself, or the methods of a class or of an object's class which the program wrote."""
    if isinstance(found, (MethodType, partial, staticmethod, classmethod)):
        found = found.func if isinstance(found, partial) else found.__func__
    if isinstance(found, FunctionType):
        return [found]
    classes = (found if isinstance(found, type) else type(found)).__mro__
    held = [value for kind in classes if not _find_import(kind) for value in vars(kind).values()]
    held = [getattr(value, "fget", None) or getattr(value, "__func__", value) for value in held]
    return [value for value in held if isinstance(value, FunctionType)]


_OF_CLASSES = ("__dict__", "__weakref__", "__doc__", "__module__", "__firstlineno__", "__static_attributes__")


def _is_python(kind: type) -> bool:
    """Whether a class is written in Python."""
    return "__dict__" in dir(kind) or "__slots__" in vars(kind)


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
