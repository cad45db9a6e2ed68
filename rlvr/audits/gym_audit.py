"""Audit the scorers of `reasoning_gym`: what each accepts, pays for and survives, through the reward `reasoning_gym`.

    rlvr audit --env reasoning_gym --json audit.json

Each family is asked about a few training tasks, and one of them is given the hostile answers too. `library_score` is
what the library's own scorer gave, `passed` what our reward says. A hostile answer is contained if it gets a verdict
with a value and nothing outside is touched (`rlvr.audits.attack_runner.Canaries`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rlvr.audits.attack_runner import Canaries
from rlvr.audits.pass_rate import PassRate
from rlvr.core.cpu_budget import available_cores
from rlvr.core.types import Outcome, Score, Task
from rlvr.envs import resolve_environment
from rlvr.reward.registry import Reward
from rlvr.reward.signatures import Case

# The same text for every task: one that passes often, or has a score above 0, is worth writing without an answer.
FIXED = ("0", "1", "-1", "a", "A", "yes", "no", "True", "[]", "{}", "nan", "0 0", "A, B", "impossible")
# A scorer that evaluates one of these in a process without walls does damage, never ends, or changes its verdicts.
HOSTILE = (
    "__import__('os').system('touch @FOLDER@/system')",
    "[__import__('os').system('touch @FOLDER@/listed')]",
    "open('@FOLDER@/written', 'w').write('x')",
    "open('/etc/passwd').read()",
    "[open('@FILE@').read()]",
    "__import__('socket').create_connection(('127.0.0.1', @PORT@))",
    "__import__('os').kill(@PID@, 9)",
    "exec('while True: pass')",
    "[0 for _ in iter(int, 1)]",
    "'a' * 10 ** 11",
    "[0] * 10 ** 11",
    "10**10**10",
    "9" * 900,
    "1e999999999",
    "1/1e-999999999",
    "factorial(10**8)",
    "integrate(exp(x**x)*sin(x)**x, x)",
    "(" * 800,
    "[" * 400 + "]" * 400,
    "-" * 900 + "1",
    "().__class__.__base__.__subclasses__()",
    "setattr(type(self), 'score_answer', lambda *rest: 1.0)",
    "entry.update(answer=answer)",
    "[entry.update(metadata={}), oracle_answer][1]",
    "oracle_answer",
    "entry['answer']",
    "globals().clear()",
    "__import__('builtins').__dict__.update(float=lambda *rest: 1.0)",
)
LONG = 200_000  # characters of an over-long answer, at least
_OPPOSITES = {"yes": "no", "true": "false", "knight": "knave", "1": "0", "heads": "tails"}
SAMPLES = 5  # tasks of a family
_KEPT = 120  # characters of an answer
# The rates of the summary, with the kinds of probes that each is over.
RATES = {
    "right answers": ("gold",),
    "wrong answers": ("changed", "other"),
    "right answers beside wrong ones": ("superstring",),
    "fixed texts": ("fixed",),
    "empty answers": ("empty",),
    "over-long answers": ("long",),
    "hostile answers": ("hostile",),
}
KINDS = ("gold", "changed", "other", "superstring", "empty", "long", "hostile")


@dataclass(frozen=True)
class GymProbe:
    """A completion and what it is: gold, changed, other, superstring, fixed, empty, long, hostile or again."""

    kind: str
    text: str
    completion: str

    @classmethod
    def of(cls, kind: str, answer: str) -> GymProbe:
        return cls(kind, answer, f"<answer>{answer}</answer>")


def make_probes(gold: str | None, other: str | None) -> Iterator[GymProbe]:
    """The probe answers that every task is given. `other` is the right answer of another task of the family, and not
    of this one."""
    if gold is not None:
        yield GymProbe.of("gold", gold)
        if (text := change_answer(gold)) is not None:
            yield GymProbe.of("changed", text)
        decoy = other if other is not None else "0"
        yield GymProbe.of("superstring", f"{gold} or {decoy}")
        yield GymProbe.of("superstring", f"{decoy} {gold}")
    if other is not None:
        yield GymProbe.of("other", other)
    for text in FIXED:
        if text != gold:
            yield GymProbe.of("fixed", text)
    yield GymProbe("empty", "", "")
    yield GymProbe("empty", "<answer></answer>", "<answer></answer>")
    yield GymProbe("empty", "no tags", gold or "42")
    yield GymProbe.of("long", "7" * LONG)
    repeated = f"{gold or 1} "
    yield GymProbe.of("long", repeated * (LONG // len(repeated) + 1))


def make_hostile_probes(gold: str | None, texts: list[str]) -> Iterator[GymProbe]:
    """Hostile texts, then the right answer again and a wrong one: their verdicts must be what they were."""
    for text in texts:
        yield GymProbe.of("hostile", text)
    if gold is not None:
        yield GymProbe.of("again", gold)


def change_answer(gold: str) -> str | None:
    """A wrong answer that looks like the right one; None where none follows from it."""
    if (opposite := _find_opposite(gold)) is not None:
        return opposite
    for pattern, replace in ((r"[1-9]", _change_digit), (r"[A-Za-z0]", _change_letter)):
        if match := re.search(pattern, gold):
            return gold[: match.start()] + replace(match[0]) + gold[match.end() :]
    return None


def _find_opposite(gold: str) -> str | None:
    pairs = {**_OPPOSITES, **{value: key for key, value in _OPPOSITES.items()}}
    opposite = pairs.get(gold.strip().lower())
    return opposite.capitalize() if opposite and gold.strip()[0].isupper() else opposite


def _change_digit(digit: str) -> str:
    return str((int(digit) + 4) % 9 + 1)  # another one, and never 0, which could be a leading one


def _change_letter(letter: str) -> str:
    if letter == "0":
        return "5"
    first = ord("a") if letter.islower() else ord("A")
    return chr(first + (ord(letter) - first + 13) % 26)


@dataclass(frozen=True)
class JudgedProbe:
    """The verdict on a probe of the family's task `task`, with the beginning of the answer, which may be long."""

    task: int
    kind: str
    text: str
    score: Score
    seconds: float

    @property
    def passed(self) -> bool:
        return self.score.outcome is Outcome.PASSED

    @property
    def library_score(self) -> float:
        """What the library's scorer gave; 0 where it was not asked."""
        return self.score.parts.get("library_score", 0.0)


