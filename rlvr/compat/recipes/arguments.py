"""`key=value` words of the recipes: those of a dataclass, and those that become settings of `rlvr train`.

`--help` lists them with their defaults. Left out on purpose: other flags, short forms, files of words.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from rlvr.core.registry import did_you_mean

T = TypeVar("T")
HELP = ("--help", "-h")


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
            raise ValueError(
                f"{name!r} is not a setting of this recipe{did_you_mean(name, names)}; it has {', '.join(names)}"
            )
    return kind(**{name: _value(name, text, hints[name]) for name, text in given.items()})


def format_help(about: str, rows: Sequence[Sequence[str]]) -> str:
    """What a recipe is and how it is called, then its words: name, default, and the setting it stands for."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([about.partition(" Left out on purpose:")[0].strip(), "", *lines])


def dataclass_help(kind: type[Any], about: str) -> str:
    """The help of a recipe whose words are a dataclass."""
    return format_help(about, [("word", "default"), *((f.name, str(f.default)) for f in fields(kind))])


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
    `about` is what `--help` says first.
    """

    name: str
    words: Mapping[str, Sequence[str]]
    about: str = ""

    def overrides(self, words: Sequence[str]) -> list[str]:
        """The words as settings; one with a dot, or `seed`, is a setting already."""
        settings: list[str] = []
        given = split(words)
        chosen: dict[str, tuple[str, str]] = {}  # setting -> (value, the argument that set it)
        for key, value in given.items():
            if key == "log_path":
                place = Path(value).expanduser().absolute()
                settings += [f"run.root={place.parent}", f"run.name={place.name}"]
            elif key in self.words:
                meant = self.words.get(f"{key}={value}", self.words[key])
                for setting in (s.replace("{}", value) for s in meant if s.partition("=")[0] not in given):
                    name, _, wanted = setting.partition("=")
                    if name in chosen and chosen[name][0] != wanted:
                        raise ValueError(
                            f"{chosen[name][1]} and {key}={value} set {name} to different values; give one of them"
                        )
                    chosen[name] = (wanted, f"{key}={value}")
                    settings.append(setting)
            elif "." in key or key == "seed":
                settings.append(f"{key}={value}")
            else:
                known = ["log_path", "seed", *(word for word in self.words if "=" not in word)]
                raise ValueError(
                    f"{key!r} is not a setting of {self.name}{did_you_mean(key, known)}; it has {', '.join(known)}, "
                    "and all those of rlvr train (training.steps=100, say)"
                )
        return settings

    @property
    def config(self) -> Path:
        return Path(__file__).parent / f"{self.name}.yaml"

    def help(self) -> str:
        """Every word with its default: what the recipe's config says, else the default of `rlvr train`."""
        from rlvr.config import load
        from rlvr.config.build_config import build_config
        from rlvr.config.choices import full_key

        settings: Any = build_config(load(None, str(self.config)))
        rows = [("word", "default", "setting"), ("log_path", f"runs/{self.name}", "run.root and run.name")]
        rows.append(("seed", str(settings.seed), "seed"))
        for word in (word for word in self.words if "=" not in word):
            names = [setting.partition("=")[0] for setting in self.words[word]]
            default = _at(settings, full_key(names[0]))
            if default is None:
                default = f"that of {settings.algorithm.name}" if names == ["algorithm.loss"] else "none"
            rows.append((word, str(default), ", ".join(names)))
        more = f"All settings of `rlvr train` are taken too; `rlvr config --config={self.config}` lists them."
        return f"{format_help(self.about or self.name, rows)}\n\n{more}"

    def run(self, words: Sequence[str]) -> int:
        """`rlvr train` with the recipe's config; its exit code."""
        from rlvr.cli.main import run

        try:
            if set(HELP) & set(words):
                print(self.help())
                return 0
            overrides = self.overrides(words)
        except ValueError as mistake:
            print(f"{self.name}: {mistake}", file=sys.stderr)
            return 2
        return run(["train", f"--config={self.config}", *overrides])


def _at(settings: Any, path: str) -> Any:
    """The value at `a.b.c` in configs and mappings; None if there is none."""
    for name in path.split("."):
        settings = settings.get(name) if isinstance(settings, Mapping) else getattr(settings, name, None)
    return settings
