"""A trajectory to look at: a line for the console, and a JSON row of `rollouts/` and of a batch that failed."""

from __future__ import annotations

import json

from rlvr.types import Trajectory


def told(trajectory: Trajectory) -> str:
    verdicts = [f"{s.outcome.value}{f' ({s.reason})' if s.reason else ''}" for s in trajectory.scores.values()]
    reward = "no reward" if trajectory.reward is None else f"reward {trajectory.reward:.3g}"
    return f"{reward}, {', '.join(verdicts)}"


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
                "scores": {
                    name: {"value": s.value, "outcome": s.outcome.value, "reason": s.reason, "parts": s.parts}
                    for name, s in t.scores.items()
                },
                "stop_reason": t.stop_reason.value if t.stop_reason else None,
                "policy_version": t.policy_version,
                "policy_fingerprint": t.policy_fingerprint,
                "response_tokens": t.response_tokens,
                "logprobs": [round(x, 6) for x in t.logprobs],
            }
        )
        + "\n"
    )
