"""Pairs of completions that the tasks bring with them: `training.completions=given`, for DPO and IPO.

A task has a preferred completion in `meta["chosen"]` and another one in `meta["rejected"]`, each a text, or a chat
whose last message is it: the columns `chosen` and `rejected` of a data set. Nothing is sampled and no verifier is
asked; the log-probs of the completions are those of the policy as it is.
Exercised by `python -m pytest tests/test_given_pairs.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlvr.algorithms.shaping import compute_sampler_logprobs
from rlvr.core.protocols import SamplingClient, TaskSource
from rlvr.core.types import Outcome, Score, StopReason, Task, Trajectory
from rlvr.envs.prompt import encode_examples
from rlvr.rollout import Group

CHOSEN, REJECTED = "chosen", "rejected"


def read_pair(task: Task) -> tuple[str, str]:
    """The preferred completion of a task and the other one; ValueError naming the task for one that lacks either."""
    return _read(task, CHOSEN), _read(task, REJECTED)


def _read(task: Task, name: str) -> str:
    value = task.meta.get(name)
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        value = value[-1].get("content")
    if not isinstance(value, str):
        raise ValueError(
            f"training.completions=given: task {task.id!r} has {value!r:.60} as its {name!r}, expected a text, or a "
            f"chat whose last message is it; give the rows the columns {CHOSEN!r} and {REJECTED!r}"
        )
    return value


def make_pairs(
    groups: Sequence[Group], source: TaskSource, sampler: SamplingClient, reward: str, version: int, temperature: float
) -> list[Trajectory]:
    """Two trajectories a group, with the reward 1 and 0, as if the policy had sampled them."""
    tokenizer: Any = sampler.get_tokenizer()
    tasks = [group.task for group in groups for _ in range(2)]
    texts = [text for group in groups for text in read_pair(group.task)]
    trajectories: list[Trajectory] = []
    for i, (prompt, completion) in enumerate(encode_examples(tasks, texts, tokenizer, source.prompt_limit)):
        group, is_chosen = groups[i // 2], i % 2 == 0
        verdict = Score(1.0, Outcome.PASSED) if is_chosen else Score(0.0, Outcome.FAILED, REJECTED)
        trajectories.append(
            Trajectory(
                prompt=tasks[i].prompt_text,
                prompt_tokens=prompt,
                response=texts[i],
                response_tokens=completion,
                logprobs=[0.0] * len(completion),
                reward=verdict.value,
                group_id=group.id,
                rollout_id=f"{group.id}/{i % 2}",
                task=tasks[i],
                scores={reward: verdict},
                stop_reason=StopReason.STOP,
                temperature=temperature,
                policy_version=version,
                policy_fingerprint=sampler.fingerprint,
                turn_starts=[0],
            )
        )
    for t, logprobs in zip(trajectories, compute_sampler_logprobs(trajectories, sampler, temperature), strict=True):
        t.logprobs = logprobs
    return trajectories
