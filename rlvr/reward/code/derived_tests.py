"""Tests derived from the examples in a prompt.

    derive_tests("Write a function fib(n) with fib(10) = 55.")                  # ["assert fib(10) == 55"]
    derive_tests("Write a function.\\n>>> double(2)\\n4")                         # ["assert double(2) == 4"]
    derive_tests("Write a program that reads n.\\nInput: 3\\nOutput: 6")          # [{"input": "3\\n", ...}]

An example is the call of the function asked for with literal arguments, one of = == -> => → returns, is, should be, and
a literal value. What may be something else is left out: a test that the user did not mean fails right answers, and one
that does not call the answer's own code passes wrong ones. In running text an example stands alone, or its sentence
asks for the function or speaks of examples; no sentence with a doubt counts. Lines under a heading count if the heading
speaks of examples or names the function. `Input:` and `Output:` count if both are data, or samples. There is no test of
a builtin function, of a function that the prompt defines or offers for use, of a decimal fraction in prose (it may be
rounded), of None (a function that does nothing returns it), or of a call that has two values. Prompts about an error
have examples of wrong values, so in these only "should return" and the like count. A long prompt, one for another
language than Python, and one with several right answers ("in any order") give no test.

Only the text of the user's prompt is read here, by `ast`, a line at a time; nothing is executed. The time is linear in
the text.
"""

from __future__ import annotations

import ast
import builtins
import doctest
import keyword
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from rlvr.reward.code.formats import Test
from rlvr.reward.code.prompt_sections import (
    DOUBT,
    EXAMPLE,
    MAX_LINE,
    WRONG,
    Paragraph,
    find_pairs,
    is_literal,
    parse_expression,
    split_paragraphs,
)

MAX_PROMPT, MAX_LINES = 10_000, 1_000  # a longer prompt gives no test
MAX_CALLS, MAX_TESTS = 20, 50  # a line with more calls has no example

