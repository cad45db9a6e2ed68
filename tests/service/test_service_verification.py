"""Which verifiers judge a request, which only watch, what a request cannot set, and how opinions are measured."""

from __future__ import annotations

from typing import Any

import pytest

from rlvr.core.types import Outcome, Score, Task
from rlvr.envs.reviewers import is_accepted
from rlvr.reward.feedback import Feedback
from rlvr.service.service_options import SessionRequest
from rlvr.service.sessions.verification import (
    Accuracy,
    EnvironmentTask,
    FieldError,
    build_verifiable_task,
    measure_accuracy,
    resolve_verifier,
    same_model,
)
from rlvr.service.settings import TextEndpoint

JUDGE = TextEndpoint("http://127.0.0.1:9/v1/chat/completions", "judge")
SAME = TextEndpoint("http://127.0.0.1:9/v1/chat/completions", "judge")
POSED = EnvironmentTask(Task("7 8 +", "<boe> 7 8 +", {"answer": "2", "modulus": 13}), "combined")


def weights(request: SessionRequest, **how: Any) -> dict[str, float]:
    blend = build_verifiable_task(request, **how).blend
    return blend.weights


@pytest.mark.parametrize(
    ("more", "how", "expected"),
    [
        ({}, {}, {"draft": 1.0}),
        ({}, {"judge": JUDGE}, {"draft": 0.3, "judge": 0.7}),
        ({"answer": "4"}, {}, {"math": 1.0, "draft": 0.0}),
        ({"tests": ("assert f() == 1",)}, {"judge": JUDGE}, {"code": 1.0, "draft": 0.0, "judge": 0.0}),
        ({"tests": ("assert f() == 1",), "answer": "4"}, {}, {"code": 1.0, "math": 1.0, "draft": 0.0}),
        ({"verifiers": (("length", 2.0, {"at_most": 9}),)}, {}, {"length": 2.0}),
        ({}, {"environment_task": POSED}, {"combined": 1.0}),
        ({}, {"environment_task": POSED, "judge": JUDGE}, {"combined": 1.0, "judge": 0.0}),
        ({"tests": ("assert f() == 1",)}, {"environment_task": POSED}, {"code": 1.0, "draft": 0.0}),
    ],
)
def test_the_request_determines_the_verifiers(more: dict[str, Any], how: dict[str, Any], expected: dict[str, float]):
    assert weights(SessionRequest("t", "p", **more), **how) == expected


@pytest.mark.parametrize(
    ("more", "field", "words"),
    [
        ({"answer": "4", "verifiers": (("draft", 1.0, {}),)}, "answer", "none of the verifiers (draft) compares with"),
        ({"tests": ("assert f() == 1",), "verifiers": (("draft", 1.0, {}),)}, "tests", "(draft) reads tests"),
        (
            {"tests": ("assert f() == 1",), "answer": "4", "verifiers": (("code", 1.0, {}),)},
            "answer",
            "(code) compares",
        ),
        ({"tests": ("assert f( == 1",)}, "tests", "does not parse"),
        ({"tests": ({"input": "1", "output": "2"},), "setup": "x = 1"}, "setup", "no effect with tests of a program"),
        ({"tests": ({"input": "1", "output": "2"},), "entry_point": "f"}, "entry_point", "no effect"),
        ({"tests": ({"input": "1", "output": "2"},), "answer_names": ("f",)}, "answer_names", "no effect"),
        ({"tests": ("assert f(g()) == 1",), "answer_names": ("f",)}, "tests", "tests[0]: the test uses 'g'"),
        ({"tests": ("assert is_ok(f(1))",)}, "tests", "list it under answer_names"),
    ],
)
def test_what_nothing_would_read_is_refused(more: dict[str, Any], field: str, words: str):
    with pytest.raises(FieldError) as refused:
        build_verifiable_task(SessionRequest("t", "p", **more))
    assert refused.value.field == field and words in str(refused.value)


@pytest.mark.parametrize(
    ("request_fields", "how", "can_verify", "warned"),
    [
        ({}, {}, False, "unverified"),
        ({}, {"judge": JUDGE}, True, "no verifier of this session knows the right answer (draft, judge)"),
        ({}, {"judge": JUDGE, "generator": SAME}, False, "unverified"),
        ({"answer": "4"}, {}, True, ""),
        ({"answer": "4", "verifiers": (("math", 0.0, {}), ("draft", 1.0, {}))}, {}, True, ""),  # it limits
        ({"answer": "4"}, {"judge": JUDGE, "generator": SAME}, True, ""),  # the judge only watches
        ({"tests": ("assert f() == 1",)}, {}, True, ""),
        ({"tests": ("assert is_ok(f(1))",), "answer_names": ("is_ok", "f")}, {}, True, ""),
        ({"verifiers": (("draft", 1.0, {}),)}, {}, True, "knows the right answer (draft)"),
        ({"verifiers": (("length", 1.0, {"at_most": 9}), ("math", 1.0, {})), "answer": "4"}, {}, True, ""),
        ({"prompt": "Write a function f with f(2) = 3."}, {}, True, "1 of the examples in the prompt became tests"),
        ({}, {"environment_task": POSED}, True, ""),
    ],
)
def test_what_cannot_tell_right_from_wrong_verifies_nothing_unless_it_is_named(
    request_fields: dict[str, Any], how: dict[str, Any], can_verify: bool, warned: str
):
    verifiable = build_verifiable_task(SessionRequest(**{"task_id": "t", "prompt": "p", **request_fields}), **how)
    assert verifiable.blend.can_verify is can_verify
    assert any(warned in text for text in verifiable.warnings) if warned else not verifiable.warnings
    assert verifiable.describe()["verified_by"] == (verifiable.blend.voters if can_verify else [])


