"""The one thread that computes on an engine: training requests in their order, sampling between them.

Owners with a request that may run take turns, and so do the lanes (training runs) of each; a turn is one request, which
holds at most what one message may (the SDK splits at 1,024 rows or 5 MB). What is to be sampled waits in a line of its
own (`line.py`) until the engine has room, of which one owner gets a `share`. While somebody samples too, both kinds
get the same share of the time: after each micro-batch of a training request sampling goes on for as long as that took,
and so it does after a request of another kind, `SHARE` seconds at most.

The thread never dies of a request: whatever one raises is that one's answer.
Exercised by tests/test_tinker_core.py, tests/test_tinker_core_sampling.py and tests/test_tinker_attacks.py.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter, defaultdict, deque
from typing import TYPE_CHECKING, Any

from rlvr.messages import NonFiniteError
from rlvr.service.tinker_api.limits import ServerLimits
from rlvr.service.tinker_api.line import Line, Sampling
from rlvr.service.tinker_api.policies import Lane, Policies
from rlvr.service.tinker_api.promises import Failed, Outcome, Promise, Promises, Proto
from rlvr.service.tinker_api.samplers import Samplers
from rlvr.service.tinker_api.training import Training, blamed
from rlvr.service.tinker_api.wire import encode_samples

if TYPE_CHECKING:
    from rlvr.engine.engine import Engine

log = logging.getLogger(__name__)
SHARE = 1.0  # seconds
TIDY = 5.0  # seconds between looks for idle adapters


def share(places: int) -> int:
    """What one owner may take of the rows, or of the weights in memory: the rest is for whoever comes next."""
    return places - places // 4


class Worker:
    def __init__(
        self,
        engine: Engine,
        training: Training,
        policies: Policies,
        samplers: Samplers,
        promises: Promises,
        limits: ServerLimits,
    ) -> None:
        self._engine, self._training, self._policies = engine, training, policies
        self._samplers, self._promises, self._limits = samplers, promises, limits
        self._wake = threading.Condition()
        self._ready: deque[Lane] = deque()  # lanes whose next request is there, in turn
        self._turns: dict[str, int] = {}  # owner -> when a request of theirs trained last
        self._count = itertools.count(1)
        self._arrived = Line()
        self._cancelled: deque[Promise] = deque()
        self._gaps: dict[str, Lane] = {}  # lanes that wait for a missing seq_id
        self._pause = min(TIDY, limits.gap_seconds / 4)
        self._running: dict[Any, Sampling] = {}  # by the engine's request
        self._trained, self._given = 0.0, 0.0  # since when a request trains; what sampling got meanwhile, in seconds
        self._stopping = False
        training.between = self._between
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the request that runs. What waits stays in the log; samples are asked for again (`Gone`) later."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def ready(self, lane: Lane) -> None:
        """The lane has a request that may run now."""
        with self._wake:
            if lane not in self._ready:
                self._ready.append(lane)
                self._wake.notify()

    def sample(self, sampling: Sampling) -> None:
        with self._wake:
            self._arrived.add(sampling)
            self._wake.notify()

    def cancel(self, promise: Promise) -> None:
        with self._wake:
            self._cancelled.append(promise)
            self._wake.notify()

    def _work(self) -> None:
        owed, tidied = 0.0, time.monotonic()  # seconds of sampling before the next training request
        while True:
            with self._wake:
                while not (self._stopping or self._ready or self._arrived or self._cancelled or self._running):
                    if not self._wake.wait(timeout=self._pause):
                        break
                if self._stopping:
                    break
                lane = self._next_lane() if self._ready and (owed <= 0 or not self._sampling) else None
            try:
                self._cancel()
                self._admit()
                if lane is not None:
                    owed = min(self._train(lane), SHARE)
                if self._running:
                    owed -= self._advance()
                if time.monotonic() - tidied > self._pause:
                    tidied = time.monotonic()
                    self._close_gaps()
                    if not self._running and lane is None:
                        self._engine.release()
                    self._policies.tidy(tidied - self._limits.idle_seconds)
            except Exception:
                log.exception("the engine's thread goes on after an error outside any request")

    @property
    def _sampling(self) -> bool:
        return bool(self._arrived or self._running)

    def _next_lane(self) -> Lane:
        """The first lane of the owner whose last turn was longest ago."""
        lane = min(self._ready, key=lambda lane: self._turns.get(lane.owner, 0))
        self._ready.remove(lane)
        self._turns[lane.owner] = next(self._count)
        return lane

    def _train(self, lane: Lane) -> float:
        with lane.lock:
            if not lane.ready:
                if lane.queue:
                    self._gaps[lane.model] = lane
                return 0.0
        self._trained, self._given = time.monotonic(), 0.0
        took = self._training.step(lane)
        self.ready(lane)  # to take its next turn, or to be watched for what it waits for
        return took - 2 * self._given

    def _between(self) -> None:
        """After a micro-batch: as much time for those who sample."""
        earned, given = time.monotonic() - self._trained, 0.0
        self._cancel()
        self._admit()
        while self._running and given < earned and not self._stopping:
            given += self._advance()
        self._given += given
        self._trained = time.monotonic()

    def _close_gaps(self) -> None:
        """Fail what has waited too long for a seq_id before it, and say which one is missing."""
        now = time.monotonic()
        for lane in list(self._gaps.values()):
            with lane.lock:
                if lane.ready or not lane.queue:
                    del self._gaps[lane.model]
                    continue
                since = now - self._limits.gap_seconds
                late = [(n, w) for n, w in lane.queue.items() if max(w.since, lane.used) < since]
            for seq, waiting in sorted(late, key=lambda pair: pair[0]):
                missing = (
                    f"request {seq} waited {self._limits.gap_seconds:g} s for seq_id {lane.next_seq}, which never "
                    "came, and requests run strictly in order. Go on from the last checkpoint with a new client"
                )
                self._training.finish(lane, seq, waiting, Failed(missing, "user"))

    def _admit(self) -> None:
        """Hand what has arrived to the engine, as far as it has room; the engine checks and queues it."""
        if not self._arrived:
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

        def fits(sampling: Sampling) -> bool:
            reach = min(context, sampling.prompt.length + (sampling.params.max_tokens or context))
            places = limits.cache_tokens // max(reach, longest, 1) if limits.cache_tokens else limits.max_rows
            most_rows, own = max(1, min(limits.max_rows, places)), weights[sampling.owner] | {sampling.weights}
            if rows.total() >= most_rows or len(own.union(*weights.values())) > most_weights:
                return False
            if not rows[sampling.owner]:  # one request at a time always may
                return True
            return rows[sampling.owner] + sampling.count <= share(most_rows) and len(own) <= share(most_weights)

        while True:
            with self._wake:
                sampling = self._arrived.take(fits)
            if sampling is None:
                return
            try:
                snapshot = self._samplers.snapshot(sampling.sampler, self._engine)
                request = self._engine.enqueue(
                    snapshot, sampling.prompt, sampling.count, sampling.params, **sampling.wants
                )
            except Exception as error:
                failed, ours = blamed(error)
                if ours:
                    log.exception("%s failed", sampling.promise.request_id)
                self._end(sampling, failed)
                continue
            self._running[request] = sampling
            rows[sampling.owner] += min(sampling.count, request_rows)
            weights[sampling.owner].add(sampling.weights)
            longest = max(longest, request.reach)

    def _advance(self) -> float:
        begun = time.monotonic()
        try:
            ended = self._engine.advance()
        except Exception as error:  # not one request's fault, or the engine would have said so: all that ran failed
            log.exception("sampling failed")
            told = Failed(blamed(error)[0].error, "server")
            for request in list(self._running):
                self._engine.cancel(request)
                self._end(self._running.pop(request), told)
            return time.monotonic() - begun
        for request in ended:
            if (sampling := self._running.pop(request, None)) is None:
                continue
            outcome: Outcome
            try:
                if request.error is not None:
                    raise request.error
                outcome = Proto(encode_samples(request.response()))
            except Exception as error:
                outcome, _ = blamed(error)
                if not isinstance(error, NonFiniteError):  # what a request has wrong is found when it is queued
                    outcome = Failed(outcome.error, "server")
            self._end(sampling, outcome)
        return time.monotonic() - begun

    def _cancel(self) -> None:
        with self._wake:
            if not self._cancelled:
                return
            given_up = set(self._cancelled)
            self._cancelled.clear()
            early = self._arrived.remove(given_up)
        for request in [r for r, s in self._running.items() if s.promise in given_up]:
            self._engine.cancel(request)
            early.append(self._running.pop(request))
        for sampling in early:
            self._end(sampling, Failed("cancelled by its client", "user"))

    def _end(self, sampling: Sampling, outcome: Outcome) -> None:
        sampling.over()
        self._promises.resolve(sampling.promise, outcome)
