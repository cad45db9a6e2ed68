"""The attack suite: hostile programs by category, and honest ones that must not be taken for hostile.

The programs are data, in the `.txt` files beside this one; `manifest.yaml` lists them and describes their format.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Attack:
    """A program with the task that it pretends to solve. The kinds and options are described in `manifest.yaml`.

    `before` are programs that are judged first, as answers of their own.
    """

    name: str
    category: str
    program: str
    task: dict[str, Any]
    kind: str = "false_pass"
    before: tuple[str, ...] = ()
    harmful: bool = False
    needs: str = ""


def _read_category(name: str, kind: str, tasks: dict[str, dict[str, Any]]) -> list[Attack]:
    """The programs of one file."""
    text = (_FOLDER / f"{name.replace(' ', '_')}.txt").read_bytes().decode()  # line ends as they are
    attacks: list[Attack] = []
    for section in re.split(r"^#: (?!then\n|tests\n)", text, flags=re.MULTILINE)[1:]:
        head, _, body = section.partition("\n")
        title, *words = head.split()
        options = dict(word.split("=") for word in words)
        body, _, tests = body.partition("#: tests\n")
        *before, program = re.split(r"^#: then\n", body, flags=re.MULTILINE)
        task = _read_tests(tests) if tests else tasks[options.pop("task", "values")]
        kind_of_program, harmful = options.pop("kind", kind), options.pop("harmful", "") == "yes"
        needs = options.pop("needs", "")
        assert not options, f"{name}: unknown options in {head!r}"
        attacks.append(Attack(title, name, program, task, kind_of_program, tuple(before), harmful, needs))
    return attacks


def _read_tests(text: str) -> dict[str, Any]:
    lines = text.strip("\n").splitlines()
    if " -> " in lines[0]:
        pairs = [line.split(" -> ") for line in lines]
        return {"tests": [{"input": ast.literal_eval(i), "output": ast.literal_eval(o)} for i, o in pairs]}
    return {"tests": [line.replace("\\nexcept", "\nexcept") for line in lines]}


def _read_suite() -> list[Attack]:
    manifest = yaml.safe_load((_FOLDER / "manifest.yaml").read_text(encoding="utf-8"))
    white_space = [
        Attack(name, "honest", task.pop("program"), task, "honest") for name, task in manifest["white_space"].items()
    ]
    attacks: list[Attack] = []
    for category in manifest["categories"]:
        attacks += white_space if category["name"] == "honest" else []
        attacks += _read_category(category["name"], category.get("kind", "false_pass"), manifest["tasks"])
    return attacks


_SUITE = _read_suite()
HOSTILE = [attack for attack in _SUITE if attack.kind != "honest"]
HONEST = [attack for attack in _SUITE if attack.kind == "honest"]

__all__ = ["HONEST", "HOSTILE", "Attack"]
