"""How a run that samples ahead ends before its last step: because it has learned enough, or by its error budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlvr.cli.main import run
from rlvr.core.types import Outcome, Score
from rlvr.reward import resolve_reward
from rlvr.training.errors import TrainingStoppedError
from rlvr.training.journal import Journal
from rlvr.training.schedules.completion_order import CompletionOrder
from rlvr.training.schedules.fixed_lag import FixedLag
from tests.kit.table_trainer import Remote, make_trainer, table

CONFIG = """
client: mock
seed: 7
env: {name: toy}
reward: {kwargs: {keywords: [answer, solution]}}
rollout: {max_tokens: 16}
algorithm: {name: ppo}
training: {steps: 40, prompts_per_step: 8, group_size: 4, until: 0.6, max_steps_off_policy: 2,
           optimizer: {learning_rate: 0.005}}
evaluation: {samples: 2, tasks: 16, every: 3, interim_tasks: 8}
run: {checkpoint_every: 2}
"""


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["fixed_lag", "completion"])
def test_a_run_that_has_learned_enough_leaves_nothing_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    """`until` ends it with groups under way: they are stopped, no file of them stays, and the evaluation is whole."""
    monkeypatch.chdir(tmp_path)
    Path("early.yaml").write_text(CONFIG)
    assert run(["train", "--config=early.yaml", f"training.schedule={schedule}"]) == 0
    folder = tmp_path / "runs" / "early"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert 3 <= len(rows) < 38 and rows[-1]["test/env/all/correct"] >= 0.6, "it has to end while groups are in flight"
    assert list((folder / "inflight").iterdir()) == []
    assert json.loads((folder / "summary.json").read_text())["final"]["pass@1"]["value"] > 0.6


@pytest.mark.parametrize("make", [FixedLag, CompletionOrder])
@pytest.mark.parametrize("substeps", [1, 2])
def test_no_step_is_made_from_answers_that_break_the_error_budget(tmp_path: Path, make: Any, substeps: int) -> None:
    """A verifier that fails on every third answer, in minibatches: the run stops with the weights as they were."""
    asked: list[str] = []

    def fails(prompt: str, response: str) -> Score:
        asked.append(response)
        if len(asked) % 3 == 0:
            return Score(None, Outcome.ERROR, "broken", detail="no verdict")
        return Score(float("a" in response), Outcome.PASSED if "a" in response else Outcome.FAILED)

    schedule = "completion" if make is CompletionOrder else "fixed_lag"
    t = make_trainer(
        Remote(table()), reward=resolve_reward(fails), cells={"reduction": "constant"}, schedule=schedule,
        prompts_per_step=8, num_minibatches=2, num_substeps=substeps,
    )  # fmt: skip
    before = t.parts.client.policy.logits.copy()  # type: ignore[attr-defined]
    with Journal(tmp_path) as journal:
        schedule = make(t, journal)
        with pytest.raises(TrainingStoppedError, match=rf"no verdict on \d+ of {32 // substeps} completions"):
            schedule.learn(0)
        schedule.close()
    assert (t.parts.client.policy.logits == before).all()  # type: ignore[attr-defined]
