"""A fixed lag: batch b is sampled by version max(0, b - k), k being the schedule's `lag`.

Version v is the policy after v steps. Nothing depends on time, so a run that was killed ends with the same bits, and
with k = 0 and one minibatch it is the synchronous schedule. With `num_minibatches` a batch is learned from in
parts, in the order of its groups.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

from rlvr.core.types import Trajectory
from rlvr.training import group_files
from rlvr.training.journal import Checkpoint, Journal
from rlvr.training.schedules.ahead import BackgroundProducer, InlineProducer, PendingGroup, SamplingAhead
from rlvr.training.trainer import Trainer


class FixedLag(SamplingAhead):
    """Keeps up to k + 1 batches in flight and learns from them in the order of their groups."""

    def __init__(self, trainer: Trainer, journal: Journal) -> None:
        producer = BackgroundProducer if trainer.collector.can_overlap else InlineProducer
        super().__init__(trainer, journal, producer(trainer.collector))
        self._batches = deque[list[PendingGroup]]()  # in flight, the next one to learn from first
        self._requested = 0  # how many batches were requested so far

    def _request(self, step: int) -> float:
        began = time.perf_counter()
        last = min(step + self.options.order.max_lag, self.options.steps - 1)
        if self._requested <= last:
            sampler = self.collector.current_sampler()
            for number in range(self._requested, last + 1):
                drawn = self.collector.curriculum.draw(self.options.prompts_per_step, number)
                tasks = [self.collector.curriculum.task(level, index) for level, index in drawn]
                groups = self.collector.open_groups(tasks, f"{number}/0")
                futures = self._producer.start(groups, sampler, step)
                self._batches.append(
                    [
                        PendingGroup(group.id, level, index, step, future)
                        for group, (level, index), future in zip(groups, drawn, futures, strict=True)
                    ]
                )
            self._requested = last + 1
        return time.perf_counter() - began

    def _arriving(self, step: int, waits: list[float]) -> Iterator[list[Trajectory]]:
        """The minibatches in order, each as soon as all of its groups are sampled."""
        batch = self._batches.popleft()
        size = len(batch) // self.num_parts
        for first in range(0, len(batch), size):
            began = time.perf_counter()
            part = [t for group in batch[first : first + size] for t in group.trajectories.result()]
            waits.append(time.perf_counter() - began)
            self.lengths.add("sampled", part)
            yield part

    def store_inflight(self, checkpoint: str) -> str:
        """Store the batches in flight, once they are sampled."""
        if not self._batches:
            return ""
        groups = [group.to_stored() for batch in self._batches for group in batch]
        return group_files.write(self.journal.inflight(checkpoint), groups)

    def restore(self, checkpoint: Checkpoint | None, step: int) -> None:
        self._requested = step
        if checkpoint is not None:
            self.lengths.counts.update(checkpoint.state["pipeline"]["tally"])
        if checkpoint is None or not checkpoint.inflight:
            return
        file = self.journal.inflight(checkpoint.path)
        groups = group_files.read(file, checkpoint.inflight, self.collector.curriculum.task)
        size = self.options.prompts_per_step
        self._batches = deque(
            [PendingGroup.from_stored(group) for group in groups[first : first + size]]
            for first in range(0, len(groups), size)
        )
        self._requested = step + len(self._batches)

    def finish(self) -> None:
        self.close()
        self._batches.clear()
