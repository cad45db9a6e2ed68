"""`rlvr verify`: every row gets one verdict in its place, bad rows included, and a killed command goes on."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlvr.audits.completion_rows import ROW_BYTES
from rlvr.cli.main import run

REWARDS = """
import time
def exact(prompt, response, meta=None):
    return float(response == meta["gold"])
def slow(prompt, response, meta=None):
    time.sleep(0.05)
    return float(response == meta["gold"])
def keyed(prompt, response, meta=None, key=""):
    return float(response == meta["gold"])
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "verify_rewards.py").write_text(REWARDS)
    rows = [{"id": f"r{i}", "response": str(i % 3), "gold": "1"} for i in range(60)]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def verdicts(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


EXACT = ["--reward", "verify_rewards:exact", "--workers", "1"]


def test_every_row_gets_a_verdict_in_its_place(folder: Path, capsys: Any) -> None:
    assert run(["verify", "answers.jsonl", *EXACT, "--out", "v.jsonl"]) == 0
    found = verdicts(folder / "v.jsonl")
    assert [row["index"] for row in found] == list(range(60)) and found[7]["id"] == "r7"
    assert [row["outcome"] for row in found[:3]] == ["failed", "passed", "failed"]
    said = capsys.readouterr().err
    assert "'response'" in said and "passed 20/60 = 33.33%" in said


def test_a_json_list_in_gzip_and_an_invalid_row(folder: Path) -> None:
    rows: list[Any] = [{"response": "1", "gold": "1"}, 5, {"gold": "1"}, {"response": "0", "gold": "1"}]
    with gzip.open(folder / "list.json.gz", "wt") as file:
        json.dump(rows, file)
    assert run(["verify", "list.json.gz", *EXACT, "--out", "v.jsonl"]) == 1
    found = verdicts(folder / "v.jsonl")
    assert [row["outcome"] for row in found] == ["passed", "invalid", "invalid", "failed"]
    assert found[1]["reason"] == found[2]["reason"] == "bad_row" and found[1]["value"] is None


def test_a_file_of_which_nothing_could_be_judged_is_a_failure(folder: Path) -> None:
    (folder / "none.jsonl").write_text('{"gold": "1"}\n{"gold": "2"}\n')
    assert run(["verify", "none.jsonl", *EXACT, "--response-field", "said", "--out", "v.jsonl"]) == 1
    assert [row["reason"] for row in verdicts(folder / "v.jsonl")] == ["bad_row", "bad_row"]


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ([], 1, "above --max-errors: 25.00% of the rows, at most 0% are allowed"),
        (["--max-errors", "0.24"], 1, "at most 24% are allowed"),
        (["--max-errors", "0.25"], 0, ""),
        (["--max-errors", "1", "--min-pass-rate", "0.66"], 0, ""),
        (
            ["--max-errors", "1", "--min-pass-rate", "0.67"],
            1,
            "below --min-pass-rate: 66.67% of the judged rows passed, 67% are needed",
        ),
    ],
)
def test_the_exit_code_follows_the_thresholds(
    folder: Path, options: list[str], code: int, said: str, capsys: Any
) -> None:
    good, bad = ({"response": text, "gold": "1"} for text in "10")
    (folder / "four.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (good, good, bad, {"gold": "1"})))
    command = ["verify", "four.jsonl", *EXACT, "--out", "v.jsonl", *options]
    for _ in range(2):  # the second time from the file of verdicts
        assert run(command) == code
        err = capsys.readouterr().err
        assert said in err and ("--m" in err) == bool(said), err
    assert len(verdicts(folder / "v.jsonl")) == 4


def test_a_torn_last_row_is_graded_again_and_the_rest_kept(folder: Path, capsys: Any) -> None:
    command = ["verify", "answers.jsonl", *EXACT, "--out", "v.jsonl"]
    assert run([*command, "--limit", "20"]) == 0
    before = (folder / "v.jsonl").read_bytes()
    (folder / "v.jsonl").write_bytes(before[:-10])
    assert run(command) == 0
    assert (folder / "v.jsonl").read_bytes().startswith(before[: before[:-10].rindex(b"\n")])
    assert [row["index"] for row in verdicts(folder / "v.jsonl")] == list(range(60))
    assert "19 of them graded before" in capsys.readouterr().err


def start_command(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """The command in a process of its own, once it has written its first rows."""
    env = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}:{folder}"}
    process = subprocess.Popen([sys.executable, "-m", "rlvr.cli.main", *words], env=env, stderr=subprocess.DEVNULL)
    out, deadline = folder / "v.jsonl", time.monotonic() + 60
    while not (out.exists() and out.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.02)
    return process


def without_times(path: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in verdicts(path)]


@pytest.mark.slow
@pytest.mark.parametrize(("stop", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_stopped_command_goes_on_to_the_same_output(folder: Path, stop: int, code: int, workers: str) -> None:
    """After kill -9 or Ctrl-C whole rows are kept, and the same command ends with what an undisturbed one writes."""
    command = ["verify", "answers.jsonl", "--reward", "verify_rewards:slow", "--workers", workers, "--out", "v.jsonl"]
    process = start_command(folder, *command)
    process.send_signal(stop)
    assert process.wait(30) == code
    text = (folder / "v.jsonl").read_text()
    kept = text.count("\n")
    assert 0 < kept < 60
    assert run(command) == 0
    assert (folder / "v.jsonl").read_text().startswith(text[: text.rindex("\n") + 1])
    assert run(["verify", "answers.jsonl", *EXACT, "--out", "undisturbed.jsonl"]) == 0
    assert without_times(folder / "v.jsonl") == without_times(folder / "undisturbed.jsonl")


@pytest.mark.slow
def test_a_row_that_is_too_long_is_bad_and_costs_no_memory(folder: Path) -> None:
    """A line without end is passed over in pieces; the rows around it are graded."""
    good = json.dumps({"response": "1", "gold": "1"})
    (folder / "long.jsonl").write_text(f"{good}\n{{{'x' * ROW_BYTES}\n{good}\n{' ' * ROW_BYTES + ' '}\n{good}")
    assert run(["verify", "long.jsonl", *EXACT, "--out", "v.jsonl"]) == 1
    found = verdicts(folder / "v.jsonl")
    assert [row["outcome"] for row in found] == ["passed", "invalid", "passed", "invalid", "passed"]
    assert "longer than" in found[1]["detail"]


def test_different_options_are_detected_without_storing_them(folder: Path, capsys: Any) -> None:
    """An option may be the key of an endpoint."""
    command = ["verify", "answers.jsonl", "--reward", "verify_rewards:keyed", "--workers", "1", "--out", "v.jsonl"]
    assert run([*command, "--reward-option", "key=sesame-42"]) == 0
    assert "sesame-42" not in (folder / "v.jsonl.origin.json").read_text() + (folder / "v.jsonl").read_text()
    assert run([*command, "--reward-option", "key=another"]) == 2
    assert "different value of: options" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["answers.jsonl", "--reward", "verify_rewards:slow", "--out", "v.jsonl"], "different value of: reward"),
        (["absent.jsonl", *EXACT], "does not exist"),
        (["verify_rewards.py", *EXACT], "no usable row"),
        (["answers.jsonl", *EXACT, "--out", "answers.jsonl"], "the file of completions itself"),
        (["answers.jsonl", *EXACT, "--out", "verify_rewards.py"], "no output of this command"),
        (["answers.jsonl", *EXACT, "--max-errors", "5"], "--max-errors 5, expected a share from 0 to 1"),
        (["answers.jsonl", *EXACT, "--min-pass-rate", "nan"], "--min-pass-rate nan, expected a share"),
        (["answers.jsonl", *EXACT, "--response-field", "respnse", "--reward-option", "x"], "expected key=value"),
    ],
)
def test_a_mistake_is_one_message(folder: Path, words: list[str], said: str, capsys: Any) -> None:
    assert run(["verify", "answers.jsonl", *EXACT, "--out", "v.jsonl", "--limit", "3"]) == 0
    capsys.readouterr()
    assert run(["verify", *words]) == 2
    message = capsys.readouterr().err
    assert said in message and "Traceback" not in message


