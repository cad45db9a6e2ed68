"""The spec of an algorithm: advantage estimator x token loss x reduction x clip bounds x group filter, and options.

The fields alone decide what is computed. Losses are sums (`rlvr.algorithms.loss_specs`); the reduction is a weight per
trajectory that folds into its advantage, so splitting a batch never changes a gradient. The specs by name are in
`rlvr.algorithms.registry`. Exercised by `python -m pytest tests/test_algorithms.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from rlvr.algorithms.advantages import (
    BATCH_ESTIMATORS,
    ESTIMATORS,
    REDUCTIONS,
    WITH_THRESHOLD,
    RunningBaseline,
    has_mixed_returns,
    has_mixed_rewards,
)
from rlvr.algorithms.loss_specs import (
    DUAL_CLIP,
    KL_ESTIMATORS,
    LOSS_SPECS,
    PAIR_LOSSES,
    PREFERENCE_SPECS,
    RL_LOSSES,
    LossSpec,
    find_loss_spec,
    is_custom_loss,
)
from rlvr.core.registry import did_you_mean
from rlvr.core.types import Trajectory, group_by


@dataclass(frozen=True)
class Algorithm:
    """The spec of one algorithm. `clip_low` and `clip_high` are epsilons around 1 (0.2 means a ratio of 0.8).

    - `dual_clip`: the ratio, at least 1 + `clip_high` (3 is usual), beyond which a token with a negative advantage has
      no gradient either: its loss is at most that many times its advantage. Dual clip, arXiv:1912.09729; of the losses
      ppo and gspo. None: no such bound.
    - `loss`: a named loss, or a function of the user's as `package.module:function` (docs/custom_loss_quickstart.md).
    - `drop_equal_groups`: groups whose rewards are all equal leave the batch and its denominators. Setting `kl_coef`,
      `entropy_coef` or `teacher_coef` turns this off, since such groups then have a gradient, unless it is set too.
    - `equal_by`: what is compared. `return`: the reward less the overlong penalty, so right completions of which one is
      overlong are a group with signal. `reward`: what the verifiers gave, as in DAPO, whose dynamic sampling asks for
      right and wrong completions (arXiv:2503.14476, eq. 11). A KL in the reward never counts.
    - `mask_truncated`: completions that ran out of tokens are not learned from (DAPO's overlong filtering).
    - `beta`: the weight of dro's quadratic term, or the strength of the pull to the reference of dpo, ipo and kto; for
      these losses only.
    - `accept_above`: the return above which a completion is accepted; of the advantages `acceptance` and `verdict`.
    - `pass_k`: how many completions the advantage `pass_at_k` takes the best of; at least 2, and for it only.
    - `baseline_decay`: the decay of the running baseline `ema`.
    - `gamma`, `gae_lambda`: the discount a token and the lambda of the advantage `gae`, which takes a critic.
      `critic_lambda`: the lambda of the returns that the critic learns; 1: what was earned (arXiv:2503.01491).
      `bootstrap_truncated`: its value stands for what an episode would still have earned that ran out of tokens; false:
      such an episode ends like any other.
    - `kl_coef` weighs the divergence from the policy as RL began, estimated by `kl_estimator`: with d = log reference -
      log policy of a sampled token, k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d (http://joschu.net/blog/kl-approx.html).
      `kl_in=reward` subtracts coefficient x the completion's sum of k from its reward before the advantage, with the
      advantages `gae` and `token_normalized` each token's k from the reward of that token; `kl_in=loss` adds
      coefficient x k to every token's loss. k1 in the reward has the gradient of the reverse KL of whole completions
      (arXiv:2510.01555). k2 in the loss has that of the next token's KL at a fixed prefix, all of it for one token
      alone: it leaves out that a token also changes which prefixes come. k3 in the loss is GRPO's; k1 in the loss has
      none on average. k2 and k3 in the reward have the gradient of no KL, and may push away from the reference
      (docs/loss-functions.md has an example).
    - `entropy_coef` weighs an entropy bonus: `entropy=sampled` subtracts coefficient x log-prob from each token's
      advantage (on-policy its expected gradient is that of each token's entropy at a fixed prefix, not of the whole
      completion's; later updates of a step clip it like any advantage), `exact` takes that entropy from full logits, so
      it needs the local or the sharded client.
    - `teacher_coef` weighs on-policy distillation: every token's advantage loses coefficient x (log policy - log
      teacher), the reverse KL to the run's `teacher` (arXiv:2306.13649). `advantage=zero` learns from it alone.
    - `importance_cap`: advantages are multiplied by min(exp(p_old - q), cap), p_old the trainer's log-probs before the
      step and q the sampler's, and ratios are taken to p_old: truncated importance sampling for a sampler that differs
      from the trainer (https://fengyao.notion.site/off-policy-rl). None: the sampler's log-probs are trusted.
    - `clip_cov_ratio`: that share of the step's sampled tokens has advantage 0, drawn among those whose covariance of
      log-prob and advantage is above `clip_cov_lb` and below `clip_cov_ub` (Clip-Cov, arXiv:2505.22617;
      `rlvr.algorithms.covariance`). 0: none. The bounds fit advantages of deviation 1, as `group_normalized` gives.
    - `overlong_buffer`: the last so many tokens of the budget cost up to `overlong_penalty`, linearly. DAPO,
      arXiv:2503.14476, eq. 13. None: no such penalty.
    """

    name: str
    advantage: str
    loss: str
    reduction: str
    clip_low: float | None = None
    clip_high: float | None = None
    drop_equal_groups: bool = True
    source: str = ""
    mask_truncated: bool = False
    beta: float | None = None
    baseline_decay: float = 0.99
    gamma: float = 1.0
    gae_lambda: float = 0.95
    critic_lambda: float = 1.0
    bootstrap_truncated: bool = True
    kl_coef: float = 0.0
    kl_estimator: str = "k1"
    kl_in: str = "reward"
    entropy_coef: float = 0.0
    entropy: str = "sampled"
    importance_cap: float | None = None
    clip_cov_ratio: float = 0.0
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    overlong_buffer: int | None = None
    overlong_penalty: float = 1.0
    accept_above: float | None = None
    teacher_coef: float = 0.0
    pass_k: int | None = None
    dual_clip: float | None = None
    equal_by: str = "return"

    def __post_init__(self) -> None:
        choices: dict[str, Any] = {
            "advantage": ESTIMATORS,
            "loss": (self.loss,) if self.has_custom_loss else RL_LOSSES,
            "reduction": REDUCTIONS,
            "kl_estimator": KL_ESTIMATORS,
            "kl_in": ("reward", "loss"),
            "entropy": ("sampled", "exact"),
            "equal_by": ("return", "reward"),
        }
        for what, known in choices.items():
            if (value := getattr(self, what)) not in known:
                names = ", ".join(known) + ("; or a path 'package.module:function'" if what == "loss" else "")
                raise ValueError(
                    f"algorithm.{what}={value!r} is unknown{did_you_mean(str(value), list(known))}; known: {names}"
                )
        self._check_numbers()
        self._check_clip()
        self._check_penalties()
        if self.has_custom_loss and self.entropy_coef and self.entropy == "exact":
            raise ValueError(
                f"algorithm.entropy=exact needs full logits, and algorithm.loss={self.loss} is a function of the "
                "sampled tokens' log-probs; use entropy=sampled"
            )
        if self.advantage == "zero" and not self.teacher_coef:
            raise ValueError("algorithm.advantage=zero learns from a teacher alone; give algorithm.teacher_coef=1")
        if self.drop_equal_groups and not self.has_group_baseline:
            raise ValueError(
                f"algorithm.drop_equal_groups=true with the advantage {self.advantage!r} would drop groups that have a "
                "gradient though their rewards are equal; set it to false"
            )

    def _check_numbers(self) -> None:
        inf = math.inf
        limits: dict[str, tuple[float, float, str]] = {
            "baseline_decay": (0.0, 1.0, "0 to 1 (1 never moves)"),
            "gamma": (0.0, 1.0, "0 to 1 (1 does not discount)"),
            "gae_lambda": (0.0, 1.0, "0 to 1 (1 trusts the returns alone, 0 the next value)"),
            "critic_lambda": (0.0, 1.0, "0 to 1 (1 learns what was earned)"),
            "kl_coef": (0.0, inf, "at least 0"),
            "entropy_coef": (0.0, inf, "at least 0"),
            "pass_k": (2, inf, "at least 2, or null"),
            "teacher_coef": (0.0, inf, "at least 0"),
            "importance_cap": (1.0, inf, "at least 1 (2 is usual), or null"),
            "clip_cov_ratio": (0.0, 1.0, "a share of the tokens, 0 to 1 (0.0002 is usual)"),
            "clip_cov_lb": (-inf, inf, "a number"),
            "clip_cov_ub": (-inf, inf, "a number"),
            "overlong_buffer": (1, inf, "at least 1 token, or null"),
            "overlong_penalty": (0.0, inf, "at least 0"),
        }
        for name, (low, high, expected) in limits.items():
            value = getattr(self, name)
            if value is not None and not (low <= value <= high and math.isfinite(value)):
                raise ValueError(f"algorithm.{name}={value!r}, expected {expected}")
        if (self.accept_above is None) == (self.advantage in WITH_THRESHOLD) or not -inf < (
            self.accept_above or 0
        ) < inf:
            raise ValueError(
                f"algorithm.accept_above={self.accept_above!r} with the advantage {self.advantage!r}: "
                f"{' and '.join(WITH_THRESHOLD)} need a finite threshold (0.5 is usual), and no other advantage has one"
            )
        if (self.pass_k is None) == (self.advantage == "pass_at_k"):
            raise ValueError(
                f"algorithm.pass_k={self.pass_k} with the advantage {self.advantage!r}: pass_at_k needs it (4 is "
                "usual), and no other advantage has one"
            )
        if (self.beta is None) == ("beta" in self.loss_spec.config) or (
            self.beta is not None and not 0 < self.beta < inf
        ):
            takes = [name for name in RL_LOSSES if "beta" in find_loss_spec(name).config]
            raise ValueError(
                f"algorithm.beta={self.beta!r} with the loss {self.loss!r}: {', '.join(takes)} need a beta above 0 "
                "(0.05 and 0.1 are usual), and no other loss has one"
            )
        if self.is_preference:
            self._check_preference()
        if self.clip_cov_ratio:
            self._check_covariance()
        if self.has_critic and self.mask_truncated and not self.bootstrap_truncated:
            raise ValueError(
                "algorithm.bootstrap_truncated=false has no effect with mask_truncated=true: it changes the advantages "
                "of truncated episodes, which are not learned from; leave one of them out"
            )

    def _check_covariance(self) -> None:
        if not self.clip_cov_lb < self.clip_cov_ub:
            raise ValueError(
                f"algorithm: clip_cov_lb={self.clip_cov_lb:g}, clip_cov_ub={self.clip_cov_ub:g}; expected lb < ub"
            )
        if self.advantage == "acceptance" and not self.teacher_coef:
            raise ValueError(
                f"algorithm.clip_cov_ratio={self.clip_cov_ratio:g} has no effect with the advantage 'acceptance': all "
                "advantages are 1, so no token has a covariance; leave it out"
            )

    def _check_preference(self) -> None:
        """Refuse what a preference loss does not read."""
        if self.advantage != "verdict":
            raise ValueError(
                f"algorithm.advantage={self.advantage} with the loss {self.loss!r}, which compares completions above "
                "algorithm.accept_above with those below; use advantage=verdict"
            )
        if self.reduction not in ("sequence_sum", "sequence_mean"):
            raise ValueError(
                f"algorithm.reduction={self.reduction} with the loss {self.loss!r}, which takes a whole completion's "
                "log-probs: their sum (sequence_sum, as in the paper) or their mean (sequence_mean)"
            )
        for name in ("kl_coef", "entropy_coef", "importance_cap", "clip_cov_ratio", "teacher_coef"):
            if getattr(self, name):
                raise ValueError(
                    f"algorithm.{name}={getattr(self, name)} has no effect on the loss {self.loss!r}, which has no "
                    "advantages and its own pull to the reference (algorithm.beta); leave it out"
                )

    def _check_penalties(self) -> None:
        """Refuse penalties on a reward that is not read, or read by a threshold alone."""
        unread = {"zero": "reads no reward", "acceptance": "asks only whether a reward is above accept_above"}
        if self.kl_coef and self.kl_in == "reward" and self.advantage in unread:
            raise ValueError(
                f"algorithm.kl_coef={self.kl_coef:g} with kl_in=reward and the advantage {self.advantage!r}, which "
                f"{unread[self.advantage]}: the KL has no gradient; use kl_in=loss, or leave kl_coef out"
            )
        if self.overlong_buffer is not None and self.advantage == "zero":
            raise ValueError(
                f"algorithm.overlong_buffer={self.overlong_buffer} has no effect with the advantage 'zero', which "
                "reads no reward; leave it out"
            )

    def _check_clip(self) -> None:
        for bound, most in (("clip_low", 1.0), ("clip_high", math.inf)):
            value = getattr(self, bound)
            if value is None:
                continue
            if not self.loss_spec.has_clip:
                clipping = ", ".join(sorted(name for name, spec in LOSS_SPECS.items() if spec.has_clip))
                raise ValueError(
                    f"algorithm.{bound}={value} has no effect: the loss {self.loss!r} does not clip; "
                    f"leave it out, or use one that does: {clipping}"
                )
            if not 0 <= value <= most:
                raise ValueError(f"algorithm.{bound}={value}: expected 0 to {most} (0.2 means the ratio 0.8 or 1.2)")
        if self.loss_spec.has_clip and None in (self.clip_low, self.clip_high):
            raise ValueError(f"algorithm.loss={self.loss} clips: give algorithm.clip_low and algorithm.clip_high")
        if self.dual_clip is None:
            return
        if not self.loss_spec.has_dual_clip:
            takes = ", ".join(sorted(name for name, spec in LOSS_SPECS.items() if spec.has_dual_clip))
            raise ValueError(
                f"algorithm.dual_clip={self.dual_clip:g} has no effect: the loss {self.loss!r} has no second bound; "
                f"leave it out, or use one that does: {takes}"
            )
        if not 1 + (self.clip_high or 0) <= self.dual_clip < math.inf:
            raise ValueError(
                f"algorithm.dual_clip={self.dual_clip:g}: expected a ratio of at least 1 + clip_high = "
                f"{1 + (self.clip_high or 0):g} (3 is usual), or null"
            )

    @property
    def has_custom_loss(self) -> bool:
        """Whether the loss is a function of the user's."""
        return is_custom_loss(self.loss)

    @property
    def is_preference(self) -> bool:
        """Whether the loss compares completions (`rlvr.algorithms.preferences`)."""
        return self.loss in PREFERENCE_SPECS

    @property
    def is_paired(self) -> bool:
        """Whether the loss compares completions of one group in pairs."""
        return self.loss in PAIR_LOSSES

    @property
    def needs_whole_step(self) -> bool:
        """Whether the loss is one function of all rows of an optimizer step."""
        return self.has_custom_loss or self.is_preference

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs under the policy as RL began are needed."""
        return self.kl_coef > 0 or self.is_preference

    @property
    def loss_spec(self) -> LossSpec:
        return find_loss_spec(self.loss)

    @property
    def has_group_baseline(self) -> bool:
        """Whether the baseline is a group's own: then a group of one has no signal."""
        return self.advantage not in BATCH_ESTIMATORS or self.is_paired

    @property
    def estimator_options(self) -> dict[str, Any]:
        """What the advantage takes of this spec."""
        if self.accept_above is not None:
            return {"above": self.accept_above}
        if self.has_critic:
            return {
                "gamma": self.gamma,
                "lam": self.gae_lambda,
                "critic_lam": self.critic_lambda,
                "bootstrap_truncated": self.bootstrap_truncated,
            }
        return {} if self.pass_k is None else {"k": self.pass_k}

    @property
    def has_critic(self) -> bool:
        """Whether the advantages need the values of a critic."""
        return self.advantage == "gae"

    @property
    def has_token_penalties(self) -> bool:
        """Whether a KL in the reward is paid token by token, and not by the completion's return."""
        return self.has_critic or self.advantage == "token_normalized"

    @property
    def has_gradient_at_zero(self) -> bool:
        """Whether a trajectory with advantage 0 may have a gradient; with a critic its tokens differ."""
        kl = self.kl_coef > 0 and self.kl_in == "loss"
        return self.has_critic or kl or self.entropy_coef > 0 or self.loss == "dro" or self.has_custom_loss

    @property
    def has_penalty(self) -> bool:
        """Whether a penalty is subtracted from the reward before the advantage."""
        return self.overlong_buffer is not None or (self.kl_coef > 0 and self.kl_in == "reward")

    @property
    def thresholds(self) -> dict[str, float]:
        """Absolute ratio thresholds, as the losses take them."""
        bounds: dict[str, float] = {}
        if self.clip_low is not None:
            bounds["clip_low_threshold"] = 1.0 - self.clip_low
        if self.clip_high is not None:
            bounds["clip_high_threshold"] = 1.0 + self.clip_high
        if self.dual_clip is not None:
            bounds[DUAL_CLIP] = self.dual_clip
        return bounds

    def select(self, trajectories: Sequence[Trajectory], baseline: RunningBaseline | None = None) -> list[Trajectory]:
        """Set every `advantage`; return the trajectories that the loss's denominators count.

        Unknown rewards are left out, and so are truncated completions under `mask_truncated` (they still count in the
        baseline) and groups with equal returns under `drop_equal_groups`. The batch then updates `baseline`.
        """
        baseline = baseline or RunningBaseline(self.baseline_decay)
        for t in trajectories:
            t.token_advantages = []
        ESTIMATORS[self.advantage](trajectories, baseline, **self.estimator_options)
        baseline.observe(trajectories)
        known = [t for t in trajectories if t.reward is not None]
        if self.advantage == "acceptance":
            known = [t for t in known if t.advantage]
        if self.drop_equal_groups:
            groups = group_by(known, lambda t: t.group_id).values()
            known = [t for group in groups if self._has_mixed(group) for t in group]
        if self.mask_truncated:
            cut = {t.rollout_id or str(id(t)) for t in known if t.truncated}
            known = [t for t in known if (t.rollout_id or str(id(t))) not in cut]
        return known

    def has_signal(self, group: Sequence[Trajectory]) -> bool:
        """Whether the algorithm can learn from how the completions of a group were judged, or from its teacher.

        A loss of pairs needs an accepted and a refused completion of other tokens; a group baseline needs returns that
        differ (`equal_by`), and that can be asked before `select`, once `penalize_length` has set what overlong
        completions cost. With any other baseline, or a teacher, a group has signal if a token has an advantage, so ask
        after the update.
        """
        if self.is_paired:
            return self._has_pair([t for t in group if t.reward is not None])
        if self.has_group_baseline and (self.drop_equal_groups or not self.teacher_coef):
            return self._has_mixed(group)
        return any(t.has_advantage for t in group if t.reward is not None)

    def _has_mixed(self, group: Sequence[Trajectory]) -> bool:
        by_reward = self.drop_equal_groups and self.equal_by == "reward"
        return has_mixed_rewards(group) if by_reward else has_mixed_returns(group)

    def _has_pair(self, judged: Sequence[Trajectory]) -> bool:
        assert self.accept_above is not None
        sides: dict[bool, set[tuple[tuple[int, ...], ...]]] = {True: set(), False: set()}
        for parts in group_by(judged, lambda t: t.rollout_id or str(id(t))).values():
            is_accepted = (parts[0].reward or 0.0) - parts[0].penalty > self.accept_above
            sides[is_accepted].add(tuple(tuple(t.response_tokens) for t in parts))
        return bool(sides[True] and sides[False]) and len(sides[True] | sides[False]) > 1

    def weigh(self, selected: Sequence[Trajectory], max_tokens: int) -> list[tuple[Trajectory, float]]:
        """The trajectories of one optimizer step that have a gradient, each with its reduction weight.

        Those without are skipped; their tokens still count in the denominators.
        """
        if not selected:
            return []
        weights = REDUCTIONS[self.reduction](selected, max_tokens)
        rows = [(t, w) for t, w in zip(selected, weights, strict=True) if t.num_action_tokens]
        return rows if self.has_gradient_at_zero else [(t, w) for t, w in rows if t.has_advantage]


FIELDS = [f.name for f in fields(Algorithm) if f.name not in ("name", "source")]
