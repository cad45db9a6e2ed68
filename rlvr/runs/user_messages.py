"""Messages to the user on standard error. They may quote what a model or a user's function wrote."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Event, Thread

SLOW_SECONDS, REPEAT_SECONDS = 2.0, 30.0
_QUIET: ContextVar[bool] = ContextVar("quiet", default=False)


def print_message(text: str) -> None:
    """Print `rlvr: TEXT` without secrets and without control characters."""
    from rlvr.tracking import readable_lines

    print(f"rlvr: {readable_lines(mask_secrets(text))}", file=sys.stderr)


def mask_secrets(text: str) -> str:
    """The text without what the environment gave to the config: messages end up in logs."""
    from rlvr.config import interpolate

    return interpolate.mask_secrets(text)


@contextmanager
def name_missing_extra(what: str, extra: str) -> Iterator[None]:
    """Turn a package that the block does not find into a ValueError that names the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise ValueError(f"{package} is not installed; {what} needs: pip install 'rlvr[{extra}]'") from error


@contextmanager
def announce_if_slow(text: str) -> Iterator[None]:
    """Print TEXT if the block takes longer than 2 seconds, and every 30 seconds how long it has taken.

    Inside `be_quiet(True)` nothing is printed.
    """
    if _QUIET.get():
        yield
        return
    ended, began = Event(), time.monotonic()

    def report() -> None:
        if ended.wait(SLOW_SECONDS):
            return
        print_message(f"{text} ...")
        while not ended.wait(REPEAT_SECONDS):
            print_message(f"{text}: {time.monotonic() - began:.0f} s so far")

    thread = Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def be_quiet(quiet: bool) -> Iterator[None]:
    """Print no announcements in the block if `quiet`; warnings and errors stay."""
    token = _QUIET.set(quiet)
    try:
        yield
    finally:
        _QUIET.reset(token)
