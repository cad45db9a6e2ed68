"""Who is to blame for a grader's failure is found by controls made from the item, never declared."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlvr.core.types import Score
from rlvr.reward.graders import Grader
from rlvr.reward.graders.controls import ALWAYS, SLOW_ITEMS, Blame, make_controls
from rlvr.sandbox import NoTier, shared_sandbox


def verdict_of(score: Score) -> tuple[float | None, str, str]:
    return score.value, score.outcome.value, score.reason


def python(*lines: str) -> Grader:
    try:
        shared_sandbox()
    except NoTier as refusal:
        pytest.skip(f"no sandbox works here: {refusal}")
    source = "import json, re\ndef grade(sample, item):\n" + "\n".join(f"    {line}" for line in lines)
    return Grader.of({"type": "python", "name": "p", "source": source})


FAILED = (0.0, "failed", "ungradeable")
ERROR = (None, "error", "grader_failed")


@pytest.mark.parametrize(
    ("line", "item", "text", "expected"),
    [
        ("return json.loads(sample['output_text'])['answer'] == item['answer']", {"answer": 7}, "seven", FAILED),
        ("return int(sample['output_text']) == int(item['answer'])", {"answer": "7"}, "seven", FAILED),
        ("return re.search('#### (.+)', sample['output_text']).group(1) == '7'", {"answer": "7"}, "8", FAILED),
        ("return sample['output_json']['answer'] == 7", {"answer": 7}, "no JSON", FAILED),
        ("return int(sample['output_text'])", {"answer": "x + 1"}, "seven", ERROR),
        ("return int(sample['output_text'])", {}, "seven", ERROR),
        # without a reference: a sentence in the forms is graded, and is no right answer that excuses its like
        ("return len(json.loads(sample['output_text'])) > 0", {"prompt": "Write JSON"}, "no JSON", FAILED),
        ("return len(json.loads(sample['output_text'])) > 0", {"prompt": "Write it"}, "I do not know.", FAILED),
        ("return len(re.search('<answer>(.*)</answer>', sample['output_text']).group(1))", {}, "seven", FAILED),
        ("return item['nowhere']", {"answer": "7"}, "7", ERROR),
        # a plain sentence is graded, but a right answer never: the grader is at fault
        ("return 1 / ('7' not in sample['output_text'])", {"answer": "7"}, "7", ERROR),
    ],
)
def test_a_program_fails_the_answer_alone_or_is_in_error(line: str, item: Any, text: str, expected: object) -> None:
    grader = python(line)
    assert [verdict_of(grader.grade(item, {"output_text": text})) for _ in range(2)] == [expected] * 2


JSON = "return json.loads(sample['output_text'])['answer'] == item['answer']"
MARK = r"return float(re.search(r'#### (\d+)', sample['output_text']).group(1)) == 7"
INT = "return int(sample['output_text']) == 7"
KEY = "return {'yes': 1, 'no': 0}[sample['output_text']]"
WORKED = {"answer": "3 + 4 = 7\n#### 7"}
IN_JSON = {"answer": 7, "prompt": "3 + 4? Reply in JSON."}


@pytest.mark.parametrize(
    ("line", "item", "text", "expected"),
    [
        # a right answer in a form that the grader does not read, where nothing says that it must have another
        (JSON, {"answer": 7}, "7", ERROR),
        (JSON, {"answer": 7}, " 7\n", ERROR),
        (JSON, {"answer": 7}, "#### 7", ERROR),
        (JSON, {"answer": 7}, "The answer is 7.", ERROR),
        (JSON, {"reward_model": {"ground_truth": 7}, "answer": None}, "7", ERROR),
        (INT, {"answer": "7"}, '{"answer": "7"}', ERROR),
        (INT, {"answer": "7"}, '{ "answer":"7" }', ERROR),
        (MARK, {"answer": "7"}, "7", ERROR),
        # a wrong answer, and one in no form, fail
        (JSON, {"answer": 7}, "8", FAILED),
        (JSON, {"answer": 7}, '{"answer": 7', FAILED),
        (JSON, {"answer": 7}, '{"result": 7}', FAILED),
        (INT, {"answer": "7"}, "8.5", FAILED),
        (KEY, {"answer": "yes"}, "maybe", FAILED),
        (KEY, {"answer": "maybe"}, "maybe", ERROR),
        # the prompt, the reference or the item names the form that works: others did not do what was asked
        (JSON, IN_JSON, "7", FAILED),
        (JSON, {"answer": 7, "prompt": "3 + 4? \\boxed{} please"}, "7", ERROR),
        (MARK, WORKED, "7", FAILED),
        (MARK, WORKED, "3 + 4 = 7\n#### seven", FAILED),
        (JSON.replace("['answer']", "['r']", 1), {"answer": 7, "control_answer": '{"r": 7}'}, "7", FAILED),
        (JSON.replace("['answer']", "['r']", 1), {"answer": 7, "control_answer": '{"r": 7}'}, '{"r":7', FAILED),
        (JSON.replace("['answer']", "['r']", 1), {"answer": 7, "control_answer": {"r": 7}}, "7", FAILED),
        (JSON.replace("['answer']", "['r']", 1), {"answer": 7, "control_answer": {"r": 7}}, '{"r":7', FAILED),
        # the form that the task asks for is the one that the grader cannot read
        (INT, IN_JSON, '{"answer": 7}', ERROR),
        (INT, IN_JSON, "seven", FAILED),
        (INT, {"answer": "7", "control_answer": '{"r": 7}'}, "seven", ERROR),
    ],
)
def test_a_right_answer_is_never_failed_by_a_grader_that_reads_another_form(
    line: str, item: Any, text: str, expected: object
) -> None:
    grader = python(line)
    scores = [grader.grade(item, {"output_text": text}) for _ in range(2)]
    assert [verdict_of(score) for score in scores] == [expected] * 2, scores[0].detail


EVAL = "return float(eval(sample['output_text'])) == 7"
SHOTS = (
    "'x' * 10**12 | [0] * 10**10 | 10**400 | 1/0 | (lambda f: f(f))(lambda f: f(f)) | float('nan') | assert False | "
    "print('x' * 10**9) | __import__('os')._exit(0) | __import__('sys').exit(0) | __import__('os').kill(-1, 9) | "
    "exec('raise SystemExit') | __import__('os').fork() | __import__('signal').raise_signal(11) | "
    "exec('raise KeyboardInterrupt') | __import__('sys').stdout.write('value 7.0') | "
    "[open('/dev/full', 'w') for _ in range(10**5)] | \x00"
)
BROKEN = [*SHOTS.split(" | "), "(" * 300 + "7" + ")" * 300, "9" * 5000]


@pytest.mark.parametrize("text", BROKEN)
def test_no_answer_avoids_its_0_by_breaking_a_grader_that_runs_it(text: str) -> None:
    grader = python(EVAL)
    assert grader.grade({"answer": "7"}, {"output_text": "7"}).value == 1.0
    score = grader.grade({"answer": "7"}, {"output_text": text})
    assert (score.value, score.outcome.value) == (0.0, "failed"), score


@pytest.mark.slow
@pytest.mark.parametrize("text", ["9**9**9", "__import__('time').sleep(100)"])
def test_an_answer_that_keeps_a_grader_busy_runs_out_of_time(text: str) -> None:
    source = f"def grade(sample, item):\n    {EVAL}"
    score = Grader.of({"type": "python", "source": source}, timeout_s=2).grade({"answer": "7"}, {"output_text": text})
    assert verdict_of(score) == (0.0, "timeout", "timeout")


def test_the_message_says_how_to_name_the_form() -> None:
    detail = python(JSON).grade({"answer": 7}, {"output_text": "7"}).detail
    assert "control_answer" in detail and '{"answer": 7}' in detail and "TypeError" in detail
    other = python(JSON.replace("['answer']", "['r']", 1)).grade({"answer": 7}, {"output_text": "no JSON"})
    assert verdict_of(other) == ERROR and "control_answer" in other.detail and "JSONDecodeError" in other.detail


def multi(formula: str) -> Grader:
    same = {"type": "string_check", "name": "b", "operation": "eq", "input": "{{ sample.output_text }}"}
    part = {**same, "reference": "{{ item.answer }}"}
    return Grader.of({"type": "multi", "name": "m", "graders": {"b": part}, "calculate_output": formula})


@pytest.mark.parametrize("formula", ["1/b", "1 + log(b)", "b^-1", "1 / (2 - (3 - b))"])
def test_a_formula_without_value_fails_the_answer_where_the_reference_has_one(formula: str) -> None:
    score = multi(formula).grade({"answer": "7"}, {"output_text": "8"})
    expected = (0.0, "failed", "no_value") if formula != "1 / (2 - (3 - b))" else (-1.0, "failed", "low_score")
    assert verdict_of(score) == expected


@pytest.mark.parametrize("formula", ["1/(b-b)", "log(0*b)", "sqrt(-1-b)"])
def test_a_formula_without_value_on_the_reference_too_is_in_error(formula: str) -> None:
    assert verdict_of(multi(formula).grade({"answer": "7"}, {"output_text": "8"})) == (None, "error", "no_value")


@pytest.mark.parametrize("formula", ["2/b", "log(b)"])
def test_a_formula_without_value_for_a_right_answer_is_in_error(formula: str) -> None:
    grader = multi(formula)
    assert verdict_of(grader.grade({"answer": "7"}, {"output_text": "#### 7"})) == (None, "error", "no_value")
    asked = {"answer": "7", "control_answer": "7"}
    assert verdict_of(grader.grade(asked, {"output_text": "#### 7"})) == (0.0, "failed", "no_value")


@pytest.mark.parametrize("reason", ["a/b", "a + log(b)"])
def test_a_formula_of_two_graders_fails_the_answer_alone(reason: str) -> None:
    fields = {"input": "{{ sample.output_text }}", "reference": "{{ item.answer }}"}
    parts = {
        "a": {"type": "text_similarity", "evaluation_metric": "fuzzy_match", **fields},
        "b": {"type": "string_check", "operation": "like", **fields},
    }
    grader = Grader.of({"type": "multi", "graders": parts, "calculate_output": reason})
    assert grader.grade({"answer": "7"}, {"output_text": "7"}).value == 1.0
    assert verdict_of(grader.grade({"answer": "7"}, {"output_text": "8"})) == (0.0, "failed", "no_value")


def similar(metric: str, text: str, reference: str) -> Score:
    fields = {"input": "{{ sample.output_text }}", "reference": "{{ item.answer }}", "evaluation_metric": metric}
    return Grader.of({"type": "text_similarity", "name": "s", **fields}).grade(
        {"answer": reference}, {"output_text": text}
    )


@pytest.mark.parametrize(
    ("metric", "reference"), [("rouge_2", "one"), ("rouge_5", "a b c d"), ("rouge_1", "?!"), ("rouge_l", "?!")]
)
def test_a_reference_too_short_for_its_metric_is_invalid_for_every_answer(metric: str, reference: str) -> None:
    for text in (reference, "", "a long and quite different answer"):
        assert verdict_of(similar(metric, text, reference)) == (None, "invalid", "short_reference")


def test_a_literal_reference_too_short_for_its_metric_is_refused_before_an_answer_is_asked_for() -> None:
    fields = {"type": "text_similarity", "input": "{{ sample.output_text }}", "reference": "one two"}
    with pytest.raises(ValueError, match="reference='one two': the reference has 2 words: rouge_3 needs at least 3"):
        Grader.of({**fields, "evaluation_metric": "rouge_3"})
    assert Grader.of({**fields, "evaluation_metric": "rouge_2"}).grade({}, {"output_text": "one two"}).value == 1.0


@pytest.mark.parametrize("metric", ["fuzzy_match", "bleu", "gleu", "rouge_1", "rouge_2", "rouge_3", "rouge_l"])
def test_identical_texts_are_1_and_an_empty_answer_is_0(metric: str) -> None:
    assert similar(metric, "one two three", "one two three").value == pytest.approx(1.0, abs=1e-15)
    assert similar(metric, "", "one two three").value == 0.0
    for blank in ("", "  \n"):
        assert verdict_of(similar(metric, blank, blank)) == (None, "invalid", "empty_reference")


def test_a_text_compared_with_itself_is_refused() -> None:
    same = {"input": "{{ sample.output_text }}", "reference": "{{ sample.output_text }}"}
    with pytest.raises(ValueError, match="is the input itself"):
        Grader.of({"type": "string_check", "name": "s", "operation": "eq", **same})


class Attempts:
    """Grades no control, or those of `graded`; counts what it is asked."""

    def __init__(self, seconds: float, *graded: str) -> None:
        self.seconds, self.graded, self.asked = seconds, graded, list[str]()

    async def __call__(self, control: str) -> tuple[str, float]:
        self.asked.append(control)
        await asyncio.sleep(0)  # so that others can ask meanwhile
        return ("", ALWAYS) if control in self.graded else ("timeout", self.seconds)


def ask(blame: Blame, attempt: Attempts, items: list[dict[str, Any]]) -> list[str]:
    """Why the grader is to blame for an answer to each item, asked at once."""

    async def find_all() -> list[str]:
        return await asyncio.gather(*(blame.find(item, {"output_text": "seven"}, attempt) for item in items))

    return asyncio.run(find_all())


def test_controls_that_run_out_of_time_are_paid_once_for_all_answers_to_an_item() -> None:
    now, item = [0.0], {"answer": "7"}
    blame, attempt = Blame(lambda: now[0]), Attempts(1000.0)
    first, *others = ask(blame, attempt, [item] * 8)
    assert len(attempt.asked) == len(make_controls(item)) == 6
    assert "found earlier" not in first and "timeout" in first
    assert all("found earlier; its controls are tried again in 1,000 s" in why for why in others)
    now[0] = 999.0
    assert "in 1 s" in ask(blame, attempt, [item])[0] and len(attempt.asked) == 6
    now[0] = 1000.0  # perhaps the machine was busy
    assert ask(blame, Attempts(1000.0, "7"), [item]) == [""]
    assert ask(blame, attempt, [item]) == [""] and len(attempt.asked) == 6


def test_a_control_that_ran_out_of_time_before_one_was_graded_is_not_tried_for_each_answer() -> None:
    item = {"answer": "7"}
    blame, attempt = Blame(lambda: 0.0), Attempts(1000.0, "\\boxed{7}")
    assert ask(blame, attempt, [item] * 3) == [""] * 3
    assert attempt.asked == ["7", "#### 7", "\\boxed{7}"]


def test_a_grader_that_is_slow_on_item_after_item_tries_one_control_of_each_until_one_is_graded() -> None:
    items = [{"answer": str(number)} for number in range(SLOW_ITEMS + 3)]
    blame, attempt = Blame(lambda: 0.0), Attempts(1000.0)
    for item in items[:SLOW_ITEMS]:
        assert "one control of" not in ask(blame, attempt, [item])[0]
    assert len(attempt.asked) == 6 * SLOW_ITEMS
    assert "one control of 6 tried" in ask(blame, attempt, [items[SLOW_ITEMS]])[0]
    assert len(attempt.asked) == 6 * SLOW_ITEMS + 1
    good = Attempts(1000.0, items[-2]["answer"])
    assert ask(blame, good, [items[-2]]) == [""]
    ask(blame, attempt, [items[-1]])
    assert len(attempt.asked) == 6 * SLOW_ITEMS + 1 + 6


def test_a_broken_sandbox_is_asked_again_for_each_answer() -> None:
    attempt = Attempts(0.0)
    ask(Blame(lambda: 0.0), attempt, [{"answer": "7"}] * 2)
    assert len(attempt.asked) == 12


def test_the_verdict_says_that_the_controls_ran_out_of_time_before() -> None:
    try:
        shared_sandbox()
    except NoTier as refusal:
        pytest.skip(f"no sandbox works here: {refusal}")
    source = "def grade(sample, item):\n    while True:\n        pass"
    grader = Grader.of({"type": "python", "source": source}, timeout_s=0.5)
    item = {"answer": "7", "control_answer": "7"}
    first, second = (grader.grade(item, {"output_text": text}) for text in ("8", "9"))
    assert verdict_of(first) == verdict_of(second) == ERROR
    assert "found earlier" not in first.detail and "tried again in" in second.detail
