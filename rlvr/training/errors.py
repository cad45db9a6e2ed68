"""Why a run stops although the user did nothing wrong, and the budget of verifier failures that makes it stop."""

from __future__ import annotations

from collections.abc import Sequence

from rlvr.types import Score


class TrainingStopped(RuntimeError):
    """The run was stopped because going on would give numbers that cannot be trusted. The message says why."""


def check_error_budget(where: str, reward: str, failures: Sequence[Score], answers: int, budget: float) -> None:
    """TrainingStopped with the first failures if more than a share `budget` of `answers` got no verdict."""
    if len(failures) <= budget * answers:
        return
    told = dict.fromkeys(f"[{s.outcome.value}: {s.reason}] {s.detail}".strip() for s in failures)
    raise TrainingStopped(
        f"{where}: the reward {reward!r} gave no verdict on {len(failures)} of {answers} answers, more than "
        f"training.error_budget={budget:g} allows. First failures:\n" + "\n".join(list(told)[:3])
    )
