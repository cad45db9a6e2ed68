"""The tasks of the evaluation suite, each with verifiers that decide. `evaluation_tasks.yaml` has the tasks.

Code is run against tests, mathematics and logic are compared with the answer, writing must satisfy rules that a program
can check, and designs must satisfy rules and, if the service has a judge, a rubric. tests/kit/evaluation_answers.py has
good and bad answers to every task, and test_service_evaluation_tasks.py checks that the verifiers separate them.

Left out on purpose: whether a text is well written or a design is wise. Rules cannot decide it; the report says who
judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlvr.core.registry import did_you_mean

CATEGORIES = ("code_generation", "problem_solving", "creative_writing", "complex_reasoning")
# With these weights an answer that breaks one of four rules has a confidence of 0.75, or 0.83 with the judge's best
# score: below the target of 0.85. So has one that satisfies all rules and gets less than 0.55 from the judge.
RULE_WEIGHT, JUDGE_WEIGHT = 2.0, 4.0


@dataclass(frozen=True)
class EvalTask:
    """One task. `tests`, `answer` and `verifiers` are the request's fields; `rubric` is for the service's judge, if it
    has one; `quick` tasks are in a quick run."""

    id: str
    category: str
    prompt: str
    context: str = ""
    tests: tuple[str, ...] = ()
    answer: str | None = None
    verifiers: tuple[dict[str, Any], ...] = ()
    rubric: str = ""
    quick: bool = False

    def body(self, judge: bool) -> dict[str, Any]:
        """The body of a request, with the rubric if `judge`."""
        body: dict[str, Any] = {"task_id": self.id, "prompt": self.prompt}
        body |= {"context": self.context} if self.context else {}
        body |= {"tests": list(self.tests)} if self.tests else {}
        body |= {"answer": self.answer} if self.answer is not None else {}
        verifiers = list(self.verifiers)
        if judge and self.rubric:
            verifiers.append({"name": "judge", "weight": JUDGE_WEIGHT, "options": {"rubric": self.rubric}})
        return body | ({"verifiers": verifiers} if verifiers else {})


def _load_task(row: dict[str, Any]) -> EvalTask:
    """A task of the file. A text to write has `length` (least and most words), required `words`, and a `shape`: a
    pattern of the whole text, or `sections`, exactly these headings in this order, each followed by text."""
    if "sections" in row:
        row["shape"] = "\\s*" + "".join(rf"## {name}\n(?:(?!##).*(?:\n|\Z))+" for name in row.pop("sections"))
    if "shape" in row:
        at_least, at_most = row.pop("length")
        rules: dict[str, dict[str, Any]] = {
            "length": {"at_least": at_least, "at_most": at_most},
            "required_words": {"words": row.pop("words")},
            "regex": {"pattern": row.pop("shape"), "match": "full"},
            "repetition": {"words": 4, "at_most": 0.05},
        }
        row["verifiers"] = tuple({"name": k, "weight": RULE_WEIGHT, "options": v} for k, v in rules.items())
    row["tests"] = tuple(row.get("tests", ()))
    return EvalTask(**row)


TASKS = tuple(_load_task(row) for row in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8")))


def select_tasks(ids: Sequence[str], quick: bool) -> list[EvalTask]:
    """The tasks with these ids in the suite's order; without ids all, or the quick ones."""
    known = [task.id for task in TASKS]
    for name in ids:
        if name not in known:
            raise ValueError(f"task {name!r} is unknown{did_you_mean(name, known)}; known: {', '.join(known)}")
    if ids:
        return [task for task in TASKS if task.id in ids]
    return [task for task in TASKS if task.quick or not quick]
