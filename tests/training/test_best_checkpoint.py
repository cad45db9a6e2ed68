"""The best checkpoint beside the last: which weights it is, that a resume loses none, and what reports it."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlvr.cli.main import run
from rlvr.core.files import find_damage, new_folder
from rlvr.training.best_checkpoint import BestCheckpoint, resolve_best
from rlvr.training.initial_weights import newest_weights
from rlvr.training.journal import newest_checkpoint
from tests.kit.tiny_run import RunKilled, stored_steps
from tests.kit.tiny_run import attempt as attempt_at

TOY = """
client: mock
seed: 6
env: {name: toy}
reward: {kwargs: {keywords: [answer, solution]}}
rollout: {max_tokens: 12}
algorithm: {name: reinforce}
training: {steps: 12, prompts_per_step: 4, group_size: 4, optimizer: {learning_rate: 5e-4}}
evaluation: {tasks: 12, samples: 4, every: 2, interim_tasks: 8, interim_samples: 4}
run: {checkpoint_every: 4, rollouts_per_step: 2}
"""

attempt = partial(attempt_at, "toy.yaml")


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.yaml").write_text(TOY)
    return tmp_path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, which the tests only read."""
    place = tmp_path_factory.mktemp("whole")
    (place / "toy.yaml").write_text(TOY)
    assert run(["train", f"--config={place / 'toy.yaml'}", f"run.root={place / 'runs'}"]) == 0
    return place / "runs" / "toy"


# --- the folders, with pass rates by hand -------------------------------------------------------------------------


def row(step: int, rate: float) -> dict[str, Any]:
    name = "test/env/all/correct"
    return {"phase": "rl", "step": step - 1, name: rate, f"{name}/low": 0.0, f"{name}/high": 1.0}


def keeper(folder: Path) -> BestCheckpoint:
    def save(name: str) -> None:
        with new_folder(folder / "checkpoints" / name) as place:
            (place / "weights").write_text(name)

    return BestCheckpoint(folder, 200, save)


def evaluate_steps(best: BestCheckpoint, *rates: float, last: int = 0) -> None:
    """Pass rates after every 10 steps."""
    for step, rate in zip(range(10, 1000, 10), rates, strict=False):
        best.collect(row(step, rate))
        best.save(row(step, rate), is_last=step == last)


def folders(folder: Path) -> list[str]:
    return sorted(place.name for place in (folder / "checkpoints").iterdir() if place.is_dir())


def test_the_weights_of_the_highest_rate_are_kept_and_named(tmp_path: Path) -> None:
    best = keeper(tmp_path)
    evaluate_steps(best, 0.25, 0.5, 0.5, 0.375)
    assert folders(tmp_path) == ["best-000010", "best-000020"]
    best.publish([])
    assert folders(tmp_path) == ["best-000020"] and not find_damage(tmp_path / "checkpoints" / "best-000020")
    assert json.loads((tmp_path / "checkpoints" / "best.json").read_text()) == {
        "checkpoint": "best-000020",
        "step": 20,
        "pass_rate": {"value": 0.5, "low": 0.0, "high": 1.0},
        "tasks": 200,
    }
    assert resolve_best(tmp_path / "checkpoints" / "best") == tmp_path / "checkpoints" / "best-000020"


def test_the_best_of_a_kept_checkpoint_stays_and_a_run_that_falls_back_finds_it(tmp_path: Path) -> None:
    """Checkpoints after steps 20 and 30; the run goes on from step 20, without what was later."""
    best = keeper(tmp_path)
    evaluate_steps(best, 0.25, 0.375, 0.5)
    best.publish([20, 30])
    assert folders(tmp_path) == ["best-000020", "best-000030"]
    again, said = keeper(tmp_path), list[str]()
    again.restore([row(10, 0.25), row(20, 0.375)], "", said.append)
    again.publish([20])
    assert folders(tmp_path) == ["best-000020"] and not said
    assert json.loads((tmp_path / "checkpoints" / "best.json").read_text())["step"] == 20


