"""Groups of failing tasks: a planted one is found and named once, noise has none, and the test is Fisher's."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import scipy
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlvr.core.protocols import TaskSource
from rlvr.core.types import Task
from rlvr.training.failure_groups import (
    TaskOutcome,
    find_failure_groups,
    log_fisher,
    lowest_kind_rate,
    split_words,
    task_features,
)


def draw_tasks(draw: random.Random, count: int, rate: Callable[[dict[str, str]], float]) -> list[TaskOutcome]:
    """Tasks of three levels, six shapes and some words, with eight completions each that pass with chance `rate`."""
    outcomes: list[TaskOutcome] = []
    for _ in range(count):
        features = {
            "level": str(draw.randrange(1, 4)),
            "shape": draw.choice("uvwxyz"),
            "prompt words": str(draw.randrange(5, 40)),
        }
        words = frozenset(draw.sample(["add", "take", "turn", "sum", "join", "cut"], 2))
        passed = sum(draw.random() < rate(features) for _ in range(8))
        outcomes.append(TaskOutcome(features, passed / 8, words))
    return outcomes


# --- what is found -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [90, 1200])
@pytest.mark.parametrize("seed", range(10))
def test_a_planted_group_is_found_alone_with_its_rates(count: int, seed: int):
    outcomes = draw_tasks(random.Random(seed), count, lambda f: 0.1 if f["shape"] == "x" else 0.98)
    planted = [o.rate for o in outcomes if o.features["shape"] == "x"]
    [found] = find_failure_groups(outcomes)
    others = [o.rate for o in outcomes if o.features["shape"] != "x"]
    assert (found.name, found.tasks) == ("shape x", len(planted))
    assert found.rate == pytest.approx(sum(planted) / len(planted))
    assert found.rate_of_others == pytest.approx(sum(others) / len(others))
    assert found.is_unsolved and found.p_value < 0.001


def test_noise_has_no_groups_in_a_thousand_data_sets():
    """Fewer than 5 % of data sets without any structure; the rate differs from set to set and from task to task."""
    draw, alarms = random.Random(0), 0
    for _ in range(1000):
        centre = draw.random()
        outcomes = draw_tasks(draw, draw.choice([20, 60, 200]), lambda _, c=centre: draw.choice([c, c / 2, 1 - c / 2]))
        alarms += bool(find_failure_groups(outcomes))
    assert alarms < 50


@given(st.integers(1, 4), st.integers(0, 30), st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_too_few_tasks_inside_or_outside_are_no_group(inside: int, outside: int, seed: int):
    failing = [TaskOutcome({"shape": "x"}, 0.0)] * inside
    passing = [TaskOutcome({"shape": "y"}, 1.0)] * outside
    assert find_failure_groups(failing + passing) == find_failure_groups(failing * 10 + passing[:4]) == []


@given(st.integers(6, 40), st.integers(6, 40))
@settings(deadline=None)
def test_a_group_needs_significance_and_size_of_effect(inside: int, outside: int):
    def rate_of(low: float, high: float) -> list[str]:
        outcomes = [TaskOutcome({"kind": "a"}, low)] * inside + [TaskOutcome({"kind": "b"}, high)] * outside
        return [group.name for group in find_failure_groups(outcomes)]

    assert rate_of(0.49, 0.51) == rate_of(0.6, 1.0) == rate_of(1.0, 1.0) == rate_of(0.0, 0.0) == []
    chance = 1 / math.comb(inside + outside, inside)  # of all failing tasks lying in one of two candidates
    assert rate_of(0.0, 1.0) == (["kind a"] if 2 * chance < 0.01 else [])


def test_equal_groups_have_the_first_name_and_nested_ones_are_left_out():
    """The shape is the reason: its level holds it, and a word, an alias and a part of it lie in it."""
    outcomes: list[TaskOutcome] = []
    for i in range(200):
        shape = "abcd"[i % 4]
        words = frozenset({"the", *(["twist"] if shape == "d" else []), *(["rare"] if i % 8 == 3 else [])})
        features = {"level": "2" if shape in "cd" else "1", "shape": shape, "alias": shape.upper()}
        outcomes.append(TaskOutcome(features, 0.0 if shape == "d" else 1.0, words))
    [found] = find_failure_groups(outcomes)
    assert (found.name, found.tasks, found.rate, found.rate_of_others) == ("shape d", 50, 0.0, 1.0)


def test_a_word_is_found_where_no_property_explains_the_failures():
    outcomes = [
        TaskOutcome(
            {"level": str(i % 2)}, 0.0 if i % 5 == 0 else 1.0, frozenset({"a", "percent"} if i % 5 == 0 else "a")
        )
        for i in range(100)
    ]
    assert [group.name for group in find_failure_groups(outcomes)] == ['"percent" in the prompt']


def test_at_most_three_groups_the_strongest_first_and_the_others_are_those_in_none():
    sizes = {"a": 30, "b": 25, "c": 20, "d": 15, "e": 110}
    outcomes = [
        TaskOutcome({"kind": kind}, 1.0 if kind == "e" else 0.0) for kind, size in sizes.items() for _ in range(size)
    ]
    groups = find_failure_groups(outcomes)
    assert [(group.name, group.tasks) for group in groups] == [("kind a", 30), ("kind b", 25), ("kind c", 20)]
    assert {group.rate_of_others for group in groups} == {110 / 125}


def test_a_name_is_one_short_line():
    outcomes = [TaskOutcome({"source": f"{'ab'[i % 2]}\n" + "x " * 99}, i % 2) for i in range(40)]
    [found] = find_failure_groups(outcomes)
    assert found.name == ("source a" + " x" * 99)[:80]


def test_long_prompts_are_a_group_by_quarters():
    outcomes = [TaskOutcome({"prompt words": str(n)}, 1.0 if n <= 30 else 0.0) for n in range(1, 41)]
    assert [group.name for group in find_failure_groups(outcomes)] == ["prompt of 31 to 40 words"]
    assert find_failure_groups([TaskOutcome({"prompt words": "many"}, i % 2) for i in range(40)]) == []


# --- the test ----------------------------------------------------------------------------------------------------


@given(st.integers(1, 60), st.integers(0, 60), st.integers(0, 60), st.data())
@settings(deadline=None)
def test_the_chance_is_that_of_fishers_exact_test(total: int, failing: int, drawn: int, data: st.DataObject):
    assume(failing <= total and drawn <= total)
    failures = data.draw(st.integers(max(0, drawn - (total - failing)), min(failing, drawn)))
    table = [[failures, drawn - failures], [failing - failures, total - drawn - failing + failures]]
    expected = scipy.stats.fisher_exact(table, alternative="greater").pvalue
    assert math.exp(log_fisher(failures, drawn, failing, total)) == pytest.approx(expected, rel=1e-9)


def test_a_chance_too_small_for_a_float_keeps_its_order():
    assert log_fisher(700, 700, 700, 1400) < log_fisher(600, 600, 700, 1400) < math.log(1e-200)


# --- properties of a task ----------------------------------------------------------------------------------------


class Described(TaskSource):
    levels, reward = ("1",), "exact_match"

    def describe_task(self, task: Task) -> dict[str, str]:
        return {"shape": "n n o", "size": 3}  # type: ignore[dict-item]

    train = heldout = env = demonstration = None  # type: ignore[assignment]


def test_the_properties_of_a_task_are_its_level_what_its_source_says_and_its_length():
    source = Described()
    known = {"shape": "n n o", "size": "3", "prompt words": "4"}
    assert task_features(source, Task("a", "<boe> 3 4 +", {}, "1")) == {"level": "1", **known}
    assert task_features(source, Task("a", "<boe> 3 4 +")) == known


def test_words_have_no_case_and_no_punctuation_around_them():
    assert split_words('Add "3", then (don\'t) add + 3!') == {"add", "3", "then", "don't", "+"}
    assert split_words("... !") == {"...", "!"}


def test_the_lowest_kind_is_that_of_a_property_with_enough_tasks():
    """By hand: 10 of level 1 at 1.0, 10 of level 2 of which the odd ones pass; a shape of 9 tasks is not measured."""
    tasks = [({"level": "1", "prompt words": "3"}, 1.0)] * 10
    tasks += [({"level": "2", "shape": "rare" if i < 9 else "last"}, float(i % 2)) for i in range(10)]
    assert lowest_kind_rate(tasks) == 0.5
    assert lowest_kind_rate([*tasks, ({"level": "2", "shape": "rare"}, 0.0)]) == pytest.approx(4 / 10)
    assert lowest_kind_rate(tasks[:9]) == 1.0 and lowest_kind_rate([]) == 0.0
