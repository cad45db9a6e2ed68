"""Tests derived from the examples in a prompt.

    derive_tests("Write a function fib(n) with fib(10) = 55.")                  # ["assert fib(10) == 55"]
    derive_tests("Write a function.\\n>>> double(2)\\n4")                         # ["assert double(2) == 4"]
    derive_tests("Write a program that reads n.\\nInput: 3\\nOutput: 6")          # [{"input": "3\\n", ...}]

An example is the call of one function with literal arguments, one of = == -> => → returns, is, should be, and a literal
value. What may be something else is left out: a test that the user did not mean fails right answers, and one that does
not call the answer's own code passes wrong ones. So there is no test of a builtin function; of a sentence with a
doubt in it ("not", "if", "instead"); of a definition by recursion; of a decimal fraction in prose, which may be
rounded; of None, which a function that does nothing returns; or of a call that has two values. Prompts about an error
have examples of wrong values, so in these only "should return" and the like count. A prompt gives no test if it asks
for another language than Python, or if it has several right answers ("in any order").

Only the text of the user's prompt is read here, by `ast`, a line at a time; nothing is executed. `python -m pytest
tests/test_derived_tests.py` exercises it.
"""

from __future__ import annotations

import ast
import builtins
import doctest
import keyword
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from rlvr.reward.code.formats import Test

MAX_PROMPT, MAX_LINE, MAX_TESTS = 100_000, 1_000, 50  # characters, characters, tests

_VERB = r"(?:write|implement|create|complete|develop|build|code|program|add|make|fix|debug|refactor|provide|generate)"
_ASKS = re.compile(
    rf"\b{_VERB}\b[^.?!\n]{{0,80}}\b(?:function|method|program|script|code|algorithm)\b"
    r"|\bpython\b|^\s*(?:def\s+\w+\s*\(|>>>|assert\s)",
    re.I | re.M,
)
_NAMED = re.compile(  # how a prompt names the function that it asks for
    rf"\bdef\s+(\w+)\s*\(|\b(?:function|method|{_VERB})\s+[`'\"]?(\w+)\((?=\)|[a-z_*])"
    r"|\b(?:function|method)\s+(?:(?:called|named)\s+)?[`'\"](\w+)[`'\"]"
    r"|\b(?:function|method)\s+(?:called|named)\s+(?!once\b|twice\b|by\b|when\b)(\w+)"
    r"(?=[(,.:;\n]|\s+(?:that|which|to)\b|\Z)",
    re.I,
)
_CALL = re.compile(r"(?<![\w.)\]])([a-z_]\w*)\(", re.ASCII)
_EXPECTS = r"(?:should|must|has to|is expected to)\s+(?:return|give|yield|equal|be|produce|evaluate\s+to)"
_ARROWS = r"->|=>|→|⇒|(?:returns|gives|yields|equals)\b"
_EQUALS = re.compile(rf"`?\s*(?:(==?(?![=>])|is\b)|({_EXPECTS})\b|(?:{_ARROWS}))\s*`?", re.I)
_AFTER = re.compile(r"`?\)?(?:\s*$|[.;](?:\s|$)|,\s+(?![\d'\"\[({+-])|\s+and\s+(?:that\s+)?`?\w+\(|\s+#)")
_BULLET = re.compile(r"\s*(?:[-*•>#]+|//|\d+[.)])?\s*(?:assert\s+)?[`(]?")
_DOUBT = re.compile(
    r"\b(?:not|never|no|wrong(?:ly)?|incorrect(?:ly)?|instead|currently|actual(?:ly)?|but|however|although|unless|if|"
    r"suppose|assume|assuming|when|whenever|while|until|except|fails?|error|approximately|approx|about|roughly|around|"
    r"nearly|almost|modulo|mod|cannot|without|rather|unlike|previously|was|were|why|what|which|hypothetical(?:ly)?)\b"
    r"|n['’]t\b|[?≈]",
    re.I,
)
_DEFINES = re.compile(
    r"\b(?:let|define[sd]?|base|recurrence|recursion|recursive(?:ly)?|initial(?:ly)?|given|using|use|denote)\b", re.I
)
_DEBUGS = re.compile(
    r"\b(?:bug|bugs|buggy|broken|debug|fix|wrong(?:ly)?|incorrect(?:ly)?|fails?|traceback|"
    r"(?:does|do)(?: not|n['’]t) work|actual output)\b",
    re.I,
)
_EXAMPLE = re.compile(r"\b(?:examples?\b|e\.g\.|for instance\b|such as\b|so that\b|tests?\b)", re.I)
_OTHER_LANGUAGE = re.compile(
    r"\b(?:java|javascript|typescript|node\.js|rust|golang|kotlin|swift|haskell|php|perl|ruby|scala|sql|bash|julia|lua|"
    r"matlab|fortran|ocaml|clojure|elixir|erlang|dart|zig|cobol|lisp|scheme)\b|\b(?:c\+\+|c#)(?!\w)"
    r"|\b(?:in|using) (?-i:C|Go|R)\b",
    re.I,
)
_MANY_ANSWERS = re.compile(
    r"\bany (?:valid |possible |such )?(?:order|answer|solution|permutation|one|result)\b|\brandom(?:ly)?\b", re.I
)
_STDIN = re.compile(r"\b(?:program|script)\b[^.?!\n]{0,80}\b(?:reads?|takes?|stdin|standard input)\b", re.I)
_INPUT_OUTPUT = re.compile(r"\binput\b.*\boutput\s*:", re.I)  # on one line
_HEAD = re.compile(r"[\s>*#-]*(?:(?:sample|example|expected)\s+)?(\w+)(?:\s*\d+)?\s*:(?!\w)[\s*]*(.*)", re.I)


