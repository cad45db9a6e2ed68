"""Environment `gym`: episodes of a class with `reset` and `step`, over rows or over seeds.

env: {name: "my_game:Game", kwargs: {max_turns: 8}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlvr.core.futures import run_to_end
from rlvr.core.protocols import TaskSource
from rlvr.core.types import Task
from rlvr.envs.gym.gym_env import GymEnv
from rlvr.envs.gym.gym_session import ClassGym, Gym
from rlvr.envs.limited_calls import EpisodeError
from rlvr.envs.registry import register_environment
from rlvr.envs.wrapped_source import NestedSource
from rlvr.reward.reward_options import check_integer, check_number


class GymSource(NestedSource):
    """The tasks of the environment `inner`, played in sessions of a gym; the episodes give the reward."""

    def __init__(
        self, name: str, gym: Gym, max_turns: int | None, inner: str | TaskSource, inner_kwargs: Any = None
    ) -> None:
        super().__init__(name, inner, inner_kwargs)
        self.gym, self._is_tried = gym, False
        self.max_turns = gym.max_turns if max_turns is None else max_turns
        check_integer(f"{name}: max_turns", self.max_turns, 1)
        self.vocabulary, self.reward_range, self.choices = gym.vocabulary, gym.reward_range, gym.choices

    reward = "environment"

    def env(self, task: Task, tokenizer: Any) -> GymEnv:
        super().env(task, tokenizer)
        if not self._is_tried:  # its faults are found before a model is loaded
            self._try_reset(task)
            self._is_tried = True
        return GymEnv(task, tokenizer, self.gym.open(), self.max_turns, self.gym.slots)

    def _try_reset(self, task: Task) -> None:
        session = self.gym.open()

        async def reset() -> None:
            try:
                await session.reset(task)
            finally:
                await session.close()

        try:
            run_to_end(reset())
        except EpisodeError as failure:
            raise ValueError(str(failure)) from failure

    def demonstration(self, task: Task, key: int) -> None:
        return None


@register_environment("gym")
class ClassGymSource(GymSource):
    """Episodes of a class of your own, `environment: package.module:Class`, by Gym's contract: `reset` gives what the
    policy reads first, `step` takes its turn and gives (observation, reward, done).

    The class is made with `options`, for each episode anew. The tasks are those of the environment `inner`, made with
    `inner_kwargs`: by default seeds; `reset` gets the row. An episode has at most `max_turns` turns (16, or what the
    class says), and a call may take `seconds`. The reward is what the steps give, added up.
    """

    def __init__(
        self,
        environment: str,
        options: Mapping[str, Any] | None = None,
        max_turns: int | None = None,
        seconds: float = 30.0,
        inner: str = "seeds",
        inner_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        check_number("gym: seconds", seconds, 0, above=True)
        super().__init__("gym", ClassGym(environment, options, seconds), max_turns, inner, inner_kwargs)
