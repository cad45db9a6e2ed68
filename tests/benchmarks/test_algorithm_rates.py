"""`python -m benchmarks.algorithm_rates`: its plan, what its table says by hand, and a small one that really runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rlvr
from benchmarks.algorithm_rates import main, read_rates_plan
from benchmarks.rates_report import choose_rates, format_rates, load_rates


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in; runs use this code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(rlvr.__file__).parents[1]))
    return tmp_path


def a_run(variant: str, rate: str, seed: int, short: float, long: float) -> dict[str, Any]:
    return {"variant": variant, "rate": rate, "seed": seed, "pass@1": [short, long], "seconds": 30.0, "code": "0.1"}


def a_study(*runs: dict[str, Any]) -> dict[str, Any]:
    names = dict.fromkeys(f"{run['variant']} {run['rate']}" for run in runs)
    return {
        "study": "rates", "task": "arithmetic", "seeds": [1, 2, 3], "choice": [6, 7], "completions": [1000, 3000],
        "tasks": 200, "samples": 8, "variants": dict.fromkeys(names, ()), "runs": list(runs),
    }  # fmt: skip


CHOICE = [
    a_run("grpo", "0.001", 6, 0.5, 0.7), a_run("grpo", "0.001", 7, 0.4, 0.9),  # means .45, .80: .625
    a_run("grpo", "0.002", 6, 0.6, 0.7), a_run("grpo", "0.002", 7, 0.5, 0.8),  # .55, .75: .65
    a_run("raft", "0.001", 6, 0.5, 0.75), a_run("raft", "0.001", 7, 0.5, 0.75),  # .50, .75: .625
    a_run("raft", "0.002", 6, 0.75, 0.5), a_run("raft", "0.002", 7, 0.75, 0.5),  # .75, .50: .625
]  # fmt: skip
COMPARED = [
    a_run("grpo", "0.002", 1, 0.6, 0.7), a_run("grpo", "0.002", 2, 0.7, 0.8), a_run("grpo", "0.002", 3, 0.9, 0.9),
    a_run("raft", "0.001", 1, 0.5, 0.7), a_run("raft", "0.001", 2, 0.5, 0.8), a_run("raft", "0.001", 3, 0.6, 0.9),
    a_run("raft", "0.002", 1, 0.9, 0.9),
]  # fmt: skip


def test_the_rate_is_the_best_one_of_the_seeds_of_the_choice() -> None:
    """Over both lengths; the seeds that are compared decide nothing; of two equal rates the lower is taken."""
    assert choose_rates(a_study(*CHOICE, *COMPARED)) == {"grpo": "0.002", "raft": "0.001"}
    assert choose_rates(a_study(*CHOICE[:-1])) == {"grpo": "0.002"}  # raft lacks a run


def test_variants_are_compared_at_their_own_rates_and_corrected_for_both_lengths() -> None:
    """Short: raft less grpo is -.1 -.2 -.3, t = 3.4641 with 2 degrees, p = .0741799, times two tests. Long: equal."""
    said = format_rates(a_study(*CHOICE, *COMPARED))
    assert "15 runs of `arithmetic`, 8 minutes one after another" in said
    assert "| `raft` | 1,000 | 0.001 | 3 | 53.3 % [39.0, 67.7] | -20.0 [-44.8, +4.8] | 0.148 |  |" in said
    assert "| `raft` | 3,000 | 0.001 | 3 | 80.0 % [55.2, 100.0] | +0.0 [+0.0, +0.0] | 1.000 | 30 |" in said
    assert "| `grpo` | 45.0, 80.0 | **55.0, 75.0** |" in said
    assert "- Not told apart from `grpo` at either length: `raft`." in said
    assert "is the lowest one that was tried, so a better one may lie beyond: `raft`." in said
    assert "is the highest one that was tried, so a better one may lie beyond: `grpo`." in said


def test_the_choice_alone_has_no_comparison() -> None:
    said = format_rates(a_study(*CHOICE))
    assert "**55.0, 75.0**" in said and "minus `grpo`" not in said and "told apart" not in said


def test_a_run_is_as_long_as_the_longer_length_and_is_measured_at_both() -> None:
    words = ["seeds=1..2", "choice=6", "variants=rloo", "rates=0.0005,0.001", "run.root=runs", "sft.batch_size=8"]
    plan = read_rates_plan(words, "r")
    assert plan.steps == {"grpo 0.0005": (25, 75), "grpo 0.001": (25, 75), "rloo 0.0005": (50, 150),
                          "rloo 0.001": (50, 150)}  # fmt: skip
    assert plan.completions == (12_800, 38_400) and plan.start.seeds == plan.runs.seeds == (1, 2, 6)
    for variant in plan.runs.variants:
        training = variant.config["training"]
        assert training["steps"] * training["prompts_per_step"] * training["group_size"] == 38_400
        assert variant.config["evaluation"]["every"] == plan.steps[variant.name][0]
        assert variant.config["evaluation"]["interim_samples"] == 8
    assert plan.runs.command(plan.runs.runs[2])[-8:] == [
        "algorithm.name=grpo", "training.steps=75", "evaluation.every=25", "training.optimizer.learning_rate=0.001",
        "seed=1", "run.root=runs/r/arithmetic", "run.name=grpo_0.001_seed-1",
        "model.start_from=runs/r/arithmetic-start/seed-1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["seeds=1..6"], ["seed 6", "choice=6..7", "other seeds"]),
        (["seeds=1", "arithmetik"], ["arithmetik", "arithmetic, programs, tools"]),
        (["seeds=1", "variants=rlo"], ["'rlo'", "did you mean 'rloo'"]),
        (["seeds=1", "rates=0.1"], ["rates=0.1", "two rates"]),
        (["seeds=1", "times=1"], ["times=1", "at least 2"]),
        (["seeds=1", "training.optimizer.decay=linear"], ["decay=linear", "give constant"]),
        (["seeds=1", "training.group_size=8,16"], ["training.group_size has several values"]),
    ],
    ids=lambda value: " ".join(value)[:50],
)
def test_a_mistake_is_one_message_before_anything_starts(
    folder: Path, capfd: Any, words: list[str], expected: list[str]
) -> None:
    assert main(words) == 2
    said = capfd.readouterr().err
    assert "Traceback" not in said and all(word in said for word in expected), said
    assert not list(folder.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_small_study_of_rates_from_the_command_to_its_files(folder: Path, capfd: Any) -> None:
    words = ["seeds=1", "choice=2", "rates=0.0005,0.002", "times=2", "sft.steps=40", "training.steps=1",
             "evaluation.tasks=16", "evaluation.interim_tasks=16", "--jobs=1"]  # fmt: skip
    assert main(words) == 0
    results = load_rates(folder / "runs" / "algorithm-rates" / "results.json")
    chosen = choose_rates(results)["grpo"]
    assert {(run["rate"], run["seed"]) for run in results["runs"]} == {("0.0005", 2), ("0.002", 2), (chosen, 1)}
    assert all(run["weights_sha256"] != run["start_sha256"] for run in results["runs"])
    summary = json.loads((folder / "runs/algorithm-rates/arithmetic/grpo_0.002_seed-2/summary.json").read_text())
    assert summary["weights_sha256"] in {run["weights_sha256"] for run in results["runs"]}
    assert "chosen by the seeds 2" in (folder / "runs/algorithm-rates/table.md").read_text()
    assert "chosen by the seeds 2" in "".join(capfd.readouterr())
