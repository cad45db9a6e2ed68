"""pass@k, intervals and the paired test, each against an independent computation."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import scipy
from hypothesis import given
from hypothesis import strategies as st

from rlvr.clients.mock.mock_client import MockSamplingClient, TablePolicy
from rlvr.core.messages import SamplingParams
from rlvr.core.protocols import TaskSource
from rlvr.core.task_statistics import mean_interval, share_interval
from rlvr.core.types import Task
from rlvr.envs import PromptEnv, resolve_environment
from rlvr.reward import resolve_reward
from rlvr.tracking.run_report import final_table
from rlvr.training.errors import TrainingStoppedError
from rlvr.training.evaluate import (
    Evaluation,
    EvaluationOptions,
    TaskResult,
    compare_evaluations,
    evaluate,
    evaluation_params,
    extra_heldout,
    heldout_split,
    paired_p_value,
    pass_at_k,
)


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


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    """400 data sets of 60 tasks with 4 correlated samples each: coverage between 91 and 98.5 %."""
    rng = np.random.default_rng(0)
    hits = hits_reward = 0
    for _ in range(400):
        skill = rng.beta(2, 1, size=60)  # mean 2/3
        passes = rng.binomial(4, skill) / 4
        found, reward = share_interval(list(passes), [4] * 60), mean_interval(list(passes))
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
    assert scipy.stats.ttest_ind(before, after).pvalue > 0.05
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


class Letters(TaskSource):
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

    def describe_task(self, task: Task) -> dict[str, str]:
        return {"says": task.meta["answer"]}


def test_evaluation_counts_per_task_and_repeats_to_the_bit() -> None:
    """A table that always says `a`: level easy passes always, hard never; equal draws give equal results."""
    policy = TablePolicy(["say", "a", "b"])
    policy.logits[:] = -40.0
    policy.logits[policy.tokenizer.ids["a"]] = 0.0

    def run() -> Evaluation:
        return evaluate(
            Letters(), Letters().heldout(None), MockSamplingClient(policy), resolve_reward("exact_match"),
            SamplingParams(max_tokens=1), samples=3, k=2, seed=5, error_budget=0.05,
        )  # fmt: skip

    result = run()
    assert [(r.id, r.passed, r.judged) for r in result.results] == [("say a", 3, 3), ("say b", 0, 3)]
    assert result.metrics()["pass@1"].value == 0.5
    assert result.metrics("easy")["pass@2"].value == 1.0
    assert result == run() == Evaluation.from_json(result.to_json())
    assert [r.features for r in result.results] == [
        {"level": "easy", "says": "a", "prompt words": "2"},
        {"level": "hard", "says": "b", "prompt words": "2"},
    ]
    assert compare_evaluations(result, result)["p_value"] == 1.0
    assert math.isfinite(result.metrics()["mean_reward"].low)


def test_families_are_reported_beside_the_whole() -> None:
    """Two families by hand; one alone, or thirteen, are not listed."""

    def of(families: list[str], passed: int) -> Evaluation:
        results = [
            TaskResult(str(i), "", passed, 4, passed / 4, features={"family": name, "prompt words": "3"})
            for i, name in enumerate(families)
        ]
        return Evaluation(results, k=4)

    both = ["sums", "sums", "records"]
    compared = compare_evaluations(of(both, 1), of(both, 3))
    assert {
        name: (one["tasks"], one["baseline"]["pass@1"]["value"], one["final"]["pass@1"]["value"])
        for name, one in compared["by_family"].items()
    } == {"records": (1, 0.25, 0.75), "sums": (2, 0.25, 0.75)}
    assert "pass@1, family sums (n = 2)" in final_table(compared)
    assert of(["sums"] * 3, 1).by_family() == of([str(i) for i in range(13)], 1).by_family() == {}


def test_a_verifier_that_fails_now_and_then_cannot_make_a_perfect_score() -> None:
    """Errors on all the wrong answers would leave 100 %: past the budget the evaluation stops."""

    def breaks_on_b(prompt: str, response: str, meta: object = None) -> float:
        if response != "a":
            raise RuntimeError("cannot parse")
        return 1.0

    with pytest.raises(TrainingStoppedError, match="cannot parse"):
        evaluate(
            Letters(), Letters().heldout(None), MockSamplingClient(TablePolicy(["say", "a", "b"])),
            resolve_reward(breaks_on_b), SamplingParams(max_tokens=1), samples=20, k=1, seed=5, error_budget=0.05,
        )  # fmt: skip


def test_the_budget_of_errors_counts_completions_and_not_tasks() -> None:
    """1 error in 40 completions of two tasks: within 2.5 %, and not within 2 %."""
    calls: list[str] = []

    def breaks_once(prompt: str, response: str, meta: object = None) -> float:
        calls.append(response)
        if len(calls) == 3:
            raise RuntimeError("cannot parse")
        return 1.0

    def evaluate_within(budget: float) -> Evaluation:
        calls.clear()
        return evaluate(
            Letters(), Letters().heldout(None), MockSamplingClient(TablePolicy(["say", "a", "b"])),
            resolve_reward(breaks_once), SamplingParams(max_tokens=1), samples=20, k=1, seed=5, error_budget=budget,
        )  # fmt: skip

    assert evaluate_within(0.025).unjudged == 1
    with pytest.raises(TrainingStoppedError, match="cannot parse"):
        evaluate_within(0.02)


def test_an_evaluation_samples_from_the_whole_distribution_at_its_own_temperature() -> None:
    cut = SamplingParams(max_tokens=4, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1)
    params = evaluation_params(cut, EvaluationOptions(temperature=0.5))
    assert params == SamplingParams(max_tokens=4, temperature=0.5, top_p=1.0, top_k=-1, min_p=0.0)


def test_looks_use_tasks_that_are_never_reported() -> None:
    """What a run may stop by is disjoint from what it reports, and both parts are the same every time."""
    source = resolve_environment("rpn_arithmetic")
    options = EvaluationOptions(tasks=300, interim_tasks=100)
    reported, looked = heldout_split(source, options, has_interim=True)
    assert (len(reported), len(looked)) == (300, 100)
    assert not {t.id for t in reported} & {t.id for t in looked}
    assert heldout_split(source, options, has_interim=True) == (reported, looked)
    assert len(heldout_split(source, options, has_interim=False)[1]) == 0
    few, some = heldout_split(Letters(), EvaluationOptions(tasks=5, interim_tasks=5), has_interim=True)
    assert len(few) + len(some) == 2 and few


def test_interim_evaluations_may_take_the_reported_tasks_where_no_run_stops_by_them() -> None:
    source, options = Letters(), EvaluationOptions(tasks=5, interim_tasks=None)
    reported, looked = heldout_split(source, options, has_interim=True)
    assert looked == reported == source.heldout(5)
    assert heldout_split(source, options, has_interim=False) == (reported, [])
    with pytest.raises(ValueError, match=r"evaluation\.interim_tasks=0, expected at least 1"):
        EvaluationOptions(interim_tasks=0)


def test_only_tasks_that_both_sides_judged_are_compared() -> None:
    before = Evaluation([TaskResult("easy", "", 4, 4, 1.0), TaskResult("hard", "", 0, 4, 0.0)], k=4)
    after = Evaluation([TaskResult("easy", "", 4, 4, 1.0)], k=4, unjudged=4)
    summary = compare_evaluations(before, after)
    assert summary["baseline"]["pass@1"]["value"] == summary["final"]["pass@1"]["value"] == 1.0
    assert summary["tasks"] == 1 and summary["unjudged"] == 4


def test_other_held_out_sets_are_a_quarter_as_large_and_empty_ones_are_left_out() -> None:
    class Offers(Letters):
        def extra_heldout(self, count: int) -> dict[str, list[Task]]:
            return {"first": self.heldout(None) * count, "none": []}

    assert {name: len(tasks) for name, tasks in extra_heldout(Offers(), EvaluationOptions(tasks=9)).items()} == {
        "first": 4
    }
    assert extra_heldout(Letters(), EvaluationOptions()) == {}


def test_other_held_out_sets_are_compared_by_themselves_and_change_no_other_number() -> None:
    before, after = evaluation([1] * 30), evaluation([2] * 30)
    other = {"families": evaluation([0] * 6)}, {"families": evaluation([4] * 6)}
    with_other = [replace(e, extra_heldout=o) for e, o in zip((before, after), other, strict=True)]
    summary = compare_evaluations(*with_other)
    assert summary["beside"]["families"]["final"]["pass@1"]["value"] == 1.0
    assert summary["beside"]["families"]["tasks"] == 6 and summary["beside"]["families"]["p_value"] == 2 / 64
    assert summary | {"beside": {}} == compare_evaluations(before, after)
    assert Evaluation.from_json(with_other[1].to_json()) == with_other[1]
    with pytest.raises(ValueError, match="not a stored evaluation"):
        Evaluation.from_json({**before.to_json(), "beside": [1]})


def test_an_evaluation_stored_without_properties_of_tasks_is_read() -> None:
    stored = evaluation([1, 2]).to_json()
    for row in stored["results"]:
        del row["features"]
    assert Evaluation.from_json(stored) == evaluation([1, 2])
    with pytest.raises(ValueError, match=r"results\[0\] is not a stored task result"):
        Evaluation.from_json({**stored, "results": [{**stored["results"][0], "features": ["a"]}]})


def test_the_change_is_paired_by_task_with_its_interval() -> None:
    """Four tasks of four completions go up by one and the others stay: 4 / 10 x 0.25, with a spread of 0.1225.

    Student's t of nine degrees of freedom is 2.262157.
    """
    change = compare_evaluations(evaluation([1] * 10), evaluation([2] * 4 + [1] * 6))["change"]
    half = 2.262157 * 0.1224745 / 3
    assert change["value"] == pytest.approx(0.1)
    assert (change["low"], change["high"]) == pytest.approx((0.1 - half, 0.1 + half), abs=1e-6)


@pytest.mark.parametrize(("moved", "exact"), [(1, 1.0), (2, 0.5), (3, 0.25), (6, 2 / 64)])
def test_a_handful_of_changed_tasks_is_tested_exactly(moved: int, exact: float) -> None:
    """n tasks that all improved alike have a two-sided p of 2 / 2^n; the normal approximation would say less."""
    before, after = [1] * 20, [2] * moved + [1] * (20 - moved)
    assert paired_p_value(evaluation(before), evaluation(after)) == pytest.approx(exact)


def test_equal_changes_tie_whatever_their_rounding() -> None:
    """0.3 - 0.2 and 0.1 - 0.0 differ in the last bit; their ranks may not: 32 gains and 4 losses of one size."""
    passed = [(0, 1), (1, 2), (2, 3), (3, 4), (5, 6), (6, 7), (7, 8), (4, 3), (8, 9)] * 4
    before, after = (evaluation([pair[i] for pair in passed], judged=10) for i in (0, 1))
    exact = 2 * sum(math.comb(36, k) for k in range(5)) / 2**36
    assert paired_p_value(before, after) == pytest.approx(exact)


def test_all_metrics_are_over_the_tasks_with_k_verdicts_and_say_how_many() -> None:
    """The verifier failed on one completion of the third task: 3 of 3 would raise pass@1 and not pass@4."""
    results = [TaskResult("a", "1", 4, 4, 1.0), TaskResult("b", "1", 0, 4, 0.0), TaskResult("c", "2", 3, 3, 1.0)]
    found = Evaluation([replace(r, watched={"w": 1.0}) for r in results], k=4, unjudged=1)
    assert {name: (rate.value, rate.n) for name, rate in found.metrics().items()} == {
        "pass@1": (0.5, 2), "pass@4": (0.5, 2), "mean_reward": (0.5, 2), "watched/w": (1.0, 2),
    }  # fmt: skip
    assert found.intervals("2")["pass@1"] == {"value": None, "low": None, "high": None, "n": 0}
    alone = Evaluation(results[2:], k=4, unjudged=1).metrics()
    assert alone["pass@1"].n == 1 and alone["pass@4"].n == 0 and math.isnan(alone["pass@4"].value)


def test_two_evaluations_are_compared_over_the_tasks_with_k_verdicts_in_both() -> None:
    before = Evaluation([TaskResult(t, "", 1, judged, 0.25) for t, judged in zip("abc", (4, 4, 3), strict=True)], k=4)
    after = Evaluation([TaskResult(t, "", 2, judged, 0.5) for t, judged in zip("abcd", (4, 2, 4, 4), strict=True)], k=4)
    summary = compare_evaluations(before, after)
    assert summary["tasks"] == 1 and summary["incomplete"] == 3
    for side, rate in (("baseline", 0.25), ("final", 0.5)):
        assert {name: estimate["n"] for name, estimate in summary[side].items()} == dict.fromkeys(summary[side], 1)
        assert summary[side]["pass@1"]["value"] == rate
    assert summary["change"] == {"value": 0.25, "low": None, "high": None, "n": 1} and summary["p_value"] == 1.0
