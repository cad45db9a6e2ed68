"""Runs an answer as a program, for tests of its input and output.

    run({"stdin": "3\\n", "solution": "print(input())"}, channel)

Used by `rlvr.sandbox.solver` in a fork that something else has confined. Standard library only.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import types
from typing import Any

from rlvr.sandbox.protocol import NO_PROGRAM


def run(job: dict[str, Any], channel: int) -> None:
    """Run the answer as `__main__`. Its output streams to the channel and ends with it."""
    data = job["stdin"].encode("utf-8", "surrogateescape")
    read, write = os.pipe()

    def feed() -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(write, left[: 1 << 16]) :]
        finally:
            os.close(write)

    if len(data) <= 4096:
        feed()
    else:
        import threading

        threading.Thread(target=feed, daemon=True).start()
    os.dup2(read, 0)
    os.close(read)
    os.dup2(channel, 1)
    os.dup2(os.open("/dev/null", os.O_RDWR), 2)
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    module = types.ModuleType("__main__")
    module.__file__ = "/tmp/answer.py"
    sys.modules["__main__"] = module
    try:
        code = compile(job["solution"].removeprefix("\ufeff"), "<answer>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        os._exit(NO_PROGRAM)
    try:
        for text in job.get("imports", ()):
            exec(compile(text, "<imports>", "exec", dont_inherit=True), module.__dict__)
        exec(code, module.__dict__)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise RuntimeError("exit status") from None
    finally:
        end(module)
        sys.stdout.flush()


def end(module: types.ModuleType) -> None:
    """What Python does at the end of a program: wait for threads, run `atexit`, drop the module's objects."""
    with contextlib.suppress(Exception):
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        importlib.import_module("atexit")._run_exitfuncs()
        names = list(module.__dict__)
        for name in [one for one in names if one.startswith("_") and one != "__builtins__"] + names:
            if name != "__builtins__":
                module.__dict__[name] = None
