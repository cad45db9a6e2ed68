"""A reference that is blank, or is the prompt itself, is the row's fault: `invalid` for every answer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from rlvr.core.chat_client import Endpoint
from rlvr.core.types import Score
from rlvr.reward import resolve_reward
from rlvr.reward.graders import Grader
from rlvr.reward.references import REFERENCE_FIELDS, find_reference, find_reference_fault, find_reference_text
from rlvr.reward.signatures import Case
from tests.kit.text_endpoint import EndpointRequest, serving

PROMPT = "Who wrote Faust?"
CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": PROMPT}]
TEXTS = {"input": "{{ sample.output_text }}", "reference": "{{ item.answer }}"}
SHOWN = {"role": "user", "content": "{{ item.prompt }} {{ item.answer }} {{ sample.output_text }}"}
KINDS: dict[str, dict[str, Any]] = {
    **{op: {"type": "string_check", "operation": op, **TEXTS} for op in ("eq", "ne", "like", "ilike")},
    "fuzzy_match": {"type": "text_similarity", "evaluation_metric": "fuzzy_match", **TEXTS},
    "rouge_l": {"type": "text_similarity", "evaluation_metric": "rouge_l", **TEXTS},
    "score_model": {"type": "score_model", "model": "judge", "input": [SHOWN]},
}


def verdict_of(score: Score) -> tuple[float | None, str, str]:
    return score.value, score.outcome.value, score.reason


def praise(asked: EndpointRequest) -> str:
    """A judge that likes everything."""
    word = re.findall(r'{"id": "(\w{8})"', asked.body["messages"][0]["content"])[-1]
    return json.dumps({"id": word, "reason": "", "score": 1})


def grade(config: dict[str, Any], item: dict[str, Any], text: str, script: Callable[..., str] = praise) -> Score:
    with serving(script) as server:
        models = {"judge": Endpoint(server.chat_url, "m", retries=0)}
        return Grader.of(config, models).grade(item, {"output_text": text})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("answer", "prompt", "reason"),
    [
        ("", PROMPT, "empty_reference"),
        (" \n\t", PROMPT, "empty_reference"),
        (PROMPT, PROMPT, "reference_is_prompt"),
        (f" {PROMPT}\n", PROMPT, "reference_is_prompt"),
        (PROMPT, CHAT, "reference_is_prompt"),
        (PROMPT, f"system: Be short.\nuser: {PROMPT}", "reference_is_prompt"),
    ],
)
def test_a_reference_without_an_answer_is_invalid_for_every_answer(
    kind: str, answer: str, prompt: Any, reason: str
) -> None:
    for text in ("Goethe", PROMPT, "   x"):
        score = grade(KINDS[kind], {"prompt": prompt, "answer": answer}, text)
        assert verdict_of(score) == (None, "invalid", reason)
        assert "answer" in score.detail and "leave the row out" in score.detail


@pytest.mark.parametrize("kind", KINDS)
def test_a_reference_within_the_prompt_is_a_reference(kind: str) -> None:
    """A choice that the prompt lists, or a text to be copied from it."""
    score = grade(KINDS[kind], {"prompt": "Is it A or B?", "answer": "A"}, "B" if kind == "ne" else "A")
    assert verdict_of(score) == (1.0, "passed", "")


def test_a_grader_may_compare_with_the_prompt_on_purpose() -> None:
    config = {"type": "string_check", "operation": "ne", **TEXTS, "reference": "{{ item.prompt }}"}
    assert grade(config, {"prompt": PROMPT}, PROMPT).value == 0.0
    assert grade(config, {"prompt": PROMPT}, "Goethe").value == 1.0


@pytest.mark.parametrize("kind", ["eq", "like", "ilike", "fuzzy_match"])
def test_a_blank_reference_in_the_configuration_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=r"^reference=.* is blank"):
        Grader.of({**KINDS[kind], "reference": " "})
    assert grade({**KINDS["ne"], "reference": ""}, {}, "something").value == 1.0


@pytest.mark.parametrize(("answer", "reason"), [("  ", "empty_reference"), (PROMPT, "reference_is_prompt")])
def test_the_judge_refuses_such_references_and_asks_nothing(answer: str, reason: str) -> None:
    with serving(praise) as server:
        judge = resolve_reward("judge", base_url=server.chat_url, model="m", retries=0)
        (score,) = judge.judge_all([Case(PROMPT, "Goethe", {"answer": answer})])
        assert verdict_of(score) == (None, "invalid", reason) and not server.asked
        never = resolve_reward(judge, reference="never")
        assert never.judge_all([Case(PROMPT, "Goethe", {"answer": answer})])[0].value == 0.1


def answer_of(asked: EndpointRequest) -> str:
    document = json.loads(asked.body["messages"][-1]["content"].rpartition("The document:\n")[2])
    return document.get("sample.output_text") or document["answer"]


def refuse(*words: str) -> Callable[[EndpointRequest], str]:
    """A judge that gives no verdict on answers with one of these words."""
    return lambda asked: "no" if any(word in answer_of(asked) for word in words) else praise(asked)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("Schiller",), (0.0, "failed", "unjudgeable")),
        # it judges a plain sentence, but not the right answer: no answer is to blame
        (("Schiller", "Goethe"), (None, "error", "judge_out_of_form")),
    ],
)
def test_a_judge_that_cannot_judge_the_reference_is_in_error(words: tuple[str, ...], expected: object) -> None:
    item = {"prompt": PROMPT, "answer": "Goethe"}
    assert verdict_of(grade(KINDS["score_model"], item, "Schiller", refuse(*words))) == expected
    with serving(refuse(*words)) as server:
        judge = resolve_reward("judge", base_url=server.chat_url, model="m", retries=0)
        assert verdict_of(judge.judge_all([Case(PROMPT, "Schiller", {"answer": "Goethe"})])[0]) == expected


def test_faults_name_the_field_the_value_and_the_remedy() -> None:
    assert find_reference_fault("Goethe", PROMPT, "item.answer") is None
    assert find_reference_fault("Goethe", None, "item.answer") is None
    assert find_reference_fault(PROMPT, [], "item.answer") is None
    blank, same = (find_reference_fault(text, CHAT, "item.answer") for text in ("\n", PROMPT))
    assert blank and blank.detail.startswith("item.answer is blank ('\\n')") and "fill it" in blank.detail
    assert same and same.detail.startswith(f"item.answer is the prompt itself ({PROMPT!r})")


@pytest.mark.parametrize("name", REFERENCE_FIELDS)
def test_every_usual_field_holds_the_reference(name: str) -> None:
    assert find_reference({name: "7"}) == find_reference_text({name: "7"}) == "7"
    assert find_reference({**dict.fromkeys(REFERENCE_FIELDS), name: 7}) == 7


@pytest.mark.parametrize(
    ("row", "reference", "text"),
    [
        ({"ground_truth": "8", "answer": "7"}, "7", "7"),  # in the order of the list
        ({"answer": " ", "ground_truth": "8"}, "8", "8"),  # blank ones are passed over
        ({"answer": None, "reward_model": {"ground_truth": 0}}, 0, "0"),
        ({"answer": [1, "a"]}, [1, "a"], '[1, "a"]'),
        ({"answer": True}, True, "true"),
        ({"answer": " \n", "gold": ""}, None, " \n"),
        ({"answer": []}, None, "[]"),
        ({"prompt": "2 + 3?"}, None, None),
    ],
)
def test_the_reference_is_the_first_that_is_not_blank(row: Any, reference: Any, text: str | None) -> None:
    assert (find_reference(row), find_reference_text(row)) == (reference, text)
