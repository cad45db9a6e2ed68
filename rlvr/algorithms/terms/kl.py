"""The divergence from the policy as RL began, in the reward or in the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rlvr.algorithms.losses.loss import MAX_LOG_RATIO
from rlvr.algorithms.part import SpecView
from rlvr.algorithms.sampler_logprobs import fill_reference_logprobs
from rlvr.algorithms.terms.term import Logprobs, Preparation, Row, Term, TrainedTokens, group_rollouts
from rlvr.core.protocols import Feature
from rlvr.core.types import Trajectory
from rlvr.core.variants import setting

# d = log reference - log policy of sampled tokens. http://joschu.net/blog/kl-approx.html
KL_TERMS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "k1": lambda d: -d,
    "k2": lambda d: 0.5 * d * d,
    "k3": lambda d: np.exp(np.minimum(d, MAX_LOG_RATIO)) - 1.0 - d,
}
KL_ESTIMATORS = tuple(KL_TERMS)  # `loss_fn_config={"kl_estimator": 1.0}` and so on


@dataclass(frozen=True)
class Kl(Term):
    """`coef` weighs the divergence from the policy as RL began, estimated by `estimator`.

    With d = log reference - log policy of a sampled token, k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d
    (http://joschu.net/blog/kl-approx.html). `where=reward` subtracts coefficient x the completion's sum of k from its
    reward before the advantage, with an advantage that pays by token (`gae`, `token_normalized`) each token's k from
    the reward of that token; `where=loss` adds coefficient x k to every token's loss. k1 in the reward has the gradient
    of the reverse KL of whole completions (arXiv:2510.01555). k2 in the loss has that of the next token's KL at a fixed
    prefix, all of it for one token alone: it leaves out that a token also changes which prefixes come. k3 in the loss
    is GRPO's; k1 in the loss has none on average. k2 and k3 in the reward have the gradient of no KL, and may push away
    from the reference (docs/loss-functions.md has an example).
    """

    name = "kl"
    switch = "coef"
    has_gradient = True

    coef: float = setting(low=0, expected="at least 0", flat="kl_coef")
    estimator: str = setting("k1", choices=KL_ESTIMATORS, flat="kl_estimator")
    where: str = setting("reward", choices=("reward", "loss"), flat="kl_in")

    @property
    def is_in_loss(self) -> bool:
        return self.where == "loss"

    @property
    def has_gradient_at_zero(self) -> bool:
        return self.is_in_loss

    @property
    def needs(self) -> tuple[Feature, ...]:
        return (Feature.EXTRA_INPUTS, Feature.REFERENCE) if self.is_in_loss else (Feature.REFERENCE,)

    def used_key(self) -> tuple[str, str]:
        return f"kl_in={self.where}", "use kl_in=reward" if self.is_in_loss else "set kl_coef=0"

    @property
    def needs_reference(self) -> bool:
        return True

    @property
    def is_penalty(self) -> bool:
        return not self.is_in_loss

    def check(self, algorithm: SpecView) -> None:
        if self.is_penalty and (why := algorithm.advantage.why_no_kl):
            raise ValueError(
                f"algorithm.kl_coef={self.coef:g} with kl_in=reward and the advantage {algorithm.advantage.name!r}, "
                f"which {why}: the KL has no gradient; use kl_in=loss, or leave kl_coef out"
            )

    def advice(self, algorithm: SpecView) -> str:
        if self.is_in_loss and self.estimator == "k1":
            return (
                "algorithm.kl_in=loss with kl_estimator=k1: its gradient is 0 on average, so it does not keep the "
                "policy near the reference; use k2 in the loss, or k1 in the reward"
            )
        if not self.is_in_loss and self.estimator != "k1":
            return (
                f"algorithm.kl_in=reward with kl_estimator={self.estimator}: its expected gradient is that of no KL; "
                "use k1 in the reward, or k2 in the loss"
            )
        return ""

    def config(self) -> dict[str, float]:
        return {"kl_estimator": float(1 + KL_ESTIMATORS.index(self.estimator))} if self.is_in_loss else {}

    def prepare(self, batch: Sequence[Trajectory], prepared: Preparation) -> None:
        if prepared.reference is None:
            raise ValueError(
                f"algorithm.kl_coef={self.coef} without a reference: give the update's inputs a `reference`, a "
                "sampling client at the weights to compare with"
            )
        fill_reference_logprobs(batch, prepared.reference, prepared.temperature)

    def penalize(
        self, batch: Sequence[Trajectory], algorithm: SpecView, max_tokens: int, old_logprobs: Logprobs
    ) -> None:
        """With an advantage that pays by token each token pays for its own k (`token_penalties`), as in InstructGPT,
        arXiv:2203.02155, and REINFORCE++, arXiv:2501.03262.
        """
        if self.is_in_loss:
            return
        for parts in group_rollouts([t for t in batch if t.reward is not None]):
            kl = [self.coef * token_kl(t, self.estimator, old_logprobs(t)) for t in parts]
            total = sum(float(k.sum()) for k in kl)
            for t, k in zip(parts, kl, strict=True):
                t.penalty += total
                t.token_penalties = k.tolist() if algorithm.advantage.pays_by_token else []

    def weigh(self, row: Row) -> None:
        if self.is_in_loss:
            row.inputs["reference_logprobs"] = row.trajectory.reference_logprobs
            row.inputs["kl_weights"] = self.coef * row.weight * np.ones(len(row.logprobs))

    def measure(self, trained: TrainedTokens) -> tuple[float, np.ndarray | None]:
        if trained.reference is None:
            return 0.0, None
        k = KL_TERMS[self.estimator](trained.reference - trained.now)
        return self.coef * float((trained.weight * k).sum()) if self.is_in_loss else 0.0, k

    def describe(self) -> str:
        return f"KL {self.coef:g} in the {self.where}"


def token_kl(trajectory: Trajectory, estimator: str, old: Sequence[float] | None = None) -> np.ndarray:
    """The k [R] of every sampled token, 0 elsewhere, between the policy that sampled (or the trainer's, `old` [R]) and
    the reference."""
    policy = np.asarray(trajectory.logprobs if old is None else old)
    d = np.asarray(trajectory.reference_logprobs) - policy
    return KL_TERMS[estimator](d) * np.asarray(trajectory.action_mask)
