"""Sampling ahead of training: what is learned from in step b was answered by an earlier version of the policy.

`FixedLag` is the default: version v is the policy after v steps, and batch b is answered by version max(0, b - k), k
being `training.max_steps_off_policy`. Nothing depends on time, so a run that was killed ends with the same bits, and
with k = 0 and one minibatch it is the synchronous loop. With `training.num_minibatches` a batch is learned from in
parts, in the order of its groups. What is finished first is learned from first in `rlvr.training.completion`.

Who samples is a producer: `Inline` answers a batch when it is asked to, on this thread, as the synchronous loop would
(an engine in this process computes one thing at a time anyway); `Background` plays every group on an event loop of its
own, for clients whose model is elsewhere (they say `overlaps = True`), so that sampling goes on while a step is made.
Exercised by `python -m pytest tests/test_pipelined.py`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rlvr.protocols import SamplingClient
from rlvr.rollout import Group, play
from rlvr.scoring import CALLS
from rlvr.training import payload
from rlvr.training.journal import Checkpoint, Journal
from rlvr.training.payload import Answers
from rlvr.training.step import Collected, Trainer
from rlvr.types import Trajectory, TrajectoryBatch, group_by, mean


class Inline:
    """Answers on the thread that asks, all groups of a call together."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def start(self, groups: Sequence[Group], sampler: SamplingClient, version: int) -> list[Future[list[Trajectory]]]:
        fresh, _, _ = self._trainer.answers(groups, sampler, version)
        answers = group_by(fresh, lambda t: t.group_id)
        return [answered(answers[group.id]) for group in groups]

    def close(self) -> None:
        pass


