"""Findings about the roles of one policy: a proposer of tasks, a tester of programs, a verifier of answers.

What such a role writes is refused, is wrong, or is the same again and again. A part of `rlvr.training.diagnosis`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from rlvr.training.finding import Finding, format_percent
from rlvr.training.metric_values import WINDOW, Rows, get_mean
from rlvr.training.update_findings import START

PROPOSALS, TESTS, VERDICTS = "env/all/proposals/", "env/all/tests/", "env/all/verdicts/"
DISTINCT = "env/all/distinct/"  # before the name of a role
BROKEN = "env/all/broken/wrong"
MANY, ALL = 0.5, 0.95  # shares of what a role wrote that are refused, or wrong
FEW_DISTINCT, COLLAPSED = 0.5, 0.2  # shares of different answers in a step, of those of the first steps
ALWAYS, FOOLED, SILENT = 0.9, 0.5, 0.5  # shares of answers of one kind, and of verdicts
PROPOSAL_REMEDIES = {
    "unreadable": "fine-tune on more proposals (sft.steps, env.kwargs.proposal_share)",
    "size": "let env.kwargs.inner_kwargs allow larger tasks, or fine-tune on proposals (sft.steps)",
    "heldout": "hold fewer tasks out (env.kwargs.inner_kwargs)",
    "copied": "fine-tune on more proposals (sft.steps), or leave {example} out of env.kwargs.instruction",
    "repeated": "a higher rollout.temperature, an entropy bonus (algorithm.entropy_coef), or a smaller "
    "training.group_size",
}
TEST_REMEDIES = {
    "unreadable": "fine-tune on more tests (sft.steps, env.kwargs.test_share), or say in env.kwargs.instruction what a "
    "test looks like",
    "size": "a higher env.kwargs.max_characters",
    "many": "ask for fewer tests in env.kwargs.instruction, or allow more (env.kwargs.tests)",
    "copied": "fine-tune on more tests (sft.steps, env.kwargs.test_share), or show fewer (env.kwargs.inner_kwargs)",
    "repeated": "a higher rollout.temperature, or fewer tests (env.kwargs.tests)",
}


def find_role_faults(rows: Rows) -> Iterator[Finding]:
    """What the last of these steps of reinforcement learning say about proposals, tests and verdicts."""
    recent = rows[-WINDOW:]
    yield from _proposals(recent, rows)
    yield from _tests(recent, rows)
    yield from _verdicts(recent)


def _proposals(recent: Rows, rows: Rows) -> Iterator[Finding]:
    refused, said, remedy = _refusals(recent, PROPOSALS, PROPOSAL_REMEDIES)
    if refused >= MANY:
        yield Finding(
            "problem" if refused >= ALL else "hint",
            "proposals_refused",
            f"{format_percent(refused)} of the proposed tasks are refused ({said}): the solver has "
            f"{'nothing' if refused >= ALL else 'little'} to learn from",
            remedy,
        )
    start, now = _distinct(rows, "proposer")
    if now < FEW_DISTINCT * start:
        yield Finding(
            "problem" if now < COLLAPSED * start else "hint",
            "proposer_collapsed",
            f"of the proposals of a step {format_percent(now)} are different, where the first steps had "
            f"{format_percent(start)}: the proposer writes the same tasks again and again",
            "a lower env.kwargs.proposer_weight or training.optimizer.learning_rate, an entropy bonus "
            "(algorithm.entropy_coef), or more examples in env.kwargs.instruction ({example})",
        )


def _tests(recent: Rows, rows: Rows) -> Iterator[Finding]:
    refused, said, remedy = _refusals(recent, TESTS, TEST_REMEDIES)
    if refused >= MANY:
        yield Finding(
            "problem" if refused >= ALL else "hint",
            "tests_refused",
            f"{format_percent(refused)} of the written tests are refused ({said}): they break nothing",
            remedy,
        )
    wrong = get_mean(recent, f"{TESTS}wrong")
    if wrong >= MANY:
        yield Finding(
            "problem" if wrong >= ALL else "hint",
            "tests_wrong",
            f"{format_percent(wrong)} of the written tests break right programs, and are not accepted",
            "let the reference compute the results (env.kwargs.expected=reference), fine-tune on more tests "
            "(sft.steps, env.kwargs.test_share), or a higher env.kwargs.penalty",
        )
    start, now = _distinct(rows, "tester")
    if now < FEW_DISTINCT * start and get_mean(rows[-START:], BROKEN) <= get_mean(rows[:START], BROKEN):
        yield Finding(
            "problem" if now < COLLAPSED * start else "hint",
            "tester_collapsed",
            f"of the tester's answers of a step {format_percent(now)} are different, where the first steps had "
            f"{format_percent(start)}, and they break no more programs: the tester writes the same again and again",
            "a lower env.kwargs.tester_weight or training.optimizer.learning_rate, or an entropy bonus "
            "(algorithm.entropy_coef)",
        )


def _verdicts(recent: Rows) -> Iterator[Finding]:
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


def _refusals(recent: Rows, before: str, remedies: Mapping[str, str]) -> tuple[float, str, str]:
    """The share of what was refused, its reasons as text, and the remedy of the most frequent one."""
    refused = {reason: get_mean(recent, f"{before}refused/{reason}") for reason in remedies}
    shares = {reason: share for reason, share in refused.items() if share > 0}
    most = max(shares, key=lambda reason: shares[reason], default="unreadable")
    said = ", ".join(f"{reason} {format_percent(share)}" for reason, share in shares.items())
    return get_mean(recent, f"{before}refused"), said, remedies[most]


def _distinct(rows: Rows, role: str) -> tuple[float, float]:
    """The share of a role's answers of a step that are different, in the first steps and in the last ones."""
    return get_mean(rows[:START], DISTINCT + role), get_mean(rows[-START:], DISTINCT + role)
