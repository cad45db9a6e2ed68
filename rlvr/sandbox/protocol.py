"""What the sandbox's processes have in common: frames, the head of a job, exit statuses.

A frame is four bytes of length (big-endian) and a body. Standard library only, since the child processes import it.
"""

from __future__ import annotations

import json
import os
import struct
from typing import Any

OUTPUT = 4 << 20  # bytes that may come back from an answer: a list of 200,000 floats is not quite as much
OUT_OF_MEMORY = 77  # exit status of a child
NO_PROGRAM = 78  # exit status of a program that does not compile
JOB_HEAD = struct.Struct("!Id?")  # length of the body, seconds left, whether the answer has to end by itself


class FrameTooLarge(Exception):
    """A frame is larger than its reader allows. `args[0]` is its size."""


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def pack(message: Any) -> bytes:
    """A frame. Not escaped as ASCII: two adjacent halves of a surrogate pair would come back as one character."""
    return frame(json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass"))


def unpack(body: bytes) -> Any:
    return json.loads(body.decode("utf-8", "surrogatepass"))


def take_frame(buffer: bytearray, most: int) -> bytes | None:
    """Remove the first frame from `buffer` and return its body, of at most `most` bytes; None if it is incomplete."""
    if len(buffer) < 4:
        return None
    size = int.from_bytes(buffer[:4], "big")
    if size > most:
        raise FrameTooLarge(size)
    if len(buffer) < 4 + size:
        return None
    body = bytes(buffer[4 : 4 + size])
    del buffer[: 4 + size]
    return body


def read_frame(descriptor: int) -> bytes:
    """The body of the next frame; empty at the end of the input."""
    head = read_exactly(descriptor, 4)
    return head and read_exactly(descriptor, int.from_bytes(head, "big"))


def read_exactly(descriptor: int, count: int) -> bytes:
    data = os.read(descriptor, count)
    while len(data) < count:
        more = os.read(descriptor, count - len(data))
        if not more:
            return b""
        data += more
    return data


def write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
