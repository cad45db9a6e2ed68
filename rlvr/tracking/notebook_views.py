"""What a notebook shows of a run: its table with the curve, and a completion coloured by its log-probs, as HTML.

All text of a run is escaped: a model may have written a script.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

BOX = "background:#ffffff;color:#111111;padding:8px;display:inline-block;font-family:sans-serif;font-size:13px"
TEXT = "white-space:pre-wrap;background:#ffffff"
_UNLIKELY = -6.0  # nats, at which the colour is full: a token of 1 in 400


@dataclass(frozen=True)
class CompletionView:
    """A completion token by token. A notebook shows it coloured by log-prob; `print` gives a line a token."""

    title: str
    prompt: str
    pieces: Sequence[str]
    """The text of each token; empty for all but the last of the tokens that make up one character."""
    logprobs: Sequence[float]
    """Of each token when it was sampled, in nats; 0 for a token that the environment wrote."""

    def __str__(self) -> str:
        lines = [self.title, *(f"{x:8.3f}  {p!r}" for x, p in zip(self.logprobs, self.pieces, strict=True))]
        return "\n".join([*lines, f"{math.fsum(self.logprobs):8.3f}  sum over {len(self.pieces)} tokens"])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        spans = "".join(
            f'<span style="background:rgba(213,94,0,{_opacity(x):.2f})" title="{x:.3f} nats, p = {math.exp(x):.3g}">'
            f"{escape(_show_breaks(piece))}</span>"
            for x, piece in zip(self.logprobs, self.pieces, strict=True)
        )
        scale = " ".join(
            f'<span style="background:rgba(213,94,0,{_opacity(math.log(p)):.2f});padding:0 6px">{p:g}</span>'
            for p in (1, 0.5, 0.1, 0.01)
        )
        return (
            f'<div style="{BOX}"><div><b>{escape(self.title)}</b> &nbsp; probability of a token: {scale}</div>'
            f'<pre style="{TEXT};color:#666666;margin:6px 0">{escape(self.prompt)}</pre>'
            f'<pre style="{TEXT};color:#111111;margin:0">{spans}</pre></div>'
        )


def _opacity(logprob: float) -> float:
    return 0.85 * min(abs(logprob / _UNLIKELY), 1.0)


def _show_breaks(piece: str) -> str:
    """The text with a sign for each line break, so that its colour is seen."""
    return piece.replace("\n", "\u21b5\n")


def run_to_html(name: str, cells: Mapping[str, str], curve: bytes | None) -> str:
    """A table of a run, with its reward curve (PNG) beside it."""
    rows = "".join(
        f'<tr><td style="color:#666666;text-align:left;padding:2px 12px 2px 0">{escape(key)}</td>'
        f'<td style="text-align:left;padding:2px 0">{escape(value)}</td></tr>'
        for key, value in cells.items()
    )
    picture = ""
    if curve is not None:
        data = base64.b64encode(curve).decode()
        picture = f'<img alt="reward curve" width="560" src="data:image/png;base64,{data}">'
    return (
        f'<div style="{BOX}"><b>{escape(name)}</b>'
        f'<table style="border-collapse:collapse;margin:6px 0;font-size:13px">{rows}</table>{picture}</div>'
    )
