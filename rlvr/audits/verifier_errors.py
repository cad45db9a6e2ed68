"""Measure how often a verifier is wrong, on rows whose right verdict is known.

    measure(read_labelled("builtin"), resolve_reward("math"))      # what `rlvr audit --labelled` does

A row is `{"answer": gold, "response": text, "label": true|false, "category": ..., "note": ...}`. The false-positive
rate is the share of false rows that were accepted, the false-negative rate that of true rows that were refused, each
with a 95 % Wilson interval. Rows that could not be judged (`error`, `invalid`) are counted apart and are in no rate.
Rows without a verdict in time (`timeout`: the verifier hung or died) are counted apart too, and as refusals.
`list_data_warnings` warns of rows that cannot measure a verifier: references that say nothing, rows that contradict
each other.
"""

from __future__ import annotations

import json
import os
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlvr.audits.completion_rows import BadRow, read_rows
from rlvr.audits.process_tree import read_descendants
from rlvr.core.task_statistics import wilson_interval
from rlvr.core.types import Outcome, Score
from rlvr.core.verdict_reasons import ReasonNames
from rlvr.reward.code import CodeProblem
from rlvr.reward.code.task_faults import refuse_test_faults
from rlvr.reward.references import find_reference_fault, find_reference_text
from rlvr.reward.registry import Reward
from rlvr.reward.signatures import Case

_DATA = Path(__file__).parent / "data"
BUILTIN = {"builtin": _DATA / "math_pairs.jsonl", "builtin-lenient": _DATA / "math_lenient_pairs.jsonl"}
COMMON = 0.5  # the share of tasks with one reference from which a constant answer is worth a warning
MIN_TASKS = 10  # from which that share says something
CHOICES = ("choices", "options")


