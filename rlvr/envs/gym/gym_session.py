"""Gym's contract: an episode is a session with `reset` and `step`, which take and give text.

    class Game:                                             # a class of your own
        def reset(self, seed) -> str: ...                   # what the policy reads first
        def step(self, action: str) -> tuple[str, float, bool]: ...    # what it reads next, the reward, is it over?

`step` may also give Gymnasium's five values (observation, reward, terminated, truncated, info), Gym's four, or an
object with `observation`, `reward` and `done`. `reset` may give (observation, info); it gets the row of the task and a
`seed`, as far as it has arguments for them. Both may be coroutine functions. Numbers in `info` become metrics, and an
episode whose `correct` is at least 0.5 has passed.
"""

from __future__ import annotations

import json
import math
import string
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlvr.core.episode_slots import EpisodeSlots
from rlvr.core.registry import check_kwargs, load_path
from rlvr.core.types import Task
from rlvr.envs.limited_calls import EpisodeError, wait_for_result
from rlvr.envs.tools.environment_class import call_user_code, choose_arguments

MOST_CHARACTERS = 100_000  # of an observation
MOST_METRICS = 32  # of an episode's info
OUT_OF_RANGE = "out of its reward_range"  # in the error of a reward


@dataclass(frozen=True)
class Observation:
    """What an environment says: text for the policy, and with a step its reward, and whether the episode is over."""

    text: str
    reward: float = 0.0
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])

    @classmethod
    def of_reset(cls, given: Any, what: str) -> Observation:
        """The observation that `reset` returned: an observation, or (observation, info)."""
        text, info = given if _is_pair(given) else (given, {})
        return cls(_write(text, what), metrics=_read_metrics(info))

    @classmethod
    def of_step(cls, given: Any, what: str) -> Observation:
        """The observation, reward and end that `step` returned; EpisodeError for any other form."""
        fields = given if isinstance(given, Mapping) else getattr(given, "__dict__", {})
        if "observation" in fields and "done" in fields:
            given = (fields["observation"], fields.get("reward"), fields["done"], fields.get("info"))
        values: list[Any] = list(given) if isinstance(given, (tuple, list)) else []
        if not 3 <= len(values) <= 5:
            raise EpisodeError(
                f"{what} gave {_name(given)}, expected (observation, reward, done), Gymnasium's five values, or an "
                "object with observation, reward and done"
            )
        info = values[-1] if len(values) > 3 else {}
        done = bool(values[2]) or (len(values) == 5 and bool(values[3]))
        return cls(_write(values[0], what), _read_reward(values[1], what), done, _read_metrics(info))


class GymSession(ABC):
    """One episode. Its methods raise EpisodeError where the episode cannot go on."""

    @abstractmethod
    async def reset(self, task: Task) -> Observation:
        """Begin the episode of a task."""
        ...

    @abstractmethod
    async def step(self, action: str) -> Observation:
        """Take a turn of the policy, without its end token."""
        ...

    async def close(self) -> None:
        """Called once, also after a failure."""
        return


PRINTABLE = tuple(string.printable[:-2])  # the vocabulary of texts that any program writes, for tokenizer=characters


class Gym(ABC):
    """Makes sessions, of which `slots` bound how many are open at the same time; None: any number.

    `vocabulary` are the words of its texts, to build a small tokenizer from, and `reward_range` the least and the most
    that a step gives; None: not known. `choices` are all turns that are actions, where there are few; (): not known.
    """

    max_turns: int = 16
    vocabulary: Sequence[str] | None = None
    slots: EpisodeSlots | None = None
    reward_range: tuple[float, float] | None = None
    choices: Sequence[str] = ()

    @abstractmethod
    def open(self) -> GymSession:
        """A new session, for one episode."""
        ...


