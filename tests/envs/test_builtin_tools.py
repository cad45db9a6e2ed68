"""The tools `python` and `search`: what a program prints, what it cannot reach, which passages are found."""

from __future__ import annotations

import asyncio
from math import log
from pathlib import Path

import pytest

from rlvr.envs.tools.builtin_tools import PassageIndex, python_tool, resolve_tools, search_tool, split_passages
from rlvr.envs.tools.tool import Toolbox
from rlvr.sandbox import NoTier, shared_sandbox


def run(code: str, seconds: float = 2.0) -> tuple[str, bool]:
    try:
        shared_sandbox()
    except NoTier as error:
        pytest.skip(str(error))
    return asyncio.run(Toolbox([python_tool(seconds)]).call("python", {"code": code}, 30))


TRACE = 'Traceback (most recent call last):\n  File "<code>", line 1, in <module>\n'


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("6 * 7", "42"),
        ("x = 3\nprint('hi')\nx * 2", "hi\n6"),
        ("print('grüße 🙂')", "grüße 🙂"),
        ("None", ""),
        ("'text'", "text"),
        ("1 / 0", TRACE + "ZeroDivisionError: division by zero"),
        ("def f(:", '  File "<code>", line 1\n    def f(:\n          ^\nSyntaxError: invalid syntax'),
        ("raise SystemExit(3)", TRACE + "SystemExit: 3"),
    ],
)  # fmt: skip
def test_a_program_gives_what_it_prints(code: str, result: str) -> None:
    assert run(code) == (result.strip(), True)


def test_a_program_keeps_nothing_and_reaches_nothing(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the secret")
    assert run("kept = 1") == ("", True)
    assert "NameError" in run("kept")[0]
    assert "the secret" not in run(f"open({str(secret)!r}).read()")[0]
    assert "Error" in run("import socket; socket.create_connection(('127.0.0.1', 22), 1)")[0]


def test_a_program_without_end_or_with_too_much_output_is_a_problem() -> None:
    text, is_good = run("while True: pass", 0.5)
    assert (text, is_good) == ("error: the program took longer than 0.5 s", False)
    text, is_good = run("print('x' * 10**7)")
    assert not is_good and "output" in text
    assert run("1 + 1") == ("2", True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "cats.txt").write_text("Cats sleep a lot.\n\n" + "A cat purrs. " * 50)
    (tmp_path / "notes" / "towns.txt").write_text("The capital of Peru is Lima.\n\nThe capital of Chad is N'Djamena.")
    (tmp_path / "outside.txt").write_text("Peru Peru Peru")
    (tmp_path / "notes" / "link.txt").symlink_to(tmp_path / "outside.txt")
    return tmp_path / "notes"


def test_search_gives_the_nearest_passages_of_the_folder_alone(folder: Path) -> None:
    tool = search_tool(str(folder), top=2)
    found = asyncio.run(tool.call({"query": "capital of PERU?"}, 5))
    assert found.startswith("[towns.txt]\nThe capital of Peru is Lima.") and "Peru Peru" not in found
    assert asyncio.run(tool.call({"query": "zebra"}, 5)) == "nothing was found"


def test_bm25_is_its_formula() -> None:
    """Two passages of 2 and 4 words; `b` is in one: idf = ln(1 + 1.5 / 1.5), tf = 2 of length 4, mean length 3."""
    assert split_passages("a a\n\n\n" + "w " * 800)[0] == "a a"
    index = PassageIndex.of_passages([("x", "a a"), ("y", "b b c d")])
    assert index.score("b zebra") == {1: pytest.approx(log(2) * 2 * 2.5 / (2 + 1.5 * (0.25 + 0.75 * 4 / 3)))}
    assert index.find("b", 5) == [("y", "b b c d")]


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"folder": "/no/such/folder"}, "is not a folder"),
        ({"pattern": "*.md"}, "no file that fits"),
        ({"top": 0}, "top=0"),
        ({"pattern": "/etc/*"}, "such as"),
        ({"tops": 3}, "did you mean 'top'"),
    ],
)
def test_a_search_that_cannot_work_is_refused(folder: Path, kwargs: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        resolve_tools({"name": "search", "kwargs": {"folder": str(folder), **kwargs}})
