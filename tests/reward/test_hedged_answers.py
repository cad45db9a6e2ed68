"""An answer that lists several answers is paid for one of them at most."""

from __future__ import annotations

import itertools

import pytest

from rlvr.reward import resolve_reward
from rlvr.reward.signatures import Case

REWARDS = {
    "math": resolve_reward("math", use_math_verify="never"),
    "lenient": resolve_reward("math", use_math_verify="never", profile="lenient"),
    "first": resolve_reward("math", use_math_verify="never", on_many_boxes="first"),
    "agree": resolve_reward("math", use_math_verify="never", on_many_boxes="agree"),
    "join": resolve_reward("math", use_math_verify="never", on_many_boxes="join"),
    "math_flexible": resolve_reward("math_flexible"),
    "gsm8k": resolve_reward("gsm8k"),
    "gsm8k_strict": resolve_reward("gsm8k_strict"),
    "gsm8k_flexible": resolve_reward("gsm8k_flexible"),
    "exact_match": resolve_reward("exact_match"),
}


def paid(reward: str, text: str) -> str:
    """Which of the golds 5 and 6 the answer is paid for: "", "5", "6" or "56"."""
    scores = {gold: REWARDS[reward].judge_all([Case("2 + 3?", text, {"answer": gold})])[0].value for gold in "56"}
    return "".join(gold for gold, value in scores.items() if value)


@pytest.mark.parametrize(
    ("text", "math", "gsm8k"),
    [
        # the last box, the last `####`, the last "answer is" decides
        (r"\boxed{5} or \boxed{6}", "6", "6"),
        (r"\boxed{5}. Or maybe \boxed{6}?", "6", "6"),
        ("#### 5\n#### 6", "6", "6"),
        ("The answer is 5. The answer is 6.", "6", "6"),
        ("Answer: 5\nAnswer: 6", "6", "6"),
        # `math` looks for a box first, `gsm8k` for a `####` line
        ("#### 5\n\\boxed{6}", "6", "5"),
        # the sentence that says the answer decides, not the next one
        ("The answer is 5. Or maybe 6.", "5", ""),
        ("The answer is $5$. Or $6$.", "5", ""),
        # several answers in one place are none of them
        ("The answer is 5 or 6.", "", ""),
        ("The answer is 5, or 6.", "", ""),
        ("The answer is 5; or 6.", "", ""),
        ("The answer is 5 or maybe 6.", "", ""),
        ("The answer is 5; or perhaps 6.", "", ""),
        ("The answer is 5 and 6.", "", ""),
        ("The answer is $5$ or $6$.", "", ""),
        ("The answer is $5$ or maybe $6$.", "", ""),
        ("The answer is **5** or **6**.", "", ""),
        ("**Answer: 5** or 6", "", ""),
        ("**Answer: 5** or maybe **6**", "", ""),
        ("#### 5 or 6", "", ""),
        (r"\boxed{5 or 6}", "", ""),
        (r"\boxed{5 \text{ or } 6}", "", ""),
        (r"\boxed{5, 6}", "", ""),
        (r"\boxed{\{5, 6\}}", "", ""),
        (r"\boxed{5 = 6}", "", ""),
        (r"\boxed{5 \pm 1}", "", ""),
        (r"\boxed{[5, 6]}", "", ""),
        ("5 or 6", "", ""),
        # what is no second answer changes nothing
        ("The answer is 5; the rest is 6.", "5", "5"),
        ("The answer is 5 and no more", "", "5"),
        ("**Answer: 5** or so they say", "5", "5"),
    ],
)
def test_which_of_two_answers_is_paid(text: str, math: str, gsm8k: str) -> None:
    assert (paid("math", text), paid("gsm8k", text)) == (math, gsm8k)


ONES = (r"\boxed{%s}", "#### %s", "The answer is %s.", "Answer: $%s$", "**%s**", "%s", r"\(%s\)", "x = %s")
JOINS = (" or ", ", ", "\n", ". Or maybe ", "; or ", " and ", " = ", " / ", r" \text{ or } ", "</think>", " ")


@pytest.mark.parametrize("reward", REWARDS)
def test_no_list_of_two_answers_is_paid_for_both(reward: str) -> None:
    lists = [
        join.join((one % first, other % second)) + end
        for one, other, join in itertools.product(ONES, ONES, JOINS)
        for first, second in ("56", "65")
        for end in ("", "\nSo be it.")
    ]
    lists += [one % f"5{join}6" for one, join in itertools.product(ONES, JOINS)]
    assert [text for text in lists if paid(reward, text) == "56"] == []
