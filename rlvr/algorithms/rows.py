"""Algorithms as rows: advantage estimator x token loss x reduction x clip bounds x group filter, and options.

Adding an algorithm is adding a row (here with a golden file, or `register_algorithm` in a user's own code). Any cell
can be overridden in a config (`algorithm.name=grpo algorithm.reduction=token_mean`); what an algorithm computes is
then exactly the sum of its cells. Losses are summed functions by name in the engine; the reduction is a weight per
trajectory that folds into its advantage, so splitting a batch never changes a gradient. How each option reaches the
gradient is in `rlvr.algorithms.roads`. Exercised by `python -m pytest tests/test_algorithms.py`.

Row defaults follow each paper; `ppo`, the default, is what current work agrees on: group mean without std (Dr. GRPO),
token mean over the batch and the asymmetric clip 0.2 / 0.28 (DAPO), groups with equal rewards left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from rlvr.algorithms.advantages import BATCH_ESTIMATORS, ESTIMATORS, REDUCTIONS, Memory, teaches
from rlvr.registry import load_object, nearest
from rlvr.types import Trajectory, group_by

# The engine's losses that learn from advantages, and those of them that clip.
LOSSES = ("importance_sampling", "ppo", "cispo", "dro", "gspo")
CLIPPED = frozenset({"ppo", "cispo", "gspo"})
KL_ESTIMATORS = ("k1", "k2", "k3")


@dataclass(frozen=True)
class Algorithm:
    """One row. `clip_low` and `clip_high` are epsilons around 1 (0.2 means a ratio of 0.8); None where not used.

    - `drop_equal_groups`: groups whose rewards are all equal leave the batch, its denominators too. A row that filters
      stops doing so where `kl_coef` or `entropy_coef` is set (they have a gradient there), unless it is asked for.
    - `mask_truncated`: answers that ran out of tokens are not learned from (DAPO's overlong filtering).
    - `beta`: the weight of dro's quadratic term; only there.
    - `baseline_decay`: of the moving baseline `ema`.
    - `kl_coef` weighs the divergence from the policy as RL began, estimated by `kl_estimator`: with d = log reference -
      log policy of a sampled token, k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d (http://joschu.net/blog/kl-approx.html).
      `kl_in=reward` takes coefficient x the answer's sum of k off its reward before the advantage; `kl_in=loss` adds
      coefficient x k to every token's loss. k1 in the reward and k2 in the loss have the gradient of the reverse KL
      (arXiv:2510.01555); k3 in the loss is GRPO's; k1 in the loss has none on average.
    - `entropy_coef` weighs an entropy bonus: `entropy=sampled` takes coefficient x log-prob off each token's advantage
      (on-policy its expected gradient is the entropy's; later updates of a step clip it like any advantage), `exact`
      needs the full logits and the local client.
    - `importance_cap`: advantages are multiplied by min(exp(p_old - q), cap), p_old the trainer's log-probs before the
      step and q the sampler's, and ratios are taken to p_old: truncated importance sampling for a sampler that differs
      from the trainer (https://fengyao.notion.site/off-policy-rl). None: the sampler's log-probs are trusted.
    - `overlong_buffer`: the last so many tokens of the budget cost up to `overlong_penalty`, linearly. DAPO,
      arXiv:2503.14476, eq. 13. None: length costs nothing.
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
            "loss": LOSSES,
            "reduction": REDUCTIONS,
            "kl_estimator": KL_ESTIMATORS,
            "kl_in": ("reward", "loss"),
            "entropy": ("sampled", "exact"),
        }
        for what, known in choices.items():
            if (value := getattr(self, what)) not in known:
                names = ", ".join(known)
                raise ValueError(
                    f"algorithm.{what}={value!r} is unknown{nearest(str(value), list(known))}; known: {names}"
                )
        self._check_numbers()
        self._check_clip()
        if self.drop_equal_groups and not self.uses_groups:
            raise ValueError(
                f"algorithm.drop_equal_groups=true with the batch baseline {self.advantage!r} would drop groups that "
                "teach; set it to false"
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
            if self.loss not in CLIPPED:
                raise ValueError(
                    f"algorithm.{bound}={value} has no effect: the loss {self.loss!r} does not clip; "
                    f"leave it out, or use one that does: {', '.join(sorted(CLIPPED))}"
                )
            if not 0 <= value <= most:
                raise ValueError(f"algorithm.{bound}={value}: expected 0 to {most} (0.2 means the ratio 0.8 or 1.2)")
        if self.loss in CLIPPED and None in (self.clip_low, self.clip_high):
            raise ValueError(f"algorithm.loss={self.loss} clips: give algorithm.clip_low and algorithm.clip_high")

    @property
    def uses_groups(self) -> bool:
        """Whether the baseline is a group's own: then groups of one sample teach nothing."""
        return self.advantage not in BATCH_ESTIMATORS

    @property
    def teaches_at_zero(self) -> bool:
        """Whether a trajectory without advantage has a gradient all the same."""
        kl = self.kl_coef > 0 and self.kl_in == "loss"
        return kl or self.entropy_coef > 0 or self.loss == "dro"

    @property
    def penalizes(self) -> bool:
        """Whether something is taken off the reward before the advantage."""
        return self.overlong_buffer is not None or (self.kl_coef > 0 and self.kl_in == "reward")

    @property
    def thresholds(self) -> dict[str, float]:
        """Absolute ratio thresholds, as the losses want them."""
        bounds: dict[str, float] = {}
        if self.clip_low is not None:
            bounds["clip_low_threshold"] = 1.0 - self.clip_low
        if self.clip_high is not None:
            bounds["clip_high_threshold"] = 1.0 + self.clip_high
        return bounds

    def select(self, trajectories: Sequence[Trajectory], memory: Memory | None = None) -> list[Trajectory]:
        """Set every `advantage`; the trajectories that the loss's denominators count.

        Left out are unknown rewards, truncated answers under `mask_truncated` (they count in the baseline all the same)
        and groups with equal rewards where the row filters them. `memory` is what estimators such as `ema`
        know of earlier batches, and learns of this one.
        """
        memory = memory or Memory(self.baseline_decay)
        ESTIMATORS[self.advantage](trajectories, memory)
        memory.observe(trajectories)
        known = [t for t in trajectories if t.reward is not None]
        if self.drop_equal_groups:
            known = [t for group in group_by(known, lambda t: t.group_id).values() if teaches(group) for t in group]
        if self.mask_truncated:
            cut = {t.rollout_id or str(id(t)) for t in known if t.truncated}
            known = [t for t in known if (t.rollout_id or str(id(t))) not in cut]
        return known

    def weigh(self, selected: Sequence[Trajectory], max_tokens: int) -> list[tuple[Trajectory, float]]:
        """The trajectories of one optimizer step that have a gradient, each with its reduction weight.

        The others are left out to save the work; their tokens stay in the denominators.
        """
        if not selected:
            return []
        weights = REDUCTIONS[self.reduction](selected, max_tokens)
        rows = [(t, w) for t, w in zip(selected, weights, strict=True) if t.num_action_tokens]
        return rows if self.teaches_at_zero else [(t, w) for t, w in rows if t.advantage != 0.0]


ALGORITHMS: dict[str, Algorithm] = {}


def register_algorithm(row: Algorithm) -> Algorithm:
    """Add a row under its name, for `resolve_algorithm` and `algorithm.name=...`; a name is taken once."""
    if ALGORITHMS.get(row.name, row) != row:
        raise ValueError(f"algorithm {row.name!r} is registered already; choose another name")
    ALGORITHMS[row.name] = row
    return row


for _row in (
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
        "grpo", "group_normalized", "ppo", "sequence_mean", 0.2, 0.2, drop_equal_groups=False,
        source="arXiv:2402.03300; its KL is kl_coef with k3 in the loss",
    ),
    Algorithm(
        "dr_grpo", "group_mean", "ppo", "constant", 0.2, 0.2, drop_equal_groups=False,
        source="arXiv:2503.20783",
    ),
    Algorithm(
        "dapo", "group_normalized", "ppo", "token_mean", 0.2, 0.28,
        source="arXiv:2503.14476; with training.refill and overlong_buffer",
    ),
    Algorithm(
        "ppo", "group_mean", "ppo", "token_mean", 0.2, 0.28,
        source="loss arXiv:1707.06347; cells arXiv:2503.20783 and 2503.14476",
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
    register_algorithm(_row)


def row_named(name: str) -> Algorithm:
    """The registered row, or the one at `package.module:ROW`; ValueError with the nearest name for an unknown one."""
    if ":" in name:
        row = load_object("algorithm", name)
        if not isinstance(row, Algorithm):
            raise ValueError(f"algorithm {name!r}: it is a {type(row).__name__}, expected an Algorithm(...)")
        return row
    if name not in ALGORITHMS:
        known = sorted(ALGORITHMS)
        raise ValueError(f"algorithm {name!r} is unknown{nearest(name, known)}; known: {', '.join(known)}")
    return ALGORITHMS[name]


def resolve_algorithm(name: str, **cells: Any) -> Algorithm:
    """The row `name` with some cells replaced; ValueError for a name or a cell that does not exist."""
    row = row_named(name)
    if unknown := [cell for cell in cells if cell not in CELLS]:
        raise ValueError(
            f"algorithm {name!r} has no cell {unknown[0]!r}{nearest(unknown[0], CELLS)}; cells: {', '.join(CELLS)}"
        )
    if cells.get("loss", row.loss) != row.loss:  # another loss leaves the row's own settings behind, not the user's
        # A bound fits the kind of ratio it was made for: only cispo may take over what ppo has.
        own = {} if (row.loss, cells["loss"]) == ("ppo", "cispo") else {"clip_low": None, "clip_high": None}
        cells = {**own, "beta": 0.05 if cells["loss"] == "dro" else None, **cells}
    teaching = any(cells.get(option) for option in ("kl_coef", "entropy_coef"))
    if teaching or cells.get("advantage") in BATCH_ESTIMATORS:  # groups of equal rewards have a gradient then
        cells = {"drop_equal_groups": False, **cells}
    return replace(row, **cells)


CELLS = [f.name for f in fields(Algorithm) if f.name not in ("name", "source")]
