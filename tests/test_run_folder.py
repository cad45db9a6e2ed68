"""Which folder a run works in: what is written there, when it is taken up again, and when it is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tiny_run import TINY

from rlvr.build import build_source, evaluate_saved, open_run, plan
from rlvr.build_client import cores
from rlvr.cli import run
from rlvr.config import Loaded, dump, load
from rlvr.config.schema import configured, written
from rlvr.files import write_atomic
from rlvr.tracking import Console
from rlvr.training.journal import Journal, RunLocked


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with tiny.yaml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    return tmp_path


def loaded(*words: str) -> Loaded:
    return load(None, "tiny.yaml", words)


def opened(*words: str) -> tuple[Path, bool]:
    composed = loaded(*words)
    return open_run(composed, configured(composed))


def refused(*words: str) -> str:
    with pytest.raises(ValueError) as caught:
        opened(*words)
    return str(caught.value)


def test_a_value_from_the_environment_is_written_nowhere_not_in_lists_either(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Neither into the run folder nor by `rlvr config`; what is written composes to the same config again."""
    monkeypatch.setenv("TOK", "s3cret-value")
    words = (
        "rollout.stop=['${oc.env:TOK}', plain]",
        "reward.type=composite",
        "reward.kwargs.rewards=[{name: keyword_contains, weight: 1.0, kwargs: {keywords: [a, '${oc.env:TOK}']}}]",
    )
    folder, _ = opened(*words)
    for file in folder.iterdir():
        assert "s3cret-value" not in file.read_text()
    again = load(None, str(folder / "resolved.yaml"))
    assert configured(again) == configured(loaded(*words))
    assert run(["config", "--config=tiny.yaml", *words]) == 0
    assert "s3cret-value" not in "".join(capsys.readouterr())
    assert "s3cret-value" not in dump(written(configured(again), again))


