"""Metrics of the completions of a step. (Those of the update: `rlvr.algorithms.update_statistics`.)

Each name has its formula in docs/run/metrics.md. Names are TRL's where it has one, the Tinker cookbook's beside them.
"""

from __future__ import annotations

from rlvr.algorithms import Algorithm
from rlvr.algorithms.returns import has_mixed_rewards
from rlvr.core.types import Outcome, Trajectory, TrajectoryBatch, group_by, mean
from rlvr.core.verdict_reasons import ReasonNames

GOOD = 0.5  # the cookbook's bound between a group that is all good and one that is all bad


def last_of_rollouts(batch: TrajectoryBatch) -> list[Trajectory]:
    """The last trajectory of each rollout, which was judged. A rewritten history makes several of one rollout."""
    return list({t.rollout_id or f"#{i}": t for i, t in enumerate(batch)}.values())


def verdicts_by_level(batch: TrajectoryBatch, reward: str) -> dict[str, list[bool]]:
    """Verdicts of the verifier `reward` on the judged completions, by the level of their task."""
    answers = last_of_rollouts(batch)
    judged = [t for t in answers if t.reward is not None and t.task is not None and t.task.level]
    levels = group_by(judged, lambda t: t.task.level if t.task else "")
    return {level: [t.scores[reward].outcome is Outcome.PASSED for t in members] for level, members in levels.items()}


def verdicts_by_task(batch: TrajectoryBatch, reward: str) -> dict[str, list[list[bool]]]:
    """Verdicts of the verifier `reward` by the id of their task: a list for each group, of its judged completions."""
    tasks: dict[str, list[list[bool]]] = {}
    for group in group_by(last_of_rollouts(batch), lambda t: t.group_id).values():
        for id, members in group_by((t for t in group if t.task), lambda t: t.task.id if t.task else "").items():
            judged = [t.scores[reward].outcome is Outcome.PASSED for t in members if t.reward is not None]
            tasks.setdefault(id, []).append(judged)
    return tasks


def size_statistics(batch: TrajectoryBatch) -> dict[str, float]:
    """Counts of groups and tokens: all that there is to measure of completions that come with the data."""
    return {
        "completions/mean_length": mean([t.num_action_tokens for t in batch]),
        "completions/max_length": float(max((t.num_action_tokens for t in batch), default=0)),
        "rollout/groups": float(len(group_by(batch, lambda t: t.group_id))),
        "rollout/tokens": float(sum(t.num_action_tokens for t in batch)),
    }


def measure_signal(batch: TrajectoryBatch, algorithm: Algorithm) -> dict[str, float]:
    """The share of judged groups that the algorithm can learn from, after its update."""
    return {"frac_groups_with_signal": mean([float(algorithm.has_signal(g)) for g in _judged_groups(batch)])}


def _judged_groups(batch: TrajectoryBatch) -> list[list[Trajectory]]:
    groups = group_by(batch, lambda t: t.group_id).values()
    return [group for group in groups if any(t.reward is not None for t in group)]


def answer_statistics(batch: TrajectoryBatch, reward: str, names: ReasonNames | None = None) -> dict[str, float]:
    """Metrics of the step's completions as judged by the verifier `reward`. A rollout counts once.

    `names` are those that the run has for reasons so far.
    """
    answers = TrajectoryBatch(last_of_rollouts(batch))
    verdicts = [t.scores[reward] for t in answers if reward in t.scores]
    judged = [v for v in verdicts if v.value is not None]
    passed = [v.outcome is Outcome.PASSED for v in judged]
    known = _judged_groups(batch)
    stats = {
        "reward": answers.mean_reward,
        "reward_std": answers.std_reward,
        "reward/min": answers.min_reward,
        "reward/max": answers.max_reward,
        "frac_reward_zero_std": mean([float(not has_mixed_rewards(g)) for g in known]),
        "env/all/correct": mean([float(p) for p in passed]),
        "env/all/reward/total": answers.mean_reward,
        "reward/total": answers.mean_reward,
        **_by_group(known),
        **_by_turn(batch, len(answers)),
        **size_statistics(batch),
        "completions/clipped_ratio": mean([float(t.truncated) for t in answers]),
        "entropy": -mean([lp for t in batch for lp, m in zip(t.logprobs, t.action_mask, strict=True) if m]),
        "verifier/error_rate": mean([float(v.outcome is Outcome.ERROR) for v in verdicts]),
        "verifier/invalid_rate": mean([float(v.outcome is Outcome.INVALID) for v in verdicts]),
        "verifier/no_answer_rate": mean([float(v.reason == "no_answer") for v in judged]),
    }
    stats |= {f"verifier/{name}": count for name, count in (names or ReasonNames()).count(verdicts).items()}
    for name, values in _environment_reports(batch).items():  # the verifier's value of the same name has priority
        stats.setdefault(f"env/all/{name}", mean(values))
    for role, own in group_by([t for t in batch if t.role], lambda t: t.role).items():
        stats[f"env/all/distinct/{role}"] = len({tuple(t.response_tokens) for t in own}) / len(own)
    for part in sorted({p for v in judged for p in v.parts}):
        stats[f"rewards/{reward}/{part}/mean"] = mean([v.parts[part] for v in judged if part in v.parts])
    for level, passes in verdicts_by_level(batch, reward).items():
        stats[f"env/level_{level}/correct"] = mean([float(p) for p in passes])
    for name in sorted({name for t in answers for name in t.scores}):
        given = [t.scores[name].value for t in answers if name in t.scores]
        stats[f"rewards/{name}/mean"] = mean([value for value in given if value is not None])
    return stats


def _by_group(groups: list[list[Trajectory]]) -> dict[str, float]:
    """Shares of groups whose rewards differ, or are all equal and at least `GOOD` (all good) or below (all bad)."""
    worst = [min(t.reward for t in g if t.reward is not None) for g in groups]
    mixed = [has_mixed_rewards(g) for g in groups]
    return {
        "env/all/by_group/frac_mixed": mean([float(m) for m in mixed]),
        "env/all/by_group/frac_all_good": mean([float(not m and w >= GOOD) for m, w in zip(mixed, worst, strict=True)]),
        "env/all/by_group/frac_all_bad": mean([float(not m and w < GOOD) for m, w in zip(mixed, worst, strict=True)]),
    }


def _by_turn(batch: TrajectoryBatch, episodes: int) -> dict[str, float]:
    """Tokens written and read per turn; a turn reads everything before it, not only what is new."""
    starts = [(t, start) for t in batch for start in t.turn_starts or [0]]
    acted = float(sum(t.num_action_tokens for t in batch))
    read = float(sum(len(t.prompt_tokens) + start for t, start in starts))
    turns = float(len(starts))
    return {
        "env/all/ac_tokens_per_turn": acted / turns if turns else 0.0,
        "env/all/ob_tokens_per_turn": read / turns if turns else 0.0,
        "env/all/turns_per_episode": turns / episodes if episodes else 0.0,
        "env/all/total_episodes": float(episodes),
        "env/all/total_turns": turns,
        "env/all/total_ac_tokens": acted,
        "env/all/total_ob_tokens": read,
    }


def _environment_reports(batch: TrajectoryBatch) -> dict[str, list[float]]:
    """Values that environments reported, by name, over the turns and group rewards that have them."""
    values: dict[str, list[float]] = {}
    for report in (report for t in batch for report in t.reports):
        for name, value in report.items():
            values.setdefault(name, []).append(float(value))
    return dict(sorted(values.items()))