# `assert` or "should return"; an arrow, a doctest, `Output:`; `f(2) = 3`; the same after "let" and the like
Form = Literal["expected", "clear", "equation", "definition"]


@dataclass(frozen=True)
class _Example:
    """A call and its value, as Python, and how the prompt puts them."""

    name: str
    call: str
    value: str
    form: Form


def derive_tests(prompt: str) -> list[Test]:
    """The tests that follow from the examples in a prompt: assert statements, or {"input", "output"} of a program."""
    if len(prompt) > MAX_PROMPT:
        return []
    named = {next(filter(None, match.groups())) for match in _NAMED.finditer(prompt)}
    asked = {name for name in named if _is_own(name)}
    if (not asked and not _ASKS.search(prompt)) or _MANY_ANSWERS.search(prompt):
        return []
    if _OTHER_LANGUAGE.search(prompt) and not re.search(r"\bpython\b", prompt, re.I):
        return []
    is_debugging = bool(_DEBUGS.search(prompt))
    examples = [*_doctests(prompt)]
    lines = [e for line in prompt.splitlines() for e in _line_examples(line)]
    examples += [e for e in lines if e.form == "expected" or not is_debugging]
    if not is_debugging and len(asked) == 1:
        examples += _call_pairs(prompt, next(iter(asked)))
    if asked:
        examples = [e for e in examples if e.name in asked]
    elif examples:
        defined = _defined_names(prompt)
        examples = [e for e in examples if e.name not in defined and _may_be_meant(e, prompt)]
        if len({e.name for e in examples}) > 1:
            return []
    values: dict[str, str] = {}
    for e in examples:
        if values.setdefault(e.call, e.value) != e.value:
            return []  # one of the two is no example
    tests: list[Test] = [f"assert {call} == {value}" for call, value in values.items()]
    if not tests and not is_debugging and not asked and _STDIN.search(prompt):
        tests += [{"input": f"{given}\n", "output": wanted} for given, wanted in _pairs(prompt)]
    return tests[:MAX_TESTS]


def _is_own(name: str) -> bool:
    """Whether an answer can define it: Python has no function of that name, and it is no word of the language."""
    return name.isidentifier() and not keyword.iskeyword(name) and name not in vars(builtins)


def _may_be_meant(e: _Example, prompt: str) -> bool:
    """Whether an example may be of the function that is asked for, although the prompt does not name that. An equation
    is if the prompt speaks of examples, or if the name is a letter or begins like a word of the prompt."""
    if hasattr(math, e.name) or e.form == "definition":
        return False
    words = re.findall(r"\b[a-z]{3,}\b(?!\()", prompt.lower())
    begins = [part[:3] for part in e.name.split("_") if len(part) > 2]
    is_like = len(e.name) == 1 or any(word.startswith(begin) for word in words for begin in begins)
    return e.form != "equation" or is_like or _EXAMPLE.search(prompt) is not None


def _defined_names(prompt: str) -> set[str]:
    """The functions of equations with variables, such as f in f(n) = f(n - 1) + f(n - 2)."""
    names: set[str] = set()
    for line in prompt.splitlines():
        for match in _CALL.finditer(line) if len(line) <= MAX_LINE else ():
            end = _end_of_literal(line, match.end() - 1)
            tree = _parse(line[match.end() - 1 : end]) if re.match(r"\s*=", line[end:]) else None
            if tree is not None and any(isinstance(node, ast.Name) for node in ast.walk(tree)):
                names.add(match[1])
    return names


def _doctests(prompt: str) -> list[_Example]:
    """Doctests of one call each; none if a statement among them may change what a later one gives."""
    try:
        steps = doctest.DocTestParser().get_examples(prompt)
    except ValueError:
        return []
    examples: list[_Example] = []
    for step in steps:
        tree, wanted = _parse(step.source), re.split(r"^\s*(?:\"\"\"|''')", step.want, maxsplit=1, flags=re.M)[0]
        if tree is None or not wanted.strip():
            return []
        if example := _example(tree, wanted, "clear", floats=True):
            examples.append(example)
    return examples


