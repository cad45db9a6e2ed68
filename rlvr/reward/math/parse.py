"""A recursive-descent parser of one expression, in TeX or plain notation, into an exact closed form.

Everything is capped (depth, powers, digits) and the text is read once, left to right. What may follow an expression,
such as a unit, is left to `rlvr.reward.math.values`. Conventions: `3\\frac12` and `3 1/2` are mixed numbers where the
fraction is a proper one; `x^12` without braces takes the whole number; `2e-3` is scientific notation; `log` has base
ten.
"""

from __future__ import annotations

import re
from fractions import Fraction

from rlvr.reward.math import algebra, functions
from rlvr.reward.math.algebra import Ratio, TooLarge, atom, number
from rlvr.reward.text.final_answer import exact_decimal

MAX_DEPTH = 25
MAX_DIGITS = 1_000  # of one number

_NUMBER = re.compile(r"[0-9]+(?:\.(?![.])[0-9]*)?|\.[0-9]+")
_REPEATED = re.compile(r"\s?(?:\\(?:overline|bar|dot)\s*\{?([0-9]{1,50})\}?|\(([0-9]{1,50})\))")
_ELLIPSIS = re.compile(r"([0-9]*?)([0-9]{1,8}?)\2+\s?(?:\\ldots|\.\.\.)")
_EXPONENT = re.compile(r"[eE]([-+]?[0-9]{1,5})(?![0-9.A-Za-z])")
_MIXED = re.compile(
    r"\s?\\frac\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))|\s([0-9]+)\s?/\s?([0-9]+)"
)
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[A-Za-z]+")
_DEGREES = re.compile(r"\s*\^\s*\\circ(?![A-Za-z])\s*")
_FUNCTIONS = (*functions.TRIGONOMETRY, "cis", "log", "ln", "exp")
_ARC = {name: f"arc{name}" for name in ("sin", "cos", "tan")}
_WORDS = {"sqrt", "pi", "theta", "alpha", "beta", "lambda", "infinity", "inf", "oo", *_FUNCTIONS}
_GREEK = frozenset(
    ("alpha", "beta", "gamma", "delta", "theta", "lambda", "mu", "nu", "phi", "varphi", "psi", "omega", "sigma")
    + ("rho", "tau", "epsilon", "zeta", "eta", "xi", "chi")
)


class Unreadable(ValueError):
    """The text is not an expression that this parser knows."""


