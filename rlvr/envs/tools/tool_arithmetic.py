"""Environment `tool_arithmetic`: arithmetic modulo p from the left, with a tool for one operation or without it.

    <boe> 57 * 83 + 12
    <call> calculate 57 * 83 </call> <eoe> <result> 75 </result> <call> calculate 75 + 12 </call> <eoe> ... = 87
    = 75 + 12 = 87                                                                              (without the tool)

A small transformer can learn to call a tool, and hardly a table of 97 x 97 products: the environment shows what tools
are good for, from random weights on a laptop.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlvr.chat.tool_calls import WordCallFormat
from rlvr.core import rng
from rlvr.core.protocols import Env, TaskSource
from rlvr.core.types import Task
from rlvr.envs.prompt import PromptEnv
from rlvr.envs.registry import register_environment
from rlvr.envs.row_source import take_in_turn
from rlvr.envs.tools.tool import Tool, Toolbox
from rlvr.envs.tools.tool_env import ToolBudget, ToolEnv

OPERATORS = ("+", "-", "*")
FORMAT = WordCallFormat(failure="<error>")
HELDOUT_FRACTION = 0.15


@register_environment("tool_arithmetic")
class ToolArithmetic(TaskSource):
    """Problems of `operations` ([fewest, most]) operations modulo `p`; `with_tool` gives the policy `calculate`.

    A demonstration goes wrong at each operation with probability `flaw`: with the tool its operator is another one,
    without it its result.
    """

    reward = "correct"
    end_word: str = "<eoe>"
    pad_word: str = "<pad>"

    def __init__(
        self, p: int = 97, operations: tuple[int, int] = (1, 3), with_tool: bool = True, flaw: float = 0.25
    ) -> None:
        low, high = operations
        if not (type(p) is int and 2 <= p <= 1_000 and 1 <= low <= high <= 8 and 0 <= flaw <= 1):
            raise ValueError(
                f"tool_arithmetic: p={p!r}, operations={operations!r}, flaw={flaw!r}; expected 2 <= p <= 1000, "
                "1 <= fewest <= most <= 8, 0 <= flaw <= 1"
            )
        self.p, self.with_tool, self.flaw = p, with_tool, flaw
        self.levels = tuple(str(count) for count in range(low, high + 1))
        self.max_turns = high + 2 if with_tool else 1  # one call too many is not the end
        more = [*FORMAT.words, "calculate"] if with_tool else []
        self.vocabulary = [*map(str, range(p)), *OPERATORS, "=", "<boe>", *more, self.end_word, self.pad_word]
        self._toolbox = Toolbox([Tool.of(self.calculate)])

    def calculate(self, a: int, operator: str, b: int) -> int:
        """One operation, + - or *, modulo p."""
        if operator not in OPERATORS:
            raise ValueError(f"operator {operator!r}, expected one of {' '.join(OPERATORS)}")
        return (a + b if operator == "+" else a - b if operator == "-" else a * b) % self.p

    def train(self, seed: int, index: int, level: str) -> Task:
        key, attempt = rng.key("tool-arithmetic-train", seed, level, index), 0
        while _is_heldout(expression := self._draw(rng.key(key, attempt), int(level))):
            attempt += 1
        return self._task(expression, level)

    def heldout(self, count: int | None) -> list[Task]:
        return take_in_turn([self._walk(level) for level in self.levels], 400 if count is None else count)

    def env(self, task: Task, tokenizer: Any) -> Env:
        if not self.with_tool:
            return PromptEnv(task, tokenizer)
        return ToolEnv(task, tokenizer, self._toolbox, FORMAT, ToolBudget(self.max_turns))

    def describe_task(self, task: Task) -> dict[str, str]:
        return {"operators": " ".join(sorted(set(task.meta["expression"].split()) & set(OPERATORS)))}

    def demonstration(self, task: Task, key: int) -> str | list[str]:
        """An episode as a teacher that errs plays it; with the tool, calls and results by turns."""
        words, parts = task.meta["expression"].split(), list[str]()
        value = int(words[0])
        for place in range(1, len(words), 2):
            operator, right = words[place], int(words[place + 1])
            draw = rng.key("tool-arithmetic-flaw", key, task.id, place)
            is_wrong = rng.uniform(draw) < self.flaw
            if self.with_tool:
                if is_wrong:
                    operator = OPERATORS[(OPERATORS.index(operator) + 1 + rng.integer(2, draw, 1)) % 3]
                parts.append(f"{FORMAT.begin} calculate {value} {operator} {right} {FORMAT.end}")
                value = self.calculate(value, operator, right)
                parts.append(FORMAT.write_results([str(value)]).strip())
            else:
                value = self.calculate(value, operator, right)
                if is_wrong:
                    value = (value + 1 + rng.integer(self.p - 1, draw, 1)) % self.p
                parts += ["=", str(value), *words[place + 2 :]]
        return [*parts, f"= {value}"] if self.with_tool else " ".join(parts)

    def _draw(self, key: int, operations: int) -> str:
        numbers = [str(rng.integer(self.p, key, 2 * place)) for place in range(operations + 1)]
        operators = [OPERATORS[rng.integer(len(OPERATORS), key, 2 * place + 1)] for place in range(operations)]
        return " ".join([numbers[0], *(f"{o} {n}" for o, n in zip(operators, numbers[1:], strict=True))])

    def _task(self, expression: str, level: str) -> Task:
        words = expression.split()
        value = int(words[0])
        for place in range(1, len(words), 2):
            value = self.calculate(value, words[place], int(words[place + 1]))
        meta = {"answer": str(value), "modulus": self.p, "expression": expression}
        return Task(expression, f"<boe> {expression}", meta, level)

    def _walk(self, level: str) -> Iterator[Task]:
        seen: set[str] = set()
        for number in range(1_000_000):
            expression = self._draw(rng.key("tool-arithmetic-heldout", level, number), int(level))
            if _is_heldout(expression) and expression not in seen:
                seen.add(expression)
                yield self._task(expression, level)


def _is_heldout(expression: str) -> bool:
    return rng.uniform(rng.key("tool-arithmetic-side", expression)) < HELDOUT_FRACTION
