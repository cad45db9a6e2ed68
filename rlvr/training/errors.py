"""The error that stops a run, and the budget of verifier failures."""

from __future__ import annotations

from collections.abc import Sequence

from rlvr.core.types import Trajectory
from rlvr.core.verdict_reasons import EPISODE_FAILED

_SHOWN = 200  # characters of a completion


class TrainingStoppedError(RuntimeError):
    """Training stopped because its numbers could not be trusted. The message says why."""


def check_error_budget(
    where: str, reward: str, failures: Sequence[Trajectory], completions: int, budget: float
) -> None:
    """Raise TrainingStoppedError if more than a share `budget` of `completions` got no verdict.

    The message has the first three different failures, each with the completion that it happened on.
    """
    if len(failures) <= budget * completions:
        return
    first: dict[str, str] = {}
    for failure in failures:
        score = failure.scores[reward]
        task = f"task {failure.task.id!r}, " if failure.task is not None else ""
        reason = f"[{score.outcome.value}: {score.reason}] {score.detail}".strip()
        first.setdefault(reason, f"{task}completion {failure.response[:_SHOWN]!r}:\n")
    broken = all(failure.scores[reward].reason == EPISODE_FAILED for failure in failures)
    what = "the agent or environment failed in" if broken else f"the reward {reward!r} gave no verdict on"
    raise TrainingStoppedError(
        f"{where}: {what} {len(failures)} of {completions} completions, more than training.error_budget={budget:g} "
        "allows. First failures:\n" + "\n".join(on + reason for reason, on in list(first.items())[:3])
    )