def test_the_last_step_as_the_best_is_the_last_checkpoint(tmp_path: Path) -> None:
    best = keeper(tmp_path)
    evaluate_steps(best, 0.25, 0.5, last=20)
    best.publish([])
    assert folders(tmp_path) == []
    again, said = keeper(tmp_path), list[str]()
    again.restore([row(10, 0.25), row(20, 0.5)], "final-000020", said.append)
    assert again.describe() == best.describe() and not said
    described = best.describe()
    assert described is not None and described["checkpoint"] == "final-000020"
    again.restore([row(10, 0.25), row(20, 0.5)], "done-000000", said.append)  # of an older run
    assert again.describe() == {**described, "checkpoint": "done-000000"} and not said


def test_a_damaged_best_is_said_and_the_next_best_takes_its_place(tmp_path: Path) -> None:
    best = keeper(tmp_path)
    evaluate_steps(best, 0.25, 0.5)
    (tmp_path / "checkpoints" / "best-000020" / "weights").write_text("spoiled")
    again, said = keeper(tmp_path), list[str]()
    again.restore([row(10, 0.25), row(20, 0.5)], "", said.append)
    again.publish([])
    assert len(said) == 1 and "best-000020" in said[0] and folders(tmp_path) == ["best-000010"]
    again.collect(row(30, 0.375))
    again.save(row(30, 0.375), is_last=False)
    again.publish([])
    assert folders(tmp_path) == ["best-000030"]


def test_nothing_is_kept_where_nothing_is_to_be_kept(tmp_path: Path) -> None:
    best = BestCheckpoint(tmp_path, 200, None)
    evaluate_steps(best, 0.25, 0.5)
    best.publish([])
    assert best.describe() is None and len(best.results) == 2 and not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("text", ["[]", "{", '{"checkpoint": 3}', '{"checkpoint": "../../x"}', '{"checkpoint": ".."}'])
def test_a_damaged_best_json_is_named(tmp_path: Path, text: str) -> None:
    place = tmp_path / "checkpoints" / "best"
    place.parent.mkdir()
    with pytest.raises(ValueError, match=r"no best checkpoint; .*evaluation\.every.*run\.keep_best"):
        resolve_best(place)
    (place.parent / "best.json").write_text(text)
    with pytest.raises(ValueError, match=r"best\.json.*give the path of a checkpoint"):
        resolve_best(place)


# --- runs ---------------------------------------------------------------------------------------------------------


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def rates(folder: Path) -> dict[int, float]:
    rows = stored_steps(folder)
    return {r["step"] + 1: r["test/env/all/correct"] for r in rows if "test/env/all/correct" in r}


def test_a_run_keeps_the_best_and_evaluate_takes_it(whole: Path, capsys: Any) -> None:
    """Every interim evaluation and that of the last step compete."""
    seen, best, summary = rates(whole), read(whole / "checkpoints" / "best.json"), read(whole / "summary.json")
    assert list(seen) == [2, 4, 6, 8, 10, 12] and best["step"] == max(seen, key=seen.__getitem__) < 12
    assert best["pass_rate"]["value"] == max(seen.values()) and summary["best"] == best and summary["report"] == "last"
    assert sorted(p.name for p in (whole / "checkpoints").iterdir()) == [
        f"best-{best['step']:06d}", "best.json", "final-000012", "rl-000008"
    ]  # fmt: skip
    told = evaluate(capsys, str(whole / "checkpoints" / "best"))
    assert Path(told["checkpoint"]).name == best["checkpoint"] and told["tasks"] == 12
    assert evaluate(capsys, str(whole))["pass@1"] == summary["final"]["pass@1"] != told["pass@1"]
    assert newest_weights(str(whole / "checkpoints" / "best"), "x") == whole / "checkpoints" / best["checkpoint"]


def test_the_best_has_the_weights_of_its_step_and_no_optimizer(whole: Path, toy: Path) -> None:
    """They are those of an ordinary checkpoint after that step."""
    best = read(whole / "checkpoints" / "best.json")
    with pytest.raises(RunKilled):
        attempt(f"run.checkpoint_every={best['step']}", killed_at=best["step"] + 1)
    there = toy / "runs" / "toy" / "checkpoints" / f"rl-{best['step']:06d}"
    state, kept = (read(place / "table.json") for place in (there, whole / "checkpoints" / best["checkpoint"]))
    assert state["logits"] == kept["logits"] and state["adam"] and not kept["adam"]


