"""`rlvr demo`: an ordinary run that learns, with what to type next, without a terminal and without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlvr.cli.demo_command import pair_completions
from rlvr.cli.main import run

SHORT = ["demo", "training.steps=4", "training.prompts_per_step=8", "evaluation.tasks=8", "evaluation.every=0"]


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_demo_needs_no_file_and_leaves_a_run_that_other_commands_take(empty: Path, capsys: Any) -> None:
    assert run(SHORT) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said and "before training" not in said
    for part in (
        "random weights",
        "rl 4/4",
        "100% |",
        "FINAL RESULTS",
        "rlvr view runs/demo",
        "rlvr evaluate runs/demo",
    ):
        assert part in said, said
    assert len([line for line in said.split("\nnext\n")[1].splitlines() if line.startswith("  rlvr ")]) == 3
    assert run(["evaluate", "runs/demo", "evaluation.samples=2"]) == 0
    assert json.loads(capsys.readouterr().out)["tasks"] == 8


def test_a_second_demo_starts_anew_and_keeps_the_first(empty: Path, capsys: Any) -> None:
    for _ in range(2):
        assert run(SHORT) == 0
        assert "rl 4/4" in capsys.readouterr().out
    assert len(list((empty / "runs").glob("demo*/summary.json"))) == 2


def test_a_demo_that_was_stopped_goes_on(empty: Path, capsys: Any) -> None:
    assert run(SHORT) == 0
    (empty / "runs" / "demo" / "summary.json").unlink()  # as after a stop before the end
    assert run(SHORT) == 0
    assert "FINAL RESULTS" in capsys.readouterr().out
    assert [folder.name for folder in (empty / "runs").glob("demo*")] == ["demo"]


def test_a_config_of_the_users_by_that_name_is_not_taken(empty: Path, capsys: Any) -> None:
    (empty / "configs").mkdir()
    (empty / "configs" / "demo.yaml").write_text("nonsense: 1\n")
    assert run([*SHORT, "training.steps=1"]) == 0


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_without_torch_the_demo_names_the_extra(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from rlvr.cli.main import run; sys.exit(run(['demo']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and not done.stdout and done.stderr.count("\n") == 1, done.stderr
    assert f"{package} is not installed" in done.stderr and "pip install 'rlvr[train]'" in done.stderr


def test_completions_of_the_first_steps_are_paired_with_the_last_of_the_same_prompt() -> None:
    def row(prompt: str, response: str) -> dict[str, Any]:
        return {"prompt": prompt, "response": response}

    steps = [
        [row("a", "1"), row("a", "2"), row("b", "3")],
        [row("c", "4")],
        [row("a", "5")],
        [row("b", "6"), row("d", "7")],
        [row("a", "8"), row("a", "9")],
    ]
    pairs = [(one["prompt"], one["response"], two["response"]) for one, two in pair_completions(steps)]
    assert pairs == [("a", "1", "8"), ("b", "3", "6")]
    assert pair_completions(steps, count=1) == [(row("a", "1"), row("a", "8"))]
    assert pair_completions(steps[:2]) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_the_demo_learns(empty: Path, capsys: Any, seed: int) -> None:
    assert run(["demo", f"seed={seed}"]) == 0
    summary = json.loads((empty / "runs" / "demo" / "summary.json").read_text())
    assert summary["baseline"]["pass@1"]["value"] < 0.1
    assert summary["final"]["pass@1"]["value"] > 0.8
    said = capsys.readouterr().out
    assert "completions of the same prompts" in said and said.count("wrong") >= 1 and "->" in said