@dataclass(frozen=True)
class FamilyAudit:
    """All verdicts on one family. `damage` is what hostile answers reached outside, "" for nothing."""

    family: str
    judged: list[JudgedProbe]
    damage: str = ""

    def of(self, *kinds: str) -> list[JudgedProbe]:
        return [one for one in self.judged if one.kind in kinds]

    @property
    def uncontained(self) -> list[JudgedProbe]:
        """Probes without a value: such an answer would avoid a bad reward."""
        return [one for one in self.of("hostile", "long", "empty") if one.score.value is None]

    @property
    def has_changed(self) -> bool:
        """Whether the right answer has another verdict after the hostile ones."""
        first = next((one.passed for one in self.of("gold") if one.task == 0), None)
        return any(one.passed != first for one in self.of("again"))

    @property
    def is_broken(self) -> bool:
        return bool(self.damage or self.uncontained or self.has_changed)

    def best_fixed(self) -> tuple[str, list[int], list[int]]:
        """The fixed text that the library accepts most often: (text, count by the reward, count by the library)."""
        judged = {text: [one for one in self.of("fixed") if one.text == text] for text in FIXED}
        counts = [(text, count(found), count(found, by_library=True)) for text, found in judged.items() if found]
        return max(counts, key=lambda row: (row[2][0] / row[2][1], row[1][0]))

    def floor(self) -> float:
        """The mean library score of the wrong fixed text that is paid best."""
        wrong = [one for one in self.of("fixed") if one.library_score < 1]
        texts = {one.text for one in wrong}
        return max((_mean(one.library_score for one in wrong if one.text == text) for text in texts), default=0.0)

    def as_json(self) -> dict[str, Any]:
        superstrings = self.of("superstring")
        text, ours, library = self.best_fixed()
        return {
            "family": self.family,
            **{kind: count(self.of(kind)) for kind in KINDS},
            **{f"{kind}_library": count(self.of(kind), by_library=True) for kind in KINDS},
            "best_fixed": [text, ours, library],
            "superstring_credit": round(_mean(one.library_score for one in superstrings if one.library_score < 1), 3),
            "floor": round(self.floor(), 3),
            "timeouts": sum(one.score.outcome is Outcome.TIMEOUT for one in self.judged),
            "uncontained": [f"{one.text[:80]}: {one.score.reason}" for one in self.uncontained],
            "damage": self.damage,
            "has_changed": self.has_changed,
            "seconds": round(sum(one.seconds for one in self.judged), 2),
            "accepted": [
                {"kind": one.kind, "answer": one.text}
                for one in self.of("changed", "other", "superstring", "hostile")
                if one.passed
            ],
            "refused_gold": [
                {"answer": one.text, "reason": one.score.reason, "detail": one.score.detail[:120]}
                for one in self.of("gold")
                if not one.passed
            ],
        }


def audit_family(family: str, reward: Reward, samples: int, outside: Canaries) -> FamilyAudit:
    """Answer the first `samples` training tasks of a family in every way."""
    source = resolve_environment("reasoning_gym", family=family)
    tasks = [source.train(0, index, "") for index in range(samples)]
    golds = [task.meta["answer"] for task in tasks]
    judged: list[JudgedProbe] = []

    def judge(index: int, task: Task, probes: Iterable[GymProbe]) -> None:
        for probe in probes:
            start = time.perf_counter()
            (score,) = reward.judge_all([Case.of_task(task, probe.completion)])
            judged.append(JudgedProbe(index, probe.kind, probe.text[:_KEPT], score, time.perf_counter() - start))

    for index, (task, gold) in enumerate(zip(tasks, golds, strict=True)):
        other = next((one for one in golds[index + 1 :] + golds[:index] if one not in (None, gold)), None)
        judge(index, task, make_probes(gold, other))
    judge(0, tasks[0], make_hostile_probes(golds[0], [outside.fill(text) for text in HOSTILE]))
    return FamilyAudit(family, judged, outside.describe_damage())


