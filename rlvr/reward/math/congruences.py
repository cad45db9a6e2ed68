"""Congruences: `x \\equiv 3 \\pmod 7`, `3 \\pmod 7`, and the remainder `10 \\bmod 7`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlvr.reward.math.algebra import Ratio
from rlvr.reward.math.kinds import Residue

_MODULUS = r"(\{[^{}]+\}|[^(){}\\]+)"
_TAIL = re.compile(
    rf"\s*(?:\\pmod\s*{_MODULUS}"
    r"|\(\s*(?:\\text\s*\{\s*mod\s*\}|\\[bp]?mod(?![A-Za-z])|mod(?![A-Za-z]))\s*([^()]+)\))\s*$"
)
_OPEN_TAIL = re.compile(
    rf"\s*(?:\\text\s*\{{\s*mod\s*\}}|\\b?mod(?![A-Za-z])|(?<![A-Za-z])mod(?![A-Za-z]))\s*{_MODULUS}$"
)
_SIGN = re.compile(r"\\equiv(?![A-Za-z])|=")
_LETTER = re.compile(r"\s*[A-Za-z]\s*")


@dataclass(frozen=True)
class CongruenceText:
    """The parts of a congruence; `name` is empty in `3 \\pmod 7`."""

    name: str
    residue: str
    modulus: str


def split_congruence(text: str) -> CongruenceText | None:
    """The parts; None where it is none. Without an equivalence sign, the modulus has to stand in brackets."""
    tail = _TAIL.search(text) or (_OPEN_TAIL.search(text) if "\\equiv" in text else None)
    if tail is None:
        return None
    sides = _SIGN.split(text[: tail.start()])
    modulus = next(filter(None, tail.groups())).strip("{}")
    if len(sides) == 1:
        return CongruenceText("", sides[0], modulus)
    if len(sides) == 2 and _LETTER.fullmatch(sides[1]) and not _LETTER.fullmatch(sides[0]):
        sides = sides[::-1]
    if len(sides) != 2 or not _LETTER.fullmatch(sides[0]):
        return None
    return CongruenceText(sides[0].strip(), sides[1], modulus)


def same_residue(a: Residue, b: Residue) -> bool:
    """Whether the classes are the same: the moduli up to sign, and the residues up to a multiple of it."""
    if a.name and b.name and a.name != b.name:
        return False
    if a.modulus not in (b.modulus, -b.modulus):
        return False
    multiple = ((a.value - b.value) / a.modulus).rational
    return multiple is not None and multiple.denominator == 1


def make_residue(name: str, value: Ratio, modulus: Ratio) -> Residue:
    """The class of a number modulo another; ValueError if either is a fraction, or the modulus is 0."""
    if not modulus.num:
        raise ValueError("the modulus 0")
    for part in (value, modulus):
        if part.den != (((), 1),) or any(coefficient.denominator != 1 for _, coefficient in part.num):
            raise ValueError("a congruence of fractions")
    return Residue(value, modulus, name)


def remainder(dividend: Ratio, modulus: Ratio) -> int:
    """The remainder in `10 \\bmod 7`, of whole numbers that are not negative."""
    n, m = dividend.rational, modulus.rational
    if n is None or m is None or n.denominator != 1 or m.denominator != 1 or n < 0 or m <= 0:
        raise ValueError("a remainder needs whole numbers and a modulus above 0")
    return n.numerator % m.numerator
