"""The tracker of Weights & Biases in its offline mode: what `wandb sync` would send, and what goes wrong.

W&B runs a process of its own and keeps settings for the life of ours, so each attempt is a process.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.kit.packages import need_package
from tests.kit.tiny_run import TINY
from tests.kit.wandb_server import WandbServer

need_package("wandb", "wandb is not installed")

ROOT = Path(__file__).parents[2]
ESTIMATE = {"value": 0.25, "low": 0.2, "high": 0.3}
BETTER = {"value": 0.5, "low": 0.4, "high": 0.6}
SUMMARY = {"baseline": {"pass@1": ESTIMATE}, "final": {"pass@1": BETTER}, "p_value": 0.01, "mode": "rlvr"}
SCRIPT = """
import json, sys
from pathlib import Path
from rlvr.tracking.trackers import Trackers, TrackingOptions
given = json.loads(sys.argv[1])
options = TrackingOptions(wandb=True, **given.get("options", {}))
folder, config = Path(given["folder"]), given.get("config", {"seed": 3, "model": {"name": "${oc.env:MY_MODEL}"}})
trackers = Trackers(options, folder, "mine", config, lambda text: print("warning:", text), say=print)
kept = [{"phase": "rl", "step": step, "reward": step / 10} for step in range(given.get("kept", 0))]
stops = {"killed": KeyboardInterrupt, "failed": RuntimeError}
with trackers.running(kept) as running:
    for step in range(*given["steps"]):
        running.log("rl", step, {"reward": step / 10, "reward/min": -1})
    if given.get("end") in stops:
        raise stops[given["end"]]
    if given.get("summary"):
        running.finish(given["summary"])
"""


def attempt(folder: Path, *steps: int, env: dict[str, str] | None = None, **given: Any) -> str:
    """One attempt at a run in a process of its own; what it printed, its own traceback of a planned end left out."""
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps({"folder": str(folder), "steps": steps, **given})],
        capture_output=True, text=True, timeout=120, cwd=folder, env=environment(folder, **(env or {})),
    )  # fmt: skip
    assert (done.returncode == 0) == ("end" not in given), done.stderr
    assert "end" in given or done.stderr == "", done.stderr
    return done.stdout


def environment(home: Path, **more: str) -> dict[str, str]:
    """Offline, with no account, and with a home of its own."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    return {
        **kept,
        "HOME": str(home),
        "NETRC": str(home / "none"),
        "PYTHONPATH": str(ROOT),
        "WANDB_MODE": "offline",
        **more,
    }


def folders(run: Path) -> list[Path]:
    """The offline folders of a run, in the order of their attempts."""
    return sorted((run / "wandb").glob("offline-run-*"), key=lambda path: path.stat().st_mtime_ns)


