"""The one thread that computes on an engine: training requests in order, sampling between them.

Owners take turns by the seconds that they used (`owner_clock.py`), and the training runs of each owner one after the
other. A turn is one request, which holds at most one message (the SDK splits at 1,024 rows or 5 MB), or one step of
sampling, which is shared with owners whose rows make it little longer. After each micro-batch of a training request the
owner who used less goes first: sampling, or another owner's training request, which changes no bit of this one. An
owner's own training and sampling get equal time, with leads of `sampling_seconds` at most. Sampling requests wait in a
fair queue (`rlvr.core.fair_queue`) until the engine has room; one owner gets at most its `owner_share`.

An exception never ends the thread: it becomes the result of the request that raised it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlvr.core.fair_queue import FairQueue
from rlvr.core.messages import ModelInput, NonFiniteError, SampleResponse, SamplingParams
from rlvr.tinker_server.backend.request_futures import FutureRegistry, LiveOutcome, RequestFailure, ResultFuture
from rlvr.tinker_server.backend.runs.adapter_cache import AdapterCache, RunQueue
from rlvr.tinker_server.backend.runs.executor import EngineCounters, RunExecutor, classify_error
from rlvr.tinker_server.backend.runs.owner_clock import GRACE_SECONDS, OwnerClock, StepTimes
from rlvr.tinker_server.backend.storage.sampling_sessions import SamplingSessions
from rlvr.tinker_server.backend.storage.server_store import Row
from rlvr.tinker_server.protocol.server_limits import ServerLimits

if TYPE_CHECKING:
    from rlvr.engine.engine import Engine

log = logging.getLogger(__name__)
MOST_NESTED = 8  # training requests that wait between two micro-batches
IDLE_CHECK_SECONDS = 5.0  # between searches for idle adapters


@dataclass(eq=False)
class QueuedSample:
    """One sampling request; `options` are those of `Engine.enqueue`. `encode` makes its outcome."""

    future: ResultFuture
    sampler: Row
    prompt: ModelInput
    count: int
    params: SamplingParams
    options: dict[str, Any]
    release_quota: Callable[[], None]
    encode: Callable[[SampleResponse], LiveOutcome]

    @property
    def owner(self) -> str:
        return self.future.owner

    @property
    def weights(self) -> tuple[Any, ...]:
        """Equal for requests that sample from the same weights."""
        return tuple(self.sampler[name] for name in ("base_model", "path", "folder", "number"))


@dataclass(frozen=True)
class EngineState:
    """An engine at one moment; `model` is what it serves, by the names that clients use."""

    model: str
    alive: bool
    queued_training: int
    queued_samples: int
    running_samples: int
    adapters: int
    counters: EngineCounters


def owner_places(places: int, share: float) -> int:
    """How many of the rows, or of the weights in memory, one owner may use; the rest is for other owners."""
    return places - int(places * (1 - share))


class EngineThread:
    def __init__(
        self,
        engine: Engine,
        executor: RunExecutor,
        adapters: AdapterCache,
        sampling_sessions: SamplingSessions,
        futures: FutureRegistry,
        limits: ServerLimits,
    ) -> None:
        self._engine, self._executor, self._adapters = engine, executor, adapters
        self._sampling_sessions, self._futures, self._limits = sampling_sessions, futures, limits
        self._wake = threading.Condition()
        self._ready_runs: deque[RunQueue] = deque()  # whose next request has arrived
        self._clock, self._step_times = OwnerClock(limits.sampling_seconds), StepTimes()
        self._training: list[RunQueue] = []  # whose requests run: each but the last waits between two micro-batches
        self._samples = FairQueue[QueuedSample]()
        self._cancelled: deque[ResultFuture] = deque()
        self._deleted: deque[RunQueue] = deque()
        self._gaps: dict[str, RunQueue] = {}  # runs that wait for a missing seq_id
        self._pause = min(IDLE_CHECK_SECONDS, limits.gap_seconds / 4)
        self._running: dict[Any, QueuedSample] = {}  # by the engine's request
        self._stopping = False
        executor.worker.between_micro_batches = self._between
        self.counters = executor.counters
        self._thread = threading.Thread(target=self._serve_requests, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the current request. Waiting requests stay in the log; clients send samples again (`GoneError`)."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def describe_state(self, model: str, queued_training: int) -> EngineState:
        with self._wake:
            queued, running = len(self._samples), len(self._running)
        return EngineState(model, self.is_alive, queued_training, queued, running, len(self._adapters), self.counters)

    def schedule(self, run: RunQueue) -> None:
        """Tell the thread that the run's next request can be executed."""
        with self._wake:
            if run not in self._ready_runs:
                self._ready_runs.append(run)
                self._wake.notify()

    def sample(self, sampling: QueuedSample) -> None:
        with self._wake:
            self._samples.add(sampling.owner, sampling.future.session, sampling)
            self._wake.notify()

    def cancel(self, future: ResultFuture) -> None:
        with self._wake:
            self._cancelled.append(future)
            self._wake.notify()

    def delete(self, run: RunQueue) -> None:
        """Delete a run that waits for nothing: its adapter and what it has on the disk."""
        with self._wake:
            self._deleted.append(run)
            self._wake.notify()

    def _delete_runs(self) -> None:
        while self._deleted:
            run = self._deleted.popleft()
            self._adapters.forget(run)
            self._executor.remove_run_state(run.model)

    def _serve_requests(self) -> None:
        checked_at = time.monotonic()
        while True:
            with self._wake:
                while not (self._stopping or self._deleted or self._ready_runs or self._cancelled or self._sampling):
                    if not self._wake.wait(timeout=self._pause):
                        break
                if self._stopping:
                    break
            try:
                self._delete_runs()
                is_busy = self._take_turn()
                if time.monotonic() - checked_at > self._pause:
                    checked_at = time.monotonic()
                    self._close_gaps()
                    if not self._running and not is_busy:
                        self._engine.release()
                    self._adapters.evict_idle(checked_at - self._limits.idle_seconds)
            except Exception:
                log.exception("the engine's thread goes on after an error outside any request")

    @property
    def _sampling(self) -> bool:
        return bool(self._samples or self._running)

    def _take_turn(self, *, before: str | None = None) -> bool:
        """Run one training request, or one step of sampling, of the owner whose turn it is; with `before`, only if it
        comes before this owner, whose training request waits meanwhile. Returns whether anything ran."""
        self._cancel_samples()
        self._admit()
        waiting = {run.owner for run in self._training}
        with self._wake:
            ready = {run.owner for run in self._ready_runs} - waiting
            sampling = {one.owner for one in self._running.values()} | (
                {*self._samples.owners} if self._running else set()
            )
        if waiting and (self._engine.trainers is not None or len(self._training) >= MOST_NESTED):
            ready = set()
        self._clock.see(ready | sampling | waiting)
        trainer, sampler = self._clock.first(ready), self._clock.first(sampling)
        if before is not None:
            if trainer is not None and self._clock.seconds_of(trainer) >= self._clock.seconds_of(before):
                trainer = None
            if not self._clock.is_sampling_next(before, sampler):
                sampler = None
        is_sampling = sampler is not None and self._clock.is_sampling_next(trainer, sampler)
        next_owner = sampler if is_sampling else trainer or before
        awaited = next_owner and self._clock.find_awaited(next_owner, ready | sampling | waiting)
        if sampler is not None and (self._is_step_short(sampler) if awaited else is_sampling):
            self._advance()
        elif awaited:
            self._wait_for(*awaited)
        elif trainer is not None:
            self._train(self._next_run(trainer))
        else:
            return False
        return True

    def _wait_for(self, owner: str, seconds: float) -> None:
        """Wait for an owner's next request, or for any other."""
        self._clock.start()
        with self._wake:
            if not self._stopping:
                self._wake.wait(seconds)
        self._clock.charge_waiting(owner)

    def _next_run(self, owner: str) -> RunQueue:
        """The first of the owner's runs that can go on."""
        with self._wake:
            run = next(run for run in self._ready_runs if run.owner == owner)
            self._ready_runs.remove(run)
            return run

    def _train(self, run: RunQueue) -> None:
        with run.lock:
            if not run.is_ready:
                if run.queue:
                    self._gaps[run.model] = run
                return
        self._clock.start()
        self._training.append(run)
        try:
            self._executor.run_next(run)
        finally:
            self._training.pop()
            self._clock.charge_training(run.owner)
        self.schedule(run)  # to take its next turn, or to be watched for what it waits for

    def _between(self) -> None:
        """After a micro-batch: the turns of those who used less than its owner, who is charged for it first."""
        owner, paused = self._training[-1].owner, self._executor.paused_seconds
        self._clock.charge_training(owner)
        begun = time.monotonic()
        while not self._stopping and self._take_turn(before=owner):
            pass
        self._executor.paused_seconds = paused + time.monotonic() - begun
        self._clock.start()

    def _close_gaps(self) -> None:
        """Fail requests that waited too long for an earlier seq_id, and name the missing one."""
        now = time.monotonic()
        for run in list(self._gaps.values()):
            with run.lock:
                if run.is_ready or not run.queue:
                    del self._gaps[run.model]
                    continue
                since = now - self._limits.gap_seconds
                late = [(n, w) for n, w in run.queue.items() if max(w.queued_at, run.last_used) < since]
            for seq, waiting in sorted(late, key=lambda pair: pair[0]):
                missing = (
                    f"request {seq} waited {self._limits.gap_seconds:g} s for seq_id {run.next_seq}, which never "
                    "came, and requests run strictly in order. Go on from the last checkpoint with a new client"
                )
                self._executor.finish(run, seq, waiting, RequestFailure(missing, "user"))

    def _admit(self) -> None:
        """Pass queued samples to the engine as far as it has room; the engine checks and schedules them."""
        if not self._samples:
            return
        limits, context = self._engine.limits, self._engine.model.context
        most_weights, longest = self._limits.loaded_samplers, 0
        request_rows = max(1, int(limits.max_rows * limits.one_request))
        rows: Counter[str] = Counter()  # by owner, what is not finished
        weights: defaultdict[str, set[Any]] = defaultdict(set)
        for request, sampling in self._running.items():
            rows[sampling.owner] += min(sampling.count - len(request.finished), request_rows)
            weights[sampling.owner].add(sampling.weights)
            longest = max(longest, request.reach)

        def fits(sampling: QueuedSample) -> bool:
            reach = min(context, sampling.prompt.length + (sampling.params.max_tokens or context))
            places = limits.cache_tokens // max(reach, longest, 1) if limits.cache_tokens else limits.max_rows
            most_rows, own = max(1, min(limits.max_rows, places)), weights[sampling.owner] | {sampling.weights}
            if len(own.union(*weights.values())) > most_weights:
                return False
            if not rows[sampling.owner]:  # one request at a time is always admitted: it gets the next row that is free
                return True
            if rows.total() >= most_rows:
                return False
            share = self._limits.owner_share
            own_rows, own_weights = rows[sampling.owner] + sampling.count, len(own)
            return own_rows <= owner_places(most_rows, share) and own_weights <= owner_places(most_weights, share)

        while True:
            with self._wake:
                sampling = self._samples.pop(fits)
            if sampling is None:
                return
            try:
                snapshot = self._sampling_sessions.load(sampling.sampler, self._engine)
                request = self._engine.enqueue(
                    snapshot, sampling.prompt, sampling.count, sampling.params, **sampling.options
                )
            except Exception as error:
                failure, is_ours = classify_error(error)
                if is_ours:
                    log.exception("%s failed", sampling.future.request_id)
                self._end(sampling, failure)
                continue
            self._running[request] = sampling
            rows[sampling.owner] += min(sampling.count, request_rows)
            weights[sampling.owner].add(sampling.weights)
            longest = max(longest, request.reach)

    def _count_rows(self) -> Counter[str]:
        """The rows of each owner whose requests the engine samples."""
        rows = Counter[str]()
        for request, sampling in self._running.items():
            rows[sampling.owner] += max(1, sampling.count - len(request.finished))
        return rows

    def _is_step_short(self, owner: str) -> bool:
        """Whether a step of the owner's rows takes no longer than others are waited for."""
        return (self._step_times.estimate(self._count_rows()[owner]) or 0.0) <= GRACE_SECONDS

    def _advance(self) -> None:
        """Sample one step for the owner who used least, and those whom it can share it with; charge their rows."""
        running, counts = dict(self._running), self._count_rows()
        rows = {owner: counts[owner] for owner in sorted(counts, key=self._clock.seconds_of)}
        chosen = self._step_times.choose_owners(rows)
        self._clock.start()
        self._sample_step(chosen)
        if not any(request.started for request, sampling in running.items() if sampling.owner in chosen):
            chosen = set(rows)  # there is no room for theirs before others end
        stepped = {owner: rows[owner] for owner in chosen}
        seconds = self._clock.charge_sampling(stepped)
        self._step_times.add(sum(stepped.values()), seconds)
        self.counters.sampling_seconds += seconds

    def _sample_step(self, owners: Collection[str]) -> None:
        try:
            ended = self._engine.advance(lambda request: self._running[request].owner in owners)
        except Exception as error:  # the fault of no single request, which the engine would have named
            log.exception("sampling failed")
            failure = RequestFailure(classify_error(error)[0].error, "server")
            for request in list(self._running):
                self._engine.cancel(request)
                self._end(self._running.pop(request), failure)
            return
        for request in ended:
            if (sampling := self._running.pop(request, None)) is None:
                continue
            outcome: LiveOutcome
            try:
                if request.error is not None:
                    raise request.error
                response = request.response()
                self.counters.sampled_tokens += sum(len(sequence.tokens) for sequence in response.sequences)
                outcome = sampling.encode(response)
            except Exception as error:
                outcome, _ = classify_error(error)
                if not isinstance(error, NonFiniteError):  # mistakes of a request are found when it is queued
                    outcome = RequestFailure(outcome.error, "server")
            self._end(sampling, outcome)

    def _cancel_samples(self) -> None:
        """End the samples, queued or running, that their clients cancelled."""
        with self._wake:
            if not self._cancelled:
                return
            cancelled = set(self._cancelled)
            self._cancelled.clear()
            early = self._samples.remove(lambda sampling: sampling.future in cancelled)
        for request in [r for r, s in self._running.items() if s.future in cancelled]:
            self._engine.cancel(request)
            early.append(self._running.pop(request))
        for sampling in early:
            self._end(sampling, RequestFailure("cancelled by its client", "user"))

    def _end(self, sampling: QueuedSample, outcome: LiveOutcome) -> None:
        sampling.release_quota()
        self._futures.resolve(sampling.future, outcome)
