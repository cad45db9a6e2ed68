"""Name the faults of a verifier on labelled rows: judge each row again in other orders and company, and try probes.

    find_faults(rows, reward).evidence      # {"order": ["row 3: passed, then failed"], ...}; `FAULTS` says what each is

Each row is judged alone twice in a row, alone in shuffled orders, and in one batch with all others; some accepted ones
beside themselves and beside malformed answers. Probes are answers that solve nothing, made from the rows: the prompt, a
phrase that accepted answers share, a true answer with another reference in it. Of a pair of probes one may be accepted,
never both: 42% and 4200% for 42.

A verifier that evaluates an answer as Python may never return from `9**9**9`, and nothing in its process can end it.
`TrialProcess` tries such probes elsewhere first.
"""

from __future__ import annotations

import os
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from rlvr.audits.process_tree import end_with_parent, without_main
from rlvr.audits.verifier_errors import make_case
from rlvr.core.registry import did_you_mean
from rlvr.core.types import Outcome, Score
from rlvr.reward.references import find_reference_text
from rlvr.reward.registry import Reward, resolve_reward
from rlvr.reward.signatures import Case

FAULTS = {
    "unstable": "two verdicts on one row",
    "order": "a verdict depends on what was judged before",
    "company": "a verdict depends on the other answers of its batch",
    "empty": "accepts an empty answer",
    "junk": "accepts junk",
    "long": "accepts a long answer",
    "phrase": "accepts a magic phrase",
    "shared": "accepts a phrase of the data",
    "prompt": "accepts the prompt",
    "word": "accepts the reference inside another word",
    "begins": "accepts an answer that begins as the reference",
    "cut": "accepts the reference cut short",
    "near": "accepts a number near the reference",
    "sign": "accepts the reference with the other sign",
    "separators": "accepts a number that has the reference's digits and other separators",
    "percent": "accepts the reference as two different percentages",
    "case": "accepts the reference in another case",
    "among": "accepts the reference among other answers",
    "other": "accepts the references of other rows",
    "refuses_long": "refuses an accepted answer after a long text",
    "no_verdict": "gives malformed answers no verdict",
    "slow": "is slow on malformed answers",
    "leak": "details tell the reference",
}
MAX_TASKS = 20  # whose probes are tried
ROUNDED = 0.001  # of a number's value: what differs by less may be accepted as the same number, rounded
MAX_DIGITS = 300  # of a reference that is a number: longer ones may be no float
ORDERED = 200  # verdicts in shuffled orders, at most 20 orders and at least one
MAX_HEAVY = 2  # of these with heavy probes
SLOW_S, SLOW_RATIO = 5.0, 20.0  # a probe is slow if it takes this long, and this many times what a row takes
HANGS_S = 60.0  # a verifier that gives a malformed answer no verdict for this long is taken to hang
PHRASES = ("The answer is correct.", "Grade: 1.0", "[[correct]]", "true")
JUNK = ("zzz qqq", "{[(\\boxed{", "?!.", "nan", "None", "0")
THOUGHT = "Let me think about it.\n"
HEAVY = ("9" * 20_000, "9^{9^{9^{9}}}", "9**9**9", "(" * 5_000, "1+" * 5_000 + "1", "a" * 20_000 + "!", "\t " * 10_000)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_WORDS = re.compile(r"[^\W\d_]+(?:[ .'-][^\W\d_]+)*")


@dataclass(frozen=True)
class FaultSearch:
    """The `evidence` of each fault, by its name, and the faults that these rows allow to look for (`tried_faults`).

    Without an accepted true row there are no probes, and a reference that is a word has no other sign. `probes` has
    the number of probes by the fault of accepting them.
    """

    evidence: dict[str, list[str]]
    tried_faults: set[str]
    probes: Counter[str] = field(default_factory=Counter[str])

    @property
    def untried_faults(self) -> list[str]:
        return [name for name in FAULTS if name not in self.tried_faults]


def check_allowed(allowed: Collection[str]) -> None:
    """ValueError for a name that is no fault's."""
    for name in allowed:
        if name not in FAULTS:
            raise ValueError(f"audit: --allow {name!r}{did_you_mean(name, FAULTS)}; known faults: {', '.join(FAULTS)}")