def test_rules_on_form_alone_give_no_confidence_where_the_truth_or_the_judge_failed():
    named = (("math", 0.1, {}), ("draft", 0.9, {}))
    blend = build_verifiable_task(SessionRequest("t", "p", answer="4", verifiers=named)).blend
    assert blend.judge("p", "The answer is 4.", {"answer": "4"}).confidence == 1.0
    assert blend.judge("p", "The answer is 4.", {}).is_unverified  # math has nothing to compare with
    judged = build_verifiable_task(SessionRequest("t", "p"), judge=JUDGE).blend  # nothing answers there
    assert judged.judge("p", "A long and clean text.").is_unverified


def test_tests_are_derived_only_if_the_request_has_no_other_reference():
    prompt = "Write a function f with f(2) = 3."
    assert build_verifiable_task(SessionRequest("t", prompt)).derived_tests == ("assert f(2) == 3",)
    task = build_verifiable_task(SessionRequest("t", prompt)).task
    assert task.meta["tests"] == ["assert f(2) == 3"]
    others: list[dict[str, Any]] = [
        {"tests": ("assert f(1) == 2",)}, {"answer": "4"}, {"verifiers": (("draft", 1.0, {}),)},
    ]  # fmt: skip
    for more in others:
        assert build_verifiable_task(SessionRequest("t", prompt, **more)).derived_tests == ()
    assert build_verifiable_task(SessionRequest("t", prompt), environment_task=POSED).derived_tests == ()


def test_the_task_has_the_verifiers_fields_and_an_environment_task_its_own_prompt():
    tests = build_verifiable_task(
        SessionRequest("t", "Write f.", tests=("assert f() == 1",), setup="x = 1", entry_point="f")
    ).task
    assert tests.meta == {"tests": ["assert f() == 1"], "statement": "Write f.", "setup": "x = 1", "entry_point": "f"}
    posed = build_verifiable_task(SessionRequest("t", "7 8 +"), environment_task=POSED).task
    assert (posed.id, posed.prompt, posed.meta) == ("t", POSED.task.prompt, POSED.task.meta)
    theirs = build_verifiable_task(SessionRequest("t", "7 8 +", answer="5"), environment_task=POSED).task
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
def test_a_verifier_without_its_reference_is_refused(more: dict[str, Any], needs: str):
    with pytest.raises(ValueError, match=f"compares with `{needs}`"):
        build_verifiable_task(SessionRequest("t", "p", **more))


def test_a_verifier_that_can_never_judge_is_refused():
    for name in ("environment", "first_attempt", "grader"):
        with pytest.raises(ValueError, match="is unknown here"):
            resolve_verifier(name, {})
    for name in ("boxed", "combined", "correct"):
        answer = None if name == "boxed" else "2"  # it looks at the form alone
        asked = SessionRequest("t", "7 8 +", answer=answer, verifiers=((name, 1.0, {}),))
        with pytest.raises(ValueError, match="tasks of the arithmetic environment"):
            build_verifiable_task(asked)
        assert build_verifiable_task(asked, environment_task=POSED).blend.names == [name]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rlvr.reward.text.form:length", {}), ("nothing", {}), ("composite", {}), ("http://127.0.0.1/x", {}),
        ("../x", {}),
        ("judge", {"api_key_env": "HOME"}), ("judge", {"extra_body": {}}), ("code", {"timeout_s": 600}),
        ("regex", {"pattern": "a", "seconds": 900}), ("math", {"timeout_s": 60}), ("boxed", {"x": 1}),
        ("length", {}), ("length", {"at_least": "many"}),
    ],
)  # fmt: skip
def test_a_request_cannot_set_code_paths_keys_or_limits(name: str, options: dict[str, Any]):
    with pytest.raises(ValueError):
        resolve_verifier(name, options, JUDGE)


