"""Judged completions that the tasks bring with them: `training.completions=given`, for DPO, IPO and KTO.

For a loss of pairs a task has a preferred completion in `meta["chosen"]` and another one in `meta["rejected"]`, for KTO
one in `meta["completion"]` and in `meta["label"]` whether it is preferred. A completion is a text, or a chat whose last
message is it; these are the columns of a data set. Nothing is sampled and no verifier is asked; the log-probs of the
completions are those of the policy as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlvr.algorithms.sampler_logprobs import compute_sampler_logprobs
from rlvr.core.protocols import SamplingClient, TaskSource
from rlvr.core.types import Outcome, Score, StopReason, Task, Trajectory
from rlvr.envs.prompt import encode_examples
from rlvr.rollout import Group

CHOSEN, REJECTED = "chosen", "rejected"
COMPLETION, LABEL = "completion", "label"
_BATCH = 1024  # tasks whose tokens are counted in one call


def read_completions(task: Task, is_paired: bool) -> list[tuple[str, bool]]:
    """The completions of a task, and whether each is preferred; ValueError naming the task for one that lacks them."""
    if is_paired:
        return [(_read(task, CHOSEN), True), (_read(task, REJECTED), False)]
    if not isinstance(label := task.meta.get(LABEL), bool):
        raise ValueError(
            f"training.completions=given: task {task.id!r} has {label!r:.60} as its {LABEL!r}, expected true or false; "
            f"give the rows the columns {COMPLETION!r} and {LABEL!r}"
        )
    return [(_read(task, COMPLETION), label)]


def _read(task: Task, name: str) -> str:
    value = task.meta.get(name)
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        value = value[-1].get("content")
    if not isinstance(value, str):
        raise ValueError(
            f"training.completions=given: task {task.id!r} has {value!r:.60} as its {name!r}, expected a text, or a "
            f"chat whose last message is it; give the rows the columns {CHOSEN!r} and {REJECTED!r}, or for kto "
            f"{COMPLETION!r} and {LABEL!r}"
        )
    return value


def check_contents(tasks: Sequence[Task], is_paired: bool) -> str:
    """What all tasks of the data lack to learn from, in words, '' for nothing.

    ValueError naming a task that lacks its completions, or one if the two of each are the same: a loss of pairs has no
    gradient then.
    """
    given = [read_completions(task, is_paired) for task in tasks]
    if is_paired:
        equal = [task for task, [chosen, rejected] in zip(tasks, given, strict=True) if chosen[0] == rejected[0]]
        if equal and len(equal) == len(tasks):
            raise ValueError(
                f"training.completions=given: {CHOSEN!r} and {REJECTED!r} are the same in each of the {len(tasks):,} "
                f"tasks, for example {equal[0].id!r}: nothing is preferred to anything; give pairs that differ"
            )
        return (
            f"training.completions=given: {CHOSEN!r} and {REJECTED!r} are the same in {len(equal):,} of {len(tasks):,} "
            f"tasks, for example {equal[0].id!r}: nothing is learned from these; leave them out of the data"
            if equal
            else ""
        )
    missing = [label for label in (True, False) if tasks and not any(label == own for [(_, own)] in given)]
    if not missing:
        return ""
    others, change = ("false", "less") if missing[0] else ("true", "more")
    return (
        f"training.completions=given: no task has the {LABEL} {str(missing[0]).lower()}, all {len(tasks):,} have "
        f"{others}: kto only makes these completions {change} likely, and nothing says "
        + (
            "which ones to take instead; add some, or use a low training.optimizer.learning_rate"
            if missing[0]
            else "which ones are wrong; add some, or imitate these by training.mode=sft"
        )
    )


def check_lengths(
    tasks: Sequence[Task], tokenizer: Any, prompt_limit: int | None, context: int, is_paired: bool
) -> None:
    """ValueError naming the first task whose prompt and completion have more than `context` tokens together."""
    for start in range(0, len(tasks), _BATCH):
        part = tasks[start : start + _BATCH]
        given = [(task, text) for task in part for text, _ in read_completions(task, is_paired)]
        encoded = encode_examples([task for task, _ in given], [text for _, text in given], tokenizer, prompt_limit)
        for (task, _), (prompt, completion) in zip(given, encoded, strict=True):
            if (total := len(prompt) + len(completion)) > context:
                raise ValueError(
                    f"training.completions=given: task {task.id!r} has {total:,} tokens, {len(prompt):,} of its prompt "
                    f"and {len(completion):,} of its completion, more than the model's context of {context:,}; shorten "
                    "it or leave it out of the data"
                )


def make_given(
    groups: Sequence[Group],
    source: TaskSource,
    sampler: SamplingClient,
    reward: str,
    version: int,
    temperature: float,
    is_paired: bool,
) -> list[Trajectory]:
    """A trajectory for each completion of the groups' tasks, with the reward 1 or 0, as if the policy had sampled
    them."""
    tokenizer: Any = sampler.get_tokenizer()
    given = [
        (group, place, text, is_preferred)
        for group in groups
        for place, (text, is_preferred) in enumerate(read_completions(group.task, is_paired))
    ]
    encoded = encode_examples(
        [group.task for group, *_ in given], [text for _, _, text, _ in given], tokenizer, source.prompt_limit
    )
    trajectories: list[Trajectory] = []
    for (group, place, text, is_preferred), (prompt, completion) in zip(given, encoded, strict=True):
        verdict = Score(1.0, Outcome.PASSED) if is_preferred else Score(0.0, Outcome.FAILED, REJECTED)
        trajectories.append(
            Trajectory(
                prompt=group.task.prompt_text,
                prompt_tokens=prompt,
                response=text,
                response_tokens=completion,
                logprobs=[0.0] * len(completion),
                reward=verdict.value,
                group_id=group.id,
                rollout_id=f"{group.id}/{place}",
                task=group.task,
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
