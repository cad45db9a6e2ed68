"""The spec of an algorithm: advantage x token loss x reduction x what is learned from, and further terms.

The fields alone decide what is computed. Losses are sums (`rlvr.algorithms.losses`); the reduction is a weight per
trajectory that folds into its advantage, so splitting a batch never changes a gradient. The specs by name are in
`rlvr.algorithms.registry`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rlvr.algorithms.advantages import ADVANTAGES, Advantage, RunningBaseline, Threshold
from rlvr.algorithms.losses import LOSSES
from rlvr.algorithms.losses.loss import Loss
from rlvr.algorithms.reductions import count_sampled, find_reduction
from rlvr.algorithms.returns import has_mixed_returns, has_mixed_rewards
from rlvr.algorithms.terms import TERMS
from rlvr.algorithms.terms.term import Term
from rlvr.core.registry import did_you_mean
from rlvr.core.types import Task, Trajectory, group_by

T = TypeVar("T", bound=Term)
EQUAL_BY = ("return", "reward")


def flat_keys() -> dict[str, str]:
    """Every key that can override a part of a spec, and which part it is of: `advantage`, `loss`, the name of a term,
    or "" for a field of its own."""
    keys = {"advantage": "advantage", "loss": "loss"}
    keys |= dict.fromkeys(("reduction", "drop_equal_groups", "equal_by", "mask_truncated"), "")
    for part, variants in (("loss", LOSSES), ("advantage", ADVANTAGES)):
        keys |= {key: part for variant in variants.classes() for key in variant.flat_names().values()}
        keys[variants.kwargs_key()] = part
    return keys | {key: term.name for term in TERMS.classes() for key in term.flat_names().values()}


@dataclass(frozen=True)
class Algorithm:
    """The spec of one algorithm.

    - `advantage`: how returns become advantages (`ADVANTAGES`), `loss`: of what the gradient is taken (`LOSSES`), and
      `terms`: what is added to loss, rewards or advantages (`TERMS`). An advantage and a loss may be given by name.
    - `reduction`: how much each token counts (`REDUCTIONS`), by its name or the path of a function.
    - `drop_equal_groups`: groups whose rewards are all equal leave the batch and its denominators.
    - `equal_by`: what is compared. `return`: the reward less the overlong penalty, so right completions of which one is
      overlong are a group with signal. `reward`: what the verifiers gave, as in DAPO, whose dynamic sampling asks for
      right and wrong completions (arXiv:2503.14476, eq. 11). A KL in the reward never counts.
    - `mask_truncated`: completions that ran out of tokens are not learned from (DAPO's overlong filtering).
    - `for_tasks`: other specs for some tasks, by the value that a task has under `task_key`: in its `meta`, or its
      `level`. Each judges and filters its own groups; how much a token counts follows from its reduction over the
      completions of the whole optimizer step, so specs that are all the same are as one.
    """

    name: str
    advantage: Advantage
    loss: Loss
    reduction: str
    terms: tuple[Term, ...] = ()
    drop_equal_groups: bool = True
    equal_by: str = "return"
    mask_truncated: bool = False
    source: str = ""
    task_key: str = "source"
    for_tasks: tuple[tuple[str, Algorithm], ...] = ()

    def __post_init__(self) -> None:
        for field, variants in (("advantage", ADVANTAGES), ("loss", LOSSES)):
            if isinstance(name := getattr(self, field), str):
                object.__setattr__(self, field, variants.find(name)())
            if not isinstance(given := getattr(self, field), variants.base):
                raise ValueError(f"algorithm.{field}={given!r}: expected a name, or a {variants.base.__name__}")
        order = list(TERMS)
        places = {name: place for place, name in enumerate(order)}
        given = [term for term in self.terms if getattr(term, term.switch)]
        terms = sorted(given, key=lambda term: places.get(term.name, len(order)))
        object.__setattr__(self, "terms", tuple(terms))
        names = [term.name for term in terms]
        if twice := [name for place, name in enumerate(names) if name in names[:place]]:
            raise ValueError(f"algorithm {self.name!r}: the term {twice[0]} is given twice; give it once")
        find_reduction(self.reduction)
        if self.equal_by not in EQUAL_BY:
            near = did_you_mean(str(self.equal_by), EQUAL_BY)
            raise ValueError(f"algorithm.equal_by={self.equal_by!r} is unknown{near}; known: {', '.join(EQUAL_BY)}")
        for part in (self.loss, self.advantage, *self.terms):
            part.check(self)
        for one in self.every if self.for_tasks else ():
            kind = "loss" if one.loss.needs_whole_step else "advantage"
            if one.loss.needs_whole_step or one.advantage.takes_critic or one.advantage.keeps_baseline:
                raise ValueError(
                    f"algorithm.for_tasks: {one.name!r} has the {kind} {getattr(one, kind).name!r}, which is computed "
                    f"over a whole step or from step to step; use another {kind}, or one algorithm for all tasks"
                )
        if self.drop_equal_groups and not self.has_group_baseline:
            raise ValueError(
                f"algorithm.drop_equal_groups=true with the advantage {self.advantage.name!r} would drop groups that "
                "have a gradient though their rewards are equal; set it to false"
            )

    @property
    def every(self) -> tuple[Algorithm, ...]:
        """This spec, and the specs for some tasks."""
        return (self, *(one for _, one in self.for_tasks))

    def of_task(self, task: Task | None) -> Algorithm:
        """The spec for a task."""
        if not self.for_tasks or task is None:
            return self
        return dict(self.for_tasks).get(task.value_of(self.task_key) or "", self)

    def split(self, trajectories: Sequence[Trajectory]) -> list[tuple[Algorithm, list[Trajectory]]]:
        """The trajectories that each spec learns from, in their order."""
        if not self.for_tasks:
            return [(self, list(trajectories))]
        parts = [(one, [t for t in trajectories if self.of_task(t.task) is one]) for one in self.every]
        return [(one, part) for one, part in parts if part]

    def term(self, kind: type[T]) -> T | None:
        """The term of that class, if the algorithm has one."""
        return next((term for term in self.terms if isinstance(term, kind)), None)

    def with_flat(self, flat: Mapping[str, Any]) -> Algorithm:
        """The spec with the options of flat keys set, such as `loss="cispo", clip_high=3.0, kl_coef=0.1`.

        None takes the default of a variant's option, and 0 or None a term away. ValueError for a key that does not
        exist, or that belongs to another variant than the one chosen.
        """
        known = flat_keys()
        if unknown := [key for key in flat if key not in known]:
            raise ValueError(
                f"algorithm {self.name!r} has no field {unknown[0]!r}{did_you_mean(unknown[0], known)}; "
                f"fields: {', '.join(known)}"
            )
        of_part: dict[str, dict[str, Any]] = {}
        for key, value in flat.items():
            of_part.setdefault(known[key], {})[key] = value
        changes = of_part.pop("", {})
        if given := of_part.pop("advantage", None):
            changes["advantage"] = ADVANTAGES.vary(self.advantage, given.pop("advantage", None), given)
        if given := of_part.pop("loss", None):
            changes["loss"] = LOSSES.vary(self.loss, given.pop("loss", None), given)
        terms = {term.name: term for term in self.terms}
        for name, given in of_part.items():
            kind, earlier = TERMS.find(name), terms.pop(name, None)
            options = kind.read_flat(given, earlier.options if earlier else {})
            if options.get(kind.switch):
                terms[name] = kind(**options)
        changes["terms"] = tuple(terms.values())
        switched_on = [
            terms[name] for name, given in of_part.items() if name in terms and given.get(terms[name].key_of_switch)
        ]
        is_paired = changes.get("loss", self.loss).is_paired
        of_batch = "advantage" in flat and changes["advantage"].of_batch and not is_paired
        if of_batch or any(term.has_gradient for term in switched_on):  # groups of equal rewards have a gradient then
            changes.setdefault("drop_equal_groups", False)
        return replace(self, **changes)

    @property
    def flat(self) -> dict[str, Any]:
        """What `with_flat` would set: every key of the spec with its value."""
        keys: dict[str, Any] = {"advantage": self.advantage.name, "loss": self.loss.name}
        keys |= {name: getattr(self, name) for name in ("reduction", "drop_equal_groups", "equal_by", "mask_truncated")}
        for part in self.terms:
            keys |= {part.flat_names()[option]: value for option, value in part.options.items()}
        for part, variants in ((self.advantage, ADVANTAGES), (self.loss, LOSSES)):
            if variants.is_built_in(part.name):
                keys |= {part.flat_names()[option]: value for option, value in part.options.items()}
            elif part.options:
                keys[variants.kwargs_key()] = part.options
        return keys

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs under the policy as RL began are needed."""
        return self.loss.compares_completions or any(term.needs_reference for one in self.every for term in one.terms)

    @property
    def has_group_baseline(self) -> bool:
        """Whether the baseline is a group's own: then a group of one has no signal."""
        return not self.advantage.of_batch or self.loss.is_paired

    @property
    def has_teacher(self) -> bool:
        """Whether the policy learns from it even if no reward is read."""
        return any(term.teaches for one in self.every for term in one.terms)

    @property
    def needs_teacher(self) -> bool:
        """Whether the teacher is another model."""
        return any(term.needs_teacher for one in self.every for term in one.terms)

    @property
    def has_gradient_at_zero(self) -> bool:
        """Whether a trajectory with advantage 0 may have a gradient; with a critic its tokens differ."""
        by_term = any(term.has_gradient_at_zero for term in self.terms)
        return self.advantage.takes_critic or by_term or self.loss.has_gradient_at_zero

    @property
    def has_penalty(self) -> bool:
        """Whether a penalty is subtracted from the reward before the advantage."""
        return any(term.is_penalty for one in self.every for term in one.terms)

    def select(self, trajectories: Sequence[Trajectory], baseline: RunningBaseline | None = None) -> list[Trajectory]:
        """Set every `advantage`; return the trajectories that the loss's denominators count.

        Unknown rewards are left out, and so are truncated completions under `mask_truncated` (they still count in the
        baseline) and groups with equal returns under `drop_equal_groups`. The batch then updates `baseline`.
        """
        baseline = baseline or self.advantage.start_baseline()
        for t in trajectories:
            t.token_advantages, t.observation_weight = [], 0.0
            if t.turn_credits and not self.advantage.reads_branches:
                raise ValueError(
                    f"algorithm.advantage={self.advantage.name} cannot read rewards of branches (Score.branches, or "
                    "those that an agent gave); leave them out, or use another advantage, such as group_normalized"
                )
        self.advantage.estimate(trajectories, baseline)
        self.advantage.observe(trajectories, baseline)
        known = self.advantage.keep([t for t in trajectories if t.reward is not None])
        if self.drop_equal_groups:
            groups = group_by(known, lambda t: t.group_id).values()
            parts = [part for group in groups for part in self.advantage.split(group)]
            known = [t for part in parts if self._is_mixed(part) for t in part]
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
        if (own := self.of_task(group[0].task if group else None)) is not self:
            return own.has_signal(group)
        if self.loss.is_paired:
            return self._has_pair([t for t in group if t.reward is not None])
        if self.has_group_baseline and (self.drop_equal_groups or not self.has_teacher):
            return any(map(self._is_mixed, self.advantage.split(group)))
        return any(t.has_advantage for t in group if t.reward is not None)

    def _is_mixed(self, group: Sequence[Trajectory]) -> bool:
        by_reward = self.drop_equal_groups and self.equal_by == "reward"
        return has_mixed_rewards(group) if by_reward else has_mixed_returns(group)

    def _has_pair(self, judged: Sequence[Trajectory]) -> bool:
        assert isinstance(self.advantage, Threshold)
        sides: dict[bool, set[tuple[tuple[int, ...], ...]]] = {True: set(), False: set()}
        for parts in group_by(judged, lambda t: t.rollout_id or str(id(t))).values():
            sides[self.advantage.accepts(parts[0])].add(tuple(tuple(t.response_tokens) for t in parts))
        return bool(sides[True] and sides[False]) and len(sides[True] | sides[False]) > 1

    def weigh(
        self, selected: Sequence[Trajectory], max_tokens: int, counted: Sequence[Trajectory] = ()
    ) -> list[tuple[Trajectory, float]]:
        """The trajectories of one optimizer step that have a gradient, each with its reduction weight.

        Those without are skipped; their tokens still count in the denominators, and so do those of all the others that
        are `counted`, by default the selected alone.
        """
        if not selected:
            return []
        own, counted = {id(t) for t in selected}, counted or selected

        def reduce(count: Callable[[Trajectory], int]) -> list[float]:
            of_all = find_reduction(self.reduction)(counted, max_tokens, count)
            return [weight for t, weight in zip(counted, of_all, strict=True) if id(t) in own]

        weights = reduce(count_sampled)
        for term in self.terms:
            term.weigh_step(selected, weights, reduce)
        rows = [(t, w) for t, w in zip(selected, weights, strict=True) if t.num_action_tokens]
        if self.has_gradient_at_zero:
            return rows
        return [(t, w) for t, w in rows if t.has_advantage or t.observation_weight]
