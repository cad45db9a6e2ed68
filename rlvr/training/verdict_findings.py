"""Findings about a verifier that judges the policy: it says one thing of all answers, it is fooled, it says nothing.

A part of `rlvr.training.diagnosis`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from rlvr.training.finding import Finding, format_percent
from rlvr.training.metric_values import WINDOW, Rows, get_mean

VERDICTS = "env/all/verdicts/"
ALWAYS, FOOLED, SILENT = 0.9, 0.5, 0.5  # shares of answers of one kind, and of verdicts


def find_verdict_faults(rows: Rows) -> Iterator[Finding]:
    """What the last of these steps of reinforcement learning say about verdicts, if there are any."""
    recent = rows[-WINDOW:]
    silent = get_mean(recent, f"{VERDICTS}unreadable")
    if silent >= SILENT:
        yield Finding(
            "problem",
            "verdicts_unreadable",
            f"{format_percent(silent)} of the verdicts do not end in the word right or wrong: such an answer is "
            "refused",
            "fine-tune on more verdicts (sft.steps, env.kwargs.verdict_share), say in env.kwargs.instruction how a "
            "verdict ends, or raise rollout.max_tokens",
        )
    of_wrong, of_right = get_mean(recent, f"{VERDICTS}false_accept"), 1 - get_mean(recent, f"{VERDICTS}false_refusal")
    said = ", ".join(
        f"{format_percent(share)} of the {kind} answers"
        for kind, share in (("wrong", of_wrong), ("right", of_right))
        if math.isfinite(share)
    )
    accepts_all = of_wrong >= ALWAYS and of_right >= ALWAYS
    if accepts_all or (of_wrong <= 1 - ALWAYS and of_right <= 1 - ALWAYS):
        yield Finding(
            "problem",
            "verifier_collapsed",
            f"the verifier says one thing of nearly all answers: it accepts {said}",
            f"a {'higher' if accepts_all else 'lower'} env.kwargs.right_share, a larger env.kwargs.truth_share, a "
            "lower training.optimizer.learning_rate, or more fine-tuning on verdicts first (sft.steps, "
            "env.kwargs.verdict_share)",
        )
    elif of_wrong >= FOOLED:
        yield Finding(
            "problem",
            "verifier_fooled",
            f"the policy fools the verifier, which accepts {said}: it is paid for wrong answers",
            "train the verifier (env.kwargs.opponent=self), know the truth of more tasks (env.kwargs.truth_share), pay "
            "the solver by it there (env.kwargs.known_reward=truth), or stop the run earlier (training.steps)",
        )
