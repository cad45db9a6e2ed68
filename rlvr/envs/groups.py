"""Environments in groups, by the contract of the Tinker cookbook: a builder makes the episodes that are compared.

    class Duel(EnvGroupBuilder):
        async def make_envs(self): return [Env(...), Env(...)]
        async def compute_group_rewards(self, trajectory_group, env_group): return [(1.0, {}), (-1.0, {})]

`GroupSource(dataset)` makes a task source of an `RLDataset`, so that our loops train on it: one of ours or one of the
cookbook's own, whose classes are taken as they are. From a config that is `env.name=groups` with the path of a dataset
builder. The other way, ours in the cookbook's loops, is `rlvr.compat.cookbook_envs`. Left out on purpose: the
cookbook's strategies for rollouts that raise (here that ends the run, and says why).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

from rlvr.core.messages import ModelInput
from rlvr.core.protocols import Env, InitialObservationOverflow, StepResult, TaskSource
from rlvr.core.registry import check_kwargs, load_path
from rlvr.core.types import Task, Trajectory
from rlvr.envs.registry import register_environment
from rlvr.reward.reward_options import check_mapping

T = TypeVar("T")


class EnvGroupBuilder(ABC):
    """Makes the episodes of one group, which are compared with each other. It must pickle."""

    @abstractmethod
    async def make_envs(self) -> Sequence[Env]: ...

    async def compute_group_rewards(
        self, trajectory_group: list[Any], env_group: Sequence[Any]
    ) -> list[tuple[float, dict[str, float]]]:
        """(reward, metrics) of each `Episode`, after all ended; the reward is added to those of its steps."""
        return [(0.0, {}) for _ in trajectory_group]

    async def cleanup(self) -> None:
        """Always called at the end; may be called twice."""
        return

    def logging_tags(self) -> list[str]:
        return []


class RLDataset(ABC):
    """Batches of group builders; `len` counts the batches."""

    @abstractmethod
    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]: ...

    @abstractmethod
    def __len__(self) -> int: ...


class RLDatasetBuilder(ABC):
    """A callable whose awaited result is the training dataset, and the evaluation dataset or None."""

    @abstractmethod
    async def __call__(self) -> tuple[RLDataset, RLDataset | None]: ...


@dataclass
class Action:
    """A turn of the policy: its tokens and their log-probs. `maybe_logprobs` is None where the sampler gave none."""

    tokens: list[int]
    maybe_logprobs: list[float] | None = None
    stop_reason: str = "stop"


@dataclass
class Transition:
    """One turn: the observation, the action and the reward."""

    ob: ModelInput
    ac: Action
    reward: float
    episode_done: bool
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    logs: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass
class Episode:
    """What `compute_group_rewards` sees of an episode: the cookbook's word for it is a trajectory."""

    transitions: list[Transition]
    final_ob: ModelInput


