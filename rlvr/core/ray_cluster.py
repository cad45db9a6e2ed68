"""Join a Ray cluster, wait for its actors with a deadline, and check that they run the same code.

    join_cluster("auto")                                  # the one that `ray start` made; or "local", for one of ours
    actors = [ray.remote(Mine).options(num_cpus=1).remote() for _ in range(8)]
    wait_for_all([actor.describe.remote() for actor in actors], 60, "8 workers with 1 CPU each")

Ray waits forever for resources that a cluster does not have; `wait_for_all` says what is missing. Ray moves pickles
between its processes: a cluster's machines have to trust each other, and no other machine may reach them. Left out on
purpose: starting Ray on other machines, which `ray start` and KubeRay do.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rlvr.core.cpu_budget import available_cores
from rlvr.core.machine import describe_code

# Ray's own switch between clusters and one machine: it is meant for other systems, and holds for all.
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
INSTALL = "pip install 'rlvr[ray]'"
LOCAL = "local"
AUTO = "auto"  # the cluster of this machine, or that of RAY_ADDRESS
_joined = ""  # the address by which this process has joined


class RayError(RuntimeError):
    """The Ray cluster is not there, lacks resources, or runs other code; the message says which."""


def join_cluster(address: str) -> None:
    """Join the cluster at `address` (`auto` or `host:port`), or start one on this machine alone (`local`).

    A process can join only one cluster: the one it has joined already is used, and RayError is raised if `address` is
    another. A `local` cluster listens on the loopback address and ends with this process.
    """
    global _joined
    if address == LOCAL:
        os.environ.setdefault(_LOOPBACK, "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # as our processes without Ray; Ray's own default is 15
    try:
        import ray
    except ImportError as error:
        raise RayError(f"ray={address}: the package ray is not installed: {INSTALL}") from error
    if ray.is_initialized():
        _check_joined(address)
        return
    try:
        if address == LOCAL:
            if os.environ[_LOOPBACK] == "0":  # Ray reads it when it is imported, which other code may have done
                from ray._private import ray_constants

                ray_constants.ENABLE_RAY_CLUSTER = False
            ray.init(
                LOCAL,
                num_cpus=available_cores(),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        else:
            check_address(address)
            _try_to_reach(address if address != AUTO else _find_cluster())
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray has no class of its own for it: another version, or a start that took too long
        raise RayError(
            f"ray={address}: no cluster could be joined: {str(error).rstrip('.')}. Start one with `ray start --head`, "
            "join it on this machine with `ray start --address=HOST:PORT`, or give ray=local for one on this machine "
            "alone. If it asks for a token (InvalidAuthToken), set RAY_AUTH_MODE=token here, and copy its "
            "~/.ray/auth_token"
        ) from error
    _joined = address


def _check_joined(address: str) -> None:
    """RayError if `address` is another cluster than the one that this process has joined."""
    import ray

    here = ray.get_runtime_context().gcs_address
    if address == LOCAL:
        is_same = _joined in (LOCAL, "")  # "": the user's own code has called ray.init
    elif address == AUTO:
        is_same = _joined != LOCAL
    else:
        is_same = _resolve(address) == _resolve(here)
    if not is_same:
        given = f" (ray={_joined})" if _joined else ""
        raise RayError(
            f"ray={address}: this process has already joined the cluster at {here}{given}, and a process can join only "
            "one; give sharding.ray and the sandbox's ray the same address"
        )


def _resolve(address: str) -> tuple[str, str]:
    """The host as a number, if it has one, and the port."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    with suppress(OSError):
        host = socket.gethostbyname(host)
    return host, port


def check_address(address: str, name: str = "ray") -> None:
    """ValueError, which names the setting, unless `address` is `auto`, `local` or `host:port`."""
    _, colon, port = address.removeprefix("ray://").rpartition(":")
    if address not in (AUTO, LOCAL) and not (colon and port.isdecimal()):
        raise ValueError(
            f"{name}={address!r}, expected auto, local or HOST:PORT; without it this machine alone is used"
        )


def _find_cluster() -> str:
    """The address that `auto` stands for; "" if there is none, which Ray says at once."""
    from ray._private.services import canonicalize_bootstrap_address

    return canonicalize_bootstrap_address(AUTO) or ""


def _try_to_reach(address: str) -> None:
    """Raise OSError at once if nothing listens there: Ray itself tries for a quarter of an hour."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def count_free_cpus() -> int:
    """How many CPUs of the cluster are free."""
    import ray

    return int(ray.available_resources().get("CPU", 0))


def count_gpus() -> int:
    """How many GPUs the cluster has, free or not."""
    import ray

    return int(ray.cluster_resources().get("GPU", 0))


def describe_resources() -> str:
    """What the cluster has and what of it is free, e.g. `8 CPU (2 free), 4 GPU (0 free) on 2 machines`."""
    import ray

    total, free = ray.cluster_resources(), ray.available_resources()
    shown = [f"{total.get(name, 0):g} {name} ({free.get(name, 0):g} free)" for name in ("CPU", "GPU") if name in total]
    machines = sum(node["Alive"] for node in ray.nodes())
    return f"{', '.join(shown) or 'no CPU'} on {machines} machine{'' if machines == 1 else 's'}"


def wait_for_all(refs: Sequence[Any], seconds: float, request: str) -> list[Any]:
    """The results of all `refs`; RayError if one failed, or if they are not all there in `seconds`.

    `request` says what they need, for the message: `4 workers with 1 CPU each`.
    """
    import ray
    from ray.exceptions import RayError as RaysOwnError

    done, missing = ray.wait(list(refs), num_returns=len(refs), timeout=seconds)
    try:
        results = dict(zip(done, ray.get(done), strict=True))
    except RaysOwnError as error:
        raise RayError(f"one of {request} did not start: {error}") from error
    if missing:
        raise make_resource_error(request, f"{len(done)} of {len(refs)} started", seconds)
    return [results[ref] for ref in refs]


def make_resource_error(request: str, found: str, seconds: float) -> RayError:
    """The error of a `request` that a cluster had no room for in time; it says what the cluster has."""
    return RayError(
        f"{request} were asked for, and {found} in {seconds:g} s: the cluster has {describe_resources()}. Ask for "
        "fewer, or add a machine (`ray start --address=HOST:PORT`)"
    )


def check_same_code(theirs: dict[str, str], machine: str, *packages: str) -> None:
    """Raise RayError, with both versions, if a process on `machine` runs other code than this one.

    `theirs` is its `describe_code(*packages)`.
    """
    ours = describe_code(*packages)
    for name in ours:
        if theirs.get(name) != ours[name]:
            raise RayError(
                f"the worker on {machine} has {name} {theirs.get(name)}, this process has {name} {ours[name]}; install "
                "the same on every machine"
            )
