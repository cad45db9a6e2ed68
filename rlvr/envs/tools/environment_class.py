"""A class of your own as tools with a state: one instance for each episode, by TRL's contract of `environment_factory`.

    class Counter:
        def reset(self, **row) -> str | None: ...      # begins an episode; its text is added to the prompt
        def add(self, number: int) -> int: ...         # public methods are tools, as functions are
        def get_reward(self) -> float: ...             # optional: what the episode gives

    env: {name: tools, kwargs: {inner: jsonl, inner_kwargs: {path: rows.jsonl}, environment: "my_tools:Counter"}}

Unlike TRL, which uses instances again, each episode gets a new one. `reset` and `get_reward` have no time limit, and
their failure ends the run.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from rlvr.chat.special_tokens import strip_special
from rlvr.core.registry import load_path
from rlvr.core.types import Task
from rlvr.envs.tools.tool import Tool

RESET, REWARD = "reset", "get_reward"


@dataclass(frozen=True)
class OpenEnvironment:
    """The instance of one episode: its tools, and the task with what `reset` said."""

    instance: Any
    tools: Sequence[Tool]
    task: Task

    async def get_reward(self) -> float:
        """What the episode gives; 0 for a class that gives nothing."""
        if not hasattr(self.instance, REWARD):
            return 0.0
        name = f"{type(self.instance).__name__}.{REWARD}"
        try:
            value = self.instance.get_reward()
            value = float(await value if inspect.isawaitable(value) else value)
        except (Exception, SystemExit) as error:
            raise ValueError(f"{name} of task {self.task.id!r} failed: {type(error).__name__}: {error}") from error
        if not math.isfinite(value):
            raise ValueError(f"{name} of task {self.task.id!r} gave {value}, expected a finite number")
        return value


class EnvironmentClass:
    """The class, or the function that makes an instance, at `package.module:name`."""

    def __init__(self, path: str) -> None:
        self._make, self._path = load_path("environment", path), path
        first = self._open_instance()
        methods = [name for name, _ in inspect.getmembers(type(first), inspect.isfunction) if name[0] != "_"]
        if RESET not in methods:
            raise ValueError(f"environment {path}: {type(first).__name__} has no method `reset`; write one")
        self.has_reward = REWARD in methods
        self.tools = [Tool.of(getattr(first, name)) for name in methods if name not in (RESET, REWARD)]

    def open(self, task: Task, special: Sequence[str]) -> OpenEnvironment:
        """A new instance, after `reset` with the row of the task: its prompt and its `meta`. What it says has none of
        the `special` tokens' texts."""
        instance = self._open_instance()
        row = deepcopy({**task.meta, "prompt": task.prompt})  # its lists are the episode's own
        try:
            said = instance.reset(**row)
        except (Exception, SystemExit) as error:
            raise ValueError(
                f"environment {self._path}: reset({', '.join(row)}) of task {task.id!r} failed: "
                f"{type(error).__name__}: {error}"
            ) from error
        if said is not None and not isinstance(said, str):
            raise ValueError(f"environment {self._path}: reset gave a {type(said).__name__}, expected text or None")
        # A lone surrogate has no token.
        said = strip_special((said or "").encode("utf-8", "replace").decode(), special)
        tools = [replace(tool, function=getattr(instance, tool.name)) for tool in self.tools]
        return OpenEnvironment(instance, tools, _append(task, said) if said else task)

    def _open_instance(self) -> Any:
        try:
            return self._make()
        except (Exception, SystemExit) as error:
            raise ValueError(f"environment {self._path} cannot be made: {type(error).__name__}: {error}") from error


def _append(task: Task, text: str) -> Task:
    """The task with a text behind its prompt; in a chat, behind the last message."""
    prompt = task.model_prompt
    if isinstance(prompt, str):
        return replace(task, shown_prompt=prompt + text)
    return replace(task, shown_prompt=[*prompt[:-1], {**prompt[-1], "content": f"{prompt[-1]['content']}{text}"}])
