"""What an answer may look like before a scorer of `reasoning_gym` that evaluates it sees it.

    find_fault("countdown", "__import__('os')")       # -> "'__import__' is not allowed"
    find_fault("countdown", "(3 + 4) * 6")            # -> ""

Four scorers call `eval` on the answer: it must be a literal of lists, numbers and plain strings, or the plain form that
the family asks for. Five call sympy's `parse_expr`, which evaluates too: the answer must be an expression of numbers,
operators, parentheses and the family's own names, whose powers stay small. No string, attribute, index or keyword
passes, so nothing that passes can reach the scorer's process. A text is read once from the left, and is never evaluated
here.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache

LONGEST = 4000  # characters of an answer that is evaluated
DEEPEST = 40  # parentheses or brackets within each other
GREATEST_DEGREE = 200  # of an expression as a polynomial in its numbers and names: bounds the size of its value
_DIGITS = 40  # of one number


@dataclass(frozen=True)
class Grammar:
    """The answers that a family accepts. `plain` is a pattern of answers that need not be literals; `names` and
    `functions` are those of expressions."""

    plain: str = ""
    is_expression: bool = False
    names: str = ""
    functions: frozenset[str] = frozenset()
    powers: bool = False


_MATRIX = r"\s*(?:-?\d+(?:\s+|\Z))*"
_CALCULUS = frozenset(
    ("sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh", "cosh", "tanh")
    + ("exp", "log", "ln", "sqrt", "Abs")
)
_INTEGRAL = Grammar(is_expression=True, names=r"[A-Za-z]|pi|[Tt]heta", functions=_CALCULUS, powers=True)
GRAMMARS = {
    # `eval`
    "binary_matrix": Grammar(plain=_MATRIX),
    "spiral_matrix": Grammar(plain=_MATRIX),
    "string_insertion": Grammar(plain=r"[A-Z]*"),
    "n_queens": Grammar(plain=r"[Q_\s]*"),
    # sympy's `parse_expr`
    "countdown": Grammar(is_expression=True),
    "puzzle24": Grammar(is_expression=True),
    "simple_integration": _INTEGRAL,
    "intermediate_integration": _INTEGRAL,
    "polynomial_multiplication": Grammar(is_expression=True, names="[a-z]", powers=True),
}

_EXPRESSION_TOKEN = re.compile(r"\s*(?:(\d+\.?\d*(?:[eE][+-]?\d{1,2})?|\.\d+)|([A-Za-z_]\w*)|(\*\*|[-+*/()]))")
_LITERAL_TOKEN = re.compile(r"""\s*(?:(-?\d+(?:\.\d*)?)|('[^'"\\\n]*'|"[^'"\\\n]*")|([\[\](),]))""")


class _Fault(Exception):
    pass


def find_fault(family: str, answer: str) -> str:
    """Why the answer must not reach the scorer of its family, in words; "" if it may."""
    grammar = GRAMMARS.get(family)
    if grammar is None:
        return ""
    if len(answer) > LONGEST:
        return f"{len(answer):,} characters, at most {LONGEST:,} are evaluated"
    if not grammar.is_expression and _plain_pattern(grammar.plain).fullmatch(answer):
        return ""
    try:
        (_Expression(answer, grammar) if grammar.is_expression else _Literal(answer)).read()
    except _Fault as fault:
        return str(fault)
    return ""


@cache
def _plain_pattern(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.ASCII)


class _Tokens:
    """The tokens of a text, each with the number of its group in `pattern`; refuses any other character."""

    def __init__(self, text: str, pattern: re.Pattern[str]) -> None:
        if not text.isascii():
            raise _Fault("a character outside ASCII is not allowed")
        self.tokens: list[tuple[int, str]] = []
        place, end = 0, len(text.rstrip())
        while place < end:
            match = pattern.match(text, place, end)
            if match is None:
                raise _Fault(f"{text[place:].strip()[:20]!r} is not allowed")
            assert match.lastindex
            self.tokens.append((match.lastindex, match[match.lastindex]))
            place = match.end()
        self.place = 0
        self.depth = 0

    @property
    def next(self) -> tuple[int, str]:
        return self.tokens[self.place] if self.place < len(self.tokens) else (0, "the end")

    def take(self, *texts: str) -> str:
        """The next token if it is one of `texts`, else ""."""
        text = self.next[1]
        if self.next[0] and text in texts:
            self.place += 1
            return text
        return ""

    def expect(self, *texts: str) -> str:
        taken = self.take(*texts)
        if not taken:
            raise _Fault(f"{self.next[1][:20]!r} where {' or '.join(texts)} is expected")
        return taken

    def finish(self) -> None:
        if self.next[0]:
            raise _Fault(f"{self.next[1][:20]!r} where the end is expected")

    def enter(self) -> None:
        self.depth += 1
        if self.depth > DEEPEST:
            raise _Fault(f"more than {DEEPEST} levels deep")

    def leave(self) -> None:
        self.depth -= 1


class _Literal(_Tokens):
    """`[1, "a", [2]]`: numbers, strings without escapes, lists and tuples."""

    def __init__(self, text: str) -> None:
        super().__init__(text, _LITERAL_TOKEN)

    def read(self) -> None:
        self._value()
        self.finish()

    def _value(self) -> None:
        if self.next[0] in (1, 2):
            self.place += 1
            return
        close = "]" if self.expect("[", "(") == "[" else ")"
        self.enter()
        while not self.take(close):
            self._value()
            if not self.take(","):
                self.expect(close)
                break
        self.leave()


class _Expression(_Tokens):
    """`a*x**2 + sin(x)/3`. Each method returns the degree of what it has read, which bounds the size of its value."""

    def __init__(self, text: str, grammar: Grammar) -> None:
        super().__init__(text, _EXPRESSION_TOKEN)
        self.grammar = grammar

    def read(self) -> None:
        self._sum()
        self.finish()

    def _sum(self) -> int:
        degree = self._product()
        while self.take("+", "-"):
            degree = max(degree, self._product())
        return degree

    def _product(self) -> int:
        degree = self._sign()
        while self.take("*", "/"):
            degree += self._sign()
        return self._check_degree(degree)

    def _sign(self) -> int:
        signs = 0
        while self.take("+", "-"):
            signs += 1
        if signs > DEEPEST:
            raise _Fault(f"more than {DEEPEST} signs in a row")
        return self._power()

    def _power(self) -> int:
        degree = self._atom()
        if not self.take("**"):
            return degree
        if not self.grammar.powers:
            raise _Fault("'**' is not allowed")
        return self._check_degree(degree * self._exponent())

    def _exponent(self) -> int:
        """The size of an exponent: a number, a fraction of numbers in parentheses, or a name as in `E**x`."""
        start = self.place
        self.take("-")
        kind, text = self.next
        if kind == 1:
            self.place += 1
            value = self._check_degree(float(text))
        elif kind == 2:
            self._atom()
            value = 1
        else:
            self.place = start
            self.take("-")
            self.expect("(")
            self.place -= 1
            inside = self.tokens[self.place :]
            numbers = [float(text) for kind, text in inside[: _length(inside)] if kind == 1]
            self._atom()
            value = self._check_degree(math.prod(max(2.0, number) for number in numbers))
        if self.take("**"):
            raise _Fault("a power of a power without parentheses is not allowed")
        return value

    def _atom(self) -> int:
        kind, text = self.next
        if kind == 1:
            if len(text) > _DIGITS:
                raise _Fault(f"a number of {len(text)} characters, at most {_DIGITS} are evaluated")
            self.place += 1
            return 1
        if kind == 2:
            self.place += 1
            if text in self.grammar.functions:
                self.expect("(")
                self.place -= 1
            elif re.fullmatch(self.grammar.names or r"(?!)", text) and self.next[1] != "(":
                return 1
            else:
                raise _Fault(f"{text[:20]!r} is not allowed")
        self.expect("(")
        self.enter()
        degree = self._sum()
        self.expect(")")
        self.leave()
        return degree

    def _check_degree(self, degree: float) -> int:
        if degree > GREATEST_DEGREE:
            raise _Fault(f"powers or products beyond degree {GREATEST_DEGREE}")
        return max(1, int(degree))


def _length(tokens: list[tuple[int, str]]) -> int:
    """How many tokens the first parentheses have."""
    depth = 0
    for count, (_, text) in enumerate(tokens, 1):
        depth += (text == "(") - (text == ")")
        if not depth:
            return count
    return len(tokens)