_VERB = r"(?:write|implement|create|define|complete|develop|build|make|provide|add|fix|debug|refactor|generate)"
_ASKS = re.compile(
    rf"\b(?:{_VERB}|code|program)\b[^.?!\n]{{0,80}}\b(?:function|program|script|code|algorithm)\b"
    r"|\bpython\b|^[ \t]*(?:def[ \t]+\w+\(|>>>|assert[ \t])",
    re.I | re.M,
)
_NAMED = re.compile(  # how a prompt names the function that it asks for; a bare name must be called somewhere
    rf"\b{_VERB}[ ]+[`'\"]?(\w+)\((?=\)|[a-z_*])"
    rf"|\b{_VERB}\b[^.?!:\n(]{{0,60}}?\bfunction\s{{1,3}}(?:(?:called|named)\s{{1,3}})?"
    r"(?:[`'\"](\w+)|(\w+)\((?=\)|[a-z_*]))"
    rf"|\b{_VERB}\b[^.?!:\n(]{{0,60}}?\bfunction[ ](?:called|named)[ ](?!once\b|twice\b|by\b|when\b)(\w+)"
    r"(?=[(,.:;\n]|[ ](?:that|which|to|with)\b|\Z)"
    rf"|\b{_VERB}\b[^.?!:\n(]{{0,60}}?\bfunction[ ](\w+)",
    re.I,
)
_DEF = re.compile(r"\bdef[ \t]{1,4}(\w+)[ \t]*\(")
_HAS_BODY = re.compile(r"(?:^[ \t]+|:[ \t]*)(?:return|raise)\b", re.M)
_OFFERED = re.compile(
    r"\b(?:use|uses|using|calls?|calling|helpers?|provided|available|existing)\b[^.\n(]{0,40}?\b(\w+)`?\("
    r"|\b(\w+)[ ]?=[ ]?lambda\b",
    re.I,
)
_RECURRENCE = re.compile(
    r"\b(\w+)\([ ]?(?!True|False|None)[a-z]\w{0,20}(?:[ ]?[-+*/,][ ]?\w{1,20}){0,4}[ ]?\)[ ]?=(?!=)", re.I
)
_CALL = re.compile(r"(?<![\w.)\]])([a-z_]\w*)\(", re.ASCII)
_EXPECTS = r"(?:should|must|has to|is expected to)\s+(?:return|give|equal|be|produce|evaluate\s+to)"
_EQUALS = re.compile(rf"`?\s*(?:(==?(?![=>])|is\b)|({_EXPECTS})\b|(?:->|=>|→|⇒|(?:returns|gives|equals)\b))\s*`?", re.I)
_AFTER = re.compile(r"`?\)?(?:\s*$|[.;](?:\s|$)|,\s+(?![\d'\"\[({+-])|\s+and\s+(?:that\s+)?`?\w+\(|\s+#)")
_BULLET = re.compile(r"\s*(?:[-*•>#]+|//|\d+[.)])?\s*(?:assert\s+)?[`(]?")
_DEFINES = re.compile(
    r"\b(?:let|define[sd]?|base|recurrence|recursion|recursive(?:ly)?|initial(?:ly)?|given|using|use|denote|where)\b",
    re.I,
)
_DEBUGS = re.compile(
    r"\b(?:bugs?|buggy|broken|debug|fix|wrong(?:ly)?|incorrect(?:ly)?|fails?|traceback|"
    r"(?:does|do)(?: not|n['’]t) work|actual output)\b",
    re.I,
)
_REQUEST = re.compile(rf"\W*(?:(?:please|can|could|you|i|want|to)\s+){{0,4}}{_VERB}\b", re.I)
_OUT_OF_SCOPE = re.compile(
    r"\b(?:java|javascript|typescript|js|ts|node|rust|golang|kotlin|swift|haskell|php|perl|ruby|scala|sql|bash|shell|julia|"
    r"lua|matlab|fortran|ocaml|clojure|elixir|erlang|dart|zig|cobol|lisp|scheme|vb|visual basic|pascal|delphi|prolog|"
    r"powershell|assembly|(?-i:C|Go|R|D))\b|\b(?:[cf]#|c\+\+)"
    r"|\b(?:explain|describe|inver(?:ts?|se)|in[- ]place|generators?|yields?|async|class(?:es)?|methods?)\b"
    r"|\bany (?:valid |possible |such )?(?:order|answer|solution|permutation|one|result)\b|\brandom(?:ly)?\b",
    re.I,
)
_PRINTS = re.compile(r"\bprint(?:s|ed|ing)?\b", re.I)
_STDIN = re.compile(r"\b(?:program|script)\b[^.?!\n]{0,80}\b(?:reads?|takes?|stdin|standard input)\b", re.I)


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
    if len(prompt) > MAX_PROMPT or prompt.count("\n") > MAX_LINES or _OUT_OF_SCOPE.search(prompt):
        return []
    is_debugging = bool(_DEBUGS.search(prompt))
    called = {name for name in _CALL.findall(prompt) if _is_own(name)}
    asked, offered = _asked_names(prompt, called, is_debugging)
    if len(asked) > 1 or (not asked and not _ASKS.search(prompt)):
        return []
    paragraphs = list(split_paragraphs(prompt))
    if not asked and not is_debugging and _STDIN.search(prompt) and not called:
        pairs = list(find_pairs(paragraphs, asked))[:MAX_TESTS]
        return list[Test]({"input": f"{given}\n", "output": wanted} for given, wanted in pairs)
    if _PRINTS.search(prompt):
        return []
    governed = [part for part in paragraphs if part.heading is None or part.has_examples(asked)]
    examples = _doctests(governed)
    lines = [e for part in governed for e in _paragraph_examples(part, part.has_examples(asked))]
    examples += [e for e in lines if e.form == "expected" or not is_debugging]
    if not is_debugging and asked:
        examples += _call_pairs(paragraphs, next(iter(asked)))
    if asked:
        examples = [e for e in examples if e.name in asked]
    elif len({name for name in called if not hasattr(math, name)}) > 1:
        return []  # which of them is asked for?
    else:
        unmeant = {*offered, *vars(math), *(match[1] for match in _RECURRENCE.finditer(prompt))}
        examples = [e for e in examples if e.name not in unmeant and e.form != "definition"]
    values: dict[str, str] = {}
    for e in examples:
        if values.setdefault(e.call, e.value) != e.value:
            return []  # one of the two is no example
    tests: list[Test] = [f"assert {call} == {value}" for call, value in values.items()]
    return tests[:MAX_TESTS]


def _is_own(name: str) -> bool:
    """Whether an answer can define it: Python has no function of that name, and it is no word of the language."""
    return name.isidentifier() and not keyword.iskeyword(name) and name not in vars(builtins)


def _asked_names(prompt: str, called: set[str], is_debugging: bool) -> tuple[set[str], set[str]]:
    """The functions that a prompt asks for, and the ones that it defines or offers for use."""
    offered = {match[1] or match[2] for match in _OFFERED.finditer(prompt)}
    pieces = _DEF.split(prompt)  # text, name, text, name, text
    stubs: set[str] = set()
    for name, text in zip(pieces[1::2], pieces[2::2], strict=True):
        (offered if _HAS_BODY.search(text) and not is_debugging else stubs).add(name)
    named = {
        match[match.lastindex or 0] for match in _NAMED.finditer(prompt) if match.lastindex != 5 or match[5] in called
    }
    asked = {name for name in named if _is_own(name)} or {name for name in stubs if _is_own(name)}
    return asked - offered, offered


def _doctests(paragraphs: list[Paragraph]) -> list[_Example]:
    """Doctests of one call each; none if a statement among them may change what a later one gives."""
    examples: list[_Example] = []
    for part in paragraphs:
        text = "\n".join(part.lines)
        if ">>>" not in text or WRONG.search(text):
            continue
        try:
            steps = doctest.DocTestParser().get_examples(text)
        except ValueError:
            return []
        for step in steps:
            tree, wanted = (
                parse_expression(step.source),
                re.split(r"^\s*(?:\"\"\"|''')", step.want, maxsplit=1, flags=re.M)[0],
            )
            if tree is None or not wanted.strip() or ("#" in wanted and DOUBT.search(wanted)):
                return []
            if example := _example(tree, wanted, "clear", floats=True):
                examples.append(example)
    return examples


