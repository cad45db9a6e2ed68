"""`rlvr audit --labelled` as continuous integration runs it: thresholds, allowed faults, warnings, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlvr.audits.verifier_errors import list_data_warnings
from rlvr.audits.verifier_faults import FAULTS
from rlvr.cli.main import run

# Right on numbers; "it", "yes" and "broken" make it accept, ignore case, and fail, at the rows that hold them.
REWARDS = """
from rlvr.core.types import Outcome, Score

def read_word(response):
    return response.rpartition("It is ")[2]

def right(prompt, response, meta):
    return read_word(response) == meta["answer"]

def lenient(prompt, response, meta):
    return read_word(response).casefold() == meta["answer"].casefold()

def generous(prompt, response, meta):
    return right(prompt, response, meta) or read_word(response) == "wrong0"

def fragile(prompt, response, meta):
    if read_word(response) in ("wrong1", "wrong2"):
        raise RuntimeError("boom")
    return right(prompt, response, meta)

SEEN = set()

def once(prompt, response, meta):
    is_new = response not in SEEN
    SEEN.add(response)
    return right(prompt, response, meta) and is_new
"""
CITIES = ("Paris", "Rome", "Oslo", "Berne")


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four true rows and four false ones."""
    monkeypatch.chdir(tmp_path)
    name = f"own_{abs(hash(str(tmp_path)))}"
    monkeypatch.setenv("OWN", name)
    (tmp_path / f"{name}.py").write_text(REWARDS)
    rows: list[dict[str, Any]] = []
    for i, city in enumerate(CITIES):
        rows.append({"prompt": f"Place {i}?", "answer": city, "response": f"It is {city}", "label": True})
        rows.append({"prompt": f"Place {i}?", "answer": city, "response": f"It is wrong{i}", "label": False})
    write(rows)


def write(rows: list[dict[str, Any]]) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def audit(function: str, *words: str) -> int:
    return run(["audit", "--reward", f"{os.environ['OWN']}:{function}", "--labelled", "rows.jsonl", *words])


@pytest.mark.parametrize(
    ("function", "words", "code", "said"),
    [
        ("right", (), 0, ""),
        ("once", (), 1, "unstable      FAULT, 4 times"),
        ("generous", (), 1, "above --max-false-accepts: 25.00% of the rows, at most 0% are allowed"),
        ("generous", ("--max-false-accepts", "0.24"), 1, "at most 24% are allowed"),
        ("generous", ("--max-false-accepts", "0.25"), 0, ""),
        ("fragile", (), 1, "above --max-errors: 25.00% of the rows, at most 0% are allowed"),
        ("fragile", ("--max-errors", "0.2"), 1, "at most 20% are allowed"),
        ("fragile", ("--max-errors", "0.25"), 0, ""),
        ("lenient", (), 1, "case          FAULT, 4 times"),
        ("lenient", ("--allow", "case"), 0, "case          4 times, allowed"),
        ("lenient", ("--allow", "near", "--allow", "sign"), 1, "case          FAULT, 4 times"),
    ],
)
def test_the_exit_code_follows_the_rates_and_the_faults(
    function: str, words: tuple[str, ...], code: int, said: str, capsys: Any
) -> None:
    assert audit(function, *words) == code
    out = capsys.readouterr().out
    assert said in out and ("above" in out) == ("above" in said or "at most" in said), out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--max-errors", "25"), "--max-errors 25, expected a share from 0 to 1"),
        (("--max-false-accepts", "-0.1"), "--max-false-accepts -0.1, expected a share from 0 to 1"),
        (("--max-errors", "nan"), "--max-errors nan, expected a share"),
        (("--allow", "cases"), "--allow 'cases' (did you mean 'case'?); known faults: unstable, order,"),
    ],
)
def test_a_mistake_in_an_option_is_one_message(words: tuple[str, ...], said: str, capsys: Any) -> None:
    assert audit("right", *words) == 2
    assert said in capsys.readouterr().err


def test_a_reward_that_raises_on_every_row_is_to_be_corrected_not_the_rows(capsys: Any) -> None:
    Path(f"{os.environ['OWN']}_2.py").write_text("def crashes(prompt, response, meta):\n    return int(response)\n")
    assert run(["audit", "--labelled", "rows.jsonl", "--reward", f"{os.environ['OWN']}_2:crashes"]) == 2
    said = capsys.readouterr().err
    assert "ValueError: invalid literal" in said and "correct the reward" in said and "give rows" not in said


def test_the_report_holds_faults_allowed_ones_and_warnings() -> None:
    write([json.loads(line) | {"answer": ""} for line in Path("rows.jsonl").read_text().splitlines()[1::2]] * 3)
    audit("right", "--allow", "case", "--json", "audit.json")
    (report,) = json.loads(Path("audit.json").read_text())
    assert report["allowed"] == ["case"] and report["warnings"] == ["12 rows: the reference is blank (first: row 1)"]
    assert report["above_threshold"] == []


@pytest.mark.slow
def test_the_process_itself_ends_with_the_code() -> None:
    words = [sys.executable, "-m", "rlvr.cli.main", "audit", "--labelled", "rows.jsonl", "--reward"]
    name = os.environ["OWN"]
    codes = [
        subprocess.run([*words, f"{name}:{function}", *more], capture_output=True, check=False).returncode
        for function, more in (("right", ()), ("fragile", ("--max-errors", "0.2")), ("right", ("--allow", "x")))
    ]
    assert codes == [0, 1, 2]


def row(**fields: Any) -> dict[str, Any]:
    return {"prompt": "Who?", "answer": "Goethe", "response": "Goethe", "label": True, **fields}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row(), row(response="Schiller", label=False)], ""),
        ([row(answer=" ")], "1 row: the reference is blank (first: row 1)"),
        ([row(), row(answer="Who?")], "1 row: the reference is the prompt itself (first: row 2)"),
        ([row(), row(label=False)], "1 row: an equal row has the other label (first: row 2)"),
        ([row(), row(answer="Mann")], "1 row: an earlier row has this prompt and another reference (first: row 2)"),
        ([row(answer=None, gold=" ")], "1 row: the reference is blank (first: row 1)"),
        (
            [row(), {"reward_model": {"ground_truth": "Who?"}, **row(answer=None)}],
            "1 row: the reference is the prompt itself (first: row 2)",
        ),
        ([row(choices=["a", "b", " a"])], "1 row: a choice stands twice among the choices: two letters are right"),
        ([row(options={"A": "x", "B": "x"})], "1 row: a choice stands twice among the options"),
        ([row(choices=["a", "b"], options="a a")], ""),
        (
            [row(prompt=f"{i}?", answer="yes" if i % 2 else "no") for i in range(20)],
            "10 of 20 tasks have the reference",
        ),
        ([row(prompt=f"{i}?", answer=str(i % 3)) for i in range(20)], ""),
        ([row(prompt=f"{i}?") for i in range(9)], ""),
    ],
)
def test_doubtful_rows_are_warned_of(rows: list[dict[str, Any]], said: str) -> None:
    warnings = list_data_warnings(rows)
    assert len(warnings) == bool(said) and (not said or warnings[0].startswith(said)), warnings


def test_the_page_lists_the_faults() -> None:
    page = (Path(__file__).parents[2] / "docs" / "verify" / "verify-and-audit.md").read_text()
    rows = [line.split(" | ")[:2] for line in page.splitlines() if line.startswith("| `")]
    assert [(name.strip("| `"), what) for name, what in rows] == list(FAULTS.items())
