"""`rlvr study` as a user meets it: real processes that fail, are stopped and are killed; the same command continues."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rlvr
from rlvr.audits.process_tree import read_processes
from rlvr.cli.main import run
from rlvr.studies.study_report import study_table
from rlvr.studies.study_summary import summarize
from rlvr.training.journal import lock_folder
from tests.kit.study_runs import MOCK, make_runs, planned, studied

LONG = ("training.steps=100", "run.checkpoint_every=1")  # seconds, so that it can be stopped in the middle


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with mock.yaml; its runs use this code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(rlvr.__file__).parents[1]))
    (tmp_path / "mock.yaml").write_text(MOCK)
    return tmp_path


def start(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rlvr", *studied(*words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(what: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 120
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def events(place: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / "journal.jsonl").read_text().splitlines()]


def steps(place: Path) -> int:
    rows = place / "metrics.jsonl"
    return rows.read_text().count("\n") if rows.exists() else 0


def weights(place: Path) -> str:
    return json.loads((place / "summary.json").read_text())["weights_sha256"]


def calm_weights(seed: int, *words: str) -> str:
    """The weights of the same run by `rlvr train`, never disturbed."""
    assert run(["train", "--config=mock.yaml", *words, f"seed={seed}", f"run.name=calm-{seed}"]) == 0
    return weights(Path("runs") / f"calm-{seed}")


def test_a_run_that_another_process_works_at_is_waited_for(folder: Path, capfd: Any) -> None:
    """Its lock says so: the study starts nothing in its folder and can be stopped meanwhile; later it goes on."""
    plan = planned("seeds=1")
    make_runs(plan)
    place = folder / "runs" / "mock-study" / "seed-1"
    (place / "summary.json").rename(folder / "kept.json")
    with lock_folder(place):
        study = start("seeds=1")
        assert study.stdout is not None
        lines: list[str] = []
        for line in study.stdout:
            lines.append(line)
            if "running in another process" in line:
                break
        study.send_signal(signal.SIGINT)
        said = "".join(lines) + study.communicate(timeout=60)[0]
        assert study.returncode == 130
        assert "still running in another process" in said and not (folder / "runs/mock-study/logs/seed-1.log").exists()
    (folder / "kept.json").rename(place / "summary.json")
    assert run(studied("seeds=1")) == 0


WATCHING = """
class Watch:
    def __init__(self, limit=1):
        self.limit = limit

    def on_step(self, phase, step, metrics):
        return {"watch/limit": 10 / self.limit}
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_callbacks_of_a_study_are_called_in_every_run_and_may_be_corrected(folder: Path, capfd: Any) -> None:
    """As those of a run: the same study goes on with a callback that has been given other options."""
    Path("watching.py").write_text(WATCHING)
    words = ["seeds=1,2", "training.steps=1"]
    callback = "callbacks=[{{name: 'watching:Watch', kwargs: {{limit: {}}}}}]"
    assert run(studied(*words, callback.format(0))) == 1
    told = capfd.readouterr()
    assert "callback Watch: on_step raised ZeroDivisionError" in told.out + told.err
    assert run(studied(*words, callback.format(2))) == 0
    for seed in (1, 2):
        rows = (folder / "runs" / "mock-study" / f"seed-{seed}" / "metrics.jsonl").read_text().splitlines()
        assert "watch/limit" not in json.loads(rows[0]) or json.loads(rows[0])["watch/limit"] == 5
        assert (folder / "runs" / "mock-study" / f"seed-{seed}" / "summary.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_study_grows_by_seeds_and_its_runs_are_those_of_rlvr_train(folder: Path, capfd: Any) -> None:
    assert run(studied("seeds=1..2")) == 0
    first = (folder / "runs/mock-study/seed-1/journal.jsonl").read_bytes()
    capfd.readouterr()
    assert run(studied("seeds=1..3")) == 0
    said = capfd.readouterr().out
    assert "3 of 3 runs finished" in said and "study: 3 runs, 2 done before" in said
    assert (folder / "runs/mock-study/seed-1/journal.jsonl").read_bytes() == first
    assert weights(folder / "runs/mock-study/seed-3") == calm_weights(3)
    assert "rl: 5 steps" in (folder / "runs/mock-study/logs/seed-3.log").read_text()


JUDGE = """
import os, signal

def judge(prompt, response, meta=None):
    if os.environ["BREAK"] == "error":
        raise RuntimeError("the verifier is out of order")
    if os.environ["BREAK"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return float("answer" in response)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_runs_that_fail_are_said_and_tried_again_while_the_others_go_on(folder: Path, capfd: Any) -> None:
    """One stops with an error, one is killed by a signal: exit code 1, the reasons in the table; then mended."""
    (folder / "verdicts.py").write_text(JUDGE)
    words = studied("seeds=1", "reward.type=verdicts:judge", "reward.kwargs={}", "--environment", "BREAK=error,kill,no")
    assert run(words) == 1
    said = capfd.readouterr().out
    assert "1 of 3 runs finished" in said and "killed by SIGKILL" in said
    assert any("failed: " in line and "out of order" in line for line in said.splitlines())
    kept = json.loads((folder / "runs/mock-study/summary.json").read_text())
    assert [found["state"] for found in kept["runs"]] == ["failed", "failed", "finished"]
    assert "out of order" in kept["runs"][0]["reason"]
    (folder / "verdicts.py").write_text(JUDGE.replace('os.environ["BREAK"]', '"no"'))
    assert run(words) == 0
    assert "3 of 3 runs finished" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_reason_of_a_failed_run_survives_a_kill_of_the_study(folder: Path) -> None:
    """The first run fails, the study is killed in the second, and its tables are lost: the next command knows why."""
    (folder / "verdicts.py").write_text(JUDGE)
    words, variable = ["seeds=1", "reward.type=verdicts:judge", "reward.kwargs={}", *LONG], "BREAK=error,no"
    place = folder / "runs" / "mock-study"
    study = start(*words, "--environment", variable, "--jobs", "1")
    wait_for(lambda: any(steps(run_folder) for run_folder in place.glob("*no_seed-1")))
    children = [pid for pid, process in read_processes().items() if process.parent == study.pid]
    study.kill()
    study.communicate(timeout=60)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    for file in ("table.md", "summary.json"):
        (place / file).unlink()
    table = study_table(summarize(planned(*words, environment=(variable,))))
    assert any("failed: " in line and "out of order" in line for line in table.splitlines())
    assert any("not finished" in line for line in table.splitlines())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ctrl_c_stops_the_runs_cleanly_and_the_same_command_goes_on(folder: Path) -> None:
    """Exit code 130, every run saved what it did, and the rerun ends with the bits of an undisturbed one."""
    places = [folder / "runs" / "mock-study" / f"seed-{seed}" for seed in (1, 2)]
    study = start("seeds=1..3", *LONG, "--jobs", "2")
    wait_for(lambda: all(steps(place) >= 5 for place in places))
    study.send_signal(signal.SIGINT)
    said = study.communicate(timeout=60)[0]
    assert study.returncode == 130, said
    assert "same command" in said and "Traceback" not in said and said.count("not finished") == 3
    for place in places:
        assert 5 <= steps(place) < 100 and events(place)[-1]["event"] == "checkpoint"
        assert "stopped; the same command" in (place.parent / "logs" / f"{place.name}.log").read_text()
    assert run(studied("seeds=1..3", *LONG)) == 0
    assert [weights(place) for place in places] == [calm_weights(1, *LONG), calm_weights(2, *LONG)]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("together", [False, True], ids=["the study alone", "its runs too"])
def test_a_killed_study_is_continued_by_the_same_command(folder: Path, together: bool) -> None:
    """Runs that outlive it are waited for and not started twice; killed ones resume; both end with the same bits."""
    places = [folder / "runs" / "mock-study" / f"seed-{seed}" for seed in (1, 2)]
    study = start("seeds=1..2", *LONG, "--jobs", "2")
    wait_for(lambda: all(steps(place) >= 5 for place in places))
    children = [pid for pid, process in read_processes().items() if process.parent == study.pid]
    assert len(children) == 2
    study.kill()
    study.communicate(timeout=60)
    for pid in children if together else ():
        os.kill(pid, signal.SIGKILL)
    assert run(studied("seeds=1..2", *LONG, "--jobs", "2")) == 0
    attempts = [[event["event"] for event in events(place)].count("run") for place in places]
    assert attempts == ([2, 2] if together else [1, 1])
    assert [weights(place) for place in places] == [calm_weights(1, *LONG), calm_weights(2, *LONG)]
