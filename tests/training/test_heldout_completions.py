"""A run stores completions of its held-out tasks, before and after training, to be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlvr.core.types import Outcome, Score, Task, Trajectory
from rlvr.training.judged_tasks import JudgedTask
from rlvr.training.rollout_rows import heldout_rows
from tests.kit.tiny_run import TINY, attempt


def judged(*passed: bool | None) -> JudgedTask:
    """A task with completions that passed, failed, or have no verdict."""
    made = [
        Trajectory(
            "2 + 2", [1], f"answer {place}", [2], logprobs=[-1.0], reward=None if one is None else float(one),
            scores={} if one is None else {"exact": Score(float(one), Outcome.PASSED if one else Outcome.FAILED)},
            task=Task("sum", "2 + 2", {"answer": "4"}),
        )
        for place, one in enumerate(passed)
    ]  # fmt: skip
    return JudgedTask(Task("sum", "2 + 2"), made, 0)


@pytest.mark.parametrize(
    ("passed", "most", "stored"),
    [
        ((True, True, True, True, False), 2, [0, 4]),
        ((False, True, True, True, False), 3, [0, 1, 2]),
        ((True, True, True), 2, [0, 1]),
        ((None, False), 4, [0, 1]),
        ((True,), 0, []),
    ],
)
def test_passed_and_failed_completions_take_turns(passed: tuple[bool | None, ...], most: int, stored: list[int]):
    rows = [json.loads(line) for line in heldout_rows(judged(*passed), "exact", most)]
    assert [row["sample"] for row in rows] == stored
    assert [row["response"] for row in rows] == [f"answer {place}" for place in stored]
    assert all(row["task_id"] == "sum" and row["reference"] == {"answer": "4"} for row in rows)
    assert not any({"logprobs", "response_tokens", "prompt_tokens"} & row.keys() for row in rows)


def test_a_run_stores_them_beside_its_evaluations(tmp_path: Path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    words = (f"run.root={tmp_path}", "training.steps=1", "sft.steps=1")
    attempt(str(tmp_path / "tiny.yaml"), *words, "run.name=one", "run.rollouts_per_task=1")
    for stage in ("baseline", "final"):
        results = json.loads((tmp_path / "one" / "evaluations" / f"{stage}.json").read_text())["results"]
        lines = (tmp_path / "one" / "evaluations" / f"{stage}.jsonl").read_text().splitlines()
        assert [json.loads(line)["task_id"] for line in lines] == [result["id"] for result in results]
    attempt(str(tmp_path / "tiny.yaml"), *words, "run.name=none", "run.rollouts_per_task=0")
    assert sorted(place.name for place in (tmp_path / "none" / "evaluations").iterdir()) == [
        "baseline.json", "final.json",
    ]  # fmt: skip
