"""Take what waits in a queue as one batch: how a thread that owns a model gathers work that arrives together."""

from __future__ import annotations

import queue
import time
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")
GATHER_S = 0.01  # how long the first item waits for others that arrive at the same moment


def take_batch(waiting: queue.Queue[T | None], most: int) -> list[T] | None:
    """Wait for an item and take up to `most`. None marks the end: it is returned once no item is before it."""
    first = waiting.get()
    if first is None:
        return None
    time.sleep(GATHER_S)
    batch = [first]
    with suppress(queue.Empty):
        while len(batch) < most:
            if (item := waiting.get_nowait()) is None:
                waiting.put(None)
                break
            batch.append(item)
    return batch
