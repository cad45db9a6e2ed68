"""Schedules: when sampling and training take turns.

A new schedule is a class with the methods of `base.Schedule` in a file here, an entry in `SCHEDULES` below, and its
name in `rlvr.training.training_options.SCHEDULES`.
"""

from collections.abc import Callable

from rlvr.training.journal import Journal
from rlvr.training.schedules.base import Schedule
from rlvr.training.schedules.completion_order import CompletionOrder
from rlvr.training.schedules.fixed_lag import FixedLag
from rlvr.training.schedules.sync import Synchronous
from rlvr.training.trainer import Trainer

__all__ = ["SCHEDULES", "Schedule", "make_schedule"]

SCHEDULES: dict[str, Callable[[Trainer, Journal], Schedule]] = {
    "sync": Synchronous,
    "fixed_lag": FixedLag,
    "completion": CompletionOrder,
}


def make_schedule(trainer: Trainer, journal: Journal) -> Schedule:
    """The schedule that `training.schedule` names; supervised learning alone samples nothing and gets `sync`."""
    name = trainer.options.order if trainer.options.mode == "rlvr" else "sync"
    return SCHEDULES[name](trainer, journal)
