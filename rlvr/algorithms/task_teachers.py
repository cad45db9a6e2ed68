"""Several teachers, each for its tasks, in the place of one (`UpdateInputs.teacher`).

TaskTeachers({"code": coder, "math": mathematician})            # by the value that a task has in meta["source"]
TaskTeachers({"3": expert}, default=small, task_key="level")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlvr.core.types import Task


@dataclass(frozen=True)
class TaskTeachers:
    """The teacher of a task is that of the value which it has under `task_key`, in its `meta` or as its `level`; of
    other values it is the `default`. Each is a sampling client, or another with its `compute_logprobs`."""

    of_values: Mapping[str, Any]
    default: Any = None
    task_key: str = "source"

    def of_task(self, task: Task | None) -> Any:
        """The teacher of a task; ValueError for a task without one."""
        value = None if task is None else task.value_of(self.task_key)
        teacher = self.default if value is None else self.of_values.get(value, self.default)
        if teacher is None:
            raise ValueError(describe_missing(task, self.task_key, list(self.of_values)))
        return teacher

    def close(self) -> None:
        """Close those behind an endpoint."""
        for teacher in {id(one): one for one in (*self.of_values.values(), self.default)}.values():
            if hasattr(teacher, "close"):
                teacher.close()


def describe_missing(task: Task | None, key: str, known: list[str]) -> str:
    """What is wrong with a task that none of the teachers has."""
    name, value = ("without a task", None) if task is None else (repr(task.id), task.value_of(key))
    return (
        f"teacher.for_tasks: task {name} has the {key} {value!r}, and there are teachers for {', '.join(known)}; add "
        "one, or give teacher.model or teacher.url for all other tasks"
    )
