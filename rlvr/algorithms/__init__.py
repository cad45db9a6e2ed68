"""Algorithms as rows: advantage estimator x token loss x reduction x clip bounds x group filter.

Adding an algorithm is adding a row here and a golden file (`tests/test_algorithms.py`). Any cell can be overridden in
a config (`algorithm.name=grpo algorithm.reduction=token_mean`); what an algorithm computes is then exactly the sum of
its cells. Losses are summed functions by name in the engine; the reduction is a weight per trajectory that folds into
its advantage, so splitting a batch never changes a gradient.

Row defaults follow each paper; `ppo`, the default, is what current work agrees on: group mean without std (Dr. GRPO),
token mean over the batch and the asymmetric clip 0.2 / 0.28 (DAPO), groups with equal rewards left out.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlvr.algorithms.advantages import ESTIMATORS, REDUCTIONS, teaches
from rlvr.types import Trajectory, group_by


@dataclass(frozen=True)
class Algorithm:
    """One row. `clip_low` and `clip_high` are epsilons around 1 (0.2 means a ratio of 0.8); None where not used."""

    name: str
    advantage: str
    loss: str
    reduction: str
    clip_low: float | None = None
    clip_high: float | None = None
    drop_equal_groups: bool = True
    source: str = ""

    def __post_init__(self) -> None:
        tables = {"advantage": ESTIMATORS, "loss": LOSSES, "reduction": REDUCTIONS}
        for what, table in tables.items():
            if (value := getattr(self, what)) not in table:
                near = _nearest(value, table)
                raise ValueError(f"algorithm.{what}={value!r} is unknown{near}; known: {', '.join(table)}")
        for bound, most in (("clip_low", 1.0), ("clip_high", float("inf"))):
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
        if self.drop_equal_groups and not self.uses_groups:
            raise ValueError(
                f"algorithm.drop_equal_groups=true with the batch baseline {self.advantage!r} would drop groups that "
                "teach; set it to false"
            )

    @property
    def uses_groups(self) -> bool:
        """Whether the baseline is a group's own: then groups of one sample teach nothing."""
        return self.advantage.startswith("group_")

    @property
    def loss_config(self) -> dict[str, float]:
        """Absolute ratio thresholds, as the losses want them."""
        bounds: dict[str, float] = {}
        if self.clip_low is not None:
            bounds["clip_low_threshold"] = 1.0 - self.clip_low
        if self.clip_high is not None:
            bounds["clip_high_threshold"] = 1.0 + self.clip_high
        return bounds

    def select(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Set every `advantage`; the trajectories that the loss's denominators count.

        Left out are unknown rewards and, where the row filters them, groups with equal rewards.
        """
        ESTIMATORS[self.advantage](trajectories)
        known = [t for t in trajectories if t.reward is not None]
        if not self.drop_equal_groups:
            return known
        return [t for group in group_by(known, lambda t: t.group_id).values() if teaches(group) for t in group]

    def weigh(self, selected: Sequence[Trajectory], max_tokens: int) -> list[tuple[Trajectory, float]]:
        """The trajectories of one optimizer step that have a gradient, each with its reduction weight.

        A trajectory without advantage has no gradient under any of `LOSSES`: it is left out to save the work, and its
        tokens stay in the denominators.
        """
        if not selected:
            return []
        weights = REDUCTIONS[self.reduction](selected, max_tokens)
        return [(t, w) for t, w in zip(selected, weights, strict=True) if t.num_action_tokens and t.advantage != 0.0]


# The engine's losses that a row may name: those whose reduction weight folds into the advantage alone. (In dro the
# weight belongs to beta too, and gspo needs a mask per sequence.)
LOSSES = ("importance_sampling", "ppo", "cispo")
CLIPPED = frozenset({"ppo", "cispo"})

ALGORITHMS: dict[str, Algorithm] = {
    row.name: row
    for row in (
        Algorithm(
            "reinforce", "batch_mean", "importance_sampling", "sequence_sum", drop_equal_groups=False,
            source="Williams 1992; on-policy the importance ratio is 1",
        ),
        Algorithm(
            "grpo", "group_normalized", "ppo", "sequence_mean", 0.2, 0.2, drop_equal_groups=False,
            source="arXiv:2402.03300",
        ),
        Algorithm(
            "dr_grpo", "group_mean", "ppo", "constant", 0.2, 0.2, drop_equal_groups=False,
            source="arXiv:2503.20783",
        ),
        Algorithm(
            "ppo", "group_mean", "ppo", "token_mean", 0.2, 0.28,
            source="loss arXiv:1707.06347; cells arXiv:2503.20783 and 2503.14476",
        ),
        Algorithm(
            "importance_sampling", "group_mean", "importance_sampling", "token_mean",
            source="the Tinker cookbook's default: group mean, no clip",
        ),
    )
}  # fmt: skip


def resolve_algorithm(name: str, **cells: Any) -> Algorithm:
    """The row `name` with some cells replaced; an unknown name is a ValueError with the nearest known one."""
    if name not in ALGORITHMS:
        raise ValueError(
            f"algorithm {name!r} is unknown{_nearest(name, ALGORITHMS)}; known: {', '.join(sorted(ALGORITHMS))}"
        )
    row = ALGORITHMS[name]
    if cells.get("loss", row.loss) not in CLIPPED:  # another loss leaves the row's own clip behind, not the user's
        cells = {"clip_low": None, "clip_high": None, **cells}
    return replace(row, **cells)


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
