"""Advantage estimators and reductions: plain functions over trajectories, no torch.

An estimator sets `advantage` on every trajectory, some also one for each token. A baseline counts rollouts, not
trajectories: a rollout whose history was rewritten has several trajectories and counts once. A reward of None enters no
baseline and gets advantage 0.

Legend: r_i the return of rollout i (its reward minus the penalties of `rlvr.algorithms.shaping`), G its group, N the
rollouts in the batch, std the population's standard deviation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlvr.algorithms.gae import gae
from rlvr.algorithms.process import process_normalized
from rlvr.core.types import Trajectory, group_by, mean, std

EPSILON = 1e-6  # verl's addend to a standard deviation


@dataclass
class RunningBaseline:
    """A moving average of the mean return over batches; `value` is None before the first one."""

    decay: float = 0.99
    value: float | None = None

    def observe(self, trajectories: Sequence[Trajectory]) -> None:
        """value <- decay x value + (1 - decay) x mean of the batch; the first batch's mean starts it."""
        returns = list(rollout_values(trajectories).values())
        if not returns:
            return
        now = mean(returns)
        self.value = now if self.value is None else self.decay * self.value + (1 - self.decay) * now


Estimator = Callable[..., None]  # (trajectories, running baseline, and what its field of a spec gives it)
Values = Callable[[list[float]], Sequence[float]]