class Reader:
    """Reads from `text` at `at`; `sign` is what a plus-minus stands for."""

    def __init__(self, text: str, sign: int = 1, stops: frozenset[str] = frozenset()) -> None:
        self.text, self.sign, self.stops = text, sign, stops
        self.at = self.depth = 0
        self.bars = 0  # open absolute values: the next bar closes

    def expression(self) -> Ratio:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooLarge(f"nested more than {MAX_DEPTH} deep")
        total, sign = number(0), self.signs()
        term = self.term()
        total = term if sign > 0 else -term
        while (sign := self.signs(once=True)) != 0:
            sign *= self.signs()
            term = self.term()
            total = total + (term if sign > 0 else -term)
        self.depth -= 1
        return total

    def signs(self, once: bool = False) -> int:
        """The signs here: their product, at most two of them; 0 where there is none and one is asked for."""
        product = 0 if once else 1
        for _ in range(1 if once else 2):
            for sign, worth in (("-", -1), ("+", 1), ("\\pm", self.sign), ("\\mp", -self.sign)):
                if self.take(sign):
                    product = (product or 1) * worth
                    break
            else:
                break
        return product

    def term(self) -> Ratio:
        product = self.factor()
        while True:
            if self.take("\\times") or self.take("\\cdot") or (self.peek() == "*" and self.take("*")):
                product = product * self.signed_factor()
            elif self.take("\\div") or (self.peek() == "/" and self.take("/")):
                product = product / self.signed_factor()
            elif self.starts_factor():
                product = product * self.factor()
            else:
                return product

    def signed_factor(self) -> Ratio:
        sign = self.signs()
        factor = self.factor()
        return factor if sign > 0 else -factor

    def starts_factor(self) -> bool:
        """Whether what follows multiplies without a sign: no word, and no number but after a factorial."""
        self.skip()
        next_ = self.peek()
        if next_.isdigit():
            return self.text[: self.at].rstrip().endswith("!")
        if next_ == "(" or (next_ == "{" and not self.text.startswith("{,}", self.at)):
            return True
        if next_ == "|":
            return not self.bars
        if next_ == "\\":
            name = self.command()
            return name in ("frac", "sqrt", "pi", *_GREEK, *_FUNCTIONS, "lfloor", "lceil", "binom") or name == "infty"
        return bool(self.word())

    def factor(self) -> Ratio:
        self.depth += 1
        if self.depth > MAX_DEPTH * 2:
            raise TooLarge("nested too deep")
        value = self.base()
        while True:
            self.skip()
            if self.take("!!"):
                value = functions.double_factorial(value)
            elif self.take("!"):
                value = algebra.factorial(value)
            elif self.peek() == "^" and not re.match(r"\^\s*\\circ", self.text[self.at : self.at + 10]):
                self.at += 1
                value = functions.power(value, self.argument(signed=True))
            else:
                self.depth -= 1
                return value

    def base(self) -> Ratio:
        self.skip()
        next_ = self.peek()
        if _NUMBER.match(self.text, self.at) or next_ == ".":
            return self.number()
        for opening, closing in (("(", ")"), ("{", "}"), ("[", "]")):
            if next_ == opening:
                return self.group(opening, closing)
        if next_ == "|":
            self.at += 1
            self.bars += 1
            value = self.expression()
            self.bars -= 1
            self.need("|")
            return functions.absolute(value)
        if next_ == "\\":
            return self.read_command(self.command())
        word = self.word()
        if not word:
            raise Unreadable(f"no expression at {self.text[self.at : self.at + 20]!r}")
        self.at += len(word)
        return self.function(word) if word in _FUNCTIONS else self.symbol(word)

    def read_command(self, name: str) -> Ratio:
        self.at += 1 + len(name)
        if name == "frac":
            top = self.argument(digits=1)
            return top / self.argument(digits=1)
        if name == "sqrt":
            degree = self.group("[", "]") if self.peek() == "[" else number(2)
            if not degree.num:
                raise Unreadable("a root of degree zero")
            return algebra.power(self.argument(), number(1) / degree)
        if name == "binom":
            top = self.argument(digits=1)
            return functions.binomial(top, self.argument(digits=1))
        if name in _FUNCTIONS:
            return self.function(name)
        for kind in ("floor", "ceil"):
            if name == f"l{kind}":
                value = self.expression()
                self.need(f"\\r{kind}")
                return functions.floor_or_ceil(kind, value)
        if name == "pi" or name == "infty" or name in _GREEK:
            return self.symbol(name)
        raise Unreadable(f"the command \\{name}")

    def symbol(self, name: str) -> Ratio:
        if name == "sqrt":
            return algebra.power(self.argument(), number(Fraction(1, 2)))
        name = "oo" if name in ("infty", "infinity", "inf") else name
        if len(name) == 1 and self.peek() == "_":
            match = re.compile(r"_(?:\{([A-Za-z0-9]{1,8})\}|([A-Za-z0-9]))").match(self.text, self.at)
            if not match:
                raise Unreadable("a subscript that is no name")
            self.at = match.end()
            return atom(f"{name}_{match[1] or match[2]}")
        return atom(name)

    def function(self, name: str) -> Ratio:
        base, exponent = None, None
        if name == "log" and self.take("_"):
            base = self.argument(digits=None)
        if self.take("^"):
            exponent = self.argument(signed=True)
            if exponent.rational == -1:  # sin^{-1} is the arcsine, never 1/sin
                if name not in _ARC:
                    raise Unreadable("an inverse function")
                name, exponent = _ARC[name], None
        self.skip()
        argument = self.bracketed_argument() if self.peek() in ("(", "{", "[") else self.plain_term()
        if name in (*functions.TRIGONOMETRY, "cis") and (sign := _DEGREES.match(self.text, self.at)):
            self.at = sign.end()
            argument = argument * atom("pi") / number(180)
        if name == "exp":
            return functions.power(atom("e"), argument)
        value = functions.logarithm(base, argument) if base is not None else functions.apply_function(name, argument)
        return value if exponent is None else algebra.power(value, exponent)

    def bracketed_argument(self) -> Ratio:
        """In brackets, where a sign of degrees may stand before the last one."""
        opening = self.peek()
        self.need(opening)
        bars, self.bars = self.bars, 0
        value = self.expression()
        if sign := _DEGREES.match(self.text, self.at):
            self.at = sign.end()
            value = value * atom("pi") / number(180)
        self.bars = bars
        self.need({"(": ")", "{": "}", "[": "]"}[opening])
        return value

    def plain_term(self) -> Ratio:
        """The argument of a function without brackets: sin 2x."""
        product = self.factor()
        while self.starts_factor() and self.command() not in _FUNCTIONS and self.peek() not in ("(", "{", "|"):
            product = product * self.factor()
        return product

    def argument(self, digits: int | None = None, signed: bool = False) -> Ratio:
        """Read the argument of a command or of ^: a group, a number of at most `digits` digits, or one symbol."""
        self.skip()
        sign = self.signs() if signed and self.peek() in "+-" else 1
        next_ = self.peek()
        if match := re.compile(r"[0-9]" if digits else r"[0-9]+(?:\.[0-9]+)?").match(self.text, self.at):
            self.at = match.end()
            value = number(_decimal(match[0]))
        elif (next_ and next_ in "{(") or next_ == "\\":
            value = self.base()
        else:
            word = self.word()
            if not word:
                raise Unreadable("nothing where a number was expected")
            self.at += len(word)
            value = self.symbol(word)
        return value if sign > 0 else -value

    def group(self, opening: str, closing: str) -> Ratio:
        self.need(opening)
        bars, self.bars = self.bars, 0
        value = self.expression()
        self.bars = bars
        self.need(closing)
        return value

    def number(self) -> Ratio:
        start = self.at
        ending = _ELLIPSIS.match(self.text, self.text.find(".", start) + 1) if "." in self.text[start:] else None
        match = _NUMBER.match(self.text, start)
        if match is None:
            raise Unreadable("a period without digits")
        digits = match[0]
        if len(digits) > MAX_DIGITS:
            raise TooLarge(f"a number of {len(digits)} digits, at most {MAX_DIGITS}")
        self.at = match.end()
        if "." in digits:
            again = _REPEATED.match(self.text, self.at)
            if ending is not None and self.text.find(".", start) < match.end() and not again:
                self.at = ending.end()
                return number(_repeating(digits.partition(".")[0] + "." + ending[1], ending[2]))
            if again and (again[1] or digits[-1:] != "." or again[2]):
                self.at = again.end()
                return number(_repeating(digits, again[1] or again[2]))
        value = _decimal(digits)
        exponent = _EXPONENT.match(self.text, self.at)
        if exponent:
            if abs(int(exponent[1])) > MAX_DIGITS:
                raise TooLarge("an exponent of ten beyond 1000")
            self.at = exponent.end()
            return number(value * Fraction(10) ** int(exponent[1]))
        mixed = None if "." in digits else _MIXED.match(self.text, self.at)
        if mixed:
            top = int((mixed[1] or mixed[2] or mixed[5])[:MAX_DIGITS])
            bottom = int((mixed[3] or mixed[4] or mixed[6])[:MAX_DIGITS])
            if 0 < top < bottom:
                self.at = mixed.end()
                return number(value + Fraction(top, bottom))
        return number(value)

    def word(self) -> str:
        """A known name here, or one letter of a product; empty where a longer word or nothing of the kind begins."""
        match = _WORD.match(self.text, self.at)
        if not match:
            return ""
        run = match[0]
        for name in sorted(_WORDS, key=len, reverse=True):
            if run.startswith(name):
                return name
        return "" if run in self.stops or len(run) > 3 else run[0]

    def command(self) -> str:
        match = _COMMAND.match(self.text, self.at)
        return match[1] if match else ""

    def skip(self) -> None:
        self.at = _SPACE.match(self.text, self.at).end()  # pyright: ignore[reportOptionalMemberAccess]

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def take(self, sign: str) -> bool:
        self.skip()
        end = self.at + len(sign)
        there = self.text.startswith(sign, self.at) and not (sign[0] == "\\" and self.text[end : end + 1].isalpha())
        self.at = end if there else self.at
        return there

    def need(self, sign: str) -> None:
        if not self.take(sign):
            raise Unreadable(f"expected {sign!r} at {self.text[self.at : self.at + 20]!r}")


def _decimal(digits: str) -> Fraction:
    if len(digits) > MAX_DIGITS:
        raise TooLarge("a number of too many digits")
    return exact_decimal(digits)


def _repeating(digits: str, again: str) -> Fraction:
    decimals = len(digits.partition(".")[2])
    return _decimal(digits) + Fraction(int(again), (10 ** len(again) - 1) * 10**decimals)
