"""Pictures as files: PNG or SVG, as the end of their name says; a notebook shows the picture of such a path."""

from __future__ import annotations

import base64
import io
from html import escape
from pathlib import Path, PosixPath
from typing import Any

from rlvr.core.files import write_atomic

# Colours that readers with colour-blindness tell apart (Okabe and Ito).
BLUE, RED, GREY = "#0072b2", "#d55e00", "#777777"
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


def begin_figure(title: str, height: float = 4.5, *, has_axes: bool = True) -> tuple[Any, Any]:
    """(figure, axes): a figure 8 inches wide with a title; None for the axes if it is to have several."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), dpi=150, layout="constrained")
    figure.suptitle(title, fontsize=11, x=0.01, ha="left", parse_math=False)
    return figure, clean_axes(figure.add_subplot()) if has_axes else None


def clean_axes(axes: Any) -> Any:
    """The same axes with a light grid, and without a frame."""
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


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