def read_records(folder: Path) -> Iterator[Any]:
    """The records of an offline folder: W&B's own messages in the log format of LevelDB, after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    [file] = folder.glob("*.wandb")
    content, place, whole = file.read_bytes(), 7, b""
    assert content[:4] == b":W&B"
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:  # the padding at the end of a block
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + 7])
        whole += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(whole)
            whole = b""


def read_history(folder: Path) -> list[dict[str, Any]]:
    rows = [record.history for record in read_records(folder) if record.WhichOneof("record_type") == "history"]
    return [
        {
            **{(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in row.item},
            "n": row.step.num,
        }
        for row in rows
    ]


def read_steps(folder: Path) -> list[tuple[int, int, float]]:
    """(number, step, reward) of every row of reinforcement learning."""
    return [(row["n"], row["rl/step"], row["rl/reward"]) for row in read_history(folder) if "rl/step" in row]


def expected_steps(steps: Sequence[int]) -> list[tuple[int, int, float]]:
    return [(step, step, step / 10) for step in steps]


def run_id(folder: Path) -> str:
    """The run's id in the records; the folder's name also has a number when two attempts begin in one second."""
    [run] = [record.run for record in read_records(folder) if record.WhichOneof("record_type") == "run"]
    return run.run_id


def exit_code(folder: Path) -> int:
    [end] = [record.exit for record in read_records(folder) if record.WhichOneof("record_type") == "exit"]
    return end.exit_code


def test_the_rows_the_settings_and_the_summary_are_there(tmp_path: Path) -> None:
    said = attempt(tmp_path / "mine", 3, summary=SUMMARY, options={"experiment": "sums", "wandb_tags": ["a", "b"]})
    [folder] = folders(tmp_path / "mine")
    assert said == f"Weights & Biases: offline; later `wandb sync {folder}`\n"
    records = list(read_records(folder))
    [run] = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.display_name, list(run.tags)) == ("sums", "mine", ["a", "b"])
    assert run.run_id == json.loads((tmp_path / "mine" / "wandb.json").read_text())["run_id"]
    settings = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert settings["seed"] == 3 and settings["model"] == {"name": "${oc.env:MY_MODEL}"}
    assert read_steps(folder) == expected_steps(range(3))
    axes = {(m.glob_name or m.name): m.step_metric for r in records if (m := r.metric) and m.step_metric}
    assert axes == {"rl/*": "rl/step"}
    [shown] = [row["results/path"] for row in read_history(folder) if "results/path" in row]
    table = json.loads((folder / "files" / shown).read_text())
    assert table["columns"] == ["metric", "baseline", "trained", "change"]
    assert table["data"] == [["Pass Rate (pass@1)", "25.0% [20.0, 30.0]", "50.0% [40.0, 60.0]", "+25.0pp"]]
    numbers = {
        (item.key or "/".join(item.nested_key)): json.loads(item.value_json)
        for record in records
        for item in record.summary.update
    }
    assert numbers["summary/final/pass@1"] == 0.5 and numbers["summary/p_value"] == 0.01
    assert exit_code(folder) == 0


def test_the_settings_have_no_secret_and_no_folder_of_this_machine(tmp_path: Path) -> None:
    secret = {"api_key": "hunter2", "url": "https://me:hunter2@host/v1?key=hunter2", "path": "/home/hunter2/rows.jsonl"}
    attempt(tmp_path / "mine", 1, config={"env": secret})
    [run] = [r.run for r in read_records(folders(tmp_path / "mine")[0]) if r.WhichOneof("record_type") == "run"]
    settings = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert settings["env"] == {"api_key": "***", "url": "https://***@host/v1?***", "path": ".../rows.jsonl"}
    files = [path for path in (tmp_path / "mine").rglob("*") if path.is_file()]
    assert files and not [path for path in files if b"hunter2" in path.read_bytes()]


@pytest.mark.slow
def test_nothing_of_the_command_line_is_sent(tmp_path: Path) -> None:
    """It may hold a key; here it holds the script's argument with a word of its own."""
    attempt(tmp_path / "mine", 1, config={"seed": 1}, unused="hunter2")
    files = [path for path in (tmp_path / "mine").rglob("*") if path.is_file()]
    assert files and not [path for path in files if b"hunter2" in path.read_bytes()]


@pytest.mark.slow
def test_a_resumed_run_has_the_same_id_and_every_row_once(tmp_path: Path) -> None:
    """Killed after step 4, the checkpoint stood at 2; the newest folder is the whole run."""
    attempt(tmp_path / "mine", 5, end="killed")
    attempt(tmp_path / "mine", 3, 7, kept=3)
    first, second = folders(tmp_path / "mine")
    assert run_id(first) == run_id(second)
    assert read_steps(first) == expected_steps(range(5)) and read_steps(second) == expected_steps(range(7))
    assert exit_code(first) == 255


