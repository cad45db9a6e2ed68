"""keyword_contains, length_penalty, format_compliance and composite, by their formulas."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.core.types import Outcome, Score, Trajectory
from rlvr.reward import register_reward, resolve_reward

NUMBERED = ("1. a\n2. b\n3) c", "Steps:\n1. a\n\n2. b\n", "1. a", "Intro\n1. a")
NOT_NUMBERED = ("", "a\nb", "2. a\n3. b", "1. a\n1. b", "1. a\nb\nc", "1.5 apples", "1.", "1. a\n3. b")
JSON = ("{}", " [1, 2]\n", '{"a": {"b": [1e999, ' + "9" * 5000 + "]}}")
NOT_JSON = ("", "3", '"a"', "{", "{'a': 1}", "[NaN]", "```json\n{}\n```", "[" * 90_000, "[" + " " * 200_000 + "]")


@pytest.mark.parametrize(
    ("mode", "response", "expected"),
    [
        ("any", "The ANSWER is here", 1.0),
        ("any", "resolutions", 1.0),
        ("any", "nothing", -0.5),
        ("all", "answer", -0.5),
        ("all", "a solution, an answer", 1.0),
        ("any", "", -0.5),
        ("any", "answe r", -0.5),
    ],
)
def test_keyword_contains(mode, response, expected):
    assert resolve_reward("keyword_contains", keywords=["Solution", "answer"], mode=mode)("p", response) == expected


@pytest.mark.parametrize("bad", [[], "answer", [""], [3], 5, None, {"answer": 1}])
def test_keywords_must_be_a_list_of_words(bad):
    with pytest.raises(ValueError, match="expected a non-empty list of words"):
        resolve_reward("keyword_contains", keywords=bad)
    with pytest.raises(ValueError, match=r"mode='al' \(did you mean 'all'\?\)"):
        resolve_reward("keyword_contains", keywords=["a"], mode="al")


@pytest.mark.parametrize(("words", "expected"), [(50, 1.0), (40, 0.9), (60, 0.9), (0, 0.5), (250, -1.0), (9999, -1.0)])
def test_length_penalty(words, expected):
    assert resolve_reward("length_penalty")("p", "word " * words) == pytest.approx(expected, abs=1e-12)


def test_length_penalty_options():
    assert resolve_reward("length_penalty", target_length=2, penalty_per_token=0.25)("p", "a b c") == 0.75
    for option, bad in (
        ("target_length", -1),
        ("target_length", 1.5),
        ("penalty_per_token", -0.1),
        ("penalty_per_token", True),
        ("penalty_per_token", float("nan")),
    ):
        with pytest.raises(ValueError, match=f"{option}={bad}, expected"):
            resolve_reward("length_penalty", **{option: bad})


@pytest.mark.parametrize(("name", "good", "bad"), [("json", JSON, NOT_JSON), ("numbered_list", NUMBERED, NOT_NUMBERED)])
def test_format_compliance(name, good, bad):
    reward = resolve_reward("format_compliance", required_format=name)
    assert [reward("p", text) for text in good] == [1.0] * len(good)
    assert [reward("p", text) for text in bad] == [0.0] * len(bad)


def deeper(calls: int, work):
    return deeper(calls - 1, work) if calls else work()


def test_the_json_verdict_depends_on_the_text_alone_not_on_the_stack_of_the_caller():
    """Nested 100 deep at most; brackets in strings do not count."""
    reward = resolve_reward("format_compliance", required_format="json")

    def judge_nested():
        texts = "[" * 100 + "]" * 100, '{"a":' * 100 + "1" + "}" * 100, "[" * 101 + "]" * 101, "[" * 900 + "]" * 900
        return [reward("p", text) for text in (*texts, '["' + "[{" * 900 + '\\"["]', "[" + "[]," * 900 + "[]]")]

    assert [deeper(calls, judge_nested) for calls in (0, 200, 400)] == [[1, 1, 0, 0, 1, 1]] * 3


HOSTILE = ('"' + '\\"' * 49_000, "\\" * 99_999, '"' * 99_999, "[]" * 49_000, '["' + "\\[" * 49_000)


@pytest.mark.parametrize("text", HOSTILE, ids=("escaped quotes", "backslashes", "quotes", "lists", "escaped brackets"))
def test_hostile_json_takes_no_time(text):
    start = time.monotonic()
    assert resolve_reward("format_compliance", required_format="json")("p", text) == 0.0
    assert time.monotonic() - start < 2


def test_an_unknown_format_names_the_known_ones():
    with pytest.raises(
        ValueError, match=r"required_format='jsonl' \(did you mean 'json'\?\); known: json, numbered_list"
    ):
        resolve_reward("format_compliance", required_format="jsonl")


def parts(*weights: float) -> list[dict]:
    return [
        {"name": "keyword_contains", "weight": weights[0], "kwargs": {"keywords": ["solution"]}},
        {"name": "length_penalty", "weight": weights[1], "kwargs": {"target_length": 2}},
        {"name": "format_compliance", "weight": weights[2], "kwargs": {"required_format": "json"}},
    ]


def score(reward, response: str) -> Score:
    return reward.score([Trajectory("p", [1], response, [2])])[0]


def test_composite_is_the_weighted_mean_of_its_parts():
    reward = resolve_reward("composite", rewards=parts(0.5, 0.3, 0.2))
    got = score(reward, "the solution here")
    assert got.value == pytest.approx(0.5 * 1 + 0.3 * 0.99 + 0.2 * 0)
    assert got.parts == {"keyword_contains": 1.0, "length_penalty": 0.99, "format_compliance": 0.0}
    assert (got.outcome, got.reason) == (Outcome.FAILED, "wrong_format")
    assert reward("p", "the solution here") == got.value
    assert score(reward, '["solution"]').outcome is Outcome.PASSED
    assert score(resolve_reward("composite", rewards=parts(5, 3, 2)), "x").value == pytest.approx(
        score(reward, "x").value
    )


@given(st.lists(st.floats(0, 1e6), min_size=3, max_size=3).filter(lambda w: sum(w) > 1e-3), st.text(max_size=50))
def test_composite_stays_within_its_parts(weights, response):
    got = score(resolve_reward("composite", rewards=parts(*weights)), response)
    assert min(got.parts.values()) - 1e-9 <= got.value <= max(got.parts.values()) + 1e-9


def test_composite_weighs_what_its_parts_say_of_turns_and_branches():
    """A part without turns adds 0 to each; one without branches counts with its value."""

    def by_branch(prompt, response, meta=None):
        return Score(0.5, Outcome.PASSED, turns=(0.5, 0.25), branches=(1.0, 0.0, 0.2))

    def whole(prompt, response, meta=None):
        return Score(0.8, Outcome.PASSED)

    def other(prompt, response, meta=None):
        return Score(0.5, Outcome.PASSED, turns=(1.0,), branches=(1.0, 0.0, 0.2))

    both = resolve_reward("composite", rewards=[{"name": by_branch, "weight": 3}, {"name": whole, "weight": 1}])
    got = score(both, "x")
    assert got.value == pytest.approx(0.575)
    assert got.turns == pytest.approx((0.375, 0.1875))
    assert got.branches == pytest.approx((0.95, 0.2, 0.35))
    none = score(resolve_reward("composite", rewards=[{"name": whole}]), "x")
    assert (none.turns, none.branches) == ((), ())
    differ = score(resolve_reward("composite", rewards=[{"name": by_branch}, {"name": other}]), "x")
    assert (differ.value, differ.outcome, differ.reason) == (None, Outcome.ERROR, "turns_differ")
    assert differ.detail == "its parts score 1 and 2 turns of one answer"


def test_a_part_may_be_a_function_a_path_or_a_resolved_reward():
    def shouts(prompt, response, meta=None, *, factor=1.0):
        return factor * response.isupper()

    resolved = resolve_reward("keyword_contains", keywords=["YES"])
    rewards = [
        {"name": shouts, "weight": 2, "kwargs": {"factor": 0.5}},
        {"name": resolved},
        {"name": "rlvr.reward.text.form:length_penalty", "kwargs": {"target_length": 1}},
    ]
    got = score(resolve_reward("composite", rewards=rewards), "YES")
    assert got.parts == {"shouts": 0.5, "keyword_contains": 1.0, "rlvr.reward.text.form:length_penalty": 1.0}
    assert got.value == pytest.approx((2 * 0.5 + 1 + 1) / 4)


def test_a_composite_written_in_yaml_works(tmp_path):
    (tmp_path / "own.yaml").write_text("""
