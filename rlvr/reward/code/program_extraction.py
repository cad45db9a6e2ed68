"""Extract the program from a response: between `[BEGIN]` and `[DONE]`, in a code fence, or the whole text.

    extract("Sure!\n```python\ndef f(): return 1\n```").code       # "def f(): return 1"

Linear in the length of the text, which is capped.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass

BEGIN, DONE = "[BEGIN]", "[DONE]"
MAX_CHARS = 1 << 20  # a longer response is refused
THOUGHT, THOUGHT_ENDS = "<think>", "</think>"
# Where the body of a function that goes on from a prompt ends: HumanEval's own stop words, and a fence or decorator.
BODY_ENDS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n@", "\n```")
_FENCE = re.compile(r"^([ \t]*)(`{3,}|~{3,})(.*)$", re.MULTILINE)  # the last part takes all: nothing to try again
_FUTURE = re.compile(r"^from __future__ import .*$", re.MULTILINE)
# A mark, or what hides one: code in a line of text, or a string of Python. Three quotes open a string only where code
# has one, so that text about docstrings opens none; an apostrophe inside a word opens none either.
_MARKS = re.compile(
    r"""(?<!`)`[^`\n]+`(?!`)"""
    r"""|(?:^|[=(\[{,:+%]|\breturn\b|\byield\b)[ \t]*[rbfuRBFU]{0,2}(?:\"{3}[\s\S]*?\"{3}|'{3}[\s\S]*?'{3})"""
    r"""|(?<!\\)"(?:[^"\\\n]|\\.)*+"|(?:\b[rbfuRBFU]{1,2}|(?<![\w\\]))'(?:[^'\\\n]|\\.)*+'"""
    r"""|(?P<mark>\[BEGIN\]|\[DONE\]|</think>|^[ \t]*<think>)""",
    re.MULTILINE,
)
# What a module defines, and the lines of one that does nothing but import and define.
_BOUND = re.compile(
    r"^(?:(?:async[ \t]+)?def|class)[ \t]+(\w+)|^([A-Z][A-Z0-9_]*)[ \t]*="
    r"|^(?:import|from[ \t]+\S+[ \t]+import)\b[ \t]*(\([^)]{0,500}\)|.+)",
    re.MULTILINE,
)
_DEFINING = re.compile(r"(?:import|from|def|class|async[ \t]+def)\b|[A-Z][A-Z0-9_]*[ \t]*=|[@#)\]}\s]")
_WORD = re.compile(r"\w+")
_NOWHERE = re.compile(r"(?!)")
_PYTHON = frozenset(("python", "python3", "py", "py3"))


@dataclass(frozen=True)
class ExtractedProgram:
    """The program of an answer. `reason` is empty, `no_answer` or `too_large`; `found_in` is where the program stood:
    `tags`, `fence` or `raw`."""

    code: str
    reason: str = ""
    found_in: str = ""


def extract(response: str, names: Collection[str] = (), prefix: str = "") -> ExtractedProgram:
    """The program of a response, by these rules:

    1. What comes before the last `</think>` is no part of the answer; thinking that never ends leaves none.
    2. `[BEGIN]` to the `[DONE]` after it, or to the end. A `[DONE]` without `[BEGIN]` before it ends the text: the
       prompt held the `[BEGIN]`, and what follows is another problem that the model made up.
    3. Of the code fences the last one, in Python or unmarked, that defines something of `names` (what the tests call):
       drafts come before the answer, examples of its use after it. Else one of another language that does, such as
       `{.python}`; else the last one in Python, else the last unmarked one: examples of input and output have no mark.
       A fence that is never closed goes to the end. Python fences before it that only import and define belong to
       the program if it uses what they define and does not define it itself.
    4. Else the whole text; also where it defines such a name and no fence does. A fence that only closes then ends it:
       the prompt held the one that opens.

    Markdown's rule for fences: one is closed by the same sign, at least as often, alone on a line that is indented by
    at most three more. So the fences in a docstring close none.

    With a `prefix` (HumanEval's prompt) the answer may be the rest of its function, which ends where HumanEval's stop
    words say, or a whole program, in front of which the prefix then stands, for what it imports and defines.
    """
    if len(response) > MAX_CHARS:
        return ExtractedProgram("", "too_large")
    definition = _definition(names)
    answer = _cut_thoughts(response)
    answer = answer[: _find_mark(answer, THOUGHT)]
    code, where = _program(answer, definition)
    if not code.strip():
        return ExtractedProgram("", "no_answer")
    if not prefix:
        return ExtractedProgram(_dedent(code), found_in=where)
    if definition.search(code):
        whole = _dedent(code)
        future = "".join(f"{line.strip()}\n" for line in _FUTURE.findall(whole))  # has to come first in a program
        return ExtractedProgram(f"{future}{prefix.rstrip()}\n    pass\n\n{_FUTURE.sub('', whole)}", found_in=where)
    return ExtractedProgram(prefix + _indent_body(code), found_in=where)


def extract_requested(response: str, prefix: str = "", *, is_chat: bool) -> ExtractedProgram:
    """The program of a response in the form that our prompts ask for, and in no other; nothing is repaired.

    In a chat it is the one code block, closed, in Python or unmarked; two blocks are `many_answers`. After text it is
    what stands before `[DONE]`. With a `prefix` the text goes on from it, and ends where HumanEval's stop words say.
    What comes before the last `</think>` is no part of the answer.
    """
    if len(response) > MAX_CHARS:
        return ExtractedProgram("", "too_large")
    answer = _cut_thoughts(response)
    if is_chat:
        blocks, _ = _read_fences(answer)
        programs = [code for language, code in blocks if language in _PYTHON | {""}]
        if len(programs) > 1:
            return ExtractedProgram("", "many_answers")
        code, where = "".join(programs), "fence"
    else:
        code, where = (_cut_body(answer) if prefix else answer[: _find_mark(answer, DONE)]), "raw"
    if not code.strip():
        return ExtractedProgram("", "no_answer")
    return ExtractedProgram(code if is_chat else prefix + code, found_in=where)


def _program(text: str, definition: re.Pattern[str]) -> tuple[str, str]:
    begin, done = _find_mark(text, BEGIN), _find_mark(text, DONE)
    if begin < done:
        inside = text[begin + len(BEGIN) : _find_mark(text, DONE, begin + len(BEGIN))]
        fenced = _pick_fence(inside, definition) if inside.lstrip()[:3] in ("```", "~~~") else None
        return (inside if fenced is None else fenced), "tags"
    text = text[:done]
    fenced = _pick_fence(text, definition)
    return (text, "raw") if fenced is None else (fenced, "fence")


def _cut_thoughts(response: str) -> str:
    """What follows the last `</think>`."""
    if THOUGHT_ENDS not in response:  # the pattern takes a second for a million characters, and lets no thread run
        return response
    ends = [found.end() for found in _MARKS.finditer(response) if found["mark"] == THOUGHT_ENDS]
    return response[ends[-1] :] if ends else response


def _find_mark(text: str, mark: str, start: int = 0) -> int:
    """The place of the first mark in the text, or the length of the text if it has no mark."""
    if mark not in text:
        return len(text)
    found = (one for one in _MARKS.finditer(text, start) if one["mark"] and one["mark"].lstrip() == mark)
    return next((one.start() for one in found), len(text))


def _read_fences(text: str) -> tuple[list[tuple[str, str]], tuple[re.Match[str], str] | None]:
    """(language, text) of each closed fence, and what opens one that is never closed with its language."""
    blocks: list[tuple[str, str]] = []
    opened: tuple[re.Match[str], str] | None = None
    for found in _FENCE.finditer(text):
        indent, mark, info = found[1], found[2], found[3].strip()
        if opened is None:
            if mark[0] == "~" or "`" not in info:  # else it is code in the line
                opened = found, info.split()[0].lower() if info else ""
            continue
        begun, language = opened
        if not info and mark.startswith(begun[2]) and len(indent) <= len(begun[1]) + 3:
            blocks.append((language, text[begun.end() : found.start()]))
            opened = None
    return blocks, opened


def _pick_fence(text: str, definition: re.Pattern[str]) -> str | None:
    """The fenced block to take as the program; None if there is none."""
    blocks, opened = _read_fences(text)
    if opened is not None:
        begun, language = opened
        before, rest = text[: begun.start()], text[begun.end() :].rstrip()
        if not (language or begun[1] or definition.search(rest)) and definition.search(before):
            blocks.append(("", before))  # it was the prompt that opened this fence, and here it is closed
        else:
            blocks.append((language, rest.removesuffix(begun[2])))  # maybe closed at the end of its last line
    defining = [block for block in blocks if definition.search(block[1])]
    if not defining and definition.search(text):  # bare code with fences in its comments
        return None
    kinds = (_PYTHON | {""}, None) if defining else (_PYTHON, {""})
    for kind in kinds:
        if chosen := [code for language, code in defining or blocks if kind is None or language in kind]:
            others = [code for language, code in blocks if language in _PYTHON]
            return _join_parts(others[: others.index(chosen[-1])], chosen[-1]) if chosen[-1] in others else chosen[-1]
    return None


def _join_parts(before: Sequence[str], code: str) -> str:
    """A program behind those blocks before it that only import and define, and define what it uses and does not."""
    parts, bound, used = [code], _bound_names(code), set(_WORD.findall(code))
    for block in reversed(before):
        if all(_DEFINING.match(line) for line in block.splitlines() if line.strip()):
            new = _bound_names(block)
            if (new - bound) & used:
                parts.append(block.rstrip() + "\n")
                bound, used = bound | new, used.union(_WORD.findall(block))
    return "\n".join(reversed(parts))


def _bound_names(code: str) -> set[str]:
    return {name for found in _BOUND.finditer(code) for part in found.groups() if part for name in _WORD.findall(part)}


def _definition(names: Collection[str]) -> re.Pattern[str]:
    """A pattern that finds a definition of one of the names; without names it matches nothing."""
    if not names:
        return _NOWHERE
    known = "|".join(map(re.escape, sorted(names)))
    return re.compile(rf"^[ \t]*(?:(?:async[ \t]+)?def|class)[ \t]+(?:{known})\b|^(?:{known})[ \t]*=", re.MULTILINE)


def _dedent(code: str) -> str:
    """Remove the common indentation and blank lines around: tokenizers lose or add a space before the first word."""
    first = next(line for line in code.splitlines() if line.strip())
    return (textwrap.dedent(code) if first[:1].isspace() else code).strip()


def _cut_body(code: str) -> str:
    """A completion that continues a function's head, cut where the function ends."""
    ends = [at for at in (code.find(stop, 1) for stop in BODY_ENDS) if at != -1]
    return code[: min(ends, default=len(code))]


def _indent_body(code: str) -> str:
    """A completion that continues a function's head: its body, indented by four, cut where the function ends."""
    lines = _cut_body(code).rstrip().split("\n")
    first = next((i for i, line in enumerate(lines) if line.strip()), 0)
    depths = [len(line) - len(line.lstrip()) for line in lines[first:] if line.strip()]
    if depths and depths[0] < 4 and "\t" not in lines[first][: depths[0]]:
        if min(depths[1:], default=4) >= 4:  # only the first line lost its indentation, as tokenizers do
            lines[first] = "    " + lines[first].lstrip()
        else:
            lines = textwrap.indent(textwrap.dedent("\n".join(lines)), "    ").split("\n")
    return "\n".join(lines) + "\n"
