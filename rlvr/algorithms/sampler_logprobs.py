"""Log-probs of completions under a sampling client: a reference, a teacher, or the teacher of each task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlvr.algorithms.task_teachers import TaskTeachers
from rlvr.core.messages import ModelInput
from rlvr.core.types import Trajectory


def fill_reference_logprobs(trajectories: Sequence[Trajectory], reference: Any, temperature: float) -> None:
    """Fill `reference_logprobs` by the sampling client `reference`, at the temperature the answers were sampled at."""
    scored = [t for t in trajectories if t.reward is not None and not t.is_empty]
    for t, logprobs in zip(scored, compute_sampler_logprobs(scored, reference, temperature), strict=True):
        t.reference_logprobs = logprobs


def compute_sampler_logprobs(trajectories: Sequence[Trajectory], sampler: Any, temperature: float) -> list[list[float]]:
    """The log-probs [R] of every completion under a sampling client, or that of its task (`TaskTeachers`).

    All are requested before one is read, so that a client may compute them together.
    """
    for t in trajectories:
        t.require_trainable()
    samplers = [sampler.of_task(t.task) if isinstance(sampler, TaskTeachers) else sampler for t in trajectories]
    futures = [
        one.compute_logprobs(ModelInput(t.full_tokens), temperature)
        for one, t in zip(samplers, trajectories, strict=True)
    ]
    pairs = zip(trajectories, futures, strict=True)
    return [[float(x) for x in future.result()[len(t.prompt_tokens) :]] for t, future in pairs]
