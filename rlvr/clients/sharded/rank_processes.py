"""Starts the ranks as processes of this machine, one socket pair each.

The stderr of a rank goes to an unnamed file and is shown when the rank fails.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

import rlvr
from rlvr.clients.sharded.rank_channel import RankChannel, RankCommand, RankReply

LOG_TAIL = 4000  # characters of a rank's stderr that a message shows
STACK_WAIT_S = 1.0


class RankProcesses:
    """The `count` processes of the ranks on this machine. `wait` gives what arrives from any of them: (rank, reply),
    or (rank, None) when it ended."""

    def __init__(self, count: int, module: str = "rlvr.clients.sharded.rank_worker") -> None:
        self.machines = ["this machine"] * count
        self._module = module
        self._arrivals: queue.Queue[tuple[int, RankReply | None]] = queue.Queue()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[RankChannel] = []
        self._logs: list[IO[bytes]] = []
        try:
            for rank in range(count):
                self._start(rank)
        except BaseException:
            self.end()
            raise

    def _start(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        channel = RankChannel(ours.detach())
        log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._channels.append(channel)
        self._logs.append(log)
        paths = [str(Path(rlvr.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        # The libraries' own connections stay on the loopback interface.
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        env |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
        with theirs:
            words = ["-X", "faulthandler", "-m", self._module, str(theirs.fileno())]
            self._processes.append(self._run(words, env, log, theirs))
        threading.Thread(target=self._read, args=(rank, channel), daemon=True).start()

    def _run(
        self, words: list[str], env: dict[str, str], log: IO[bytes], connection: socket.socket
    ) -> subprocess.Popen[bytes]:
        """Python with these words, the last of which is the descriptor of the connection."""
        return subprocess.Popen(
            [sys.executable, *words],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[connection.fileno()],
            start_new_session=True,  # Ctrl-C is the driver's to handle
        )

    def _read(self, rank: int, channel: RankChannel) -> None:
        try:
            while True:
                self._arrivals.put((rank, channel.receive()))
        except Exception:  # gone, or closed by another thread while this one reads
            self._arrivals.put((rank, None))

    def send(self, rank: int, command: RankCommand) -> None:
        """Send without waiting: a process that does not read must not hold up the driver."""

        def send() -> None:
            with suppress(OSError):  # a process that has ended is noticed by `wait`
                self._channels[rank].send(command)

        threading.Thread(target=send, daemon=True).start()

    def wait(self, timeout_s: float) -> tuple[int, RankReply | None] | None:
        """The next arrival; None after `timeout_s`."""
        with suppress(queue.Empty):
            return self._arrivals.get(timeout=max(0.0, timeout_s))
        return None

    def describe_end(self, rank: int) -> str:
        """How a rank that is gone ended, and what it wrote last."""
        with suppress(subprocess.TimeoutExpired):
            self._processes[rank].wait(STACK_WAIT_S)
        code = self._processes[rank].returncode
        how = "closed its connection" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            how += " (the system does that when memory runs out)" if code == -signal.SIGKILL else ""
        return how + self._read_log(rank)

    def describe_stack(self, rank: int) -> str:
        """The stack of the main thread of a rank that is late."""
        with suppress(OSError):
            self._processes[rank].send_signal(signal.SIGUSR1)
        time.sleep(STACK_WAIT_S)
        return self._read_log(rank) or "; it does not answer signals"

    def _read_log(self, rank: int) -> str:
        log = self._logs[rank]
        log.seek(0)
        text = log.read().decode(errors="replace").strip()
        return f":\n{text[-LOG_TAIL:]}" if text else ""

    @property
    def ids(self) -> list[int]:
        """The process ids, by rank."""
        return [process.pid for process in self._processes]

    def end(self) -> None:
        """End all processes at once."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for closable in (*self._channels, *self._logs):
            with suppress(OSError):
                closable.close()