def test_rows_of_programs_are_run_against_their_tests(folder: Path) -> None:
    row = {"text": "Add.", "code": "def add(a, b):\n    return a + b", "task_id": 4, "test_setup_code": ""}
    rows = [{**row, "test_list": [f"assert add(1, 2) == {due}"]} for due in (3, 4)]
    (folder / "mbpp.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(["verify", "mbpp.jsonl", "--reward", "code", "--out", "v.jsonl"]) == 0
    assert [row["outcome"] for row in verdicts(folder / "v.jsonl")] == ["passed", "failed"]


def test_the_interval_is_wilsons_and_wider_where_answers_share_a_task(folder: Path, capsys: Any) -> None:
    """30 rows of 60 passed: alone they are 60 facts; as 20 answers each to three tasks, three."""
    rows = [{"response": str(i % 2), "gold": "1"} for i in range(60)]
    tasks = [{"id": i, "task_id": f"t{i // 20}", "response": str(int(i < 30)), "gold": "1"} for i in range(60)]
    for name, written in (("alone", rows), ("shared", tasks)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
        assert run(["verify", f"{name}.jsonl", *EXACT, "--out", f"{name}-v.jsonl"]) == 0
    said = capsys.readouterr().err
    assert "passed 30/60 = 50.00% [37.74, 62.26]\n" in said  # Wilson's, by hand
    assert "passed 30/60 = 50.00% [12.53, 87.47]; answers to 3 tasks" in said  # a design effect of 20, so three rows
    assert verdicts(folder / "shared-v.jsonl")[25] == {
        **verdicts(folder / "shared-v.jsonl")[25], "index": 25, "id": 25, "task": "t1",
    }  # fmt: skip
    assert run(["verify", "shared.jsonl", *EXACT, "--out", "shared-v.jsonl"]) == 0  # all of it read back
    assert "[12.53, 87.47]; answers to 3 tasks" in capsys.readouterr().err


def test_fewer_rows_than_are_graded_is_refused(folder: Path, capsys: Any) -> None:
    command = ["verify", "answers.jsonl", *EXACT, "--out", "v.jsonl"]
    assert run(command) == 0
    before = (folder / "v.jsonl").read_bytes()
    capsys.readouterr()
    assert run([*command, "--limit", "20"]) == 2
    said = capsys.readouterr().err
    assert "has 60 verdicts already, more than --limit 20" in said and "passed" not in said
    assert (folder / "v.jsonl").read_bytes() == before
    assert run([*command, "--limit", "60"]) == 0


def test_a_bad_row_names_its_line_of_the_file(folder: Path) -> None:
    """Blank lines count, as in an editor, and JSON's own "line 1" is not repeated."""
    good = json.dumps({"response": "1", "gold": "1"})
    (folder / "gaps.jsonl").write_text(f'\n{good}\n\n{{"response": 1x}}\n[2]\n{{"response": 5}}\n{{"gold": 1}}\n')
    assert run(["verify", "gaps.jsonl", *EXACT, "--out", "v.jsonl"]) == 1
    assert [row.get("detail", "") for row in verdicts(folder / "v.jsonl")] == [
        "",
        "line 4 is not JSON (Expecting ',' delimiter at character 15)",
        "line 5 is of type list, expected an object",
        "line 6: the field 'response' holds no text (int)",
        "line 7: the field 'response' holds no text (missing)",
    ]


@pytest.mark.parametrize("reward", ["math", "gsm8k", 'composite;rewards=[{"name": "exact_match"}]'])
def test_the_gold_is_not_taken_for_the_answer(folder: Path, reward: str, capsys: Any) -> None:
    (folder / "gold.jsonl").write_text(json.dumps({"answer": "4", "said": "4"}) + "\n")
    name, _, option = reward.partition(";")
    command = ["verify", "gold.jsonl", "--reward", name, "--workers", "1", "--out", "v.jsonl"]
    command += ["--reward-option", option] if option else []
    assert run([*command, "--response-field", "answer"]) == 2
    assert "takes the reference answer from that field" in capsys.readouterr().err and not (folder / "v.jsonl").exists()
    assert run([*command, "--response-field", "said"]) == 0
    assert [row["outcome"] for row in verdicts(folder / "v.jsonl")] == ["passed"]


def test_a_field_named_answer_is_graded_where_the_gold_is_elsewhere(folder: Path) -> None:
    (folder / "mine.jsonl").write_text(json.dumps({"answer": "1", "gold": "1"}) + "\n")
    assert run(["verify", "mine.jsonl", *EXACT, "--response-field", "answer", "--out", "v.jsonl"]) == 0
    assert [row["outcome"] for row in verdicts(folder / "v.jsonl")] == ["passed"]