def test_a_value_from_the_environment_that_changed_is_another_config(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key is named and the value is not, wherever it stands; the same value resumes."""
    words = ("training.optimizer.learning_rate=${oc.env:LR}", "rollout.stop=['${oc.env:STOP}']")
    monkeypatch.setenv("LR", "1e-4")
    monkeypatch.setenv("STOP", "alpha")
    folder, _ = opened(*words)
    (folder / "metrics.jsonl").write_text('{"phase": "sft", "step": 0}\n')  # something was done
    assert opened(*words) == (folder, False)
    monkeypatch.setenv("LR", "0.512")
    said = refused(*words)
    assert "training.optimizer.learning_rate (its value from the environment)" in said and "rollout.stop" not in said
    assert "0.512" not in said and "1e-4" not in said
    monkeypatch.setenv("LR", "1e-4")
    monkeypatch.setenv("STOP", "beta")
    assert "rollout.stop[0] (its value from the environment)" in refused(*words)
    hashes = json.loads((folder / "environment.json").read_text())
    assert sorted(hashes["hashes"]) == ["rollout.stop[0]", "training.optimizer.learning_rate"] and hashes["salt"]


def test_only_a_runs_name_and_root_may_hold_the_time(tiny: Path) -> None:
    """A run named by the time is found again; a time elsewhere would make it go on with another value."""
    folder, _ = opened("run.name=${now:%Y-%m-%d_%H-%M-%S-%f}")
    assert opened("run.name=${now:%Y-%m-%d_%H-%M-%S-%f}") == (folder, False)
    for words in (["seed=${now:%f}"], ["run.name=${now:%f}", "env.kwargs.tag=${now:%f}"]):
        composed = loaded(*words)
        with pytest.raises(ValueError, match=r"(seed|env\.kwargs\.tag): .*run\.name and run\.root only"):
            open_run(composed, configured(loaded()))


@pytest.mark.parametrize("left", [".resolved.yaml.0a1b2c3d.tmp", ".environment.json.0a1b2c3d.tmp", "environment.json"])
def test_a_kill_while_the_folder_is_made_does_not_spoil_it(tiny: Path, left: str) -> None:
    folder = tiny / "runs" / "tiny"
    folder.mkdir(parents=True)
    (folder / left).write_text("seed")
    assert opened() == (Path("runs/tiny"), False)
    assert opened() == (Path("runs/tiny"), False)


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_kill_while_a_run_that_had_done_nothing_begins_again_does_not_spoil_it(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Killed before its first step, begun again and killed just there, before or after its config is written."""
    folder, _ = opened()
    Journal(folder).close()

    def killed(path: Path, content: str) -> None:
        if place == "after":
            write_atomic(path, content)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("rlvr.build.write_atomic", killed)
        with pytest.raises(KeyboardInterrupt):
            opened()
    assert opened() == (folder, False)


def test_a_folder_of_something_else_is_refused_and_left_as_it_is(tiny: Path) -> None:
    folder = tiny / "runs" / "tiny"
    folder.mkdir(parents=True)
    for name in ("thesis.tex", ".resolved.yaml.0a1b2c3d.tmp", ".swap.tmp"):
        (folder / name).write_text("words")
    assert "holds no run" in refused()
    assert sorted(p.name for p in folder.iterdir()) == [".resolved.yaml.0a1b2c3d.tmp", ".swap.tmp", "thesis.tex"]


def test_starting_anew_leaves_a_folder_that_another_process_works_in(tiny: Path) -> None:
    folder, _ = opened()
    with Journal(folder), pytest.raises(RunLocked, match="in use by another process"):
        opened("seed=4", "run.resume=false")
    assert [p.name for p in (tiny / "runs").iterdir()] == ["tiny"]
    assert opened("seed=4", "run.resume=false") == (folder, False)
    assert sorted(p.name for p in (tiny / "runs").iterdir()) == ["tiny", "tiny.old-1"]


def test_supervised_learning_of_no_steps_is_a_mistake(tiny: Path) -> None:
    with pytest.raises(ValueError, match="nothing to train"):
        configured(loaded("training.mode=sft", "sft.steps=0"))


def test_the_plan_says_when_training_ends_early(tiny: Path) -> None:
    config = configured(loaded("training.until=0.985", "evaluation.every=1", "sft.until=0.07"))
    told = plan(config, build_source(config))
    assert "or until 98.5% of held-out answers pass" in told["training"]
    assert "or until 7% of held-out answers pass" in told["warm-up"]
    assert "until" not in plan(configured(loaded()), build_source(config))["training"]


@pytest.mark.parametrize(
    "word",
    ["rollout.temperature=0", "env.kwargs.p=7", "model.name=x", "model={}", "sft.steps=3", "mode=sft", "seeds=1"],
)
def test_saved_weights_are_evaluated_as_their_run_was_set_up(tiny: Path, word: str) -> None:
    folder, _ = opened()
    with pytest.raises(ValueError, match="cannot be changed here"):
        evaluate_saved(folder, ["seed=1", word], Console())
    with pytest.raises(ValueError, match="no whole checkpoint yet"):
        allowed = ["seed=1", "evaluation.samples=3", "engine.threads=1", "model.device=cpu", "model.dtype=float32"]
        evaluate_saved(folder, allowed, Console())


def test_another_seed_evaluates_the_same_adapter_on_the_same_base(tiny: Path, capsys: Any) -> None:
    """The run's seed made the base model; the one given draws the answers. Greedy ones are thus the same."""
    words = ["model.lora={rank: 8}", "sft.steps=150", "sft.batch_size=32", "sft.optimizer.learning_rate=0.02"]
    words += ["evaluation.temperature=0", "evaluation.tasks=60", "training.steps=1"]
    assert run(["train", "--config=tiny.yaml", *words]) == 0
    capsys.readouterr()
    told = []
    for seed in (3, 4):
        assert run(["evaluate", "runs/tiny", f"seed={seed}"]) == 0
        told.append({k: v["value"] for k, v in json.loads(capsys.readouterr().out).items() if k == "mean_reward"})
    assert told[0] == told[1] and told[0]["mean_reward"] > 0, "an adapter that learned nothing tests nothing"
    events = [json.loads(line) for line in (tiny / "runs" / "tiny" / "journal.jsonl").read_text().splitlines()]
    assert events[0]["event"] == "run" and events[0]["threads"] == 1 and events[0]["device"] == "cpu"
    assert events[0]["torch"]


def test_numbers_that_are_not_finite_end_a_run_with_a_message(tiny: Path, capfd: Any) -> None:
    """Also where they come from a part that the training loop does not watch."""
    (tiny / "broken_env.py").write_text(
        "from rlvr.messages import NonFiniteError\n\ndef make():\n    raise NonFiniteError('a logit', [3])\n"
    )
    text = TINY.replace("{name: rpn_arithmetic, kwargs: {complexity: [1, 1], flaw: 0.0}}", "{name: 'broken_env:make'}")
    (tiny / "broken.yaml").write_text(text)
    for words in (["--config=tiny.yaml", "sft.optimizer.learning_rate=1e36", "sft.steps=9"], ["--config=broken.yaml"]):
        assert run(["train", *words]) == 1
        said = capfd.readouterr().err
        assert said.startswith("rlvr: ") and "not finite" in said and "Traceback" not in said
        assert "learning rate" in said


def test_a_message_carries_no_terminal_codes(tiny: Path, capfd: Any) -> None:
    assert run(["train", "--config=\x1b]0;owned\x07\nx"]) == 2
    said = capfd.readouterr().err
    assert "\x1b" not in said and "\x07" not in said and "\\x1b]0;owned\\x07\nx" in said


@pytest.mark.parametrize("words", [["trian"], ["train", "--nope"]])
def test_an_unknown_command_or_option_is_one_message(words: list[str], capfd: Any) -> None:
    assert run(words) == 2
    said = capfd.readouterr().err
    assert said.startswith("rlvr: No such ") and "Traceback" not in said


def test_cores_are_counted_where_the_system_knows_no_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cores() >= 1
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert cores() == (os.cpu_count() or 1)
