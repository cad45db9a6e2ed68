"""The kinds of value that an answer can be."""

from __future__ import annotations

from dataclasses import dataclass

from rlvr.reward.math.algebra import Ratio


@dataclass(frozen=True)
class Quantity:
    """A number or formula. `name` is what it was assigned to (`x = 5`), `decimals` the places of a decimal.

    `doubtful`: the words of the unit may not be one ("5 is wrong"). `digits` and `base` are those of `1010_2`.
    """

    value: Ratio
    unit: str = ""
    percent: bool = False
    name: str = ""
    decimals: int | None = None
    doubtful: bool = False
    digits: str = ""
    base: int = 0


@dataclass(frozen=True)
class TextValue:
    words: str


@dataclass(frozen=True)
class ChoiceLetter:
    letter: str


@dataclass(frozen=True)
class OrderedItems:
    """A tuple, point, vector or interval, with its brackets, or a ratio, with colons.

    `name` is the variable of an inequality, or what a ratio is of (`a:b`).
    """

    opening: str
    closing: str
    items: tuple[Value, ...]
    name: str = ""


@dataclass(frozen=True)
class UnorderedItems:
    """A set, or a list without brackets. `either`: joined by "or", so that not all of them hold at once."""

    items: tuple[Value, ...]
    either: bool = False


@dataclass(frozen=True)
class IntervalUnion:
    """Intervals. `joined` by a sign or an "or", else a list of them, which stay apart."""

    parts: tuple[Value, ...]
    joined: bool = True


@dataclass(frozen=True)
class Matrix:
    rows: tuple[tuple[Value, ...], ...]


@dataclass(frozen=True)
class Relation:
    """An equation or inequality: `form` compared with zero by `=`, `<`, `<=` or `!=`."""

    sign: str
    form: Ratio


@dataclass(frozen=True)
class Residue:
    """A class of numbers modulo another: `x \\equiv 3 \\pmod 7`, or `3 \\pmod 7` without a name."""

    value: Ratio
    modulus: Ratio
    name: str = ""


Value = (
    Quantity | TextValue | ChoiceLetter | OrderedItems | UnorderedItems | IntervalUnion | Matrix | Relation | Residue
)
