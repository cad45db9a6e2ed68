"""Units in one spelling each, never converted; which words after a number are its unit.

A word is a unit where the table has it, where it is a plain plural ("12 apples") or follows "per"; words of number,
order and doubt ("5 million", "5 is wrong") never are.
"""

from __future__ import annotations

import re

_KNOWN = {
    "cm": "centimeter", "mm": "millimeter", "km": "kilometer", "m": "meter", "ft": "foot", "feet": "foot", "in": "inch",
    "inches": "inch", "yd": "yard", "mi": "mile", "kg": "kilogram", "g": "gram", "mg": "milligram", "lb": "pound",
    "lbs": "pound", "oz": "ounce", "ml": "milliliter", "l": "liter", "hr": "hour", "hrs": "hour", "h": "hour",
    "min": "minute", "mins": "minute", "s": "second", "sec": "second", "secs": "second", "usd": "dollar",
    "metre": "meter", "centimetre": "centimeter", "kilometre": "kilometer", "millimetre": "millimeter",
    "litre": "liter", "people": "person", "deg": "degree", "rad": "radian", "mph": "mile per hour",
    "square": "square", "us": "us", "sq": "square", "cu": "cubic", "children": "child",
    "bus": "bus", "gas": "gas", "series": "series", "penny": "cent", "pennies": "cent", "men": "man", "women": "woman",
    "sheep": "sheep", "fish": "fish", "deer": "deer", "geese": "goose", "mice": "mouse", "teeth": "tooth",
    "dice": "die", "oxen": "ox", "cattle": "cattle", "aircraft": "aircraft", "species": "species",
}  # fmt: skip
CURRENCIES = {"$": "dollar", "\u20ac": "euro", "\u00a3": "pound sterling", "\u00a5": "yen", "\u00a2": "cent"}
_KNOWN |= {sign: name for sign, name in CURRENCIES.items() if sign != "$"}
_UNITS = """unit square cubic point degree radian celsius fahrenheit kelvin person child man woman dollar cent euro yen
rupee second minute hour day week month year decade century meter centimeter millimeter kilometer foot inch yard mile
gram kilogram milligram ton tonne pound ounce liter milliliter gallon quart pint cup watt volt joule newton pascal hertz
mole ampere ohm byte bit acre hectare knot revolution page way step us sterling
sheep fish deer goose mouse tooth die ox cattle aircraft species series"""
_LENGTHS = frozenset(["meter", "centimeter", "millimeter", "kilometer", "foot", "inch", "yard", "mile", "unit"])
# Words that change or retract a number, and would otherwise pass for a plural or follow "per" or "of".
_NO_UNITS = """plus minus times less this always perhaps does has was is guess guesses thus yes its others unless them
these those factorial power pair square cube negative none wrong no not or and but maybe mistake doubt error lie ten
reciprocal inverse opposite complement conjugate exponent multiple percent equal exceed become divide add subtract
remain fail mean imply follow hold take need exist appear afterward backward forward upward downward onward inward
outward sometime beside whereas sideway hers ours theirs multiply negate
invert"""
_NUMBERS = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety half halve halves third fourth quarter fifth
sixth seventh eighth ninth tenth eleventh twelfth thirteenth fifteenth sixteenth twentieth thirtieth fortieth fiftieth
hundredth thousandth millionth billionth quadrillion quintillion googol score gross grosse myriad"""
# Factors of the number before them.
SCALES = {
    "dozen": 12, "hundred": 10**2, "thousand": 10**3, "lakh": 10**5, "million": 10**6, "crore": 10**7, "billion": 10**9,
    "trillion": 10**12,
}  # fmt: skip
NUMBER_WORDS = frozenset([*_NUMBERS.split(), *SCALES])
_PLAIN, _NEVER = frozenset(_UNITS.split()), NUMBER_WORDS | frozenset(_NO_UNITS.split())
# Short words that are no products of variables.
STOPS = frozenset([*(name for name in _KNOWN if 2 <= len(name) <= 3), "per", "pct", "Pct", "PCT"])
# The sign or its words, then anything.
PERCENT_SIGN = re.compile(
    r"(?:\\text\s*\{\s*)?(?:%(?!%)|(?:per ?cents?|per ?centages?|pct)(?![A-Za-z])\.?)\s*\}?(.*)",
    re.IGNORECASE | re.DOTALL,
)
# `5^{\text{th}}`, and `5th` where both sides have it: `2nd` alone may be a product.
ORDINAL = re.compile(r"([0-9]{1,9})\s?\^?\s*\{?\s*(?:\\text\s*\{\s*)?(?:st|nd|rd|th)\s*\}{0,2}")
_MARKS = re.compile(r"\\text\s*|[{}$~]|\\,|\\ ")
_WORD = re.compile(r"([A-Za-z\u00a2\u00a3\u00a5\u20ac]+(?:-[A-Za-z]+)*)\.?(?:\s*\^\s*([23]))?")
_OPTIONAL = {"a", "an", "the", "total", "each"}


def unit_of(text: str) -> tuple[str, bool] | None:
    """The unit that `text` spells, and whether it is certainly a unit; None where there are no words.

    Other words ("is wrong") only matter where the gold does not have the same.
    """
    if text.startswith("^\\circ"):
        scale = {"": "degree", "C": "celsius", "F": "fahrenheit"}.get(_MARKS.sub("", text[6:]).strip())
        return None if scale is None else (scale, True)
    rest = _MARKS.sub(" ", text).replace("/", " per ").strip(" .")
    named, power, sure, before = [], "", True, ""
    while rest:
        match = _WORD.match(rest)
        if not match:
            return None
        rest = rest[match.end() :].lstrip(" .,")
        word = match[1].casefold()
        name = _singular(word)
        if name in ("square", "cubic") and rest:
            power = "^2" if name == "square" else "^3"
        elif word in ("squared", "cubed") and before in _LENGTHS and "^" not in named[-1]:
            named[-1] += "^2" if word == "squared" else "^3"
        elif name not in _OPTIONAL:
            sure = sure and _plausible(word, name, before)
            if name != "of":
                named.append(name + (f"^{match[2]}" if match[2] else power))
            power, before = "", name
    return None if len(named) > 6 else (" ".join(named), sure and before not in ("per", "of"))


def _plausible(word: str, name: str, before: str) -> bool:
    last = word.rpartition("-")[2]  # of "three-quarters"
    if word in ("square", "sq", "cubic", "cu") or {word, last, _singular(last)} & _NEVER:
        return word == "squares"
    if all(part in _PLAIN or part in ("per", "of") for part in name.split()):  # mph is a mile per hour
        return True
    plural = len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is"))
    return plural or (before in ("per", "of") and len(word) > 2)


def _singular(name: str) -> str:
    if name in _KNOWN:
        return _KNOWN[name]
    for ending, single in (("ies", "y"), ("ches", "ch"), ("shes", "sh"), ("xes", "x"), ("ss", "ss"), ("s", "")):
        if name.endswith(ending) and len(name) > 3:
            name = name[: -len(ending)] + single
            break
    return _KNOWN.get(name, name)
