"""A curve drawn with characters, and the view of a run that shows one while the run learns.

print("\n".join(draw_curve(passed, rewards, steps=150, encoding="utf-8")))
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.text import Text

from rlvr.tracking.console import RunConsole

_WIDTH, _HEIGHT = 60, 8
_BLOCKS = " ▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "  ...:::#"
PASSED, REWARD = "env/all/correct", "reward"


def draw_curve(
    passed: Sequence[float], rewards: Sequence[float], steps: int, encoding: str = "utf-8", width: int = _WIDTH
) -> list[str]:
    """The lines of a picture of the pass rates (filled) and mean rewards (dots), from 0 to 1, of a run of `steps`.

    Each column is the mean of the steps that it covers. In an encoding without block characters it is ASCII.
    """
    blocks, dot = _BLOCKS, "•"
    try:
        (blocks + dot).encode(encoding)
    except (UnicodeError, LookupError):
        blocks, dot = _ASCII_BLOCKS, "o"
    columns = max(1, min(width, steps))
    heights = _means(passed, steps, columns)
    dots = _means(rewards, steps, columns)
    lines: list[str] = []
    for row in reversed(range(_HEIGHT)):
        cells = ""
        for height, reward in zip(heights, dots, strict=True):
            filled = 0.0 if height is None else height * _HEIGHT - row
            cell = blocks[max(0, min(8, math.floor(8 * filled + 0.5)))]
            has_dot = reward is not None and min(_HEIGHT - 1, int(max(0.0, reward) * _HEIGHT)) == row
            cells += dot if has_dot and cell == " " else cell
        label = {_HEIGHT - 1: "100%", _HEIGHT // 2 - 1: " 50%", 0: "  0%"}.get(row, "")
        lines.append(f"{label:>4} |{cells}".rstrip())
    last = f"step {steps}"
    lines.append(f"     +{'-' * columns}")
    lines.append(f"      {'step 1':<{max(7, columns - len(last))}}{last}")
    lines.append(f"      {blocks[8]} pass rate   {dot} mean reward (of each step's completions)")
    return lines


def _means(values: Sequence[float], steps: int, columns: int) -> list[float | None]:
    """The mean of each column's share of the steps; None where no step was made yet."""
    means: list[float | None] = []
    for column in range(columns):
        part = values[column * steps // columns : max((column + 1) * steps // columns, column * steps // columns + 1)]
        means.append(sum(part) / len(part) if part else None)
    return means


class CurveConsole(RunConsole):
    """The view of a run with the curve of reinforcement learning above it; `plan` says nothing.

    `rows` are the metrics of the steps that were made before a restart.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]] = (), **options: Any) -> None:
        super().__init__(**options)
        made = [row for row in rows if row.get("phase") == "rl"]
        self._rows = [(float(row.get(PASSED, 0.0)), float(row.get(REWARD, 0.0))) for row in made]

    def plan(self, lines: Mapping[str, str]) -> None:
        pass

    def phase(self, name: str, total: int, done: int = 0, unit: str = "steps") -> None:
        if name == "rl":
            self._rows = self._rows[:done]
        super().phase(name, total, done, unit)

    def step(self, metrics: Mapping[str, Any], done: int) -> None:
        if self._phase == "rl" and PASSED in metrics:
            self._rows.append((float(metrics[PASSED]), float(metrics.get(REWARD, 0.0))))
        super().step(metrics, done)

    def draw(self, steps: int) -> list[str]:
        """The picture of all steps so far."""
        room = max(10, self.rich.width - 8)
        passed, rewards = [one for one, _ in self._rows], [one for _, one in self._rows]
        return draw_curve(passed, rewards, steps, self._encoding, min(_WIDTH, room))

    def show_table(self, summary: Mapping[str, Any]) -> None:
        """Show the picture of all steps, then the final table."""
        self.close()
        if self._rows:
            self.note("\n".join(["", *self.draw(len(self._rows)), ""]))
        super().show_table(summary)

    def _render(self) -> Group:
        view = super()._render()
        if self._phase != "rl":
            return view
        return Group(Text("\n".join(self.draw(self._total)), style="green"), Text(""), *view.renderables)
