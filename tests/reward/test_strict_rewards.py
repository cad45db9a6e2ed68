"""`code_strict` and `math_flexible`: the form that the prompt asks for, and what a reader would accept."""

from __future__ import annotations

import pytest

from rlvr.core.types import Task, Trajectory
from rlvr.reward import resolve_reward
from rlvr.reward.code.program_extraction import extract_requested
from rlvr.reward.signatures import Case

ADD = "def add(a, b):\n    return a + b"
FENCED = f"```python\n{ADD}\n```"
HEAD = 'def add(a, b):\n    """The sum."""\n'


@pytest.mark.parametrize(
    ("response", "code", "reason"),
    [
        (FENCED, ADD, ""),
        (f"Here it is:\n{FENCED}\nIt adds.", ADD, ""),
        (f"```\n{ADD}\n```", ADD, ""),
        (f"<think>\n```python\nno\n```\n</think>\n{FENCED}", ADD, ""),
        (ADD, "", "no_answer"),
        (f"```python\n{ADD}", "", "no_answer"),  # never closed
        (f"```javascript\n{ADD}\n```", "", "no_answer"),
        (f"{FENCED}\nor\n{FENCED}", "", "many_answers"),
        ("```python\n\n```", "", "no_answer"),
        ("x" * ((1 << 20) + 1), "", "too_large"),
    ],
)
def test_a_chat_asks_for_one_code_block(response: str, code: str, reason: str) -> None:
    found = extract_requested(response, is_chat=True)
    assert (found.code.strip(), found.reason) == (code, reason)


@pytest.mark.parametrize(
    ("response", "prefix", "code"),
    [
        (f"{ADD}\n[DONE]\nYou are an expert", "", f"{ADD}\n"),
        (ADD, "", ADD),
        (FENCED, "", FENCED),  # a fence is no Python: the program does not compile
        ("    return a + b\n\nprint(add(1, 2))", HEAD, f"{HEAD}    return a + b\n"),
        ("    return a + b\ndef other():\n    pass", HEAD, f"{HEAD}    return a + b"),
        ("return a + b", HEAD, f"{HEAD}return a + b"),  # not indented, and not repaired
    ],
)
def test_text_is_taken_as_it_stands(response: str, prefix: str, code: str) -> None:
    assert extract_requested(response, prefix, is_chat=False).code == code


def test_strict_and_lenient_verdicts_of_the_same_programs() -> None:
    """Strict 1, 0, 0 and lenient 1, 1, 0 after text; strict 0, 1, 0 and lenient 1, 1, 0 in a chat."""
    problem = {"tests": ["assert add(1, 2) == 3"]}
    text, chat = Task("text", "Add.", problem), Task("chat", [{"role": "user", "content": "Add."}], problem)
    shown = Task("shown", "Add.", problem, shown_prompt=[{"role": "user", "content": "Add."}])
    responses = [f"{ADD}\n[DONE]", FENCED, FENCED.replace("+", "-")]

    def judge(name: str, task: Task) -> list[float]:
        played = [Trajectory("Add.", [1], response, [], task=task) for response in responses]
        return [float(score.value == 1) for score in resolve_reward(name).score(played)]

    assert judge("code_strict", text) == [1, 0, 0]
    assert judge("code", text) == [1, 1, 0]
    assert judge("code_strict", chat) == judge("code_strict", shown) == [0, 1, 0]
    assert judge("code", chat) == [1, 1, 0]


@pytest.mark.parametrize(
    ("response", "strict", "lenient"),
    [
        ("so it is \\boxed{\\frac{1}{2}}.", 1, 1),
        ("so it is \\boxed{0.5} and not \\boxed{0.4}", 0, 0),  # the last box counts
        ("The answer is $\\frac12$.", 0, 1),
        ("We halve it.\n#### 1/2", 0, 1),
        ("Halving gives the value below.\n\n$0.5$", 0, 1),
        ("Halving gives 0.5 of it.\nI am sure.", 0, 0),
        ("0.50", 0, 1),
        ("\\boxed{2}\nThe answer is 1/2.", 0, 0),  # a box decides wherever it stands
        ("about \\boxed{0.51}", 0, 0),
    ],
)
def test_math_is_found_in_a_box_or_where_a_reader_would_look(response: str, strict: float, lenient: float) -> None:
    case = Case("", response, {"answer": "\\frac{1}{2}"})
    assert resolve_reward("math", extract="boxed").judge(case).value == strict
    assert resolve_reward("math_flexible").judge(case).value == lenient
