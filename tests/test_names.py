"""The naming rules of CONTRIBUTING.md: unique class and file names, functions named by verbs, plain words."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlvr

ROOT = Path(rlvr.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
# The same question has the same file name in several packages: what is registered, which errors, the application.
SHARED_FILE_NAMES = {"__init__.py", "__main__.py", "registry.py", "errors.py", "app.py"}
# Participles that do not end in -ed, and prepositions: none of them says what a function does or a class is.
PARTICIPLES = """
told found known kept given made held posed shown written worn heard taken blamed said sent built cut left lost met paid
seen begun broken chosen drawn driven felt forgotten frozen gone grown hidden laid led lent meant torn thrown understood
won spent brought caught sought taught thought stood struck bound bent dealt fled hung stuck wound owed
beside behind within over
"""
NOT_VERBS = set(PARTICIPLES.split())
VERBS = {"embed", "exceed", "feed", "need", "proceed", "seed", "shed"}  # these end in -ed all the same
# Words of riddles. "the caller", "the client", "the user" and "no process" say who.
RIDDLES = (
    "[Ww]hoever",
    "[Nn]obody",
    "[Ss]omebody",
    "to be had",
    "is none of",
    "who asks",
    "wherever it is",
    "as it were",
)


def definitions(kind: type[ast.AST] | tuple[type[ast.AST], ...]) -> Iterator[tuple[Path, ast.AST]]:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, kind):
                yield path, node


def is_bare_participle(name: str) -> bool:
    word = name.strip("_").lower()
    return "_" not in word and word not in VERBS and (word in NOT_VERBS or word.endswith("ed"))


def test_public_class_names_are_unique() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, node in definitions(ast.ClassDef):
        assert isinstance(node, ast.ClassDef)
        if not node.name.startswith("_"):
            places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_file_names_are_unique_but_for_the_listed_conventions() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        places[path.name].append(str(path.relative_to(ROOT)))
    repeated = {name: found for name, found in places.items() if len(found) > 1}
    assert {name: found for name, found in repeated.items() if name not in SHARED_FILE_NAMES} == {}


def test_no_function_or_class_is_named_by_a_bare_participle() -> None:
    mistakes = []
    for path, node in definitions((ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        # A property may be an adjective: `result.truncated`.
        is_property = any("property" in ast.dump(decorator) for decorator in node.decorator_list)
        if is_bare_participle(node.name) and not is_property:
            mistakes.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}")
    assert mistakes == []


@pytest.mark.parametrize("name", ["told", "_kept", "Refused", "beside", "worn"])
def test_the_rule_finds_a_participle(name: str) -> None:
    assert is_bare_participle(name)


@pytest.mark.parametrize("name", ["feed", "is_told", "read", "keep_alive", "RunQueue"])
def test_the_rule_lets_verbs_and_nouns_pass(name: str) -> None:
    assert not is_bare_participle(name)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of each comment and string of a Python file, or each line of a page."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from enumerate(source.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING) or token.type == getattr(tokenize, "FSTRING_MIDDLE", -1):
            for offset, text in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, text


def test_messages_comments_and_pages_use_plain_words() -> None:
    pages = [*(ROOT.parent / "docs").rglob("*.md"), ROOT.parent / "README.md", ROOT.parent / "CONTRIBUTING.md"]
    riddle = re.compile(r"\b(" + "|".join(RIDDLES) + r")\b")
    mistakes = [
        f"{path.relative_to(ROOT.parent)}:{line}: {match[0]!r} in {text.strip()[:80]!r}"
        for path in [*FILES, *pages]
        for line, text in prose(path)
        if (match := riddle.search(text))
    ]
    assert mistakes == []
