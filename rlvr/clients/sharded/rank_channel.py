"""Messages between the driver and a rank: pickled Python objects over a socket pair, without copies of arrays."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any


class RankChannel:
    """One end of the connection. EOFError or OSError once the other process is gone."""

    def __init__(self, descriptor: int) -> None:
        self._connection = Connection(descriptor)

    def send(self, message: object) -> None:
        buffers: list[pickle.PickleBuffer] = []
        body = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        views = [buffer.raw() for buffer in buffers]
        self._connection.send_bytes(pickle.dumps([len(view) for view in views]))
        self._connection.send_bytes(body)
        for view in views:
            self._connection.send_bytes(view)

    def receive(self) -> Any:
        sizes = pickle.loads(self._connection.recv_bytes())
        body = self._connection.recv_bytes()
        buffers = [bytearray(size) for size in sizes]
        for buffer in buffers:
            self._connection.recv_bytes_into(buffer)
        return pickle.loads(body, buffers=buffers)

    def close(self) -> None:
        self._connection.close()


@dataclass(frozen=True)
class RankCommand:
    """A method of `rank_worker.RankWorker` to call."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class RankFailure:
    """An exception of a rank in a form that any process can read: `kind` is value, non_finite, system or other.

    `rows` are the datums whose values were not finite.
    """

    kind: str
    text: str
    traceback: str
    rows: list[int] = field(default_factory=list[int])
    number: int = 0  # errno of a system error


@dataclass(frozen=True)
class RankReply:
    """What a command returned, or how it failed; the seconds it took, and those it `waited` in collectives."""

    value: Any = None
    failure: RankFailure | None = None
    seconds: float = 0.0
    waited: float = 0.0


@dataclass(frozen=True)
class RankFacts:
    """The model that a rank has built: `trainable` counts weights, `context` is in tokens, `vocabulary` in entries.

    `code` has the versions of packages and the hash of the weights: what has to be equal on all ranks.
    """

    trainable: int
    dtype: str
    context: int
    vocabulary: int
    notes: list[str]
    environment: dict[str, str | int]
    code: dict[str, str]
