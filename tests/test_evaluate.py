"""pass@k, intervals and the paired test, each against an independent computation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from rlvr.clients.mock import MockSamplingClient, TablePolicy
from rlvr.envs import PromptEnv
from rlvr.protocols import SamplingParams
from rlvr.reward import resolve_reward
from rlvr.training.evaluate import Evaluation, TaskResult, average, compare, evaluate, paired_p_value, pass_at_k, share
from rlvr.types import Task


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_k_subsets_with_a_pass(nck: tuple[int, int, int]) -> None:
    """Counted by enumerating all subsets."""
    n, c, k = nck
    answers = [True] * c + [False] * (n - c)
    subsets = list(itertools.combinations(answers, k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


def test_pass_at_k_refuses_more_samples_than_there_are() -> None:
    with pytest.raises(ValueError, match="k=9"):
        pass_at_k(8, 3, 9)


def test_for_yes_or_no_tasks_the_interval_is_wilsons() -> None:
    """Held against scipy's; n - 1 in the variance makes ours a hair wider."""
    values = [1.0] * 90 + [0.0] * 10
    ours, theirs = share(values), stats.binomtest(90, 100).proportion_ci(method="wilson")
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=2e-3)


def test_an_interval_never_leaves_the_unit_interval_nor_shrinks_to_a_point() -> None:
    everything = share([1.0] * 50)
    assert everything.value == 1.0 and everything.high == 1.0 and 0.9 < everything.low < 1.0
    nothing = share([0.0] * 50)
    assert nothing.value == 0.0 and nothing.low == 0.0 and 0.0 < nothing.high < 0.1


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    """400 data sets of 60 tasks with 4 correlated samples each: coverage between 91 and 98.5 %."""
    rng = np.random.default_rng(0)
    hits = hits_reward = 0
    for _ in range(400):
        skill = rng.beta(2, 1, size=60)  # mean 2/3
        passes = rng.binomial(4, skill) / 4
        found, reward = share(list(passes)), average(list(passes))
        hits += found.low <= 2 / 3 <= found.high
        hits_reward += reward.low <= 2 / 3 <= reward.high
    assert 0.91 <= hits / 400 <= 0.985
    assert 0.91 <= hits_reward / 400 <= 0.985


def evaluation(passed: list[int], judged: int = 4) -> Evaluation:
    return Evaluation([TaskResult(f"t{i}", "", p, judged, p / judged) for i, p in enumerate(passed)], k=judged)


def test_the_paired_test_sees_a_small_consistent_gain_that_an_unpaired_one_misses() -> None:
    rng = np.random.default_rng(1)
    before = list(rng.integers(0, 4, size=80))
    after = [b + (i % 3 == 0) for i, b in enumerate(before)]
    p = paired_p_value(evaluation(before), evaluation(after))
    assert p < 1e-4
    assert stats.ttest_ind(before, after).pvalue > 0.05
    assert paired_p_value(evaluation(before), evaluation(before)) == 1.0


def test_a_control_without_effect_is_significant_about_one_time_in_twenty() -> None:
    """False positive rate of the paired test at 0.05 over 400 comparisons of one policy with itself."""
    rng = np.random.default_rng(2)
    found = 0
    for _ in range(400):
        skill = rng.beta(1, 1, size=60)
        a, b = (evaluation(list(rng.binomial(4, skill))) for _ in range(2))
        found += paired_p_value(a, b) < 0.05
    assert 0.02 <= found / 400 <= 0.085


class Letters:
    """Held-out tasks `say a` and `say b`; levels `easy` and `hard`."""

    levels, reward, vocabulary = ("easy", "hard"), "exact_match", ("a", "b")

    def train(self, seed: int, index: int, level: str) -> Task:
        raise AssertionError("evaluation must not touch training tasks")

    def heldout(self, count: int | None) -> list[Task]:
        return [Task(f"say {w}", f"say {w}", {"answer": w}, level) for w, level in (("a", "easy"), ("b", "hard"))]

    def env(self, task: Task, tokenizer: object) -> PromptEnv:
        return PromptEnv(task, tokenizer)

    def demonstration(self, task: Task, key: int) -> str | None:
        return None


def test_evaluation_counts_per_task_and_repeats_to_the_bit() -> None:
    """A table that always says `a`: level easy passes always, hard never; equal draws give equal results."""
    policy = TablePolicy(["say", "a", "b"])
    policy.logits[:] = -40.0
    policy.logits[policy.tokenizer.ids["a"]] = 0.0

    def run() -> Evaluation:
        return evaluate(
            Letters(), Letters().heldout(None), MockSamplingClient(policy), resolve_reward("exact_match"),
            SamplingParams(max_tokens=1), samples=3, k=2, seed=5,
        )  # fmt: skip

    result = run()
    assert [(r.id, r.passed, r.judged) for r in result.results] == [("say a", 3, 3), ("say b", 0, 3)]
    assert result.metrics()["pass@1"].value == 0.5
    assert result.metrics("easy")["pass@2"].value == 1.0
    assert result == run() == Evaluation.from_json(result.to_json())
    assert compare(result, result)["p_value"] == 1.0
    assert math.isfinite(result.metrics()["mean_reward"].low)
