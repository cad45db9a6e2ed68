"""Formats a trajectory: as a line for the console, and as a JSON row of `rollouts/` and of a failed batch."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from rlvr.core.protocols import TaskSource
from rlvr.core.types import Outcome, Score, Task, Trajectory
from rlvr.reward.code import CodeProblem
from rlvr.training.failure_groups import task_features
from rlvr.training.judged_tasks import JudgedTask

HEAD, TAIL = 200, 300  # characters of a verdict's detail that are kept
MOST_REFERENCE = 4_000  # characters of what a task says is right; a longer one is left out
_OF_TOKENS = ("prompt_tokens", "response_tokens", "logprobs", "advantage", "turn_credits")


def format_scores(trajectory: Trajectory) -> str:
    verdicts = [f"{s.outcome.value}{f' ({s.reason})' if s.reason else ''}" for s in trajectory.scores.values()]
    reward = "no reward" if trajectory.reward is None else f"reward {trajectory.reward:.3g}"
    return f"{reward}, {', '.join(verdicts)}"


def score_to_json(score: Score) -> dict[str, Any]:
    """A score as JSON. A long detail keeps its beginning and end: a traceback ends with the error."""
    detail = score.detail
    if len(detail) > HEAD + TAIL:
        detail = f"{detail[:HEAD]} ... {detail[-TAIL:]}"
    fields = {"value": score.value, "outcome": score.outcome.value, "reason": score.reason, "parts": score.parts}
    return fields | ({"detail": detail} if detail else {})


def task_reference(task: Task) -> dict[str, Any]:
    """What the task itself says is right: its answer, and the tests of a programming problem."""
    answer = task.meta.get("answer")
    reference: dict[str, Any] = {} if answer in (None, "") else {"answer": str(answer)}
    with suppress(ValueError):  # no programming problem
        reference["tests"] = CodeProblem.of(task.meta).tests
    return reference if len(json.dumps(reference)) <= MOST_REFERENCE else {}


def heldout_rows(judged: JudgedTask, reward: str, most: int) -> list[str]:
    """JSON lines of at most `most` completions of a held-out task, without their tokens.

    Passed and failed ones take turns, so that both are there to read.
    """
    seen: dict[bool, int] = {}
    order: list[tuple[int, int]] = []
    for sample, one in enumerate(judged.completions):
        passed = reward in one.scores and one.scores[reward].outcome is Outcome.PASSED
        seen[passed] = seen.get(passed, 0) + 1
        order.append((seen[passed], sample))
    chosen = sorted(sample for _, sample in sorted(order)[:most])
    rows = [{**trajectory_fields(judged.completions[sample]), "sample": sample} for sample in chosen]
    return [json.dumps({key: row[key] for key in row if key not in _OF_TOKENS}) + "\n" for row in rows]


def trajectory_row(trajectory: Trajectory, source: TaskSource | None = None) -> str:
    """A trajectory as one JSON line."""
    return json.dumps(trajectory_fields(trajectory, source)) + "\n"


def trajectory_fields(trajectory: Trajectory, source: TaskSource | None = None) -> dict[str, Any]:
    """A trajectory, and what its source says of the task. The mask of actions and the advantages of tokens are there
    where tokens differ."""
    t = trajectory
    return {
        "rollout_id": t.rollout_id,
        "group_id": t.group_id,
        **({"role": t.role} if t.role else {}),
        "task_id": t.task.id if t.task else "",
        "level": t.task.level if t.task else "",
        **({"features": task_features(source, t.task)} if source and t.task else {}),
        **({"reference": reference} if t.task and (reference := task_reference(t.task)) else {}),
        "prompt": t.prompt,
        **({"rendered_prompt": t.rendered_prompt} if t.rendered_prompt else {}),  # what the model read
        "response": t.response,
        **({} if t.answer is None else {"answer": t.answer}),  # what was judged: the last turn, or hint and response
        **({"messages": t.messages, "turns": len(t.turn_starts)} if t.messages else {}),  # how many are its own
        "reward": t.reward,
        **({"turn_credits": t.turn_credits} if t.turn_credits else {}),
        "advantage": t.advantage,
        "scores": {name: score_to_json(score) for name, score in t.scores.items()},
        "stop_reason": t.stop_reason.value if t.stop_reason else None,
        "policy_version": t.policy_version,
        "policy_fingerprint": t.policy_fingerprint,
        "prompt_tokens": t.prompt_tokens,
        "response_tokens": t.response_tokens,
        "logprobs": [round(x, 6) for x in t.logprobs],
        **({"action_mask": t.action_mask} if 0 in t.action_mask else {}),  # 0: the environment wrote the token
        **({"token_advantages": [round(x, 6) for x in t.token_advantages]} if t.token_advantages else {}),
    }
