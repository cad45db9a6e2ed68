"""The child process of `rlvr.sandbox.worker`: limits itself, then answers frames until its input ends.

    python -s -P -S child.py JOB.py MEMORY_BYTES [may_fork]

Standard library only: it starts in milliseconds and holds nothing worth stealing. Frames (`rlvr.sandbox.protocol`) hold
JSON in UTF-8, in which half a surrogate pair may pass. In: `{"setup": ..., "seconds": s}`, which holds until the next
one, and `{"item": ...}`. Out: `{"ready": [limits the system refused]}` once, then per item `{"value": ...}` or
`{"raised": "..."}`.
"""

from __future__ import annotations

import importlib.util
import math
import os
import resource
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

if __name__ == "__main__":  # import the files next to this one without the imports of `rlvr`
    for _name, _path in (("rlvr", []), ("rlvr.sandbox", [os.path.dirname(os.path.abspath(__file__))])):
        _package = ModuleType(_name)
        _package.__path__ = _path
        sys.modules[_name] = _package

from rlvr.sandbox.protocol import OUT_OF_MEMORY, pack, unpack, write_all


def limit(memory: int, may_fork: bool) -> list[str]:
    """Limit the resources of this process for good: `memory` bytes of addresses, no core dumps, no growing files, and
    unless it `may_fork` no new processes. Returns the names of the limits that the system does not know or refuses."""
    limits = {
        "RLIMIT_AS": memory,
        "RLIMIT_CORE": 0,
        "RLIMIT_FSIZE": 0,  # no file can grow; pipes are not files
        "RLIMIT_NPROC": 0,  # no further process or thread (root is exempt)
    }
    if may_fork:
        del limits["RLIMIT_NPROC"]
    refused: list[str] = []
    for name, value in limits.items():
        try:
            kind = getattr(resource, name)
            bound = cap_at_hard_limit(value, resource.getrlimit(kind)[1])
            resource.setrlimit(kind, (bound, bound))
        except (AttributeError, OSError, ValueError):
            refused.append(name)
    return refused


def cap_at_hard_limit(value: int, hard: int) -> int:
    """`value`, but at most the hard limit of this process."""
    return value if hard == resource.RLIM_INFINITY else min(value, hard)


def limit_cpu(seconds: float) -> None:
    """Let the system end this process after `seconds` more of CPU time, in case its parent cannot."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = cap_at_hard_limit(math.ceil(used.ru_utime + used.ru_stime + seconds) + 1, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def load_job(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("job", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def receive() -> Any:
    """The next message; None if the input has ended."""
    head = sys.stdin.buffer.read(4)
    size = int.from_bytes(head, "big")
    body = sys.stdin.buffer.read(size)
    return unpack(body) if len(head) == 4 and len(body) == size else None


def main(job: str, memory: str, may_fork: str = "") -> None:
    replies = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a job prints is not a reply

    def send(message: dict[str, Any]) -> None:
        write_all(replies, pack(message))

    try:
        run = load_job(job).run
        refused = limit(int(memory), bool(may_fork))
    except Exception as error:
        send({"raised": f"{type(error).__name__}: {error}"})
        return
    send({"ready": refused})
    try:
        serve(run, send)
    except MemoryError:  # also while reading a text
        os._exit(OUT_OF_MEMORY)  # nothing here can be relied on any more


def serve(run: Callable[[Any, Any], Any], send: Callable[[dict[str, Any]], None]) -> None:
    """Answer every item until the input ends."""
    setup: Any = None
    seconds = 0.0
    while (message := receive()) is not None:
        if "setup" in message:
            setup, seconds = message["setup"], message["seconds"]
            continue
        limit_cpu(seconds)
        try:
            send({"value": run(setup, message["item"])})
        except MemoryError:
            raise
        except Exception as error:
            send({"raised": f"{type(error).__name__}: {error}"[:1000]})


if __name__ == "__main__":
    main(*sys.argv[1:])
