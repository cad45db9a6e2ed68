"""Programming problems in the formats of data sets, recognised by their fields, as one record: `CodeProblem`.

    MBPP              text or prompt, test_list; code, test_setup_code, test_imports       (both published files)
    HumanEval         prompt, entry_point, test; canonical_solution
    APPS              question, input_output {"inputs", "outputs", "fn_name"?}; starter_code, solutions
    our own           tests; statement, setup, imports, entry_point, prefix, solution      (what `row` gives)

Left out on purpose: tests that need files or a framework.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rlvr.sandbox.answer_names import defined_names
from rlvr.sandbox.verification_job import SURROGATE

Test = str | dict[str, str]
FORMATS = (
    "MBPP's (test_list), HumanEval's (test, entry_point), APPS' (input_output) or our own (tests: a list of assert "
    'statements, or of {"input", "output"})'
)
_EACH_TEST = 'an assert statement as text, or {"input": text, "output": text}'
_CALL = re.compile(r"\b([^\W\d]\w*)\s*\(")
_CHECK = re.compile(r"^def[ \t]+check\b", re.MULTILINE)
_WORDS = frozenset(("assert", "not", "in", "and", "or", "is", "if", "else", "lambda", "for", "candidate"))
_BUILTINS = frozenset(dir(builtins))


@dataclass(frozen=True)
class CodeProblem:
    """A programming problem: `tests` are assert statements, one `check(candidate)` function, or `{"input", "output"}`
    of a program.

    `imports` run before the answer and `setup` after it, where it may use the answer's classes. An answer may go on
    from `prefix` (HumanEval's prompt) instead of being a program of its own. `solution` is a reference. `answer_names`
    are names that answers define besides those of the reference.
    """

    tests: list[Test]
    statement: str = ""
    setup: str = ""
    imports: list[str] = field(default_factory=list[str])
    entry_point: str | None = None
    prefix: str = ""
    solution: str = ""
    answer_names: list[str] = field(default_factory=list[str])

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> CodeProblem:
        """The problem in a row of any of the formats; ValueError says what is wrong with it."""
        if "tests" in row:
            problem = _own(row)
        elif "test_list" in row:
            problem = _mbpp(row)
        elif "test" in row and "entry_point" in row:
            problem = _humaneval(row)
        elif "input_output" in row:
            problem = _apps(row)
        else:
            raise ValueError(f"a row with the fields {', '.join(map(str, row)) or 'none'}; expected {FORMATS}")
        if not problem.tests:
            raise ValueError("the problem has no tests; expected at least one")
        if not all(test.strip() for test in problem.tests if isinstance(test, str)):
            raise ValueError("the problem has an empty test, which every answer would pass; leave it out")
        if any(SURROGATE.search(text) for test in problem.tests if isinstance(test, dict) for text in test.values()):
            raise ValueError("a test holds a lone surrogate, which UTF-8 cannot encode; remove it")
        if problem.entry_point is not None and not problem.entry_point.isidentifier():
            raise ValueError(f"entry_point={problem.entry_point!r:.80}, expected the name of a function")
        return problem

    def row(self) -> dict[str, Any]:
        """As a row of our own format, without empty fields: a task's meta."""
        return {key: value for key, value in asdict(self).items() if value}

    @property
    def is_program(self) -> bool:
        """Whether the answer is a program that reads standard input."""
        return isinstance(self.tests[0], dict)

    @property
    def names(self) -> set[str]:
        """The names of the answer that the tests call, as far as their text shows."""
        if self.entry_point:
            return {self.entry_point}
        texts = [test for test in self.tests if isinstance(test, str)]
        called = {name for text in texts for name in _CALL.findall(text)} - _WORDS
        return called - _BUILTINS or called  # `assert sum(10, 15) == 25` is MBPP's, too

    @property
    def defined_names(self) -> set[str]:
        """The names that answers define: `answer_names` and those of the reference; empty if neither says so."""
        return {*self.answer_names, *(defined_names(self.solution) if self.solution else ())}

    def visible_tests(self, count: int | None) -> list[Test]:
        """The first `count` tests (None: all) that may be shown; a `check` function never is."""
        return [test for test in self.tests if not (isinstance(test, str) and _CHECK.search(test))][:count]


def _own(row: Mapping[str, Any]) -> CodeProblem:
    given = row["tests"]
    tests: Any = [given] if isinstance(given, str) else given
    if not isinstance(tests, Sequence) or isinstance(tests, bytes):
        raise ValueError(f"tests={given!r:.60} is of type {type(given).__name__}; expected a list, each {_EACH_TEST}")
    for i, test in enumerate(tests):
        if not isinstance(test, (str, Mapping)):
            raise ValueError(f"tests[{i}]={test!r:.60} is of type {type(test).__name__}; expected {_EACH_TEST}")
    stdio = [isinstance(test, Mapping) for test in tests]
    if any(stdio):
        if not all(stdio) or not all(isinstance(t.get(k), str) for t in tests for k in ("input", "output")):
            raise ValueError('tests: expected {"input": text, "output": text} throughout, or assert statements alone')
        tests = [{"input": test["input"], "output": test["output"]} for test in tests]
    return CodeProblem(
        list(tests),
        _text(row, "statement"),
        _text(row, "setup"),
        _texts(row, "imports"),
        _text(row, "entry_point") or None,
        _text(row, "prefix"),
        _text(row, "solution"),
        _texts(row, "answer_names"),
    )


def _mbpp(row: Mapping[str, Any]) -> CodeProblem:
    return CodeProblem(
        list(_texts(row, "test_list")),
        _text(row, "text") or (_text(row, "prompt") if isinstance(row.get("prompt"), str) else ""),
        _lines(_text(row, "test_setup_code")),
        _texts(row, "test_imports"),
        solution=_lines(_text(row, "code")),
    )


def _humaneval(row: Mapping[str, Any]) -> CodeProblem:
    name, prompt = _text(row, "entry_point"), row.get("prompt")
    prefix = prompt if isinstance(prompt, str) else ""  # chat messages, where another trainer's column has that name
    if not name:
        raise ValueError("entry_point is empty, expected the name of the function that the tests call")
    test = _text(row, "test")
    solution = prefix + _text(row, "canonical_solution")
    return CodeProblem([test] if test else [], prefix, _helpers(prefix, name), [], name, prefix, solution)


def _helpers(prompt: str, entry_point: str) -> str:
    """What a prompt defines besides the function it asks for; the tests use these, not those of an answer."""
    try:
        body = ast.parse(prompt).body
    except (SyntaxError, ValueError, RecursionError):
        return ""
    helpers = [node for node in body if isinstance(node, (ast.FunctionDef, ast.Assign)) and not _is_stub(node)]
    helpers = [node for node in helpers if not (isinstance(node, ast.FunctionDef) and node.name == entry_point)]
    imports = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
    return "\n".join(map(ast.unparse, [*imports, *helpers])) if helpers else ""


def _is_stub(node: ast.stmt) -> bool:
    """Whether it is a function of a docstring, `...` or `pass` alone, which the answer must write."""
    return isinstance(node, ast.FunctionDef) and all(
        isinstance(line, ast.Pass) or (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
        for line in node.body
    )


def _apps(row: Mapping[str, Any]) -> CodeProblem:
    given = _parse_json(row["input_output"], "input_output")
    if not isinstance(given, Mapping):
        raise ValueError(f"input_output: a {type(given).__name__}, expected an object with inputs and outputs")
    inputs, outputs, name = given.get("inputs"), given.get("outputs"), given.get("fn_name")
    if not (isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs)):
        raise ValueError("input_output: inputs and outputs have to be lists of one length")
    starter = _text(row, "starter_code")
    question = _text(row, "question") + (f"\n\n{starter}" if starter else "")
    solutions = _parse_json(row.get("solutions") or [], "solutions")
    solution = solutions[0] if isinstance(solutions, list) and solutions and isinstance(solutions[0], str) else ""
    if not name:
        tests: list[Test] = [{"input": _stream(i), "output": _stream(o)} for i, o in zip(inputs, outputs, strict=True)]
    elif not str(name).isidentifier():
        raise ValueError(f"input_output: fn_name={name!r:.80}, expected the name of a function")
    else:
        call = f"Solution().{name}" if "class Solution" in starter else str(name)
        tests = [_call_test(call, i, o) for i, o in zip(inputs, outputs, strict=True)]
    return CodeProblem(tests, question, solution=_lines(solution))


def _call_test(call: str, arguments: Any, expected: Any) -> str:
    """APPS wraps some results in a list of one, and its JSON has no tuples: accept either, as its own checker does."""
    if not isinstance(arguments, list):
        raise ValueError("input_output: with fn_name each of inputs has to be the list of a call's arguments")
    expression = f"{call}({', '.join(map(repr, arguments))})"
    if not isinstance(expected, list):
        return f"assert {expression} == {expected!r}"
    accepted = [expected, tuple(expected)]
    if any(isinstance(part, list) for part in expected):
        accepted.append([tuple(part) if isinstance(part, list) else part for part in expected])
    return f"assert {expression} in ({', '.join(map(repr, [*accepted, *(expected if len(expected) == 1 else [])]))})"


def _stream(given: Any) -> str:
    """A program's input or output: text, or a list of its lines."""
    return "\n".join(map(str, given)) if isinstance(given, list) else str(given)


def _parse_json(given: Any, name: str) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given) if given.strip() else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: not JSON ({str(error)[:80]})") from None


def _lines(code: str) -> str:
    """The published MBPP file ends its lines as Windows does; a demonstration should not."""
    return code.replace("\r\n", "\n")


def _text(row: Mapping[str, Any], name: str) -> str:
    given = row.get(name)
    if given is None:
        return ""
    if not isinstance(given, str):
        raise ValueError(f"{name}={given!r:.60} is of type {type(given).__name__}; expected text")
    return given


def _texts(row: Mapping[str, Any], name: str) -> list[str]:
    given = row.get(name)
    if given is None:
        return []
    given = [given] if isinstance(given, str) else given
    if not isinstance(given, Sequence) or not all(isinstance(text, str) for text in given):
        raise ValueError(f"{name}={given!r:.80}: expected a list of texts")
    return list(given)
