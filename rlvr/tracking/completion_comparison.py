"""The completions of two policies to the same prompts, with their verdicts: rows, text, and a table of HTML.

All text of a run is escaped in HTML: a model may have written a script.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from rlvr.core.files import write_atomic
from rlvr.core.types import Trajectory
from rlvr.tracking.notebook_views import BOX, TEXT

GAINED, LOST, BOTH, NEITHER, UNJUDGED = "gained", "lost", "both passed", "neither passed", "not judged"
CHANGES = (GAINED, LOST, BOTH, NEITHER, UNJUDGED)  # in the order in which they are shown
_MARKS = {"passed": ("\u2713 passed", "#0072b2"), "failed": ("\u2717 failed", "#d55e00")}
_CELL = "text-align:left;vertical-align:top;padding:4px 8px;border-top:1px solid #dddddd"
_SCROLLED = f"{TEXT};margin:0;max-height:220px;overflow:auto;overflow-wrap:anywhere"


def describe_change(first: str, second: str) -> str:
    """One of `CHANGES`, by the verdicts on both completions: `passed`, `failed`, `timeout`, `error` or `invalid`."""
    if {"error", "invalid"} & {first, second}:
        return UNJUDGED
    return {
        (False, True): GAINED, (True, False): LOST, (True, True): BOTH, (False, False): NEITHER,
    }[first == "passed", second == "passed"]  # fmt: skip


def compare_completions(first: Trajectory, second: Trajectory, verifier: str, sample: int) -> dict[str, Any]:
    """The row of two completions of one task, which `verifier` judged."""
    row: dict[str, Any] = {"task": first.task.id if first.task else "", "sample": sample, "prompt": first.prompt}
    for side, one in (("first", first), ("second", second)):
        row |= {side: one.response, f"{side}_reward": one.reward, f"{side}_verdict": one.scores[verifier].outcome.value}
    return {**row, "change": describe_change(row["first_verdict"], row["second_verdict"])}


@dataclass(frozen=True)
class CompletionComparison:
    """The completions of two checkpoints to the same prompts.

    `print` shows those whose verdict changed, a notebook all; `pandas.DataFrame(comparison.rows)` is the table of them.
    """

    title: str
    first: str
    """What the first policy is called: `start`, or the name of a checkpoint."""
    second: str
    rows: Sequence[dict[str, Any]]
    """One a completion: `task`, `sample`, `prompt`; `first` and `second`, the texts; the reward (None if there is no
    verdict) and the verdict of each (`first_reward`, `first_verdict`, ...); and `change`."""

    @property
    def changes(self) -> dict[str, int]:
        """The number of rows by `change`: `gained`, `lost`, `both passed`, `neither passed`, `not judged`."""
        return {change: sum(row["change"] == change for row in self.rows) for change in CHANGES}

    @property
    def ordered(self) -> list[dict[str, Any]]:
        """The rows whose verdict changed, then the others."""
        return sorted(self.rows, key=lambda row: CHANGES.index(row["change"]))

    def __str__(self) -> str:
        lines = [self.title, self._count()]
        for row in self.ordered:
            if row["change"] in (GAINED, LOST):
                lines += ["", f"{row['change']}: {row['prompt']!r:.200}"]
                for side, name in (("first", self.first), ("second", self.second)):
                    lines.append(f"  {name}: {row[side]!r:.200} ({row[f'{side}_verdict']})")
        return "\n".join(lines)

    __repr__ = __str__

    def _count(self) -> str:
        named = [f"{number:,} {change}" for change, number in self.changes.items() if number or change != UNJUDGED]
        return f"{self.first}, then {self.second}, {len(self.rows):,} completions each: {', '.join(named)}"

    def _repr_html_(self) -> str:
        head = "".join(
            f'<th style="text-align:left;padding:4px 8px">{escape(name)}</th>'
            for name in ("prompt", self.first, self.second)
        )
        body = "".join(
            f'<tr style="background:#ffffff"><td style="{_CELL};width:26%"><b>{row["change"]}</b>'
            f'<pre style="{_SCROLLED};color:#666666">{escape(row["prompt"])}</pre></td>'
            f"{_to_cell(row, 'first')}{_to_cell(row, 'second')}</tr>"
            for row in self.ordered
        )
        return (
            f'<div style="{BOX};max-width:1000px"><b>{escape(self.title)}</b><div>{escape(self._count())}. Grey: what '
            f'both completions begin with.</div><table style="border-collapse:collapse;width:100%;margin:6px 0;'
            f'font-size:13px"><tr>{head}</tr>{body}</table></div>'
        )

    def write(self, file: str | Path) -> Path:
        """Write the table as a page for a browser."""
        path = Path(file)
        if path.suffix != ".html":
            raise ValueError(f"file={str(file)!r}: expected a name that ends in .html")
        head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(self.title)}</title>'
        write_atomic(path, f"{head}{self._repr_html_()}</html>\n")
        return path


def _to_cell(row: dict[str, Any], side: str) -> str:
    """A completion with its verdict; what the other one begins with too is grey."""
    verdict, reward, text = row[f"{side}_verdict"], row[f"{side}_reward"], row[side]
    shown, colour = _MARKS.get(verdict, (verdict, "#777777"))
    letters = enumerate(zip(row["first"], row["second"], strict=False))
    common = next((place for place, (a, b) in letters if a != b), min(len(row["first"]), len(row["second"])))
    return (
        f'<td style="{_CELL};width:37%"><span style="color:{colour}">{escape(shown)}</span> '
        f"{'no reward' if reward is None else f'{reward:g}'}"
        f'<pre style="{_SCROLLED};color:#111111"><span style="color:#999999">{escape(text[:common])}</span>'
        f"{escape(text[common:])}</pre></td>"
    )
