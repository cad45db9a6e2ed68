"""Arithmetic in reverse Polish notation, solved step by step: the process a small transformer learns from nothing.

    <boe> 3 5 + 7 + = 8 7 + = 2 <eoe>          prompt: up to the first `=`; completion: the rest (p = 13)

A problem of complexity k has k operators and k + 1 operands; operands and operators are uniform, the shape is uniform
over the Catalan(k) Dyck paths. Each step is one pass from the left that reduces every `operand operand operator`,
without chaining inside the pass. All is modulo p.

A problem is one integer (shape, operands and operators as digits), so a draw is one bounded random integer and the
held-out set can be walked without repetition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from typing import Any

from rlvr.core import rng
from rlvr.core.protocols import TaskSource
from rlvr.core.types import Task
from rlvr.envs.prompt import PromptEnv
from rlvr.envs.registry import register_environment
from rlvr.envs.row_source import take_in_turn

OPERATORS = ("+", "-", "*")
MAX_COMPLEXITY = 10  # 16,796 shapes
_ENUMERABLE = 1 << 16  # levels of at most so many problems are walked in a permuted order, larger ones by drawing
_TRIES = 1000  # a level of which so many draws in a row are held out has nothing to train on


@register_environment("rpn_arithmetic")
class RPNArithmetic(TaskSource):
    """Arithmetic modulo `p` in reverse Polish notation, with generated step-by-step demonstrations.

    `flaw` is the probability that one reduction in a demonstration is wrong: a teacher that errs.

    `RPNArithmetic(p=13, operators=["+"]).vocabulary` has 18 words: operands 0 to 12, `+`, `=`, `<boe>`, `<eoe>`,
    `<pad>`. Problems are held out by a hash of their expression, about `heldout_fraction` of each level.
    """

    reward = "combined"
    end_word: str = "<eoe>"
    pad_word: str = "<pad>"

    def __init__(
        self,
        p: int = 13,
        operators: Sequence[str] = OPERATORS,
        complexity: Sequence[int] = (1, 3),
        heldout_fraction: float = 0.15,
        flaw: float = 0.3,
    ) -> None:
        self._require(p, operators, complexity, heldout_fraction, flaw)
        self.p, self.operators, self.flaw = p, tuple(operators), flaw
        self.levels = tuple(str(k) for k in range(complexity[0], complexity[1] + 1))
        self._heldout_below = int(heldout_fraction * 2**63)

    @staticmethod
    def _require(p: Any, operators: Any, complexity: Any, heldout_fraction: Any, flaw: Any) -> None:
        def refuse(name: str, value: Any, expected: str) -> None:
            raise ValueError(f"rpn_arithmetic: {name}={value!r}, expected {expected}")

        if not isinstance(p, int) or not 2 <= p <= 10_000:
            refuse("p", p, "an integer from 2 to 10000")
        listed = isinstance(operators, (list, tuple)) and len(operators) > 0
        if not listed or any(o not in OPERATORS or operators.count(o) > 1 for o in operators):
            refuse("operators", operators, f"a list of different ones of {' '.join(OPERATORS)}")
        pair = isinstance(complexity, (list, tuple)) and len(complexity) == 2
        if not pair or not all(isinstance(k, int) and 1 <= k <= MAX_COMPLEXITY for k in complexity):
            refuse("complexity", complexity, f"[lowest, highest], integers from 1 to {MAX_COMPLEXITY}")
        if complexity[0] > complexity[1]:
            refuse("complexity", complexity, "the lowest first")
        if not isinstance(heldout_fraction, (int, float)) or not 0 < heldout_fraction < 1:
            refuse("heldout_fraction", heldout_fraction, "a number above 0 and below 1")
        if not isinstance(flaw, (int, float)) or not 0 <= flaw <= 1:
            refuse("flaw", flaw, "a number from 0 to 1")

    @cached_property
    def vocabulary(self) -> list[str]:
        """Every word, in the order of the token ids."""
        return [*map(str, range(self.p)), *self.operators, "=", "<boe>", self.end_word, self.pad_word]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, both ends included: 7, 13, 21 for complexity 1, 2, 3."""
        k = int(self.levels[-1])
        return (k + 1) ** 2 + k + 2

    def problems(self, level: str) -> int:
        """How many different problems a level has: Catalan(k) p**(k+1) n**k. 507 for k = 1, p = 13 and `+ - *`."""
        k = int(level)
        return len(shapes(k)) * self.p ** (k + 1) * len(self.operators) ** k

    def train(self, seed: int, index: int, level: str) -> Task:
        """The index-th training problem of a level, uniform over those that are not held out."""
        self._check(level)
        n, key = self._sizes[level], rng.key("rpn-train", seed, level, index)
        for attempt in range(_TRIES):
            expression = self._expression(_integer(n, key, attempt), level)
            if not self.is_heldout(expression):
                return self._task(expression, level)
        raise ValueError(
            f"rpn_arithmetic: level {level} has no problem left to train on ({n} in all); lower heldout_fraction"
        )

    def heldout(self, count: int | None) -> list[Task]:
        """`count` different held-out problems (None: 1000), the levels in turn; fewer where there are no more.

        The first n are the same whatever `count` is.
        """
        return take_in_turn([self._walk(level) for level in self.levels], 1000 if count is None else count)

    def env(self, task: Task, tokenizer: Any) -> PromptEnv:
        return PromptEnv(task, tokenizer)

    def parse_task(self, text: str) -> Task | None:
        """The task of an expression that a person wrote, "3 5 + 7 +"; None if it is not one.

        It may be longer than those of the run: its value is known all the same.
        """
        words = text.removeprefix("<boe>").split()
        depth = 0
        for word in words:
            depth += 1 if word in self._operands else -1 if word in self.operators else -len(words) - 1
            if depth < 1:
                return None
        return self._task(" ".join(words), str(len(words) // 2)) if depth == 1 and len(words) > 1 else None

    def describe_task(self, task: Task) -> dict[str, str]:
        """The order of operands (n) and operators (o), and which operators occur: "n n o n o" and "* +"."""
        words = task.meta["expression"].split()
        shape = " ".join("n" if word in self._operands else "o" for word in words)
        return {"shape": shape, "operators": " ".join(sorted(set(words) & set(self.operators)))}

    def demonstration(self, task: Task, key: int) -> str:
        """A completion without its end token, e.g. "= 8 7 + = 2".

        Each single reduction is wrong with probability `flaw`, uniformly one of the other operands; the later steps
        go on from the wrong value.
        """
        expression = task.meta["expression"]
        return self.chain(expression, rng.key("rpn-flaw", key, expression) if self.flaw else 0, self.flaw)

    def chain(self, expression: str, key: int = 0, flaw: float = 0.0) -> str:
        """The steps from an expression to its value: `chain("3 5 + 7 +") == "= 8 7 + = 2"` for p = 13."""
        p, operands = self.p, self._operands
        state: list[Any] = [operands.get(word, word) for word in expression.split()]  # operands int, operators str
        words: list[str] = []
        position = 0
        while len(state) > 1:
            out: list[Any] = []
            i, last = 0, len(state) - 2
            while i < len(state):
                a = state[i]
                if i < last and type(a) is int and type(state[i + 1]) is int and type(state[i + 2]) is str:
                    a = _apply(a, state[i + 1], state[i + 2], p)
                    if flaw and rng.uniform(key, position) < flaw:
                        a = (a + 1 + rng.integer(p - 1, key, position + 1)) % p
                    position += 2
                    i += 2
                out.append(a)
                i += 1
            state = out
            words.append("=")
            words.extend(map(str, out))
        return " ".join(words)

    def is_heldout(self, id: str) -> bool:
        """Whether the problem of an expression, which is its id, is held out."""
        return rng.key("rpn-heldout", id) < self._heldout_below

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return {level: self.problems(level) for level in self.levels}

    @cached_property
    def _operands(self) -> dict[str, int]:
        return {str(i): i for i in range(self.p)}

    def _check(self, level: str) -> None:
        if level not in self._sizes:
            raise ValueError(f"rpn_arithmetic: level {level!r}; the levels are {', '.join(self.levels)}")

    def _expression(self, number: int, level: str) -> str:
        """The problem of a number in [0, problems(level)): its digits are the words, what is left the shape."""
        p, operators = self.p, self.operators
        n, words, k = len(operators), self.vocabulary, int(level)
        number, operands = divmod(number, p ** (k + 1))
        shape, chosen = divmod(number, n**k)
        out: list[str] = []
        for is_operand in shapes(k)[shape]:
            if is_operand:
                operands, digit = divmod(operands, p)
                out.append(words[digit])
            else:
                chosen, digit = divmod(chosen, n)
                out.append(operators[digit])
        return " ".join(out)

    def _task(self, expression: str, level: str) -> Task:
        stack: list[int] = []
        for word in expression.split():
            value = self._operands.get(word)
            if value is None:
                b, a = stack.pop(), stack.pop()
                value = _apply(a, b, word, self.p)
            stack.append(value)
        meta = {"answer": str(stack[0]), "modulus": self.p, "expression": expression}
        return Task(expression, "<boe> " + expression, meta, level)

    def _walk(self, level: str) -> Iterator[Task]:
        """The held-out problems of a level, each once, in an order that is the same every time."""
        n, key = self._sizes[level], rng.key("rpn-heldout-order", level)
        for number in rng.permutation(n, key) if n <= _ENUMERABLE else _distinct(n, key):
            expression = self._expression(number, level)
            if self.is_heldout(expression):
                yield self._task(expression, level)


@cache
def shapes(k: int) -> tuple[tuple[bool, ...], ...]:
    """The Catalan(k) orders of k + 1 operands (True) and k operators (False): an operand, then a Dyck path."""
    paths: list[tuple[tuple[bool, ...], int]] = [((True,), 0)]
    for step in range(2 * k):
        longer: list[tuple[tuple[bool, ...], int]] = []
        for path, height in paths:
            if height < 2 * k - step:
                longer.append(((*path, True), height + 1))
            if height > 0:
                longer.append(((*path, False), height - 1))
        paths = longer
    return tuple(path for path, _ in paths)


def _apply(a: int, b: int, operator: str, p: int) -> int:
    return (a + b if operator == "+" else a - b if operator == "-" else a * b) % p


def _integer(n: int, key: int, attempt: int) -> int:
    """An integer in [0, n) of any size, by multiply-shift with at least 64 bits to spare against bias."""
    words = n.bit_length() // 64 + 2
    number = 0
    for i in range(words):
        number = (number << 64) | rng.bits(key, attempt * words + i)
    return (number * n) >> (64 * words)


def _distinct(n: int, key: int) -> Iterator[int]:
    """The integers in [0, n), each once, in the order in which draws first meet them."""
    seen: set[int] = set()
    attempt = 0
    while len(seen) < n:
        number = _integer(n, key, attempt)
        attempt += 1
        if number not in seen:
            seen.add(number)
            yield number
