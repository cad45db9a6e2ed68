"""Runs in which a verifier learns beside the policy, or stands still: what is trained, and resuming to the bit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.kit.tiny_run import TINY, attempt, stored_steps

INNER = "{p: 3, operators: [+], complexity: [1, 1], flaw: 0.3, heldout_fraction: 0.3}"
ENVIRONMENT = f"{{name: learned_verifier, kwargs: {{inner_kwargs: {INNER}, verdicts: 2}}}}"
WORDS = ["algorithm.advantage=role_prompt_mean"]


@pytest.fixture(autouse=True)
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("verifier.yaml").write_text(re.sub("env: .*", f"env: {ENVIRONMENT}", TINY))


def read_rollouts(name: str) -> list[dict[str, Any]]:
    files = sorted(Path(f"runs/{name}/rollouts").glob("rl-*"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("opponent", ["self", "runs/start"])
def test_a_run_trains_who_is_to_learn_and_resumes_to_the_bit(opponent: str) -> None:
    more = ["sft.steps=40", "sft.batch_size=16", "sft.optimizer.learning_rate=0.02", "training.steps=0"]
    attempt("verifier.yaml", *WORDS, *more, "run.name=start")
    words = [*WORDS, "sft.steps=0", "model.start_from=runs/start", "training.prompts_per_step=4"]
    words.append(f"env.kwargs.opponent={opponent}")
    whole = attempt("verifier.yaml", *words, "run.name=whole")
    with pytest.raises(KeyboardInterrupt):
        attempt("verifier.yaml", *words, "run.name=killed", killed_at=2)
    resumed = attempt("verifier.yaml", *words, "run.name=killed")
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert stored_steps(Path("runs/killed")) == stored_steps(Path("runs/whole"))
    steps = [row for row in stored_steps(Path("runs/whole")) if row["phase"] == "rl"]
    assert all(0 <= row["env/all/verdicts/accepted"] <= 1 for row in steps)
    rows = read_rollouts("whole")
    assert {row["role"] for row in rows} == ({"solver", "verifier"} if opponent == "self" else {"solver"})
    assert all(any(row["advantage"] for row in rows if row["role"] == role) for role in {row["role"] for row in rows})


def test_an_advantage_over_whole_episodes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"advantage=acceptance takes one reward of an episode.*role_prompt_mean"):
        attempt("verifier.yaml", "algorithm.name=raft")


def test_weights_of_other_words_are_no_verifier() -> None:
    """A verifier that stands still reads the policy's tokens."""
    other = "env.kwargs.inner_kwargs.p=5"
    attempt("verifier.yaml", *WORDS, other, "sft.steps=1", "training.steps=0", "run.name=other")
    with pytest.raises(ValueError, match=r"env\.kwargs\.opponent=runs/other"):
        attempt("verifier.yaml", *WORDS, "env.kwargs.opponent=runs/other", "run.name=mixed")
