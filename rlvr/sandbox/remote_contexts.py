"""Contexts of the answer in a test's `with` statements, which run beside the answer.

`Operations.context` makes them. What a test asserts inside is never given to the answer, which could swallow it.
Standard library only. `python -m pytest tests/test_sandbox_rpc.py` exercises it.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

from rlvr.sandbox.remote import Remote, find_remotes


class RemoteContext:
    def __init__(self, operations: Any, value: Remote) -> None:
        self.operations, self.value = operations, value

    def __enter__(self) -> Any:
        return self.operations.link.call_method(self.value, "__enter__", (), {})

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if isinstance(error, AssertionError) and not find_remotes(error, 0):
            self.operations.ask("exit", self.value, None)
            return False  # the answer must not swallow what a test asserts
        if error is not None and not isinstance(error, Exception):
            return False
        return bool(self.operations.ask("exit", self.value, error))


class RemoteAsyncContext(RemoteContext):
    async def __aenter__(self) -> Any:
        return self.operations.ask("await_call", self.operations.getattr(self.value, "__aenter__"), [], {})

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        given = None if isinstance(error, AssertionError) and not find_remotes(error, 0) else error
        swallowed = self.operations.ask("aexit", self.value, given)
        return bool(swallowed) and given is error


class RemoteLogs(RemoteContext):
    """`assertLogs` and `assertNoLogs`: records are collected beside the answer and counted here."""

    def __init__(self, operations: Any, value: Remote, wants_none: bool) -> None:
        super().__init__(operations, value)
        self.wants_none, self.watcher = wants_none, None

    def __enter__(self) -> Any:
        self.watcher = super().__enter__()
        return self.watcher

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        lines = [] if self.watcher is None else list(self.operations.getattr(self.watcher, "output"))
        with contextlib.suppress(AssertionError):
            self.operations.ask("exit", self.value, None)
        if error is None and bool(lines) is self.wants_none:
            raise AssertionError(f"{len(lines)} lines were logged")
        return False


class RemoteWarnings(RemoteContext):
    """`assertWarns`: warnings are collected beside the answer; their classes and texts are compared here."""

    def __init__(self, operations: Any, value: Remote, kinds: Any, pattern: Any) -> None:
        super().__init__(operations, value)
        self.kinds, self.pattern = kinds, pattern

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        with contextlib.suppress(AssertionError):
            self.operations.ask("exit", self.value, None)
        if error is not None:
            return False
        for warning in self.operations.getattr(self.value, "warnings"):
            raised = self.operations.throw(self.operations.getattr(warning, "message"))
            if isinstance(raised, self.kinds) and re.search(self.pattern, str(raised)):
                return False
        raise AssertionError("no such warning was given")