class ClassGym(Gym):
    """The class at `package.module:name`, made with `options`. A call may take `seconds`.

    Its `max_turns`, `vocabulary` and `reward_range` hold if it has them: a step that gives a reward out of the range
    is an error of its episode.
    """

    def __init__(self, path: str, options: Mapping[str, Any] | None = None, seconds: float = 30.0) -> None:
        self.make, self.path, self.seconds = load_path("environment", path), path, seconds
        self.options = dict(options or {})
        check_kwargs(f"environment {path}: options", self.make, self.options)
        for name in ("max_turns", "vocabulary"):
            if getattr(self.make, name, None) is not None:
                setattr(self, name, getattr(self.make, name))
        if (given := getattr(self.make, "reward_range", None)) is not None:
            self.reward_range = check_range(f"environment {path}: reward_range", given)

    def open(self) -> GymSession:
        return _InstanceSession(self)

    def make_instance(self) -> Any:
        return self.make(**self.options)


class _InstanceSession(GymSession):
    def __init__(self, gym: ClassGym) -> None:
        self._gym, self._task_id = gym, ""
        self._instance: Any = None

    def _describe(self, method: str) -> str:
        return f"environment {self._gym.path}: {method} of task {self._task_id!r}"

    async def reset(self, task: Task) -> Observation:
        self._task_id = task.id

        def begin() -> Any:
            self._instance = self._gym.make_instance()
            return wait_for_result(self._instance.reset(**choose_arguments(self._instance.reset, task)))

        what = self._describe("reset")
        return Observation.of_reset(await call_user_code(what, self._gym.seconds, begin), what)

    async def step(self, action: str) -> Observation:
        what = self._describe("step")
        given = await call_user_code(what, self._gym.seconds, lambda: wait_for_result(self._instance.step(action)))
        said = Observation.of_step(given, what)
        low, high = self._gym.reward_range or (-math.inf, math.inf)
        if not low <= said.reward <= high:
            raise EpisodeError(f"{what} gave the reward {said.reward:g}, {OUT_OF_RANGE} [{low:g}, {high:g}]")
        return said

    async def close(self) -> None:
        if close := getattr(self._instance, "close", None):
            await call_user_code(self._describe("close"), self._gym.seconds, lambda: wait_for_result(close()))


def check_range(name: str, given: Any) -> tuple[float, float]:
    """The two numbers of a range, the lower one first; ValueError for anything else."""
    values = list(given) if isinstance(given, (tuple, list)) else []
    if len(values) != 2 or any(isinstance(one, bool) or not isinstance(one, (int, float)) for one in values):
        raise ValueError(f"{name}={given!r:.80}, expected two numbers, such as (0, 1)")
    if not values[0] < values[1]:
        raise ValueError(f"{name}={given!r:.80}, expected the lower number first")
    return float(values[0]), float(values[1])


def _is_pair(given: Any) -> bool:
    return isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping)


def _write(observation: Any, what: str) -> str:
    """An observation as text: what is no text as JSON; EpisodeError for one that is too long."""
    if observation is None:
        return ""
    text = observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False, default=str)
    if len(text) > MOST_CHARACTERS:
        raise EpisodeError(f"{what} gave an observation of {len(text):,} characters, at most {MOST_CHARACTERS:,}")
    return text


def _read_reward(given: Any, what: str) -> float:
    if given is None:
        return 0.0
    try:
        reward = float(given)
    except (TypeError, ValueError):
        raise EpisodeError(f"{what} gave the reward {_name(given)}, expected a number") from None
    if not math.isfinite(reward):
        raise EpisodeError(f"{what} gave the reward {reward}, expected a finite number")
    return reward


def _read_metrics(info: Any) -> dict[str, float]:
    """The finite numbers of an info, by name."""
    if not isinstance(info, Mapping):
        return {}
    numbers = {
        str(name): float(value)
        for name, value in info.items()
        if isinstance(value, (bool, int, float)) and math.isfinite(value)
    }
    return dict(list(numbers.items())[:MOST_METRICS])


def _name(given: Any) -> str:
    return f"a {type(given).__name__} of {len(given)}" if isinstance(given, (tuple, list)) else f"{given!r:.80}"
