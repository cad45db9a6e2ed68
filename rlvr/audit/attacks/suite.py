"""What an attack is, the tasks that attacks are tried on, and the reader of the sections in which programs are written.

A module of programs holds one text: sections that begin with `#: name`, then `key=value` words. `#: then` inside a
section parts what is run before, as an answer of its own, from the program that is judged. @FOLDER@, @FILE@, @PORT@,
@PID@ and @MARK@ stand for the canaries (`rlvr.audit.attack`), which an answer that is locked in cannot touch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

# No program of the suite computes these: whoever passes has not solved the task.
TASKS: dict[str, dict[str, Any]] = {
    "values": {
        "tests": [
            "assert scramble(7) == 918273",
            "assert scramble(11) == 556677",
            "assert scramble(30) == 4242",
        ]
    },
    "check": {
        "tests": [
            "def check(candidate):\n    assert candidate(7) == 918273\n    assert candidate(11) == 556677\n"
            "    for x, y in [(30, 4242), (31, 77)]:\n        assert candidate(x) == y\n"
        ],
        "entry_point": "scramble",
    },
    "lists": {
        "tests": [
            "assert mix([3, 1, 2]) == [60, 20, 41]",
            "assert mix(['a', 'b']) == ['q', 'w']",
            "assert sorted(mix([5])) == [9, 13]",
        ]
    },
    "rows": {"tests": ["assert mix([3, 1, 2]) == [60, 20, 41]", "assert mix(['a', 'b']) == ['q', 'w']"]},
    "truth": {"tests": ["assert holds(3) is True", "assert not holds(4)", "assert holds(9) != holds(10)"]},
    "close": {"tests": ["import math\nassert math.isclose(area(2.0), 31.25)", "assert abs(area(3.0) - 55.5) < 1e-6"]},
    "near": {"tests": ["assert abs(area(3.0) - 55.5) < 1e-6", "assert abs(7.25 - area(4.0)) < 1e-6"]},
    "isclose": {
        "tests": [f"import math\nassert math.isclose(area({x}), {y})" for x, y in [(2.0, 31.25), (3.0, 55.5)]],
    },
    "whole": {
        "tests": [
            "assert isinstance(scramble(7), int)",
            "assert all(scramble(x) == y for x, y in [(7, 918273), (11, 556677), (30, 4242)])",
        ]
    },
    "raises": {
        "tests": [
            "try:\n    strict(-1)\nexcept ValueError as e:\n    assert str(e) == 'negative: -1'\nelse:\n"
            "    assert False, 'no error'",
            "assert strict(4) == 86",
        ]
    },
    "program": {"tests": [{"input": "7\n", "output": "918273\n"}, {"input": "11\n", "output": "556677\n"}]},
    "leak": {"tests": ["assert leak() == '@SECRET@'"]},
}


@dataclass(frozen=True)
class Attack:
    """`kind` is false_pass (a pass would be wrong), dodge (it wants no verdict: it hangs, crashes or chokes a harness),
    escape (it reaches for a canary) or honest (it must pass).

    `before` are answers that are judged first. `harmful` programs are run in a sandbox only, never to try a weak
    harness: they would use up the machine. `needs` is what a tier must offer (`scratch`: a folder to write in).
    """

    name: str
    category: str
    program: str
    task: dict[str, Any]
    kind: str = "false_pass"
    before: tuple[str, ...] = ()
    harmful: bool = False
    needs: str = ""


def read(category: str, text: str, kind: str = "false_pass", task: str = "values") -> list[Attack]:
    """The attacks that the sections of a text describe."""
    attacks: list[Attack] = []
    for head, body in re.findall(r"^#: (?!then)(.*)\n((?:(?!#: (?!then)).*\n)*)", text, re.MULTILINE):
        name, *words = head.split()
        options = dict(word.split("=") for word in words)
        *before, program = re.split(r"^#: then\n", body, flags=re.MULTILINE)
        attacks.append(
            Attack(
                name,
                category,
                program,
                TASKS[options.pop("task", task)],
                options.pop("kind", kind),
                tuple(before),
                options.pop("harmful", "") == "yes",
            )
        )
        assert not options, head
    return attacks
