"""`python -m benchmarks.pretrained_algorithms`: what its tables say by hand, its callback, and a small study."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rlvr
from benchmarks.pretrained_algorithms import format_results, main
from benchmarks.processor_time import ProcessorTime
from rlvr.cli.main import run as command

TOY = ["client=mock", "env.name=toy", "rollout.max_tokens=6", "training.steps=3", "evaluation.tasks=4",
       "evaluation.samples=2", "reward.type=length", "reward.kwargs={at_most: 4}"]  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in; runs use this code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(rlvr.__file__).parents[1]))
    return tmp_path


def a_run(variant: str, seed: int, after: float, minutes: float) -> dict[str, Any]:
    return {
        "variant": variant, "seed": seed, "steps": [0, 10], "pass@1": [0.1, after],
        "processor_seconds": [0.0, 60 * minutes], "families": {"sums": [0.1, after]}, "tokens_trained": 1000,
        "seconds": 100.0, "code": "0.1",
    }  # fmt: skip


def a_study(*runs: dict[str, Any]) -> dict[str, Any]:
    names = dict.fromkeys(run["variant"] for run in runs)
    return {
        "study": "s", "learning_rate": 0.0005, "step": 48, "tasks": 48, "samples": 2,
        "overrides": {name: [] for name in names}, "runs": list(runs),
    }  # fmt: skip


RUNS = [
    *(a_run("grpo", seed, after, 2.0) for seed, after in ((1, 0.3), (2, 0.4), (3, 0.5))),
    *(a_run("raft", seed, 0.2, 1.0) for seed in (1, 2, 3)),
    *(a_run("sapo", seed, after, 2.0) for seed, after in ((1, 0.3), (2, 0.4), (3, 0.5))),
]


def test_gains_and_gains_a_minute_are_compared_by_seed_and_corrected() -> None:
    """Gains: grpo .2 .3 .4, raft .1; raft less grpo -.1 -.2 -.3, t = 3.4641 with 2 degrees, p = .0742, of two tests.

    A minute: .1 .15 .2 and .1; 0 -.05 -.1, t = 1.7321, p = .2254.
    """
    said = format_results(a_study(*RUNS))
    assert "9 runs of 3 seeds; a step has 48 completions" in said
    assert "| `raft` | 3 | 20.0 % [20.0, 20.0] | +10.0 [+10.0, +10.0] | -20.0 [-44.8, +4.8] | 0.148 | 1.0 |" in said
    assert " | 1.0 | +10.0 [+10.0, +10.0] | -5.0 [-17.4, +7.4] | 0.451 |" in said
    assert "| `grpo` | 3 | 40.0 % [15.2, 64.8] | +30.0 [+5.2, +54.8] |  |  | 2.0 | +15.0 [+2.6, +27.4] |  |  |" in said
    assert "| `sapo` | 10 -> 40 % | 1,000 | 100 |" in said


def test_a_pair_is_compared_over_the_seeds_that_both_have() -> None:
    """A fourth seed of grpo enters its own mean and no difference; without any run nothing is said."""
    said = format_results(a_study(*RUNS, a_run("grpo", 4, 0.9, 2.0)))
    assert "| `grpo` | 4 | 52.5 %" in said and "| -20.0 [-44.8, +4.8] | 0.148 |" in said
    assert "No run" in format_results(a_study())


def test_processor_seconds_grow_with_each_step_and_go_on_where_a_run_was_resumed(folder: Path) -> None:
    options: dict[str, Any] = dict(data="toy", reward=lambda prompt, response, meta: len(response) % 2, client="mock")
    options |= dict(max_tokens=6, evaluation={"tasks": 4, "samples": 2}, name="r", quiet=True, seed=1)
    rlvr.train(**options, steps=2, callbacks=[ProcessorTime()])
    rows = [json.loads(line) for line in (folder / "runs/r/metrics.jsonl").read_text().splitlines()]
    first = [row["processor/training"] for row in rows]
    assert 0 < first[0] < first[1]
    resumed = ProcessorTime()
    resumed.restore({"training": 1000.0})
    resumed.on_start(folder)
    sum(range(1_000_000))
    assert 1000 < resumed.on_rollouts(0, [])["processor/training"] < 1100
    assert resumed.state()["training"] > 1000


def test_a_study_without_processor_times_is_refused_with_the_remedy(folder: Path, capfd: Any) -> None:
    (folder / "config.yaml").write_text("{}\n")
    assert command(["study", "--config=config.yaml", *TOY, "seeds=1", "--name=s"]) == 0
    capfd.readouterr()
    assert main(["runs/s"]) == 2
    assert "callbacks=[benchmarks.processor_time:ProcessorTime]" in capfd.readouterr().err


@pytest.mark.slow
def test_a_small_study_from_the_command_to_its_results(folder: Path, capfd: Any) -> None:
    (folder / "config.yaml").write_text("callbacks: ['benchmarks.processor_time:ProcessorTime']\n")
    words = ["study", "--config=config.yaml", *TOY, "seeds=1..2", "algorithm.name=grpo,raft",
             "evaluation.every=2", "evaluation.interim_tasks=null", "--name=s"]  # fmt: skip
    assert command(words) == 0
    assert main(["runs/s"]) == 0
    results = json.loads((folder / "runs/s/results.json").read_text())
    assert [(run["variant"], run["seed"]) for run in results["runs"]] == [
        ("grpo", 1), ("raft", 1), ("grpo", 2), ("raft", 2),
    ]  # fmt: skip
    summary = json.loads((folder / "runs/s/summary.json").read_text())
    ends = {(run["variant"], run["seed"]): run["after"]["value"] for run in summary["runs"]}
    for run in results["runs"]:
        assert run["steps"] == [0, 2, 3] and run["processor_seconds"][0] == 0 < run["processor_seconds"][1]
        assert run["pass@1"][-1] == pytest.approx(ends[f"algorithm.name={run['variant']}", run["seed"]], abs=1e-5)
    assert "4 runs of 2 seeds;" in capfd.readouterr().out
