"""Asks the workers that run `reasoning_gym` for families, tasks and scores; our own process never imports it.

For example:

    describe_families()["countdown"].keys            # ("min_numbers", "max_numbers", ...)
    make_entry(GymTask("countdown", {}, None, 7))    # -> GymEntry(question, answer)
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from rlvr.core.cpu_budget import available_cores
from rlvr.reward.reasoning_gym.library_job import hash_text, wall_seconds
from rlvr.sandbox.warm_pool import WarmPool
from rlvr.sandbox.worker import MIB, Worker, WorkerReply

WORKERS = 4  # at most; each holds about 120 MB
MEMORY = 1536 * MIB  # of addresses that each and each of its forks may use; the libraries take 300
MAKE_SECONDS = 60.0  # that the library may take for one task
INSTALL = (
    "pip install 'rlvr[reasoning-gym]'; its requirement pycosat is compiled on your machine: a C compiler and Python's "
    "headers must be there (on Debian: apt-get install gcc python3-dev)"
)


@dataclass(frozen=True)
class GymTask:
    """What a task is made from, and nothing else: the same task has the same entry everywhere."""

    family: str
    config: dict[str, Any]
    level: int | None
    number: int

    def as_item(self) -> dict[str, Any]:
        return {"family": self.family, "config": self.config, "level": self.level, "number": self.number}


@dataclass(frozen=True)
class GymEntry:
    """A task of the library: question and data. `answer` is a right answer; None where the library gives none."""

    question: str
    answer: str | None

    @property
    def question_hash(self) -> str:
        return hash_text(self.question)


@dataclass(frozen=True)
class GymFamily:
    """A family: the `keys` of its configuration, the keys that its curriculum sets, and its number of `levels`."""

    keys: tuple[str, ...]
    level_keys: tuple[str, ...] = field(default=())
    levels: int = 0


def require_library() -> None:
    """ValueError, with what to do, where `reasoning_gym` is not installed."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ValueError(f"reasoning_gym is not installed: {INSTALL}")


@cache
def describe_families() -> dict[str, GymFamily]:
    """Every family of the installed library by name."""
    require_library()
    reply = _pool().ask(_setup(), {"do": "describe"}, MAKE_SECONDS)
    if reply.failure:
        raise ValueError(f"reasoning_gym could not be loaded ({reply.failure}: {reply.detail}); {INSTALL}")
    return {
        name: GymFamily(tuple(one["keys"]), tuple(one["level_keys"]), one["levels"])
        for name, one in sorted(reply.value.items())
    }


class NoEntry(Exception):
    """The library's generator failed on this number of a family, as it always will."""


def check_config(task: GymTask) -> None:
    """ValueError with the library's own words if it does not take the configuration of a task."""
    reply = _pool().ask(_setup(), {"do": "check", **task.as_item()}, MAKE_SECONDS)
    if why := f"{reply.failure}: {reply.detail}" if reply.failure else reply.value["refused"]:
        level = "" if task.level is None else f" at level {task.level}"
        raise ValueError(f"reasoning_gym: {task.family}{level} does not take the config {task.config} ({why})")


def make_entry(task: GymTask) -> GymEntry:
    """The question and answer of a task; NoEntry where its generator fails, ValueError where it does not end."""
    reply = _pool().ask(_setup(), {"do": "make", **task.as_item()}, MAKE_SECONDS)
    if reply.failure == "raised":
        raise NoEntry(reply.detail)
    if reply.failure:
        level = "" if task.level is None else f" at level {task.level}"
        raise ValueError(
            f"reasoning_gym: {task.family}{level} with config {task.config} made no task within {MAKE_SECONDS:g} s and "
            f"{MEMORY // MIB} MiB ({reply.failure}: {reply.detail}); give an easier config or level"
        )
    return GymEntry(**reply.value)


def score_answer(task: GymTask, question_hash: str, answer: str, seconds: float) -> WorkerReply:
    """The library's score of an answer, as `rlvr.reward.reasoning_gym.library_job.score` gives it."""
    item = {"do": "score", **task.as_item(), "question": question_hash, "answer": answer, "seconds": seconds}
    return _pool().ask(_setup(), item, MAKE_SECONDS + 2 * wall_seconds(seconds))


def start_workers() -> None:
    """Start one worker, before a run does; warns of the walls that this system lacks."""
    describe_families()
    _list_missing()


@cache
def _list_missing() -> tuple[str, ...]:
    reply = _pool().ask(_setup(), {"do": "warm"}, MAKE_SECONDS)
    missing = tuple(reply.value["missing"]) if not reply.failure else ()
    if missing:
        warnings.warn(
            f"this system refuses {', '.join(missing)}: scorers of reasoning_gym that evaluate answers are guarded by "
            "the grammar of answers, a process of their own and its limits alone",
            RuntimeWarning,
            stacklevel=2,
        )
    return missing


def _setup() -> dict[str, Any]:
    return {"paths": [path for path in sys.path if os.path.isabs(path)]}


@cache
def _pool() -> WarmPool:
    return WarmPool(
        # Some families take their tasks from sets of words, whose order follows the hashes.
        lambda: Worker("rlvr.reward.reasoning_gym.library_job", memory=MEMORY, may_fork=True, hash_seed=0),
        min(WORKERS, available_cores()),
        _setup(),
        {"do": "warm"},
    )


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_pool.cache_clear)
