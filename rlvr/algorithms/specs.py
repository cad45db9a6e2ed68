"""Algorithms as specs: advantage estimator x token loss x reduction x clip bounds x group filter, and options.

A new algorithm is a new spec, here with a golden file or by `register_algorithm` in a user's code. A config can
override any field (`algorithm.name=dr_grpo algorithm.reduction=token_mean`), and the fields alone decide what is
computed. Losses are sums (`rlvr.algorithms.loss_specs`); the reduction is a weight per trajectory that folds into its
advantage, so splitting a batch never changes a gradient. Exercised by `python -m pytest tests/test_algorithms.py`.

The specs follow their papers, but for `grpo`, the default: the group's mean as the baseline and PPO's clip (GRPO,
arXiv:2402.03300), no division by the standard deviation (Dr. GRPO, arXiv:2503.20783); token mean over the batch, the
asymmetric clip 0.2 / 0.28, and groups with equal rewards left out (DAPO, arXiv:2503.14476). The first paper's own form
is `grpo_original`. `ppo` is `grpo` by another name until there is a critic: PPO's clip without a value model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from rlvr.algorithms.advantages import BATCH_ESTIMATORS, ESTIMATORS, REDUCTIONS, RunningBaseline, has_signal
from rlvr.algorithms.loss_specs import KL_ESTIMATORS, LOSS_SPECS, RL_LOSSES, LossSpec, find_loss_spec, is_custom_loss
from rlvr.core.registry import did_you_mean, load_object
from rlvr.core.types import Trajectory, group_by

PREFERENCE = ("dpo", "ipo", "kto", "orpo", "simpo")  # not to be taken for a typing error: "did you mean dapo?"


@dataclass(frozen=True)
class Algorithm:
    """The spec of one algorithm. `clip_low` and `clip_high` are epsilons around 1 (0.2 means a ratio of 0.8).

    - `loss`: a named loss, or a function of the user's as `package.module:function` (docs/custom_loss_quickstart.md).
    - `drop_equal_groups`: groups whose rewards are all equal leave the batch and its denominators. Setting `kl_coef` or
      `entropy_coef` turns this off, since such groups then have a gradient, unless it is set too.
    - `mask_truncated`: completions that ran out of tokens are not learned from (DAPO's overlong filtering).
    - `beta`: the weight of dro's quadratic term; for that loss only.
    - `baseline_decay`: the decay of the running baseline `ema`.
    - `kl_coef` weighs the divergence from the policy as RL began, estimated by `kl_estimator`: with d = log reference -
      log policy of a sampled token, k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d (http://joschu.net/blog/kl-approx.html).
      `kl_in=reward` subtracts coefficient x the completion's sum of k from its reward before the advantage;
      `kl_in=loss` adds
      coefficient x k to every token's loss. k1 in the reward and k2 in the loss have the gradient of the reverse KL
      (arXiv:2510.01555); k3 in the loss is GRPO's; k1 in the loss has none on average.
    - `entropy_coef` weighs an entropy bonus: `entropy=sampled` subtracts coefficient x log-prob from each token's
      advantage (on-policy its expected gradient is the entropy's; later updates of a step clip it like any advantage),
      `exact` needs full logits, so the local client.
    - `importance_cap`: advantages are multiplied by min(exp(p_old - q), cap), p_old the trainer's log-probs before the
      step and q the sampler's, and ratios are taken to p_old: truncated importance sampling for a sampler that differs
      from the trainer (https://fengyao.notion.site/off-policy-rl). None: the sampler's log-probs are trusted.
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
    kl_coef: float = 0.0
    kl_estimator: str = "k1"
    kl_in: str = "reward"
    entropy_coef: float = 0.0
    entropy: str = "sampled"
    importance_cap: float | None = None
    overlong_buffer: int | None = None
    overlong_penalty: float = 1.0

    def __post_init__(self) -> None:
        choices: dict[str, Any] = {
            "advantage": ESTIMATORS,
            "loss": (self.loss,) if self.has_custom_loss else RL_LOSSES,
            "reduction": REDUCTIONS,
            "kl_estimator": KL_ESTIMATORS,
            "kl_in": ("reward", "loss"),
            "entropy": ("sampled", "exact"),
        }
        for what, known in choices.items():
            if (value := getattr(self, what)) not in known:
                names = ", ".join(known) + ("; or a path 'package.module:function'" if what == "loss" else "")
                raise ValueError(
                    f"algorithm.{what}={value!r} is unknown{did_you_mean(str(value), list(known))}; known: {names}"
                )
        self._check_numbers()
        self._check_clip()
        if self.has_custom_loss and self.entropy_coef and self.entropy == "exact":
            raise ValueError(
                f"algorithm.entropy=exact needs full logits, and algorithm.loss={self.loss} is a function of the "
                "sampled tokens' log-probs; use entropy=sampled"
            )
        if self.drop_equal_groups and not self.has_group_baseline:
            raise ValueError(
                f"algorithm.drop_equal_groups=true with the batch baseline {self.advantage!r} would drop groups with "
                "signal; set it to false"
            )

    def _check_numbers(self) -> None:
        inf = math.inf
        limits: dict[str, tuple[float, float, str]] = {
            "baseline_decay": (0.0, 1.0, "0 to 1 (1 never moves)"),
            "kl_coef": (0.0, inf, "at least 0"),
            "entropy_coef": (0.0, inf, "at least 0"),
            "importance_cap": (1.0, inf, "at least 1 (2 is usual), or null"),
            "overlong_buffer": (1, inf, "at least 1 token, or null"),
            "overlong_penalty": (0.0, inf, "at least 0"),
        }
        for name, (low, high, expected) in limits.items():
            value = getattr(self, name)
            if value is not None and not (low <= value <= high and math.isfinite(value)):
                raise ValueError(f"algorithm.{name}={value!r}, expected {expected}")
        if (self.beta is None) == (self.loss == "dro") or (self.beta is not None and not 0 < self.beta < inf):
            raise ValueError(
                f"algorithm.beta={self.beta!r} with the loss {self.loss!r}: dro needs a beta above 0 (0.05 is usual), "
                "and no other loss has one"
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

    @property
    def has_custom_loss(self) -> bool:
        """Whether the loss is a function of the user's."""
        return is_custom_loss(self.loss)

    @property
    def loss_spec(self) -> LossSpec:
        return find_loss_spec(self.loss)

    @property
    def has_group_baseline(self) -> bool:
        """Whether the baseline is a group's own: then a group of one has no signal."""
        return self.advantage not in BATCH_ESTIMATORS

    @property
    def has_gradient_at_zero(self) -> bool:
        """Whether a trajectory with advantage 0 may have a gradient."""
        kl = self.kl_coef > 0 and self.kl_in == "loss"
        return kl or self.entropy_coef > 0 or self.loss == "dro" or self.has_custom_loss

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
        return bounds

    def select(self, trajectories: Sequence[Trajectory], baseline: RunningBaseline | None = None) -> list[Trajectory]:
        """Set every `advantage`; return the trajectories that the loss's denominators count.

        Unknown rewards are left out, and so are truncated completions under `mask_truncated` (they still count in the
        baseline) and groups with equal rewards under `drop_equal_groups`. The batch then updates `baseline`.
        """
        baseline = baseline or RunningBaseline(self.baseline_decay)
        ESTIMATORS[self.advantage](trajectories, baseline)
        baseline.observe(trajectories)
        known = [t for t in trajectories if t.reward is not None]
        if self.drop_equal_groups:
            known = [t for group in group_by(known, lambda t: t.group_id).values() if has_signal(group) for t in group]
        if self.mask_truncated:
            cut = {t.rollout_id or str(id(t)) for t in known if t.truncated}
            known = [t for t in known if (t.rollout_id or str(id(t))) not in cut]
        return known

    def weigh(self, selected: Sequence[Trajectory], max_tokens: int) -> list[tuple[Trajectory, float]]:
        """The trajectories of one optimizer step that have a gradient, each with its reduction weight.

        Those without are skipped; their tokens still count in the denominators.
        """
        if not selected:
            return []
        weights = REDUCTIONS[self.reduction](selected, max_tokens)
        rows = [(t, w) for t, w in zip(selected, weights, strict=True) if t.num_action_tokens]
        return rows if self.has_gradient_at_zero else [(t, w) for t, w in rows if t.advantage != 0.0]


ALGORITHMS: dict[str, Algorithm] = {}


def register_algorithm(spec: Algorithm) -> Algorithm:
    """Add a spec under its name, for `resolve_algorithm` and `algorithm.name=...`; a name is registered once."""
    if ALGORITHMS.get(spec.name, spec) != spec:
        raise ValueError(f"algorithm {spec.name!r} is registered already; choose another name")
    ALGORITHMS[spec.name] = spec
    return spec


for _spec in (
    Algorithm(
        "reinforce", "batch_mean", "importance_sampling", "sequence_sum", drop_equal_groups=False,
        source="Williams 1992; on-policy the importance ratio is 1",
    ),
    Algorithm(
        "reinforce_ema", "ema", "importance_sampling", "token_mean", drop_equal_groups=False,
        source="Williams 1992 with a moving baseline",
    ),
    Algorithm(
        "reinforce_pp", "batch_normalized", "ppo", "token_mean", 0.2, 0.2, drop_equal_groups=False,
        source="arXiv:2501.03262; its KL penalty is kl_coef with k1 in the reward",
    ),
    Algorithm(
        "rloo", "leave_one_out", "importance_sampling", "sequence_sum", drop_equal_groups=False,
        source="arXiv:2402.14740",
    ),
    Algorithm(
        "grpo_original", "group_normalized", "ppo", "sequence_mean", 0.2, 0.2, drop_equal_groups=False,
        source="arXiv:2402.03300; its KL is kl_coef with k3 in the loss",
    ),
    Algorithm(
        "dr_grpo", "group_mean", "ppo", "constant", 0.2, 0.2, drop_equal_groups=False,
        source="arXiv:2503.20783",
    ),
    Algorithm(
        "dapo", "group_normalized", "ppo", "token_mean", 0.2, 0.28,
        source="arXiv:2503.14476; with training.dynamic_sampling and overlong_buffer",
    ),
    Algorithm(
        "grpo", "group_mean", "ppo", "token_mean", 0.2, 0.28,
        source="the default: arXiv:2402.03300, without std as in arXiv:2503.20783, mean and clip of arXiv:2503.14476",
    ),
    Algorithm(
        "ppo", "group_mean", "ppo", "token_mean", 0.2, 0.28,
        source="arXiv:1707.06347, its clip without a critic: the same as grpo",
    ),
    Algorithm(
        "gspo", "group_normalized", "gspo", "sequence_mean", 3e-4, 4e-4, drop_equal_groups=False,
        source="arXiv:2507.18071, section 5.1",
    ),
    Algorithm(
        "cispo", "group_normalized", "cispo", "token_mean", 1.0, 3.0, drop_equal_groups=False,
        source="arXiv:2506.13585; weights clipped to 0 ... 4, the Tinker protocol's default",
    ),
    Algorithm(
        "dro", "group_mean", "dro", "token_mean", drop_equal_groups=False, beta=0.05,
        source="arXiv:2405.19107, with the group's mean as the value",
    ),
    Algorithm(
        "importance_sampling", "group_mean", "importance_sampling", "token_mean",
        source="the Tinker cookbook's default: group mean, no clip",
    ),
):  # fmt: skip
    register_algorithm(_spec)


def find_algorithm(name: str) -> Algorithm:
    """The registered spec, or the one at `package.module:SPEC`; ValueError with the nearest name for an unknown one."""
    if ":" in name:
        spec = load_object("algorithm", name)
        if not isinstance(spec, Algorithm):
            raise ValueError(f"algorithm {name!r}: it is of type {type(spec).__name__}, expected an Algorithm(...)")
        return spec
    if name not in ALGORITHMS:
        known = sorted(ALGORITHMS)
        near = did_you_mean(name, known)
        if name.lower() in PREFERENCE:
            near = " here: it learns from pairs of preferred completions, and the algorithms here learn from rewards"
        raise ValueError(f"algorithm {name!r} is unknown{near}; known: {', '.join(known)}")
    return ALGORITHMS[name]


def resolve_algorithm(name: str, **overrides: Any) -> Algorithm:
    """The spec `name` with some fields replaced; ValueError for a name or a field that does not exist."""
    spec = find_algorithm(name)
    if unknown := [field for field in overrides if field not in FIELDS]:
        raise ValueError(
            f"algorithm {name!r} has no field {unknown[0]!r}{did_you_mean(unknown[0], FIELDS)}; "
            f"fields: {', '.join(FIELDS)}"
        )
    if overrides.get("loss", spec.loss) != spec.loss:  # another loss leaves the spec's own settings behind
        # A bound fits the kind of ratio it was made for: only cispo may take over what ppo has.
        clip = {} if (spec.loss, overrides["loss"]) == ("ppo", "cispo") else {"clip_low": None, "clip_high": None}
        overrides = {**clip, "beta": 0.05 if overrides["loss"] == "dro" else None, **overrides}
    has_gradient = any(overrides.get(option) for option in ("kl_coef", "entropy_coef"))
    if has_gradient or overrides.get("advantage") in BATCH_ESTIMATORS:  # groups of equal rewards have a gradient then
        overrides = {"drop_equal_groups": False, **overrides}
    return replace(spec, **overrides)


FIELDS = [f.name for f in fields(Algorithm) if f.name not in ("name", "source")]