class Background:
    """Answers on a thread of its own, each group at its own pace, and each is judged as soon as it is over.

    Where all verifiers wait for others (`Reward.waits`) they are asked about several groups at once, else about one.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._judging = threading.Semaphore(CALLS if all(v.waits for v in trainer.verifiers) else 1)
        self._loop = asyncio.new_event_loop()
        answers = trainer.options.slots * trainer.options.group_size  # a future may need a thread to wait for it
        self._loop.set_default_executor(ThreadPoolExecutor(min(256, answers + 1), "rlvr-waiting"))
        self._thread = threading.Thread(target=self._loop.run_forever, name="rlvr-sampling", daemon=True)
        self._thread.start()

    def start(self, groups: Sequence[Group], sampler: SamplingClient, version: int) -> list[Future[list[Trajectory]]]:
        return [asyncio.run_coroutine_threadsafe(self._play(g, sampler, version), self._loop) for g in groups]

    async def _play(self, group: Group, sampler: SamplingClient, version: int) -> list[Trajectory]:
        fresh = await play(group, sampler, self._trainer.params, **self._trainer.how(version))
        await asyncio.to_thread(self._judge, fresh, sampler)
        return fresh

    def _judge(self, fresh: list[Trajectory], sampler: SamplingClient) -> None:
        with self._judging:
            self._trainer.judge(fresh, sampler)

    def close(self) -> None:
        """Stop; what is under way is not waited for."""
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._cancelled(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _cancelled(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


def answered(trajectories: list[Trajectory]) -> Future[list[Trajectory]]:
    """A result that is there already."""
    future = Future[list[Trajectory]]()
    future.set_result(trajectories)
    return future


@dataclass
class InFlight:
    """A group that was asked for: its place in the data, the version that answers it, and its answers to be."""

    id: str
    level: str
    index: int
    version: int
    answers: Future[list[Trajectory]]

    def kept(self) -> Answers:
        return Answers(self.id, self.level, self.index, self.version, self.answers.result())

    @classmethod
    def of(cls, kept: Answers) -> InFlight:
        return cls(kept.id, kept.level, kept.index, kept.version, answered(kept.trajectories))


class Tally:
    """How long answers are, those that were sampled so far and those that were learned from: equal if nothing is
    learned more often because it is short."""

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


class FixedLag:
    """Batch b is answered by version max(0, b - k), and learned from in the order of its groups."""

    def __init__(self, trainer: Trainer, journal: Journal) -> None:
        self.trainer, self.journal = trainer, journal
        self.tally = Tally()
        self._producer = Background(trainer) if getattr(trainer.client, "overlaps", False) else Inline(trainer)
        self._ahead = deque[list[InFlight]]()  # batches that were asked for, the next one to learn from first
        self._asked = 0  # how many batches were asked for so far

    def learn(self, step: int) -> tuple[dict[str, float], Collected]:
        """One step: ask for what this version is to answer, then learn from the batch whose turn it is."""
        trainer, began = self.trainer, time.perf_counter()
        trainer.under_way = []
        self._ask(step)
        batch = self._ahead.popleft()
        waited = [time.perf_counter() - began]
        metrics, collected = learn_from(trainer, step, self._arriving(batch, waited))
        self.tally.add("trained", collected.batch)
        times = {"time/sampling": sum(waited), "time/update": time.perf_counter() - began - sum(waited)}
        return {**metrics, **self.tally.metrics(step, collected.batch), **times}, collected

    def _ask(self, step: int) -> None:
        """Everything that the policy as it is now has to answer."""
        options = self.trainer.options
        last = min(step + options.max_steps_off_policy, options.steps - 1)
        if self._asked > last:
            return
        sampler = self.trainer.client.save_weights_and_get_sampling_client()
        for number in range(self._asked, last + 1):
            drawn = self.trainer.curriculum.draw(options.prompts_per_step, number)
            tasks = [self.trainer.curriculum.task(level, index) for level, index in drawn]
            groups = self.trainer.groups(tasks, f"{number}/0")
            futures = self._producer.start(groups, sampler, step)
            self._ahead.append(
                [
                    InFlight(group.id, level, index, step, future)
                    for group, (level, index), future in zip(groups, drawn, futures, strict=True)
                ]
            )
        self._asked = last + 1

    def _arriving(self, batch: list[InFlight], waited: list[float]) -> Iterator[list[Trajectory]]:
        """The minibatches in order, each as soon as all of its groups are there."""
        options = self.trainer.options
        size = len(batch) // (options.num_substeps * options.num_minibatches if options.num_minibatches > 1 else 1)
        for first in range(0, len(batch), size):
            began = time.perf_counter()
            part = [t for group in batch[first : first + size] for t in group.answers.result()]
            waited.append(time.perf_counter() - began)
            self.tally.add("sampled", part)
            yield part

    # What a checkpoint keeps

    def keep(self, name: str) -> str:
        """Store the batches in flight for the checkpoint `name`, once they are answered; the hash of the file."""
        if not self._ahead:
            return ""
        return payload.write(self.journal.inflight(name), [group.kept() for batch in self._ahead for group in batch])

    def state(self) -> dict[str, Any]:
        return {"tally": dict(self.tally.counts)}

    def forget(self, step: int) -> None:
        """The journal deletes what was in flight together with its checkpoint."""

    def restore(self, checkpoint: Checkpoint | None, step: int) -> None:
        """Go on before `step`, with the batches that were in flight when the checkpoint was made."""
        self._asked = step
        if checkpoint is not None:
            self.tally.counts.update(checkpoint.state["pipeline"]["tally"])
        if checkpoint is None or not checkpoint.inflight:
            return
        file = self.journal.inflight(checkpoint.path)
        groups = payload.read(file, checkpoint.inflight, self.trainer.curriculum.task)
        size = self.trainer.options.prompts_per_step
        self._ahead = deque(
            [InFlight.of(group) for group in groups[first : first + size]] for first in range(0, len(groups), size)
        )
        self._asked = step + len(self._ahead)

    def finish(self) -> None:
        """No step will follow: nothing that is under way is needed any more (a run may end before its last step)."""
        self.close()
        self._ahead.clear()

    def close(self) -> None:
        self._producer.close()


def learn_from(trainer: Trainer, step: int, arriving: Iterator[list[Trajectory]]) -> tuple[dict[str, float], Collected]:
    """A batch that arrives in parts: learned from part by part, or whole where there is one part."""
    if trainer.options.num_minibatches > 1:
        metrics, collected = trainer.update_streamed(step, arriving)
        trainer.accept(step, collected.all)
        return metrics, collected
    batch = [t for part in arriving for t in part]
    collected = Collected(TrajectoryBatch(batch), batch)
    trainer.accept(step, collected.all)
    return trainer.update(step, collected), collected
