"""What a step says about its answers. (What it says about the update: `rlvr.algorithms.measure`.)

Each name has its formula in docs/metrics.md. Names are TRL's where it has one, the Tinker cookbook's beside them.
"""

from __future__ import annotations

from rlvr.algorithms.advantages import teaches
from rlvr.types import Outcome, Trajectory, TrajectoryBatch, group_by, mean


def last_of_rollouts(batch: TrajectoryBatch) -> list[Trajectory]:
    """One trajectory a rollout, the last: the one that was judged. A rewritten history makes several of one rollout."""
    return list({t.rollout_id or f"#{i}": t for i, t in enumerate(batch)}.values())


def passes_by_level(batch: TrajectoryBatch, reward: str) -> dict[str, list[bool]]:
    """Verdicts of the judged answers under the verifier `reward`, by the level of their task."""
    answers = last_of_rollouts(batch)
    judged = [t for t in answers if t.reward is not None and t.task is not None and t.task.level]
    levels = group_by(judged, lambda t: t.task.level if t.task else "")
    return {level: [t.scores[reward].outcome is Outcome.PASSED for t in members] for level, members in levels.items()}


def answer_statistics(batch: TrajectoryBatch, reward: str) -> dict[str, float]:
    """What the step's answers were like, as judged by the verifier `reward`. A rollout counts once."""
    answers = TrajectoryBatch(last_of_rollouts(batch))
    groups = list(group_by(batch, lambda t: t.group_id).values())
    verdicts = [t.scores[reward] for t in answers if reward in t.scores]
    judged = [v for v in verdicts if v.value is not None]
    passed = [v.outcome is Outcome.PASSED for v in judged]
    known = [g for g in groups if any(t.reward is not None for t in g)]
    stats = {
        "reward": answers.mean_reward,
        "reward_std": answers.std_reward,
        "reward/min": answers.min_reward,
        "reward/max": answers.max_reward,
        "frac_reward_zero_std": mean([float(not teaches(g)) for g in known]),
        "env/all/correct": mean([float(p) for p in passed]),
        "env/all/reward/total": answers.mean_reward,
        "env/all/by_group/frac_mixed": mean([float(teaches(g)) for g in known]),
        "completions/mean_length": mean([t.num_action_tokens for t in batch]),
        "completions/max_length": float(max((t.num_action_tokens for t in batch), default=0)),
        "completions/clipped_ratio": mean([float(t.truncated) for t in answers]),
        "entropy": -mean([lp for t in batch for lp, m in zip(t.logprobs, t.action_mask, strict=True) if m]),
        "verifier/error_rate": mean([float(v.outcome is Outcome.ERROR) for v in verdicts]),
        "verifier/invalid_rate": mean([float(v.outcome is Outcome.INVALID) for v in verdicts]),
        "verifier/no_answer_rate": mean([float(v.reason == "no_answer") for v in judged]),
        "rollout/groups": float(len(groups)),
        "rollout/tokens": float(sum(t.num_action_tokens for t in batch)),
    }
    for part in sorted({p for v in judged for p in v.parts}):
        stats[f"rewards/{reward}/{part}/mean"] = mean([v.parts[part] for v in judged if part in v.parts])
    for level, passes in passes_by_level(batch, reward).items():
        stats[f"env/level_{level}/correct"] = mean([float(p) for p in passes])
    for name in sorted({name for t in answers for name in t.scores}):
        given = [t.scores[name].value for t in answers if name in t.scores]
        stats[f"rewards/{name}/mean"] = mean([value for value in given if value is not None])
    return stats
