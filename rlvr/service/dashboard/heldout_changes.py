"""How held-out tasks changed between two evaluations: overall, part by part, and task by task.

A side is an evaluation of a run, `RUN@baseline` or `RUN@final`: before and after training, or two runs after it. The
statistics are those of `rlvr.training.evaluate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlvr.service.dashboard.dashboard_data import one_line, visible_text
from rlvr.training.evaluate import Evaluation, compare_evaluations
from rlvr.training.failure_groups import LENGTH
from rlvr.training.judged_tasks import TaskResult

MOST_KINDS = 12  # values of a property that are shown apart
MOST_PARTS = 40
ALL = ""  # the key of the part with all tasks
ORDERS = {"fell": "fell most", "rose": "rose most", "worst": "lowest after", "id": "task"}
BEFORE, AFTER = "baseline", "final"
STAGES = {BEFORE: "before training", AFTER: "after training"}


@dataclass(frozen=True)
class TaskChange:
    """A task that both evaluations judged: completions that passed and that were judged, on both sides."""

    id: str
    kinds: frozenset[str]
    before: tuple[int, int]
    after: tuple[int, int]

    @property
    def change(self) -> float:
        return self.after[0] / self.after[1] - self.before[0] / self.before[1]


@dataclass(frozen=True)
class PartChange:
    """The tasks of one kind (`key` is `property=value`, empty for all), with what `compare` says of them."""

    key: str
    compared: Mapping[str, Any]


@dataclass(frozen=True)
class HeldoutChanges:
    """`apart` tasks were judged on one side alone, and are in no number."""

    parts: list[PartChange] = field(default_factory=list[PartChange])
    tasks: list[TaskChange] = field(default_factory=list[TaskChange])
    apart: int = 0

    @property
    def whole(self) -> Mapping[str, Any]:
        return self.parts[0].compared

    def count(self) -> tuple[int, int, int]:
        """How many tasks fell, rose, and stayed."""
        fell, rose = (sum(sign * task.change > 0 for task in self.tasks) for sign in (-1, 1))
        return fell, rose, len(self.tasks) - fell - rose

    def select(self, order: str, kind: str = "") -> list[TaskChange]:
        """The tasks of a kind in one of `ORDERS`."""
        keys = {
            "fell": lambda task: task.change,
            "rose": lambda task: -task.change,
            "worst": lambda task: task.after[0] / task.after[1],
        }
        chosen = sorted((task for task in self.tasks if not kind or kind in task.kinds), key=lambda task: task.id)
        return sorted(chosen, key=keys[order]) if order in keys else chosen


def name_task(id: str) -> str:
    """The id of a task as pages and addresses have it."""
    return visible_text(id, 500)


def list_changes(before: Evaluation, after: Evaluation) -> HeldoutChanges:
    """Compare two evaluations over the tasks that both have."""
    first = {result.id: result for result in before.complete}
    second = {result.id: result for result in after.complete}
    common = [id for id in first if id in second]
    apart = len({result.id for result in (*before.results, *after.results)}) - len(common)
    kinds = {id: frozenset(_list_kinds(first[id])) for id in common}
    counts: dict[str, dict[str, int]] = {}
    for id in common:
        for kind in kinds[id]:
            values = counts.setdefault(kind.partition("=")[0], {})
            values[kind] = values.get(kind, 0) + 1
    named = [
        kind
        for property in sorted(counts, key=lambda name: (name != "level", name))
        if 2 <= len(counts[property]) <= MOST_KINDS
        for kind in sorted(counts[property], key=lambda kind: (len(kind), kind))
    ]

    def part(kind: str) -> PartChange:
        chosen = {id for id in common if not kind or kind in kinds[id]}
        sides = (replace(side, results=[r for r in side.results if r.id in chosen], extra_heldout={})
                 for side in (before, after))  # fmt: skip
        return PartChange(kind, compare_evaluations(*sides))

    tasks = [
        TaskChange(name_task(id), kinds[id], *((r.passed, r.judged) for r in (first[id], second[id]))) for id in common
    ]
    return HeldoutChanges([part(kind) for kind in (ALL, *named[:MOST_PARTS])], tasks, apart)


def _list_kinds(result: TaskResult) -> Iterator[str]:
    """`property=value` of a task: its level, and what its source says; not the length of its prompt."""
    for name, value in {"level": result.level, **result.features}.items():
        if name != LENGTH and value:
            yield f"{one_line(str(name), 60)}={one_line(str(value), 80)}"
