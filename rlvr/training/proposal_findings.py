"""Findings about a proposer of tasks: nothing that it writes is accepted, or it writes the same again and again.

A part of `rlvr.training.diagnosis`.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlvr.training.finding import Finding, format_percent
from rlvr.training.metric_values import WINDOW, Rows, get_mean
from rlvr.training.update_findings import START

REFUSED = "env/all/proposals/refused"
DISTINCT = "env/all/distinct/proposer"
MANY_REFUSED, ALL_REFUSED = 0.5, 0.95
FEW_DISTINCT, COLLAPSED = 0.5, 0.2  # shares of different proposals in a step, of those of the first steps
REMEDIES = {
    "unreadable": "fine-tune on more proposals (sft.steps, env.kwargs.proposal_share)",
    "size": "let env.kwargs.inner_kwargs allow larger tasks, or fine-tune on proposals (sft.steps)",
    "heldout": "hold fewer tasks out (env.kwargs.inner_kwargs)",
    "copied": "fine-tune on more proposals (sft.steps), or leave {example} out of env.kwargs.instruction",
    "repeated": "a higher rollout.temperature, an entropy bonus (algorithm.entropy_coef), or a smaller "
    "training.group_size",
}


def find_proposal_faults(rows: Rows) -> Iterator[Finding]:
    """What the last of these steps of reinforcement learning say about proposals, if there are any."""
    recent = rows[-WINDOW:]
    refused = get_mean(recent, REFUSED)
    if refused >= MANY_REFUSED:
        shares = {reason: share for reason in REMEDIES if (share := get_mean(recent, f"{REFUSED}/{reason}")) > 0}
        most = max(shares, key=lambda reason: shares[reason], default="unreadable")
        said = ", ".join(f"{reason} {format_percent(share)}" for reason, share in shares.items())
        yield Finding(
            "problem" if refused >= ALL_REFUSED else "hint",
            "proposals_refused",
            f"{format_percent(refused)} of the proposed tasks are refused ({said}): the solver has "
            f"{'nothing' if refused >= ALL_REFUSED else 'little'} to learn from",
            REMEDIES[most],
        )
    start, now = get_mean(rows[:START], DISTINCT), get_mean(recent[-START:], DISTINCT)
    if now < FEW_DISTINCT * start:
        yield Finding(
            "problem" if now < COLLAPSED * start else "hint",
            "proposer_collapsed",
            f"of the proposals of a step {format_percent(now)} are different, where the first steps had "
            f"{format_percent(start)}: the proposer writes the same tasks again and again",
            "a lower env.kwargs.proposer_weight or training.optimizer.learning_rate, an entropy bonus "
            "(algorithm.entropy_coef), or more examples in env.kwargs.instruction ({example})",
        )
