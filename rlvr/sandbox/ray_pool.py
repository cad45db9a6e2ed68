"""Runs a sandbox's verifications on the machines of a Ray cluster, by the same interface as `WorkerPool`.

Each worker is an actor with one CPU and one worker of the sandbox (`rlvr.sandbox.ray_worker`). Programs wait here, in
the same fair queue as on one machine, and go out in small batches to whichever worker is free. The programs of a worker
that dies, is late or has a broken sandbox run again elsewhere, each alone. After `MOST_LOSSES` lost workers a program's
verdict is an `error`, which has no value: a machine's failure is never the program's. One thread keeps all of this
pool's state; the others send it events.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from rlvr.core.fair_queue import FairQueue, current_owner
from rlvr.core.ray_cluster import (
    RayError,
    check_same_code,
    count_free_cpus,
    describe_resources,
    join_cluster,
    wait_for_all,
)
from rlvr.core.types import Outcome
from rlvr.sandbox.ray_worker import SandboxWorker, decode_verdicts, encode_jobs
from rlvr.sandbox.supervisor import NoTier
from rlvr.sandbox.verdict import Limits, Verdict
from rlvr.sandbox.verification_job import Judgement, VerificationJob

BATCH = 8  # programs that a worker gets at once: a call costs as much as half a program
GRACE = 60.0  # seconds beyond six times its programs' limits that a worker may take for a batch
PROBE = 15.0  # seconds that an idle worker may take to answer
LOOK = 1.0  # seconds between checks of the deadlines
PAUSE = 5.0  # seconds until a worker that was lost at its start is requested again
MOST_LOSSES = 3


@dataclass(eq=False)
class RemoteVerification:
    """A verification that waits, or that runs on `worker`."""

    job: VerificationJob
    owner: str
    group: int
    future: Future[Verdict] = field(default_factory=Future[Verdict])
    worker: RemoteWorker | None = None
    losses: int = 0
    is_cancelled: bool = False


@dataclass(eq=False)
class RemoteWorker:
    """A place for an actor. `actor` None: it was lost and is requested again at `deadline`.

    `call` counts the calls, so that a late reply of an earlier actor is recognised. `deadline`: when a call is late;
    None while it waits for work. `is_running`: `batch` was sent.
    """

    actor: Any = None
    pid: int = 0
    call: int = 0
    deadline: float | None = None
    is_running: bool = False
    batch: list[RemoteVerification] = field(default_factory=list[RemoteVerification])


class RayPool:
    """At most `count` workers at `address` (None: one for each free CPU); RayError or NoTier if they do not start."""

    def __init__(
        self, address: str, count: int | None, limits: Limits, tiers: Sequence[str], allow_unsafe: bool, wait_s: float
    ) -> None:
        join_cluster(address)
        self.count = count or max(1, count_free_cpus())
        self._settings = json.dumps({"limits": asdict(limits), "tiers": list(tiers), "allow_unsafe": allow_unsafe})
        self._wait_s = wait_s
        self._process = os.getpid()
        self._lock = threading.RLock()  # submit and close: no event comes after the last
        self._waiting = FairQueue[RemoteVerification]()
        self._events = SimpleQueue[Callable[[], None]]()
        self.closed = False
        self._trouble = ""
        self._workers = [RemoteWorker(_new_actor()) for _ in range(self.count)]
        try:
            self.tier = self._start_all()
        except BaseException:
            for worker in self._workers:
                _kill(worker.actor)
            raise
        self._free = list(self._workers)
        self._last_worker = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="ray-sandbox", daemon=True)
        self._thread.start()

    def _start_all(self) -> str:
        """Start all workers, which must have the same code and the same tier; that tier."""
        request = f"{self.count} workers with 1 CPU each"
        actors = [worker.actor for worker in self._workers]
        described = [
            json.loads(data)
            for data in wait_for_all([actor.describe.remote() for actor in actors], self._wait_s, request)
        ]
        for worker, one in zip(self._workers, described, strict=True):
            check_same_code(one, one["machine"])
            worker.pid = one["pid"]
        settings = self._settings.encode()
        started = wait_for_all([actor.start.remote(settings) for actor in actors], self._wait_s, request)
        tiers: dict[str, str] = {}
        for one, data in zip(described, started, strict=True):
            tiers.setdefault(_read_tier(data, one["machine"]), one["machine"])
        if len(tiers) > 1:
            found = ", ".join(f"{tier} on {machine}" for tier, machine in tiers.items())
            raise RayError(
                f"the machines support different tiers: {found}; give tiers with one that works on all machines"
            )
        return next(iter(tiers))

    # --- called by any thread

    @property
    def running(self) -> int:
        return sum(len(worker.batch) for worker in self._workers)

    @property
    def pids(self) -> list[int]:
        """The workers' processes, each on its machine."""
        return [worker.pid for worker in self._workers if worker.actor is not None]

    def submit(self, jobs: Sequence[VerificationJob]) -> list[RemoteVerification]:
        """Queue the jobs of one call, for the current owner."""
        owner, start = current_owner(), time.perf_counter()
        queued: list[RemoteVerification] = []
        for job in jobs:
            one = RemoteVerification(job, owner, id(queued))
            if (refusal := job.refusal()) is not None:
                one.future.set_result(job.verdict(Judgement(job.all_failed(*refusal)), self.tier, start))
            queued.append(one)
        with self._lock:
            if self.closed:
                raise ValueError("this Sandbox is closed, or belongs to the process that forked this one: make another")
            self._events.put(partial(self._add, [one for one in queued if not one.future.done()]))
        return queued

    def cancel(self, verifications: Sequence[RemoteVerification]) -> None:
        """Drop those that wait, and kill those that run, whose verdicts are then errors. Does not wait for them."""
        self._events.put(partial(self._cancel, set(verifications)))

    def close(self) -> None:
        """End all workers; verifications that wait or run end with outcome `error`."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self.closed = True
            self._events.put(lambda: None)
        if self._thread is not threading.current_thread():  # garbage collection may finalize the sandbox on this thread
            self._thread.join()

    def renew(self) -> None:
        """In a forked copy of this process, which has neither the thread nor Ray's connections: refuse everything."""
        self._lock, self.closed = threading.RLock(), True

    # --- called by the pool's own thread

    def _run(self) -> None:
        try:
            self._serve()
            why = "the sandbox was closed"
        except Exception as error:  # Ray was shut down, say
            why = f"the connection to Ray ended: {error}"
        with self._lock:
            self.closed = True
        while not self._events.empty():
            self._events.get()()
        for worker in self._workers:
            _kill(worker.actor)
            for one in worker.batch:
                self._give_up(one, why)
        while (one := self._waiting.pop()) is not None:
            self._give_up(one, why)

    def _serve(self) -> None:
        next_look = 0.0
        while not self.closed:
            with suppress(Empty):
                self._events.get(timeout=LOOK)()
            if (now := time.monotonic()) >= next_look:
                self._check_deadlines(now)
                next_look = now + LOOK
            self._hand_out()

    def _add(self, verifications: Sequence[RemoteVerification]) -> None:
        for one in verifications:
            self._waiting.add(one.owner, one.group, one)

    def _cancel(self, chosen: set[RemoteVerification]) -> None:
        for one in self._waiting.remove(chosen.__contains__):
            one.future.cancel()
            self._give_up(one, "cancelled")
        for one in chosen:
            one.is_cancelled = True
        for worker in {one.worker for one in chosen if one.worker is not None}:
            batch = worker.call if worker.is_running else worker.call + 1  # the number that `_send` will give it
            worker.actor.cancel.remote(batch, [n for n, one in enumerate(worker.batch) if one in chosen])

    def _hand_out(self) -> None:
        """Give each free worker its share of what waits, and a program that was lost before to a worker of its own."""
        while self._free and self._waiting:
            size = max(1, min(BATCH, len(self._waiting) // (2 * self.count)))
            worker = self._free.pop()
            while len(worker.batch) < size and (one := self._waiting.pop()) is not None:
                if one.losses:
                    if worker.batch:
                        self._add([one])
                    else:
                        worker.batch.append(one)
                    break
                if one.future.set_running_or_notify_cancel():
                    worker.batch.append(one)
            for one in worker.batch:
                one.worker = worker
            if not worker.batch:
                self._free.append(worker)
            elif worker.batch[0].losses:  # only to one that is still there, so that a dead machine costs one loss
                self._call(worker, PROBE, self._send, worker.actor.describe.remote())
            else:
                self._send(worker)

    def _send(self, worker: RemoteWorker, _reply: bytes = b"") -> None:
        jobs = [one.job for one in worker.batch]
        worker.is_running = True
        seconds = GRACE + 6 * sum(job.seconds for job in jobs)
        self._call(worker, seconds, self._finish, worker.actor.verify.remote(worker.call + 1, encode_jobs(jobs)))

    def _call(
        self, worker: RemoteWorker, seconds: float, then: Callable[[RemoteWorker, bytes], None], ref: Any
    ) -> None:
        """Pass the reply to a call on to `then`; without a reply in `seconds` the worker is lost."""
        worker.call += 1
        worker.deadline = time.monotonic() + seconds
        number = worker.call

        def read(future: Future[bytes]) -> None:
            if worker.call != number:
                return
            worker.deadline = None
            try:
                then(worker, future.result())
            except Exception as error:
                self._lose(worker, f"{type(error).__name__}: {error}")

        ref.future().add_done_callback(lambda future: self._events.put(partial(read, future)))

    def _finish(self, worker: RemoteWorker, data: bytes) -> None:
        verdicts = list(zip(worker.batch, decode_verdicts(data, len(worker.batch)), strict=True))
        # An error is the machine's failure, and faster than a verdict: a broken machine would attract most programs.
        broken = {one: v.detail for one, v in verdicts if v.outcome is Outcome.ERROR and not one.is_cancelled}
        worker.batch = list(broken)
        for one, verdict in verdicts:
            if one not in broken:
                one.worker = None
                one.future.set_result(verdict)
        if broken:
            self._lose(worker, f"its sandbox failed: {next(iter(broken.values()))}")
        else:
            worker.is_running = False
            self._free.append(worker)

    def _lose(self, worker: RemoteWorker, why: str) -> None:
        """Give the programs of a lost worker to others, and ask for another worker."""
        _kill(worker.actor)
        batch, was_running = worker.batch, worker.is_running
        worker.batch, worker.is_running, worker.actor = [], False, None
        worker.call += 1
        worker.deadline = time.monotonic() + (0.0 if batch else PAUSE)
        self._trouble = why
        for one in batch:
            one.worker = None
            one.losses += was_running
            if one.is_cancelled:
                self._give_up(one, "cancelled")
            elif one.losses < MOST_LOSSES:
                self._add([one])
            else:
                self._give_up(one, f"{MOST_LOSSES} workers were lost while they ran it, the last one to: {why}")

    def _check_deadlines(self, now: float) -> None:
        for worker in self._workers:
            if worker.deadline is None or worker.deadline > now:
                continue
            if worker.actor is not None:
                self._lose(worker, "it was late" if worker.batch else f"it did not start ({describe_resources()})")
            else:
                worker.actor = _new_actor()
                self._call(worker, self._wait_s, self._start_worker, worker.actor.describe.remote())
        if self._free or any(worker.batch for worker in self._workers):
            self._last_worker = now
        elif now - self._last_worker > self._wait_s:
            while (one := self._waiting.pop()) is not None:
                self._give_up(one, f"no worker started within {self._wait_s:g} s: {self._trouble}")

    def _start_worker(self, worker: RemoteWorker, data: bytes) -> None:
        described = json.loads(data)
        check_same_code(described, described["machine"])
        worker.pid = described["pid"]
        started = worker.actor.start.remote(self._settings.encode())
        self._call(worker, self._wait_s, partial(self._accept, machine=described["machine"]), started)

    def _accept(self, worker: RemoteWorker, data: bytes, machine: str) -> None:
        if (tier := _read_tier(data, machine)) != self.tier:
            raise RayError(
                f"the worker on {machine} runs in the tier {tier}, the others in {self.tier}; give tiers with one that "
                "works on all machines"
            )
        self._free.append(worker)

    def _give_up(self, one: RemoteVerification, why: str) -> None:
        """Make its verdict an error, unless its future was cancelled."""
        # The future of a program that was handed out is already running.
        if one.future.running() or one.future.set_running_or_notify_cancel():
            one.future.set_result(one.job.error("sandbox", why, self.tier, time.perf_counter()))


def _new_actor() -> Any:
    import ray

    if not ray.is_initialized():  # or Ray would start another cluster now
        raise RayError("Ray was shut down in this process")
    return ray.remote(SandboxWorker).options(num_cpus=1, max_concurrency=2, max_restarts=0, max_task_retries=0).remote()


def _kill(actor: Any) -> None:
    import ray

    if actor is not None and ray.is_initialized():
        with suppress(Exception):
            ray.kill(actor)


def _read_tier(data: bytes, machine: str) -> str:
    reply = json.loads(data)
    if "refused" in reply:
        raise NoTier(f"on {machine} {reply['refused']}")
    return reply["tier"]
