"""Serves a process that started this interpreter: calls as JSON lines on standard input. Standard library only.

    {"id": 1, "method": "run", "params": {...}}      answered by {"id": 1, "result": ...} or {"id": 1, "error": "..."}
    {"id": 1, "method": "cancel"}                    ends call 1

Calls run at the same time in one event loop. What other code prints goes to standard error. The process ends at the end
of its input, so it outlives no process that started it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

CLOSE_SECONDS = 10.0  # to close what is open once the input has ended

Method = Callable[..., Awaitable[Any]]


class Refusal(Exception):
    """A mistake of the user; its text says what to do."""


def serve(methods: Mapping[str, Method], close: Callable[[], Awaitable[None]]) -> None:
    """Answer calls of `methods` until the input ends; `close` is called last."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what other code prints is no answer
    asyncio.run(_serve(methods, close, answers))
    os._exit(0)  # threads of other code do not keep the process


async def _serve(methods: Mapping[str, Method], close: Callable[[], Awaitable[None]], answers: Any) -> None:
    loop, lines = asyncio.get_running_loop(), asyncio.Queue[str]()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(lines.put_nowait, line)
        loop.call_soon_threadsafe(lines.put_nowait, "")
        time.sleep(CLOSE_SECONDS)
        os._exit(1)  # other code holds the event loop

    threading.Thread(target=read, daemon=True).start()
    running: dict[int, asyncio.Task[None]] = {}
    while line := await lines.get():
        call = json.loads(line)
        number = call["id"]
        if call["method"] == "cancel":
            if number in running:
                running[number].cancel()
            continue
        running[number] = asyncio.create_task(_answer(methods[call["method"]], call, answers))
        running[number].add_done_callback(lambda _, number=number: running.pop(number))
    for task in running.values():
        task.cancel()
    await close()


async def _answer(method: Method, call: dict[str, Any], answers: Any) -> None:
    answer: dict[str, Any] = {"id": call["id"]}
    try:
        answer["result"] = await method(**call["params"])
    except asyncio.CancelledError:
        answer["error"] = "cancelled"
    except Refusal as refusal:
        answer["error"] = str(refusal)
    except BaseException as error:
        answer["error"] = describe(error)
    try:
        line = json.dumps(answer, allow_nan=False)
    except ValueError as error:  # a number that is not finite
        line = json.dumps({"id": call["id"], "error": f"the result is no JSON: {error}"})
    print(line, file=answers, flush=True)


def describe(error: BaseException) -> str:
    """What was raised, and where: `my_taskset.py:12: KeyError: 'answer'`."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: " if frames else ""
    return f"{place}{type(error).__name__}: {error!s:.2000}"
