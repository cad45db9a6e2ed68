"""Advantage estimators and reductions: plain functions over trajectories, no torch.

An estimator sets `advantage` on every trajectory whose reward is known. A baseline counts rollouts, not trajectories:
where a rewritten history made several trajectories of one rollout, the rollout counts once. A reward of None enters
no baseline and gets advantage 0.

Legend: r_i what rollout i earned (its reward less the penalties of `rlvr.algorithms.shaping`), G its group, N rollouts
in the batch, std is the population's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlvr.types import Trajectory, group_by, mean, std

EPSILON = 1e-6  # verl's addend to a standard deviation


@dataclass
class Memory:
    """What is known of earlier batches: a moving average of the mean reward, None before the first one."""

    decay: float = 0.99
    baseline: float | None = None

    def observe(self, trajectories: Sequence[Trajectory]) -> None:
        """baseline <- decay x baseline + (1 - decay) x mean of the batch; the first batch's mean starts it."""
        earned = list(rollout_values(trajectories).values())
        if not earned:
            return
        now = mean(earned)
        self.baseline = now if self.baseline is None else self.decay * self.baseline + (1 - self.decay) * now


Estimator = Callable[[Sequence[Trajectory], Memory], None]
Values = Callable[[list[float]], Sequence[float]]


def rollout_values(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What each rollout earned, reward less penalty. A trajectory without `rollout_id` is a rollout of its own."""
    return {_rollout(i, t): t.reward - t.penalty for i, t in enumerate(trajectories) if t.reward is not None}


def _rollout(index: int, trajectory: Trajectory) -> str:
    return trajectory.rollout_id or f"#{index}"


def _assign(trajectories: Sequence[Trajectory], baseline: float, scale: float = 1.0) -> None:
    for t in trajectories:
        t.advantage = 0.0 if t.reward is None else (t.reward - t.penalty - baseline) / scale


def _groups(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    return list(group_by(trajectories, lambda t: t.group_id).values())


def group_mean(trajectories: Sequence[Trajectory], memory: Memory) -> None:
    """A_i = r_i - mean_G(r). Dr. GRPO, arXiv:2503.20783: no division by the group's std, which favours the extremes."""
    for group in _groups(trajectories):
        _assign(group, mean(list(rollout_values(group).values())))


def group_normalized(trajectories: Sequence[Trajectory], memory: Memory) -> None:
    """A_i = (r_i - mean_G(r)) / (std_G(r) + 1e-6). GRPO, arXiv:2402.03300, section 4.1.2."""
    for group in _groups(trajectories):
        earned = list(rollout_values(group).values())
        _assign(group, mean(earned), std(earned) + EPSILON)


def group_mean_batch_std(trajectories: Sequence[Trajectory], memory: Memory) -> None:
    """A_i = (r_i - mean_G(r)) / (std of these differences over the batch + 1e-6).

    The variant of REINFORCE++ with a baseline, arXiv:2501.03262. (Lite PPO, arXiv:2508.08221, divides by the std of the
    rewards themselves.)
    """
    group_mean(trajectories, memory)
    centred = {_rollout(i, t): t.advantage for i, t in enumerate(trajectories) if t.reward is not None}
    scale = std(list(centred.values())) + EPSILON
    for t in trajectories:
        t.advantage /= scale


def leave_one_out(trajectories: Sequence[Trajectory], memory: Memory) -> None:
    """A_i = r_i - mean of the group's other rewards = n / (n - 1) (r_i - mean_G(r)). RLOO, arXiv:2402.14740, eq. 8.

    A group with one known reward has no others: its advantage is 0.
    """
    for group in _groups(trajectories):
        earned = list(rollout_values(group).values())
        n = len(earned)
        _assign(group, mean(earned))
        for t in group:
            t.advantage *= n / (n - 1) if n > 1 else 0.0


def batch_mean(trajectories: Sequence[Trajectory], memory: Memory) -> None:
    """A_i = r_i - mean over the batch. REINFORCE with a constant baseline, Williams 1992."""
    _assign(trajectories, mean(list(rollout_values(trajectories).values())))


def batch_normalized(trajectories: Sequence[Trajectory], memory: Memory) -> None:
    """A_i = (r_i - mean) / (std + 1e-6) over the batch: advantage normalisation as commonly done in PPO."""
    earned = list(rollout_values(trajectories).values())
    _assign(trajectories, mean(earned), std(earned) + EPSILON)


def ema(trajectories: Sequence[Trajectory], memory: Memory) -> None:
    """A_i = r_i - b with b the moving average of earlier batches' means; the first batch is its own baseline.

    b <- decay b + (1 - decay) mean after each batch. This batch is not in it, so the baseline is independent of the
    actions it judges. Williams 1992, section 7.
    """
    own = mean(list(rollout_values(trajectories).values()))
    _assign(trajectories, own if memory.baseline is None else memory.baseline)


def raw(trajectories: Sequence[Trajectory], memory: Memory) -> None:
    """A_i = r_i: no baseline."""
    _assign(trajectories, 0.0)


ESTIMATORS: dict[str, Estimator] = {
    "group_mean": group_mean,
    "group_normalized": group_normalized,
    "group_mean_batch_std": group_mean_batch_std,
    "leave_one_out": leave_one_out,
    "batch_mean": batch_mean,
    "batch_normalized": batch_normalized,
    "ema": ema,
    "raw": raw,
}
# Those whose baseline is not a group's own: a group of one teaches, and equal rewards within a group do too.
BATCH_ESTIMATORS = {"batch_mean", "batch_normalized", "ema", "raw"}


def register_advantage(name: str, *, baseline: str = "group") -> Callable[[Values], Values]:
    """Register `function(earned) -> advantages` under `name`, for `algorithm.advantage=name` and rows of your own.

    It is called once for each group, or once for the batch (`baseline="batch"`), with what each answer earned (reward
    less penalties), and returns as many numbers. Answers without a known reward are left out, and get 0.
    """
    if baseline not in ("group", "batch"):
        raise ValueError(f"register_advantage: baseline={baseline!r}, expected group or batch")

    def register(function: Values) -> Values:
        if name in ESTIMATORS:
            raise ValueError(f"advantage {name!r} is registered already; choose another name")

        def estimator(trajectories: Sequence[Trajectory], memory: Memory) -> None:
            for members in _groups(trajectories) if baseline == "group" else [list(trajectories)]:
                earned = rollout_values(members)
                if not earned:
                    _assign(members, 0.0)
                    continue
                given = [float(a) for a in function(list(earned.values()))]
                if len(given) != len(earned) or not all(map(math.isfinite, given)):
                    raise ValueError(f"advantage {name!r}: expected {len(earned)} finite numbers, got {given}")
                advantages = dict(zip(earned, given, strict=True))
                for i, t in enumerate(members):
                    t.advantage = 0.0 if t.reward is None else advantages[_rollout(i, t)]

        ESTIMATORS[name] = estimator
        if baseline == "batch":
            BATCH_ESTIMATORS.add(name)
        return function

    return register


def token_mean(trajectories: Sequence[Trajectory], max_tokens: int) -> list[float]:
    """1 / T for T sampled tokens in the whole batch: every token counts alike. DAPO, arXiv:2503.14476, eq. 8."""
    total = sum(t.num_action_tokens for t in trajectories)
    return [1.0 / total if total else 0.0] * len(trajectories)


def sequence_mean(trajectories: Sequence[Trajectory], max_tokens: int) -> list[float]:
    """1 / (N len_i): every answer counts alike, so tokens of short answers weigh more. GRPO, arXiv:2402.03300."""
    lengths: dict[str, int] = {}
    for i, t in enumerate(trajectories):
        lengths[_rollout(i, t)] = lengths.get(_rollout(i, t), 0) + t.num_action_tokens
    own = [lengths[_rollout(i, t)] for i, t in enumerate(trajectories)]
    return [1.0 / (len(lengths) * length) if length else 0.0 for length in own]


def constant(trajectories: Sequence[Trajectory], max_tokens: int) -> list[float]:
    """1 / (N M) for a budget of M tokens: no length in it at all. Dr. GRPO, arXiv:2503.20783, appendix."""
    return [1.0 / (_answers(trajectories) * max_tokens)] * len(trajectories)


def sequence_sum(trajectories: Sequence[Trajectory], max_tokens: int) -> list[float]:
    """1 / N: the mean over answers of the summed token losses, the textbook policy gradient."""
    return [1.0 / _answers(trajectories)] * len(trajectories)


def _answers(trajectories: Sequence[Trajectory]) -> int:
    """N: a rollout counts once, however many trajectories a rewritten history made of it."""
    return len({_rollout(i, t) for i, t in enumerate(trajectories)})


Reduction = Callable[[Sequence[Trajectory], int], list[float]]
REDUCTIONS: dict[str, Reduction] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "constant": constant,
    "sequence_sum": sequence_sum,
}


def teaches(group: Sequence[Trajectory]) -> bool:
    """Whether a group's known rewards differ: with a group baseline, equal rewards give no gradient.

    The rewards as verifiers gave them: a penalty makes no group worth keeping.
    """
    return len({t.reward for t in group if t.reward is not None}) > 1
