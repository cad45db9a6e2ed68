"""MATH-500, 500 problems of MATH (Hendrycks et al. 2021), chosen by Lightman et al. 2023, arXiv:2305.20050.

From a file with the columns `problem`, `answer` and `level`, or from the hub. All rows are held out: it is a test set.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlvr.core.types import Task
from rlvr.envs.gsm8k import check_template
from rlvr.envs.hub import load_from_hub
from rlvr.envs.registry import register_environment
from rlvr.envs.row_files import field_of, read_rows
from rlvr.envs.row_source import RowSource

HUB_NAME = "HuggingFaceH4/MATH-500"
_OPTION = "path=<MATH-500's own file>"


@register_environment("math500")
def math500(
    path: str | None = None,
    template: str = "{problem}\n\nReason step by step and put the final answer in \\boxed{{}}.",
) -> RowSource:
    """Competition problems, from a file (`path`) or the hub, to evaluate on; the level is that of the problem.

    The prompt is `template` with the problem filled in; `meta` has the `answer` and the `subject`.
    """
    check_template("math500", template, "problem")
    if path is not None:
        rows = [(row.place, row.values) for row in read_rows(Path(path), "test")]
    else:
        found = load_from_hub(
            "math500", HUB_NAME, None, "file with the columns problem, answer and level", split="test"
        )
        rows = [(f"{HUB_NAME}, row {i}", dict(row)) for i, row in enumerate(found, 1)]
    heldout = [_task(number, f"math500, {where}", row, template) for number, (where, row) in enumerate(rows, 1)]
    return RowSource("math500", [], heldout, "math", describe=lambda task: {"subject": task.meta["subject"]})


def _task(number: int, where: str, row: dict[str, Any], template: str) -> Task:
    problem, answer, level = (field_of(row, name, where, _OPTION) for name in ("problem", "answer", "level"))
    meta = {"answer": answer, "subject": str(row.get("subject", ""))}
    return Task(f"math500-{number}", template.format(problem=problem), meta, str(level))
