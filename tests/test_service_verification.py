"""What judges a request, what only watches, what no request may ask for, and how opinions are measured."""

from __future__ import annotations

from typing import Any

import pytest

from rlvr.reward.feedback import Feedback
from rlvr.service.loop.verification import Accuracy, accuracy, case_of, named_verifier, same_model
from rlvr.service.options import Request
from rlvr.service.settings import TextEndpoint
from rlvr.types import Outcome, Score, Task

JUDGE = TextEndpoint("http://127.0.0.1:9/v1/chat/completions", "judge")
POSED = Task("7 8 +", "<boe> 7 8 +", {"answer": "2", "modulus": 13})


def weights(request: Request, **how: Any) -> dict[str, float]:
    blend = case_of(request, **how).blend
    return dict(zip(blend.names, (w for _, w, _ in blend._verifiers), strict=True))  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    ("more", "how", "expected"),
    [
        ({}, {}, {"draft": 1.0}),
        ({}, {"judge": JUDGE}, {"draft": 0.3, "judge": 0.7}),
        ({"answer": "4"}, {}, {"math": 1.0, "draft": 0.0}),
        ({"tests": ("assert f() == 1",)}, {"judge": JUDGE}, {"code": 1.0, "draft": 0.0, "judge": 0.0}),
        ({"tests": ("assert f() == 1",), "answer": "4"}, {}, {"code": 1.0, "math": 1.0, "draft": 0.0}),
        ({"verifiers": (("length", 2.0, {"at_most": 9}),), "answer": "4"}, {}, {"length": 2.0}),
        ({}, {"posed": POSED, "known": "combined"}, {"combined": 1.0}),
        ({}, {"posed": POSED, "known": "combined", "judge": JUDGE}, {"combined": 1.0, "judge": 0.0}),
        ({"tests": ("assert f() == 1",)}, {"posed": POSED, "known": "combined"}, {"code": 1.0, "draft": 0.0}),
    ],
)
def test_what_judges_follows_from_what_the_request_says(
    more: dict[str, Any], how: dict[str, Any], expected: dict[str, float]
):
    assert weights(Request("t", "p", **more), **how) == expected


def test_the_task_carries_what_its_verifiers_need_and_a_posed_one_its_own_prompt():
    tests = case_of(Request("t", "Write f.", tests=("assert f() == 1",), setup="x = 1", entry_point="f")).task
    assert tests.meta == {"tests": ["assert f() == 1"], "statement": "Write f.", "setup": "x = 1", "entry_point": "f"}
    posed = case_of(Request("t", "7 8 +"), posed=POSED, known="combined").task
    assert (posed.id, posed.prompt, posed.meta) == ("t", POSED.prompt, POSED.meta)
    theirs = case_of(Request("t", "7 8 +", answer="5"), posed=POSED, known="combined").task
    assert theirs.meta["answer"] == "5"


@pytest.mark.parametrize(
    ("more", "needs"),
    [
        ({"verifiers": (("math", 1.0, {}),)}, "answer"),
        ({"verifiers": (("draft", 1.0, {}), ("exact_match", 1.0, {}))}, "answer"),
        ({"verifiers": (("code", 1.0, {}),)}, "tests"),
        ({"answer": " "}, "answer"),
    ],
)
def test_a_verifier_without_what_it_compares_with_is_refused_before_anything_is_generated(
    more: dict[str, Any], needs: str
):
    with pytest.raises(ValueError, match=f"compares with `{needs}`"):
        case_of(Request("t", "p", **more))


def test_a_verifier_that_could_never_judge_is_refused_before_anything_is_generated():
    for name in ("environment", "first_attempt", "grader"):
        with pytest.raises(ValueError, match="is unknown here"):
            named_verifier(name, {})
    for name in ("boxed", "combined", "correct"):
        asked = Request("t", "7 8 +", answer="2", verifiers=((name, 1.0, {}),))
        with pytest.raises(ValueError, match="tasks of the arithmetic environment"):
            case_of(asked)
        assert case_of(asked, posed=POSED, known="combined").blend.names == [name]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rlvr.reward.text:length", {}), ("nothing", {}), ("composite", {}), ("http://127.0.0.1/x", {}), ("../x", {}),
        ("judge", {"api_key_env": "HOME"}), ("judge", {"extra_body": {}}), ("code", {"timeout_s": 600}),
        ("regex", {"pattern": "a", "seconds": 900}), ("math", {"timeout_s": 60}), ("boxed", {"x": 1}),
        ("length", {}), ("length", {"at_least": "many"}),
    ],
)  # fmt: skip
def test_no_request_names_code_a_place_a_key_or_a_limit(name: str, options: dict[str, Any]):
    with pytest.raises(ValueError):
        named_verifier(name, options, JUDGE)


def test_a_judge_is_the_one_of_the_settings_and_says_whom_it_judges():
    reward = named_verifier("judge", {"rubric": "Is it kind?"}, JUDGE)
    assert (reward.kwargs["base_url"], reward.kwargs["rubric"]) == ("http://127.0.0.1:9/v1", "Is it kind?")
    plain = TextEndpoint("http://127.0.0.1:9/generate")
    assert case_of(Request("t", "p"), judge=JUDGE, generator=plain).self_judging
    assert not case_of(
        Request("t", "p"), judge=JUDGE, generator=TextEndpoint("http://127.0.0.1:8/generate")
    ).self_judging
    assert not case_of(Request("t", "p", verifiers=(("draft", 1.0, {}),)), judge=JUDGE, generator=plain).self_judging
    assert not same_model(JUDGE, TextEndpoint("http://127.0.0.1:9/v1", "another"))
    assert same_model(JUDGE, TextEndpoint("http://localhost:9/generate"))
    far = [
        TextEndpoint(f"https://{host}/v1", "m") for host in ("a.example", "a.example:443", "a.example:80", "b.example")
    ]
    assert [same_model(far[0], other) for other in far] == [True, True, False, False]
    with pytest.raises(ValueError, match="JUDGE_ENDPOINT"):
        named_verifier("judge", {})


def said(truth: bool | None, **opinions: bool | None) -> Feedback:
    scores = {
        name: Score(None, Outcome.ERROR) if passed is None else Score(1.0, Outcome.PASSED if passed else Outcome.FAILED)
        for name, passed in opinions.items()
    }
    return Feedback(1.0, 1.0, 1.0, scores=scores, truth=truth)


def test_opinions_are_measured_where_the_truth_is_known_and_they_could_judge():
    feedbacks = [
        said(True, code=True, draft=True, judge=False),  # one of two agrees
        said(False, code=False, draft=True, judge=False),  # one of two
        said(False, code=False, draft=False, judge=None),  # the only one that could judge
        said(None, draft=True, judge=True),  # nobody knows
    ]
    assert accuracy(feedbacks, {"draft", "judge"}) == Accuracy(3 / 5, 5)
    assert accuracy(feedbacks[3:], {"draft", "judge"}) is None
    assert accuracy(feedbacks, set()) is None
