"""`rlvr.study`: seeds and values of one training from a program, in its own process or in others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rlvr
from rlvr.config.compose import load, to_word
from rlvr.studies.study_runner import StudyInterruptedError

TOY: dict[str, Any] = {
    "data": "toy", "client": "mock", "steps": 2, "max_tokens": 8, "prompts_per_step": 2, "group_size": 2,
    "evaluation": {"tasks": 4, "samples": 2}, "quiet": True,
}  # fmt: skip


study: Any = rlvr.study  # for arguments of wrong types


def has_answer(prompt: str, response: str, meta: dict[str, Any]) -> float:
    return float("answer" in response)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_a_study_of_a_lambda_is_made_in_this_process_and_more_seeds_and_values_extend_it() -> None:
    reward = lambda prompt, response: float("answer" in response)  # noqa: E731
    found = rlvr.study(reward=reward, seeds=[1, 2], compare={"learning_rate": [0.01]}, **TOY)
    assert found.is_finished and not found.failed and repr(found).endswith("2 of 2 runs finished>")
    begun = (found.folder / "learning_rate-0.01_seed-1" / "metrics.jsonl").stat().st_mtime_ns
    more = rlvr.study(reward=reward, seeds=range(1, 4), compare={"learning_rate": [0.01, 0.1]}, **TOY)
    assert more.folder == found.folder, "it is named by everything but seeds and values"
    assert {name: len(runs) for name, runs in more.runs.items()} == {"learning_rate=0.01": 3, "learning_rate=0.1": 3}
    assert (found.folder / "learning_rate-0.01_seed-1" / "metrics.jsonl").stat().st_mtime_ns == begun
    rates = [run.settings["training"]["optimizer"]["learning_rate"] for run in more.runs["learning_rate=0.1"]]
    assert rates == [0.1] * 3 and [run.settings["seed"] for run in more.runs["learning_rate=0.1"]] == [1, 2, 3]
    assert "learning_rate=0.1 minus learning_rate=0.01, seed by seed" in str(more)
    assert more.plot().exists() and more.plot_metric("reward", "r.svg").exists() and "<img" in more._repr_html_()


@pytest.mark.slow
def test_a_run_of_a_study_has_the_bits_of_rlvr_train_and_of_the_command() -> None:
    named = {"type": "keyword_contains", "kwargs": {"keywords": ["answer"]}}
    here = rlvr.study(reward=[(has_answer, 1.0), (lambda prompt, response: 0.0, 1.0)], seeds=[3], name="here", **TOY)
    alone = rlvr.train(reward=[(has_answer, 1.0), (lambda prompt, response: 0.0, 1.0)], seed=3, name="alone", **TOY)
    assert here.runs["run"][0].summary["weights_sha256"] == alone.summary["weights_sha256"]
    away = rlvr.study(reward=named, seeds="3", name="away", **TOY)
    assert not away.failed
    single = rlvr.train(reward=named, seed=3, name="single", **TOY)
    assert away.runs["run"][0].summary["weights_sha256"] == single.summary["weights_sha256"]


@pytest.mark.slow
def test_rewards_are_compared_by_their_names_or_by_labels() -> None:
    def strict(prompt: str, response: str, meta: dict[str, Any]) -> float:
        return float(response == "answer")

    found = rlvr.study(seeds=[1], compare={"reward": [has_answer, strict, lambda prompt, response: 1.0]}, **TOY)
    assert list(found.runs) == ["reward=has_answer", "reward=strict", "reward=<lambda>"]
    after = {variant["variant"]: variant["after"]["mean"] for variant in found.summary["variants"]}
    assert after["reward=<lambda>"] == 1.0 and after["reward=strict"] == 0.0
    with pytest.raises(ValueError, match=r"folder of a study.*rlvr\.Study"):
        rlvr.load_run(found.folder)
    assert rlvr.Study(found.folder).table == found.table
    labelled = rlvr.study(seeds=[1], compare={"reward": {"a": strict, "b": has_answer}}, name="labelled", **TOY)
    assert list(labelled.runs) == ["reward=a", "reward=b"]


def test_a_run_that_fails_is_in_the_table_with_its_reason_and_is_tried_again(tmp_path: Path) -> None:
    def picky(prompt: str, response: str, meta: dict[str, Any]) -> float:
        if not (tmp_path / "mended").exists():
            raise KeyError("gold")
        return 1.0

    found = rlvr.study(reward=picky, seeds=[1], name="picky", **TOY)
    assert "reward 'picky' raised KeyError" in found.failed["seed-1"] and not found.is_finished
    with pytest.raises(ValueError, match="no run is finished"):
        found.plot()
    (tmp_path / "mended").touch()
    assert rlvr.study(reward=picky, seeds=[1], name="picky", **TOY).is_finished


def test_ctrl_c_keeps_what_was_done_and_the_same_call_goes_on() -> None:
    calls: list[int] = []

    def slow(prompt: str, response: str, meta: dict[str, Any]) -> float:
        calls.append(1)
        if len(calls) == 30:
            os.kill(os.getpid(), signal.SIGINT)
        return float("answer" in response)

    again = lambda: rlvr.study(reward=slow, seeds=[1, 2], name="stopped", **TOY)  # noqa: E731
    with pytest.raises(StudyInterruptedError):
        again()
    assert json.loads(Path("runs/stopped/summary.json").read_text())["runs"][1]["state"] == "not finished"
    assert again().is_finished


SCRIPT = """
import rlvr
import beside