def _line_examples(line: str) -> Iterator[_Example]:
    """The examples in a line of prose or code."""
    if len(line) > MAX_LINE or ">>>" in line:
        return
    for match in _CALL.finditer(line):
        end = _end_of_literal(line, match.end() - 1)
        equals = _EQUALS.match(line, end)
        if not equals or not _may_begin(line[: match.start()]):
            continue
        stop = _end_of_literal(line, equals.end())
        after = _AFTER.match(line, stop)
        tree = _parse(line[match.start() : end])
        if tree is None or after is None:
            continue
        clause = _clause(line, match.start(), stop)
        if _DOUBT.search(clause):
            continue
        if equals[2] or re.search(r"\bassert\s*$", line[: match.start()]):
            form = "expected"
        elif equals[1]:
            form = "definition" if _DEFINES.search(clause) else "equation"
        else:
            form = "clear"
        if example := _example(tree, line[equals.end() : stop], form):
            yield example


def _may_begin(before: str) -> bool:
    """Whether an example may begin after this text: not within a larger expression, nor after a number."""
    if _BULLET.fullmatch(before):
        return True
    words = before.rstrip(" \t")
    if words == before and not re.search(r"\s[(`]$", before):
        return False
    words = words.rstrip("(`").rstrip()
    return bool(words) and (words[-1].isalpha() or words[-1] in ".,:;") and not re.search(r"\b(?:def|class)$", words)


def _clause(line: str, start: int, stop: int) -> str:
    """The sentence around an example, without the example, and the next one if it speaks of it."""
    before = re.split(r"[.!?;]\s", line[:start])[-1]
    after = re.match(r"(?:[^.!?;]|[.!?;](?!\s|$))*[.!?;]?", line[stop:])
    rest = line[stop + (after.end() if after else 0) :]
    about = re.match(r"\s*(?:this|that|these|those|it|which|here|both)\b[^.!?]*.?", rest, re.I)
    return f"{before} | {after[0] if after else ''} {about[0] if about else ''}"


def _end_of_literal(line: str, start: int) -> int:
    """Where a literal, or the arguments of a call, end: at the first blank or mark that is in no bracket or quote."""
    depth, quote, place = 0, "", start
    while place < len(line):
        c = line[place]
        if quote:
            place += c == "\\"
            quote = "" if c == quote else quote
        elif c in "'\"":
            quote = c
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            if not depth:
                return place
            depth -= 1
            if not depth:
                return place + 1
        elif not depth and (c in " \t,;`" or (c == "." and not line[place + 1 : place + 2].isdigit())):
            return place
        place += 1
        if c in "'\"" and not quote and not depth:
            return place
    return len(line)


def _call_pairs(prompt: str, name: str) -> Iterator[_Example]:
    """`Input: ... Output: ...` as calls of the function: the input is one literal, `a = 1, b = 2`, or the call."""
    for given, wanted in _pairs(prompt):
        tree = _parse(given)
        call = tree
        if tree is None or not isinstance(tree, (ast.Call, ast.Tuple)):
            call = _parse(f"{name}({given})")
        if not isinstance(call, ast.Call):
            continue
        if tree is None and not call.args:  # `nums = [1, 2], target = 3`: by position, the answer may rename them
            call = ast.Call(call.func, [word.value for word in call.keywords], [])
        if example := _example(call, wanted, "clear"):
            yield example


def _pairs(prompt: str) -> Iterator[tuple[str, str]]:
    """The texts of `Input: ...` and the `Output: ...` that follows, on one line or as blocks of lines."""
    blocks: list[tuple[str, list[str]]] = [("", [])]
    for line in prompt.splitlines():
        if len(line) <= MAX_LINE and _INPUT_OUTPUT.search(line):
            lines = re.sub(r"[\s,;>→*`-]*\b(output\s*:)", r"\n\1", line, count=1, flags=re.I).split("\n")
        else:
            lines = [line]
        for part in lines:
            head = _HEAD.fullmatch(part) if len(part) <= MAX_LINE else None
            if head:
                blocks.append((head[1].lower(), [head[2].strip().strip("`")]))
            elif part.strip() or not any(blocks[-1][1]):
                blocks[-1][1].extend([] if part.strip().startswith("```") else [part])
            else:  # a blank line ends a block
                blocks.append(("", []))
    texts = [(head, "\n".join(lines).strip()) for head, lines in blocks]
    for (first, given), (second, wanted) in pairwise(text for text in texts if any(text)):
        if (first, second) == ("input", "output") and given and wanted:
            yield given, wanted


def _example(tree: ast.expr, value: str, form: Form, *, floats: bool = False) -> _Example | None:
    """An example if the call has a function of the answer's own, literal arguments and a literal value."""
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name) or not _is_own(tree.func.id):
        return None
    given = [*tree.args, *(word.value for word in tree.keywords)]
    wanted = _parse(value)
    if wanted is None or not all(map(_is_literal, [*given, wanted])) or any(word.arg is None for word in tree.keywords):
        return None
    constants = [node.value for node in ast.walk(wanted) if isinstance(node, ast.Constant)]
    if constants == [None] or (not floats and any(isinstance(one, (float, complex)) for one in constants)):
        return None
    return _Example(tree.func.id, ast.unparse(tree), ast.unparse(wanted), form)


def _parse(text: str) -> ast.expr | None:
    try:
        return ast.parse(text.strip(), mode="eval").body if len(text) <= MAX_LINE else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _is_literal(node: ast.expr) -> bool:
    try:
        return ast.literal_eval(node) is not ...
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return False
