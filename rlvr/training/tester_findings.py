"""Findings about a tester of programs: its tests are refused, break right programs, or are the same again and again.

A part of `rlvr.training.diagnosis`.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlvr.training.finding import Finding, format_percent
from rlvr.training.metric_values import WINDOW, Rows, get_mean
from rlvr.training.update_findings import START

REFUSED, WRONG = "env/all/tests/refused", "env/all/tests/wrong"
BROKEN, DISTINCT = "env/all/broken/wrong", "env/all/distinct/tester"
MANY, ALL = 0.5, 0.95
FEW_DISTINCT, COLLAPSED = 0.5, 0.2  # shares of different tests in a step, of those of the first steps
REMEDIES = {
    "unreadable": "fine-tune on more tests (sft.steps, env.kwargs.test_share), or say in env.kwargs.instruction what a "
    "test looks like",
    "size": "a higher env.kwargs.max_characters",
    "many": "ask for fewer tests in env.kwargs.instruction, or allow more (env.kwargs.tests)",
    "copied": "fine-tune on more tests (sft.steps, env.kwargs.test_share), or show fewer (env.kwargs.inner_kwargs)",
    "repeated": "a higher rollout.temperature, or fewer tests (env.kwargs.tests)",
}


def find_tester_faults(rows: Rows) -> Iterator[Finding]:
    """What the last of these steps of reinforcement learning say about written tests, if there are any."""
    recent = rows[-WINDOW:]
    refused, wrong = get_mean(recent, REFUSED), get_mean(recent, WRONG)
    if refused >= MANY:
        shares = {reason: share for reason in REMEDIES if (share := get_mean(recent, f"{REFUSED}/{reason}")) > 0}
        most = max(shares, key=lambda reason: shares[reason], default="unreadable")
        said = ", ".join(f"{reason} {format_percent(share)}" for reason, share in shares.items())
        yield Finding(
            "problem" if refused >= ALL else "hint",
            "tests_refused",
            f"{format_percent(refused)} of the written tests are refused ({said}): they break nothing",
            REMEDIES[most],
        )
    if wrong >= MANY:
        yield Finding(
            "problem" if wrong >= ALL else "hint",
            "tests_wrong",
            f"{format_percent(wrong)} of the written tests break right programs, and are not accepted",
            "let the reference compute the results (env.kwargs.expected=reference), fine-tune on more tests "
            "(sft.steps, env.kwargs.test_share), or a higher env.kwargs.penalty",
        )
    start, now = get_mean(rows[:START], DISTINCT), get_mean(recent[-START:], DISTINCT)
    if now < FEW_DISTINCT * start and get_mean(recent[-START:], BROKEN) <= get_mean(rows[:START], BROKEN):
        yield Finding(
            "problem" if now < COLLAPSED * start else "hint",
            "tester_collapsed",
            f"of the tester's answers of a step {format_percent(now)} are different, where the first steps had "
            f"{format_percent(start)}, and they break no more programs: the tester writes the same again and again",
            "a lower env.kwargs.tester_weight or training.optimizer.learning_rate, or an entropy bonus "
            "(algorithm.entropy_coef)",
        )
