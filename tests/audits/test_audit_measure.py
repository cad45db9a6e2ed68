"""`rlvr audit --labelled`: rates, intervals and what could not be judged, against figures counted by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlvr.audits.verifier_errors import measure, read_labelled, report
from rlvr.cli.main import run
from rlvr.core.types import Outcome, Score
from rlvr.reward import resolve_reward


def contains(prompt: str, response: str, meta: dict[str, Any]) -> float:
    if response == "broken":
        raise RuntimeError("no")
    return float(meta["answer"] in response)


ROWS = [
    {"answer": "7", "response": "7", "label": True, "category": "a"},
    {"answer": "7", "response": "17", "label": False, "category": "a", "note": "another number"},
    {"answer": "7", "response": "8", "label": False, "category": "b"},
    {"answer": "7", "response": "VII", "label": True, "category": "b"},
    {"answer": "7", "response": "broken", "label": True, "category": "b"},
]


def test_rates_are_those_counted_by_hand() -> None:
    """One of two false rows accepted, one of two true rows refused, the fifth in no rate. Wilson's interval of 1/2."""
    measured = measure(ROWS, resolve_reward(contains))
    rates = measured.rates()
    assert (rates["rows"], rates["unjudged"]) == (5, 1)
    for kind in ("false_positive", "false_negative"):
        assert rates[kind]["value"] == 0.5 and rates[kind]["rows"] == 2
        assert 0.05 < rates[kind]["low"] < 0.5 < rates[kind]["high"] < 0.95
    assert measured.rates("a")["false_negative"]["value"] == 0.0
    assert measured.peak_mib > 1 and measured.seconds()["max"] >= measured.seconds()["p50"] >= 0
    text = report([measured], show=2)
    assert "another number" in text and "2 of 3 rows it got wrong" in text


def test_the_command_writes_all_of_it(tmp_path: Path, capsys: Any) -> None:
    path, out = tmp_path / "pairs.jsonl", tmp_path / "audit.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    words = ["audit", "--reward", "exact_match", "--labelled", str(path), "--json", str(out)]
    assert run(words) == 1  # two of three true rows are refused
    assert run([*words, "--max-false-rejects", "0.7"]) == 0
    (found,) = json.loads(out.read_text())
    assert found["rows"] == 5 and found["reward"] == "exact_match"
    assert "false negative" in capsys.readouterr().out


def late(prompt: str, response: str, meta: dict[str, Any]) -> Score:
    return Score(0.0, Outcome.TIMEOUT, "no_verdict")


def test_a_hanging_verifier_is_counted_apart_and_as_a_refusal() -> None:
    """No answer in time: every true row is missed, no false row is accepted."""
    rates = measure(ROWS, resolve_reward(late)).rates()
    assert rates["no_verdict"] == 5 and rates["unjudged"] == 0
    assert rates["false_negative"]["value"] == 1.0 and rates["false_positive"]["value"] == 0.0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--reward", "exact_match", "--labelled", "absent.jsonl"], "does not exist"),
        (["--reward", "exact_mach", "--labelled", "builtin"], "exact_match"),
        (["--reward", "math", "--labelled", "builtin", "--tier", "landlock"], "--tier"),
        (["--reward", "code", "--labelled", "builtin"], "pairs are of mathematics, for math and gsm8k"),
        (["--reward", "math", "--labelled", "builtin", "--against", "code"], "code could judge none of the rows"),
        (["--reward", "math"], "--attack or --labelled"),
        (["--reward", "code", "--attack", "--against", "math"], "--against"),
    ],
)
def test_a_mistake_is_one_message(words: list[str], said: str, tmp_path: Path, capsys: Any) -> None:
    assert run(["audit", *words]) == 2
    lines = capsys.readouterr().err.splitlines(keepends=True)
    message = "".join(line for line in lines if " rows\n" not in line)  # progress, on a machine that is slow
    assert said in message and message.count("\n") == 1


def test_an_invalid_label_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"response": "1", "label": true}\n{"response": "1", "label": "yes"}\n')
    with pytest.raises(ValueError, match=r"line 2.*label"):
        read_labelled(tmp_path / "p.jsonl")


def test_rows_whose_tests_judge_no_answer_are_refused_for_programs_alone(tmp_path: Path, capsys: Any) -> None:
    row = {"statement": "Add.", "response": "def f(x): return x", "label": True}
    rows = [row | {"tests": ["assert f(1) == 1"]}, row | {"tests": ["assert f(1) == 1", "assert f(1) or True"]}]
    path = tmp_path / "programs.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    assert run(["audit", "--reward", "code", "--labelled", str(path)]) == 2
    assert "programs.jsonl: row 2: tests[1] passes for every answer" in capsys.readouterr().err


def test_the_builtin_rows_are_there() -> None:
    assert len(read_labelled("builtin")) >= 400


def test_plain_math_verify_answers_as_a_peer() -> None:
    pytest.importorskip("math_verify", reason="math-verify is not installed")
    from rlvr.audits.peers import math_verify

    assert math_verify("", "so \\boxed{\\frac{1}{2}}", {"answer": "0.5"}).outcome is Outcome.PASSED
    assert math_verify("", "so \\boxed{3}", {"answer": "0.5"}).outcome is Outcome.FAILED
