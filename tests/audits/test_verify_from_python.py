"""`rlvr.verify` and `rlvr.audit`: verdicts and reports of a program's own rows and rewards, without a file."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rlvr
from rlvr.audits.verify_rows import VerifyInterruptedError
from rlvr.cli.main import run

ROWS = [{"prompt": f"{n} + 1?", "response": f"it is {n + 1}", "answer": str(n + 1)} for n in range(20)]
LABELLED = [{**row, "label": True} for row in ROWS] + [{**row, "response": "it is 99", "label": False} for row in ROWS]


verify: Any = rlvr.verify  # for arguments of wrong types
audit: Any = rlvr.audit


def last_word(prompt: str, response: str, meta: dict[str, Any]) -> float:
    return float(response.split()[-1:] == [meta["answer"]])


def test_rows_get_the_verdicts_of_the_command_line(tmp_path: Path) -> None:
    rows = [*ROWS, {"response": None, "answer": "1", "id": "none"}, {"response": "it is 3", "answer": "4", "id": "no"}]
    file, out = tmp_path / "rows.jsonl", tmp_path / "verdicts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["verify", str(file), "--reward", "gsm8k_flexible", "--out", str(out), "--workers", "1"]
    assert run(words) == 1, "a row without a verdict"
    by_command = [json.loads(line) for line in out.read_text().splitlines()]
    for completions, workers in ((rows, None), (file, None), ((row for row in rows), 1)):
        verdicts = rlvr.verify(completions, "gsm8k_flexible", workers=workers)
        for one, other in zip(verdicts, by_command, strict=True):
            line = "line" if completions is file else "row"
            other = {**other, "detail": other["detail"].replace("line", line)} if "detail" in other else other
            assert {**one, "seconds": 0} == {**other, "seconds": 0}
        assert verdicts.counts.outcomes == {"passed": 20, "failed": 1, "invalid": 1}
        assert "20/21" in str(verdicts)


def test_a_reward_may_be_a_function_a_lambda_an_object_or_a_list() -> None:
    def close(prompt: str, response: str, meta: dict[str, Any]) -> float:
        return last_word(prompt, response, meta)

    bound = rlvr.resolve_reward("keyword_contains", keywords=["it"])
    rewards = [close, lambda prompt, response: 1.0, bound, [(close, 0.5), ("keyword_contains", 0.5)]]
    for reward in rewards[:3]:
        assert [one["value"] for one in rlvr.verify(ROWS, reward)] == [1.0] * 20
    mixed = rlvr.verify(ROWS, [(close, 0.75), (lambda prompt, response: 0.0, 0.25)])
    assert [one["value"] for one in mixed] == [0.75] * 20
    assert rlvr.verify(["it is 5", "no"], bound).counts.outcomes == {"passed": 1, "failed": 1}, "texts are completions"
    assert str(rlvr.verify(["it"], bound)).startswith("1 row\n")
    assert rlvr.verify(ROWS, "keyword_contains", options={"keywords": ["no"]}, limit=3).counts.outcomes == {"failed": 3}


def test_ctrl_c_gives_the_verdicts_that_there_are() -> None:
    def stop(prompt: str, response: str, meta: dict[str, Any]) -> float:
        if prompt.startswith("5"):
            raise KeyboardInterrupt
        time.sleep(0.03)
        return 1.0

    with pytest.raises(VerifyInterruptedError, match="5 rows") as stopped:
        rlvr.verify(ROWS, stop)
    assert [one["index"] for one in stopped.value.verdicts] == list(range(5))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: rlvr.verify(ROWS, None), ["verify: reward is missing"]),
        (lambda: rlvr.verify(ROWS, "gsm8k_flexibel"), ["did you mean 'gsm8k_flexible'"]),
        (lambda: rlvr.verify([], last_word), ["verify: completions has no rows"]),
        (lambda: rlvr.verify([3], last_word), ["row 1 of completions is of type int"]),
        (lambda: rlvr.verify({"response": "1"}, last_word), ["one mapping", "list"]),
        (lambda: rlvr.verify("none.jsonl", last_word), ["none.jsonl does not exist"]),
        (lambda: rlvr.verify([{"text": "1"}], last_word), ["completions: the fields 'text'", "with response_field"]),
        (lambda: rlvr.verify(ROWS, "exact_match", response_field="answer"), ["response_field answer", "reference"]),
        (lambda: rlvr.verify(ROWS, last_word, response_field="respons"), ["did you mean 'response'", "'prompt'"]),
        (lambda: verify(ROWS, "math", options=["x"]), ["verify: options=['x']", "by name"]),
        (lambda: rlvr.verify(ROWS, lambda prompt, response: 1.0, workers=2), ["workers=2", "into a module"]),
        (lambda: verify(ROWS, last_word, response_field=3), ["response_field=3", "'response'"]),
        (lambda: rlvr.verify(5, last_word), ["completions is of type int", "or a file"]),
        (lambda: rlvr.verify(ROWS, []), ["verify: the list of rewards is empty"]),
        (lambda: rlvr.verify(ROWS, last_word, workers=0), ["workers=0", "at least 1"]),
        (lambda: rlvr.verify(ROWS, {"name": "math"}), ["reward is a mapping", "options="]),
        (lambda: rlvr.audit(last_word), ["audit: give one of attack or labelled=FILE"]),
        (lambda: rlvr.audit(labelled=LABELLED), ["audit: reward is missing"]),
        (lambda: rlvr.audit(last_word, labelled=ROWS), ["labelled, row 1", "'label' that is true or false"]),
        (lambda: rlvr.audit(last_word, labelled=LABELLED, workers=2), ["workers and categories go with attack"]),
        (lambda: rlvr.audit(last_word, labelled=LABELLED, max_errors=5), ["max_errors=5", "0 to 1"]),
        (lambda: audit(last_word, labelled=LABELLED, max_errors="5"), ["max_errors='5'", "0 to 1"]),
        (lambda: audit(last_word, labelled=LABELLED, against=5), ["audit: a reward is of type int"]),
        (lambda: audit(last_word, labelled=LABELLED, show="all"), ["show='all'", "a whole number"]),
        (lambda: rlvr.audit(last_word, labelled=LABELLED, allow="case"), ["allow=['case']"]),
        (lambda: rlvr.audit(env="gsm8k"), ["env='gsm8k'", "reasoning_gym"]),
        (lambda: rlvr.audit("code", attack=True, against="math"), ["against goes with labelled"]),
    ],
)
def test_a_mistake_is_named_with_the_argument(call: Callable[[], Any], said: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        call()
    assert all(words in str(error.value) for words in said), error.value
    assert "--" not in str(error.value), "options are of the command line"


def test_an_audit_of_a_function_of_the_program_reports_what_the_command_prints(tmp_path: Path) -> None:
    def close(prompt: str, response: str, meta: dict[str, Any]) -> float:
        return float(meta["answer"] in response)

    report = rlvr.audit(close, labelled=LABELLED, quiet=True)
    assert report.failed and {"begins", "among"} <= set(report.data[0]["faults"]), "it accepts 12 for 1"
    assert "allowed by allow=NAME" in str(report) and "close is of this program alone" in str(report)
    allowed = list(report.data[0]["faults"])
    assert rlvr.audit(close, labelled=LABELLED, allow=allowed, quiet=True).failed, "it accepts 99 for 9"
    assert not rlvr.audit(close, labelled=LABELLED, allow=allowed, max_false_accepts=0.1, quiet=True).failed
    assert json.loads(report.write(tmp_path / "audit.json").read_text()) == json.loads(json.dumps(report.data))
    with pytest.raises(FileNotFoundError, match=r"no folder for audit.json; make it first.*none'"):
        report.write(tmp_path / "none" / "audit.json")


SCRIPT = """
import rlvr

rows = [{"response": "4", "answer": "4"}, {"response": "5", "answer": "4"}]
print(rlvr.verify(rows, "exact_match", workers=2).counts.outcomes["passed"])
labelled = [{**row, "label": row["response"] == "4"} for row in rows]
print(rlvr.audit("math", labelled=labelled, quiet=True).data[0]["accuracy"]["value"])


@rlvr.register_reward("mine")
def mine(prompt, response, meta):
    return 1.0


try:
    rlvr.verify(rows, "mine", workers=2)
except ValueError as error:
    print("into a module" in str(error))
"""


@pytest.mark.slow
def test_a_script_without_a_main_guard_may_start_processes(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.split() == ["1", "1.0", "True"], done.stderr