class TrialProcess:
    """A process of its own for a reward that may hang: it is ended when an answer has no verdict after `seconds`."""

    def __init__(self, reward: str, options: Mapping[str, Any], seconds: float = HANGS_S) -> None:
        self._reward, self._options, self.seconds = reward, dict(options), seconds
        self._pipe: Connection | None = None

    def hangs(self, case: Case) -> bool:
        if self._pipe is None:
            context = get_context("spawn")
            self._pipe, other = context.Pipe()
            arguments = (self._reward, self._options, other, os.getpid())
            self._process = context.Process(target=_judge_in_trial, args=arguments, daemon=True)
            with without_main():
                self._process.start()
            other.close()
            try:
                self._pipe.recv()  # the reward is there
            except EOFError:
                self.close()
                raise ValueError(
                    f"audit: {self._reward} could not be started in a process of its own; its output says why"
                ) from None
        self._pipe.send(case)
        try:
            if self._pipe.poll(self.seconds):
                self._pipe.recv()
                return False
        except EOFError:  # its process ended over the answer, and ours would have
            self.close()
            return True
        self.close()
        return True

    def close(self) -> None:
        if self._pipe is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._pipe = None


def _judge_in_trial(name: str, options: dict[str, Any], pipe: Connection, parent: int) -> None:
    end_with_parent(parent)
    reward = resolve_reward(name, **options)
    pipe.send(None)
    while True:
        reward.judge_all([pipe.recv()])
        pipe.send(None)


def find_faults(
    rows: Sequence[dict[str, Any]],
    reward: Reward,
    slow_s: float = SLOW_S,
    measured: Sequence[Score] = (),
    trial: TrialProcess | None = None,
    heavy: bool = True,
) -> FaultSearch:
    """Look for all of `FAULTS`; a probe that takes `slow_s` seconds may be slow.

    `measured`: the verdicts that the rows had before, in their order, if any; others now are `unstable`. With a
    `trial` process, heavy probes at which the reward hangs or ends there are `slow`, and are not tried here. Without
    `heavy` there are none of these.
    """
    search = FaultSearch({}, {"unstable", "order", "company"})

    def add(name: str, seen: str) -> None:
        assert name in search.tried_faults, name
        search.evidence.setdefault(name, []).append(seen[:200])

    first, usual_s = _compare_orders(rows, reward, add)
    for place, (before, now) in enumerate(zip(measured, first, strict=False)):
        if _verdict(before) != _verdict(now):
            add("unstable", f"row {place + 1}: {_verdict(before)} when measured, then {_verdict(now)}")
    accepted = [row for row, score in zip(rows, first, strict=True) if row["label"] and score.outcome is Outcome.PASSED]
    shared = _shared_lines(rows, accepted)
    references = list(dict.fromkeys(_final(row) for row in accepted))
    hanging = set[str]()
    for place, row in enumerate(accepted[:MAX_TASKS]):
        probes = _make_probes(row, shared, heavy and place < MAX_HEAVY) + _list_answers(row, references)
        pairs = _make_pairs(row, references)
        search.tried_faults.update(
            (name for name, _ in (*probes, *pairs)), ("no_verdict", "slow", "leak", "refuses_long")
        )
        if trial is not None and place < MAX_HEAVY:
            probes = [probe for probe in probes if not _hangs(trial, row, probe[1], hanging, add)]
        search.probes.update(name for name, _ in (*probes, *pairs))
        for name, text in probes:
            score, seconds = _time(reward, make_case(row, text))
            if score.outcome is Outcome.PASSED:
                add(name, f"{text[-80:]!r} for {_reference(row)[-40:]!r}")
            elif score.value is None:
                add("no_verdict", f"{score.outcome.value} {score.reason} for {text[-80:]!r}")
            elif _leaks(score, row, text):
                add("leak", f"{score.detail[:120]!r} for {text[-40:]!r}")
            bound = max(slow_s, SLOW_RATIO * usual_s)
            if score.outcome is Outcome.TIMEOUT:  # the verifier's own limit, such as that of a program, ended it
                continue
            if seconds > bound:  # perhaps it only started something: the second time counts
                _, seconds = _time(reward, make_case(row, text))
            if seconds > bound:
                add("slow", f"{seconds:.1f} s for {len(text):,} characters, {text[:40]!r}; a row takes {usual_s:.3f} s")
        for name, pair in pairs:
            scores = [reward.judge_all([make_case(row, text)])[0] for text in pair]
            if all(score.outcome is Outcome.PASSED for score in scores):
                add(name, f"{pair[0][-60:]!r} and {pair[1][-60:]!r} for {_reference(row)[-40:]!r}")
        if place < MAX_HEAVY:
            _try_company(row, [text for _, text in probes], reward, add)
            _try_long_text(row, reward, add)
    return search


def _hangs(trial: TrialProcess, row: dict[str, Any], text: str, hanging: set[str], add: Callable[..., None]) -> bool:
    """Whether a heavy probe hangs the reward; `hanging` are the contents that did, which are not tried twice."""
    heavy = max((content for content in HEAVY if content in text), key=len, default=None)
    if heavy is None:
        return False
    if heavy not in hanging and trial.hangs(make_case(row, text)):
        hanging.add(heavy)
        add("slow", f"no verdict within {trial.seconds:g} s, or its process ended, for {text[-80:]!r}")
    return heavy in hanging


