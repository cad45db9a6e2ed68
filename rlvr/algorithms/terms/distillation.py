"""On-policy distillation: a teacher's log-probs change the advantage of every token that the policy sampled.

A_t <- A_t - coefficient x (log policy - log teacher) of the sampled token. The gradient is that of the reverse KL
divergence of each token over the policy's own completions (Agarwal et al. 2024, arXiv:2306.13649, with the reverse KL;
https://thinkingmachines.ai/blog/on-policy-distillation/).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlvr.algorithms.sampler_logprobs import compute_sampler_logprobs
from rlvr.algorithms.terms.term import Logprobs, Preparation, Term
from rlvr.core.types import Trajectory
from rlvr.core.variants import setting


@dataclass(frozen=True)
class Teacher(Term):
    """`coef` weighs on-policy distillation: every token's advantage loses coefficient x (log policy - log teacher), the
    reverse KL to the run's `teacher` (arXiv:2306.13649). `advantage=zero` learns from it alone.
    """

    name = "teacher"
    switch = "coef"
    has_gradient = True
    teaches = True
    needs_teacher = True

    coef: float = setting(low=0, expected="at least 0", flat="teacher_coef")

    def adjust(self, selected: Sequence[Trajectory], prepared: Preparation) -> None:
        if prepared.teacher is None:
            raise ValueError(
                f"algorithm.teacher_coef={self.coef} without a teacher: set teacher.model or teacher.url, or give the "
                "update's inputs a `teacher`, a sampling client"
            )
        add_teacher_advantages(selected, prepared.teacher, self.coef, prepared.temperature, prepared.old_logprobs)

    def measure_batch(self, batch: Sequence[Trajectory]) -> dict[str, float]:
        return {"teacher/kl": measure_teacher_kl(batch)}

    def describe(self) -> str:
        return f"teacher at {self.coef:g}"


def add_teacher_advantages(
    trajectories: Sequence[Trajectory],
    teacher: Any,
    coefficient: float,
    temperature: float,
    old_logprobs: Logprobs = lambda trajectory: None,
) -> None:
    """Set `teacher_logprobs` and `token_advantages` [R] of every trajectory; `teacher` is a sampling client.

    `old_logprobs` gives the trainer's log-probs [R] before the step; where it gives none, the sampler's are used.
    """
    rows = [t for t in trajectories if not t.is_empty]
    for t, logprobs in zip(rows, compute_sampler_logprobs(rows, teacher, temperature), strict=True):
        teach(t, logprobs, coefficient, old_logprobs(t))


def teach(t: Trajectory, logprobs: list[float], coefficient: float, own: Sequence[float] | None = None) -> None:
    """Set the teacher's `logprobs` [R] and add coefficient x (teacher - policy) to the advantage of every token.

    `own` [R] are the policy's log-probs, by default the sampler's.
    """
    t.teacher_logprobs = logprobs
    gap = np.asarray(t.logprobs if own is None else own) - np.asarray(logprobs)
    t.token_advantages = (np.asarray(t.response_advantages) - coefficient * gap).tolist()


def measure_teacher_kl(trajectories: Sequence[Trajectory]) -> float:
    """The mean over sampled tokens of log policy - log teacher, an estimate of the reverse KL; 0 without tokens."""
    gaps = [
        q - teacher
        for t in trajectories
        if t.teacher_logprobs
        for q, teacher, acted in zip(t.logprobs, t.teacher_logprobs, t.action_mask, strict=True)
        if acted
    ]
    return float(np.mean(gaps)) if gaps else 0.0
