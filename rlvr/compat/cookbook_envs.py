"""Our environments in the loops of `tinker_cookbook`, which must be installed: this module imports it.

    train = for_cookbook(SourceDataset(resolve_environment("gsm8k"), tokenizer, batch_size=8, group_size=4))
    group = await do_group_rollout(train.get_batch(0)[0], policy)                  # the cookbook's own

Any dataset of group builders goes through `for_cookbook`; `SourceDataset` makes one of a task source, whose verifier
judges the group when its episodes are over. Left out on purpose: a reward of None. The cookbook has no word for "could
not be judged", so that is an error there, which its own tolerance governs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tinker
from tinker_cookbook.rl.types import Env as CookbookEnv
from tinker_cookbook.rl.types import EnvGroupBuilder as CookbookGroupBuilder
from tinker_cookbook.rl.types import InitialObservationOverflow as CookbookOverflow
from tinker_cookbook.rl.types import RLDataset as CookbookDataset
from tinker_cookbook.rl.types import StepResult as CookbookStepResult

from rlvr.core.protocols import Env, InitialObservationOverflow, TaskSource
from rlvr.core.types import StopReason, Task
from rlvr.envs.groups import EnvGroupBuilder, RLDataset
from rlvr.reward import Reward, resolve_reward
from rlvr.reward.environment import check_declared
from rlvr.reward.signatures import Case


def for_cookbook(dataset: RLDataset) -> CookbookDataset:
    """The dataset as the cookbook's loops take it."""
    return _Dataset(dataset)


class SourceDataset(RLDataset):
    """Batches of a task source's training tasks, `len` of them an epoch or `batches` of them; or its held-out ones.

    `reward` is the name of a verifier, by default the source's own; `environment_weight` that of the episodes' own
    rewards beside it, by default the source's with the source's own verifier. Text prompts are encoded as they stand;
    for a chat model give `apply_prompt_options(source, tokenizer, PromptOptions())` (`rlvr.envs.prompted_source`). A
    prompt ends where its tokens say; answers end at the end-of-sequence token, or where the environment says.
    """

    def __init__(
        self,
        source: TaskSource,
        tokenizer: Any,
        batch_size: int,
        group_size: int,
        *,
        batches: int | None = None,
        heldout: bool = False,
        reward: str | None = None,
        environment_weight: float | None = None,
        seed: int = 0,
    ) -> None:
        if batch_size < 1 or group_size < 1:
            raise ValueError(f"batch_size={batch_size}, group_size={group_size}; expected at least 1 each")
        if len(source.levels) > 1:
            raise ValueError(
                f"the task source has the levels {', '.join(source.levels)}, and a dataset takes tasks of one; make "
                "the source with one level by its options (complexity=[1], say)"
            )
        self.source, self.tokenizer, self.seed, self.heldout = source, tokenizer, seed, heldout
        self.batch_size, self.group_size = batch_size, group_size
        if environment_weight is None and reward in (None, source.reward):
            environment_weight = source.environment_weight
        self.reward = resolve_reward(reward or source.reward).plus_environment(environment_weight)
        self._tasks = source.heldout(None) if heldout else None
        if batches is None and self._tasks is None and source.size is None:
            raise ValueError("this task source has no size; give batches=, the number of batches of an epoch")
        level = next(iter(source.levels))
        count = len(self._tasks) if self._tasks is not None else source.size(level) if source.size else 0
        self._batches = batches if batches is not None else math.ceil(count / batch_size)

    def get_batch(self, index: int) -> Sequence[SourceGroupBuilder]:
        if not 0 <= index < self._batches:
            raise ValueError(f"batch {index}, expected 0 to {self._batches - 1}")
        places = range(index * self.batch_size, (index + 1) * self.batch_size)
        if self._tasks is not None:
            tasks = [self._tasks[i] for i in places if i < len(self._tasks)]
        else:
            tasks = [self.source.train(self.seed, i, next(iter(self.source.levels))) for i in places]
        return [SourceGroupBuilder(self.source, task, self.tokenizer, self.group_size, self.reward) for task in tasks]

    def __len__(self) -> int:
        return self._batches


