"""The seconds of an engine that each owner used, by which owners take turns.

A turn costs what it takes: ten short requests of one owner are worth a long one of another. An owner who comes after a
pause begins `credit` seconds behind those who are there, at most, or the last turn if that was longer: it may have come
at its beginning. A pause earns no more. A client sends its next request when it has the result of the last one, and a
long turn of another owner cannot be interrupted: so an owner who used less is waited for, at its own cost, for
`GRACE_SECONDS`, or a tenth of the turn that would come instead; shorter steps of sampling go on meanwhile. Only the
engine thread calls this.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping

CREDIT_SECONDS = 1.0
GRACE_SECONDS = 0.1
GRACE_SHARE = 0.1  # of the turn that an owner would have to wait for
JOINT_STEP = 1.5  # times its own: how long a sampling step may become for an owner by the rows of others


class OwnerClock:
    def __init__(
        self, stretch: float, credit: float = CREDIT_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`stretch`: the seconds that an owner's own training may lead its own sampling, and the other way around."""
        self._stretch, self._credit, self._clock = stretch, credit, clock
        self._used: dict[str, float] = {}
        self._lead: dict[str, float] = {}  # owner -> seconds of training less those of sampling
        self._turn: dict[str, float] = {}  # owner -> seconds of its last long micro-batch or request
        self._seen: dict[str, float] = {}  # owner -> when it had work or was computed for, if that is not long ago
        self._mark = self._looked = clock()

    def see(self, owners: Collection[str]) -> None:
        """Note who has work now. An owner who had none before gets no more than `credit` for that."""
        # Who was there at the last look may have come back while the engine computed.
        grace = max(map(self._grace, self._seen), default=0.0)
        self._seen = {owner: at for owner, at in self._seen.items() if self._looked - at < grace}
        before, self._looked = self._looked, self._clock()
        now, credit = self._looked, max(self._credit, self._looked - before)
        there = [self.seconds_of(owner) for owner in self._seen]
        for owner in owners:
            if owner not in self._seen:
                least = min(there) - credit if there else self.seconds_of(owner)
                self._used[owner] = max(self.seconds_of(owner), least)
        self._seen |= dict.fromkeys(owners, now)
        if not self._seen:
            self._used.clear()  # the next ones begin anew
            self._lead.clear()
            self._turn.clear()

    def _grace(self, owner: str) -> float:
        """How long others are waited for who come before this owner."""
        return max(GRACE_SECONDS, GRACE_SHARE * self._turn.get(owner, 0.0))

    def find_awaited(self, owner: str, present: Collection[str]) -> tuple[str, float] | None:
        """An owner who used less than this one, has no work now and had some a moment ago; and how long to wait for it.
        `present` have work."""
        left = {one: at + self._grace(owner) - self._clock() for one, at in self._seen.items() if one not in present}
        known = [one for one, seconds in left.items() if seconds > 0 and self.seconds_of(one) < self.seconds_of(owner)]
        awaited = self.first(known)
        return None if awaited is None else (awaited, left[awaited])

    def charge_waiting(self, owner: str) -> None:
        self._used[owner] = self.seconds_of(owner) + self._take()

    def seconds_of(self, owner: str) -> float:
        return self._used.get(owner, 0.0)

    def start(self) -> None:
        """Measure from now: the time before is charged to no owner."""
        self._mark = self._clock()

    def charge_training(self, owner: str) -> float:
        """Charge the time since the last call of this kind; returns it."""
        took = self._take()
        self._used[owner] = self.seconds_of(owner) + took
        self._turn[owner] = max(took, 0.75 * self._turn.get(owner, 0.0))  # the end of a request is a short one
        self._lead[owner] = min(self._stretch, self._lead.get(owner, 0.0) + took)
        self._seen[owner] = self._mark
        return took

    def charge_sampling(self, rows: dict[str, int]) -> float:
        """Charge the time since the last call to the owners of the rows that were computed, by their numbers."""
        took, total = self._take(), sum(rows.values())
        for owner, count in rows.items():
            share = took * count / total
            self._seen[owner] = self._mark
            self._used[owner] = self.seconds_of(owner) + share
            self._lead[owner] = max(-self._stretch, self._lead.get(owner, 0.0) - share)
        return took

    def _take(self) -> float:
        before, self._mark = self._mark, self._clock()
        return self._mark - before

    def first(self, owners: Collection[str]) -> str | None:
        """Whose turn it is."""
        return min(owners, key=self.seconds_of, default=None)

    def is_sampling_next(self, training: str | None, sampling: str | None) -> bool:
        """Whether the owner that would sample comes before the one that would train."""
        if training is None or sampling is None or training == sampling:
            return sampling is not None and (training is None or self._lead.get(sampling, 0.0) > 0)
        return self.seconds_of(sampling) < self.seconds_of(training)


class StepTimes:
    """The seconds of a sampling step by the number of its rows, as measured: they tell who may share a step.

    On a GPU a step takes as long for 400 rows as for 8, on a CPU many times as long.
    """

    def __init__(self) -> None:
        self._seconds: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=5))  # by `_size`

    def add(self, rows: int, seconds: float) -> None:
        self._seconds[self._size(rows)].append(seconds)

    def choose_owners(self, rows: Mapping[str, int]) -> set[str]:
        """The first owner of `rows`, and of the others, in their order, those who make its step little longer.

        What was not measured yet is tried: first its rows alone, then with those of others.
        """
        first, *others = rows
        chosen, own = {first}, self.estimate(rows[first])
        if own is None:
            return chosen
        total = rows[first]
        for owner in others:
            joint = self.estimate(total + rows[owner])
            if joint is None or joint <= JOINT_STEP * own:
                chosen.add(owner)
                total += rows[owner]
        return chosen

    def estimate(self, rows: int) -> float | None:
        """Seconds, or None where no step of about as many rows was measured."""
        # The median: a step may also compute prompts.
        measured = self._seconds.get(self._size(rows))
        return statistics.median(measured) if measured else None

    @staticmethod
    def _size(rows: int) -> int:
        return rows.bit_length()
