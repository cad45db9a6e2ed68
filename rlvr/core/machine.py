"""The machine and the versions of code that figures depend on, as runs, studies and benchmarks store them.

Processes and runs compare the versions: those of other machines must have the same, and a resume by other code warns.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import rlvr
from rlvr.core.cpu_budget import CGROUP, available_cores


def describe_machine(packages: Sequence[str]) -> dict[str, Any]:
    """Processor, cores of this process, memory, system, Python, and the versions of the `packages` that are installed.

    `packages` are names of distributions.
    """
    return {
        "cpu": describe_processor(),
        "cores": available_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: found for name in packages if (found := _find_version(name))},
    }


def total_memory() -> int:
    """The memory of this machine, or the limit of its control group, in bytes; 0 if unknown."""
    total = 0
    with suppress(AttributeError, ValueError, OSError):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in (CGROUP / "memory.max", CGROUP / "memory" / "memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            return min(total, int(limit.read_text()))
    return total


def free_memory() -> int:
    """Free bytes of this machine, or of its control group."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    with suppress(OSError, ValueError):
        found.append(int((CGROUP / "memory.max").read_text()))
    return max(0, min(found))


def describe_processor() -> str:
    """The processor's model, as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def describe_code(*packages: str) -> dict[str, str]:
    """The versions of Python, of this package with a hash of its files, and of other `packages` by name."""
    versions = {"python": platform.python_version(), "rlvr": f"{rlvr.__version__} ({hash_package()})"}
    return versions | {name: _find_version(name) or "(not installed)" for name in packages}


def _find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def hash_package() -> str:
    """A short hash of the package's Python files, names and contents."""
    root, digest = Path(rlvr.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
