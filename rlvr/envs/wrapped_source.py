"""Task sources around another one: `WrappedSource` changes some members, `NestedSource` has episodes of its own.

Prompts as the model reads them (`prompted_source`) and prompts that fit (`long_prompts`) are of the first kind;
`refine` and `tools` are of the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlvr.core.protocols import Env, TaskSource
from rlvr.core.types import Task
from rlvr.envs.prompt import PromptEnv
from rlvr.envs.registry import resolve_environment
from rlvr.reward.reward_options import check_mapping


class WrappedSource:
    """A task source of which some members are changed; all others are those of the source `inner`."""

    def __init__(self, inner: TaskSource) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet, as in a copy that is being made
            raise AttributeError(name)
        return getattr(self.inner, name)


class NestedSource(WrappedSource):
    """The tasks of the environment `inner`, made with `inner_kwargs`, which are asked in one turn, in episodes of its
    own. `name` is for messages."""

    # Of the inner environment's these do not hold for other episodes.
    environment_weight: float | None = None
    vocabulary: Any = None
    max_turns: int = 1
    prompt_limit: int | None = None
    group_builder: Any = None

    def __init__(self, name: str, inner: str | TaskSource, inner_kwargs: Mapping[str, Any] | None) -> None:
        if not isinstance(inner, str) and not hasattr(inner, "heldout"):
            raise ValueError(f"{name}: inner={inner!r:.80}, expected the name of an environment")
        check_mapping(f"{name}: inner_kwargs", inner_kwargs, f"{inner}'s options")
        source = resolve_environment(inner, **(inner_kwargs or {})) if isinstance(inner, str) else inner
        super().__init__(source)
        self._name, self._inner_name = name, inner
        if self.inner.group_builder:
            raise ValueError(self._refusal)

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
