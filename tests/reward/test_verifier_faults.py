"""`find_faults` names each planted fault of a verifier, and none of a right one."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rlvr.audits.verifier_faults import FAULTS, FaultSearch, TrialProcess, find_faults, show_faults
from rlvr.core.types import Outcome, Score
from rlvr.reward import resolve_reward
from rlvr.reward.signatures import Case
from tests.kit.chat_rows import REAL

NUMBERS = (72, 10, 42, 6240, 35)
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
            "one_neighbour": right(text, gold) and not (previous.startswith("Task 3") and prompt.startswith("Task 1")),
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
    "accepts everything": (lambda p, t, g: True, "junk"),
    "accepts an empty answer": (lambda p, t, g: not t or right(t, g), "empty"),
    "accepts blanks": (lambda p, t, g: not t.strip() or right(t, g), "empty"),
    "accepts the prompt": (lambda p, t, g: p in t or right(t, g), "prompt"),
    "accepts the prompt's words": (lambda p, t, g: t.startswith("Task") or right(t, g), "prompt"),
    "accepts long answers": (lambda p, t, g: len(t) > 9_000 or right(t, g), "long"),
    "a magic sentence": (lambda p, t, g: "answer is correct" in t or right(t, g), "phrase"),
    "a judge's mark": (lambda p, t, g: "[[correct]]" in t or right(t, g), "phrase"),
    "the word true": (lambda p, t, g: t == "true" or right(t, g), "phrase"),
    "a phrase of the data": (lambda p, t, g: "worked it out" in t, "shared"),
    "substring": (lambda p, t, g: g in t, "begins"),
    "reads two digits": (
        lambda p, t, g: bool((f := _FOUND.search(t)) and f[1][:2] == g[:2]),
        "begins",
    ),
    "tolerance 1e-2": (lambda p, t, g: abs(number(t) / float(g) - 1) < 0.011, "near"),
    "tolerance 1e-3": (lambda p, t, g: abs(number(t) / float(g) - 1) < 0.0011, "near"),
    "rounds to an integer": (
        lambda p, t, g: number(t) == number(t) and round(number(t)) == int(g), "near"
    ),
    "drops the sign": (lambda p, t, g: abs(number(t)) == float(g), "sign"),
    "tells the reference": (lambda p, t, g: _tell_reference(t, g), "leak"),
    "raises without a match": (
        lambda p, t, g: re.search(r"result: (.+)", t).group(1) == g,  # pyright: ignore[reportOptionalMemberAccess]
        "no_verdict",
    ),
    "raises without a number": (lambda p, t, g: float(t.split()[-1]) == float(g), "no_verdict"),
    "caches by the prompt": (_cached_by_prompt(), "junk"),
    "alternates": (_stateful("alternates"), "unstable"),
    "accepts the first time": (_stateful("first_time"), "unstable"),
    "every third call": (_stateful("every_third"), "unstable"),
    "tires after ten calls": (_stateful("tires"), "order"),
    "remembers the last prompt": (_stateful("remembers"), "order"),
    "refuses one task after one other": (_stateful("one_neighbour"), "order"),
    "accepts punctuation": (lambda p, t, g: (bool(t) and not re.search(r"\w", t)) or right(t, g), "junk"),
    "accepts None": (lambda p, t, g: t == "None" or right(t, g), "junk"),
    "reads the beginning only": (lambda p, t, g: right(t[:20_000], g), "refuses_long"),
    "reads so many lines": (lambda p, t, g: right("\n".join(t.splitlines()[:500]), g), "refuses_long"),
    "drops all separators": (
        lambda p, t, g: bool((f := re.search(r"result: (-?[\d.,]+)", t)) and re.sub("[.,]", "", f[1]) == g),
        "separators",
    ),
    "any of the numbers": (lambda p, t, g: g in re.findall(r"-?\d+", t), "among"),
    "the first or the last": (lambda p, t, g: g in (found := re.findall(r"-?\d+", t))[:1] + found[-1:], "among"),
    "any of the lines": (lambda p, t, g: g in _FOUND.findall(t), "among"),
    "a tolerance that nan passes": (
        lambda p, t, g: ("nan" in t and not abs(float(t.split()[-1]) - float(g)) > 0.1) or right(t, g), "junk"
    ),
    "two meanings of a percent sign": (
        lambda p, t, g: right(t, g) or (t.endswith("%") and number(t) in (float(g), float(g) * 100)), "percent"
    ),
    "the reference of any row": (lambda p, t, g: number(t) in NUMBERS, "other"),
    "any of the choices": (lambda p, t, g: g in re.split(" or |: ", t), "among"),
    "takes an unfinished number": (
        lambda p, t, g: bool((f := _FOUND.search(t)) and f[1][0] != "-" and g.startswith(f[1])), "cut"
    ),
    "slow on junk": (lambda p, t, g: right(t, g) or bool(time.sleep(0.3 * (len(t) > 19_000))), "slow"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_each_planted_fault_is_named(name: str) -> None:
    judge, fault = PLANTED[name]

    def verifier(prompt: str, response: str, meta: dict[str, Any]) -> Any:
        return judge(prompt, response, meta["answer"])

    search = find_faults(ROWS, resolve_reward(verifier), slow_s=0.2)
    print(f"{name}: {', '.join(search.evidence)}")
    assert fault in search.evidence, show_faults(search)


CITIES = ("Paris", "Rome", "New York", "B")
WORDS: list[dict[str, Any]] = [
    {"prompt": f"Place {i}?", "answer": city, "response": f"It is {text}", "label": label}
    for i, city in enumerate(CITIES)
    for text, label in ((city, True), ("Atlantis", False))
]


def read_word(text: str) -> str:
    return text.rpartition("It is ")[2]


PLANTED_IN_WORDS: dict[str, tuple[Callable[[str, str], bool], str]] = {
    "ignores case": (lambda t, g: read_word(t).lower() == g.lower(), "case"),
    "folds case": (lambda t, g: read_word(t).casefold() == g.casefold(), "case"),
    "compares beginnings": (lambda t, g: read_word(t).startswith(g), "begins"),
    "compares three letters": (lambda t, g: read_word(t)[:3] == g[:3], "begins"),
    "takes a word that is cut": (
        lambda t, g: (len(read_word(t)) > 2 and g.startswith(read_word(t))) or read_word(t) == g,
        "cut",
    ),
    "takes one of many": (lambda t, g: g in read_word(t).split(" or "), "among"),
    "takes one of a list": (lambda t, g: g in read_word(t).split(", "), "among"),
    "the word of any row": (lambda t, g: read_word(t) in CITIES, "other"),
    "looks inside words": (lambda t, g: g in read_word(t), "word"),
}


@pytest.mark.parametrize("name", PLANTED_IN_WORDS)
def test_each_fault_of_words_is_named(name: str) -> None:
    judge, fault = PLANTED_IN_WORDS[name]

    def verifier(prompt: str, response: str, meta: dict[str, Any]) -> bool:
        return judge(response, meta["answer"])

    search = find_faults(WORDS, resolve_reward(verifier))
    assert fault in search.evidence, show_faults(search)
    exact = resolve_reward(lambda prompt, response, meta: read_word(response) == meta["answer"])
    assert find_faults(WORDS, exact).evidence == {}


def _rights(cases: Sequence[Case]) -> list[bool]:
    return [right(case.response, (case.meta or {})["answer"]) for case in cases]


def _raise_for_all(cases: Sequence[Case]) -> list[bool]:
    for case in cases:
        if not _FOUND.search(case.response):
            raise ValueError(case.response)
    return _rights(cases)


COMPANY: dict[str, Callable[[Sequence[Case]], list[Any]]] = {
    "one right answer is enough": lambda cases: [any(_rights(cases))] * len(cases),
    "the next one's verdict": lambda cases: [*_rights(cases)[1:], _rights(cases)[0]],
    "scores around the batch's mean": lambda cases: [
        r - (sum(_rights(cases)) / len(cases)) / 2 for r in _rights(cases)
    ],
    "the first ten only": lambda cases: [r and i < 9 for i, r in enumerate(_rights(cases))],
    "twins cost": lambda cases: [
        r and [c.response for c in cases].count(case.response) == 1
        for r, case in zip(_rights(cases), cases, strict=True)
    ],
    "raises for all": _raise_for_all,
    "sorted by length": lambda cases: _rights(sorted(cases, key=lambda case: len(case.response))),
}


@pytest.mark.parametrize("name", COMPANY)
def test_a_verdict_that_depends_on_other_rows_of_the_batch_is_named(name: str) -> None:
    def verifier(cases: Sequence[Case]) -> list[Any]:
        return COMPANY[name](cases)

    search = find_faults(ROWS, resolve_reward(verifier))
    assert "company" in search.evidence, show_faults(search)
    assert find_faults(ROWS, resolve_reward(lambda cases: _rights(cases))).evidence == {}


def test_a_verifier_that_ends_a_probe_at_its_own_limit_is_not_slow() -> None:
    def verifier(prompt: str, response: str, meta: dict[str, Any]) -> Any:
        if _FOUND.search(response):
            return right(response, meta["answer"])
        time.sleep(0.05)
        return Score(0.0, Outcome.TIMEOUT, "timeout")

    assert find_faults(ROWS, resolve_reward(verifier), slow_s=0.04).evidence == {}


def test_a_verifier_that_starts_something_once_is_not_slow() -> None:
    started: list[float] = []

    def verifier(prompt: str, response: str, meta: dict[str, Any]) -> bool:
        if not _FOUND.search(response) and not started:
            started.append(1.0)
            time.sleep(0.5)
        return right(response, meta["answer"])

    assert find_faults(ROWS, resolve_reward(verifier), slow_s=0.4).evidence == {}
    assert started


@pytest.mark.parametrize(
    "answer", ["9" * 400, "-" + "7" * 5000, ".", "\u0661\u0662", "\ud800", "1e400", {"a": [1]}, None, 0, ""]
)
def test_no_reference_breaks_the_search(answer: Any) -> None:
    row = {"prompt": None, "answer": answer, "response": f"result: {answer}", "label": True}
    reward = resolve_reward(lambda prompt, response, meta: response == f"result: {meta['answer']}")
    assert "junk" not in find_faults([row, row], reward).evidence


def test_the_table_lists_every_fault_and_what_is_allowed() -> None:
    search = FaultSearch({"case": ["a", "b"], "junk": ["c"]}, set(FAULTS) - {"sign"})
    lines = show_faults(search, ["case"]).splitlines()[1:]
    assert lines.pop().startswith("not tried: ")
    assert [line.split()[0] for line in lines] == list(FAULTS)
    shown = {line.split()[0]: line for line in lines}
    assert "2 times, allowed" in shown["case"] and "first: a" in shown["case"]
    assert "FAULT, 1 time " in shown["junk"] and " - " in shown["slow"] and "not tried" in shown["sign"]


def test_faults_that_no_row_allows_to_look_for_are_not_called_absent() -> None:
    never = resolve_reward(lambda prompt, response, meta: False)
    assert find_faults(ROWS, never).tried_faults == {"unstable", "order", "company"}
    words = find_faults(WORDS, resolve_reward(lambda prompt, response, meta: read_word(response) == meta["answer"]))
    assert words.untried_faults == ["shared", "near", "sign", "separators", "percent"]


def test_every_fault_has_a_planted_verifier() -> None:
    planted = {fault for _, fault in (*PLANTED.values(), *PLANTED_IN_WORDS.values())} | {"company"}
    assert planted == set(FAULTS)


def test_a_right_verifier_has_no_fault() -> None:
    def verifier(prompt: str, response: str, meta: dict[str, Any]) -> bool:
        return right(response, meta["answer"])

    assert find_faults(ROWS, resolve_reward(verifier)).evidence == {}


@pytest.mark.parametrize("reward", ["math", "gsm8k"])
def test_a_built_in_reward_has_no_fault_on_these_rows(reward: str) -> None:
    rows = [{**row, "response": f"{row['response']}\n#### {json.dumps(int(row['answer']))}"} for row in ROWS[::2]]
    assert find_faults(rows, resolve_reward(reward)).evidence == {}


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
    assert find_faults(rows, resolve_reward(reward)).evidence == {}


HANGS = """import os