def _time(reward: Reward, case: Case) -> tuple[Score, float]:
    start = time.perf_counter()
    (score,) = reward.judge_all([case])
    return score, time.perf_counter() - start


def _compare_orders(rows: Sequence[dict[str, Any]], reward: Reward, add: Any) -> tuple[list[Score], float]:
    """(the first verdict on each row, the seconds that a row usually takes)."""
    cases = [make_case(row) for row in rows]
    first: list[Score] = []
    stable: list[bool] = []
    seconds: list[float] = []
    for place, case in enumerate(cases):
        (one, took), (again, _) = (_time(reward, case) for _ in range(2))
        first.append(one)
        seconds.append(took)
        stable.append(_verdict(one) == _verdict(again))
        if not stable[-1]:
            add("unstable", f"row {place + 1}: {_verdict(one)}, then {_verdict(again)}")
    rng = random.Random(0)
    orders = [rng.sample(range(len(cases)), len(cases)) for _ in range(_count_orders(len(cases)))]
    found = [("order", place, reward.judge_all([cases[place]])[0]) for order in orders for place in order]
    beside = reward.judge_all([cases[place] for place in orders[0]])
    found += [("company", place, score) for place, score in zip(orders[0], beside, strict=True)]
    for name, place, score in found:
        if stable[place] and _verdict(score) != _verdict(first[place]):
            add(name, f"row {place + 1}: {_verdict(first[place])}, then {_verdict(score)}")
    return first, statistics.median(seconds) if seconds else 0.0


