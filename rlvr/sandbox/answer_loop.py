"""Awaitables of an answer, run beside it on one event loop for all of a test.

    run(coroutine)

Used by `rlvr.sandbox.solver`, which asks for each step of a test's coroutine. Standard library only.
"""

from __future__ import annotations

import importlib
from typing import Any

_loop: Any = None


def name_of(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def event_loop() -> Any:
    global _loop
    _loop = _loop or importlib.import_module("asyncio").new_event_loop()
    return _loop


def run(awaitable: Any) -> Any:
    """Run an awaitable to its end on one event loop for all of a test."""
    import asyncio

    async def wait() -> Any:
        return await awaitable

    loop = event_loop()

    asyncio._set_running_loop(None)  # the test's own, see `AnswerServer.handle`
    return loop.run_until_complete(wait())


def await_call(function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if type(function) is list:
        function = name_of(*function[1].split(":"))

    async def wait() -> Any:
        return await function(*args, **kwargs)

    return run(wait())


def next_item(items: Any) -> tuple[bool, Any]:
    try:
        return (False, run(items.__anext__()))
    except StopAsyncIteration:
        return (True, None)


def leave(context: Any, error: BaseException | None) -> Any:
    return run(
        type(context).__aexit__(
            context, type(error) if error is not None else None, error, getattr(error, "__traceback__", None)
        )
    )
