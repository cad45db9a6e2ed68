"""Tools with a state: one session for each episode, made by a class of your own or by another project's environment.

A class follows TRL's contract of `environment_factory`:

    class Counter:
        def reset(self, **row) -> str | None: ...      # begins an episode; its text is added to the prompt
        def add(self, number: int) -> int: ...         # public methods are tools, as functions are
        def get_reward(self) -> float: ...             # optional: what the episode gives

    env: {name: "my_tools:Counter", kwargs: {inner: jsonl, inner_kwargs: {path: rows.jsonl}}}

Unlike TRL, which uses instances again, each episode gets a new one. `reset` gets the row and a `seed`, as far as it has
arguments for them. A `reset` or `get_reward` that fails or is late is an error of its episode.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, TypeVar

from rlvr.core import rng
from rlvr.core.episode_slots import EpisodeSlots
from rlvr.core.registry import load_path
from rlvr.core.types import Task
from rlvr.envs.limited_calls import (
    MOST_STUCK,
    CallError,
    EpisodeError,
    count_stuck,
    run_in_thread,
    wait_for_result,
)
from rlvr.envs.tools.tool import Tool

RESET, REWARD = "reset", "get_reward"
T = TypeVar("T")


class ToolSession(ABC):
    """The environment of one episode. Its methods raise EpisodeError where the episode cannot go on.

    `slots` bound how many are open at the same time; None: any number.
    """

    slots: EpisodeSlots | None = None

    @abstractmethod
    async def reset(self, task: Task) -> str:
        """Begin the episode of a task; the text is added to its prompt."""
        ...

    @abstractmethod
    def list_tools(self) -> Sequence[Tool]:
        """The tools of the session: those of its environment, by name and arguments."""
        ...

    def note_turn(self, text: str) -> None:
        """What the policy said beside calls, in each turn, before the calls are made."""
        return

    async def get_reward(self) -> float:
        """The reward of the episode, once it is over."""
        return 0.0

    async def close(self) -> None:
        """Called once, also after a failure."""
        return


class ToolEnvironment(ABC):
    """Makes sessions. `tools` are what the policy is shown; `has_reward`: episodes give a reward of their own."""

    tools: Sequence[Tool]
    has_reward: bool

    @abstractmethod
    def open(self) -> ToolSession:
        """A new session, for one episode."""
        ...


class EnvironmentClass(ToolEnvironment):
    """The class, or the function that makes an instance, at `package.module:name`. A call may take `seconds`."""

    def __init__(self, path: str, seconds: float = 30.0, make: Callable[[], Any] | None = None) -> None:
        self._make, self.path, self.seconds = make or load_path("environment", path), path, seconds
        first = self.make_instance()
        methods = [name for name, _ in inspect.getmembers(type(first), inspect.isfunction) if name[0] != "_"]
        if RESET not in methods:
            raise ValueError(f"environment {path}: {type(first).__name__} has no method `reset`; write one")
        self.has_reward = REWARD in methods
        self.tools = [Tool.of(getattr(first, name)) for name in methods if name not in (RESET, REWARD)]

    def open(self) -> ToolSession:
        return _InstanceSession(self)

    def make_instance(self) -> Any:
        try:
            return self._make()
        except (Exception, SystemExit) as error:
            raise ValueError(f"environment {self.path} cannot be made: {type(error).__name__}: {error}") from error


class _InstanceSession(ToolSession):
    def __init__(self, environment: EnvironmentClass) -> None:
        self._environment = environment
        self._instance: Any = None
        self._task_id = ""

    async def reset(self, task: Task) -> str:
        path, self._task_id = self._environment.path, task.id

        def begin() -> Any:
            self._instance = self._environment.make_instance()
            return wait_for_result(self._instance.reset(**choose_arguments(self._instance.reset, task)))

        said = await call_user_code(f"environment {path}: reset of task {task.id!r}", self._environment.seconds, begin)
        if said is not None and not isinstance(said, str):
            raise EpisodeError(f"environment {path}: reset gave a {type(said).__name__}, expected text or None")
        return said or ""

    def list_tools(self) -> Sequence[Tool]:
        return [replace(tool, function=getattr(self._instance, tool.name)) for tool in self._environment.tools]

    async def get_reward(self) -> float:
        if not self._environment.has_reward:
            return 0.0
        what = f"{type(self._instance).__name__}.{REWARD} of task {self._task_id!r}"
        seconds = self._environment.seconds
        value = await call_user_code(what, seconds, lambda: float(wait_for_result(self._instance.get_reward())))
        if not math.isfinite(value):
            raise EpisodeError(f"{what} gave {value}, expected a finite number")
        return value


def choose_arguments(function: Callable[..., Any], task: Task) -> dict[str, Any]:
    """What of a task's row a function takes: the fields of its `meta`, its `prompt`, and a `seed` that is the same for
    all episodes of a task. All of them if it takes any, else those that it names. They are the episode's own."""
    seed = task.meta.get("seed", rng.key("environment", task.id) & 0x7FFF_FFFF)
    row = {**task.meta, "prompt": task.prompt, "seed": seed}
    parameters = inspect.signature(function).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        if "seed" not in task.meta and "seed" not in parameters:
            del row["seed"]  # TRL's `reset(**row)` gets the columns of the row alone
        return deepcopy(row)
    return deepcopy({name: row[name] for name in parameters if name in row})


async def call_user_code(what: str, seconds: float, function: Callable[[], T]) -> T:
    """The result of a call; EpisodeError, which says `what` it was, if it raises or is late."""
    if count_stuck() >= MOST_STUCK:
        raise EpisodeError(
            f"{what}: not called, since {count_stuck()} calls are still running after their time limit; give the "
            "code that they run a time limit of its own"
        )
    try:
        return await run_in_thread(function, seconds, EpisodeError)
    except CallError as error:
        raise EpisodeError(f"{what} failed: {error}") from error
    except TimeoutError:
        raise EpisodeError(f"{what} took longer than {seconds:g} s") from None
