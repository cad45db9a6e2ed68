"""The other side of `rlvr.sandbox.worker`: a process that limits itself, then answers frames until its input ends.

    python -I -S child.py JOB.py MEMORY_BYTES

Standard library only, and nothing of `rlvr`: it starts in milliseconds and holds nothing worth stealing. A frame is
four bytes of length (big-endian) and JSON in UTF-8, where half a surrogate pair passes as it is. In:
`{"setup": ..., "seconds": s}`, which holds until the next one, and `{"item": ...}`. Out: `{"ready": [limits the system
refused]}` once, then per item `{"value": ...}` or `{"raised": "..."}`.
`python -m pytest tests/test_sandbox_regex.py` exercises it.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import resource
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

OUT_OF_MEMORY = 77  # exit status


def limit(memory: int) -> list[str]:
    """Bound this process for good; the names of the limits that the system does not know or refuses."""
    wanted = {
        "RLIMIT_AS": memory,
        "RLIMIT_CORE": 0,
        "RLIMIT_FSIZE": 0,  # no file can grow; pipes are none
        "RLIMIT_NPROC": 0,  # no further process or thread (root is exempt)
    }
    refused: list[str] = []
    for name, value in wanted.items():
        try:
            kind = getattr(resource, name)
            bound = within(value, resource.getrlimit(kind)[1])
            resource.setrlimit(kind, (bound, bound))
        except (AttributeError, OSError, ValueError):
            refused.append(name)
    return refused


def within(wanted: int, hard: int) -> int:
    """`wanted`, or the hard limit that this process was given, where that is less."""
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)


def limit_cpu(seconds: float) -> None:
    """End this process after so many more seconds of computing: should nobody be left to kill it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = within(math.ceil(used.ru_utime + used.ru_stime + seconds) + 1, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("job", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pack(message: Any) -> bytes:
    """A frame. Nothing is escaped as ASCII: two halves of a pair side by side would come back as one character."""
    body = json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return len(body).to_bytes(4, "big") + body


def unpack(body: bytes) -> Any:
    return json.loads(body.decode("utf-8", "surrogatepass"))


def receive() -> Any:
    """The next frame; None where the input has ended, because whoever wrote it has."""
    head = sys.stdin.buffer.read(4)
    size = int.from_bytes(head, "big")
    body = sys.stdin.buffer.read(size)
    return unpack(body) if len(head) == 4 and len(body) == size else None


def main(job: str, memory: str) -> None:
    replies = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a job prints is no reply

    def send(message: dict[str, Any]) -> None:
        left = memoryview(pack(message))
        while left:
            left = left[os.write(replies, left) :]

    try:
        run = load(job).run
        refused = limit(int(memory))
    except Exception as error:
        send({"raised": f"{type(error).__name__}: {error}"})
        return
    send({"ready": refused})
    try:
        serve(run, send)
    except MemoryError:  # over a text that was only to be read, too
        os._exit(OUT_OF_MEMORY)  # nothing more can be relied on here


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
