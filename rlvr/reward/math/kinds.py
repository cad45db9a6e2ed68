"""The kinds of value that an answer can be. `python -m pytest tests/test_math_compare.py` exercises them."""

from __future__ import annotations

from dataclasses import dataclass

from rlvr.reward.math.algebra import Ratio


@dataclass(frozen=True)
class Quantity:
    """A number or formula. `name` is what it was given to (`x = 5`), `decimals` are counted where it is a decimal.

    `doubtful`: the unit is words that may be none ("5 is wrong"). `digits` and `base` are those of `1010_2`.
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
class Text:
    words: str


@dataclass(frozen=True)
class Choice:
    letter: str


@dataclass(frozen=True)
class Ordered:
    """A tuple, point, vector or interval, with its brackets; `name` is the variable of an inequality."""

    opening: str
    closing: str
    items: tuple[Value, ...]
    name: str = ""


@dataclass(frozen=True)
class Unordered:
    """A set, or a list without brackets."""

    items: tuple[Value, ...]


@dataclass(frozen=True)
class Union:
    """Intervals. `joined` by a sign or an "or", else a list of them, which stay apart."""

    parts: tuple[Value, ...]
    joined: bool = True


@dataclass(frozen=True)
class Matrix:
    rows: tuple[tuple[Value, ...], ...]


@dataclass(frozen=True)
class Relation:
    """`form` compared with zero: `=`, `<`, `<=` or `!=`."""

    sign: str
    form: Ratio


Value = Quantity | Text | Choice | Ordered | Unordered | Union | Matrix | Relation
