"""Shows a run while it works: drawn in place in a terminal or a notebook, else (pipes, CI) as plain lines every few
seconds.

Text of a model is untrusted: it is shown shortened, without markup and control characters.
"""

from __future__ import annotations

import os
import sys
import textwrap
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

from rlvr.tracking.notebook_progress import NotebookProgress, is_in_notebook
from rlvr.tracking.run_report import duration, final_table


def readable(text: str, limit: int | None = 240) -> str:
    """Make untrusted text safe to show: one line, control and direction characters escaped, the middle cut out."""
    if limit is not None and len(text) > limit:
        text = f"{text[: limit * 2 // 3]} ... {text[-(limit // 3) :]}"
    hidden = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    return "".join(c.encode("unicode_escape").decode() if unicodedata.category(c) in hidden else c for c in text)


def readable_lines(text: str) -> str:
    """Make a message with untrusted text safe to show: as `readable`, but in full and with its line breaks."""
    return "\n".join(readable(line, None) for line in text.split("\n"))


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


# What the view shows: label, the names it may have, how to write it.
_METRICS: tuple[tuple[str, tuple[str, ...], Callable[[float], str]], ...] = (
    ("loss", ("loss",), lambda v: f"{v:.4f}"),
    ("reward", ("reward", "env/all/reward/total"), lambda v: f"{v:.3f}"),
    ("pass rate", ("env/all/correct",), _percent),
    ("held-out", ("test/env/all/correct",), _percent),
    ("groups with signal", ("frac_groups_with_signal",), lambda v: f"{100 * v:.0f}%"),
    ("entropy", ("entropy", "optim/entropy"), lambda v: f"{v:.3f}"),
    ("tokens/s", ("tokens_per_second",), lambda v: f"{v:,.0f}"),
)


def format_metrics(metrics: Mapping[str, Any]) -> dict[str, str]:
    """The metrics that the view shows, by label."""
    texts = {}
    for label, names, write in _METRICS:
        value = next((number for name in names if (number := _number(metrics.get(name))) is not None), None)
        if value is not None:
            texts[label] = write(value)
    return texts


def _number(value: Any) -> float | None:
    """None if it is not a number, or too large for a float (a damaged row may have hundreds of digits)."""
    try:
        return float(value) if isinstance(value, (int, float)) else None
    except OverflowError:
        return None


