"""Any JSONL file with a prompt and what its reward needs: the shortest way from own data to a run.

    {"prompt": "Capital of France?", "answer": "Paris"}             or chat messages under "prompt"

`python -m pytest tests/test_env_rows.py` exercises it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlvr.envs.registry import register_environment
from rlvr.envs.rows import RowSource, field_of, prompt_key, read_jsonl
from rlvr.types import Task


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

    Held out is `heldout_path`, or else a share of `path` chosen by a hash of the prompt, so that equal rows never
    stand on both sides; in a small file at least one prompt. `heldout_fraction=0` holds out nothing.
    `answer_field=None` is for rewards that need none.
    """
    fields = (prompt_field, answer_field, level_field, demonstration_field)
    tasks = list(_tasks(path, "", *fields))
    if heldout_path is not None:
        heldout = list(_tasks(heldout_path, "heldout:", *fields))
    else:
        heldout = held_share(tasks, heldout_fraction, path)
    return RowSource(f"jsonl {path}", tasks, heldout, reward, demonstration_field)


def held_share(tasks: list[Task], fraction: float, path: str) -> list[Task]:
    """The tasks whose prompt hashes below the fraction; where there are none, those of the lowest hash."""
    if not 0 <= fraction < 1:
        raise ValueError(f"heldout_fraction={fraction!r}, expected from 0 to below 1")
    if fraction == 0:
        return []
    keys = [prompt_key(task.prompt) for task in tasks]
    lowest = min(keys)
    if max(keys) == lowest:
        raise ValueError(f"{path} has one prompt only; set heldout_path, or heldout_fraction=0 for no evaluation")
    # The highest hash always stays in training, so that a small file is never held out whole.
    below = min(max(int(fraction * 2**63), lowest + 1), max(keys))
    return [task for task, key in zip(tasks, keys, strict=True) if key < below]


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