@pytest.mark.slow
def test_a_server_gets_every_row_of_a_resumed_run_once(tmp_path: Path) -> None:
    """Over HTTP: the second attempt asks how far the run is there, and sends what is missing."""
    server = WandbServer()
    env = {"WANDB_MODE": "online", "WANDB_BASE_URL": server.url, "WANDB_API_KEY": "k" * 40}
    try:
        attempt(tmp_path / "mine", 5, end="killed", env=env)
        attempt(tmp_path / "mine", 3, 7, kept=3, env=env)
    finally:
        server.close()
    [(run, lines)] = server.history.items()
    rows = [json.loads(line) for line in lines]
    assert [(row["_step"], row["rl/step"], row["rl/reward"]) for row in rows] == expected_steps(range(7))
    assert run == json.loads((tmp_path / "mine" / "wandb.json").read_text())["run_id"]
    assert server.exit_codes[run] == [255, 0] and server.configs[run]["seed"] == {"value": 3}


@pytest.mark.slow
def test_a_failure_and_another_config_are_told_apart(tmp_path: Path) -> None:
    attempt(tmp_path / "mine", 1, end="failed")
    attempt(tmp_path / "mine", 1, config={"seed": 4})
    first, second = folders(tmp_path / "mine")
    assert exit_code(first) == 1
    assert run_id(first) != run_id(second)


@pytest.mark.slow
def test_the_project_of_the_environment_counts_where_the_config_has_none(tmp_path: Path) -> None:
    attempt(tmp_path / "mine", 1, env={"WANDB_PROJECT": "theirs"})
    [run] = [r.run for r in read_records(folders(tmp_path / "mine")[0]) if r.WhichOneof("record_type") == "run"]
    assert run.project == "theirs"


def test_no_account_is_a_mistake_that_is_said_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    command = [sys.executable, "-m", "rlvr", "train", "--config=tiny.yaml", "tracking.wandb=true"]
    env = environment(tmp_path, WANDB_MODE="online")
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, stdin=subprocess.DEVNULL)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "tracking.wandb=true" in done.stderr and "wandb login" in done.stderr and "WANDB_MODE=offline" in done.stderr


def test_a_missing_library_names_the_extra() -> None:
    script = """
import sys
sys.modules["wandb"] = None  # Python then raises ImportError
from pathlib import Path
from rlvr.tracking.trackers import Trackers, TrackingOptions
try:
    Trackers(TrackingOptions(wandb=True), Path("."), "mine", {}, print)
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment(Path()))
    assert "tracking.wandb=true" in done.stdout and "pip install 'rlvr[wandb]'" in done.stdout, done.stderr


@pytest.mark.slow
def test_a_server_that_is_not_there_does_not_stop_the_run(tmp_path: Path) -> None:
    began = time.monotonic()
    env = {"WANDB_MODE": "online", "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "k" * 40}
    first, last = attempt(tmp_path / "mine", 3, env=env).splitlines()
    assert first.startswith("warning: Weights & Biases failed (") and "training goes on" in first
    assert last == "warning: Weights & Biases did not get the last 3 steps; metrics.jsonl has them"
    assert time.monotonic() - began < 60


@pytest.mark.slow
def test_a_whole_run_is_tracked(tmp_path: Path) -> None:
    """Its own settings, its fine-tuning on an axis of its own, and its results."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    command = [sys.executable, "-m", "rlvr", "train", "--config=tiny.yaml", "report_to=wandb", "project=sums"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment(tmp_path))
    assert done.returncode == 0, done.stderr
    [folder] = folders(tmp_path / "runs" / "tiny")
    assert f"wandb sync {folder.relative_to(tmp_path)}" in done.stdout or str(folder) in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()]
    history = read_history(folder)
    for number, row in enumerate(rows):
        sent = next(h for h in history if h["n"] == number)
        named = {f"{row['phase']}/{k}": v for k, v in row.items() if k != "phase"}
        assert {k: sent[k] for k in named} == named
    assert [h["n"] for h in history if "results/path" in h] == [len(rows)]
