"""Ray on this machine, for the tests of what runs on a cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest


@contextmanager
def open_cluster(cpus: int = 4, gpus: int = 0) -> Iterator[Any]:
    """The package ray, joined to a cluster of its own with so many CPUs and GPUs, whatever the machine has."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # listens on the loopback address alone
    ray = pytest.importorskip("ray")
    no_kills = {"memory_monitor_refresh_ms": 0}  # of workers, where other programs take the machine's memory
    options = {
        "num_cpus": cpus,
        "num_gpus": gpus,
        "include_dashboard": False,
        "log_to_driver": False,
        "logging_level": "ERROR",
    }
    for _ in range(2):
        with suppress(Exception):  # Ray gives itself 30 s to start
            ray.init("local", **options, _system_config=no_kills)
            break
        ray.shutdown()
    else:
        ray.init("local", **options, _system_config=no_kills)
    try:
        yield ray
    finally:
        ray.shutdown()
