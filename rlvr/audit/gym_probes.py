"""What an audit of `reasoning_gym` answers to a task: right, wrong, tricky, empty, over-long and hostile texts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

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
    """What every task is answered. `other` is the right answer of another task of the family, and not of this one."""
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
