"""One rank as a Ray actor: the worker of `rank_worker` in a process that Ray has started on some machine.

Commands and replies are pickled here and sent as bytes: arrays that Ray itself moves are read-only. `ray_ranks` is the
driver's side.
"""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import platform
import socket
import struct
import sys
import threading
import traceback
from contextlib import suppress

from rlvr.clients.sharded.rank_worker import PACKAGES, RankWorker, answer
from rlvr.core.code_version import describe_code

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