def evaluate(capsys: Any, place: str, *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert run(["evaluate", place, *words]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param((), id="last", marks=pytest.mark.slow),
        pytest.param(("evaluation.report=best", "training.patience=2"), id="best, plateau"),
    ],
)
def test_a_killed_run_keeps_the_same_best(toy: Path, words: tuple[str, ...]) -> None:
    calm = attempt(*words, "run.name=calm")
    for step in (3, 7):
        with pytest.raises(RunKilled):
            attempt(*words, "run.name=torn", killed_at=step)
    torn = attempt(*words, "run.name=torn")
    assert {**torn, "seconds": 0} == {**calm, "seconds": 0}
    places = [toy / "runs" / name / "checkpoints" for name in ("calm", "torn")]
    assert read(places[0] / "best.json") == read(places[1] / "best.json")
    name = read(places[0] / "best.json")["checkpoint"]
    assert (places[0] / name / "table.json").read_bytes() == (places[1] / name / "table.json").read_bytes()
    assert [p.name for p in sorted(places[0].iterdir())] == [p.name for p in sorted(places[1].iterdir())]


def test_the_best_policy_is_reported_where_asked_on_tasks_that_did_not_choose_it(
    whole: Path, toy: Path, capsys: Any
) -> None:
    assert run(["train", "--config=toy.yaml", "evaluation.report=best"]) == 0
    said, summary, last = capsys.readouterr().out, read(toy / "runs/toy/summary.json"), read(whole / "summary.json")
    step = summary["best"]["step"]
    assert summary["report"] == "best" and f"the policy after step {step}, chosen by its interim evaluation" in said
    assert last["weights_sha256"] == summary["weights_sha256"] and last["baseline"] == summary["baseline"]
    told = evaluate(capsys, "runs/toy/checkpoints/best")
    assert told["pass@1"] == summary["final"]["pass@1"] != last["final"]["pass@1"]


@pytest.mark.parametrize(
    "words", [["evaluation.tasks=16", "evaluation.every=0"], ["evaluation.tasks=12", "evaluation.interim_tasks=1"]]
)
def test_an_evaluation_of_another_size_leaves_out_the_tasks_that_chose(
    whole: Path, words: list[str], capsys: Any
) -> None:
    """16 tasks are held out, and a quarter of them chose: with any sizes at most the other 12 are left."""
    assert evaluate(capsys, str(whole / "checkpoints" / "best"), *words)["tasks"] <= 12


def test_a_best_that_was_chosen_by_the_reported_tasks_is_warned_of(toy: Path, capsys: Any) -> None:
    attempt("evaluation.interim_tasks=null")
    assert run(["evaluate", "runs/toy/checkpoints/best"]) == 0
    assert "pass rate is overstated" in " ".join(capsys.readouterr().err.split())


def test_without_keep_best_nothing_is_kept_and_the_last_step_is_not_evaluated(toy: Path) -> None:
    assert "best" not in attempt("run.keep_best=false")
    assert list(rates(toy / "runs" / "toy")) == [2, 4, 6, 8, 10]
    assert not list((toy / "runs" / "toy" / "checkpoints").glob("best*"))


