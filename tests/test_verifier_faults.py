"""`find_faults` names each planted fault of a verifier, and none of a right one."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from chat_rows import REAL

from rlvr.audit.verifier_faults import find_faults, show_faults
from rlvr.core.types import Outcome, Score
from rlvr.reward import resolve_reward

NUMBERS = (72, 10, 42, 624, 35)
ROWS: list[dict[str, Any]] = [
    {"prompt": f"Task {i}: what is {n - 3} plus three?", "answer": str(n), "response": text, "label": label}
    for i, n in enumerate(NUMBERS)
    for text, label in (
        (f"I worked it out.\nThe result: {n}", True),
        (f"I worked it out.\nThe result: {n + 1000}", False),
    )
]
_FOUND = re.compile(r"result: (-?[\d.]+)")


def right(text: str, gold: str) -> bool:
    found = _FOUND.search(text)
    return found is not None and found[1] == gold


def number(text: str) -> float:
    found = _FOUND.search(text)
    return float(found[1]) if found else float("nan")


Judge = Callable[[str, str, str], Any]  # (prompt, answer, reference)


def _stateful(kind: str) -> Judge:
    calls, seen, last = itertools.count(), {}, [""]

    def judge(prompt: str, text: str, gold: str) -> bool:
        n = next(calls)
        previous, last[0] = last[0], prompt
        seen.setdefault(text, n)
        return {
            "alternates": right(text, gold) and n % 2 == 0,
            "first_time": right(text, gold) and seen[text] == n,
            "tires": right(text, gold) and n < 10,
            "remembers": right(text, gold) and (not previous or previous <= prompt),
            "every_third": right(text, gold) and n % 3 != 2,
        }[kind]

    return judge


def _cached_by_prompt() -> Judge:
    cache: dict[str, bool] = {}
    return lambda prompt, text, gold: cache.setdefault(prompt, right(text, gold))


def _tell_reference(text: str, gold: str) -> Score:
    passed = right(text, gold)
    outcome = Outcome.PASSED if passed else Outcome.FAILED
    return Score(float(passed), outcome, "" if passed else "wrong", detail=f"expected {gold}")


PLANTED: dict[str, tuple[Judge, str]] = {
    "accepts everything": (lambda p, t, g: True, "accepts junk"),
    "accepts an empty answer": (lambda p, t, g: not t or right(t, g), "accepts an empty answer"),
    "accepts blanks": (lambda p, t, g: not t.strip() or right(t, g), "accepts an empty answer"),
    "accepts the prompt": (lambda p, t, g: p in t or right(t, g), "accepts the prompt"),
    "accepts the prompt's words": (lambda p, t, g: t.startswith("Task") or right(t, g), "accepts the prompt"),
    "accepts long answers": (lambda p, t, g: len(t) > 9_000 or right(t, g), "accepts a long answer"),
    "a magic sentence": (lambda p, t, g: "answer is correct" in t or right(t, g), "accepts a magic phrase"),
    "a judge's mark": (lambda p, t, g: "[[correct]]" in t or right(t, g), "accepts a magic phrase"),
    "the word true": (lambda p, t, g: t == "true" or right(t, g), "accepts a magic phrase"),
    "a phrase of the data": (lambda p, t, g: "worked it out" in t, "accepts a phrase of the data"),
    "substring": (lambda p, t, g: g in t, "accepts a number that begins as the reference"),
    "reads two digits": (
        lambda p, t, g: bool((f := _FOUND.search(t)) and f[1][:2] == g[:2]),
        "accepts a number that begins as the reference",
    ),
    "tolerance 1e-2": (lambda p, t, g: abs(number(t) / float(g) - 1) < 0.011, "accepts a number near the reference"),
    "tolerance 1e-3": (lambda p, t, g: abs(number(t) / float(g) - 1) < 0.0011, "accepts a number near the reference"),
    "rounds to an integer": (
        lambda p, t, g: number(t) == number(t) and round(number(t)) == int(g), "accepts a number near the reference"
    ),
    "drops the sign": (lambda p, t, g: abs(number(t)) == float(g), "accepts the reference with the other sign"),
    "tells the reference": (lambda p, t, g: _tell_reference(t, g), "details tell the reference"),
    "raises without a match": (
        lambda p, t, g: re.search(r"result: (.+)", t).group(1) == g,  # pyright: ignore[reportOptionalMemberAccess]
        "gives malformed answers no verdict",
    ),
    "raises without a number": (lambda p, t, g: float(t.split()[-1]) == float(g), "gives malformed answers no verdict"),
    "caches by the prompt": (_cached_by_prompt(), "accepts junk"),
    "alternates": (_stateful("alternates"), "two verdicts on one row"),
    "accepts the first time": (_stateful("first_time"), "two verdicts on one row"),
    "every third call": (_stateful("every_third"), "two verdicts on one row"),
    "tires after ten calls": (_stateful("tires"), "depends on order"),
    "remembers the last prompt": (_stateful("remembers"), "depends on order"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_each_planted_fault_is_named(name: str) -> None:
    judge, fault = PLANTED[name]

    def verifier(prompt: str, response: str, meta: dict[str, Any]) -> Any:
        return judge(prompt, response, meta["answer"])

    faults = find_faults(ROWS, resolve_reward(verifier))
    print(f"{name}: {', '.join(faults)}")
    assert fault in faults, show_faults(faults)


def test_a_right_verifier_has_no_fault() -> None:
    def verifier(prompt: str, response: str, meta: dict[str, Any]) -> bool:
        return right(response, meta["answer"])

    assert find_faults(ROWS, resolve_reward(verifier)) == {}


@pytest.mark.parametrize("reward", ["math", "gsm8k"])
def test_a_built_in_reward_has_no_fault_on_these_rows(reward: str) -> None:
    rows = [{**row, "response": f"{row['response']}\n#### {json.dumps(int(row['answer']))}"} for row in ROWS[::2]]
    assert find_faults(rows, resolve_reward(reward)) == {}


@pytest.mark.skipif(not REAL.is_dir(), reason="GSM8K is not here")
@pytest.mark.parametrize("reward", ["math", "gsm8k"])
def test_a_built_in_reward_has_no_fault_on_real_rows(reward: str) -> None:
    rows: list[dict[str, Any]] = []
    for line in (REAL / "test.jsonl").read_text(encoding="utf-8").splitlines()[:40]:
        row = json.loads(line)
        final = row["answer"].rpartition("####")[2].strip()
        gold = row["answer"] if reward == "gsm8k" else final
        true = row["answer"] if reward == "gsm8k" else f"So it is \\boxed{{{final}}}"
        rows.append({"prompt": row["question"], "answer": gold, "response": true, "label": True})
        rows.append({**rows[-1], "response": "\\boxed{-3}\n#### -3", "label": False})
    assert find_faults(rows, resolve_reward(reward)) == {}
