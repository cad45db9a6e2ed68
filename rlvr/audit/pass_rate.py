"""A pass rate with its 95 % interval, over rows of which several may be completions of one task.

Completions of one task are not independent. So the interval is Wilson's at the number of rows divided by the design
effect: the variance of the rate if tasks are sampled, over that if rows are (Kish 1965; linearized for tasks of
different sizes). With one completion per task this is Wilson's plain interval.
`python -m pytest tests/test_audit_rates.py` exercises it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from rlvr.training.evaluate import Interval, wilson_interval


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
        if tasks == rows:
            return wilson_interval(p, rows)
        if not 0 < p < 1 or tasks == 1:  # the correlation within tasks is unknown: assume that it is 1
            return wilson_interval(p, tasks)
        squares = self.alone[1] * (1 - p) ** 2 + self.alone[0] * p**2
        squares += sum((n1 - p * (n0 + n1)) ** 2 for n0, n1 in self.tasks.values())
        design_effect = squares * tasks / (tasks - 1) / (rows * p * (1 - p))
        return wilson_interval(p, rows / max(1.0, design_effect))
