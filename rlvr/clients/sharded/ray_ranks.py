"""Lets Ray start the ranks: one actor for each, in a placement group, on whatever machines have room.

`RayRank` is the actor: the worker of `rank_worker` in a process that Ray has started on some machine. Commands and
replies are pickled here and sent as bytes: arrays that Ray itself moves are read-only. `RayRanks` is the driver's side,
with the methods of `RankProcesses`. Ray ends the actors when the driver is gone. The stderr of a rank is
in Ray's logs on its machine.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import pickle
import platform
import queue
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from rlvr.clients.sharded.rank_channel import RankCommand, RankReply
from rlvr.clients.sharded.rank_worker import PACKAGES, RankWorker, answer
from rlvr.clients.sharded.sharding_options import ShardingOptions
from rlvr.core.machine import describe_code
from rlvr.core.ray_cluster import check_same_code, join_cluster, make_resource_error, wait_for_all

STACK_WAIT_S = 5.0  # a call to another machine
LOG_TAIL = 4000  # characters of Ray's reason, or of a stack, that a message shows
READ_ADDRESS = 0x8915  # SIOCGIFADDR of Linux


class RayRank:
    """A Ray actor. `describe` is called first, and its answer has the same form in all versions of rlvr.

    `run` has one thread, so commands keep their order; `describe_stack` has another.
    """

    def __init__(self) -> None:
        import ray

        host = ray.util.get_node_ip_address()
        if interface := find_interface(host):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # by the host's name gloo may find the loopback
        gpus = len(ray.get_gpu_ids())
        if not gpus:  # Ray lets an actor see the devices that it did not ask for
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self._worker = RankWorker(host, gpus)
        self._thread = 0

    def describe(self) -> bytes:
        return json.dumps({"machine": platform.node(), "pid": os.getpid(), **describe_code(*PACKAGES)}).encode()

    def run(self, command: bytes) -> bytes:
        """Carry out a `RankCommand`."""
        self._thread = threading.get_ident()
        return pickle.dumps(answer(self._worker, pickle.loads(command)), protocol=5)

    def describe_stack(self) -> str:
        """The stack of the thread of `run`."""
        frame = sys._current_frames().get(self._thread)
        return "".join(traceback.format_stack(frame)) if frame else "it has not had a command"


def find_interface(address: str) -> str:
    """The network interface of this machine that has an IPv4 address; '' if none has."""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, suppress(OSError):
            found = fcntl.ioctl(any_socket.fileno(), READ_ADDRESS, struct.pack("256s", name.encode()))
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return ""


class RayRanks:
    """The ranks as `options.ranks` Ray actors; RayError if the cluster has no room for them in time, or runs other
    code."""

    def __init__(self, options: ShardingOptions, actor: Callable[[], Any] = RayRank) -> None:
        assert options.ray is not None
        join_cluster(options.ray)
        from ray.util.placement_group import placement_group

        needs: dict[str, float] = {"CPU": options.cpus_per_rank}
        needs |= {"GPU": options.gpus_per_rank} if options.gpus_per_rank else {}
        resources = " and ".join(f"{count} {name}" for name, count in needs.items())
        request = f"{options.ranks} ranks with {resources} each"
        self._arrivals: queue.Queue[tuple[int, RankReply | None]] = queue.Queue()
        self._ends: dict[int, str] = {}  # of ranks that are gone, Ray's reason
        self._actors: list[Any] = []
        self._placement_group = placement_group([needs] * options.ranks)
        try:
            if not self._placement_group.wait(math.ceil(options.wait_s)):
                raise make_resource_error(request, "not all of them were placed", options.wait_s)
            self._actors = [self._start(rank, options, actor) for rank in range(options.ranks)]
            replies = wait_for_all([one.describe.remote() for one in self._actors], options.wait_s, request)
            described = [json.loads(reply) for reply in replies]
            for one in described:
                check_same_code(one, one["machine"], *PACKAGES)
        except BaseException:
            self.end()
            raise
        self.machines: list[str] = [one["machine"] for one in described]
        self._ids: list[int] = [one["pid"] for one in described]

    def _start(self, rank: int, options: ShardingOptions, actor: Callable[[], Any]) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(self._placement_group, placement_group_bundle_index=rank)
        make: Any = ray.remote  # its type knows no concurrency groups
        return make(concurrency_groups={"look": 1})(actor).options(
            num_cpus=options.cpus_per_rank, num_gpus=options.gpus_per_rank, scheduling_strategy=place,
            max_restarts=0, max_task_retries=0,
        ).remote()  # fmt: skip

    def send(self, rank: int, command: RankCommand) -> None:
        """Send without waiting."""
        reply = self._actors[rank].run.remote(pickle.dumps(command, protocol=5))
        reply.future().add_done_callback(partial(self._read, rank))

    def _read(self, rank: int, future: Future[bytes]) -> None:
        try:
            self._arrivals.put((rank, pickle.loads(future.result())))
        except Exception as error:  # Ray's own: `run` gives failures as replies
            self._ends[rank] = f"{type(error).__name__}: {error}"
            self._arrivals.put((rank, None))

    def wait(self, timeout_s: float) -> tuple[int, RankReply | None] | None:
        """The next arrival; None after `timeout_s`."""
        with suppress(queue.Empty):
            return self._arrivals.get(timeout=max(0.0, timeout_s))
        return None

    def describe_end(self, rank: int) -> str:
        """Ray's account of how a rank ended."""
        why = self._ends.get(rank, "Ray gave no reason").strip()
        return f"(process {self._ids[rank]} on {self.machines[rank]}) is gone:\n{why[-LOG_TAIL:]}"

    def describe_stack(self, rank: int) -> str:
        """The stack of the thread of a late rank that carries out commands."""
        import ray

        where = f" (process {self._ids[rank]} on {self.machines[rank]})"
        stack = self._actors[rank].describe_stack.options(concurrency_group="look").remote()
        try:
            return f"{where}:\n{ray.get(stack, timeout=STACK_WAIT_S)[-LOG_TAIL:]}"
        except Exception:  # late itself, or gone
            return f"{where}; it does not answer"

    @property
    def ids(self) -> list[int]:
        """The process ids, each on its machine, by rank."""
        return self._ids

    def end(self) -> None:
        """End all actors and remove their placement group."""
        import ray
        from ray.util.placement_group import remove_placement_group

        if not ray.is_initialized():
            return
        for actor in self._actors:
            with suppress(Exception):
                ray.kill(actor)
        with suppress(Exception):
            remove_placement_group(self._placement_group)
