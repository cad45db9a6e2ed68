"""What the schedules that sample ahead of training share: producers, groups in flight, and their statistics.

A producer samples groups: `InlineProducer` on this thread, a whole batch when it is requested (an engine in this
process computes one thing at a time anyway); `BackgroundProducer` on an event loop of its own, for clients whose model
is elsewhere (`Collector.can_overlap`), so that sampling goes on during an update.
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rlvr.core.protocols import SamplingClient
from rlvr.core.types import Trajectory, group_by, mean
from rlvr.rollout import Group
from rlvr.training.collector import Collector
from rlvr.training.group_files import StoredGroup
from rlvr.training.journal import Journal
from rlvr.training.parts import StepBatch
from rlvr.training.schedules.base import Schedule
from rlvr.training.trainer import Trainer


class InlineProducer:
    """Samples on the calling thread, all groups of a call together."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def start(self, groups: Sequence[Group], sampler: SamplingClient, version: int) -> list[Future[list[Trajectory]]]:
        scored = group_by(self._collector.sample(groups, sampler, version).trajectories, lambda t: t.group_id)
        return [completed_future(scored[group.id]) for group in groups]

    def close(self) -> None:
        pass


class BackgroundProducer:
    """Samples on a thread of its own, each group at its own pace; each is scored as soon as it is sampled."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._scoring = threading.Semaphore(collector.scoring_calls)
        self._loop = asyncio.new_event_loop()
        waiting = collector.options.slots * collector.options.group_size  # a future may need a thread to wait for it
        self._loop.set_default_executor(ThreadPoolExecutor(min(256, waiting + 1), "rlvr-waiting"))
        self._thread = threading.Thread(target=self._loop.run_forever, name="rlvr-sampling", daemon=True)
        self._thread.start()

    def start(self, groups: Sequence[Group], sampler: SamplingClient, version: int) -> list[Future[list[Trajectory]]]:
        return [asyncio.run_coroutine_threadsafe(self._play(g, sampler, version), self._loop) for g in groups]

    async def _play(self, group: Group, sampler: SamplingClient, version: int) -> list[Trajectory]:
        sampled = await self._collector.play_group(group, sampler, version)
        await asyncio.to_thread(self._score, sampled, sampler)
        return sampled

    def _score(self, sampled: list[Trajectory], sampler: SamplingClient) -> None:
        with self._scoring:
            self._collector.score(sampled, sampler)

    def close(self) -> None:
        """Stop without waiting for the groups in flight."""
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


def completed_future(trajectories: list[Trajectory]) -> Future[list[Trajectory]]:
    future = Future[list[Trajectory]]()
    future.set_result(trajectories)
    return future


@dataclass
class PendingGroup:
    """A group in flight: its place in the data, the version that samples it, and its trajectories to come."""

    id: str
    level: str
    index: int
    version: int
    trajectories: Future[list[Trajectory]]

    def to_stored(self) -> StoredGroup:
        """The group as it goes to disk; waits for it."""
        return StoredGroup(self.id, self.level, self.index, self.version, self.trajectories.result())

    @classmethod
    def from_stored(cls, group: StoredGroup) -> PendingGroup:
        return cls(group.id, group.level, group.index, group.version, completed_future(group.trajectories))


class LengthStatistics:
    """Mean lengths of the completions sampled and of those learned from; they differ if short ones are preferred."""

    def __init__(self) -> None:
        self.counts = {"sampled": 0, "sampled_tokens": 0, "trained": 0, "trained_tokens": 0, "discarded": 0}

    def add(self, what: str, trajectories: Sequence[Trajectory]) -> None:
        self.counts[what] += len(trajectories)
        self.counts[f"{what}_tokens"] += sum(t.num_action_tokens for t in trajectories)

    def metrics(self, step: int, trained: Sequence[Trajectory]) -> dict[str, float]:
        ages = [float(step - t.policy_version) for t in trained]
        c = self.counts
        return {
            "async/staleness_min": min(ages),
            "async/staleness_mean": mean(ages),
            "async/staleness_max": max(ages),
            "async/sampled_length": c["sampled_tokens"] / max(1, c["sampled"]),
            "async/trained_length": c["trained_tokens"] / max(1, c["trained"]),
            "async/discarded_groups": float(c["discarded"]),
        }


class SamplingAhead(Schedule, ABC):
    """A step of a schedule that samples ahead: request groups, then learn from the batch as its parts arrive."""

    def __init__(self, trainer: Trainer, journal: Journal, producer: InlineProducer | BackgroundProducer) -> None:
        self.trainer, self.collector, self.options = trainer, trainer.collector, trainer.options
        self.journal = journal
        self.lengths = LengthStatistics()
        minibatches = self.options.order.minibatches
        self.num_parts = self.options.num_substeps * minibatches if minibatches > 1 else 1
        self._producer = producer

    @abstractmethod
    def _request(self, step: int) -> float:
        """Request what the policy as it is now has to sample; the seconds spent sampling it."""

    @abstractmethod
    def _arriving(self, step: int, waits: list[float]) -> Iterator[list[Trajectory]]:
        """Yield the parts of the step's batch as they arrive, and append to `waits` the seconds waited for each."""

    def learn(self, step: int) -> tuple[dict[str, float], StepBatch]:
        began = time.perf_counter()
        self.trainer.current_batch = []
        waits = [self._request(step)]
        metrics, collected = self.trainer.learn_from(step, self._arriving(step, waits))
        self.lengths.add("trained", collected.batch)
        times = {"time/sampling": sum(waits), "time/update": time.perf_counter() - began - sum(waits)}
        return {**metrics, **self.lengths.metrics(step, collected.batch), **times}, collected

    def state(self) -> dict[str, Any]:
        return {"tally": dict(self.lengths.counts)}

    def close(self) -> None:
        self._producer.close()
