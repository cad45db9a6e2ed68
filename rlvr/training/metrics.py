"""What a step says about itself: statistics of the answers, and of the update.

Each name has its formula in docs/metrics.md.

Names are TRL's where it has one, the Tinker cookbook's beside them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rlvr.algorithms import Algorithm
from rlvr.algorithms.advantages import teaches
from rlvr.protocols import ForwardBackwardOutput
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
    return stats


class UpdateSums:
    """Running sums over the updates of one step, from which its metrics are made."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.loss = 0.0
        self.low, self.high = 0.0, math.inf
        bounds = algorithm.loss_config
        self.low, self.high = bounds.get("clip_low_threshold", 0.0), bounds.get("clip_high_threshold", math.inf)
        self.updates = 0
        self.clipped = {"low": 0, "high": 0}
        self.tokens = 0
        self.last_kl = 0.0
        self.gap = self.gap_max = self.kl_v1 = self.kl_v2 = 0.0
        self.ratio_max = 1.0

    def add(self, rows: Sequence[Trajectory], output: ForwardBackwardOutput, on_policy: bool) -> None:
        masks = [np.asarray(t.action_mask, dtype=bool) for t in rows]
        p = np.concatenate(
            [o["logprobs"].data[-len(m) :][m] for o, m in zip(output.loss_fn_outputs, masks, strict=True)]
        ).astype(np.float64)
        q = np.concatenate([np.asarray(t.logprobs)[m] for t, m in zip(rows, masks, strict=True)])
        advantage = np.concatenate([np.full(m.sum(), t.advantage) for t, m in zip(rows, masks, strict=True)])
        delta = p - q
        ratio = np.exp(delta)
        self.loss += output.metrics["loss:sum"]
        self.updates += 1
        self.tokens += len(p)
        self.clipped["low"] += int(((ratio < self.low) & (advantage < 0)).sum())
        self.clipped["high"] += int(((ratio > self.high) & (advantage > 0)).sum())
        self.last_kl = float(np.mean(ratio - 1 - delta))
        self.ratio_max = max(self.ratio_max, float(ratio.max()))
        if on_policy:
            self.kl_v1, self.kl_v2 = float(-delta.mean()), float(0.5 * (delta**2).mean())
            self.gap, self.gap_max = float(np.abs(delta).mean()), float(np.abs(delta).max())

    def metrics(self) -> dict[str, float]:
        if not self.updates:
            return {}  # nothing was measured: a zero would look like a perfect score
        tokens = max(self.tokens, 1)
        low, high = self.clipped["low"] / tokens, self.clipped["high"] / tokens
        return {
            "loss": self.loss / max(self.updates, 1),
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": low + high,
            "optim/kl_sample_train_v1": self.kl_v1,
            "optim/kl_sample_train_v2": self.kl_v2,
            "sampling/sampling_logp_difference/mean": self.gap,
            "sampling/sampling_logp_difference/max": self.gap_max,
            "sampling/importance_sampling_ratio/max": self.ratio_max,
            "optim/approx_kl": self.last_kl,
        }