class RecordedEnv:
    """Wraps an environment written for the Tinker cookbook as an `Env`, and records its `Episode`."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.episode = Episode([], ModelInput.empty())

    async def initial_observation(self) -> tuple[ModelInput, Any] | InitialObservationOverflow:
        given = await self.env.initial_observation()
        if not isinstance(given, tuple):  # an InitialObservationOverflow, ours or the cookbook's
            metrics = {name: float(value) for name, value in given.metrics.items()}
            over = InitialObservationOverflow(float(given.reward), metrics, dict(given.logs))
            turn = Transition(ModelInput.empty(), Action([]), over.reward, True, metrics, over.logs)
            self.episode.transitions.append(turn)
            return over
        observation, stop = given
        self.episode.final_ob = ModelInput(observation.to_ints())
        return self.episode.final_ob, stop

    async def step(self, action: list[int], *, extra: dict[str, Any] | None = None) -> StepResult:
        result = await self.env.step(action, extra=extra)
        after = result.next_observation
        seen, after = self.episode.final_ob, ModelInput(after.to_ints() if after is not None else [])
        metrics = {name: float(value) for name, value in result.metrics.items()}
        said = Action(list(action), stop_reason=(extra or {}).get("stop_reason", "stop"))
        self.episode.transitions.append(
            Transition(seen, said, result.reward, result.episode_done, metrics, dict(result.logs))
        )
        self.episode.final_ob = after
        next_observation = None if result.episode_done else after
        return StepResult(
            float(result.reward),
            result.episode_done,
            next_observation,
            result.next_stop_condition,
            metrics,
            dict(result.logs),
        )


class RecordedGroup:
    """A group: `size` episodes of one builder, for `rlvr.rollout`. A builder of smaller groups is called as often as
    needed."""

    def __init__(self, builder: Any, size: int) -> None:
        self._builder = builder
        self._size = size
        self._per_call = size

    async def make_envs(self) -> list[Env]:
        made: list[Env] = []
        while len(made) < self._size:
            envs = [RecordedEnv(env) for env in await self._builder.make_envs()]
            if not envs or self._size % len(envs):
                raise ValueError(
                    f"{type(self._builder).__name__} makes groups of {len(envs)}, and {self._size} episodes a group "
                    "were asked for (training.group_size, evaluation.samples); make these a multiple of it"
                )
            self._per_call = len(envs)
            made += envs
        return made

    async def compute_group_rewards(
        self, trajectories: list[Trajectory], envs: Sequence[Any]
    ) -> list[tuple[float, dict[str, float]]]:
        rewards: list[tuple[float, dict[str, float]]] = []
        for first in range(0, len(envs), self._per_call):
            own = envs[first : first + self._per_call]
            for env, trajectory in zip(own, trajectories[first:], strict=False):
                add_logprobs(env.episode, trajectory)
            given = await self._builder.compute_group_rewards([e.episode for e in own], [e.env for e in own])
            rewards += [(float(reward), dict(metrics)) for reward, metrics in given]
        return rewards

    async def cleanup(self) -> None:
        await self._builder.cleanup()


def add_logprobs(episode: Episode, trajectory: Trajectory) -> None:
    """Give the turns that the trajectory holds their log-probs: the last ones, where history was rewritten."""
    if not trajectory.logprobs:
        return
    turns = episode.transitions[-len(trajectory.turn_starts) :] if trajectory.turn_starts else []
    for start, turn in zip(trajectory.turn_starts, turns, strict=True):
        turn.ac.maybe_logprobs = trajectory.logprobs[start : start + len(turn.ac.tokens)]


class GroupSource(TaskSource):
    """A dataset of group builders as a task source (`rlvr.core.protocols.TaskSource`); its order is the dataset's own.

    Training goes through the batches again and again; every group of `heldout` is one task of the evaluation. Without
    such a dataset the last batch of training is held out, where there are two. `get_batch` must give the same for the
    same index. The rewards are those of the environments: their verifier is `environment`.
    """

    levels: tuple[str, ...] = ("",)
    reward = "environment"

    def __init__(self, train: Any, heldout: Any = None, name: str = "groups") -> None:
        if not len(train):
            raise ValueError(f"{name}: the dataset has no batch to train on")
        self.name = name
        self._datasets = {"train": train, "test": heldout}
        self._batch = lru_cache(maxsize=4)(self._get_batch)
        self._size = len(self._batch("train", 0))
        if not self._size:
            raise ValueError(f"{name}: the first batch is empty")
        self._kept_back = len(train) - 1 if heldout is None and len(train) > 1 else None
        last = len(train) - (1 if self._kept_back is None else 2)
        self._groups = self._size * last + len(self._batch("train", last))

    def train(self, seed: int, index: int, level: str) -> Task:
        epoch, position = divmod(index, self._groups)
        return self._task("train", *divmod(position, self._size), epoch)

    def heldout(self, count: int | None) -> list[Task]:
        dataset, tasks = self._datasets["test"], list[Task]()
        places = [("test", batch) for batch in range(len(dataset) if dataset is not None else 0)]
        places += [] if self._kept_back is None else [("train", self._kept_back)]
        for split, batch in places:
            if count is not None and len(tasks) >= count:
                break
            tasks += [self._task(split, batch, i) for i in range(len(self._batch(split, batch)))]
        return tasks[:count]

    def env(self, task: Task, tokenizer: Any) -> Env:
        raise ValueError(f"{self.name}: its episodes come in groups; ask for group_builder(task, tokenizer, size)")

    def group_builder(self, task: Task, tokenizer: Any, size: int) -> RecordedGroup:
        split, batch, position = task.meta["group"]
        return RecordedGroup(self._batch(split, batch)[position], size)

    def demonstration(self, task: Task, key: int) -> str | None:
        return None

    def describe_task(self, task: Task) -> dict[str, str]:
        return {"tags": ", ".join(task.meta["tags"])} if task.meta["tags"] else {}

    def _task(self, split: str, batch: int, position: int, epoch: int = 0) -> Task:
        tags = getattr(self._batch(split, batch)[position], "logging_tags", list)()
        again = f", epoch {epoch}" if epoch else ""
        prompt = f"{self.name} {split}: batch {batch}, group {position}{again}"
        return Task(f"{split}-{epoch}-{batch}-{position}", prompt, {"group": (split, batch, position), "tags": tags})

    def _get_batch(self, split: str, index: int) -> Sequence[Any]:
        return self._datasets[split].get_batch(index)


@register_environment("groups")
def groups(dataset: str, options: Mapping[str, Any] | None = None) -> GroupSource:
    """The task source of a dataset builder, ours or the cookbook's: its path `package.module:Builder`, its options."""
    builder = load_path("environment", dataset)
    check_mapping("environment 'groups': options", options or None, "the builder's own options")
    check_kwargs(f"the dataset builder {dataset} (env.kwargs.options)", builder, options or {})
    train, heldout = _run_in_own_loop(builder(**(options or {}))())
    return GroupSource(train, heldout, name=dataset.rpartition(":")[2])


def _run_in_own_loop(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, also where an event loop is running already."""
    with ThreadPoolExecutor(1) as beside:
        return beside.submit(asyncio.run, work).result()
