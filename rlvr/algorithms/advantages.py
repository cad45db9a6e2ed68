"""Advantages: what a return is worth to each trajectory. No torch.

An advantage is a variant with an `estimate`, which sets `advantage` on every trajectory, some also one for each token.
A baseline counts rollouts, not trajectories: a rollout whose history was rewritten has several trajectories and counts
once. If the branches of an episode have rewards of their own (`Trajectory.turn_credits`), each of them counts in its
place. A reward of None enters no baseline and gets advantage 0.

Legend: r_i the return of rollout i (its reward minus the penalties of `rlvr.algorithms.penalties`), G its group, N the
rollouts in the batch, std the population's standard deviation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rlvr.algorithms.gae import gae
from rlvr.algorithms.part import Part, SpecView
from rlvr.algorithms.process import process_normalized
from rlvr.algorithms.returns import name_rollout, read_reward, rollout_values
from rlvr.core.types import Trajectory, group_by, mean, std
from rlvr.core.variants import Variants, setting

EPSILON = 1e-6  # verl's addend to a standard deviation


@dataclass
class RunningBaseline:
    """A moving average of the mean return over batches; `value` is None before the first one.

    `of_roles` are those of an advantage with one for each role, by game and role; None for the others.
    """

    decay: float = 0.99
    value: float | None = None
    of_roles: dict[str, float] | None = None

    def observe(self, trajectories: Sequence[Trajectory]) -> None:
        """value <- decay x value + (1 - decay) x mean of the batch; the first batch's mean starts it."""
        returns = list(rollout_values(trajectories).values())
        if not returns:
            return
        now = mean(returns)
        self.value = now if self.value is None else self.decay * self.value + (1 - self.decay) * now


Values = Callable[[list[float]], Sequence[float]]


def _assign(trajectories: Sequence[Trajectory], baseline: float, scale: float = 1.0) -> None:
    for t in trajectories:
        t.advantage = 0.0 if t.reward is None else (read_reward(t) - t.penalty - baseline) / scale
        if t.reward is not None and len(set(t.turn_credits)) > 1:
            values = [(credit - t.penalty - baseline) / scale for credit in t.turn_credits]
            ends = [*t.turn_starts[1:], len(t.response_tokens)]
            of_turns = [0.0] * t.turn_starts[0]
            for value, start, end in zip(values, t.turn_starts, ends, strict=True):
                of_turns += [value] * (end - start)
            _set_token_advantages(t, of_turns)


def _set_token_advantages(t: Trajectory, values: Sequence[float]) -> None:
    """Give the sampled tokens these advantages, and the trajectory their mean."""
    t.token_advantages = [value if acted else 0.0 for value, acted in zip(values, t.action_mask, strict=True)]
    t.advantage = mean([value for value, acted in zip(values, t.action_mask, strict=True) if acted])