client: mock
env: {name: toy}
reward:
  type: composite
  kwargs:
    rewards:
      - {name: keyword_contains, weight: 0.5, kwargs: {keywords: [solution]}}
      - {name: length_penalty, weight: 1e-1, kwargs: {target_length: 3}}
      - {name: format_compliance, kwargs: {required_format: regex, pattern: '[a-z ]+', match: full}}
""")
    config = build_config(load(None, str(tmp_path / "own.yaml"), []))
    assert config.reward.type == "composite"
    got = score(resolve_reward(config.reward.type, **config.reward.kwargs), "the solution here")
    assert got.parts == {"keyword_contains": 1.0, "length_penalty": 1.0, "format_compliance": 1.0}
    assert got.value == pytest.approx(1.0) and got.outcome is Outcome.PASSED


def test_twins_in_a_composite_keep_their_own_parts():
    twins = [{"name": "keyword_contains", "kwargs": {"keywords": [k]}} for k in ("a", "b")]
    assert score(resolve_reward("composite", rewards=twins), "b").parts == {
        "keyword_contains": -0.5,
        "keyword_contains#2": 1.0,
    }


def test_an_error_or_an_invalid_part_is_that_of_the_whole():
    @register_reward("breaks")
    def breaks(prompt, response):
        raise OSError("down")

    @register_reward("abstains")
    def abstains(prompt, response):
        return None

    @register_reward("says_error")
    def says_error(prompt, response):
        return Score(None, Outcome.ERROR, "endpoint_down", detail="503")

    ok = {"name": "length_penalty"}
    for name, outcome, reason in (
        ("breaks", Outcome.ERROR, "exception"),
        ("abstains", Outcome.INVALID, "not_applicable"),
        ("says_error", Outcome.ERROR, "endpoint_down"),
    ):
        got = score(resolve_reward("composite", rewards=[ok, {"name": name, "weight": 0.1}]), "x")
        assert (got.value, got.outcome, got.reason) == (None, outcome, reason)
    with pytest.raises(OSError, match="down"):
        resolve_reward("composite", rewards=[ok, {"name": "breaks"}])("p", "x")


def test_composites_nest_and_hand_the_task_down():
    inner = {"name": "composite", "kwargs": {"rewards": [{"name": "exact_match"}]}}
    assert (
        resolve_reward("composite", rewards=[inner, {"name": "gsm8k", "weight": 3}])("p", "7", {"answer": "7"}) == 1.0
    )


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([], "expected a list"),
        (5, "expected a list"),
        ({"name": "boxed"}, "expected a list"),
        (["boxed"], r"part 1: 'boxed', expected a dictionary .* at least \{'name': 'boxed'\}"),
        ([{"name": 3}], "part 1: reward 3 is of type int; expected a function"),
        (
            [{"name": "boxed", "weight": "0.5"}],
            r"part 1 \(boxed\): weight='0.5', expected .* without quotes",
        ),
        ([{"name": "boxed", "weight": True}], "weight=True"),
        ([{"name": "boxed", "weight": None}], "weight=None"),
        ([{"name": lambda response, prompt: 1.0}], "part 1: .* has the signature .*; accepted: "),
        ("boxed", "expected a list"),
        ([{"weight": 1}], r"part 1: .* expected a dictionary"),
        (
            [{"name": "length_penalty"}, {"name": "length_penaltie"}],
            r"part 2: unknown reward .*did you mean 'length_penalty'",
        ),
        ([{"name": "boxed", "wieght": 1}], r"key='wieght' \(did you mean 'weight'\?\)"),
        ([{"name": "boxed", "weight": "high"}], "weight='high', expected a finite number"),
        ([{"name": "boxed", "weight": -1}], "weight=-1"),
        ([{"name": "boxed", "weight": float("nan")}], "weight=nan"),
        ([{"name": "boxed", "weight": float("inf")}], "weight=inf"),
        ([{"name": "boxed", "weight": 0}], "sum to 0"),
        ([{"name": "boxed", "kwargs": {"p": 3}}], "part 1: reward 'boxed' does not take 'p'"),
    ],
)
def test_a_bad_composite_is_refused_when_resolved(rewards, message):
    with pytest.raises(ValueError, match=message):
        resolve_reward("composite", rewards=rewards)
