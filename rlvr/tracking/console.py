"""The view of a run. In a terminal it is drawn in place; elsewhere (pipes, CI) it is plain lines, every few seconds.

What a model wrote is hostile: it is shown without markup or control characters, and not at length.
"""

from __future__ import annotations

import os
import sys
import time
import unicodedata
from collections.abc import Callable, Mapping
from typing import IO, Any

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from rlvr.tracking.report import duration, final_table


def readable(text: str, limit: int | None = 240) -> str:
    """Text from anywhere, safe to show: on one line, controls and direction marks escaped, the middle cut out."""
    if limit is not None and len(text) > limit:
        text = f"{text[: limit * 2 // 3]} ... {text[-(limit // 3) :]}"
    hidden = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    return "".join(c.encode("unicode_escape").decode() if unicodedata.category(c) in hidden else c for c in text)


def readable_lines(text: str) -> str:
    """A message that may quote text from anywhere: at full length and with its line breaks, else as `readable`."""
    return "\n".join(readable(line, None) for line in text.split("\n"))


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


# What the view shows: label, the names it may have, how to write it.
_SHOWN: tuple[tuple[str, tuple[str, ...], Callable[[float], str]], ...] = (
    ("loss", ("loss",), lambda v: f"{v:.4f}"),
    ("reward", ("reward", "env/all/reward/total"), lambda v: f"{v:.3f}"),
    ("pass rate", ("env/all/correct",), _percent),
    ("held-out", ("test/env/all/correct",), _percent),
    ("groups that teach", ("frac_reward_zero_std",), lambda v: f"{100 * (1 - v):.0f}%"),
    ("entropy", ("entropy", "optim/entropy"), lambda v: f"{v:.3f}"),
    ("tokens/s", ("tokens_per_second",), lambda v: f"{v:,.0f}"),
)


def shown(metrics: Mapping[str, Any]) -> dict[str, str]:
    """The metrics that the view knows, as (label, text)."""
    found = {}
    for label, names, write in _SHOWN:
        value = next((known for name in names if (known := _number(metrics.get(name))) is not None), None)
        if value is not None:
            found[label] = write(value)
    return found


def _number(value: Any) -> float | None:
    """None for what is no number, or one that no float holds (a damaged row may have hundreds of digits)."""
    try:
        return float(value) if isinstance(value, (int, float)) else None
    except OverflowError:
        return None


class Console:
    """The view of a run. `live` draws in place (by default when `stream` is a terminal); else plain lines are written,
    at most one every `interval` seconds. A context manager: leaving it, by Ctrl-C too, gives the terminal back."""

    def __init__(
        self,
        stream: IO[str] | None = None,
        live: bool | None = None,
        interval: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        out: IO[str] = stream if stream is not None else sys.stdout
        terminal = out.isatty() and os.environ.get("TERM", "") not in ("dumb", "")
        self.live = terminal if live is None else live
        self.interval, self.clock = interval, clock
        self.rich = RichConsole(
            file=out,
            force_terminal=self.live,
            color_system="auto" if self.live else None,
            width=None if self.live else 120,
            highlight=False,
            markup=False,
            emoji=False,
        )
        self._encoding = getattr(out, "encoding", None) or "utf-8"
        self._phase, self._total, self._start, self._done = "", 0, 0, 0
        self._began = self._written = clock()
        self._metrics: dict[str, str] = {}
        self._sample: tuple[str, ...] | None = None
        self._sample_written = -float("inf")
        self._pending = False
        self._view: Live | None = None

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the view and leave its last line and sample on the screen. May be called again."""
        self._flush()
        if self._view is not None:
            view, self._view = self._view, None
            view.stop()

    def plan(self, lines: Mapping[str, str]) -> None:
        """The plan derived from the config, one `name  value` line each."""
        width = max((len(name) for name in lines), default=0)
        self._print("plan", style="bold")
        for name, value in lines.items():
            self._print(f"  {name:<{width}}  {value}")

    def phase(self, name: str, total: int, done: int = 0, unit: str = "steps") -> None:
        """A new part of the run begins: `total` steps (or tasks), of which `done` were done before a restart."""
        self._flush()
        self._phase, self._total, self._start, self._done = name, total, done, done
        self._began, self._metrics = self.clock(), {}
        self._written = self._began - self.interval  # the first step of a phase is written at once
        if self.live:
            self._draw()
        else:
            self._print(f"{name}: {total} {unit}" + (f", {done} done before" if done else ""))

    def step(self, metrics: Mapping[str, Any], done: int) -> None:
        """Step number `done` of the phase is over. A metric missing in this row keeps its last value on the screen."""
        self._done = done
        self._metrics = {**self._metrics, **shown(metrics)}
        self._pending = True
        if self.live:
            self._draw()
        elif done >= self._total or self.clock() - self._written >= self.interval:
            self._flush()

    def sample(self, prompt: str, response: str, score_text: str) -> None:
        """A sampled answer with its score, as text from anywhere: shown escaped and shortened."""
        self._sample = tuple(map(self._safe, (readable(prompt), readable(response), readable(score_text, 80))))
        if self.live:
            self._draw()

    def note(self, text: str) -> None:
        self._print(text)

    def warn(self, text: str) -> None:
        self._print(f"warning: {text}", style="yellow")

    def table(self, summary: Mapping[str, Any]) -> None:
        """The final table, baseline against trained, as the last thing on the screen."""
        self.close()
        self._print(final_table(summary))

    def left(self) -> float | None:
        """Seconds left in this phase at the pace so far; None before the first step."""
        steps = self._done - self._start
        return (self.clock() - self._began) / steps * (self._total - self._done) if steps > 0 else None

    def _print(self, text: str, style: str = "") -> None:
        self.rich.print(Text(self._safe(readable_lines(text)), style=style), soft_wrap=True)

    def _safe(self, text: str) -> str:
        """Text that the stream's encoding can hold."""
        return text.encode(self._encoding, "backslashreplace").decode(self._encoding)

    def _flush(self) -> None:
        """Write the last step if nothing has shown it yet."""
        if not self._pending:
            return
        self._pending, self._written = False, self.clock()
        parts = [f"{self._phase} {self._done}/{self._total}", *(f"{k} {v}" for k, v in self._metrics.items())]
        left = self.left()
        if self._done >= self._total:
            parts.append(f"in {duration(self._written - self._began)}")
        elif left is not None:
            parts.append(f"{duration(left)} left")
        self._print("  ".join(parts))
        if self._sample is not None and self._written - self._sample_written >= 6 * self.interval:
            self._print("  sampled  {}  ->  {}  [{}]".format(*self._sample))
            self._sample, self._sample_written = None, self._written

    def _draw(self) -> None:
        if self._view is None:
            self._view = Live(console=self.rich, get_renderable=self._render, refresh_per_second=4, transient=True)
            self._view.start()

    def _render(self) -> Group:
        left = self.left()
        bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(f"{duration(left)} left" if left is not None else "", markup=False),
            console=self.rich,
        )
        bar.add_task(self._phase, total=self._total, completed=self._done)
        numbers = Table.grid(padding=(0, 3))
        numbers.add_row(*(Text(label, style="dim") for label in self._metrics))
        numbers.add_row(*(Text(value, style="bold") for value in self._metrics.values()))
        parts: list[Any] = [bar, numbers] if self._metrics else [bar]
        if self._sample is not None:
            prompt, response, score = self._sample
            parts.append(Text.assemble(("sampled  ", "dim"), prompt, ("  ->  ", "dim"), response, f"  [{score}]"))
        return Group(*parts)
