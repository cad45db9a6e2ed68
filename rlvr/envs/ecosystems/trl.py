"""Environments written for TRL: `env.name=trl:module:Class`, the value of its `environment_factory`.

A class goes to the environment `tools`, whose contract is TRL's. Of a dictionary of factories the column `environment`
of a row chooses one, and the policy is shown its tools alone. Tried with trl 1.16, which is not needed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlvr.core.protocols import Env, TaskSource
from rlvr.core.registry import did_you_mean, load_object
from rlvr.core.types import Task
from rlvr.envs.registry import resolve_environment
from rlvr.envs.tools.environment_class import EnvironmentClass
from rlvr.envs.tools.tool_source import ToolSource
from rlvr.envs.wrapped_source import WrappedSource

COLUMN = "environment"


class ChosenByRow(WrappedSource):
    """The tasks of a source, each in the episodes that the factory which its column `environment` names makes."""

    def __init__(self, inner: TaskSource, sources: Mapping[str, ToolSource]) -> None:
        super().__init__(inner)
        self._sources = dict(sources)
        self.max_turns = max(source.max_turns for source in sources.values())
        has_reward = any(source.environment_weight for source in sources.values())
        self.environment_weight = 1.0 if has_reward else None

    def _choose(self, task: Task) -> ToolSource:
        name = task.meta.get(COLUMN)
        if name not in self._sources:
            raise ValueError(
                f"trl: task {task.id!r} has {COLUMN}={name!r}{did_you_mean(str(name), self._sources)}, expected one of "
                f"{', '.join(self._sources)}"
            )
        return self._sources[name]

    def env(self, task: Task, tokenizer: Any) -> Env:
        return self._choose(task).env(_without_column(task), tokenizer)

    def complete_prompt(self, task: Task, tokenizer: Any) -> Task:
        return self._choose(task).complete_prompt(_without_column(task), tokenizer)


def _without_column(task: Task) -> Task:
    """TRL keeps the column to itself: `reset` does not get it."""
    return replace(task, meta={name: value for name, value in task.meta.items() if name != COLUMN})


def trl_source(
    path: str,
    inner: str = "seeds",
    inner_kwargs: Mapping[str, Any] | None = None,
    max_turns: int = 4,
    seconds: float = 60.0,
    call_seconds: float = 10.0,
    most_calls: int = 8,
) -> ToolSource | ChosenByRow:
    """TRL's `environment_factory` at `package.module:name`: a class, a function that makes an instance, or a dictionary
    of them. The rows are those of the environment `inner`; the other options are those of `tools`.
    """
    found = load_object("environment", path)

    def wrap(tasks: Any, environment: EnvironmentClass) -> ToolSource:
        return ToolSource(tasks, None, None, max_turns, seconds, call_seconds, most_calls, environment=environment)

    tasks = resolve_environment(inner, **(inner_kwargs or {}))
    if not isinstance(found, Mapping):
        return wrap(tasks, EnvironmentClass(path))
    if not found:
        raise ValueError(f"trl: {path} is an empty dictionary; give at least one factory by name")
    made = {str(name): EnvironmentClass(f"{path}[{name!r}]", make=one) for name, one in found.items()}
    return ChosenByRow(tasks, {name: wrap(tasks, environment) for name, environment in made.items()})