def test_a_plateau_ends_reinforcement_learning_and_says_why(toy: Path, capsys: Any) -> None:
    """A rate of 1e-9 teaches nothing: after the first evaluation two more are waited for."""
    words = ["training.patience=2", "training.optimizer.learning_rate=1e-9"]
    assert run(["train", "--config=toy.yaml", *words]) == 0
    said = capsys.readouterr().out
    summary = read(toy / "runs" / "toy" / "summary.json")
    assert summary["steps"] == 6 and summary["stopped"].startswith("plateau: 2 interim evaluations")
    assert said.count(summary["stopped"]) == 2 and "ended after 6 of 12 steps: plateau" in said
    assert said.index("rl 6/12") < said.index("ended after 6 of 12 steps")
    (toy / "runs" / "toy" / "summary.json").unlink()
    again = attempt(*words)
    assert {**again, "seconds": 0} == {**summary, "seconds": 0}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["training.patience=-1"], "training.patience=-1, expected at least 0"),
        (["evaluation.report=first"], "expected last or best"),
        (["evaluation.report=best", "run.keep_best=false"], "leave run.keep_best=false out"),
        (["evaluation.report=best", "evaluation.interim_tasks=null"], "evaluation.interim_tasks=null"),
        (["training.patience=3", "evaluation.interim_tasks=null"], "evaluation.interim_tasks=null"),
        (["evaluation.every=0", "training.patience=3"], "training.patience (evaluation.every is 0"),
        (["training.control=random_reward", "training.patience=3"], "training.patience (a control run"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    toy: Path, words: list[str], message: str, capsys: Any
) -> None:
    assert run(["train", "--config=toy.yaml", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


# --- one checkpoint for the same weights ---------------------------------------------------------------------------


def test_the_checkpoint_before_the_last_evaluation_is_the_one_after_it(toy: Path) -> None:
    """An evaluation adds a line to the journal and writes no weights."""
    attempt("run.keep_checkpoints=9", "run.keep_best=false")
    folder = toy / "runs" / "toy"
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == [
        "final-000012", "rl-000000", "rl-000004", "rl-000008"
    ]  # fmt: skip
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    saved = [(e["phase"], e["step"], e["path"]) for e in lines if e["event"] == "checkpoint"]
    assert saved[-2:] == [(3, 0, "checkpoints/final-000012"), (4, 0, "checkpoints/final-000012")]


def rename_final(folder: Path, name: str) -> list[str]:
    """Give a run's last checkpoint the name that an older version gave it; the lines of its journal."""
    shutil.move(folder / "checkpoints" / "final-000012", folder / "checkpoints" / name)
    for file in ("journal.jsonl", "checkpoints/best.json", "summary.json"):
        if (place := folder / file).exists():
            place.write_text(place.read_text().replace("final-000012", name))
    return (folder / "journal.jsonl").read_text().splitlines()


@pytest.mark.parametrize("name", ["done-000000", "final-000000"])
def test_a_run_of_an_older_version_goes_on_from_its_names(toy: Path, name: str) -> None:
    """Its last checkpoint was `done-000000`, and before the last evaluation `final-000000` once: it keeps the name."""
    attempt()
    folder = toy / "runs" / "toy"
    before = read(folder / "summary.json")
    lines = rename_final(folder, name)
    last = max(i for i, line in enumerate(lines) if '"phase": 3' in line)
    (folder / "journal.jsonl").write_text("\n".join(lines[: last + 1]) + "\n")
    (folder / "summary.json").unlink()
    again = attempt()
    assert {**again, "seconds": 0} == {**json.loads(json.dumps(before).replace("final-000012", name)), "seconds": 0}
    assert not find_damage(folder / "checkpoints" / name) and newest_checkpoint(folder) == folder / "checkpoints" / name
    assert not list((folder / "checkpoints").glob("final-000012"))


def test_a_finished_run_of_an_older_version_is_evaluated_exported_and_extended(toy: Path, capsys: Any) -> None:
    attempt("evaluation.report=best")
    folder = toy / "runs" / "toy"
    summary = read(folder / "summary.json")
    rename_final(folder, "done-000000")
    assert evaluate(capsys, "runs/toy/checkpoints/done-000000")["pass@1"] == evaluate(capsys, "runs/toy")["pass@1"]
    if summary["best"]["step"] == 12:
        assert resolve_best(folder / "checkpoints" / "best") == folder / "checkpoints" / "done-000000"
    attempt("evaluation.report=best", "training.steps=14")
    assert newest_checkpoint(folder) == folder / "checkpoints" / "final-000014"


def test_a_run_without_training_is_evaluated_once_and_has_one_column(toy: Path, capsys: Any) -> None:
    assert run(["train", "--config=toy.yaml", "training.steps=0"]) == 0
    said = capsys.readouterr().out
    assert "baseline 12/12" in said and "final" not in said and "RLVR" not in said and "p =" not in said
    assert re.search(r"^Metric +Baseline$", said, re.MULTILINE) and "no gain" not in said
    folder = toy / "runs" / "toy"
    summary = read(folder / "summary.json")
    assert summary["steps"] == 0 and summary["baseline"] == summary["final"] and summary["report"] == "last"
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["final-000000"]
    assert run(["train", "--config=toy.yaml", "training.steps=0"]) == 0
    assert re.search(r"^Metric +Baseline$", capsys.readouterr().out, re.MULTILINE)
    assert evaluate(capsys, "runs/toy")["pass@1"] == summary["final"]["pass@1"]
