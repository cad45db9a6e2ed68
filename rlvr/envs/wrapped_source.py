"""Task sources around another one.

`DelegatingSource` changes some of its members; `WrappedSource` gives its tasks episodes of its own, and is the base of
`refine` and `tools`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rlvr.core.protocols import Env, TaskSource
from rlvr.core.types import Task
from rlvr.envs.prompt import PromptEnv
from rlvr.envs.registry import resolve_environment


class DelegatingSource:
    """A source with the members of `source`, but for those that a subclass defines."""

    def __init__(self, source: TaskSource) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


class WrappedSource(TaskSource):
    """The environment `inner`, made with `inner_kwargs`, whose tasks are asked in one turn. `name` is for messages."""

    def __init__(self, name: str, inner: str, inner_kwargs: Mapping[str, Any] | None) -> None:
        if not isinstance(inner, str):
            raise ValueError(f"{name}: inner={inner!r:.80}, expected the name of an environment")
        if inner_kwargs is not None and not isinstance(inner_kwargs, Mapping):
            raise ValueError(f"{name}: inner_kwargs={inner_kwargs!r:.80}, expected a mapping of {inner}'s options")
        self.inner, self._name, self._inner_name = resolve_environment(inner, **(inner_kwargs or {})), name, inner
        if self.inner.group_builder:
            raise ValueError(self._refusal)
        self.levels, self.reward, self.size = self.inner.levels, self.inner.reward, self.inner.size
        self.leave_out = self._leave_out if self.inner.leave_out else None
        self.end_word, self.pad_word = self.inner.end_word, self.inner.pad_word

    @property
    def _refusal(self) -> str:
        return (
            f"{self._name}: the environment {self._inner_name!r} has episodes of its own, which cannot be wrapped "
            "(mbpp and code refine by their own max_turns)"
        )

    def env(self, task: Task, tokenizer: Any) -> Env:
        """The episode around a task; here only the check that its own has one turn."""
        inner = self.inner.env(task, tokenizer)
        if not isinstance(inner, PromptEnv):
            raise ValueError(self._refusal)
        return inner

    def train(self, seed: int, index: int, level: str) -> Task:
        return self.inner.train(seed, index, level)

    def heldout(self, count: int | None) -> list[Task]:
        return self.inner.heldout(count)

    def _leave_out(self, ids: Collection[str]) -> None:
        assert self.inner.leave_out is not None
        self.inner.leave_out(ids)
        self.levels = self.inner.levels

    def extra_heldout(self, count: int) -> dict[str, list[Task]]:
        return self.inner.extra_heldout(count)

    def chat_messages(self, task: Task) -> list[dict[str, str]]:
        return self.inner.chat_messages(task)

    def example_prompt(self, task: Task) -> str | list[dict[str, str]]:
        return self.inner.example_prompt(task)

    def demonstration(self, task: Task, key: int) -> str | list[str] | None:
        return self.inner.demonstration(task, key)

    def complete_prompt(self, task: Task, tokenizer: Any) -> Task:
        return self.inner.complete_prompt(task, tokenizer)

    def parse_task(self, text: str) -> Task | None:
        return self.inner.parse_task(text)

    def describe_task(self, task: Task) -> Mapping[str, str]:
        return self.inner.describe_task(task)

    def describe_data(self) -> str:
        return self.inner.describe_data()

    def advice(self) -> list[str]:
        return self.inner.advice()