settings = dict(data="toy", client="mock", steps=2, max_tokens=8, evaluation={"tasks": 4, "samples": 2}, quiet=True)
found = rlvr.study(reward=beside.near, seeds=[1, 2], name="away", **settings)
print(found.is_finished, *found.failed.values())
"""


@pytest.mark.slow
def test_functions_of_a_module_beside_the_script_travel_to_the_processes_of_the_runs(tmp_path: Path) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "beside.py").write_text("def near(prompt, response, meta):\n    return float('answer' in response)\n")
    (folder / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(folder / "script.py")], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout.split() == ["True"], done.stderr + done.stdout
    assert (tmp_path / "runs" / "away" / "logs" / "seed-1.log").read_text().count("final") > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"seeds": 3}, ["seeds=3", "range(1, 6)"]),
        ({"seeds": []}, ["seeds=[]", "expected integers"]),
        ({"seeds": [1, 1]}, ["seed 1 is given twice"]),
        ({"seeds": [1.5]}, ["expected integers"]),
        ({"seed": 2}, ["seed cannot be given to a study"]),
        ({"resume": False}, ["run.resume cannot be given to a study"]),
        ({"compare": {"learning_rate": 0.1}}, ["compare: learning_rate=0.1", "list"]),
        ({"compare": {"steps": [4, 8]}}, ["steps is given, and in compare too"]),
        ({"compare": {"learning_rte": [0.1]}}, ["did you mean 'learning_rate'"]),
        ({"compare": {"learning_rate": [0.1, 0.1]}}, ["0.1 twice"]),
        ({"compare": {"learning_rate": []}}, ["learning_rate has no values"]),
        ({"compare": {"learning_rate": [0.1, -1.0]}}, ["learning_rate", "-1"]),
        ({"compare": ["learning_rate"]}, ["compare is of type list"]),
        ({"compare": {"name": ["a", "b"]}}, ["name is nothing to compare"]),
        ({"jobs": 2}, ["jobs=2", "has_own", "into a module"]),
        ({"jobs": 0}, ["jobs=0", "at least 1"]),
        ({"environment": {"OMP_NUM_THREADS": "1"}}, ["environment is read when a process begins", "has_own"]),
        ({"environment": ["A=b"]}, ["environment is of type list"]),
        ({"name": "a/b"}, ["study name 'a/b'"]),
        ({"config": "arithmetc"}, ["did you mean 'arithmetic'"]),
    ],
)
def test_a_mistake_is_named_before_a_run_starts(arguments: dict[str, Any], said: list[str]) -> None:
    def has_own(prompt: str, response: str, meta: dict[str, Any]) -> float:
        return 1.0

    with pytest.raises(ValueError) as error:
        study(**{"reward": has_own, "seeds": [1, 2], **TOY, **arguments})
    assert all(words in str(error.value) for words in said), error.value
    assert "--" not in str(error.value), "options are of the command line"
    assert not list(Path("runs").glob("*/study.json"))


@pytest.mark.parametrize(
    "value",
    [1e-05, 3, True, None, "text", "a: b", "#1", "1e3", "null", "12:30", "${x}", 'a "quoted" \\ one\n', "é😀",
     float("inf"), [1, "a,b", None], {"a": {"b": [1.5]}}, "[1]"],
)  # fmt: skip
def test_a_word_holds_the_value_of_a_program(value: Any) -> None:
    by_value, by_word = load(None, None, {"key": value}), load(None, None, [to_word("key", value)])
    assert by_word.values == by_value.values == {"key": value} and by_word.raw == by_value.raw
