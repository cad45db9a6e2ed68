"""What is finished first is learned from first, and nothing is older than `training.max_steps_off_policy`.

A group of answers takes one of prompts_per_step x (max_steps_off_policy + 1) slots before it is sampled, by the newest
policy, and frees it when it has been learned from. A batch is what has arrived, the oldest version first. A group that
would become too old is waited for (`stale=pace`: the step begins once no later step would have to exceed the limit), or
thrown away (`stale=discard`). So the time that an answer takes decides when it is learned from: two runs differ, and
short answers come first. `async/trained_length` beside `async/sampled_length` shows by how much.

Every decision and every group of answers is in the journal before it is used:

    {"event": "started", "version": 3, "groups": [[12, "1", 7], ...]}       number, level, index of its task
    {"event": "answered", "group": 12, "version": 3, "sha256": "...", ...}  they are in inflight/group-000012.json
    {"event": "batch", "step": 4, "part": 0, "groups": [12, ...], "discarded": []}

A run that was killed makes the decisions it had noted again, with the same answers, and goes on from there: no group is
lost, used twice or left out. Groups that were being sampled are sampled anew, by the version at hand.
Exercised by `python -m pytest tests/test_pipelined_completion.py`.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlvr.training import payload
from rlvr.training.journal import Checkpoint, Journal
from rlvr.training.pipelined import Background, InFlight, Tally, learn_from
from rlvr.training.step import Collected, Trainer
from rlvr.types import Trajectory

Asked = tuple[int, str, int]  # a group by its number, and its task's level and index


class Completion:
    """The schedule, with what is outstanding: groups that were asked for and not yet learned from."""

    def __init__(self, trainer: Trainer, journal: Journal) -> None:
        self.trainer, self.journal = trainer, journal
        self.tally = Tally()
        self._producer = Background(trainer)
        self._outstanding: dict[int, InFlight] = {}
        self._answered: dict[int, None] = {}  # numbers whose answers are on disk, in the order they arrived
        self._arrived = queue.SimpleQueue[int]()
        self._lost: list[Asked] = []  # asked for by an attempt that was killed, and not answered
        self._noted: dict[tuple[int, int], list[int]] = {}  # (step, part) -> groups, by such an attempt
        self._trained: dict[int, int] = {}  # number -> step, as long as the answers are on disk
        self._next = 0
        options = trainer.options
        self._parts = options.num_substeps * options.num_minibatches if options.num_minibatches > 1 else 1
        self._size = options.prompts_per_step // self._parts

    def learn(self, step: int) -> tuple[dict[str, float], Collected]:
        """One step: fill the slots that are free, then learn from what arrives first."""
        began, waited = time.perf_counter(), list[float]()
        self.trainer.under_way = []
        if any((step, part) not in self._noted for part in range(self._parts)):
            self._ask(step)
        metrics, collected = learn_from(self.trainer, step, self._arriving(step, waited))
        self.tally.add("trained", collected.batch)
        times = {"time/sampling": sum(waited), "time/update": time.perf_counter() - began - sum(waited)}
        return {**metrics, **self.tally.metrics(step, collected.batch), **times}, collected

    def _ask(self, step: int) -> None:
        """Start groups, up to the slots and to what the rest of the run can use."""
        options, curriculum = self.trainer.options, self.trainer.curriculum
        usable = (options.steps - step) * options.prompts_per_step
        room = max(0, min(options.slots, usable) - len(self._outstanding))
        again, self._lost = self._lost[:room], self._lost[room:]
        drawn = curriculum.draw(room - len(again), step)
        asked = again + [(self._next + i, level, index) for i, (level, index) in enumerate(drawn)]
        if not asked:
            return
        self._next += len(drawn)
        self.journal.write("started", version=step, groups=asked)
        sampler = self.trainer.client.save_weights_and_get_sampling_client()
        for number, level, index in asked:
            [group] = self.trainer.groups([curriculum.task(level, index)], str(number))
            [answers] = self._producer.start([group], sampler, step)
            self._outstanding[number] = InFlight(group.id, level, index, step, answers)
            answers.add_done_callback(lambda _, n=number: self._arrived.put(n))

    def _arriving(self, step: int, waited: list[float]) -> Iterator[list[Trajectory]]:
        for part in range(self._parts):
            began = time.perf_counter()
            chosen = self._noted.pop((step, part), None) or self._choose(step, part)
            groups = [self._outstanding.pop(number) for number in chosen]
            for number in chosen:
                self._answered.pop(number)
                self._trained[number] = step
            waited.append(time.perf_counter() - began)
            yield [t for group in groups for t in group.answers.result()]

    def _choose(self, step: int, part: int) -> list[int]:
        """The groups of the next part of a batch, once there are enough; noted before they are used."""
        last = part + 1 == self._parts
        while True:
            self._take(wait=False)
            if self._ready(step, (self._parts - 1 - part) * self._size):
                break
            self._take(wait=True)
        arrived = sorted(self._answered, key=lambda n: self._outstanding[n].version)  # stable: then as they arrived
        chosen = arrived[: self._size]
        oldest = step + 1 - self.trainer.options.max_steps_off_policy
        left = {n: g for n, g in self._outstanding.items() if n not in chosen}
        discards = last and self.trainer.options.stale == "discard"
        discarded = [n for n, group in left.items() if group.version < oldest] if discards else []
        self.journal.write("batch", step=step, part=part, groups=chosen, discarded=discarded)
        for number in discarded:
            self._discard(number)
        return chosen

    def _discard(self, number: int) -> None:
        self._outstanding.pop(number).answers.cancel()
        self._answered.pop(number, None)
        self._file(number).unlink(missing_ok=True)
        self.tally.counts["discarded"] += 1

    def _ready(self, step: int, seats: int) -> bool:
        """Whether the next part can be chosen, `seats` groups of this step being left to choose after it.

        What may be learned from at the latest in step v + k, k the limit, has to find a place by then: of the
        outstanding groups of version v and before, this part takes as many as the places after it do not hold.
        """
        if len(self._answered) < self._size:
            return False
        options = self.trainer.options
        if options.stale == "discard":
            return True
        outstanding = [group.version for group in self._outstanding.values()]
        arrived = [self._outstanding[n].version for n in self._answered]
        for version in set(outstanding):
            places = (version + options.max_steps_off_policy - step) * options.prompts_per_step + seats
            need = sum(v <= version for v in outstanding) - places
            if sum(v <= version for v in arrived) < need:
                return False
        return True

    def _take(self, *, wait: bool) -> None:
        """Put on disk what has arrived: one group that is waited for, or all that are there."""
        while True:
            try:
                number = self._arrived.get(block=wait)
            except queue.Empty:
                return
            group = self._outstanding.get(number)
            if group is not None:  # else it was discarded while it was being sampled
                kept = group.kept()
                sha256 = payload.write(self._file(number), [kept])
                tokens = sum(t.num_action_tokens for t in kept.trajectories)
                counts = {"answers": len(kept.trajectories), "tokens": tokens}
                self.journal.write("answered", group=number, version=group.version, sha256=sha256, **counts)
                self._answered[number] = None
                self.tally.add("sampled", kept.trajectories)
            if wait:
                return

    # What a checkpoint keeps

    def keep(self, name: str) -> str:
        """Nothing more: the journal has it all."""
        return ""

    def forget(self, step: int) -> None:
        """No resumed run will begin before `step`: delete the answers that were learned from earlier."""
        for number in [n for n, at in self._trained.items() if at < step]:
            self._file(number).unlink(missing_ok=True)
            del self._trained[number]

    def state(self) -> dict[str, Any]:
        return {"tally": dict(self.tally.counts)}

    def restore(self, checkpoint: Checkpoint | None, step: int) -> None:
        """Take up before `step` what the journal says of earlier attempts."""
        if checkpoint is not None:
            self.tally.counts.update(checkpoint.state["pipeline"]["tally"])
        try:
            self._read(step)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{self.journal.folder / 'journal.jsonl'}: its lines about groups and batches do not fit together "
                f"({type(error).__name__}: {error}); restore the file, or start anew under another run.name"
            ) from error

    def _read(self, step: int) -> None:
        started: dict[int, Asked] = {}
        stored: dict[int, dict[str, Any]] = {}
        parts: dict[tuple[int, int], dict[str, Any]] = {}
        for event in self.journal.events:
            match event["event"]:
                case "started":
                    started |= {number: (number, level, index) for number, level, index in event["groups"]}
                case "answered":
                    stored[event["group"]] = event
                case "batch":
                    parts[event["step"], event["part"]] = event
                case "undone":  # an earlier resume could not repeat what was noted from there on
                    parts = {at: event_ for at, event_ in parts.items() if at[0] < event["step"]}
                    stored = {n: event_ for n, event_ in stored.items() if n not in event["groups"]}
        self._next = max(started, default=-1) + 1
        for _, level, index in started.values():
            self.trainer.curriculum.skip(level, index)
        used = {n: at for (at, _), event in parts.items() for n in (*event["groups"], *event["discarded"])}
        before = {n for n, at in used.items() if at < step}
        self._trained = {n: used[n] for n in before if self._file(n).exists()}
        parts = {at: event for at, event in parts.items() if at[0] >= step}
        needed = {n for event in parts.values() for n in event["groups"]}
        thrown = {n for event in parts.values() for n in event["discarded"]}
        here = {n: event for n, event in stored.items() if n in started and n not in before | thrown}
        whole = {n: e for n, e in here.items() if not payload.damaged(self._file(n), e["sha256"])}
        if needed - whole.keys():  # then later versions of the policy will be others than those that were noted
            whole = {n: event for n, event in whole.items() if event["version"] <= step}
            self.journal.write("undone", step=step, groups=[n for n in here if n not in whole])
            parts, thrown = {}, set[int]()
        for number, event in whole.items():
            [kept] = payload.read(self._file(number), event["sha256"], self.trainer.curriculum.task)
            self._outstanding[number] = InFlight.of(kept)
            self._answered[number] = None
        self._noted = {at: event["groups"] for at, event in parts.items()}
        self._lost = [asked for n, asked in started.items() if n not in before | thrown | whole.keys()]
        self.tally.counts["sampled"] = sum(event["answers"] for event in stored.values())
        self.tally.counts["sampled_tokens"] = sum(event["tokens"] for event in stored.values())
        self.tally.counts["discarded"] += len(thrown)

    def _file(self, number: int) -> Path:
        return self.journal.folder / "inflight" / f"group-{number:06d}.json"

    def finish(self) -> None:
        """No step will follow: groups under way are stopped, and answers that nothing will learn from are deleted."""
        self.close()
        for number in self._outstanding:
            self._file(number).unlink(missing_ok=True)
        self._outstanding.clear()
        self._answered.clear()

    def close(self) -> None:
        self._producer.close()
