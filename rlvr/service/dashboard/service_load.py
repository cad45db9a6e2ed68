"""What is busy in a service and what waits for what, from its counters and its database.

A generator or verifier works on as many calls at a time as its seconds of work in a second of the clock (Little's law),
over the last minute.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rlvr.core.fair_slots import share_of
from rlvr.service.dashboard.dashboard_data import MachineGroup, MachinePart, visible_text
from rlvr.service.dashboard.session_rows import InstanceLoad

WINDOW_S = 60.0
Counters = dict[tuple[str, str], float]  # by the name of a counter and the values of its labels


class ServiceLoad:
    """The load of a service; `collect` returns the counters of `rlvr.service.service_metrics`. Thread-safe."""

    def __init__(self, collect: Callable[[], Iterable[Any]] | None, limit: int) -> None:
        self._collect, self._limit = collect, limit
        self._seen = deque[tuple[float, Counters]]([(time.monotonic(), {})])

    def machines(
        self, health: Mapping[str, Any], learned: Mapping[str, Any], instances: Sequence[InstanceLoad], now: float
    ) -> list[MachineGroup]:
        """`now` is the database's time, which `instances` are measured by."""
        spent, seconds = self._measure()
        running, queued = (sum(getattr(one, name) for one in instances) for name in ("running", "queued"))
        parts = list[MachinePart]()
        for one in instances:
            did = f"{one.running:,} sessions run; heard from {max(0.0, now - one.heartbeat):.0f} s ago"
            waits = f"{one.queued:,} sessions wait, the first for {now - one.oldest:,.0f} s" if one.oldest else ""
            if waits and one.running < self._limit:
                waits += f"; one API key has at most {share_of(self._limit):,} of {self._limit:,} places"
            busy = min(1.0, one.running / self._limit) if self._limit else None
            parts.append(MachinePart(f"Sessions of {visible_text(one.instance, 60)}", busy, did, waits))
        calls = {key: spent[key] for key in spent if key[0].endswith("_seconds_count") and "session" not in key[0]}
        at_a_time = {key: spent[key[0].replace("_count", "_sum"), key[1]] / seconds for key in calls} if seconds else {}
        total = sum(at_a_time.values())
        for key in sorted(calls):
            name = f"Verifier {visible_text(key[1], 60)}" if key[1] else "Generator"
            errors = spent.get(("rlvr_verdicts_total", f"{key[1]} error"), 0.0) if key[1] else sum(
                value for (counter, _), value in spent.items() if counter == "rlvr_generator_errors_total"
            )  # fmt: skip
            did = f"{calls[key]:,.0f} calls in {seconds:.0f} s"
            if calls[key] and seconds:
                each = spent[key[0].replace("_count", "_sum"), key[1]] / calls[key]
                did += f", {each:.3g} s each: {at_a_time[key]:.2g} at a time"
            did += f"; {errors:,.0f} failed" if errors else ""
            state = str(health.get("detail") or "") if not key[1] else ""
            parts.append(
                MachinePart(
                    name, at_a_time[key] / total if total else 0.0 if seconds else None, did, visible_text(state, 200)
                )
            )
        if "sessions_waiting" in learned:
            did = (
                f"step {learned.get('sampled_step')}, learner {visible_text(str(learned.get('learner')), 60) or 'none'}"
            )
            waits = f"{learned['sessions_waiting']:,} sessions wait for the learner"
            parts.append(MachinePart("Learner", None, did, waits))
        about = f"{running:,} sessions run, {queued:,} wait for a place."
        about += f" A process has {self._limit:,} places." if self._limit else ""
        if total:
            about += " Busy is the share of the time in calls; sessions' is that of their places."
        return [MachineGroup("This service", str(health.get("state", "")), parts, about)]

    def _measure(self) -> tuple[Counters, float]:
        """What the counters gained in the last minute, at first since the service began, and the seconds of that."""
        now = time.monotonic()
        counted: Counters = {}
        for family in self._collect() if self._collect else ():
            for sample in family.samples:
                counted[sample.name, " ".join(sample.labels.values())] = sample.value
        self._seen.append((now, counted))
        while len(self._seen) > 2 and now - self._seen[1][0] >= WINDOW_S:
            self._seen.popleft()
        began, before = self._seen[0]
        return {key: value - before.get(key, 0.0) for key, value in counted.items()}, now - began
