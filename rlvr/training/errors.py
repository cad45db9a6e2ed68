"""The error that stops a run, and the budget of verifier failures."""

from __future__ import annotations

from collections.abc import Sequence

from rlvr.core.types import Score


class TrainingStoppedError(RuntimeError):
    """Training stopped because its numbers could not be trusted. The message says why."""


def check_error_budget(where: str, reward: str, failures: Sequence[Score], completions: int, budget: float) -> None:
    """Raise TrainingStoppedError with the first failures if more than a share `budget` of `completions` got no
    verdict."""
    if len(failures) <= budget * completions:
        return
    details = dict.fromkeys(f"[{s.outcome.value}: {s.reason}] {s.detail}".strip() for s in failures)
    raise TrainingStoppedError(
        f"{where}: the reward {reward!r} gave no verdict on {len(failures)} of {completions} completions, more than "
        f"training.error_budget={budget:g} allows. First failures:\n" + "\n".join(list(details)[:3])
    )