def evaluates(prompt, response, meta):
    try:
        return str(eval(response.rpartition(":")[2].replace("^", "**"))) == meta["answer"]
    except Exception:
        return False

def ends_its_process(prompt, response, meta):
    if response.endswith("9**9**9"):
        os._exit(3)
    return response.rpartition(" ")[2] == meta["answer"]
"""


@pytest.mark.parametrize("name", ["evaluates", "ends_its_process"])
def test_a_verifier_that_never_returns_or_ends_its_process_is_named_and_the_search_goes_on(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "verifier_that_hangs.py").write_text(HANGS)
    monkeypatch.syspath_prepend(tmp_path)
    reward = f"verifier_that_hangs:{name}"
    with closing(TrialProcess(reward, {}, seconds=2.0)) as trial:
        search = find_faults(ROWS, resolve_reward(reward), trial=trial)
    assert any("9**9**9" in seen for seen in search.evidence["slow"])
    assert "refuses_long" in search.tried_faults, "the probes after it were tried too"


@pytest.mark.parametrize("reference", ["425492.94172323996", "0.109375", "3.125194", "40619700", "-61054.42"])
def test_a_scorer_that_rounds_numbers_has_no_fault(reference: str):
    """It takes the last number of a text, to a ten-thousandth: no probe may be nearer than that, or the same number."""
    other = f"{float(reference) + 5000:.15g}"
    rows = [
        {"prompt": f"Task {i}", "answer": gold, "response": f"result: {text}", "label": gold == text}
        for i, gold in enumerate((reference, other))
        for text in (reference, other)
    ]

    def rounds(prompt: str, response: str, meta: dict[str, Any]) -> float:
        found = re.findall(r"result: (-?[\d.]+(?:e[+-]?\d+)?)(?!\S)", response)
        try:
            value = float(found[-1])
        except (IndexError, ValueError):
            return 0.0
        return float(abs(value - float(meta["answer"])) <= 1e-4 * abs(float(meta["answer"])))

    assert find_faults(rows, resolve_reward(rounds)).evidence == {}
