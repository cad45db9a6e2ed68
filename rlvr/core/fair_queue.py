"""A fair queue: owners take turns, and so do the groups (sessions, batches) of one owner.

    queue = FairQueue[Job]()
    queue.add("key-1", "batch-7", job)
    job = queue.pop()                       # the next in turn

Thousands of items of one owner wait here, and another owner's single item does not wait behind them. The Tinker server
orders sampling requests by it, the sandbox programs to verify, and `rlvr.core.fair_slots` shares slots and threads by
it. `current_owner` carries the owner of the work at hand to the queues below.
"""

from __future__ import annotations

import contextvars
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_owner: contextvars.ContextVar[str] = contextvars.ContextVar("owner", default="")


def current_owner() -> str:
    """For whom the current work is done; '' if it was not started by `run_as_owner`."""
    return _owner.get()


def become_owner(owner: str) -> None:
    """Do the rest of the current task for `owner`, with the tasks that it starts."""
    _owner.set(owner)


@contextmanager
def in_turn_of(owner: str) -> Iterator[None]:
    """Do the block for `owner`, and the rest of the task for the owner that it had before."""
    token = _owner.set(owner)
    try:
        yield
    finally:
        _owner.reset(token)


def run_as_owner(owner: str, work: Callable[..., T], *args: Any) -> T:
    """Return `work(*args)`, done for `owner`."""
    context = contextvars.copy_context()
    context.run(_owner.set, owner)
    return context.run(work, *args)


class FairQueue(Generic[T]):
    """Not thread-safe: the caller holds its own lock around every call."""

    def __init__(self) -> None:
        # owner -> group -> items; the next turn first
        self._owners: dict[str, dict[Hashable, deque[T]]] = {}

    def __bool__(self) -> bool:
        return bool(self._owners)

    def __len__(self) -> int:
        return sum(self.count(owner) for owner in self._owners)

    @property
    def owners(self) -> list[str]:
        """The owners with items, the next turn first."""
        return list(self._owners)

    def count(self, owner: str) -> int:
        """The number of items of one owner."""
        return sum(map(len, self._owners.get(owner, {}).values()))

    def add(self, owner: str, group: Hashable, item: T) -> None:
        self._owners.setdefault(owner, {}).setdefault(group, deque()).append(item)

    def pop(self, fits: Callable[[T], bool] = lambda item: True) -> T | None:
        """Take the next item in turn that `fits`; owners and groups whose next one does not fit are skipped."""
        for owner, groups in self._owners.items():
            for group, items in groups.items():
                if not fits(items[0]):
                    continue
                taken = items.popleft()
                del groups[group], self._owners[owner]  # moved to the end below, or removed
                if items:
                    groups[group] = items
                if groups:
                    self._owners[owner] = groups
                return taken
        return None

    def remove(self, unwanted: Callable[[T], bool]) -> list[T]:
        """Remove the items that are `unwanted`; returns them."""
        removed: list[T] = []
        before, self._owners = self._owners, {}
        for owner, groups in before.items():
            for group, items in groups.items():
                for item in items:
                    if unwanted(item):
                        removed.append(item)
                    else:
                        self.add(owner, group, item)
        return removed
