"""Supervised fine-tuning on an environment's demonstrations: before RL, and `rlvr train training.mode=sft`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlvr.algorithms.optimizers import OptimizerSection
from rlvr.core import rng
from rlvr.core.messages import Datum
from rlvr.core.protocols import TaskSource, TrainingClient
from rlvr.core.types import Task
from rlvr.envs.prompt import encode_prompts, encode_texts
from rlvr.training.curriculum import Curriculum, CurriculumOptions


@dataclass(frozen=True)
class SftOptions:
    """Supervised fine-tuning: at most `steps` optimizer steps of `batch_size` demonstrations each. 0 steps: none.

    With `until` it ends as soon as an interim evaluation, every `check_every` steps, reaches that pass rate, and every
    kind of task (`TaskSource.describe_task`) of which it has at least 10 the pass rate `until_each`: a mean hides a
    kind that was not learned at all, and reinforcement learning may never find it. `evaluation.interim_tasks` and
    `interim_samples` are the sizes of that evaluation; `until=0` means all `steps`. It has its own curriculum;
    `by=pass_rate` is not possible, since nothing is sampled.
    """

    steps: int = 0
    batch_size: int = 64
    until: float = 0.0
    until_each: float = 0.0
    check_every: int = 50
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    curriculum: CurriculumOptions = field(default_factory=CurriculumOptions)

    def __post_init__(self) -> None:
        object.__setattr__(self, "optimizer", OptimizerSection.of(self.optimizer))
        if self.steps < 0 or self.batch_size < 1:
            raise ValueError(f"sft: steps={self.steps}, batch_size={self.batch_size}; expected >= 0 and >= 1")
        if not 0 <= self.until <= 1 or self.check_every < 1:
            raise ValueError(f"sft: until={self.until}, check_every={self.check_every}; expected 0 to 1 and >= 1")
        if not 0 <= self.until_each <= 1:
            raise ValueError(f"sft.until_each={self.until_each}, expected a pass rate from 0 to 1")
        if self.curriculum.replay:
            raise ValueError("sft.curriculum.replay: demonstrations are not solved or unsolved; leave it out")
        if self.curriculum.variant.learns_from_verdicts:
            raise ValueError(
                f"sft.curriculum.by={self.curriculum.by}: demonstrations have no pass rate; use uniform or schedule"
            )


def name_task(source: TaskSource, task: Task) -> str:
    """The task's id, with what the environment says of it: `'countdown-7' (family=countdown)`."""
    words = ", ".join(f"{key}={value}" for key, value in source.describe_task(task).items())
    return f"{task.id!r} ({words})" if words else repr(task.id)


def sft_step(
    client: TrainingClient, source: TaskSource, curriculum: Curriculum, options: SftOptions, step: int, seed: int
) -> dict[str, float]:
    """Imitate one batch of demonstrations: the mean negative log-likelihood of the model's tokens, end tokens
    included."""
    tokenizer: Any = client.get_tokenizer()
    tasks = [source.complete_prompt(task, tokenizer) for task in curriculum.tasks(options.batch_size, step)]
    demonstrations = [
        source.demonstration(task, rng.key("demonstration", seed, step, i)) for i, task in enumerate(tasks)
    ]
    episodes = [[shown] if isinstance(shown, str) else shown for shown in demonstrations if shown is not None]
    if len(episodes) < len(tasks):
        raise ValueError(
            f"sft: there is no demonstration to imitate for task {name_task(source, tasks[demonstrations.index(None)])}"
            "; let env.kwargs leave such tasks out, or set sft.steps=0"
        )
    prompts = encode_prompts(tasks, tokenizer, source.prompt_limit)
    completions = _encode_episodes(episodes, tokenizer)
    count = sum(sum(mask) for _, mask in completions)
    data = [
        Datum.from_completion(prompt, tokens, [is_said / count for is_said in mask])
        for prompt, (tokens, mask) in zip(prompts, completions, strict=True)
    ]
    output = client.forward_backward(data, "cross_entropy").result()
    adam = options.optimizer.variant.at(step, options.steps)
    stepped = client.optim_step(adam).result()
    return {
        **stepped.of_client,
        "loss": output.metrics["loss:sum"],
        **adam.rates,
        "grad_norm": stepped.metrics.get("grad_norm", math.nan),
        "tokens_trained": float(count),
        "completions/mean_length": count / len(data),
    }


def _encode_episodes(episodes: Sequence[list[str]], tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """(tokens, 1 for each that the model says and else 0) of episodes, with an end token after the model's turns."""
    encoded = iter(encode_texts([text for episode in episodes for text in episode], tokenizer))
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    completions: list[tuple[list[int], list[int]]] = []
    for episode in episodes:
        if len(episode) % 2 == 0:
            raise ValueError(
                f"sft: a demonstration has {len(episode)} turns, expected an odd number: the model's turns come first "
                "and last, and each of the environment's stands between two of them"
            )
        turns = [
            (1, [*tokens, *end]) if place % 2 == 0 else (0, tokens)
            for place, tokens in zip(range(len(episode)), encoded, strict=False)
        ]
        tokens = [token for _, turn in turns for token in turn]
        completions.append((tokens, [is_said for is_said, turn in turns for _ in turn]))
    return completions
