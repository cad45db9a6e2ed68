"""The seconds of an engine that each owner used, by which owners take turns.

A turn costs what it takes: ten short requests of one owner are worth a long one of another. Who comes after a pause
begins `credit` seconds behind those who are there, at most: a pause earns no more. Only the engine thread calls this.
Exercised by tests/test_tinker_fairness.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

CREDIT_SECONDS = 1.0


class OwnerClock:
    def __init__(
        self, stretch: float, credit: float = CREDIT_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`stretch`: the seconds that an owner's own training may lead its own sampling, and the other way around."""
        self._stretch, self._credit, self._clock = stretch, credit, clock
        self._used: dict[str, float] = {}
        self._lead: dict[str, float] = {}  # owner -> seconds of training less those of sampling
        self._present: set[str] = set()
        self._mark = clock()

    def see(self, owners: Collection[str]) -> None:
        """Note who has work now. An owner who had none before gets no more than `credit` for that."""
        there = [self._used[owner] for owner in self._present if owner in owners]
        for owner in owners:
            if owner not in self._present:
                least = min(there) - self._credit if there else self._used.get(owner, 0.0)
                self._used[owner] = max(self._used.get(owner, least), least)
        self._present = set(owners)
        if not self._present:
            self._used.clear()  # the next ones begin anew
            self._lead.clear()

    def used(self, owner: str) -> float:
        return self._used.get(owner, 0.0)

    def start(self) -> None:
        """The time from now on is somebody else's."""
        self._mark = self._clock()

    def charge_training(self, owner: str) -> float:
        """Charge the time since the last call of this kind; returns it."""
        took = self._take()
        self._used[owner] = self.used(owner) + took
        self._lead[owner] = min(self._stretch, self._lead.get(owner, 0.0) + took)
        return took

    def charge_sampling(self, rows: dict[str, int]) -> float:
        """Charge the time since the last call to the owners of the rows that were computed, by their numbers."""
        took, total = self._take(), sum(rows.values())
        for owner, count in rows.items():
            share = took * count / total
            self._used[owner] = self.used(owner) + share
            self._lead[owner] = max(-self._stretch, self._lead.get(owner, 0.0) - share)
        return took

    def _take(self) -> float:
        before, self._mark = self._mark, self._clock()
        return self._mark - before

    def first(self, owners: Collection[str]) -> str | None:
        """Whose turn it is."""
        return min(owners, key=self.used, default=None)

    def is_sampling_next(self, training: str | None, sampling: str | None) -> bool:
        """Whether the owner that would sample comes before the one that would train."""
        if training is None or sampling is None or training == sampling:
            return sampling is not None and (training is None or self._lead.get(sampling, 0.0) > 0)
        return self.used(sampling) < self.used(training)
