"""The view of a run in a notebook: one output that is drawn again in place, where a terminal would redraw its lines."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from html import escape
from typing import Any

from rich.console import Console as RichConsole

_WIDTH = 100  # characters
_STYLE = "line-height:1.25;overflow:hidden"


def is_in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class NotebookProgress:
    """Shows what `render` gives in one output of the cell, at most twice a second; `stop` takes it away."""

    def __init__(self, render: Callable[[], Any], interval: float = 0.5) -> None:
        self._render, self._interval = render, interval
        self._handle: Any = None
        self._drawn = 0.0

    def start(self) -> None:
        """Open the output."""
        from IPython.display import display

        self._handle = display(self._draw(), raw=True, display_id=True)

    def refresh(self) -> None:
        """Draw it again, unless that was just done."""
        if time.monotonic() - self._drawn >= self._interval:
            self._handle.update(self._draw(), raw=True)

    def stop(self) -> None:
        """Empty the output."""
        self._handle.update({"text/plain": "", "text/html": ""}, raw=True)

    def _draw(self) -> dict[str, str]:
        self._drawn = time.monotonic()
        console = RichConsole(file=io.StringIO(), width=_WIDTH, color_system=None, force_jupyter=False)
        with console.capture() as captured:
            console.print(self._render())
        text = "\n".join(line.rstrip() for line in captured.get().splitlines())
        return {"text/plain": text, "text/html": f'<pre style="{_STYLE}">{escape(text)}</pre>'}
