"""The naming rules of CONTRIBUTING.md: unique class and file names, functions named by verbs, plain words."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import rlvr
from rlvr.algorithms.advantages import ADVANTAGES
from rlvr.algorithms.losses import LOSSES
from rlvr.algorithms.optimizers import OPTIMIZERS
from rlvr.clients.registry import CLIENTS
from rlvr.clients.samplers import SAMPLERS
from rlvr.core.variants import Variants
from rlvr.tracking.trackers import TRACKERS
from rlvr.training.schedules import SCHEDULES

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


class SourceNames(NamedTuple):
    """(file and line, name) of each class, each function that is no property, and each string of the package."""

    classes: list[tuple[str, str]]
    functions: list[tuple[str, str]]
    strings: list[tuple[str, str]]


@functools.cache
def source_names() -> SourceNames:
    """All files, parsed once: their trees would fill the memory if they were kept."""
    found = SourceNames([], [], [])
    for path in FILES:
        place = path.relative_to(ROOT)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found.classes.append((f"{place}:{node.lineno}", node.name))
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                # A property may be an adjective: `result.truncated`.
                if not any("property" in ast.dump(decorator) for decorator in node.decorator_list):
                    found.functions.append((f"{place}:{node.lineno}", node.name))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.strings.append((f"{place}:{node.lineno}", node.value))
    return found


def is_bare_participle(name: str) -> bool:
    word = name.strip("_").lower()
    return "_" not in word and word not in VERBS and (word in NOT_VERBS or word.endswith("ed"))


def test_public_class_names_are_unique() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for place, name in source_names().classes:
        if not name.startswith("_"):
            places[name].append(place)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_file_names_are_unique_but_for_the_listed_conventions() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        places[path.name].append(str(path.relative_to(ROOT)))
    repeated = {name: found for name, found in places.items() if len(found) > 1}
    assert {name: found for name, found in repeated.items() if name not in SHARED_FILE_NAMES} == {}


def test_no_function_or_class_is_named_by_a_bare_participle() -> None:
    names = source_names()
    found = [*names.functions, *names.classes]
    assert [f"{place}: {name}" for place, name in found if is_bare_participle(name)] == []


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


# Variants by name outside their folder and registry. Each of these files says why the name belongs there.
KINDS: dict[str, tuple[Variants[Any], tuple[str, ...]]] = {
    "loss": (LOSSES, ("algorithms/losses/", "algorithms/registry.py")),
    "advantage": (ADVANTAGES, ("algorithms/advantages.py", "algorithms/registry.py")),
    "client": (CLIENTS, ("clients/",)),
    "sampler": (SAMPLERS, ("clients/",)),
    "schedule": (SCHEDULES, ("training/schedules/",)),
    "optimizer": (OPTIMIZERS, ("algorithms/optimizers.py",)),
    "tracker": (TRACKERS, ("tracking/",)),
}
NAMED = {
    # tables of other systems' words, and the classes REINFORCE and PPO, which stand for a spec
    "config/aliases.py", "config/alias_values.py", "config/trl_words.py", "config/verl_words.py",
    "config/foreign_words.py",
    "algorithms/classic.py", "compat/recipes/rl_loop.py",
    "algorithms/capabilities.py",  # one algorithm for each option, for the table of docs/train/algorithms.md
    "clients/skyrl.py",  # which losses the server of that client has
    "cli/doctor_tinker.py",  # tries both clients of a server
    "config/choices.py", "config/build_config.py", "runs/evaluate_weights.py",  # which client is the default
}  # fmt: skip
OTHER_WORDS = {  # the same words for something else
    ("advantage", "raw"), ("advantage", "verdict"), ("client", "local"), ("client", "mock"), ("client", "tinker"),
    ("sampler", "trainer"), ("loss", "ppo"), ("schedule", "completion"), ("tracker", "store"),
    ("optimizer", "adamw"),  # the Tinker protocol's
}  # fmt: skip
OF_OTHERS = (
    "tinker_server/",
    "audits/completion_rows.py",
    "chat/dialects/",
    "envs/dataset.py",
    "training/given_completions.py",
    "clients/",
    "service/",
    "web/",
    "sandbox/",
    "core/",
    "reward/",
    "cli/train_commands.py",
)
SCORING = "cross_entropy"  # the protocol's own: a forward pass by it gives log-probs, and fine-tuning imitates by it


def test_variants_are_named_in_their_own_folders_alone() -> None:
    mistakes: set[str] = set()
    for place, value in source_names().strings:
        if value == SCORING or place.partition(":")[0] in NAMED:
            continue
        for kind, (variants, own) in KINDS.items():
            is_other = (kind, value) in OTHER_WORDS and place.startswith(OF_OTHERS)
            if value in variants and not place.startswith(own) and not is_other:
                mistakes.add(f"{place}: the {kind} {value!r}")
    assert mistakes == set()