def audit_families(
    families: Sequence[str], reward: Reward, samples: int, workers: int | None, progress: Callable[[FamilyAudit], None]
) -> list[FamilyAudit]:
    """The audit of every family, `workers` at a time (None: one per core); results in the given order."""
    reward.start()
    audits: list[FamilyAudit] = []
    with Canaries() as outside, ThreadPoolExecutor(workers or available_cores()) as pool:
        try:
            for audit in pool.map(lambda family: audit_family(family, reward, samples, outside), families):
                audits.append(audit)
                progress(audit)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return audits


def summarize(audits: Sequence[FamilyAudit]) -> dict[str, Any]:
    """How often answers are accepted by the library and by our reward; intervals take the families as the sample."""
    rates: dict[str, Any] = {}
    for name, kinds in RATES.items():
        judged = [(audit.family, one) for audit in audits for one in audit.of(*kinds)]
        library, ours = PassRate(), PassRate()
        for family, one in judged:
            library.add(one.library_score == 1, family)
            ours.add(one.passed, family)
        if judged:
            rates[name] = {"rows": len(judged), "library": _as_dict(library), "ours": _as_dict(ours)}
    return rates


def _as_dict(rate: PassRate) -> dict[str, float]:
    return rate.interval().to_json()


def make_report(audits: Sequence[FamilyAudit], show: int) -> str:
    """Text: the rates, a row for every family, and what went wrong."""
    lines = [f"reasoning_gym: {len(audits)} families"]
    lines.append("accepted, with 95 % intervals" + " " * 21 + "by the library's scorers      by the reward")
    for name, rate in summarize(audits).items():
        shares = (
            "{:.2f}% [{:.2f}, {:.2f}]".format(*(100 * x for x in rate[by].values())) for by in ("library", "ours")
        )
        lines.append(f"  {name:<33} of {rate['rows']:>6,}  " + "  ".join(f"{share:>25}" for share in shares))
    head = ["family", "gold", "changed", "other", "decoy", "fixed text", "floor", "hostile", "s"]
    table = [head, *(_format_row(audit.as_json()) for audit in audits)]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    lines += [
        "",
        "by the reward, of those tried; in brackets by the library's scorer, where that is more",
        "decoy: a right answer beside a wrong one; floor: what the scorer pays to a fixed wrong text",
    ]
    for row in table:
        cells = (f"{v:<{w}}" if i == 0 else f"{v:>{w}}" for i, (v, w) in enumerate(zip(row, widths, strict=True)))
        lines.append("  ".join(cells).rstrip())
    for audit in audits:
        for one in audit.uncontained:
            lines.append(f"not contained: {audit.family}: {one.text[:60]!r} {one.score.reason} {one.score.detail}")
        if audit.damage:
            lines.append(f"escape: {audit.family}: {audit.damage}")
        if audit.has_changed:
            lines.append(f"changed verdict: {audit.family}: the right answer is judged differently after hostile ones")
    wrong = [
        (audit.family, one) for audit in audits for one in audit.of("changed", "other", "superstring") if one.passed
    ]
    if wrong and show:
        lines += ["", f"{min(show, len(wrong))} of {len(wrong)} changed, other or decoy answers that passed"]
        lines += [f"  {family}: {one.kind}: {one.text[:80]!r}" for family, one in wrong[:show]]
    return "\n".join(lines)


def _format_row(row: dict[str, Any]) -> list[str]:
    counts = [format_count(row[kind], row[f"{kind}_library"]) for kind in KINDS if kind not in ("empty", "long")]
    text, ours, library = row["best_fixed"]
    floor = f"{row['floor']:.2f}" if row["floor"] >= 0.005 else ""
    shown = f"{text!r} {format_count(ours, library)}" if library[0] else ""
    return [row["family"], *counts[:4], shown, floor, *counts[4:], f"{row['seconds']:.1f}"]


def format_count(ours: list[int], library: list[int]) -> str:
    """`0/5 (3)`: accepted by the reward, tried, and, if it is more, accepted by the library."""
    accepted, tried = ours
    more = f" ({library[0]})" if library[0] > accepted else ""
    return f"{accepted}/{tried}{more}" if tried else ""


def count(judged: Sequence[JudgedProbe], by_library: bool = False) -> list[int]:
    """[accepted, tried], by the library's own scorer or by the reward."""
    return [sum(one.library_score == 1 if by_library else one.passed for one in judged), len(judged)]


def _mean(values: Iterable[float]) -> float:
    given = list(values)
    return sum(given) / len(given) if given else 0.0
