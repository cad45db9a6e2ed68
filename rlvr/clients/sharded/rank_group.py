"""The ranks as the driver sees them: one command at a time, to all of them, each with a deadline.

A rank that dies, fails alone or is late ends the group: the others wait for it in a collective and cannot go on. An
interrupted command ends the group too, since its replies would not be read. An error that all ranks report (a
ValueError, a loss that is not finite) leaves them as they were.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

from rlvr.clients.sharded.rank_channel import RankCommand, RankFailure, RankReply
from rlvr.clients.sharded.sharding_options import RankError
from rlvr.core.messages import NonFiniteError

GRACE_S = 5.0  # after the first failure, for the others: the cause is often not what is reported first
PAUSE_S = 0.02  # between two calls of `meanwhile`
REMEDY = "The ranks were ended. Checkpoints are not affected: run the same command to resume from the last one"


class RankLauncher(Protocol):
    """Starts the ranks' processes when it is made: `RankProcesses` on this machine, `RayRanks` on a Ray cluster."""

    machines: list[str]  # by rank

    def send(self, rank: int, command: RankCommand) -> None:
        """Send without waiting."""
        ...

    def wait(self, timeout_s: float) -> tuple[int, RankReply | None] | None:
        """The next arrival, (rank, reply) or (rank, None) when the rank is gone; None after `timeout_s`."""
        ...

    def describe_end(self, rank: int) -> str:
        """How a rank that is gone ended: the rest of a sentence that begins with its number."""
        ...

    def describe_stack(self, rank: int) -> str:
        """The stack of a rank that is late: the rest of a sentence that begins with its number."""
        ...

    @property
    def ids(self) -> list[int]:
        """The process ids, by rank."""
        ...

    def end(self) -> None:
        """End all processes at once."""
        ...


class RankGroup:
    """Sends commands to processes and collects the replies, in the order of the ranks.

    `seconds` and `waited` [ranks] add up the time in commands, and that of it in collectives.
    """

    def __init__(self, processes: RankLauncher, timeout_s: float) -> None:
        self.processes, self.timeout_s = processes, timeout_s
        self.seconds = self.waited = [0.0] * self.size
        self._ended = ""

    @property
    def size(self) -> int:
        return len(self.processes.machines)

    def call(self, name: str, **arguments: Any) -> list[Any]:
        """Run one command on all ranks with the same arguments."""
        return self.call_each(name, [arguments] * self.size)

    def call_in_turn(self, name: str, **arguments: Any) -> list[Any]:
        """Run a command without a collective on one rank of each machine at a time, so that a machine needs the memory
        of one."""
        replies: dict[int, RankReply] = {}
        machines = self.processes.machines
        turns = [machines[:rank].count(machine) for rank, machine in enumerate(machines)]
        for turn in range(max(turns) + 1):
            replies |= self._run(name, {rank: arguments for rank in range(self.size) if turns[rank] == turn})
        return [replies[rank].value for rank in range(self.size)]

    def call_first(self, name: str, **arguments: Any) -> Any:
        """Run a command without a collective on rank 0."""
        return self._run(name, {0: arguments})[0].value

    def call_each(
        self, name: str, arguments: Sequence[dict[str, Any]], meanwhile: Callable[[], None] | None = None
    ) -> list[Any]:
        """Run one command on all ranks, with `arguments` by rank; `meanwhile` is called repeatedly until they reply."""
        replies = self._run(name, dict(enumerate(arguments)), meanwhile)
        ordered = [replies[rank] for rank in range(self.size)]
        self.seconds = [before + reply.seconds for before, reply in zip(self.seconds, ordered, strict=True)]
        self.waited = [before + reply.waited for before, reply in zip(self.waited, ordered, strict=True)]
        return [reply.value for reply in ordered]

    def _run(
        self, name: str, arguments: dict[int, dict[str, Any]], meanwhile: Callable[[], None] | None = None
    ) -> dict[int, RankReply]:
        if self._ended:
            raise RankError(f"{name}: the ranks have already ended. {self._ended}")
        try:
            replies, lost = self._collect(name, arguments, meanwhile)
        except BaseException:  # such as Ctrl-C: the next command would read the replies to this one
            if not self._ended:
                self._close(f"{name} was interrupted")
            raise
        if lost:
            self._end(f"rank {lost[0]} {self.processes.describe_end(lost[0])}", name)
        failures = {rank: reply.failure for rank, reply in replies.items() if reply.failure}
        if failures:
            self._raise(name, failures, shared=len(failures) == len(arguments))
        return replies

    def _collect(
        self, name: str, arguments: dict[int, dict[str, Any]], meanwhile: Callable[[], None] | None
    ) -> tuple[dict[int, RankReply], list[int]]:
        """Send a command, and wait for the replies or ends of its ranks: the replies by rank, and the ranks lost."""
        for rank, given in arguments.items():
            self.processes.send(rank, RankCommand(name, given))
        replies: dict[int, RankReply] = {}
        lost: list[int] = []
        deadline = time.monotonic() + self.timeout_s
        if meanwhile:  # once at least, however fast the ranks are
            meanwhile()
        while len(replies) + len(lost) < len(arguments):
            failed = bool(lost) or any(reply.failure for reply in replies.values())
            left = deadline - time.monotonic()
            arrival = self.processes.wait(min(left, PAUSE_S) if meanwhile else left)
            if arrival is None and meanwhile and time.monotonic() < deadline:
                meanwhile()
                continue
            if arrival is None:
                if failed:
                    break
                self._end_late(name, [rank for rank in arguments if rank not in replies])
            rank, reply = arrival
            if reply is None:
                lost.append(rank)
            else:
                replies[rank] = reply
            if not failed and (lost or (reply is not None and reply.failure)):
                deadline = min(deadline, time.monotonic() + GRACE_S)
        return replies, lost

    def _raise(self, name: str, failures: dict[int, RankFailure], *, shared: bool) -> NoReturn:
        """Raise what the ranks reported, as the exception that it was; `shared` if every rank did."""
        rank, first = next(iter(failures.items()))
        kinds = {failure.kind for failure in failures.values()}
        if shared and kinds == {"value"}:
            raise ValueError(first.text)
        if shared and kinds == {"non_finite"}:
            raise RankNonFiniteError({rank: failure.rows for rank, failure in failures.items()}, first.text)
        if system := next((failure for failure in failures.values() if failure.kind == "system"), None):
            self._close("")
            raise OSError(system.number, os.strerror(system.number), system.text)
        self._end(f"rank {rank} failed:\n{first.traceback.strip()}", name)

    def _end_late(self, name: str, late: list[int]) -> NoReturn:
        stacks = [f"rank {rank} is late{self.processes.describe_stack(rank)}" for rank in late]
        limit = f"not done within sharding.timeout_s={self.timeout_s:g}; raise it if the work takes that long"
        self._end(f"{limit}.\n" + "\n".join(stacks), name)

    def _end(self, why: str, name: str) -> NoReturn:
        self._close(why.partition("\n")[0])
        raise RankError(f"{name}: {why}\n{REMEDY}")

    def _close(self, why: str) -> None:
        self._ended = why or "Start them again"
        self.processes.end()

    def close(self) -> None:
        """End the processes, unless a failure has ended them."""
        if not self._ended:
            self._close("The client was closed")


class RankNonFiniteError(NonFiniteError):
    """Values that are not finite; `by_rank` has their rows, as indices into each rank's own data."""

    def __init__(self, rows: dict[int, list[int]], what: str) -> None:
        super().__init__(what, [])
        self.by_rank, self.what = rows, what
