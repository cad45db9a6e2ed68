"""The sections of a prompt: paragraphs under their headings, and the fields `Input:` and `Output:`.

`derived_tests` takes tests from these. Each function reads the text once.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_LINE = 1_000  # characters; in a longer line there is no example

WRONG = re.compile(
    r"\b(?:wrong(?:ly)?|incorrect(?:ly)?|mistakes?|mistaken(?:ly)?|(?-i:false)|falsely|invalid|bad|forbidden|deprecated|"
    r"impossible|naive|old|before|formerly|previous(?:ly)?|legacy|counter-?examples?|counter|non|anti|rais(?:es?|ing)|"
    r"instead|currently|actual(?:ly)?|off[- ]by|errors?|fails?|failing|failed|bugs?|buggy|broken|pitfalls?|avoid|"
    r"unlike|contrary|opposite|unexpected|unwanted|outdated|illegal|disallowed|rejected|claim(?:s|ed)?|think|believe)\b",
    re.I,
)
DOUBT = re.compile(
    r"\b(?:not|never|no|nor|neither|but|however|although|unless|if|suppose|assume|assuming|when|whenever|while|until|"
    r"except|approximately|approx|about|roughly|around|nearly|almost|modulo|mod|cannot|without|rather|was|were|would|"
    r"could|might|may|why|what|which|hypothetical(?:ly)?|says?|said|got|gets?|hardly|unclear|undefined)\b|n['’]t\b|[?≈✗✘❌]",
    re.I,
)
EXAMPLE = re.compile(r"\b(?:examples?|samples?|tests?|usage|e\.g\.|e_g_|for instance|such as|so that)(?!\w)", re.I)
_HEADING = re.compile(r"#{1,6} [^(]*|.*:[*_]*|\*\*[^*]+\*\*")  # of a stripped line
_LABEL_LEVEL = 7  # of a heading without #, which is below all that have one
_SHOWS = re.compile(r"=|->|→|⇒|>>>|\b(?:in|out)put\b.*:", re.I)  # a value
_LABEL = re.compile(
    r"(?<!sample )(?<!example )(?<!expected )\b"
    r"(?=(?:(?:sample|example|expected)[ ])?(?:input|output)(?:[ ]?\d{1,3})?[ ]?:)",
    re.I,
)
_FIELD = re.compile(r"[>*# -]{0,8}(?:(sample|example|expected)[ ])?(input|output)(?:[ ]?(\d{1,3}))?[ ]?:(.*)", re.I)
_NUMBERS = re.compile(r"[-+]?\d+(?:\.\d+)?(?: [-+]?\d+(?:\.\d+)?)*")


@dataclass(frozen=True)
class Paragraph:
    """The lines up to a blank line or heading, without fences; `heading` is None if there is none above them."""

    heading: str | None
    lines: list[str]

    def has_examples(self, asked: set[str]) -> bool:
        """Whether the heading says that examples follow."""
        heading = self.heading
        if heading is None or WRONG.search(heading) or DOUBT.search(heading):
            return False
        last = re.split(r"[.!?]\s", heading)[-1]
        return bool(EXAMPLE.search(last) or asked & set(re.findall(r"\w+", last)))


def split_paragraphs(prompt: str) -> Iterator[Paragraph]:
    """The paragraphs of a prompt. A blank line ends what a heading governs, unless it comes directly after the heading
    or only a further example follows.

    Headings under one that speaks of wrong values are its parts (`## Bad`, prose, `Example:`): until the next of its
    level if it begins with #, else until a value is shown. The title of a prompt has no parts.
    """
    heading: str | None = None
    wrong: tuple[int, str] | None = None  # the level of the heading that speaks of wrong values, and its text
    lines: list[str] = []
    is_title = True
    was_blank = False
    for line in prompt.splitlines():
        text = line.strip()
        if text.startswith("```"):
            continue
        if not text:
            was_blank = bool(lines)
            continue
        is_heading = len(text) <= MAX_LINE and _HEADING.fullmatch(text) is not None
        if is_heading or was_blank:
            if lines or is_heading:
                yield Paragraph(heading, lines)
            if is_heading:
                level = len(text) - len(text.lstrip("#")) or _LABEL_LEVEL
                if wrong and (level > wrong[0] or level == _LABEL_LEVEL):
                    heading = f"{wrong[1]} {text}"
                else:
                    heading = text
                    wrong = (level, text) if WRONG.search(text) and not (is_title and text[0] == "#") else None
            elif not re.match(r"(?:>>>|[-*•]|\d+[.)]|[`(]{0,2}\w+\(|(?:sample |expected )?output\b)", text, re.I):
                heading = wrong[1] if wrong and wrong[0] < _LABEL_LEVEL else None
            lines, was_blank = [], False
        if not is_heading:
            lines.append(line)
            if wrong and wrong[0] == _LABEL_LEVEL and _SHOWS.search(line):
                wrong = None
        is_title = False
    yield Paragraph(heading, lines)


def find_pairs(paragraphs: list[Paragraph], asked: set[str]) -> Iterator[tuple[str, str]]:
    """The texts of `Input: ...` and the `Output: ...` that follows, on one line or as blocks of lines: the samples, or
    if there are none, those that are data."""
    pairs: list[tuple[bool, str, str]] = []
    given: tuple[bool, str] | None = None
    for is_sample, kind, lines in _fields(paragraphs, asked):
        text = "\n".join(lines).strip()
        if kind == "output" and given and given[1] and text:
            pairs.append((is_sample and given[0], given[1], text))
        given = (is_sample, text) if kind == "input" else None
    has_samples = any(is_sample for is_sample, _, _ in pairs)
    for is_sample, first, second in pairs:
        if is_sample if has_samples else _is_data(first) and _is_data(second):
            yield first, second


def _fields(paragraphs: list[Paragraph], asked: set[str]) -> Iterator[tuple[bool, str, list[str]]]:
    """(whether it is a sample, "input" or "output" or "", lines) of each field and of the text between them."""
    in_examples = False
    for part in paragraphs:
        label = _FIELD.fullmatch(part.heading or "")
        is_excluded = part.heading is not None and not label and not part.has_examples(asked)
        in_examples = in_examples if label else part.has_examples(asked)
        is_sample = in_examples or (label is not None and _is_sample(label))
        kind = label[2].lower() if label else ""
        lines: list[str] = []
        for line in part.lines:
            for piece in _LABEL.split(line) if len(line) <= MAX_LINE else [line]:
                field = _FIELD.fullmatch(piece.strip())
                if field and not is_excluded:
                    yield is_sample, kind, lines
                    is_sample = in_examples or _is_sample(field)
                    kind, lines = field[2].lower(), [field[4].strip(" ,;>→=*`-")]
                elif re.match(r"[*_ ]{0,4}\w+[*_]{0,2}:(?:\s|$)", piece):  # `Explanation: ...`
                    in_examples = EXAMPLE.match(piece) is not None
                    yield is_sample, kind, lines
                    is_sample, kind, lines = in_examples, "", []
                else:
                    lines.append(piece.strip("`"))
        yield is_sample, kind, lines


def _is_sample(field: re.Match[str]) -> bool:
    return bool(field[3]) or (field[1] or "").lower() in ("sample", "example")


def _is_data(text: str) -> bool:
    """Whether a text is numbers, literals, `name = literal`, or a call with literals; never a sentence."""
    for line in text.splitlines():
        tree = parse_expression(line) or parse_expression(f"f({line})")
        given = [*tree.args, *(word.value for word in tree.keywords)] if isinstance(tree, ast.Call) else [tree]
        if not _NUMBERS.fullmatch(line.strip()) and not all(one is not None and is_literal(one) for one in given):
            return False
    return True


def parse_expression(text: str) -> ast.expr | None:
    try:
        return ast.parse(text.strip(), mode="eval").body if len(text) <= MAX_LINE else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def is_literal(node: ast.expr) -> bool:
    try:
        return ast.literal_eval(node) is not ...
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return False
