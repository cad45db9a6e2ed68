"""Completion order: what is sampled first is learned from first, and nothing is older than `lag` steps.

A group takes one of prompts_per_step x (lag + 1) slots before it is sampled, by the newest policy, and
frees it when it has been learned from. A batch is what has arrived, the oldest version first. A group that would become
too old is waited for (`stale=pace`: the step begins once no later step would have to exceed the limit), or discarded
(`stale=discard`). So the time that a completion takes decides when it is learned from: two runs differ, and short
completions come first. `async/trained_length` against `async/sampled_length` shows by how much.

Every decision and every group is in the journal before it is used:

    {"event": "started", "version": 3, "groups": [[12, "1", 7], ...]}       number, level, index of its task
    {"event": "answered", "group": 12, "version": 3, "sha256": "...", ...}  it is in inflight/group-000012.json
    {"event": "batch", "step": 4, "part": 0, "groups": [12, ...], "discarded": []}

A run that was killed repeats the recorded decisions with the same completions and goes on from there: no group is lost,
used twice or left out. Groups that were being sampled are sampled again, by the version at hand.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rlvr.core.types import Trajectory
from rlvr.training import group_files
from rlvr.training.journal import Checkpoint, Journal
from rlvr.training.schedules.ahead import BackgroundProducer, PendingGroup, SamplingAhead
from rlvr.training.trainer import Trainer


class GroupRequest(NamedTuple):
    """A group by its number, with the level and the index of its task."""

    number: int
    level: str
    index: int


class CompletionOrder(SamplingAhead):
    """Keeps the groups that were requested and not yet learned from."""

    def __init__(self, trainer: Trainer, journal: Journal) -> None:
        super().__init__(trainer, journal, BackgroundProducer(trainer.collector))
        self._outstanding: dict[int, PendingGroup] = {}
        self._on_disk: dict[int, None] = {}  # numbers of sampled groups, in the order they arrived
        self._arrivals = queue.SimpleQueue[int]()
        self._lost: list[GroupRequest] = []  # requested by an attempt that was killed, and not sampled
        self._recorded: dict[tuple[int, int], list[int]] = {}  # (step, part) -> groups, by such an attempt
        self._trained: dict[int, int] = {}  # number -> step, as long as the group is on disk
        self._next_number = 0
        self._discards = self.options.order.options["stale"] == "discard"
        self._part_size = self.options.prompts_per_step // self.num_parts

    def _request(self, step: int) -> float:
        """Start groups, up to the slots and to what the rest of the run can use."""
        if all((step, part) in self._recorded for part in range(self.num_parts)):
            return 0.0
        curriculum = self.collector.curriculum
        usable = (self.options.steps - step) * self.options.prompts_per_step
        free = max(0, min(self.options.slots, usable) - len(self._outstanding))
        again, self._lost = self._lost[:free], self._lost[free:]
        drawn = curriculum.draw(free - len(again), step)
        requests = again + [GroupRequest(self._next_number + i, *place) for i, place in enumerate(drawn)]
        if not requests:
            return 0.0
        self._next_number += len(drawn)
        self.journal.write("started", version=step, groups=requests)
        sampler = self.collector.current_sampler()
        for number, level, index in requests:
            [group] = self.collector.open_groups([curriculum.task(level, index)], str(number))
            [trajectories] = self._producer.start([group], sampler, step)
            self._outstanding[number] = PendingGroup(group.id, level, index, step, trajectories)
            trajectories.add_done_callback(lambda _, n=number: self._arrivals.put(n))
        return 0.0

    def _arriving(self, step: int, waits: list[float]) -> Iterator[list[Trajectory]]:
        for part in range(self.num_parts):
            began = time.perf_counter()
            chosen = self._recorded.pop((step, part), None) or self._choose(step, part)
            groups = [self._outstanding.pop(number) for number in chosen]
            for number in chosen:
                self._on_disk.pop(number)
                self._trained[number] = step
            waits.append(time.perf_counter() - began)
            yield [t for group in groups for t in group.trajectories.result()]

    def _choose(self, step: int, part: int) -> list[int]:
        """Choose the groups of the next part of a batch once there are enough; record them before they are used."""
        while True:
            self._write_arrived_groups(wait=False)
            if self._is_ready(step, (self.num_parts - 1 - part) * self._part_size):
                break
            self._write_arrived_groups(wait=True)
        arrived = sorted(self._on_disk, key=lambda n: self._outstanding[n].version)  # stable: then as they arrived
        chosen = arrived[: self._part_size]
        oldest = step + 1 - self.options.order.max_lag
        discarded: list[int] = []
        if part + 1 == self.num_parts and self._discards:
            discarded = [n for n, g in self._outstanding.items() if n not in chosen and g.version < oldest]
        self.journal.write("batch", step=step, part=part, groups=chosen, discarded=discarded)
        for number in discarded:
            self._discard(number)
        return chosen

    def _discard(self, number: int) -> None:
        self._outstanding.pop(number).trajectories.cancel()
        self._on_disk.pop(number, None)
        self._file(number).unlink(missing_ok=True)
        self.lengths.counts["discarded"] += 1

    def _is_ready(self, step: int, places_left: int) -> bool:
        """Whether the next part can be chosen; `places_left` groups of this step are chosen after it.

        A group of version v has to be learned from in step v + k at the latest, k being the limit. So this part has to
        take those outstanding groups of version v and before for which there are no places after it.
        """
        if len(self._on_disk) < self._part_size:
            return False
        if self._discards:
            return True
        outstanding = [group.version for group in self._outstanding.values()]
        arrived = [self._outstanding[n].version for n in self._on_disk]
        for version in set(outstanding):
            places = (version + self.options.order.max_lag - step) * self.options.prompts_per_step + places_left
            need = sum(v <= version for v in outstanding) - places
            if sum(v <= version for v in arrived) < need:
                return False
        return True

    def _write_arrived_groups(self, *, wait: bool) -> None:
        """Write sampled groups to disk: those that have arrived, or with `wait` the next one."""
        while True:
            try:
                number = self._arrivals.get(block=wait)
            except queue.Empty:
                return
            group = self._outstanding.get(number)
            if group is not None:  # else it was discarded while it was being sampled
                stored = group.to_stored()
                sha256 = group_files.write(self._file(number), [stored])
                tokens = sum(t.num_action_tokens for t in stored.trajectories)
                counts = {"answers": len(stored.trajectories), "tokens": tokens}
                self.journal.write("answered", group=number, version=group.version, sha256=sha256, **counts)
                self._on_disk[number] = None
                self.lengths.add("sampled", stored.trajectories)
            if wait:
                return

    def delete_before(self, step: int) -> None:
        """Delete the groups that were learned from before `step`."""
        for number in [n for n, at in self._trained.items() if at < step]:
            self._file(number).unlink(missing_ok=True)
            del self._trained[number]

    def restore(self, checkpoint: Checkpoint | None, step: int) -> None:
        """Repeat from `step` on what the journal recorded in earlier attempts."""
        if checkpoint is not None:
            self.lengths.counts.update(checkpoint.state["pipeline"]["tally"])
        try:
            self._read(step)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{self.journal.folder / 'journal.jsonl'}: its lines about groups and batches do not fit together "
                f"({type(error).__name__}: {error}); restore the file, or start anew under another run.name"
            ) from error

    def _read(self, step: int) -> None:
        started: dict[int, GroupRequest] = {}
        stored: dict[int, dict[str, Any]] = {}
        parts: dict[tuple[int, int], dict[str, Any]] = {}
        for event in self.journal.events:
            match event["event"]:
                case "started":
                    started |= {number: GroupRequest(number, level, index) for number, level, index in event["groups"]}
                case "answered":
                    stored[event["group"]] = event
                case "batch":
                    parts[event["step"], event["part"]] = event
                case "undone":  # an earlier resume could not repeat what was recorded from there on
                    parts = {at: e for at, e in parts.items() if at[0] < event["step"]}
                    stored = {n: e for n, e in stored.items() if n not in event["groups"]}
        self._next_number = max(started, default=-1) + 1
        for _, level, index in started.values():
            self.collector.curriculum.skip(level, index)
        used_at = {n: at for (at, _), event in parts.items() for n in (*event["groups"], *event["discarded"])}
        before = {n for n, at in used_at.items() if at < step}
        self._trained = {n: used_at[n] for n in before if self._file(n).exists()}
        parts = {at: event for at, event in parts.items() if at[0] >= step}
        needed = {n for event in parts.values() for n in event["groups"]}
        discarded = {n for event in parts.values() for n in event["discarded"]}
        present = {n: event for n, event in stored.items() if n in started and n not in before | discarded}
        whole = {n: e for n, e in present.items() if not group_files.find_file_damage(self._file(n), e["sha256"])}
        if needed - whole.keys():  # then later versions of the policy will differ from those recorded
            whole = {n: event for n, event in whole.items() if event["version"] <= step}
            self.journal.write("undone", step=step, groups=[n for n in present if n not in whole])
            parts, discarded = {}, set[int]()
        for number, event in whole.items():
            [group] = group_files.read(self._file(number), event["sha256"], self.collector.curriculum.task)
            self._outstanding[number] = PendingGroup.from_stored(group)
            self._on_disk[number] = None
        self._recorded = {at: event["groups"] for at, event in parts.items()}
        self._lost = [request for n, request in started.items() if n not in before | discarded | whole.keys()]
        self.lengths.counts["sampled"] = sum(event["answers"] for event in stored.values())
        self.lengths.counts["sampled_tokens"] = sum(event["tokens"] for event in stored.values())
        self.lengths.counts["discarded"] += len(discarded)

    def _file(self, number: int) -> Path:
        return self.journal.folder / "inflight" / f"group-{number:06d}.json"

    def finish(self) -> None:
        self.close()
        for number in self._outstanding:
            self._file(number).unlink(missing_ok=True)
        self._outstanding.clear()
        self._on_disk.clear()