def _groups(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    return list(group_by(trajectories, lambda t: t.group_id).values())


@dataclass(frozen=True)
class Advantage(Part):
    """How returns become advantages. A new one is a class here and its entry in `ADVANTAGES`, or `register_advantage`.

    - `of_batch`: its baseline is not a group's own, so a group of one, or of equal rewards, has a signal too.
    - `is_standardized`: it stays the same if all rewards are scaled and shifted alike, but for EPSILON.
    - `is_groupwise`: it is computed within a group, so it can be known before the rest of the batch.
    """

    kind = "advantage"
    of_batch: ClassVar[bool] = False
    is_standardized: ClassVar[bool] = False
    is_groupwise: ClassVar[bool] = False
    takes_critic: ClassVar[bool] = False
    """It needs the values of a critic."""
    pays_by_token: ClassVar[bool] = False
    """A KL in the reward is paid token by token, and not by the completion's return."""
    has_threshold: ClassVar[bool] = False
    """It asks only whether a return is above a threshold."""
    is_verdict: ClassVar[bool] = False
    """It says which completions a preference loss prefers to which."""
    is_never_negative: ClassVar[bool] = False
    reads_no_reward: ClassVar[bool] = False
    why_no_kl: ClassVar[str] = ""
    """Why a KL in the reward would have no gradient, if it would not."""
    divides_by_group_deviation: ClassVar[bool] = False
    keeps_baseline: ClassVar[bool] = False
    """Its baseline moves from batch to batch."""
    reads_branches: ClassVar[bool] = False
    """It reads the rewards of branches (`Trajectory.turn_credits`)."""
    needs_roles: ClassVar[bool] = False
    """Its baseline is that of a role (`Trajectory.role`)."""

    def start_baseline(self) -> RunningBaseline:
        """The moving average of a run."""
        return RunningBaseline()

    def estimate(self, trajectories: Sequence[Trajectory], baseline: RunningBaseline) -> None:
        """Set `advantage` of every trajectory. `baseline` is the moving average before this batch."""
        raise NotImplementedError

    def observe(self, trajectories: Sequence[Trajectory], baseline: RunningBaseline) -> None:
        """Let the moving average see the batch, after `estimate`."""
        baseline.observe(trajectories)

    def split(self, group: Sequence[Trajectory]) -> list[list[Trajectory]]:
        """The parts of a group that are compared, each by itself."""
        return list(group_by(group, lambda t: t.role).values()) if self.needs_roles else [list(group)]

    def keep(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        """The trajectories that the batch and its denominators count."""
        return trajectories


@dataclass(frozen=True)
class GroupMeanAdvantage(Advantage):
    """A_i = r_i - mean_G(r). Dr. GRPO, arXiv:2503.20783: no division by the group's std, which favours the extremes."""

    name = "group_mean"
    reads_branches = True
    is_groupwise = True

    def estimate(self, trajectories: Sequence[Trajectory], baseline: RunningBaseline) -> None:
        for group in _groups(trajectories):
            _assign(group, mean(list(rollout_values(group).values())))


@dataclass(frozen=True)
class GroupNormalizedAdvantage(Advantage):
    """A_i = (r_i - mean_G(r)) / (std_G(r) + 1e-6). GRPO, arXiv:2402.03300, section 4.1.2."""

    name = "group_normalized"
    reads_branches = True
    is_groupwise = True
    is_standardized = True
    divides_by_group_deviation = True

    def estimate(self, trajectories: Sequence[Trajectory], baseline: RunningBaseline) -> None:
        for group in _groups(trajectories):
            returns = list(rollout_values(group).values())
            _assign(group, mean(returns), std(returns) + EPSILON)


@dataclass(frozen=True)
class GroupMeanBatchStdAdvantage(Advantage):
    """A_i = (r_i - mean_G(r)) / (std of the returns over the batch + 1e-6). Lite PPO, arXiv:2508.08221."""

    name = "group_mean_batch_std"
    reads_branches = True
    is_standardized = True

    def estimate(self, trajectories: Sequence[Trajectory], baseline: RunningBaseline) -> None:
        GroupMeanAdvantage().estimate(trajectories, baseline)
        scale = std(list(rollout_values(trajectories).values())) + EPSILON
        for t in trajectories:
            t.advantage /= scale
            t.token_advantages = [value / scale for value in t.token_advantages]


@dataclass(frozen=True)
class RewardNormalizedAdvantage(Advantage):
    """A_i = (s_i - mean(s)) / (std(s) + 1e-6) over the batch, s_i = sum_k w_k (r_ik - mean_G(r_k)) / (std_G(r_k)+1e-6).

    r_ik is the k-th of several rewards and w_k its weight: those of the reward `composite`, and the environment's. Each
    is normalized in its group before they are added up, so none is lost beside one that varies more, and answers that
    are right in more respects keep the greater advantage. With one reward s is `group_normalized`. GDPO,
    arXiv:2601.05242.
    """

    name = "reward_normalized"
    of_batch = True
    is_standardized = True

    @property
    def least_group(self) -> int:
        return 2

    def check(self, algorithm: SpecView) -> None:
        for term in algorithm.terms:
            if term.is_penalty:
                raise ValueError(
                    f"{term.key(term.switch)}={term.strength:g} has no effect with the advantage {self.name!r}, which "
                    "takes each reward by itself and no penalty of their sum; leave it out, use kl_in=loss for a KL, "
                    "or give the length a reward of its own (reward.type=composite)"
                )

    def estimate(self, trajectories: Sequence[Trajectory], baseline: RunningBaseline) -> None:
        sums: dict[str, float] = {}
        for group in _groups(trajectories):
            rollouts = {
                name_rollout(id(t), t): t.reward_parts or {"": [1.0, t.reward - t.penalty]}
                for t in group
                if t.reward is not None
            }
            by_name: dict[str, list[float]] = {}
            for parts in rollouts.values():
                for name, (_, value) in parts.items():
                    by_name.setdefault(name, []).append(value)
            scales = {name: (mean(values), std(values) + EPSILON) for name, values in by_name.items()}
            for rollout, parts in rollouts.items():
                terms = [w * (r - scales[name][0]) / scales[name][1] for name, (w, r) in parts.items()]
                sums[rollout] = math.fsum(terms)  # in any order of the parts the same bits
        centre, scale = mean(list(sums.values())), std(list(sums.values())) + EPSILON
        for t in trajectories:
            t.advantage = 0.0 if t.reward is None else (sums[name_rollout(id(t), t)] - centre) / scale


@dataclass(frozen=True)
class LeaveOneOutAdvantage(Advantage):
    """A_i = r_i - mean of the group's other rewards = n / (n - 1) (r_i - mean_G(r)). RLOO, arXiv:2402.14740, eq. 8.

    A group with one known reward has advantage 0.
    """

    name = "leave_one_out"
    reads_branches = True
    is_groupwise = True

    def estimate(self, trajectories: Sequence[Trajectory], baseline: RunningBaseline) -> None:
        for group in _groups(trajectories):
            returns = list(rollout_values(group).values())
            n = len(returns)
            _assign(group, mean(returns))
            factor = n / (n - 1) if n > 1 else 0.0
            for t in group:
                t.advantage *= factor
                t.token_advantages = [value * factor for value in t.token_advantages]


@dataclass(frozen=True)
class BatchMeanAdvantage(Advantage):
    """A_i = r_i - mean over the batch. REINFORCE with a constant baseline, Williams 1992."""

    name = "batch_mean"
    reads_branches = True
    of_batch = True

    def estimate(self, trajectories: Sequence[Trajectory], baseline: RunningBaseline) -> None:
        _assign(trajectories, mean(list(rollout_values(trajectories).values())))


@dataclass(frozen=True)
class BatchNormalizedAdvantage(Advantage):
    """A_i = (r_i - mean) / (std + 1e-6) over the batch: advantage normalisation as commonly done in PPO."""

    name = "batch_normalized"
    reads_branches = True
    of_batch = True
    is_standardized = True

    def estimate(self, trajectories: Sequence[Trajectory], baseline: RunningBaseline) -> None:
        returns = list(rollout_values(trajectories).values())
        _assign(trajectories, mean(returns), std(returns) + EPSILON)


@dataclass(frozen=True)
class TokenNormalizedAdvantage(Advantage):
    """A_t = (G_t - mean) / (std + 1e-6) over all sampled tokens of the batch, G_t = r_i less the KL from token t on.

    So a long completion has more weight in the mean. `kl_in=reward` charges the KL token by token: token t pays for its
    own KL and that of all later tokens. REINFORCE++, arXiv:2501.03262.
    """

    name = "token_normalized"
    reads_branches = True
    of_batch = True
    is_standardized = True
    pays_by_token = True

    def estimate(self, trajectories: Sequence[Trajectory], baseline: RunningBaseline) -> None:
        RawAdvantage().estimate(trajectories, baseline)
        _normalize_tokens(trajectories)


@dataclass(frozen=True)
class GroupMeanTokenNormalizedAdvantage(Advantage):
    """A_i = (d_i - mean(d)) / (std(d) + 1e-6), d_i = r_i - mean_G(r), both over all sampled tokens of the batch.

    REINFORCE++ with a baseline, arXiv:2501.03262; its KL is k2 in the loss. The mean of d over tokens need not be
    0, so a group of equal rewards has an advantage too.
    """

    name = "group_mean_token_normalized"
    reads_branches = True
    of_batch = True
    is_standardized = True

    def estimate(self, trajectories: Sequence[Trajectory], baseline: RunningBaseline) -> None:
        GroupMeanAdvantage().estimate(trajectories, baseline)
        _normalize_tokens(trajectories)


def _normalize_tokens(trajectories: Sequence[Trajectory]) -> None:
    """Give each sampled token its trajectory's advantage and the penalties that earlier tokens paid, standardized."""
    paid: dict[str, float] = {}
    values: list[list[float]] = []
    for i, t in enumerate(trajectories):
        rollout, of_tokens = name_rollout(i, t), list(t.response_advantages)
        for place, cost in enumerate(t.token_penalties):
            of_tokens[place] += paid.get(rollout, 0.0)
            paid[rollout] = paid.get(rollout, 0.0) + cost
        values.append(of_tokens)
    rows = list(zip(trajectories, values, strict=True))
    tokens = sorted(v for t, of in rows if t.reward is not None for v, m in zip(of, t.action_mask, strict=True) if m)
    centre, scale = mean(tokens), std(tokens) + EPSILON
    for t, of_tokens in rows:
        known = t.reward is not None
        _set_token_advantages(t, [(v - centre) / scale if known else 0.0 for v in of_tokens])


@dataclass(frozen=True)
class MovingAverageAdvantage(Advantage):
    """A_i = r_i - b with b the moving average of earlier batches' means; the first batch is its own baseline.

    b <- decay b + (1 - decay) mean after each batch. This batch is not in b, so the baseline does not depend on the
    actions it is subtracted from. Williams 1992, section 7.
    """

    name = "ema"
    reads_branches = True
    of_batch = True
    keeps_baseline = True

    decay: float = setting(0.99, low=0, high=1, expected="0 to 1 (1 never moves)", flat="baseline_decay")

    def start_baseline(self) -> RunningBaseline:
        return RunningBaseline(self.decay)

    def estimate(self, trajectories: Sequence[Trajectory], baseline: RunningBaseline) -> None:
        own = mean(list(rollout_values(trajectories).values()))
        _assign(trajectories, own if baseline.value is None else baseline.value)


@dataclass(frozen=True)
class RoleGroupMeanAdvantage(Advantage):
    """A_i = r_i - mean of r over the trajectories of the same role in G. For self-play: where one role has the better
    start, the mean over both would pay it for that, and not for its moves.
    """

    name = "role_group_mean"
    reads_branches = True
    is_groupwise = True
    needs_roles = True

    def estimate(self, trajectories: Sequence[Trajectory], baseline: RunningBaseline) -> None:
        for group in _groups(trajectories):
            for part in self.split(group):
                _assign(part, mean(list(rollout_values(part).values())))


@dataclass(frozen=True)
class RolePromptMeanAdvantage(RoleGroupMeanAdvantage):
    """A_i = r_i - mean of r over the trajectories of the same role in G that read the same prompt. For a proposer and
    solvers: the answers to one proposal are compared, and the proposals of one prompt.
    """

    name = "role_prompt_mean"

    def split(self, group: Sequence[Trajectory]) -> list[list[Trajectory]]:
        return list(group_by(group, lambda t: f"{t.role}/{t.prompt_tokens}").values())


@dataclass(frozen=True)
class RoleBaselineAdvantage(Advantage):
    """A_i = r_i - b with b the running baseline of its game and role: b <- `role_decay` b + (1 - `role_decay`) r_i.

    b is 0 at first, and an episode moves it after it was subtracted, in the order of the batch. Role-conditioned
    advantage estimation (RAE) of SPIRAL, arXiv:2506.24119, which takes 0.95.
    """

    name = "role_baseline"
    reads_branches = True
    of_batch = True
    keeps_baseline = True
    needs_roles = True

    role_decay: float = setting(0.95, low=0, high=1, expected="0 to 1 (1 never moves)", flat="role_decay")

    def start_baseline(self) -> RunningBaseline:
        return RunningBaseline(self.role_decay, of_roles={})

    def estimate(self, trajectories: Sequence[Trajectory], baseline: RunningBaseline) -> None:
        for t, own in zip(trajectories, self._follow(trajectories, dict(baseline.of_roles or {})), strict=True):
            _assign([t], own)

    def observe(self, trajectories: Sequence[Trajectory], baseline: RunningBaseline) -> None:
        if baseline.of_roles is not None:
            self._follow(trajectories, baseline.of_roles)

    def _follow(self, trajectories: Sequence[Trajectory], values: dict[str, float]) -> list[float]:
        """What is subtracted from each return; `values` move with every episode of a role."""
        subtracted: dict[tuple[str, str], float] = {}
        keys = [(_name_role(t), name_rollout(i, t)) for i, t in enumerate(trajectories)]
        for t, key in zip(trajectories, keys, strict=True):
            if t.reward is not None and key not in subtracted:
                before = subtracted[key] = values.get(key[0], 0.0)
                values[key[0]] = self.role_decay * before + (1 - self.role_decay) * (read_reward(t) - t.penalty)
        return [subtracted.get(key, 0.0) for key in keys]


def _name_role(trajectory: Trajectory) -> str:
    """The role with its game, as far as the task names one."""
    game = trajectory.task.meta.get("game", "") if trajectory.task else ""
    return f"{game}/{trajectory.role}"


@dataclass(frozen=True)
class RawAdvantage(Advantage):
    """A_i = r_i: no baseline."""

    name = "raw"
    reads_branches = True
    of_batch = True
    is_groupwise = True

    def estimate(self, trajectories: Sequence[Trajectory], baseline: RunningBaseline) -> None:
        _assign(trajectories, 0.0)


@dataclass(frozen=True)
class PassAtKAdvantage(Advantage):
    """A_i = k x mean over the sets T of k - 1 others of its group of max(0, r_i - max_T(r)), k = `pass_k`.

    With the reduction `sequence_sum` and every group kept it is an unbiased gradient of the expected best of k: each of
    k samples is paid what it adds to the best of the others. PKPO, Walder and Karkhanis 2025, arXiv:2505.15201, the
    leave-one-out form over all sets of k. Reductions that depend on lengths, and groups that are dropped, make it
    biased. A group with fewer than k known rewards has advantage 0.
    """

    name = "pass_at_k"
    is_groupwise = True

    k: int = setting(4, low=2, expected="at least 2", flat="pass_k")

    @property
    def least_group(self) -> int:
        return self.k

    def estimate(self, trajectories: Sequence[Trajectory], baseline: RunningBaseline) -> None:
        k = self.k
        for group in _groups(trajectories):
            returns = rollout_values(group)
            ranked, n = sorted(returns.values()), len(returns)
            sets = math.comb(n - 1, k - 1) if n >= k else 1
            for i, t in enumerate(group):
                t.advantage = 0.0
                if t.reward is None or n < k:
                    continue
                own = returns[name_rollout(i, t)]
                # Of the others the m-th from below, m from 0, is the best of T in C(m, k - 2) sets.
                gains = [math.comb(m, k - 2) * (own - r) for m, r in enumerate(ranked) if r < own]
                t.advantage = k * math.fsum(gains) / sets


@dataclass(frozen=True)
class ZeroAdvantage(Advantage):
    """A_i = 0: rewards teach nothing. For distillation alone (`teacher_coef`, `self_distillation_coef`)."""

    name = "zero"
    reads_branches = True
    of_batch = True
    is_groupwise = True
    reads_no_reward = True
    why_no_kl = "reads no reward"

    def check(self, algorithm: SpecView) -> None:
        if not any(term.teaches for term in algorithm.terms):
            raise ValueError(
                "algorithm.advantage=zero learns from a teacher alone; give algorithm.teacher_coef=1, or "
                "algorithm.self_distillation_coef=1"
            )

    def estimate(self, trajectories: Sequence[Trajectory], baseline: RunningBaseline) -> None:
        for t in trajectories:
            t.advantage = 0.0


@dataclass(frozen=True)
class Threshold(Advantage):
    """An advantage that reads only whether a return is above `threshold`."""

    of_batch = True
    is_groupwise = True
    has_threshold = True

    threshold: float = setting(0.5, expected="a finite threshold (0.5 is usual)", flat="accept_above")

    def accepts(self, trajectory: Trajectory) -> bool:
        """Whether the return of a trajectory is known and above the threshold."""
        return trajectory.reward is not None and trajectory.reward - trajectory.penalty > self.threshold


@dataclass(frozen=True)
class AcceptanceAdvantage(Threshold):
    """A_i = 1 if r_i > `accept_above`; the others leave the batch and its denominators.

    Rejection sampling: RAFT, arXiv:2304.06767, and ReST, arXiv:2308.08998, with a threshold on the reward.
    """

    name = "acceptance"
    is_never_negative = True
    why_no_kl = "asks only whether a reward is above accept_above"

    def estimate(self, trajectories: Sequence[Trajectory], baseline: RunningBaseline) -> None:
        for t in trajectories:
            t.advantage = float(self.accepts(t))

    def keep(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        return [t for t in trajectories if t.advantage]


@dataclass(frozen=True)
class VerdictAdvantage(Threshold):
    """A_i = 1 if r_i > `accept_above`, else -1: which completions a preference loss prefers to which."""

    name = "verdict"
    is_verdict = True

    def estimate(self, trajectories: Sequence[Trajectory], baseline: RunningBaseline) -> None:
        for t in trajectories:
            t.advantage = 2.0 * self.accepts(t) - 1 if t.reward is not None else 0.0


@dataclass(frozen=True)
class ProcessNormalizedAdvantage(Advantage):
    """A of a turn is the sum of (r - mean_G(r)) / (std_G(r) + 1e-6) over it and the later turns of its episode.

    r is what a turn earned, with mean and std over all turns of the group. GRPO's process supervision,
    arXiv:2402.03300, section 4.1.3 (`rlvr.algorithms.process`).
    """

    name = "process_normalized"
    of_batch = True
    is_groupwise = True

    def estimate(self, trajectories: Sequence[Trajectory], baseline: RunningBaseline) -> None:
        process_normalized(trajectories)


@dataclass(frozen=True)
class GaeAdvantage(Advantage):
    """A_t = sum_k (gamma lambda)^k delta_t+k over the sampled tokens of an episode, delta_t = r_t + gamma V_t+1 - V_t.

    V are the values of a critic. Schulman et al. 2016, arXiv:1506.02438 (`rlvr.algorithms.gae`). `gamma` and
    `gae_lambda` are the discount a token and lambda; with both 1 it is the sum of the remaining rewards minus the
    value. `critic_lambda` is the lambda of the returns that the critic learns; 1: what was earned (arXiv:2503.01491).
    `bootstrap_truncated`: the critic's value stands for what an episode would still have earned that ran out of tokens;
    false: such an episode ends like any other.
    """

    name = "gae"
    of_batch = True
    takes_critic = True
    pays_by_token = True

    gamma: float = setting(1.0, low=0, high=1, expected="0 to 1 (1 does not discount)", flat="gamma")
    gae_lambda: float = setting(
        0.95, low=0, high=1, expected="0 to 1 (1 trusts the returns alone, 0 the next value)", flat="gae_lambda"
    )
    critic_lambda: float = setting(
        1.0, low=0, high=1, expected="0 to 1 (1 learns what was earned)", flat="critic_lambda"
    )
    bootstrap_truncated: bool = setting(True, flat="bootstrap_truncated")

    def estimate(self, trajectories: Sequence[Trajectory], baseline: RunningBaseline) -> None:
        gae(trajectories, self.gamma, self.gae_lambda, self.bootstrap_truncated, self.critic_lambda)

    def check(self, algorithm: SpecView) -> None:
        if algorithm.mask_truncated and not self.bootstrap_truncated:
            raise ValueError(
                "algorithm.bootstrap_truncated=false has no effect with mask_truncated=true: it changes the advantages "
                "of truncated episodes, which are not learned from; leave one of them out"
            )


ADVANTAGES = Variants(
    "algorithm.advantage",
    Advantage,
    GroupMeanAdvantage,
    GroupNormalizedAdvantage,
    GroupMeanBatchStdAdvantage,
    RewardNormalizedAdvantage,
    LeaveOneOutAdvantage,
    BatchMeanAdvantage,
    BatchNormalizedAdvantage,
    TokenNormalizedAdvantage,
    GroupMeanTokenNormalizedAdvantage,
    MovingAverageAdvantage,
    RoleGroupMeanAdvantage,
    RolePromptMeanAdvantage,
    RoleBaselineAdvantage,
    RawAdvantage,
    PassAtKAdvantage,
    ProcessNormalizedAdvantage,
    GaeAdvantage,
    ZeroAdvantage,
    AcceptanceAdvantage,
    VerdictAdvantage,
)


def register_advantage(name: str, *, baseline: str = "group") -> Callable[[Values], Values]:
    """Register `function(returns) -> advantages` under `name`, for `algorithm.advantage=name` and specs of your own.

    It is called once per group, or once per batch (`baseline="batch"`), with the return of every rollout (reward minus
    penalties), and gives as many numbers. Rollouts without a known reward are left out and get 0.
    """
    if baseline not in ("group", "batch"):
        raise ValueError(f"register_advantage: baseline={baseline!r}, expected group or batch")

    def register(function: Values) -> Values:
        if name in ADVANTAGES:
            raise ValueError(f"advantage {name!r} is registered already; choose another name")

        def estimate(self: Advantage, trajectories: Sequence[Trajectory], running: RunningBaseline) -> None:
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
                    t.advantage = 0.0 if t.reward is None else advantages[name_rollout(i, t)]

        fields = {"name": name, "of_batch": baseline == "batch", "estimate": estimate, "__doc__": function.__doc__}
        ADVANTAGES.add(type(getattr(function, "__name__", name), (Advantage,), fields))
        return function

    return register
