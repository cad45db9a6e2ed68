"""Tools that come with the project: `python` in the sandbox, `search` over local text files, those of an MCP server.

In a config:

    env: {name: tools, kwargs: {inner: gsm8k, tools: [python, {name: search, kwargs: {folder: ./notes}}]}}
"""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlvr.core.registry import check_kwargs, did_you_mean, load_path
from rlvr.core.types import Outcome
from rlvr.envs.tools.mcp_tools import mcp_tools
from rlvr.envs.tools.tool import Tool, ToolOutage, ToolProblem
from rlvr.reward.reward_options import check_integer, check_number
from rlvr.sandbox import shared_sandbox

# It prints the value of a last expression, as a notebook does, and the traceback of an error without its own frames.
_RUN = """
import ast, sys, traceback
try:
    tree, names = ast.parse({code!r}, "<code>"), {{"__name__": "__main__"}}
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<code>", "exec"), names)
    if last is not None and (value := eval(compile(ast.Expression(last.value), "<code>", "eval"), names)) is not None:
        print(value if isinstance(value, str) else repr(value))
except BaseException:
    kind, error, trace = sys.exc_info()
    lines = traceback.format_exception(kind, error, trace.tb_next) if not isinstance(error, SyntaxError) else ()
    print("".join(lines or traceback.format_exception_only(error)).strip())
"""
K1, B = 1.5, 0.75  # BM25's usual constants
MOST_BYTES = 64 << 20  # of all files that are searched
PASSAGE = 800  # characters
MOST_WORDS = 32  # of a query; the policy writes it


def python_tool(seconds: float = 5.0) -> Tool:
    """`python(code)`: runs a program in the sandbox; each call begins anew. `seconds` are wall time."""
    check_number("tool python: seconds", seconds, 0, above=True)
    shared_sandbox()  # raises now where no sandbox works

    def python(code: str) -> str:
        """Run a Python program with the standard library. The result is what it prints, and the value of its last line
        if that is an expression. Nothing is kept from one call to the next."""
        verdict = shared_sandbox().verify(_RUN.format(code=code), [{"input": "", "output": None}], seconds)
        if verdict.outcome in (Outcome.ERROR, Outcome.INVALID):
            raise ToolOutage(f"tool python: the sandbox failed ({verdict.reason}: {verdict.detail})")
        if verdict.outcome is Outcome.TIMEOUT:
            raise ToolProblem(f"the program took longer than {seconds:g} s")
        if not verdict.passed:
            raise ToolProblem(f"{verdict.reason}: {verdict.detail}".rstrip(": "))
        return verdict.tests[0].detail.rstrip("\n")

    return Tool.of(python, has_own_limit=True)


def search_tool(folder: str, pattern: str = "**/*.txt", top: int = 3) -> Tool:
    """`search(query)`: the `top` passages nearest to a query in the text files of a folder, by BM25."""
    check_integer("tool search: top", top, 1)
    for name, value in (("folder", folder), ("pattern", pattern)):
        if not isinstance(value, str) or not value or (name == "pattern" and Path(value).is_absolute()):
            raise ValueError(
                f"tool search: {name}={value!r}, expected a text{' such as **/*.txt' * (name == 'pattern')}"
            )
    index = PassageIndex.of(Path(folder).expanduser(), pattern)

    def search(query: str) -> str:
        """Search the local documents. The result is the best passages, each after the name of its file."""
        found = index.find(query, top)
        return "\n\n".join(f"[{name}]\n{text}" for name, text in found) or "nothing was found"

    return Tool.of(search)


