"""What a notebook shows of a run: its table with the curve, and a completion coloured by its log-probs, as HTML.

All text of a run is escaped: a model may have written a script.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

BOX = "background:#ffffff;color:#111111;padding:8px;display:inline-block;font-family:sans-serif;font-size:13px"
TEXT = "white-space:pre-wrap;background:#ffffff"
_OTHERS = "color:#777777;font-style:italic"
_UNLIKELY = -6.0  # nats, at which the colour is full: a token of 1 in 400
_ABOVE, _BELOW = "#0072b2", "#cc79a7"  # lines under tokens of positive and negative advantage: solid and dashed


@dataclass(frozen=True)
class CompletionView:
    """A completion token by token. A notebook shows it coloured by log-prob, and underlined by advantage; `print` gives
    a line a token."""

    title: str
    prompt: str
    pieces: Sequence[str]
    """The text of each token; empty for all but the last of the tokens that make up one character."""
    logprobs: Sequence[float]
    """Of each token when it was sampled, in nats; 0 for a token that the environment wrote."""
    advantages: Sequence[float]
    """Of each token; above 0 training makes it more likely."""
    is_sampled: Sequence[bool]
    """Whether the policy sampled the token, and not the environment wrote it."""

    def __str__(self) -> str:
        lines = [self.title, "log-prob  advantage  token"]
        for logprob, advantage, is_sampled, piece in self._tokens():
            values = f"{logprob:8.3f}  {advantage:+9.3f}" if is_sampled else f"{'of the environment':>19}"
            lines.append(f"{values}  {piece!r}")
        return "\n".join([*lines, f"{math.fsum(self.logprobs):8.3f}  sum over {sum(self.is_sampled)} sampled tokens"])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        spans = "".join(_to_span(*token) for token in self._tokens())
        scale = " ".join(
            f'<span style="background:rgba(213,94,0,{_opacity(math.log(p)):.2f});padding:0 6px">{p:g}</span>'
            for p in (1, 0.5, 0.1, 0.01)
        )
        others = "" if all(self.is_sampled) else f' &nbsp; <span style="{_OTHERS}">written by the environment</span>'
        return (
            f'<div style="{BOX}"><div><b>{escape(self.title)}</b> &nbsp; probability of a token: {scale} &nbsp; '
            f'advantage: <span style="{_underline(1)}">above 0</span> <span style="{_underline(-1)}">below 0</span>'
            f"{others}</div>"
            f'<pre style="{TEXT};color:#666666;margin:6px 0">{escape(self.prompt)}</pre>'
            f'<pre style="{TEXT};color:#111111;margin:0;line-height:1.6">{spans}</pre></div>'
        )

    def _tokens(self) -> Iterator[tuple[float, float, bool, str]]:
        return zip(self.logprobs, self.advantages, self.is_sampled, self.pieces, strict=True)


def _to_span(logprob: float, advantage: float, is_sampled: bool, piece: str) -> str:
    text = escape(_show_breaks(piece))
    if not is_sampled:
        return f'<span style="{_OTHERS}" title="written by the environment">{text}</span>'
    style = f"background:rgba(213,94,0,{_opacity(logprob):.2f});{_underline(advantage)}"
    return (
        f'<span style="{style}" title="{logprob:.3f} nats, p = {math.exp(logprob):.3g}, advantage {advantage:+.3f}">'
        f"{text}</span>"
    )


def _underline(advantage: float) -> str:
    """The style of a line under a token; none for an advantage of 0."""
    if advantage == 0:
        return ""
    return f"border-bottom:2px {f'solid {_ABOVE}' if advantage > 0 else f'dashed {_BELOW}'}"


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
