"""The actor of a sandbox on Ray, with one worker of the sandbox, and the encoding of jobs and verdicts.

Jobs and verdicts travel as JSON, so nothing that a program made is ever unpickled. The program itself is as isolated as
on one machine: the actor is the trusted supervisor. `rlvr.sandbox.ray_pool` is the caller's side.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError
from dataclasses import asdict

from rlvr.core.machine import describe_code
from rlvr.core.types import Outcome
from rlvr.sandbox.supervisor import NoTier, Sandbox
from rlvr.sandbox.verdict import Limits, TestResult, Verdict
from rlvr.sandbox.verification_job import VerificationJob
from rlvr.sandbox.worker_pool import QueuedVerification


def encode_jobs(jobs: Sequence[VerificationJob]) -> bytes:
    return json.dumps([job.arguments() for job in jobs]).encode()


def decode_jobs(data: bytes, limits: Limits) -> list[VerificationJob]:
    return [VerificationJob(limits, **arguments) for arguments in json.loads(data)]


def encode_verdicts(verdicts: Sequence[Verdict]) -> bytes:
    return json.dumps([asdict(verdict) for verdict in verdicts]).encode()


def decode_verdicts(data: bytes, count: int) -> list[Verdict]:
    """The verdicts of `count` jobs; ValueError, KeyError or TypeError for anything else."""
    rows = json.loads(data)
    if len(rows) != count:
        raise ValueError(f"{len(rows)} verdicts came back for {count} jobs")
    return [
        Verdict(
            **row | {"outcome": Outcome(row["outcome"]), "tests": tuple(TestResult(**test) for test in row["tests"])}
        )
        for row in rows
    ]


class SandboxWorker:
    """A Ray actor. First `describe`, whose answer has the same form in all versions of rlvr, then `start` is called."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batch = -1
        self._queued: list[QueuedVerification] = []
        self._cancelled: dict[int, list[int]] = {}  # by batch: calls overtake each other on their way here

    def describe(self) -> bytes:
        return json.dumps({"machine": platform.node(), "pid": os.getpid(), **describe_code()}).encode()

    def start(self, settings: bytes) -> bytes:
        """Start the sandbox: its tier, or why none works on this machine."""
        options = json.loads(settings)
        self._limits = Limits(**options.pop("limits"))
        try:
            self._sandbox = Sandbox(workers=1, limits=self._limits, **options)
            self._pool = self._sandbox._pool
        except NoTier as refusal:
            return json.dumps({"refused": str(refusal)}).encode()
        return json.dumps({"tier": self._sandbox.tier}).encode()

    def verify(self, batch: int, jobs: bytes) -> bytes:
        """The verdicts of a batch of jobs, judged one after the other."""
        with self._lock:
            self._queued = self._pool.submit(decode_jobs(jobs, self._limits))
            self._batch = batch
            self._pool.cancel([self._queued[index] for index in self._cancelled.pop(batch, ())])
        return encode_verdicts([self._wait(one) for one in self._queued])

    def cancel(self, batch: int, indices: Sequence[int]) -> None:
        """Kill or drop jobs of the batch at hand; their verdicts are then errors, which the caller drops."""
        with self._lock:
            if batch == self._batch:
                self._pool.cancel([self._queued[index] for index in indices])
            elif batch > self._batch:
                self._cancelled.setdefault(batch, []).extend(indices)

    def _wait(self, one: QueuedVerification) -> Verdict:
        try:
            return one.future.result()
        except CancelledError:
            return one.job.error("sandbox", "cancelled", self._sandbox.tier, time.perf_counter())
