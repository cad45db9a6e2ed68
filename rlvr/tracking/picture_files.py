"""Pictures as files: PNG or SVG, as the end of their name says; a notebook shows the picture of such a path."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path, PosixPath
from typing import Any

from rlvr.core.files import write_atomic

# Colours that readers with colour-blindness tell apart (Okabe and Ito).
BLUE, RED, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#777777"
EXTRA = "pip install 'rlvr[plots]'"
_MARKED = 40  # points up to which each has a mark
_MEDIA = {".png": "image/png", ".svg": "image/svg+xml"}


class PicturePath(PosixPath):
    """The path of a picture, which a notebook shows in its place."""

    def _repr_html_(self) -> str | None:
        if self.suffix not in _MEDIA or not self.is_file():
            return None
        data = base64.b64encode(self.read_bytes()).decode()
        return f'<img alt="{escape(self.stem)}" width="720" src="data:{_MEDIA[self.suffix]};base64,{data}">'


def to_picture_path(file: str | Path) -> PicturePath:
    """The path of a picture to be drawn; ValueError for the end of another format."""
    path = PicturePath(file)
    if path.suffix not in ("", *_MEDIA):
        raise ValueError(f"file={str(file)!r}: expected a name that ends in {' or '.join(_MEDIA)}")
    return path


def can_draw() -> bool:
    """Whether the library is installed that draws pictures."""
    return find_spec("matplotlib") is not None


def begin_figure(title: str, height: float = 4.5, *, has_axes: bool = True) -> tuple[Any, Any]:
    """(figure, axes): a figure 8 inches wide with a title; None for the axes if it is to have several.

    ValueError, with the extra to install, without matplotlib.
    """
    if not can_draw():
        raise ValueError(f"a picture needs the package 'matplotlib': {EXTRA}")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), dpi=150, layout="constrained")
    figure.suptitle(title, fontsize=11, x=0.01, ha="left", parse_math=False)
    return figure, clean_axes(figure.add_subplot()) if has_axes else None


def clean_axes(axes: Any) -> Any:
    """Give axes a light grid and no frame; returns them."""
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def count_steps(axes: Any) -> None:
    """The x axis is that of steps: whole numbers."""
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)


def draw_series(axes: Any, x: Sequence[float], y: Sequence[float], colour: str, label: str | None = None) -> None:
    """Draw values over the steps: few with marks, many as a smoothed line before the pale line of the values."""
    if len(y) > _MARKED:
        axes.plot(x, y, color=colour, alpha=0.35, linewidth=0.8)
    marker = "o" if len(y) <= _MARKED else ""
    axes.plot(x, smooth(y), color=colour, label=label, linewidth=1.8, marker=marker, markersize=3.5)


def smooth(values: Sequence[float]) -> list[float]:
    """A centred mean over about a twentieth of the values, those of many."""
    half = len(values) // 40
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def widen_axis(axes: Any, values: Sequence[float], least: float = 0.5) -> None:
    """Equal values get a y axis around them that does not enlarge a difference of nothing."""
    if values and max(values) - min(values) < 1e-9:
        axes.set_ylim(min(values) - least, max(values) + least)


def render_figure(figure: Any, form: str = ".png") -> bytes:
    """The bytes of the file of a figure: `.png`, or `.svg`, in which equal figures have equal bytes."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    buffer = io.BytesIO()
    if form == ".svg":
        with rc_context({"svg.hashsalt": "rlvr"}):
            FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
    else:
        FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()


def write_figure(figure: Any, path: Path) -> None:
    """Write a figure as the format that its name ends with, PNG if none."""
    write_atomic(path, render_figure(figure, path.suffix))
