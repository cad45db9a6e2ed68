"""The reward registry: names and paths in, bound rewards out; a broken function is an error, never a zero."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from rlvr.core.types import Outcome, Score, StopReason, Task, Trajectory
from rlvr.reward import known_rewards, options_of, register_reward, resolve_reward
from rlvr.reward.signatures import Case


def trajectory(response: str = "4", meta: dict | None = None, prompt: str | list = "2+2?") -> Trajectory:
    task = Task("t", prompt, meta or {})
    return Trajectory(task.prompt_text, [1, 2], response, [3], [-0.1], task=task, stop_reason=StopReason.STOP)


def verdict(function, **kwargs) -> Score:
    return resolve_reward(function, **kwargs).score([trajectory()])[0]


def test_a_registered_reward_resolves_by_name_and_is_described_by_its_first_line():
    @register_reward("registry_brevity")
    def brevity(prompt, response, meta=None, **kwargs):
        """Short is good.

        More is said here."""
        return 1.0 / len(response)

    reward = resolve_reward("registry_brevity")
    assert reward.name == "registry_brevity" and reward("p", "four") == 0.25
    assert known_rewards()["registry_brevity"] == "Short is good."


def test_an_unknown_name_names_the_nearest_and_lists_all():
    with pytest.raises(
        ValueError, match=r"unknown reward 'combind' \(did you mean 'combined'\?\); known: .*boxed, .*combined"
    ):
        resolve_reward("combind")
    with pytest.raises(ValueError, match="unknown reward 'zzzzzzzz'; known: "):
        resolve_reward("zzzzzzzz")


def test_a_name_can_be_registered_again_only_by_the_same_function():
    def one(prompt, response): ...

    def two(prompt, response): ...

    register_reward("taken")(one)
    register_reward("taken")(one)
    with pytest.raises(ValueError, match=r"reward 'taken' is already registered by .*one; give .*two another name"):
        register_reward("taken")(two)


def test_a_function_of_cases_gets_all_that_is_known_of_an_answer():
    seen: list[Case] = []

    def one(case: Case, *, bonus: float = 0.0) -> float:
        seen.append(case)
        return float(case.response == (case.meta or {})["answer"]) + bonus

    def many(cases) -> list[float]:
        return [float(case.num_sampled) for case in cases]

    t = trajectory("4", {"answer": "4"}, [{"role": "user", "content": "2+2?"}])
    assert verdict(many).value == 1.0 and resolve_reward(many)("p", "r") == 0.0
    assert resolve_reward(one, bonus=0.5).score([t])[0].value == 1.5
    assert seen == [Case("user: 2+2?", "4", {"answer": "4"}, t, t.task.prompt, [3], StopReason.STOP)]
    with pytest.raises(ValueError, match="does not take 'bonos'"):
        resolve_reward(one, bonos=1)


def test_options_are_one_object_for_the_function_and_its_hooks():
    @dataclass(frozen=True)
    class Options:
        at_most: int = 3

        def __post_init__(self):
            if self.at_most < 1:
                raise ValueError(f"at_most={self.at_most}, expected at least 1")

    @register_reward(
        "registry_short", options=Options, caution=lambda o: f"at most {o.at_most}", waits_for=lambda o: "network"
    )
    def short(case: Case, options: Options) -> bool:
        return len(case.response) <= options.at_most

    reward = resolve_reward("registry_short", at_most=2)
    assert (reward("p", "12"), reward("p", "123")) == (1.0, 0.0)
    assert (reward.caution, reward.waits_for) == ("at most 2", "network") and options_of("registry_short") == {
        "at_most"
    }
    with pytest.raises(ValueError, match="reward 'registry_short': at_most=0, expected at least 1"):
        resolve_reward("registry_short", at_most=0)
    with pytest.raises(ValueError, match=r"'registry_short' does not take 'atmost' \(did you mean 'at_most'"):
        resolve_reward("registry_short", atmost=2)


def test_an_option_the_function_does_not_take_is_refused_when_resolved():
    with pytest.raises(
        ValueError, match=r"does not take 'keyword' \(did you mean 'keywords'\?\); it takes: keywords, mode"
    ):
        resolve_reward("keyword_contains", keyword=["a"])
    with pytest.raises(ValueError, match="does not take 'response'"):
        resolve_reward("my_reward" if "my_reward" in known_rewards() else "exact_match", response="x")
    with pytest.raises(ValueError, match="'keyword_contains' needs 'keywords'"):
        resolve_reward("keyword_contains")


def test_a_path_imports_from_the_current_directory(tmp_path, monkeypatch):
    (tmp_path / "own_rewards_here.py").write_text(
        "def short(prompt, response, meta=None, *, limit=3):\n    return len(response) <= limit\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != ""])
    assert resolve_reward("own_rewards_here:short")("p", "1234") == 0.0
    assert resolve_reward("own_rewards_here:short", limit=4)("p", "1234") == 1.0
    with pytest.raises(ValueError, match=r"has no 'shirt' \(did you mean 'short'\?\)"):
        resolve_reward("own_rewards_here:shirt")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_package.at_all:f", "importing 'no_such_package.at_all' failed"),
        ("json:", "not of the form 'package.module:function'"),
        ("/etc/passwd:x", "not of the form"),
        ("json:__doc__", "expected a function"),
    ],
)
def test_a_bad_path_is_one_message(path, message):
    with pytest.raises(ValueError, match=message):
        resolve_reward(path)


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (1, Score(1.0, Outcome.PASSED)),
        (0.999, Score(0.999, Outcome.FAILED)),
        (True, Score(1.0, Outcome.PASSED)),
        (False, Score(0.0, Outcome.FAILED)),
        (np.float32(2.0), Score(2.0, Outcome.PASSED)),
        (np.array(0.5), Score(0.5, Outcome.FAILED)),
        (np.int64(3), Score(3.0, Outcome.PASSED)),
        (np.bool_(False), Score(0.0, Outcome.FAILED)),
        (torch.tensor(0.5, requires_grad=True), Score(0.5, Outcome.FAILED)),
        (torch.tensor(2.0, dtype=torch.bfloat16), Score(2.0, Outcome.PASSED)),
        (torch.tensor(True), Score(1.0, Outcome.PASSED)),
        (
            {"score": None, "length": 3},
            Score(None, Outcome.INVALID, "not_applicable", {"length": 3.0}, "the reward returned a score of None"),
        ),
        (Fraction(1, 2), Score(0.5, Outcome.FAILED)),
        (None, Score(None, Outcome.INVALID, "not_applicable", detail="the reward returned None")),
        (
            {"score": 1.0, "acc": True, "length": 3, "note": "x", "bad": float("nan")},
            Score(1.0, Outcome.PASSED, parts={"acc": 1.0, "length": 3.0}),
        ),
        (Score(0.3, Outcome.TIMEOUT, "timeout"), Score(0.3, Outcome.TIMEOUT, "timeout")),
    ],
)
def test_a_returned_value_becomes_a_score(returned, expected):
    assert verdict(lambda prompt, response: returned) == expected


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (float("nan"), "not_finite"),
        (float("-inf"), "not_finite"),
        (10**400, "not_finite"),
        ({"score": float("nan")}, "not_finite"),
        (1e308, "not_finite"),
        (-1e308, "not_finite"),
        ({"score": 1.1e30}, "not_finite"),
        (Score(-1e308, Outcome.FAILED), "not_finite"),
        ("1.0", "wrong_type"),
        ([1.0], "wrong_type"),
        ({"value": 1.0}, "wrong_type"),
        ({"score": "1"}, "wrong_type"),
        (np.float32("nan"), "not_finite"),
        (torch.tensor(float("inf")), "not_finite"),
        (torch.tensor([0.5]), "wrong_type"),
        (np.complex64(1), "wrong_type"),
        (b"1", "wrong_type"),
        ((1.0, "why"), "wrong_type"),
        (float, "wrong_type"),
        (Decimal("1"), "wrong_type"),
        (np.array([1.0]), "wrong_type"),
        (1j, "wrong_type"),
    ],
)
def test_an_invalid_return_is_an_error_and_never_a_zero(returned, reason):
    score = verdict(lambda prompt, response: returned)
    assert (score.value, score.outcome, score.reason) == (None, Outcome.ERROR, reason)
    with pytest.raises(ValueError, match="returned"):
        resolve_reward(lambda prompt, response: returned)("p", "r")


def test_a_value_beyond_the_limit_is_an_error_and_such_parts_are_left_out():
    """Larger ones overflow where rewards are summed and squared."""
    assert verdict(lambda prompt, response: -1e30) == Score(-1e30, Outcome.FAILED)
    assert "returned 1e+308, expected a number up to 1e+30" in verdict(lambda prompt, response: 1e308).detail
    parts = {"fine": 1e30, "huge": 1e308, "endless": float("-inf")}
    assert verdict(lambda prompt, response: {"score": 1, **parts}).parts == {"fine": 1e30}
    assert verdict(lambda prompt, response: Score(1.0, Outcome.PASSED, "why", parts, "more")) == Score(
        1.0, Outcome.PASSED, "why", {"fine": 1e30}, "more"
    )


RAISED = [ZeroDivisionError("boom"), RecursionError("boom"), StopIteration("boom"), MemoryError("boom")]
RAISED += [SystemExit("boom"), asyncio.CancelledError("boom"), GeneratorExit("boom")]


@pytest.mark.parametrize("error", RAISED)
def test_an_exception_is_an_error_with_its_traceback_and_spares_the_others(error):
    def fragile(prompt, response):
        if response == "bad":
            raise error
        return 1.0

    scores = resolve_reward(fragile).score([trajectory("good"), trajectory("bad"), trajectory("good")])
    assert [s.outcome for s in scores] == [Outcome.PASSED, Outcome.ERROR, Outcome.PASSED]
    assert scores[1].reason == "exception" and "in fragile" in scores[1].detail and "boom" in scores[1].detail
    with pytest.raises(type(error), match="boom"):
        resolve_reward(fragile)("p", "bad")


def test_passed_at_decides_what_counts_as_passed():
    @register_reward("half_is_enough", passed_at=0.5)
    def half_is_enough(prompt, response):
        return float(response)

    scores = resolve_reward("half_is_enough").score([trajectory("0.5"), trajectory("0.49")])
    assert [s.outcome for s in scores] == [Outcome.PASSED, Outcome.FAILED]


def test_meta_and_trajectory_reach_the_function():
    def curious(prompt, response, meta=None, trajectory=None):
        return {"score": meta["gold"], "tokens": -1 if trajectory is None else len(trajectory.response_tokens)}

    reward = resolve_reward(curious)
    assert reward("p", "r", {"gold": 2}) == 2.0
    assert reward.score([trajectory(meta={"gold": 3})])[0] == Score(3.0, Outcome.PASSED, parts={"tokens": 1.0})
    loose = Trajectory("p", [1], "r", [2], metadata={"gold": 4})
    assert reward.score([loose])[0].value == 4.0


@pytest.mark.parametrize("name", ["math", "code", "draft"])
def test_an_answer_or_a_meta_of_a_wrong_type_is_refused_before_the_function_is_called(name):
    reward = resolve_reward(name)
    for response in (None, 7, ["7"]):
        with pytest.raises(ValueError, match=f"reward '{name}': response=.* is of type .*; expected the answer"):
            reward("p", response, {"answer": "7"})
    with pytest.raises(ValueError, match="meta='7' is of type str; expected a dictionary"):
        reward("p", "7", "7")
    with pytest.raises(ValueError, match=r"trajectories\[1\]='7' is of type str; expected a Trajectory"):
        reward.score([trajectory(), "7"])


def test_options_can_be_given_at_the_call():
    reward = resolve_reward("keyword_contains", keywords=["a", "b"])
    assert reward("p", "a") == 1.0
    assert reward("p", "a", mode="all") == -0.5
    assert reward("p", "a") == 1.0
    with pytest.raises(ValueError, match="does not take 'colour'"):
        reward("p", "a", colour=1)


def test_a_batched_function_sees_lists_and_its_length_is_checked():
    @register_reward("lengths", batched=True)
    def lengths(prompts, responses, metas=None, trajectories=None, *, drop=0):
        assert len(prompts) == len(metas) == len(trajectories)
        return [None if r == "" else float("nan") if r == "?" else len(r) for r in responses][drop:]

    batch = [trajectory("12"), trajectory(""), trajectory("?")]
    assert [(s.value, s.reason) for s in resolve_reward("lengths").score(batch)] == [
        (2.0, ""),
        (None, "not_applicable"),
        (None, "not_finite"),
    ]
    assert [s.reason for s in resolve_reward("lengths", drop=1).score(batch)] == ["wrong_length"] * 3
    assert resolve_reward("lengths")("p", "1234") == 4.0
    assert resolve_reward("lengths").score([]) == []


@pytest.mark.parametrize(
    "returned", [1.0, "abc", {"score": 1}, None, {0.0, 0.5, 1.0}, iter([1, 2, 3]), np.ones((1, 3))]
)
def test_a_batched_function_that_returns_no_list_is_an_error(returned):
    reward = resolve_reward(lambda completions, **kw: returned)
    assert [s.reason for s in reward.score([trajectory()] * 3)] == ["wrong_length"] * 3


def test_arrays_of_numbers_are_lists_of_values():
    for returned in ((0.5, 1.0), np.array([0.5, 1.0]), torch.tensor([0.5, 1.0])):
        reward = resolve_reward(lambda completions, returned=returned, **kw: returned)
        assert [s.value for s in reward.score([trajectory()] * 2)] == [0.5, 1.0]


def test_a_message_of_a_wrong_type_shows_the_value_and_the_remedy():
    detail = verdict(lambda prompt, response: np.array([0.25])).detail
    assert "ndarray (array([0.25]))" in detail and "float(" in detail


@pytest.mark.parametrize("error", [KeyError("boom"), asyncio.CancelledError(), SystemExit(1)])
def test_a_batched_exception_is_an_error_for_all(error):
    def raise_error(completions, **kw):
        raise error

    assert [s.outcome for s in resolve_reward(raise_error).score([trajectory()] * 2)] == [Outcome.ERROR] * 2


def test_trl_functions_work_unchanged():
    """Keyword call, columns from the metas, messages for chat prompts, None for not applicable."""
    seen = {}

    def trl_reward(prompts, completions, completion_ids, solution, trainer_state, log_metric, **kwargs):
        seen.update(prompts=prompts, completions=completions, ids=completion_ids, columns=sorted(kwargs))
        log_metric("x", 1.0)
        return [None if s is None else float(s in str(c)) for c, s in zip(completions, solution, strict=True)]

    chat = [{"role": "user", "content": "2+2?"}]
    batch = [trajectory("4", {"solution": "4", "level": 1}), trajectory("5", {"solution": "4"}, chat), trajectory("6")]
    scores = resolve_reward(trl_reward).score(batch)
    assert [s.value for s in scores] == [1.0, 0.0, None]
    assert seen["prompts"] == ["2+2?", chat, "2+2?"]
    assert seen["completions"] == ["4", [{"role": "assistant", "content": "5"}], "6"]
    assert seen["ids"] == [[3]] * 3 and seen["columns"] == ["level"]


def test_verl_functions_work_unchanged():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return {"score": float(solution_str == ground_truth), "source": float(data_source == "own")}

    reward = resolve_reward(compute_score)
    nested = {"data_source": "own", "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"i": 1}}
    assert reward.score([trajectory("4", nested)])[0] == Score(1.0, Outcome.PASSED, parts={"source": 1.0})
    assert reward("p", "4", {"ground_truth": "4"}) == reward("p", "4", {"answer": "4"}) == 1.0


@pytest.mark.parametrize(
    "function",
    [
        lambda: 1.0,
        lambda response: 1.0,
        lambda response, prompt: 1.0,
        lambda prompt, meta: 1.0,
        lambda a, *, response: 1.0,
    ],
)
def test_a_wrong_signature_says_which_are_accepted(function):
    with pytest.raises(ValueError, match=r"has the signature .*; accepted: \(prompt, response, meta=None"):
        resolve_reward(function)


def test_a_signature_of_lists_must_be_registered_as_batched():
    with pytest.raises(ValueError, match=r"takes lists; register it with @register_reward\(name, batched=True\)"):
        resolve_reward(lambda prompts, responses: [1.0])


def test_an_unfilled_parameter_is_refused_with_the_remedy():
    with pytest.raises(
        ValueError, match=r"needs 'answer': give it among the .*options.*or read .* from meta\. Accepted"
    ):
        resolve_reward(lambda prompt, response, answer: 1.0)
    assert resolve_reward(lambda prompt, response, answer: 1.0, answer="4")("p", "r") == 1.0


@pytest.mark.parametrize("given", [3, None, ["boxed"]])
def test_an_object_that_is_not_a_reward_is_refused(given):
    with pytest.raises(ValueError, match=r"is of type .*; expected a function, a path .* or a name: .*boxed"):
        resolve_reward(given)


def test_three_parameters_of_one_letter_are_prompt_response_and_meta():
    reward = resolve_reward(lambda p, r, m: float(r == m["answer"]))
    assert [reward("p", text, {"answer": "4"}) for text in ("4", "5")] == [1.0, 0.0]