@dataclass(frozen=True)
class SourceGroupBuilder(EnvGroupBuilder):
    """The episodes of one task; the verifier judges the last turn of each."""

    source: TaskSource
    task: Task
    tokenizer: Any
    size: int
    reward: Reward

    async def make_envs(self) -> Sequence[Env]:
        return [self.source.env(self.task, self.tokenizer) for _ in range(self.size)]

    async def compute_group_rewards(
        self, trajectory_group: list[Any], env_group: Sequence[Any]
    ) -> list[tuple[float, dict[str, float]]]:
        given: list[tuple[float, dict[str, float]]] = []
        scores = self.reward.judge_all([self._case(episode) for episode in trajectory_group])
        for episode, score in zip(trajectory_group, scores, strict=True):
            if score.value is None:
                raise RuntimeError(f"task {self.task.id!r}: {score.outcome.value}, {score.reason} {score.detail}")
            own = sum(turn.reward for turn in episode.transitions)  # which the cookbook adds to what is given here
            check_declared(self.reward, own, self.task.id)
            weight = self.reward.environment_weight or 0.0
            given.append(
                (score.value + (weight - 1.0) * own, {"correct": float(score.outcome.value == "passed"), **score.parts})
            )
        return given

    def logging_tags(self) -> list[str]:
        return [self.task.level] if self.task.level else []

    def _case(self, episode: Any) -> Case:
        last = episode.transitions[-1]
        tokens = list(last.ac.tokens)
        ended = tokens[-1:] == [self.tokenizer.eos_token_id]
        answer = self.tokenizer.decode(tokens[:-1] if ended else tokens, skip_special_tokens=False)
        return Case.of_task(self.task, answer, tokens=tokens, stop_reason=StopReason(last.ac.stop_reason))


class _Dataset(CookbookDataset):
    def __init__(self, dataset: RLDataset) -> None:
        self.dataset = dataset

    def get_batch(self, index: int) -> Sequence[CookbookGroupBuilder]:
        return [_GroupBuilder(builder) for builder in self.dataset.get_batch(index)]

    def __len__(self) -> int:
        return len(self.dataset)


class _GroupBuilder(CookbookGroupBuilder):
    def __init__(self, builder: EnvGroupBuilder) -> None:
        self.builder = builder

    async def make_envs(self) -> Sequence[CookbookEnv]:
        return [_Env(env) for env in await self.builder.make_envs()]

    async def compute_group_rewards(self, trajectory_group: list[Any], env_group: Sequence[Any]) -> list[Any]:
        return await self.builder.compute_group_rewards(trajectory_group, [env.env for env in env_group])

    async def cleanup(self) -> None:
        await self.builder.cleanup()

    def logging_tags(self) -> list[str]:
        return self.builder.logging_tags()


class _Env(CookbookEnv):
    def __init__(self, env: Env) -> None:
        self.env = env
        self._stop: Any = None

    async def initial_observation(self) -> tuple[tinker.ModelInput, Any] | CookbookOverflow:
        given = await self.env.initial_observation()
        if isinstance(given, InitialObservationOverflow):
            return CookbookOverflow(given.reward, dict(given.metrics), dict(given.logs))
        observation, self._stop = given
        return tinker.ModelInput.from_ints(observation.to_ints()), self._stop

    async def step(self, action: list[int], *, extra: Any = None) -> CookbookStepResult:
        result = await self.env.step(action, extra=dict(extra) if extra else None)
        self._stop = result.next_stop_condition or self._stop
        after = result.next_observation
        return CookbookStepResult(
            reward=result.reward,
            episode_done=result.episode_done,
            next_observation=tinker.ModelInput.from_ints(after.to_ints() if after is not None else []),
            next_stop_condition=self._stop,
            metrics=dict(result.metrics),
            logs=dict(result.logs),
        )