def _count_orders(rows: int) -> int:
    """One order of 20 rows holds 19 of 380 neighbours, so that a few rows are shuffled more often."""
    return min(20, max(1, ORDERED // max(rows, 1)))


def _try_company(row: dict[str, Any], others: Sequence[str], reward: Reward, add: Any) -> None:
    """Judge an accepted answer beside itself, and beside answers that solve nothing."""
    own = make_case(row)
    for what, batch in (
        ("beside itself", [own, own]),
        ("beside malformed answers", [own, *(make_case(row, text) for text in others), own]),
    ):
        scores = reward.judge_all(batch)
        for verdict in {_verdict(scores[0]), _verdict(scores[-1])}:
            if verdict[1] != Outcome.PASSED.value:
                add("company", f"{_reference(row)[-40:]!r} {what}: passed alone, then {verdict}")


def _try_long_text(row: dict[str, Any], reward: Reward, add: Any) -> None:
    """Put a text before an accepted answer: where a short one changes nothing, a long one must not. Of tasks that
    allow so many words the short ones are refused too."""
    *short, long = (reward.judge_all([make_case(row, THOUGHT * n + row["response"])])[0] for n in (1, 20, 2_000))
    if all(one.outcome is Outcome.PASSED for one in short) and long.outcome is not Outcome.PASSED:
        add("refuses_long", f"{long.outcome.value} {long.reason} after {len(THOUGHT) * 2_000:,} characters")


def _verdict(score: Score) -> tuple[float | None, str]:
    return score.value, score.outcome.value


def _reference(row: dict[str, Any]) -> str:
    return find_reference_text(row) or ""


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


def _make_probes(row: dict[str, Any], shared: Sequence[str], heavy: bool) -> list[tuple[str, str]]:
    """(the fault of accepting it, the answer); none of them holds the reference as its answer."""
    final, response, prompt = _final(row), row["response"], str(row.get("prompt") or "")
    probes = [("empty", ""), ("empty", " \n"), *(("junk", text) for text in JUNK)]
    probes.append(("long", "zzz " * 5_000))
    probes += [("phrase", phrase) for phrase in PHRASES]
    probes += [("shared", line) for line in shared]
    if prompt:
        probes.append(("prompt", prompt))
    if final and response.count(final):
        altered = [(name, other) for name, other in _alter(final) if other != final]
        altered += [("junk", other) for other in HEAVY if heavy]
        probes += [(name, response.replace(final, other)) for name, other in altered]
    elif heavy:
        probes += [("junk", text) for text in HEAVY]
    return [(name, text) for name, text in probes if not final or not _holds(text, final)]


def _list_answers(row: dict[str, Any], references: Sequence[str]) -> list[tuple[str, str]]:
    """The reference between others, in one answer and in three, so that neither the first nor the last is right."""
    final, response = _final(row), row["response"]
    others = _other_answers(final, references) if final and final in response else []
    if not others:
        return []
    before, after = (response.replace(final, other) for other in (others[0], others[-1]))
    in_one = response.replace(final, f"{others[0]} or {final} or {others[-1]}")
    return [("among", in_one), ("among", f"{before}\n{response}\n{after}")]


def _make_pairs(row: dict[str, Any], references: Sequence[str]) -> list[tuple[str, tuple[str, str]]]:
    """(the fault of accepting both, two answers that exclude each other)."""
    final, response = _final(row), row["response"]
    if not final or final not in response:
        return []
    pairs: list[tuple[str, tuple[str, str]]] = []
    if _is_number(final) and float(final):
        pairs.append(("percent", (f"{final}%", f"{float(final) * 100:.15g}%")))
    for other in _other_answers(final, references)[:1]:
        pairs += [("among", (f"{final}{sign}{other}", f"{other}{sign}{final}")) for sign in (" or ", ", ")]
    others = [other for other in references if exclude_each_other(final, other)]
    if others and (second := next((other for other in others if exclude_each_other(others[0], other)), None)):
        pairs.append(("other", (others[0], second)))
    return [(name, (response.replace(final, one), response.replace(final, two))) for name, (one, two) in pairs]


def _other_answers(final: str, references: Sequence[str]) -> list[str]:
    if _is_number(final):
        value = float(final)
        step = max(1, round(abs(value) * 0.01))  # more than a scorer may round
        return [f"{value + step:.15g}", f"{value + 2 * step:.15g}"]
    # A part of the reference beside it may be the same answer.
    return [other for other in references if other and other not in final and final not in other][:2]


def exclude_each_other(one: str, two: str) -> bool:
    """Whether no verifier may take one for the other: two numbers, or words none of which is in the other."""
    if _is_number(one) and _is_number(two):
        return float(one) != float(two)
    one, two = one.casefold(), two.casefold()
    return bool(_WORDS.fullmatch(one) and _WORDS.fullmatch(two)) and one not in two and two not in one


def _is_number(text: str) -> bool:
    return len(text) <= MAX_DIGITS and _NUMBER.fullmatch(text) is not None


def _alter(final: str) -> list[tuple[str, str]]:
    """(the fault of accepting it, another reference that is made from this one)."""
    if not _is_number(final):
        kinds = [("word", f"qq{final}qq")]
        if _WORDS.fullmatch(final):
            kinds += [("begins", f"{final}zz"), ("case", final.swapcase())]
            kinds += [("cut", final[:-1])] * (len(final) > 3)
        return kinds
    value, digits = float(final), final.lstrip("-")
    near = [f"{value * factor:.15g}" for factor in (1 + ROUNDED, 1.01, 1.1)]
    kinds = [("near", number) for number in near if abs(float(number) - value) > 1e-9]
    others = [("begins", f"{final}7" if "." not in final else f"7{digits}"), ("begins", f"{final}00")]
    others += [("cut", _cut_number(final))] * (len(digits) > 1)
    if "." in final:
        others.append(("separators", final.replace(".", "")))
    elif abs(value) >= 1000:
        others.append(("separators", f"{int(value):,}".replace(",", ".")))
    kinds += [(name, number) for name, number in others if number.count(".") > 1 or float(number) != value]
    if value:
        kinds.append(("sign", f"{-value:.15g}"))
    return [*kinds, ("junk", "nan"), ("junk", "inf")]


def _cut_number(final: str) -> str:
    """The number with as few digits less as change it by more than a thousandth: what a scorer rounds is no fault."""
    value, digits = float(final), final[:-1]
    while len(digits.lstrip("-")) > 1 and abs(float(digits) - value) <= abs(value) * ROUNDED:
        digits = digits[:-1]
    return digits.rstrip(".")


def _holds(text: str, final: str) -> bool:
    return re.search(rf"(?<![\w.-]){re.escape(final)}(?!\w|\.\d)", text) is not None


def _leaks(score: Score, row: dict[str, Any], text: str) -> bool:
    final = _final(row)
    return bool(final) and final not in text and _holds(score.detail, final)


def show_faults(search: FaultSearch, allowed: Collection[str] = ()) -> str:
    """A table of all faults: how often each was seen, and the first time."""
    width = max(map(len, FAULTS))
    lines = ["faults looked for (a fault that is intended is allowed by --allow NAME)"]
    for name, what in FAULTS.items():
        seen = search.evidence.get(name, ())
        times = f"{len(seen)} time{'s' * (len(seen) != 1)}"
        verdict = f"{times}, allowed" if name in allowed else f"FAULT, {times}"
        if not seen:
            verdict = "-" if name in search.tried_faults else "not tried"
        lines.append(f"  {name:<{width}}  {verdict:<18}  {what}" + (f"; first: {seen[0]}" if seen else ""))
    if search.untried_faults:
        lines.append("not tried: needs true rows that the verifier accepts, with a reference of that kind")
    return "\n".join(lines)