def read_labelled(given: str | Path | Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a labelled file (`builtin`: the pairs of mathematics that come with the package), or those given.

    `builtin-lenient`: those for `math` with `profile=lenient`.
    """
    if isinstance(given, (str, Path)):
        source: str | Path = (file := BUILTIN.get(str(given), Path(given)))
        rows = read_rows(file)
    else:
        source, rows = "labelled", ((f"row {number}", row) for number, row in enumerate(given, 1))
    found: list[dict[str, Any]] = []
    for place, row in rows:
        if isinstance(row, BadRow):
            raise ValueError(f"{source}, {row.reason}; every row of a labelled file counts: correct or delete it")
        if not isinstance(row.get("response"), str) or not isinstance(row.get("label"), bool):
            raise ValueError(f"{source}, {place}: expected a text 'response' and a 'label' that is true or false")
        found.append(row)
    return found


def refuse_bad_tests(rows: Sequence[dict[str, Any]], source: str) -> None:
    """Raise ValueError for rows of programs whose tests can judge no answer: they would count as its errors.

    Rows that are no problem of programs pass: the verifier says what is wrong with them.
    """
    problems: dict[str, tuple[str, CodeProblem]] = {}
    for number, row in enumerate(rows, 1):
        with suppress(ValueError):
            problem = CodeProblem.of(row)
            problems.setdefault(repr(problem), (f"row {number}", problem))
    refuse_test_faults(list(problems.values()), source)


def make_case(row: dict[str, Any], response: str | None = None) -> Case:
    """The row, or another answer to its task, as the verifier is given it."""
    prompt = row.get("prompt")
    meta = {key: value for key, value in row.items() if key not in ("response", "label")}
    return Case(prompt if isinstance(prompt, str) else "", row["response"] if response is None else response, meta)


@dataclass(frozen=True)
class JudgedRow:
    """A labelled row and the verifier's verdict on it."""

    row: dict[str, Any]
    score: Score
    seconds: float

    @property
    def mistake(self) -> str:
        """`false positive`, `false negative`, `unjudged`, or "" for a right verdict."""
        if self.score.value is None:
            return "unjudged"
        accepted = self.score.outcome is Outcome.PASSED
        return "" if accepted == self.row["label"] else "false positive" if accepted else "false negative"


@dataclass(frozen=True)
class VerifierMeasurement:
    """All verdicts of one verifier; `peak_mib` is the most memory of this process and its children meanwhile."""

    name: str
    judged: list[JudgedRow]
    peak_mib: float

    def rates(self, category: str | None = None) -> dict[str, Any]:
        """Counts and rates over a category, or over everything."""
        own = [j for j in self.judged if category is None or j.row.get("category") == category]
        judged = [j for j in own if j.mistake != "unjudged"]
        wrong_true = [float(j.mistake == "false negative") for j in judged if j.row["label"]]
        wrong_false = [float(j.mistake == "false positive") for j in judged if not j.row["label"]]
        return {
            "rows": len(own),
            "unjudged": len(own) - len(judged),
            "no_verdict": sum(j.score.outcome is Outcome.TIMEOUT for j in own),
            "accuracy": _interval([float(not j.mistake) for j in judged]),
            "false_positive": _interval(wrong_false),
            "false_negative": _interval(wrong_true),
        }

    def reasons(self) -> dict[str, float]:
        """How many rows were not accepted for each reason: {"error/sandbox": 2.0}."""
        return ReasonNames().count(j.score for j in self.judged)

    def seconds(self) -> dict[str, float]:
        ordered = sorted(j.seconds for j in self.judged)
        places = {"p50": 0.50, "p95": 0.95, "p99": 0.99, "max": 1.0}
        return {name: ordered[min(len(ordered) - 1, int(q * len(ordered)))] for name, q in places.items()}

    def as_json(self) -> dict[str, Any]:
        categories = sorted({str(j.row.get("category", "")) for j in self.judged})
        return {
            "reward": self.name,
            **self.rates(),
            "reasons": self.reasons(),
            "by_category": {category: self.rates(category) for category in categories if category},
            "seconds": self.seconds(),
            "peak_mib": self.peak_mib,
            "mistakes": [
                {**j.row, "mistake": j.mistake, "outcome": j.score.outcome.value, "reason": j.score.reason}
                for j in self.judged
                if j.mistake
            ],
        }


def measure(
    rows: Sequence[dict[str, Any]], reward: Reward, progress: Callable[[int], None] = lambda done: None
) -> VerifierMeasurement:
    """The verdict on every row, one at a time, so that each has its own time."""
    judged: list[JudgedRow] = []
    with _MemoryPeak() as memory:
        for row in rows:
            case = make_case(row)
            start = time.perf_counter()
            (score,) = reward.judge_all([case])
            judged.append(JudgedRow(row, score, time.perf_counter() - start))
            progress(len(judged))
    return VerifierMeasurement(reward.name, judged, memory.peak / 2**20)


def report(measured: Sequence[VerifierMeasurement], show: int = 10) -> str:
    """Text: each verifier's rates, its mistakes by category, and the first rows that it got wrong."""
    lines: list[str] = []
    for one in measured:
        rates, seconds = one.rates(), one.seconds()
        without = f"{rates['no_verdict']} without a verdict in time, {rates['unjudged']} unjudged (in no rate)"
        lines.append(f"{one.name}: {rates['rows']:,} rows, {without}")
        for kind in ("accuracy", "false_positive", "false_negative"):
            lines.append(f"  {kind.replace('_', ' '):<15} {_format_rate(rates[kind])}")
        for outcome, reasons in _group_reasons(one.reasons()).items():
            lines.append(f"  {outcome}: {', '.join(f'{name} {count:,.0f}' for name, count in reasons)}")
        times = ", ".join(f"{name} {1000 * value:.2f}" for name, value in seconds.items())
        lines.append(f"  time (ms)       {times};  peak memory {one.peak_mib:,.0f} MiB")
    categories = sorted({str(j.row.get("category", "")) for one in measured for j in one.judged if j.mistake})
    if any(categories):
        names = [one.name.rpartition(":")[2] for one in measured]
        head = ["wrong by category", "rows", *(f"{name}: fp fn unjudged" for name in names)]
        table = [head]
        for category in categories:
            cells = [category, ""]
            for one in measured:
                own = [j for j in one.judged if str(j.row.get("category", "")) == category]
                kinds = [sum(j.mistake == k for j in own) for k in ("false positive", "false negative", "unjudged")]
                cells[1] = str(len(own))
                cells.append("{:>3} {:>3} {:>3}".format(*kinds))
            table.append(cells)
        widths = [max(len(row[i]) for row in table) for i in range(len(head))]
        lines.append("")
        lines += [
            "  ".join(f"{v:<{w}}" if not i else f"{v:>{w}}" for i, (v, w) in enumerate(zip(row, widths, strict=True)))
            for row in table
        ]
    for one in measured:
        mistakes = [j for j in one.judged if j.mistake]
        if mistakes and show:
            lines += ["", f"{one.name}: {min(show, len(mistakes))} of {len(mistakes)} rows it got wrong"]
        for j in mistakes[:show]:
            name = j.row.get("id", "")
            lines.append(f"  {j.mistake}: {name} gold {(find_reference_text(j.row) or '')[:60]!r} response {_end(j)!r}")
            if note := j.row.get("note"):
                lines.append(f"    {str(note)[:120]}")
    return "\n".join(lines)


def _group_reasons(counts: Mapping[str, float]) -> dict[str, list[tuple[str, float]]]:
    """The reasons of each outcome, the most frequent first."""
    grouped: dict[str, list[tuple[str, float]]] = {}
    for path, count in sorted(counts.items(), key=lambda item: -item[1]):
        outcome, _, name = path.partition("/")
        grouped.setdefault(outcome, []).append((name, count))
    return grouped


def _end(judged: JudgedRow) -> str:
    return judged.row["response"][-80:]


def _interval(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    found = wilson_interval(sum(values) / len(values), len(values))
    return {"value": found.value, "low": found.low, "high": found.high, "rows": len(values)}


def _format_rate(rate: dict[str, float] | None) -> str:
    if rate is None:
        return "no such rows"
    value, low, high = (100 * rate[k] for k in ("value", "low", "high"))
    return f"{value:.2f}% [{low:.2f}, {high:.2f}] of {rate['rows']:,}"


class _MemoryPeak:
    """Samples the memory of this process and its descendants 20 times a second."""

    def __enter__(self) -> _MemoryPeak:
        self.peak = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.peak = max(self.peak, _resident())
            if self._done.wait(0.05):
                return


def _resident() -> int:
    """Bytes of this process and its descendants; shared pages count for each of them."""
    if not os.path.isdir("/proc/self"):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return sum(process.resident_pages for process in read_descendants().values()) * resource.getpagesize()


def list_data_warnings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each kind of doubtful row, with how many there are and the first."""
    found: dict[str, list[int]] = {}
    labels: dict[str, bool] = {}
    references: dict[str, tuple[str, int]] = {}
    for number, row in enumerate(rows, 1):
        reference, prompt = find_reference_text(row), row.get("prompt")
        fault = None if reference is None else find_reference_fault(reference, prompt, "the reference")
        if fault:
            what = "is blank" if fault.reason == "empty_reference" else "is the prompt itself"
            found.setdefault(f"the reference {what}", []).append(number)
        for name in CHOICES:
            if _has_twins(row.get(name)):
                found.setdefault(f"a choice stands twice among the {name}: two letters are right", []).append(number)
        task = {key: value for key, value in row.items() if key not in ("label", "category", "note", "id")}
        key = json.dumps(task, sort_keys=True, default=str)
        if labels.setdefault(key, row["label"]) != row["label"]:
            found.setdefault("an equal row has the other label", []).append(number)
        if prompt and reference is not None and fault is None:
            known, _ = references.setdefault(json.dumps(prompt, default=str), (reference, number))
            if known != reference:
                found.setdefault("an earlier row has this prompt and another reference", []).append(number)
    shown = [
        f"{len(numbers)} row{'s' * (len(numbers) != 1)}: {what} (first: row {numbers[0]})"
        for what, numbers in found.items()
    ]
    return [*shown, *_constant_answers([reference for reference, _ in references.values()])]


def _constant_answers(references: Sequence[str]) -> list[str]:
    if len(references) < MIN_TASKS:
        return []
    ((reference, count),) = Counter(references).most_common(1)
    if count < COMMON * len(references):
        return []
    return [
        f"{count} of {len(references)} tasks have the reference {reference[:40]!r}: a constant answer passes as often, "
        "and false accepts among them cannot be seen"
    ]


def _has_twins(choices: Any) -> bool:
    values = list(choices.values()) if isinstance(choices, Mapping) else choices
    if not isinstance(values, list):
        return False
    texts = [str(value).strip() for value in values]
    return len(set(texts)) < len(texts)
