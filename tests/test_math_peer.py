"""Pairs that go to math-verify: from several threads and beside hostile ones."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlvr.reward import resolve_reward
from rlvr.types import Outcome, Task, Trajectory

pytestmark = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed")
HONEST = ("1+\\sqrt2", "\\sqrt{3+2\\sqrt2}")


def outcome(gold: str, answer: str) -> Outcome:
    task = Task("t", "", {"answer": gold})
    reward = resolve_reward("math", timeout_s=2.0)
    return reward.score([Trajectory("", [], f"\\boxed{{{answer}}}", [], task=task)])[0].outcome


def test_an_honest_pair_is_never_late_because_of_another_threads_hostile_one():
    hostile = ("\\int_0^1 x^2 dx", "\\sum_{k=1}^{\\infty} \\frac{\\sin k}{k^3}")
    with ThreadPoolExecutor(4) as threads:
        got = list(threads.map(lambda pair: outcome(*pair), [HONEST, hostile] * 4))
    assert got[::2] == [Outcome.PASSED] * 4
    assert set(got[1::2]) <= {Outcome.FAILED, Outcome.TIMEOUT}


def test_a_worker_that_was_killed_costs_the_next_pair_nothing():
    from rlvr.reward.math import pool

    assert outcome(*HONEST) is Outcome.PASSED
    for worker in list(pool._pool().idle):
        worker.close()
    assert outcome(*HONEST) is Outcome.PASSED


@pytest.mark.parametrize("answer", ["x^{9^{9^9}}", "\\int_0^1 10^{99999} dx", "\\int_0^1 (10^{8})! dx"])
def test_numbers_that_only_a_kill_would_stop_are_not_asked(answer):
    assert outcome("\\int_0^1 x^2 dx", answer) is Outcome.FAILED
