"""The CPU budget: how many cores this process may use, and how torch and the sandbox's workers divide them.

Torch's threads and the sandbox's workers run at the same time, since completions are verified during sampling. If both
took all cores, torch would wait in every operation for its slowest thread, and a program under test would get less of
its time limit than on a quiet machine. So `split_cores` divides the cores once, before a run. A run without
`engine.threads` takes as many threads as OMP_NUM_THREADS says (`split_by_settings`).

`limit_spinning` makes torch's waiting threads sleep: spinning is faster on an idle machine and far slower beside a busy
process. It sets environment variables that torch's library reads when it is loaded. Left out on purpose: pinning to
cores, which the operating system does better.
"""

from __future__ import annotations

import math
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
SETTING, VARIABLE = "engine.threads", "OMP_NUM_THREADS"


@dataclass(frozen=True)
class CoreShares:
    """Torch's threads and the sandbox's workers out of `cores`. `concurrent`: they run at the same time.

    `given_by` is the setting that the number of threads comes from, if one does.
    """

    cores: int
    threads: int
    workers: int
    concurrent: bool = False
    given_by: str = field(default="", compare=False)

    @property
    def warning(self) -> str:
        """The warning for settings that need more cores than there are, else "". One core too many is tolerated."""
        if self.threads + (self.workers - 1 if self.concurrent else 0) <= self.cores:
            return ""
        workers = f" and {self.workers} sandbox workers (reward.kwargs.sandbox.workers)" if self.concurrent else ""
        cost = ", and an answer gets less of its time limit than alone" if self.concurrent else ""
        return (
            f"{self.given_by or SETTING}={self.threads}{workers} share {self.cores} cores: torch's threads wait for "
            f"each other{cost}. Leave these settings out, or lower them"
        )

    def __str__(self) -> str:
        workers = f", {self.workers} sandbox worker{'s' if self.workers > 1 else ''} beside it"
        origin = f" ({VARIABLE})" if self.given_by == VARIABLE else ""
        return f"{self.threads} of {self.cores} for torch{origin}{workers if self.concurrent else ''}"


def split_cores(
    cores: int, threads: int = 0, workers: int = 0, *, concurrent: bool, device: bool = False
) -> CoreShares:
    """Divide the cores. `threads` and `workers` are what the user set, 0 if nothing.

    A set value is kept. A side that is not set gets what the other leaves, at least one; if neither is set, each gets
    half, and torch the odd core. With an accelerator (`device`) torch needs one core. If the two are not `concurrent`,
    each may use all cores.
    """
    if not concurrent:
        return CoreShares(cores, threads or cores, workers or cores)
    if not threads:
        threads = max(1, cores - workers) if workers and not device else 1 if device else (cores + 1) // 2
    return CoreShares(cores, threads, workers or max(1, cores - threads), True)


def split_by_settings(
    cores: int, threads: int = 0, workers: int = 0, *, concurrent: bool, device: bool = False
) -> CoreShares:
    """`split_cores` by a run's own settings; where `threads` is 0, OMP_NUM_THREADS counts."""
    asked = threads or read_thread_variable()
    shares = split_cores(cores, asked, workers, concurrent=concurrent, device=device)
    return replace(shares, given_by=SETTING if threads else VARIABLE if asked else "")


def read_thread_variable() -> int:
    """The number of threads in OMP_NUM_THREADS, of a list (for nested parallelism) the first; 0 without one."""
    first = os.environ.get(VARIABLE, "").partition(",")[0].strip()
    return int(first) if first.isdecimal() else 0


def available_cores(group: Path = CGROUP) -> int:
    """The cores that this process may use: its affinity (Linux) or all cores, up to its container's CPU quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(count, cpu_quota(group))))


def cpu_quota(root: Path) -> float:
    """The CPU quota of a control group (version 2, then 1) in cores; infinite if it sets none."""
    with suppress(OSError, ValueError):
        allowed, period = (root / "cpu.max").read_text().split()
        return math.inf if allowed == "max" else int(allowed) / int(period)
    with suppress(OSError, ValueError):
        allowed, period = (int((root / "cpu" / f"cpu.cfs_{n}_us").read_text()) for n in ("quota", "period"))
        return math.inf if allowed <= 0 else allowed / period
    return math.inf


_workers = 0


def set_default_workers(count: int) -> None:
    """Set how many workers a sandbox gets by default."""
    global _workers
    _workers = count


def default_workers() -> int:
    """The default number of a sandbox's workers: the share of the current run, else one per core."""
    return _workers or available_cores()


# How long waiting threads spin: OpenMP's own setting, then GNU's, and Intel's and LLVM's.
POLICY, OTHERS = "OMP_WAIT_POLICY", ("GOMP_SPINCOUNT", "KMP_BLOCKTIME")
SPINS = "4000"  # before a thread of GNU's runtime sleeps: about the time to the next operation
DEFAULT_SPINS = "300000"  # of GNU's runtime
_late = False


def limit_spinning() -> None:
    """Make torch's waiting threads sleep soon, unless the user configured them. Call it before torch is loaded.

    They do not sleep at once: a small model's operations follow so closely that waking up for each costs a quarter.
    """
    global _late
    if not any(name in os.environ for name in (POLICY, *OTHERS)):
        _late = "torch" in sys.modules
        os.environ[POLICY], os.environ[OTHERS[0]] = "PASSIVE", SPINS


def restore_spinning() -> None:
    """Undo `limit_spinning`, in a process that should load torch as programs without rlvr do."""
    if os.environ.get(POLICY) == "PASSIVE" and os.environ.get(OTHERS[0]) == SPINS:
        del os.environ[POLICY]
        os.environ[OTHERS[0]] = DEFAULT_SPINS


def spinning_warning() -> str:
    """The warning for a program that loaded torch before `limit_spinning`, else ""."""
    if not _late:
        return ""
    return (
        "torch was loaded before rlvr, so its threads spin while they wait: beside any other busy process every "
        f"operation takes many times as long. Set {POLICY}=PASSIVE in the environment, or import rlvr.engine before "
        "torch"
    )
