"""GSM8K, grade school mathematics in words (Cobbe et al. 2021, https://arxiv.org/abs/2110.14168).

From a folder with `train.jsonl` and `test.jsonl` (`question`, `answer`), or from the hub by `datasets`. The test split
is held out. `python -m pytest tests/test_env_rows.py` exercises it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from string import Formatter
from typing import Any

from rlvr.envs.registry import register_environment
from rlvr.envs.rows import RowSource, field_of, read_jsonl
from rlvr.types import Task

HUB_NAME, HUB_CONFIG = "openai/gsm8k", "main"


@register_environment("gsm8k")
def gsm8k(path: str | None = None, template: str = "Question: {question}\nAnswer:") -> RowSource:
    """The task source. The prompt is `template` with the question put in; `meta["answer"]` is the whole gold solution.

    A demonstration is the gold solution, after a space where the template does not end in white space.
    """
    _check_template(template)
    splits = {split: list(_tasks(_rows(path, split), split, template)) for split in ("train", "test")}
    lead = "" if template[-1:].isspace() else " "
    return RowSource("gsm8k", splits["train"], splits["test"], "gsm8k", demonstrations="answer", lead=lead)


def _check_template(template: str) -> None:
    try:
        fields = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(f"gsm8k: template={template!r}: {error}; write a brace as {{{{ or }}}}") from error
    if set(fields) != {"question"}:
        raise ValueError(f"gsm8k: template={template!r} has the fields {fields}, expected {{question}} alone")


def _rows(path: str | None, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if path is not None:
        yield from read_jsonl(Path(path) / f"{split}.jsonl")
        return
    for i, row in enumerate(_hub(split), 1):
        yield f"{HUB_NAME} {split}:{i}", row


def _hub(split: str) -> Iterable[dict[str, Any]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            "gsm8k from the hub needs the package 'datasets': pip install 'rlvr[train]', or set path=<folder>"
        ) from error
    try:
        return load_dataset(HUB_NAME, HUB_CONFIG, split=split)  # pyright: ignore[reportReturnType]
    except Exception as error:
        raise ValueError(
            f"gsm8k: {HUB_NAME!r} could not be loaded from the hub ({type(error).__name__}: {error}); "
            "set path=<folder with train.jsonl and test.jsonl>"
        ) from error


def _tasks(rows: Iterable[tuple[str, dict[str, Any]]], split: str, template: str) -> Iterator[Task]:
    for number, (where, row) in enumerate(rows, 1):
        question = field_of(row, "question", f"gsm8k, {where}", "path=<folder with GSM8K's own files>")
        answer = field_of(row, "answer", f"gsm8k, {where}", "path=<folder with GSM8K's own files>")
        yield Task(f"gsm8k-{split}-{number}", template.format(question=question), {"answer": answer})
