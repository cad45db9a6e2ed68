"""docs/run/metrics.md and a run say the same names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlvr.cli.main import run
from tests.kit.tiny_run import TINY

# Of options that the runs below cannot have: tests/algorithms/test_formulas.py computes two by hand, and
# tests/training/test_propose_runs.py emits the third.
ELSEWHERE = {"importance/masked", "observation", "env/all/distinct/{role}"}
PAGE = Path(__file__).parents[2] / "docs" / "run" / "metrics.md"


def documented_names() -> set[str]:
    """The names in the first column of the page's tables before `summary.json`."""
    text = PAGE.read_text().split("## In `summary.json`")[0]
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


@pytest.mark.slow
def test_every_metric_of_a_run_is_on_the_page_and_every_name_on_the_page_is_emitted(
    tmp_path: Path, monkeypatch
) -> None:
    """A run with warm-up, levels, reward parts, penalties, a critic, interim evaluations emits the documented names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    looks = ["evaluation.every=1", "evaluation.interim_tasks=4"]
    taught = ["sft.steps=60", "sft.batch_size=32", "sft.optimizer.learning_rate=0.01", "training.prompts_per_step=16"]
    penalised = ["algorithm.kl_coef=0.01", "algorithm.overlong_buffer=2", "reward.watch=[boxed]"]
    muon = ["training.optimizer.name=muon", "training.optimizer.matrix_learning_rate=0.01"]
    own = ["algorithm.loss=own_losses:ppo_form", "algorithm.advantage=gae", "algorithm.clip_cov_ratio=0.1"]
    assert run(["train", "--config=tiny.yaml", *looks, *taught, *penalised, *muon, *own]) == 0
    sharded = ["client=sharded", "sharding.ranks=2", "run.name=sharded", "sft.steps=1", "training.steps=1"]
    assert run(["train", "--config=tiny.yaml", *sharded]) == 0
    short = ["sft.steps=0", "training.steps=1"]
    returning = ["curriculum.replay=0.5", "curriculum.hint_step=0.5"]
    paired = ["algorithm.name=dpo", *returning, "training.temperature_end=0.5", "run.name=paired"]
    assert run(["train", "--config=tiny.yaml", *short, *paired]) == 0
    teacher = ["algorithm.name=distillation", "teacher.model=runs/tiny", "run.name=student"]
    assert run(["train", "--config=tiny.yaml", *short, *teacher]) == 0
    own = "algorithm.terms.self_distillation"
    told = ["algorithm.name=sdpo", f"{own}.template='{{information}} {{prompt}}'", f"{own}.sibling_template='{{text}}'"]
    assert run(["train", "--config=tiny.yaml", *short, *told, "run.name=told"]) == 0
    files = [tmp_path / "runs" / name / "metrics.jsonl" for name in ("tiny", "paired", "student", "told", "sharded")]
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    emitted = {name for row in rows for name in row} - {"phase", "step"}
    patterns = {name: re.compile(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(name))) for name in documented_names()}
    unexplained = {name for name in emitted if not any(p.fullmatch(name) for p in patterns.values())}
    silent = {name for name, p in patterns.items() if not any(p.fullmatch(e) for e in emitted)} - ELSEWHERE
    assert not unexplained, f"emitted but not in docs/run/metrics.md: {sorted(unexplained)}"
    assert not silent, f"in docs/run/metrics.md but never emitted: {sorted(silent)}"
