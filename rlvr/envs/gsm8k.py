"""GSM8K, grade school word problems (Cobbe et al. 2021, https://arxiv.org/abs/2110.14168).

From a folder with `train.jsonl` and `test.jsonl` (`question`, `answer`), or from the hub by `datasets`. The test split
is held out. A file alone is a test split, to evaluate on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from string import Formatter
from typing import Any

from rlvr.core.types import Task
from rlvr.envs.hub import load_from_hub
from rlvr.envs.registry import register_environment
from rlvr.envs.row_files import field_of, read_rows
from rlvr.envs.row_source import RowSource

HUB_NAME, HUB_CONFIG = "openai/gsm8k", "main"


@register_environment("gsm8k")
def gsm8k(path: str | None = None, template: str = "Question: {question}\nAnswer:") -> RowSource:
    """Grade-school word problems, from a folder or the test file (`path`), or from the hub.

    The prompt is `template` with the question filled in; `meta["answer"]` is the whole worked solution.

    A demonstration is the solution, after a space if the prompt does not end in white space.
    """
    check_template("gsm8k", template, "question")
    is_file = path is not None and Path(path).expanduser().is_file()
    splits = {
        split: [] if is_file and split == "train" else list(_tasks(_rows(path, split), split, template))
        for split in ("train", "test")
    }
    return RowSource(
        "gsm8k", splits["train"], splits["test"], "gsm8k", demonstrations="answer", lead=" ", describe=_describe
    )


def _describe(task: Task) -> dict[str, str]:
    """The steps of the solution: its lines before the final answer."""
    lines = [line for line in str(task.meta["answer"]).splitlines() if line.strip()]
    return {"solution steps": str(sum(not line.startswith("####") for line in lines))}


def check_template(environment: str, template: str, field: str) -> None:
    """ValueError unless `field` is the one field of a prompt template."""
    try:
        fields = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(f"{environment}: template={template!r}: {error}; write a brace as {{{{ or }}}}") from error
    if set(fields) != {field}:
        raise ValueError(f"{environment}: template={template!r} has the fields {fields}, expected {{{field}}} alone")


def _rows(path: str | None, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """("where", row) for each row of a split."""
    if path is not None:
        given = Path(path).expanduser()
        file = given if given.is_file() else given / f"{split}.jsonl"
        yield from ((row.id, row.values) for row in read_rows(file))
        return
    rows = load_from_hub("gsm8k", HUB_NAME, HUB_CONFIG, "folder with train.jsonl and test.jsonl", split=split)
    for i, row in enumerate(rows, 1):
        yield f"{HUB_NAME} {split}:{i}", row


def _tasks(rows: Iterable[tuple[str, dict[str, Any]]], split: str, template: str) -> Iterator[Task]:
    for number, (where, row) in enumerate(rows, 1):
        question = field_of(row, "question", f"gsm8k, {where}", "path=<folder with GSM8K's own files>")
        answer = field_of(row, "answer", f"gsm8k, {where}", "path=<folder with GSM8K's own files>")
        yield Task(f"gsm8k-{split}-{number}", template.format(question=question), {"answer": answer})
