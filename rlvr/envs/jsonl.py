"""Tasks from any JSONL file with prompts: the shortest way from your own data to a run.

    {"prompt": "Capital of France?", "answer": "Paris"}             or chat messages under "prompt"

`python -m pytest tests/test_env_rows.py` exercises it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlvr.core.types import Task
from rlvr.envs.registry import register_environment
from rlvr.envs.row_source import RowSource, choose_heldout, field_of, read_jsonl

_COLUMNS, _SHORT = 8, 40  # columns that describe a task, and the characters of a value that others can share


@register_environment("jsonl")
def jsonl(
    path: str,
    heldout_path: str | None = None,
    heldout_fraction: float = 0.1,
    prompt_field: str = "prompt",
    answer_field: str | None = "answer",
    level_field: str | None = None,
    demonstration_field: str | None = None,
    reward: str = "exact_match",
) -> RowSource:
    """The task source. The answer becomes `meta["answer"]`; every other column goes into `meta` under its own name.

    Short columns describe a task to `rlvr doctor`, which groups failing tasks by them: a source, a topic, the answer.
    The held-out tasks are those of `heldout_path`, or else about `heldout_fraction` of `path`, chosen by a hash of the
    prompt; 0 holds out nothing. `answer_field=None` is for rewards that need no answer.
    """
    fields = (prompt_field, answer_field, level_field, demonstration_field)
    tasks = list(_tasks(path, "", *fields))
    if heldout_path is not None:
        heldout = list(_tasks(heldout_path, "heldout:", *fields))
    else:
        heldout = choose_heldout(tasks, heldout_fraction, path)
    return RowSource(f"jsonl {path}", tasks, heldout, reward, demonstration_field, describe=_describe)


def _describe(task: Task) -> dict[str, str]:
    """The columns of one short value, the first `_COLUMNS` of them."""
    short = {
        name: str(value)
        for name, value in task.meta.items()
        if isinstance(value, (str, int)) and 0 < len(str(value)) <= _SHORT
    }
    return dict(list(short.items())[:_COLUMNS])


def _tasks(
    path: str, prefix: str, prompt: str, answer: str | None, level: str | None, demonstration: str | None
) -> Iterator[Task]:
    for where, row in read_jsonl(path):
        at = f"{path}, line {where.rpartition(':')[2]}"
        text = _prompt(field_of(row, prompt, at, "prompt_field"), at, prompt)
        meta = {k: v for k, v in row.items() if k != prompt}
        if answer is not None:
            meta["answer"] = field_of(row, answer, at, "answer_field (null for none)")
        if demonstration is not None:
            field_of(row, demonstration, at, "demonstration_field")
        name = "" if level is None else str(field_of(row, level, at, "level_field"))
        yield Task(prefix + where, text, meta, name)


def _prompt(given: Any, at: str, name: str) -> str | list[dict[str, str]]:
    if isinstance(given, str) and given:
        return given
    if (
        isinstance(given, list)
        and given
        and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in given)
    ):
        return given
    raise ValueError(f'{at}: {name!r} is {str(given)[:60]!r}, expected text or a list of {{"role", "content"}}')
