"""Who has the cores: how many this process may use, and how torch and the sandbox's workers share them.

Torch's threads and the processes that verify run at the same time, since verification goes on beside sampling. Were
each to take all cores, they would take them from each other: torch waits in every operation for its slowest thread, and
an answer gets less of its time limit than on a quiet machine. So `split` gives each its own, once, before a run.

`quiet_threads` keeps torch's threads from spinning while they wait, which beside any other busy process costs far more
than that process's share. It has to be in the environment before torch's library is loaded.

Exercised by `tests/test_threads.py`. Left out on purpose: pinning to particular cores, which an operating system that
knows what else runs does better.
"""

from __future__ import annotations

import math
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Shares:
    """Torch's threads and the sandbox's workers, of `cores`. `beside`: they run at the same time."""

    cores: int
    threads: int
    workers: int
    beside: bool = False

    @property
    def crowd(self) -> str:
        """What to tell whoever asked for more than there is; one worker too many is had where torch takes all cores."""
        asked = self.threads + self.workers - 1 if self.beside else self.threads
        if asked <= self.cores:
            return ""
        beside = f" and {self.workers} sandbox workers (reward.kwargs.sandbox.workers)" if self.beside else ""
        cost = ", and an answer gets less of its time limit than alone" if self.beside else ""
        return (
            f"engine.threads={self.threads}{beside} share {self.cores} cores: torch's threads wait for each other"
            f"{cost}. Leave these settings out, or lower them"
        )

    def __str__(self) -> str:
        if not self.beside:
            return f"{self.threads} of {self.cores} for torch"
        workers = f"{self.workers} sandbox worker{'s' if self.workers > 1 else ''}"
        return f"{self.threads} of {self.cores} for torch, {workers} beside it"


def split(cores: int, threads: int = 0, workers: int = 0, *, beside: bool, device: bool = False) -> Shares:
    """Who gets how many of the cores; `threads` and `workers` are what the user asked for, 0 for nothing.

    What is asked for is given. Where one side is free it gets what the other leaves, at least one; where both are, half
    each, the odd one torch's. With an accelerator (`device`) torch needs one core to drive it. Where nothing is
    verified `beside` the sampling, each may have all of them.
    """
    if not beside:
        return Shares(cores, threads or cores, workers or cores)
    if not threads:
        threads = max(1, cores - workers) if workers and not device else 1 if device else (cores + 1) // 2
    return Shares(cores, threads, workers or max(1, cores - threads), True)


def cores(group: Path = CGROUP) -> int:
    """The cores that this process may use: of its affinity where the system has one (Linux), else all there are, and
    no more than its container's quota of processor time."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(found, quota(group))))


def quota(root: Path) -> float:
    """Cores' worth of processor time that a control group allows (version 2, then 1); infinite where it sets none."""
    with suppress(OSError, ValueError):
        allowed, period = (root / "cpu.max").read_text().split()
        return math.inf if allowed == "max" else int(allowed) / int(period)
    with suppress(OSError, ValueError):
        allowed, period = (int((root / "cpu" / f"cpu.cfs_{n}_us").read_text()) for n in ("quota", "period"))
        return math.inf if allowed <= 0 else allowed / period
    return math.inf


_workers = 0


def give_workers(count: int) -> None:
    """How many workers a sandbox has from now on that is not told."""
    global _workers
    _workers = count


def workers() -> int:
    """What a sandbox has that is not told: its share of the run at hand, else one per core."""
    return _workers or cores()


# --- threads that wait -------------------------------------------------------------------------------------------

# OpenMP's own setting, and what else says how long its threads spin (GNU's, and Intel's and LLVM's).
POLICY, OTHERS = "OMP_WAIT_POLICY", ("GOMP_SPINCOUNT", "KMP_BLOCKTIME")
SPINS = "4000"  # of GNU's runtime before a thread sleeps: about as long as the next operation is away
SPINS_UNASKED = "300000"  # what GNU's runtime does when nobody says
_late = False


def quiet_threads() -> None:
    """Have torch's threads soon sleep while they wait, unless the user has said how. Before torch is loaded.

    Not at once: a small model's operations follow each other so closely that waking up for each would cost a quarter.
    """
    global _late
    if not any(name in os.environ for name in (POLICY, *OTHERS)):
        _late = "torch" in sys.modules
        os.environ[POLICY], os.environ[OTHERS[0]] = "PASSIVE", SPINS


def loud_threads() -> None:
    """Take back what `quiet_threads` said, in a process that is to load torch as programs without us do."""
    if os.environ.get(POLICY) == "PASSIVE" and os.environ.get(OTHERS[0]) == SPINS:
        del os.environ[POLICY]
        os.environ[OTHERS[0]] = SPINS_UNASKED


def spinning() -> str:
    """What to tell a program that loaded torch before anybody could say how its threads wait."""
    if not _late:
        return ""
    return (
        "torch was loaded before rlvr, so its threads spin while they wait: beside any other busy process every "
        f"operation takes many times as long. Set {POLICY}=PASSIVE in the environment, or import rlvr.engine before "
        "torch"
    )