def _paragraph_examples(part: Paragraph, has_examples: bool) -> Iterator[_Example]:
    """The examples in the lines of a paragraph, of prose or code."""
    before = ""  # the paragraph so far
    for line, following in zip(part.lines, [*part.lines[1:], ""], strict=False):
        found = list(_line_examples(line))
        masked = line.replace("e.g.", "e_g_")
        for start, stop, _ in found:
            masked = masked[:start] + "·" * (stop - start) + masked[stop:]
        for start, stop, example in found:
            sentence, about = _sentence(masked, start, stop, following)
            if WRONG.search(sentence + about) or DOUBT.search(sentence + about):
                continue
            is_alone = not re.sub(r"\b(?:and|that|assert)\b|#.*|[\W\d]", "", sentence)
            if is_alone and (WRONG.search(before) or WRONG.search(masked)):
                continue
            is_introduced = has_examples or is_alone or EXAMPLE.search(sentence) or _REQUEST.match(sentence)
            if not is_introduced and example.form != "expected":
                continue
            is_definition = example.form == "equation" and _DEFINES.search(sentence)
            yield replace(example, form="definition") if is_definition else example
        before = masked


def _line_examples(line: str) -> Iterator[tuple[int, int, _Example]]:
    """The examples in a line, with their places, before any look at the words around them."""
    calls = list(_CALL.finditer(line)) if len(line) <= MAX_LINE and ">>>" not in line else []
    for match in calls if len(calls) <= MAX_CALLS else ():
        end = _end_of_literal(line, match.end() - 1)
        equals = _EQUALS.match(line, end)
        if not equals or not _may_begin(line[: match.start()]):
            continue
        stop = _end_of_literal(line, equals.end())
        tree = parse_expression(line[match.start() : end])
        if tree is None or _AFTER.match(line, stop) is None:
            continue
        is_expected = equals[2] or re.search(r"\bassert\s*$", line[: match.start()])
        form = "expected" if is_expected else "equation" if equals[1] else "clear"
        if example := _example(tree, line[equals.end() : stop], form):
            yield match.start(), stop, example


def _may_begin(before: str) -> bool:
    """Whether an example may begin after this text: not within a larger expression, nor after a number."""
    if _BULLET.fullmatch(before):
        return True
    words = before.rstrip(" \t")
    if words == before and not re.search(r"\s[(`]$", before):
        return False
    words = words.rstrip("(`").rstrip()
    return bool(words) and (words[-1].isalpha() or words[-1] in ".,:;") and not re.search(r"\b(?:def|class)$", words)


def _sentence(line: str, start: int, stop: int, following: str) -> tuple[str, str]:
    """The sentence around an example, without the example, and the next one if it speaks of it."""
    before = re.split(r"[.!?]\s", line[:start])[-1]
    after, *rest = re.split(r"(?<=[.!?])\s", line[stop:], maxsplit=1)
    about = re.match(r"\s*(this|that|these|those|it|which|here|both)\b[^.!?]*.?", f"{''.join(rest)} {following}", re.I)
    if about and about[1].lower() != "it":
        return f"{before} {after}", "wrong"  # what it says of the example is not read
    return f"{before} {after}", f" {about[0]}" if about else ""


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


def _call_pairs(paragraphs: list[Paragraph], name: str) -> Iterator[_Example]:
    """`Input: ... Output: ...` as calls of the function: the input is one literal, `a = 1, b = 2`, or the call."""
    for given, wanted in find_pairs(paragraphs, {name}):
        tree = parse_expression(given)
        call = tree
        if tree is None or not isinstance(tree, (ast.Call, ast.Tuple)):
            call = parse_expression(f"{name}({given})")
        if not isinstance(call, ast.Call):
            continue
        if tree is None and not call.args:  # `nums = [1, 2], target = 3`: by position, the answer may rename them
            call = ast.Call(call.func, [word.value for word in call.keywords], [])
        if example := _example(call, wanted, "clear"):
            yield example


def _example(tree: ast.expr, value: str, form: Form, *, floats: bool = False) -> _Example | None:
    """An example if the call has a function of the answer's own, literal arguments and a literal value."""
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name) or not _is_own(tree.func.id):
        return None
    given = [*tree.args, *(word.value for word in tree.keywords)]
    wanted = parse_expression(value)
    if wanted is None or not all(map(is_literal, [*given, wanted])) or any(word.arg is None for word in tree.keywords):
        return None
    constants = [node.value for node in ast.walk(wanted) if isinstance(node, ast.Constant)]
    if constants == [None] or (not floats and any(isinstance(one, (float, complex)) for one in constants)):
        return None
    return _Example(tree.func.id, ast.unparse(tree), ast.unparse(wanted), form)
