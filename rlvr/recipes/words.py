"""`key=value` words of the recipes: those of a dataclass, and those that become settings of `rlvr train`.

Exercised by `tests/test_recipes.py`. Left out on purpose: flags, short forms, files of words.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from rlvr.registry import nearest

T = TypeVar("T")


def split(words: Sequence[str]) -> dict[str, str]:
    """`["a=1", "b=x=y"]` as `{"a": "1", "b": "x=y"}`; the last of two that say the same key holds."""
    for word in words:
        if "=" not in word.lstrip("=") or word.startswith("-"):
            raise ValueError(f"{word!r}: expected key=value, learning_rate=1e-4 say")
    return dict(word.split("=", 1) for word in words)


def parse(kind: type[T], words: Sequence[str]) -> T:
    """An instance of a dataclass from its fields' names and values."""
    given, hints = split(words), get_type_hints(kind)
    names = [f.name for f in fields(kind)]  # pyright: ignore[reportArgumentType]
    for name in given:
        if name not in names:
            raise ValueError(f"{name!r} is no setting of this recipe{nearest(name, names)}; it has {', '.join(names)}")
    return kind(**{name: _value(name, text, hints[name]) for name, text in given.items()})


def _value(name: str, text: str, kind: Any) -> Any:
    if text in ("None", "null") and type(None) in getattr(kind, "__args__", ()):
        return None
    for one in getattr(kind, "__args__", (kind,)):
        if one in (int, float):
            try:
                return one(text)
            except ValueError:
                raise ValueError(
                    f"{name}={text!r}: expected {'a whole number' if one is int else 'a number'}"
                ) from None
    return text


@dataclass(frozen=True)
class Recipe:
    """A config beside this file, and its short words: each stands for settings of `rlvr train`, with `{}` its value.

    A whole `key=value` among the words stands for settings of its own; one that was typed itself goes before those.
    """

    name: str
    words: Mapping[str, Sequence[str]]

    def overrides(self, words: Sequence[str]) -> list[str]:
        """The words as settings; one with a dot, or `seed`, is a setting already."""
        settings: list[str] = []
        given = split(words)
        for key, value in given.items():
            if key == "log_path":
                place = Path(value).expanduser().absolute()
                settings += [f"run.root={place.parent}", f"run.name={place.name}"]
            elif key in self.words:
                meant = self.words.get(f"{key}={value}", self.words[key])
                settings += [s.replace("{}", value) for s in meant if s.partition("=")[0] not in given]
            elif "." in key or key == "seed":
                settings.append(f"{key}={value}")
            else:
                known = ["log_path", "seed", *(word for word in self.words if "=" not in word)]
                raise ValueError(
                    f"{key!r} is no setting of {self.name}{nearest(key, known)}; it has {', '.join(known)}, and all "
                    "those of rlvr train (training.steps=100, say)"
                )
        return settings

    def run(self, words: Sequence[str]) -> int:
        """`rlvr train` with the recipe's config; its exit code."""
        from rlvr.cli import run

        try:
            overrides = self.overrides(words)
        except ValueError as mistake:
            print(f"{self.name}: {mistake}", file=sys.stderr)
            return 2
        return run(["train", f"--config={Path(__file__).parent / self.name}.yaml", *overrides])
