"""What we check of an answer after the scorer of `reasoning_gym` gave 1: where it is known to accept wrong ones.

    confirm("puzzle24", "1 + 2 + 3 + 18", "(4 - 1) * (3 + 5)")     # -> "its numbers are not compared with ..."

A check compares with the library's own answer, and reads no more than numbers and words. `UNSOUND` are families where
that cannot help. `docs/train/environments.md` has the audit.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

UNSOUND = {
    "propositional_logic": "accepts a premise copied from the question as its conclusion",
}
"""What the scorer of a family accepts that is not worth learning, as the end of "its scorer ..."."""

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_SPELLING = "it reads 1_00 and digits other than 0 to 9 as Python does"
_PYTHON_ONLY = re.compile(r"(?![0-9])\d|\d_\d")  # what `int` and `float` read, and text with such a number has not


@dataclass(frozen=True)
class SecondCheck:
    """A check for answers that a scorer accepts wrongly. `hole` is what the scorer does wrong; `accepts(answer, gold)`
    is whether the answer is right all the same."""

    hole: str
    accepts: Callable[[str, str], bool]


def confirm(family: str, answer: str, gold: str | None) -> str:
    """Describe the fault of the scorer by which a wrong answer may have passed; "" if there is none."""
    if _PYTHON_ONLY.search(answer) and not (gold and _PYTHON_ONLY.search(gold)):
        return _SPELLING
    check = SECOND_CHECKS.get(family)
    if check is None or gold is None:
        return ""
    try:
        return "" if check.accepts(answer, gold) else check.hole
    except (ArithmeticError, SyntaxError, TypeError, ValueError):
        return check.hole


def _is_same_word(answer: str, gold: str) -> bool:
    return answer.strip().lower() == gold.strip().lower()


def _is_number(answer: str, gold: str) -> bool:
    return "nan" not in answer.lower()


def _is_same_fraction(answer: str, gold: str) -> bool:
    given, right = (_divide(text) for text in (answer, gold))
    return abs(given - right) <= 1e-4


def _divide(text: str) -> float:
    above, slash, below = text.partition("/")
    return float(above.replace(",", "")) / (float(below) if slash else 1.0)


def _has_same_numbers(answer: str, gold: str) -> bool:
    given, right = ([float(number) for number in _NUMBER.findall(text)] for text in (answer, gold))
    return given == right


def _has_same_first_number(answer: str, gold: str) -> bool:
    first = _NUMBER.search(answer)
    return first is not None and float(first[0]) == float(gold)


def _is_same_sum(answer: str, gold: str) -> bool:
    """Whether two expressions use the same numbers, each as often, and have exactly the same value."""
    given, right = (sorted(re.findall(r"[0-9]+", text)) for text in (answer, gold))
    return given == right and _evaluate(answer) == _evaluate(gold)


def _evaluate(expression: str) -> Fraction:
    """The exact value of an expression of whole numbers, `+ - * /` and parentheses, which the grammar has let pass."""

    def value(node: ast.AST) -> Fraction:
        match node:
            case ast.Constant(value=int(number)):
                return Fraction(number)
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return -value(inner)
            case ast.UnaryOp(op=ast.UAdd(), operand=inner):
                return value(inner)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(left), value(right))
            case _:
                raise ValueError(f"{type(node).__name__} in an expression of whole numbers")

    return value(ast.parse(expression.strip(), mode="eval").body)


SECOND_CHECKS = {
    "coin_flip": SecondCheck("it takes the first characters of a number for the number", _is_same_fraction),
    "complex_arithmetic": SecondCheck("it takes nan for any number", _is_number),
    "countdown": SecondCheck("it takes a value near the target for the target", _is_same_sum),
    "game_of_life_halting": SecondCheck("it takes any text for True and for False", _is_same_word),
    "gsm_symbolic": SecondCheck("it leaves out the sign of a number", _has_same_first_number),
    "number_sorting": SecondCheck("it takes numbers that are off by up to 1", _has_same_numbers),
    "puzzle24": SecondCheck("it takes other numbers than the given ones, and 24.9 for 24", _is_same_sum),
}
