"""Tools that come with the project: `python` in the sandbox, and `search` over local text files.

    env: {name: tools, kwargs: {inner: gsm8k, tools: [python, {name: search, kwargs: {folder: ./notes}}]}}

Exercised by tests/test_builtin_tools.py.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlvr.core.registry import check_kwargs, did_you_mean, load_path
from rlvr.envs.tools.tool import Tool, ToolProblem
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


def python_tool(seconds: float = 5.0) -> Tool:
    """`python(code)`: runs a program in the sandbox; each call begins anew. `seconds` are wall time."""
    if not 0 < seconds < math.inf:
        raise ValueError(f"tool python: seconds={seconds!r}, expected a number above 0")
    shared_sandbox()  # raises now where no sandbox works

    async def python(code: str) -> str:
        """Run a Python program with the standard library. The result is what it prints, and the value of its last line
        if that is an expression. Nothing is kept from one call to the next."""
        result = await shared_sandbox().run(_RUN.format(code=code), timeout_s=seconds)
        if not result.passed:
            late = f"the program took longer than {seconds:g} s"
            raise ToolProblem(late if result.reason == "timeout" else f"{result.reason}: {result.detail}".rstrip(": "))
        return result.detail.rstrip("\n")

    return Tool.of(python)


def search_tool(folder: str, pattern: str = "**/*.txt", top: int = 3) -> Tool:
    """`search(query)`: the `top` passages nearest to a query in the text files of a folder, by BM25."""
    index = PassageIndex.of(Path(folder).expanduser(), pattern)
    if type(top) is not int or top < 1:
        raise ValueError(f"tool search: top={top!r}, expected at least 1 passage")

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
    counts: list[Counter[str]]
    idf: dict[str, float]
    mean_length: float

    @classmethod
    def of(cls, folder: Path, pattern: str) -> PassageIndex:
        """ValueError for a folder that does not exist, or holds no such file or too much. Links are not followed."""
        if not folder.is_dir():
            raise ValueError(f"tool search: folder={str(folder)!r} is no folder")
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
        counts = [Counter(words_of(text)) for _, text in passages]
        present = Counter(word for one in counts for word in one)
        n = len(passages)
        idf = {word: math.log(1 + (n - df + 0.5) / (df + 0.5)) for word, df in present.items()}
        return cls(passages, counts, idf, sum(one.total() for one in counts) / max(n, 1))

    def find(self, query: str, top: int) -> list[tuple[str, str]]:
        """The best passages first; of equal ones the earlier."""
        words = [word for word in dict.fromkeys(words_of(query)) if word in self.idf]
        scores = [(self._score(words, one), -place) for place, one in enumerate(self.counts)]
        best = sorted((score for score in scores if score[0] > 0), reverse=True)[:top]
        return [self.passages[-place] for _, place in best]

    def _score(self, words: list[str], counts: Counter[str]) -> float:
        penalty = K1 * (1 - B + B * counts.total() / (self.mean_length or 1))
        return sum(self.idf[word] * (tf := counts[word]) * (K1 + 1) / (tf + penalty) for word in words if counts[word])


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


BUILT_IN: Mapping[str, Callable[..., Tool]] = {"python": python_tool, "search": search_tool}


def resolve_tool(given: str | Mapping[str, Any]) -> Tool:
    """A tool by its name or the path of a function, `package.module:function`, or as {name, kwargs}.

    ValueError for a name that is unknown, options that it does not take, or a function that is no tool.
    """
    entry = {"name": given} if isinstance(given, str) else dict(given)
    name, kwargs = entry.pop("name", None), entry.pop("kwargs", None) or {}
    if entry or not isinstance(name, str) or not isinstance(kwargs, Mapping):
        raise ValueError(
            f"tools: {given!r:.200}, expected a name, a path 'package.module:function' or {{name, kwargs}}"
        )
    if ":" in name:
        if kwargs:
            raise ValueError(f"tools: {name} is a function, which takes no kwargs; leave them out")
        return Tool.of(load_path("tool", name))
    if name not in BUILT_IN:
        raise ValueError(
            f"tools: unknown tool {name!r}{did_you_mean(name, BUILT_IN)}; known: {', '.join(BUILT_IN)}; or a path "
            "'package.module:function'"
        )
    check_kwargs(f"tool {name!r}", BUILT_IN[name], dict(kwargs))
    return BUILT_IN[name](**kwargs)