@dataclass(frozen=True)
class PassageIndex:
    """Passages by BM25 (Robertson and Zaragoza 2009, https://doi.org/10.1561/1500000019): sum over the query's words of
    idf x tf (k1 + 1) / (tf + k1 (1 - b + b length / mean length))."""

    passages: list[tuple[str, str]]  # name of the file, text
    lengths: list[int]  # in words
    places: dict[str, dict[int, int]]  # word -> passage -> how often it has the word

    @classmethod
    def of(cls, folder: Path, pattern: str) -> PassageIndex:
        """The passages of a folder's text files; ValueError for a missing folder, no such file or too much text. Links
        are not followed."""
        if not folder.is_dir():
            raise ValueError(f"tool search: folder={str(folder)!r} is not a folder")
        files = sorted(path for path in folder.glob(pattern) if path.is_file() and not path.is_symlink())
        files = [path for path in files if path.resolve().is_relative_to(folder.resolve())]
        if not files:
            raise ValueError(f"tool search: {folder} has no file that fits {pattern!r}; give another pattern")
        if (size := sum(path.stat().st_size for path in files)) > MOST_BYTES:
            raise ValueError(f"tool search: {folder} has {size:,} bytes of text; at most {MOST_BYTES:,} are searched")
        passages = [
            (str(path.relative_to(folder)), text)
            for path in files
            for text in split_passages(path.read_text(encoding="utf-8", errors="replace"))
        ]
        return cls.of_passages(passages)

    @classmethod
    def of_passages(cls, passages: list[tuple[str, str]]) -> PassageIndex:
        lengths, places = list[int](), dict[str, dict[int, int]]()
        for place, (_, text) in enumerate(passages):
            counts = Counter(words_of(text))
            lengths.append(counts.total())
            for word, count in counts.items():
                places.setdefault(word, {})[place] = count
        return cls(passages, lengths, places)

    def score(self, query: str) -> dict[int, float]:
        """The score of each passage that has one of the query's first words."""
        n, mean = len(self.passages), sum(self.lengths) / max(len(self.lengths), 1)
        scores: dict[int, float] = {}
        for word in list(dict.fromkeys(words_of(query)))[:MOST_WORDS]:
            found = self.places.get(word, {})
            idf = math.log(1 + (n - len(found) + 0.5) / (len(found) + 0.5))
            for place, tf in found.items():
                penalty = K1 * (1 - B + B * self.lengths[place] / mean)
                scores[place] = scores.get(place, 0.0) + idf * tf * (K1 + 1) / (tf + penalty)
        return scores

    def find(self, query: str, top: int) -> list[tuple[str, str]]:
        """The best passages first; of equal ones the earlier."""
        scores = self.score(query)
        return [self.passages[place] for place in heapq.nsmallest(top, scores, key=lambda one: (-scores[one], one))]


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def split_passages(text: str) -> list[str]:
    """Paragraphs, joined while they are short and cut where they are long, of at most `PASSAGE` characters."""
    passages: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        parts = [paragraph[at : at + PASSAGE] for at in range(0, len(paragraph.strip()), PASSAGE)]
        for part in (one.strip() for one in parts):
            if passages and len(passages[-1]) + len(part) < PASSAGE // 2:
                passages[-1] += f"\n{part}"
            elif part:
                passages.append(part)
    return passages


BUILT_IN: Mapping[str, Callable[..., Tool | list[Tool]]] = {
    "python": python_tool,
    "search": search_tool,
    "mcp": mcp_tools,
}

TOOL_FORMS = (
    f"a name ({', '.join(BUILT_IN)}), the path of a function such as 'package.module:function', or "
    "{name, kwargs}, such as {name: search, kwargs: {folder: ./docs}}"
)


def resolve_tools(given: str | Mapping[str, Any]) -> list[Tool]:
    """A tool by its name or the path of a function, `package.module:function`, or as {name, kwargs}; `mcp` is several.

    ValueError for a name that is unknown, options that it does not take, or a function that is not a tool.
    """
    entry = dict(given) if isinstance(given, Mapping) else {"name": given}
    name, kwargs = entry.pop("name", None), entry.pop("kwargs", None) or {}
    if entry or not isinstance(name, str) or not isinstance(kwargs, Mapping):
        near = did_you_mean(str(next(iter(entry), "")), ("name", "kwargs")) if entry else ""
        raise ValueError(f"tools: {given!r:.200} is not a tool{near}; expected {TOOL_FORMS}")
    if ":" in name:
        if kwargs:
            raise ValueError(f"tools: {name} is a function, which takes no kwargs; leave them out")
        return [Tool.of(load_path("tool", name))]
    if name not in BUILT_IN:
        raise ValueError(f"tools: unknown tool {name!r}{did_you_mean(name, BUILT_IN)}; expected {TOOL_FORMS}")
    check_kwargs(f"tool {name!r}", BUILT_IN[name], dict(kwargs))
    made = BUILT_IN[name](**kwargs)
    return made if isinstance(made, list) else [made]
