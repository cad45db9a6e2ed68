"""Name the faults of a verifier on labelled rows: judge each row again in other orders and company, and try probes.

    find_faults(rows, reward)      # {"depends on order": ["row 3: passed, then failed"], ...}

Each row is judged alone twice in a row, alone in a shuffled order, and in one batch with all others. Probes are answers
that solve nothing, made from the rows: the prompt, a phrase that accepted answers share, a true answer with another
reference in it. `python -m pytest tests/test_verifier_faults.py` exercises it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from rlvr.core.types import Outcome, Score
from rlvr.reward.registry import Reward
from rlvr.reward.signatures import Case

MAX_TASKS = 20  # whose probes are tried
PHRASES = ("The answer is correct.", "Grade: 1.0", "[[correct]]", "true")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def make_case(row: dict[str, Any], response: str | None = None) -> Case:
    """The row, or another answer to its task, as the verifier is given it."""
    prompt = row.get("prompt")
    meta = {key: value for key, value in row.items() if key not in ("response", "label")}
    return Case(prompt if isinstance(prompt, str) else "", row["response"] if response is None else response, meta)


def find_faults(rows: Sequence[dict[str, Any]], reward: Reward) -> dict[str, list[str]]:
    """What was seen, by the fault's name; empty for a verifier without a fault that this finds."""
    faults: dict[str, list[str]] = {}

    def add(name: str, seen: str) -> None:
        faults.setdefault(name, []).append(seen[:200])

    first = _compare_orders(rows, reward, add)
    accepted = [row for row, score in zip(rows, first, strict=True) if row["label"] and score.outcome is Outcome.PASSED]
    shared = _shared_lines(rows, accepted)
    for row in accepted[:MAX_TASKS]:
        for name, text in _make_probes(row, shared):
            (score,) = reward.judge_all([make_case(row, text)])
            if score.outcome is Outcome.PASSED:
                add(f"accepts {name}", f"{text[-80:]!r} for {_reference(row)[-40:]!r}")
            elif score.value is None:
                add("gives malformed answers no verdict", f"{score.outcome.value} {score.reason} for {text[-80:]!r}")
            elif _leaks(score, row, text):
                add("details tell the reference", f"{score.detail[:120]!r} for {text[-40:]!r}")
    return faults


def _compare_orders(rows: Sequence[dict[str, Any]], reward: Reward, add: Any) -> list[Score]:
    cases = [make_case(row) for row in rows]
    first: list[Score] = []
    stable: list[bool] = []
    for place, case in enumerate(cases):
        one, again = (reward.judge_all([case])[0] for _ in range(2))
        first.append(one)
        stable.append(_verdict(one) == _verdict(again))
        if not stable[-1]:
            add("two verdicts on one row", f"row {place}: {_verdict(one)}, then {_verdict(again)}")
    order = random.Random(0).sample(range(len(cases)), len(cases))
    shuffled = {place: reward.judge_all([cases[place]])[0] for place in order}
    beside = dict(zip(order, reward.judge_all([cases[place] for place in order]), strict=True))
    for place in range(len(cases)):
        for name, other in (("order", shuffled[place]), ("company", beside[place])):
            if stable[place] and _verdict(other) != _verdict(first[place]):
                add(f"depends on {name}", f"row {place}: {_verdict(first[place])}, then {_verdict(other)}")
    return first


def _verdict(score: Score) -> tuple[float | None, str]:
    return score.value, score.outcome.value


def _reference(row: dict[str, Any]) -> str:
    return str(row.get("answer", row.get("ground_truth", "")))


def _final(row: dict[str, Any]) -> str:
    """The reference without a worked solution before it, as GSM8K marks it."""
    return _reference(row).rpartition("####")[2].strip()


def _shared_lines(rows: Sequence[dict[str, Any]], accepted: Sequence[dict[str, Any]]) -> list[str]:
    """Lines that stand in accepted answers to at least two references."""
    seen: dict[str, set[str]] = {}
    for row in accepted:
        for line in row["response"].splitlines():
            if line.strip():
                seen.setdefault(line.strip(), set()).add(_final(row))
    return [line for line, references in seen.items() if len(references) > 1][:10]


def _make_probes(row: dict[str, Any], shared: Sequence[str]) -> list[tuple[str, str]]:
    """(what it is, the answer); none of them holds the reference as its answer."""
    final, response, prompt = _final(row), row["response"], str(row.get("prompt") or "")
    probes = [("an empty answer", ""), ("an empty answer", " \n"), ("junk", "zzz qqq"), ("junk", "{[(\\boxed{")]
    probes.append(("a long answer", "zzz " * 5_000))
    probes += [("a magic phrase", phrase) for phrase in PHRASES]
    probes += [("a phrase of the data", line) for line in shared]
    if prompt:
        probes.append(("the prompt", prompt))
    if final and response.count(final):
        others = [(name, other) for name, other in _alter(final) if other != final]
        probes += [(name, response.replace(final, other)) for name, other in others]
    return [(name, text) for name, text in probes if not final or not _holds(text, final)]


def _alter(final: str) -> list[tuple[str, str]]:
    if not _NUMBER.fullmatch(final):
        return [("the reference inside another word", f"qq{final}qq")]
    value = float(final)
    near = [f"{value * factor:.6g}" for factor in (1.001, 1.01, 1.1)]
    longer = [f"{final}7" if "." not in final else f"7{final.lstrip('-')}", f"{final}00"]
    kinds = [("a number near the reference", number) for number in near if abs(float(number) - value) > 1e-9]
    kinds += [("a number that begins as the reference", number) for number in longer if float(number) != value]
    if value:
        kinds.append(("the reference with the other sign", f"{-value:g}"))
    return kinds


def _holds(text: str, final: str) -> bool:
    return re.search(rf"(?<![\w.-]){re.escape(final)}(?!\w|\.\d)", text) is not None


def _leaks(score: Score, row: dict[str, Any], text: str) -> bool:
    final = _final(row)
    return bool(final) and final not in text and _holds(score.detail, final)


def show_faults(faults: dict[str, list[str]]) -> str:
    """A line per fault: its name, how often it was seen, the first time."""
    return "\n".join(f"fault: {name} ({len(seen)} times; first: {seen[0]})" for name, seen in faults.items())
