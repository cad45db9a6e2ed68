"""A source around another one has all members that it does not change, also those that change later."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

from rlvr.core.types import Task
from rlvr.envs import resolve_environment
from rlvr.envs.registry import register_environment
from rlvr.envs.toy import Toy
from rlvr.envs.wrapped_source import WrappedSource


class _Louder(WrappedSource):
    def heldout(self, count: int | None) -> list[Task]:
        return [Task(task.id, f"{task.prompt}!") for task in self.inner.heldout(count)]


class _Weighted(Toy):
    """A source with members that hold for its own episodes alone."""

    environment_weight = 0.5
    max_turns = 3
    prompt_limit = 7

    def __init__(self) -> None:
        super().__init__()
        self.left_out: list[str] = []
        self.leave_out = self._leave_out

    def _leave_out(self, ids: Collection[str]) -> None:
        self.left_out += ids
        self.levels = ("others",)


def test_a_wrapped_source_changes_its_own_members_alone() -> None:
    inner = Toy()
    source: Any = _Louder(inner)
    assert source.heldout(1)[0].prompt == f"{inner.heldout(1)[0].prompt}!"
    assert source.train(0, 0, "") == inner.train(0, 0, "") and source.vocabulary is inner.vocabulary
    assert copy.copy(source).reward == inner.reward


def test_episodes_of_their_own_take_over_tasks_and_not_what_holds_for_other_episodes() -> None:
    register_environment("weighted_toy")(_Weighted)
    source: Any = resolve_environment("refine", inner="weighted_toy", verifiers=["exact_match"])
    assert source.environment_weight is source.prompt_limit is source.group_builder is None
    assert source.max_turns == 2
    assert source.reward == "keyword_contains" and source.heldout(1) == source.inner.heldout(1)
    source.leave_out(["a"])
    assert source.inner.left_out == ["a"] and source.levels == ("others",)
