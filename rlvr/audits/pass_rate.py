"""A pass rate with its 95 % interval, over rows of which several may be completions of one task.

Completions of one task are not independent. So the interval is that of `cluster_interval`: Wilson's at the effective
number of rows, from the variance of the rate if tasks are sampled (linearized for tasks of different sizes, Kish 1965).
With one completion per task this is Wilson's plain interval.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from rlvr.core.task_statistics import Interval, cluster_interval


@dataclass
class PassRate:
    """Counts of judged rows. Rows without a task are tasks of their own and take no memory."""

    alone: list[int] = field(default_factory=lambda: [0, 0])  # number failed, number passed
    tasks: dict[Hashable, list[int]] = field(default_factory=dict[Hashable, list[int]])  # likewise, by task

    def add(self, passed: bool, task: Hashable | None = None) -> None:
        counts = self.alone if task is None else self.tasks.setdefault(task, [0, 0])
        counts[passed] += 1

    @property
    def num_tasks(self) -> int:
        return sum(self.alone) + len(self.tasks)

    def interval(self) -> Interval:
        """The share of rows that passed. There has to be a row."""
        failed, passed = (self.alone[i] + sum(counts[i] for counts in self.tasks.values()) for i in (0, 1))
        rows, tasks = failed + passed, self.num_tasks
        p = passed / rows
        squares = self.alone[1] * (1 - p) ** 2 + self.alone[0] * p**2
        squares += sum((n1 - p * (n0 + n1)) ** 2 for n0, n1 in self.tasks.values())
        alike = rows**2 / (sum(self.alone) + sum((n0 + n1) ** 2 for n0, n1 in self.tasks.values()))
        variance = squares * tasks / max(tasks - 1, 1) / rows**2
        return cluster_interval(p, variance, tasks, alike, rows)
