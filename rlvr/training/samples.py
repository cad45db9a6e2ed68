"""A trajectory to look at: a line for the console, and a JSON row of `rollouts/` and of a batch that failed."""

from __future__ import annotations

import json
from typing import Any

from rlvr.types import Score, Trajectory

HEAD, TAIL = 200, 300  # characters of a verdict's detail that are kept


def told(trajectory: Trajectory) -> str:
    verdicts = [f"{s.outcome.value}{f' ({s.reason})' if s.reason else ''}" for s in trajectory.scores.values()]
    reward = "no reward" if trajectory.reward is None else f"reward {trajectory.reward:.3g}"
    return f"{reward}, {', '.join(verdicts)}"


def verdict(score: Score) -> dict[str, Any]:
    """A score as JSON. Of its detail the beginning and the end stay: a traceback says last what went wrong."""
    detail = score.detail
    if len(detail) > HEAD + TAIL:
        detail = f"{detail[:HEAD]} ... {detail[-TAIL:]}"
    told = {"value": score.value, "outcome": score.outcome.value, "reason": score.reason, "parts": score.parts}
    return told | ({"detail": detail} if detail else {})


def row(trajectory: Trajectory) -> str:
    """A trajectory as one JSON line, to look at: everything but the tokens' masks."""
    t = trajectory
    return (
        json.dumps(
            {
                "rollout_id": t.rollout_id,
                "group_id": t.group_id,
                "task_id": t.task.id if t.task else "",
                "level": t.task.level if t.task else "",
                "prompt": t.prompt,
                "response": t.response,
                **({} if t.answer is None else {"answer": t.answer}),  # its last turn, which alone is judged
                "reward": t.reward,
                "advantage": t.advantage,
                "scores": {name: verdict(score) for name, score in t.scores.items()},
                "stop_reason": t.stop_reason.value if t.stop_reason else None,
                "policy_version": t.policy_version,
                "policy_fingerprint": t.policy_fingerprint,
                "response_tokens": t.response_tokens,
                "logprobs": [round(x, 6) for x in t.logprobs],
            }
        )
        + "\n"
    )
