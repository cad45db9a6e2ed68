"""Runs of a programmer and a tester: what is trained, resuming to the bit, and a tester that writes no tests."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.training.diagnosis import diagnose_steps
from tests.kit.tiny_run import TINY, attempt, stored_steps

INNER = 'inner_kwargs: {levels: ["1"], hidden_tests: 2, flaw: 0.2, slip: 0.0}'
ENVIRONMENT = f"{{name: adversarial_tests, kwargs: {{{INNER}, expected: reference, test_share: 0.7, planted: 2}}}}"
ROLES = ("programmer", "tester")


@pytest.fixture(autouse=True)
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = re.sub("env: .*", f"env: {ENVIRONMENT}", TINY).replace("tokenizer: words", "tokenizer: pieces")
    Path("adversarial.yaml").write_text(text.replace("max_position_embeddings: 24", "max_position_embeddings: 128"))


def read_lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


WORDS = ["algorithm.advantage=role_group_mean", "rollout.max_tokens=24", "training.prompts_per_step=4"]


@pytest.mark.slow
def test_a_run_trains_both_roles_on_the_same_tasks_and_resumes_to_the_bit() -> None:
    more = [
        "sft.steps=60",
        "sft.batch_size=32",
        "evaluation.tasks=4",
        "sft.optimizer.learning_rate=0.02",
        "training.steps=0",
    ]
    attempt("adversarial.yaml", *WORDS, *more, "run.name=start")
    words = [*WORDS, "sft.steps=0", "model.start_from=runs/start"]
    whole = attempt("adversarial.yaml", *words, "run.name=whole")
    with pytest.raises(KeyboardInterrupt):
        attempt("adversarial.yaml", *words, "run.name=killed", killed_at=2)
    resumed = attempt("adversarial.yaml", *words, "run.name=killed")
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert stored_steps(Path("runs/killed")) == stored_steps(Path("runs/whole"))
    rows = [row for file in sorted(Path("runs/whole/rollouts").glob("rl-*")) for row in read_lines(str(file))]
    by_role = {role: [row for row in rows if row["role"] == role] for role in ROLES}
    assert len(by_role["programmer"]) == len(by_role["tester"]) > 0
    assert any(row["advantage"] for row in by_role["tester"])
    assert all(row["prompt"].endswith("# test\n") == (row["role"] == "tester") for row in rows)
    for row in (row for row in stored_steps(Path("runs/whole")) if row["phase"] == "rl"):
        assert row["env/all/turns/programmer"] == row["env/all/turns/tester"] == 1.0
        assert 0 <= row["env/all/tests/refused"] <= 1 and 0 <= row["env/all/broken/right"] <= 1


def test_a_policy_that_writes_no_tests_has_a_finding_that_says_so() -> None:
    """From random weights: nothing is a test, and no episode is an error."""
    attempt("adversarial.yaml", *WORDS, "sft.steps=0", "rollout.max_tokens=2", "evaluation.tasks=2", "run.name=mute")
    rows = read_lines("runs/mute/metrics.jsonl")
    assert not any(row["verifier/error_rate"] for row in rows)
    found = {finding.code: finding.fact for finding in diagnose_steps(rows)}
    assert "unreadable 100%" in found["tests_refused"] and "idle_role" not in found


def test_the_packaged_config_is_one() -> None:
    assert build_config(load("adversarial_tests"), warn=pytest.fail).env.name == "adversarial_tests"
