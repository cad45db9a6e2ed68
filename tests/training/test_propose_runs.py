"""Runs in which the policy proposes tasks and solves them: what is trained, and resuming to the bit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlvr.envs.rpn_arithmetic import RPNArithmetic
from rlvr.training.diagnosis import diagnose_steps
from tests.kit.tiny_run import TINY, attempt

INNER = "{p: 3, operators: [+], complexity: [1, 1], flaw: 0.0, heldout_fraction: 0.3}"
ENVIRONMENT = f"{{name: propose, kwargs: {{inner_kwargs: {INNER}, answers: 2, proposal_share: 0.7}}}}"
WORDS = ["algorithm.advantage=role_prompt_mean", "rollout.max_tokens=6"]


@pytest.fixture(autouse=True)
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("propose.yaml").write_text(re.sub("env: .*", f"env: {ENVIRONMENT}", TINY))


def read_lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def read_steps(name: str) -> list[dict[str, Any]]:
    """The metric rows without what depends on the clock."""
    rows = read_lines(f"runs/{name}/metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith("time/") and k != "tokens_per_second"} for row in rows]


@pytest.mark.slow
def test_a_run_trains_both_roles_on_tasks_that_are_not_held_out_and_resumes_to_the_bit() -> None:
    more = ["sft.steps=40", "sft.batch_size=16", "sft.optimizer.learning_rate=0.02", "training.steps=0"]
    attempt("propose.yaml", *WORDS, *more, "run.name=start")
    words = [*WORDS, "sft.steps=0", "model.start_from=runs/start", "training.prompts_per_step=4"]
    whole = attempt("propose.yaml", *words, "run.name=whole")
    with pytest.raises(KeyboardInterrupt):
        attempt("propose.yaml", *words, "run.name=killed", killed_at=2)
    resumed = attempt("propose.yaml", *words, "run.name=killed")
    assert resumed["weights_sha256"] == whole["weights_sha256"] and read_steps("killed") == read_steps("whole")
    rows = [row for file in sorted(Path("runs/whole/rollouts").glob("rl-*")) for row in read_lines(str(file))]
    by_role = {role: [row for row in rows if row["role"] == role] for role in ("proposer", "solver")}
    assert all(any(row["advantage"] for row in own) for own in by_role.values())
    source = RPNArithmetic(p=3, operators=["+"], complexity=[1, 1], heldout_fraction=0.3)
    asked = {row["prompt"].removeprefix("<boe> ") for row in by_role["solver"]}
    assert len(asked) > 1 and not any(source.is_heldout(id) for id in asked)
    steps = [row for row in read_steps("whole") if row["phase"] == "rl"]
    for row in steps:
        assert row["env/all/proposals/refused"] + row["env/all/turns/solver"] / 2 == pytest.approx(1)
        assert row["env/all/distinct/proposer"] <= 1


def test_a_policy_that_never_writes_a_task_has_one_finding_that_says_so() -> None:
    """From random weights: nothing parses, the solver has no turn, and no episode is an error."""
    attempt("propose.yaml", *WORDS, "sft.steps=0", "rollout.max_tokens=2", "run.name=mute")
    rows = read_lines("runs/mute/metrics.jsonl")
    assert {row["env/all/turns/solver"] for row in rows} == {0.0} and not any(
        row["verifier/error_rate"] for row in rows
    )
    found = {finding.code: finding.fact for finding in diagnose_steps(rows)}
    assert "unreadable 100%" in found["proposals_refused"] and "idle_role" not in found


def test_an_advantage_over_whole_episodes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"advantage=acceptance takes one reward of an episode.*role_prompt_mean"):
        attempt("propose.yaml", "algorithm.name=raft")
