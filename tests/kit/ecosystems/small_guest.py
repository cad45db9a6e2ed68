"""A guest of tests: a script that answers calls over its pipe. Started as a process of its own."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "rlvr/envs/ecosystems/guests"))

from pipe_server import Refusal, serve


async def add(a: int, b: int) -> int:
    print("what is printed is no answer")
    os.system("echo not even by another process")
    return a + b


async def fail(how: str) -> Any:
    if how == "refuse":
        raise Refusal("expected another word")
    if how == "raise":
        raise KeyError("lost")
    if how == "nan":
        return math.nan
    print("last words", file=sys.stderr, flush=True)
    os._exit(3)


async def wait() -> None:
    await asyncio.sleep(1000)


async def block(path: str) -> None:
    Path(path).write_text("")
    time.sleep(1000)


async def tell(path: str) -> int:
    Path(path).write_text("")
    return os.getpid()


async def close() -> None:
    Path("closed").write_text("")


if __name__ == "__main__":
    serve({"add": add, "fail": fail, "wait": wait, "block": block, "tell": tell}, close)