def rollout_values(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The return of each rollout, reward minus penalty. A trajectory without `rollout_id` is a rollout of its own."""
    return {_rollout(i, t): t.reward - t.penalty for i, t in enumerate(trajectories) if t.reward is not None}


def _rollout(index: int, trajectory: Trajectory) -> str:
    return trajectory.rollout_id or f"#{index}"


def _assign(trajectories: Sequence[Trajectory], baseline: float, scale: float = 1.0) -> None:
    for t in trajectories:
        t.advantage = 0.0 if t.reward is None else (t.reward - t.penalty - baseline) / scale


def _groups(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    return list(group_by(trajectories, lambda t: t.group_id).values())


def group_mean(trajectories: Sequence[Trajectory], baseline: RunningBaseline) -> None:
    """A_i = r_i - mean_G(r). Dr. GRPO, arXiv:2503.20783: no division by the group's std, which favours the extremes."""
    for group in _groups(trajectories):
        _assign(group, mean(list(rollout_values(group).values())))


def group_normalized(trajectories: Sequence[Trajectory], baseline: RunningBaseline) -> None:
    """A_i = (r_i - mean_G(r)) / (std_G(r) + 1e-6). GRPO, arXiv:2402.03300, section 4.1.2."""
    for group in _groups(trajectories):
        returns = list(rollout_values(group).values())
        _assign(group, mean(returns), std(returns) + EPSILON)


def group_mean_batch_std(trajectories: Sequence[Trajectory], baseline: RunningBaseline) -> None:
    """A_i = (r_i - mean_G(r)) / (std of the returns over the batch + 1e-6). Lite PPO, arXiv:2508.08221."""
    group_mean(trajectories, baseline)
    scale = std(list(rollout_values(trajectories).values())) + EPSILON
    for t in trajectories:
        t.advantage /= scale


def leave_one_out(trajectories: Sequence[Trajectory], baseline: RunningBaseline) -> None:
    """A_i = r_i - mean of the group's other rewards = n / (n - 1) (r_i - mean_G(r)). RLOO, arXiv:2402.14740, eq. 8.

    A group with one known reward has advantage 0.
    """
    for group in _groups(trajectories):
        returns = list(rollout_values(group).values())
        n = len(returns)
        _assign(group, mean(returns))
        for t in group:
            t.advantage *= n / (n - 1) if n > 1 else 0.0


def batch_mean(trajectories: Sequence[Trajectory], baseline: RunningBaseline) -> None:
    """A_i = r_i - mean over the batch. REINFORCE with a constant baseline, Williams 1992."""
    _assign(trajectories, mean(list(rollout_values(trajectories).values())))


def batch_normalized(trajectories: Sequence[Trajectory], baseline: RunningBaseline) -> None:
    """A_i = (r_i - mean) / (std + 1e-6) over the batch: advantage normalisation as commonly done in PPO."""
    returns = list(rollout_values(trajectories).values())
    _assign(trajectories, mean(returns), std(returns) + EPSILON)


def token_normalized(trajectories: Sequence[Trajectory], baseline: RunningBaseline) -> None:
    """A_t = (G_t - mean) / (std + 1e-6) over all sampled tokens of the batch, G_t = r_i less the KL from token t on.

    So a long completion has more weight in the mean. `kl_in=reward` charges the KL token by token: token t pays for its
    own KL and that of all later tokens. REINFORCE++, arXiv:2501.03262.
    """
    raw(trajectories, baseline)
    _normalize_tokens(trajectories)


def group_mean_token_normalized(trajectories: Sequence[Trajectory], baseline: RunningBaseline) -> None:
    """A_i = (d_i - mean(d)) / (std(d) + 1e-6), d_i = r_i - mean_G(r), both over all sampled tokens of the batch.

    REINFORCE++ with a baseline, arXiv:2501.03262; its KL is k2 in the loss. The mean of d over tokens need not be
    0, so a group of equal rewards has an advantage too.
    """
    group_mean(trajectories, baseline)
    _normalize_tokens(trajectories)


def _normalize_tokens(trajectories: Sequence[Trajectory]) -> None:
    """Give each sampled token its trajectory's advantage and the penalties that earlier tokens paid, standardized."""
    paid: dict[str, float] = {}
    values: list[list[float]] = []
    for i, t in enumerate(trajectories):
        rollout, of_tokens = _rollout(i, t), [t.advantage] * len(t.response_tokens)
        for place, cost in enumerate(t.token_penalties):
            of_tokens[place] += paid.get(rollout, 0.0)
            paid[rollout] = paid.get(rollout, 0.0) + cost
        values.append(of_tokens)
    rows = list(zip(trajectories, values, strict=True))
    tokens = sorted(v for t, of in rows if t.reward is not None for v, m in zip(of, t.action_mask, strict=True) if m)
    centre, scale = mean(tokens), std(tokens) + EPSILON
    for t, of_tokens in rows:
        known = t.reward is not None
        t.token_advantages = [
            (v - centre) / scale if m and known else 0.0 for v, m in zip(of_tokens, t.action_mask, strict=True)
        ]
        t.advantage = mean([a for a, m in zip(t.token_advantages, t.action_mask, strict=True) if m])


def ema(trajectories: Sequence[Trajectory], baseline: RunningBaseline) -> None:
    """A_i = r_i - b with b the moving average of earlier batches' means; the first batch is its own baseline.

    b <- decay b + (1 - decay) mean after each batch. This batch is not in b, so the baseline does not depend on the
    actions it is subtracted from. Williams 1992, section 7.
    """
    own = mean(list(rollout_values(trajectories).values()))
    _assign(trajectories, own if baseline.value is None else baseline.value)


def raw(trajectories: Sequence[Trajectory], baseline: RunningBaseline) -> None:
    """A_i = r_i: no baseline."""
    _assign(trajectories, 0.0)


def pass_at_k(trajectories: Sequence[Trajectory], baseline: RunningBaseline, k: int = 2) -> None:
    """A_i = k x mean over the sets T of k - 1 others of its group of max(0, r_i - max_T(r)), k = `pass_k`.

    With the reduction `sequence_sum` and every group kept it is an unbiased gradient of the expected best of k: each of
    k samples is paid what it adds to the best of the others. PKPO, Walder and Karkhanis 2025, arXiv:2505.15201, the
    leave-one-out form over all sets of k. Reductions that depend on lengths, and groups that are dropped, make it
    biased. A group with fewer than k known rewards has advantage 0.
    """
    for group in _groups(trajectories):
        returns = rollout_values(group)
        ranked, n = sorted(returns.values()), len(returns)
        sets = math.comb(n - 1, k - 1) if n >= k else 1
        for i, t in enumerate(group):
            t.advantage = 0.0
            if t.reward is None or n < k:
                continue
            own = returns[_rollout(i, t)]
            # Of the others the m-th from below, m from 0, is the best of T in C(m, k - 2) sets.
            gains = [math.comb(m, k - 2) * (own - r) for m, r in enumerate(ranked) if r < own]
            t.advantage = k * math.fsum(gains) / sets


def zero(trajectories: Sequence[Trajectory], baseline: RunningBaseline) -> None:
    """A_i = 0: rewards teach nothing. For distillation from a teacher alone (`teacher_coef`)."""
    for t in trajectories:
        t.advantage = 0.0


def acceptance(trajectories: Sequence[Trajectory], baseline: RunningBaseline, above: float = 0.5) -> None:
    """A_i = 1 if r_i > `accept_above`; the others leave the batch and its denominators.

    Rejection sampling: RAFT, arXiv:2304.06767, and ReST, arXiv:2308.08998, with a threshold on the reward.
    """
    for t in trajectories:
        t.advantage = float(t.reward is not None and t.reward - t.penalty > above)


def verdict(trajectories: Sequence[Trajectory], baseline: RunningBaseline, above: float = 0.5) -> None:
    """A_i = 1 if r_i > `accept_above`, else -1: which completions a preference loss prefers to which."""
    acceptance(trajectories, baseline, above)
    for t in trajectories:
        t.advantage = 2 * t.advantage - 1 if t.reward is not None else 0.0


ESTIMATORS: dict[str, Estimator] = {
    "group_mean": group_mean,
    "group_normalized": group_normalized,
    "group_mean_batch_std": group_mean_batch_std,
    "leave_one_out": leave_one_out,
    "batch_mean": batch_mean,
    "batch_normalized": batch_normalized,
    "token_normalized": token_normalized,
    "group_mean_token_normalized": group_mean_token_normalized,
    "ema": ema,
    "raw": raw,
    "pass_at_k": pass_at_k,
    "process_normalized": process_normalized,
    "gae": gae,
    "zero": zero,
    "acceptance": acceptance,
    "verdict": verdict,
}
WITH_THRESHOLD = ("acceptance", "verdict")  # these take `above`, the field `accept_above` of a spec
# Their baseline is not a group's own, so a group of one, or of equal rewards, has a signal too.
BATCH_ESTIMATORS = {
    *("batch_mean", "batch_normalized", "token_normalized", "group_mean_token_normalized", "ema", "raw", "zero"),
    *("process_normalized", "gae", *WITH_THRESHOLD),
}


# Advantages that stay the same if all rewards are scaled and shifted alike, but for EPSILON.
STANDARDIZED = frozenset(
    {
        "group_normalized",
        "group_mean_batch_std",
        "batch_normalized",
        "token_normalized",
        "group_mean_token_normalized",
    }
)


def register_advantage(name: str, *, baseline: str = "group") -> Callable[[Values], Values]:
    """Register `function(returns) -> advantages` under `name`, for `algorithm.advantage=name` and specs of your own.

    It is called once per group, or once per batch (`baseline="batch"`), with the return of every rollout (reward minus
    penalties), and gives as many numbers. Rollouts without a known reward are left out and get 0.
    """
    if baseline not in ("group", "batch"):
        raise ValueError(f"register_advantage: baseline={baseline!r}, expected group or batch")

    def register(function: Values) -> Values:
        if name in ESTIMATORS:
            raise ValueError(f"advantage {name!r} is registered already; choose another name")

        def estimator(trajectories: Sequence[Trajectory], running: RunningBaseline) -> None:
            for members in _groups(trajectories) if baseline == "group" else [list(trajectories)]:
                returns = rollout_values(members)
                if not returns:
                    _assign(members, 0.0)
                    continue
                values = [float(a) for a in function(list(returns.values()))]
                if len(values) != len(returns) or not all(map(math.isfinite, values)):
                    raise ValueError(f"advantage {name!r}: expected {len(returns)} finite numbers, got {values}")
                advantages = dict(zip(returns, values, strict=True))
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
    """1 / (N len_i): every completion counts alike, so tokens of short ones weigh more. GRPO, arXiv:2402.03300."""
    lengths: dict[str, int] = {}
    for i, t in enumerate(trajectories):
        lengths[_rollout(i, t)] = lengths.get(_rollout(i, t), 0) + t.num_action_tokens
    own = [lengths[_rollout(i, t)] for i, t in enumerate(trajectories)]
    return [1.0 / (len(lengths) * length) if length else 0.0 for length in own]


def constant(trajectories: Sequence[Trajectory], max_tokens: int) -> list[float]:
    """1 / (N M) for a budget of M tokens: independent of lengths. Dr. GRPO, arXiv:2503.20783, appendix."""
    return [1.0 / (_count_rollouts(trajectories) * max_tokens)] * len(trajectories)


def sequence_sum(trajectories: Sequence[Trajectory], max_tokens: int) -> list[float]:
    """1 / N: the mean over completions of the summed token losses, the textbook policy gradient."""
    return [1.0 / _count_rollouts(trajectories)] * len(trajectories)


def _count_rollouts(trajectories: Sequence[Trajectory]) -> int:
    """N: the number of rollouts, each counted once."""
    return len({_rollout(i, t) for i, t in enumerate(trajectories)})


Reduction = Callable[[Sequence[Trajectory], int], list[float]]
REDUCTIONS: dict[str, Reduction] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "constant": constant,
    "sequence_sum": sequence_sum,
}


def has_mixed_returns(group: Sequence[Trajectory]) -> bool:
    """Whether a group's known rewards, less what overlong completions cost, differ. A KL does not count."""
    return len({t.reward - t.length_penalty for t in group if t.reward is not None}) > 1


def has_mixed_rewards(group: Sequence[Trajectory]) -> bool:
    """Whether a group's known rewards differ, as the verifiers gave them: penalties do not count.

    What an algorithm can learn from a group is `Algorithm.has_signal`.
    """
    return len({t.reward for t in group if t.reward is not None}) > 1