def test_the_judge_is_the_one_of_the_settings_and_self_judging_is_reported():
    reward = resolve_verifier("judge", {"rubric": "Is it kind?"}, JUDGE)
    assert (reward.kwargs["base_url"], reward.kwargs["rubric"]) == ("http://127.0.0.1:9/v1", "Is it kind?")
    plain = TextEndpoint("http://127.0.0.1:9/generate")
    assert build_verifiable_task(SessionRequest("t", "p"), judge=JUDGE, generator=plain).self_judging
    assert not build_verifiable_task(
        SessionRequest("t", "p"), judge=JUDGE, generator=TextEndpoint("http://127.0.0.1:8/generate")
    ).self_judging
    assert not build_verifiable_task(
        SessionRequest("t", "p", verifiers=(("draft", 1.0, {}),)), judge=JUDGE, generator=plain
    ).self_judging
    assert not same_model(JUDGE, TextEndpoint("http://127.0.0.1:9/v1", "another"))
    assert same_model(JUDGE, TextEndpoint("http://localhost:9/generate"))
    far = [
        TextEndpoint(f"https://{host}/v1", "m") for host in ("a.example", "a.example:443", "a.example:80", "b.example")
    ]
    assert [same_model(far[0], other) for other in far] == [True, True, False, False]
    with pytest.raises(ValueError, match="JUDGE_ENDPOINT"):
        resolve_verifier("judge", {})


def make_feedback(truth: bool | None, **opinions: bool | None) -> Feedback:
    scores = {
        name: Score(None, Outcome.ERROR) if passed is None else Score(1.0, Outcome.PASSED if passed else Outcome.FAILED)
        for name, passed in opinions.items()
    }
    return Feedback(1.0, 1.0, 1.0, scores=scores, truth=truth)


def test_opinions_are_measured_if_the_truth_is_known():
    feedbacks = [
        make_feedback(True, code=True, draft=True, judge=False),  # one of two agrees
        make_feedback(False, code=False, draft=True, judge=False),  # one of two
        make_feedback(False, code=False, draft=False, judge=None),  # the only one that could judge
        make_feedback(None, draft=True, judge=True),  # unknown
    ]
    assert measure_accuracy(feedbacks, {"draft", "judge"}) == Accuracy(3 / 5, 5)
    assert measure_accuracy(feedbacks[3:], {"draft", "judge"}) is None
    assert measure_accuracy(feedbacks, set()) is None


@pytest.mark.parametrize("host", ["localhost", "127.1", "127.0.0.2", "0.0.0.0", "[::1]", "LOCALHOST"])
def test_a_judge_on_this_machine_is_the_generator_in_any_spelling(host: str):
    generator = TextEndpoint("http://127.0.0.1:9/v1", "m")
    assert same_model(TextEndpoint(f"http://{host}:9/v1", "m"), generator)
    assert not same_model(TextEndpoint(f"http://{host}:8/v1", "m"), generator)
    assert not same_model(TextEndpoint("http://10.0.0.1:9/v1", "m"), generator)


def test_a_session_names_only_the_verifiers_that_gave_a_verdict():
    """The judge failed: only rules on form are left, and they verify nothing."""
    target = build_verifiable_task(SessionRequest("t", "p"), judge=JUDGE)
    failed = Score(None, Outcome.ERROR, "judge_failed", detail="http://127.0.0.1:9/v1 answered 500: secret")
    form, verdict = Score(1.0, Outcome.PASSED), Score(0.5, Outcome.PASSED)
    unverified = Feedback(None, None, 1.0, scores={"draft": form, "judge": failed})
    judged = Feedback(0.65, 0.65, 1.0, scores={"draft": form, "judge": verdict})
    assert target.describe()["verified_by"] == ["draft", "judge"] and len(target.describe()["warnings"]) == 1
    said = target.describe([unverified])
    assert said["verified_by"] == [] and [w.partition(":")[0] for w in said["warnings"]] == ["unverified"]
    assert "judge: judge_failed" in said["warnings"][0] and "127.0.0.1" not in said["warnings"][0]
    assert target.describe([unverified, judged])["verified_by"] == ["draft", "judge"]


def test_a_graders_own_pass_mark_wins_over_the_confidence_asked_for():
    grader = {
        "type": "text_similarity",
        "input": "{{ sample.output_text }}",
        "reference": "{{ item.reference }}",
        "evaluation_metric": "fuzzy_match",
        "pass_threshold": 0.99,
    }
    asked = SessionRequest("t", "p", grader=grader, item={"reference": "a long sentence"})
    verifiable = build_verifiable_task(asked)
    near, same = (
        verifiable.blend.judge("p", text, verifiable.task.meta) for text in ("a long sentences", "a long sentence")
    )
    assert near.confidence is not None and 0.8 < near.confidence < 0.99
    assert near.is_refused and not is_accepted(near, 0.8)
    assert not same.is_refused and is_accepted(same, 0.8)


def test_a_truth_without_a_vote_that_fails_is_reported():
    asked = SessionRequest("t", "p", answer="4", verifiers=(("math", 0.0, {}), ("draft", 1.0, {})))
    verifiable = build_verifiable_task(asked)
    feedback = verifiable.blend.judge("p", "The answer is 4.", {})  # math has nothing to compare with
    judged = verifiable.blend.judge("p", "The answer is 4.", verifiable.task.meta)
    warnings = verifiable.describe([feedback, judged])["warnings"]
    assert any("could not judge 1 of 2 answers: math: " in text for text in warnings)
    assert not any("could not judge" in text for text in verifiable.describe([judged])["warnings"])
