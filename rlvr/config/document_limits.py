"""Limits the size and depth of a config, and makes its keys text, before anything is expanded or resolved.

A YAML file of a few lines can describe more than a machine holds: aliases of aliases, references to references,
brackets in brackets. `check_size` looks at the text, `with_text_keys` at the mapping made of it, `Budget` at what its
`${...}` references make of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml

DEEPEST = 50  # levels of mappings and lists
VALUES, CHARACTERS = 100_000, 10_000_000  # of the whole config, when it is resolved
_REFERENCE = 10  # following a reference takes as long as this many plain values
TOO_DEEP = f"nested more than {DEEPEST} levels deep; no setting needs that"
TOO_LARGE = f"more than {VALUES:,} values or {CHARACTERS:,} characters once its references (`${{name}}`) are resolved"
_FAST_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # of libyaml, where PyYAML was built with it

_Place = tuple[str, ...]


def check_size(text: str) -> str:
    """Return YAML text unchanged; ValueError if it is nested too deep or its aliases (`*name`) expand to too much."""
    if len(text) > CHARACTERS:
        raise ValueError(f"longer than {CHARACTERS:,} characters")
    try:
        _check_events(text, _FAST_LOADER)
    except (yaml.YAMLError, UnicodeError):
        _check_events(text, yaml.SafeLoader)  # its messages are those that users see
    return text


def _check_events(text: str, loader: Any) -> None:
    open_nodes: list[tuple[str | None, int]] = []  # anchor, and the values that came before
    sizes: dict[str, int] = {}
    total = 0
    for event in yaml.parse(text, Loader=loader):
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in (anchor for anchor, _ in open_nodes):
                raise ValueError(f"the alias *{event.anchor} is inside its own anchor")
            total += sizes.get(event.anchor, 0)
        elif isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent)):
            total += 1
            if isinstance(event, yaml.CollectionStartEvent):
                open_nodes.append((event.anchor, total))
                if len(open_nodes) > DEEPEST + 1:
                    raise ValueError(TOO_DEEP)
            elif event.anchor:
                sizes[event.anchor] = 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            if anchor:
                sizes[anchor] = total - before + 1
        if total > VALUES:
            raise ValueError(f"more than {VALUES:,} values once its aliases (`*name`) are expanded")


def with_text_keys(value: Any, key: str = "", depth: int = 0) -> Any:
    """A copy with text keys; ValueError for an ambiguous key, or for too much depth.

    Integer keys become text (`{1: 4}` gives a weight to level "1"). Other keys that are not text (`true`, `1.5`, null)
    are refused: they have several spellings.
    """
    if not isinstance(value, (Mapping, list)):
        return value
    if depth > DEEPEST:
        raise ValueError(f"{'.'.join(key.split('.')[:3])}...: {TOO_DEEP}")
    if isinstance(value, list):
        return [with_text_keys(child, f"{key}[{index}]", depth + 1) for index, child in enumerate(value)]
    result: dict[str, Any] = {}
    for name, child in value.items():
        whole = isinstance(name, int) and not isinstance(name, bool)
        if not isinstance(name, str) and not whole:
            shown = {True: "true", False: "false"}.get(name, str(name)) if isinstance(name, bool) else str(name)
            where = f"{key}: " if key else ""
            raise ValueError(f"{where}the key {shown} is read as {type(name).__name__}; write it in quotes: '{shown}'")
        if str(name) in result:
            raise ValueError(f"{f'{key}: ' if key else ''}the key {name} is given twice, as text and as a number")
        result[str(name)] = with_text_keys(child, f"{key}.{name}" if key else str(name), depth + 1)
    return result


class Budget:
    """Limits the cost of resolving a config, estimated beforehand, so an exponential reference is never expanded.

    `references` gives the names that a text refers to. A name that contains references counts as one step.
    """

    def __init__(self, tree: Mapping[str, Any], references: Callable[[str], list[str]]) -> None:
        self._leaves = dict(_leaves(tree))
        self._names = {place: references(text) for place, text in self._leaves.items() if "${" in text}
        self._known: dict[_Place, tuple[int, int]] = {}
        self._of_text: dict[str, tuple[int, int]] = {}
        for place in self._names:
            text, (steps, length) = self._leaves[place], self._cost(place, 0)
            most = self._of_text.get(text, (0, 0))
            self._of_text[text] = max(steps, most[0]), max(length, most[1])
        self._values, self._characters = 0, 0

    def before(self, text: Any) -> None:
        """Count a value that is about to be resolved; ValueError if the total becomes too large."""
        steps, length = self._of_text.get(text, (0, len(text))) if isinstance(text, str) else (0, 0)
        self._values += 1 + _REFERENCE * steps
        self._characters += length
        if self._values > VALUES or self._characters > CHARACTERS:
            raise ValueError(TOO_LARGE)

    def _cost(self, place: _Place, hops: int) -> tuple[int, int]:
        """(references followed, characters) of resolving the text at a place. Circles are left to be found later."""
        text = self._leaves.get(place, "")
        if place not in self._names:
            return 0, len(text)
        if place not in self._known and hops <= 2 * DEEPEST:
            self._known[place] = 0, 0
            steps, length = 0, len(text)
            for name in self._names[place]:
                more, longer = self._cost(self._place(name, place, 0), hops + 1)
                steps, length = steps + 1 + more, length + longer
            self._known[place] = min(steps, VALUES), min(length, CHARACTERS + 1)
        return self._known.get(place, (0, 0))

    def _place(self, name: str, at: _Place, hops: int) -> _Place:
        """Where a name leads from a place: `..a[0].b` is relative to what holds what holds it."""
        dots = len(name) - len(name.lstrip("."))
        to = (at[:-dots] if dots else ()) + tuple(re.findall(r"[^.\[\]]+", name))
        for length in range(1, len(to)):
            through = self._names.get(to[:length])  # what it passes is itself a reference
            if through and hops < DEEPEST:
                return self._place(".".join((through[0], *to[length:])), to[:length], hops + 1)
        return to


def _leaves(value: Any, place: _Place = ()) -> Iterator[tuple[_Place, str]]:
    children = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from _leaves(child, (*place, str(key)))
    if isinstance(value, str):
        yield place, value