class RunConsole:
    """The view of a run. `live` draws in place (by default when `stream` is a terminal, and in a notebook); else plain
    lines are written, at most one every `interval` seconds. A context manager: leaving it, by Ctrl-C too, gives the
    terminal back."""

    def __init__(
        self,
        stream: IO[str] | None = None,
        live: bool | None = None,
        interval: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        out: IO[str] = stream if stream is not None else sys.stdout
        self._is_in_notebook = stream is None and is_in_notebook()
        terminal = out.isatty() and os.environ.get("TERM", "") not in ("dumb", "")
        self.live = (terminal or self._is_in_notebook) if live is None else live
        is_drawn = self.live and not self._is_in_notebook  # by control characters, which a notebook does not read
        self.interval, self.clock = interval, clock
        self.rich = RichConsole(
            file=out,
            force_terminal=is_drawn,
            force_jupyter=False,
            color_system="auto" if is_drawn else None,
            width=None if is_drawn else 120,
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
        self._activity: dict[str, str] = {}
        self._pending = False
        self._view: Live | NotebookProgress | None = None

    def __enter__(self) -> RunConsole:
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
        """Show the plan derived from the config, one `name  value` line each."""
        width = max((len(name) for name in lines), default=0)
        self._print("plan", style="bold")
        room = self.rich.width - width - 4 if self.live else max(map(len, lines.values()), default=1)
        for name, value in lines.items():
            first, *more = textwrap.wrap(value, max(20, room), break_long_words=False, break_on_hyphens=False) or [""]
            self._print("\n".join([f"  {name:<{width}}  {first}", *(f"{'':{width + 4}}{line}" for line in more)]))

    def phase(self, name: str, total: int, done: int = 0, unit: str = "steps") -> None:
        """Begin a phase of the run: `total` steps (or tasks), of which `done` were done before a restart."""
        self._flush()
        self._phase, self._total, self._start, self._done = name, total, done, done
        self._began, self._metrics, self._activity = self.clock(), {}, {}
        self._written = self._began - self.interval  # the first step of a phase is written at once
        if self.live:
            self._draw()
        else:
            self._print(f"{name}: {total} {unit}" + (f", {done} done before" if done else ""))

    def step(self, metrics: Mapping[str, Any], done: int) -> None:
        """Show step number `done` of the phase. A metric missing in this row keeps its last value on the screen."""
        self._done = done
        self._metrics = {**self._metrics, **format_metrics(metrics)}
        self._pending = True
        if self.live:
            self._draw()
        elif done >= self._total or self.clock() - self._written >= self.interval:
            self._flush()

    def sample(self, prompt: str, response: str, score_text: str) -> None:
        """A sampled completion with its score: shown escaped and shortened."""
        self._sample = tuple(map(self._safe, (readable(prompt), readable(response), readable(score_text, 80))))
        if self.live:
            self._draw()

    def show_activity(self, lines: Mapping[str, str], done: int) -> None:
        """`step` of a phase whose steps run side by side: show what is under way, one `name  text` line each."""
        self._activity = {self._safe(readable(name)): self._safe(readable(text, 150)) for name, text in lines.items()}
        self.step({}, done)

    def note(self, text: str) -> None:
        """Show a message, in plain output after the step before it."""
        if not self.live:
            self._flush()
        self._print(text)

    def warn(self, text: str) -> None:
        if not self.live:
            self._flush()
        self._print(f"warning: {text}", style="yellow")

    def show_table(self, summary: Mapping[str, Any]) -> None:
        """Show the final table, baseline against trained, after the view."""
        self.close()
        self._print(final_table(summary))

    def remaining_seconds(self) -> float | None:
        """Seconds left in this phase at the pace so far; None before the first step."""
        steps = self._done - self._start
        return (self.clock() - self._began) / steps * (self._total - self._done) if steps > 0 else None

    def _print(self, text: str, style: str = "") -> None:
        self.rich.print(Text(self._safe(readable_lines(text)), style=style), soft_wrap=True)

    def _safe(self, text: str) -> str:
        """Text that the stream's encoding can hold."""
        return text.encode(self._encoding, "backslashreplace").decode(self._encoding)

    def _flush(self) -> None:
        """Write the last step if it was not shown yet."""
        if not self._pending:
            return
        self._pending, self._written = False, self.clock()
        parts = [f"{self._phase} {self._done}/{self._total}", *(f"{k} {v}" for k, v in self._metrics.items())]
        left = self.remaining_seconds()
        if self._done >= self._total:
            parts.append(f"in {duration(self._written - self._began)}")
        elif left is not None:
            parts.append(f"{duration(left)} left")
        self._print("  ".join(parts))
        for name, text in self._activity.items():
            self._print(f"  {name}  {text}")
        if self._sample is not None and self._written - self._sample_written >= 6 * self.interval:
            self._print("  sampled  {}  ->  {}  [{}]".format(*self._sample))
            self._sample, self._sample_written = None, self._written

    def _draw(self) -> None:
        if self._view is None and self._is_in_notebook:
            self._view = NotebookProgress(self._render)
            self._view.start()
        elif self._view is None:
            self._view = Live(console=self.rich, get_renderable=self._render, refresh_per_second=4, transient=True)
            self._view.start()
        elif isinstance(self._view, NotebookProgress):
            self._view.refresh()

    def _render(self) -> Group:
        left = self.remaining_seconds()
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
        for name, text in self._activity.items():
            parts.append(Text.assemble((f"{name}  ", "bold"), text, overflow="ellipsis", no_wrap=True))
        if self._sample is not None:
            prompt, response, score = self._sample
            parts.append(Text.assemble(("sampled  ", "dim"), prompt, ("  ->  ", "dim"), response, f"  [{score}]"))
        return Group(*parts)
