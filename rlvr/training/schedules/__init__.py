"""Schedules: when sampling and training take turns.

A new schedule is a class with the methods of `base.Schedule` in a file here, and the class of its options in
`schedule_options.py` with its entry in `SCHEDULES` below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

from rlvr.core.variants import Variants, make_section
from rlvr.training.schedules.schedule_options import (
    CompletionOrderOptions,
    FixedLagOptions,
    ReptileOptions,
    ScheduleChoice,
    ScheduleOptions,
    SyncOptions,
)

SCHEDULES = Variants(
    "training.schedule",
    ScheduleOptions,
    SyncOptions,
    FixedLagOptions,
    CompletionOrderOptions,
    ReptileOptions,
    or_else="; or null",
)

if TYPE_CHECKING:  # it is made of the schedules that there are
    ScheduleSection = ScheduleChoice
else:
    ScheduleSection = make_section("ScheduleSection", SCHEDULES, ("name", Optional[str], None), base=ScheduleChoice)  # noqa: UP045
