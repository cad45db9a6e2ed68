"""From whole series of numbers to the curves of a chart: a part of the steps, log axes, smoothing, thinned points.

The address of a page has all of it, so a link shows the same curves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlvr.service.dashboard.dashboard_data import Chart, Curve, thin_indices

WINDOWS = (5, 15, 51, 151)  # steps of a mean: odd, so that it has a middle
LOGS = {"y": "log y", "x": "log x", "xy": "log both"}


@dataclass(frozen=True)
class Series:
    """A metric over the steps of a run, ascending. `low` and `high` are the ends of an interval where it has one.

    `style` is that of `Curve`. Series of one `colour` belong together.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    style: str = "line"
    colour: int | None = None

    @classmethod
    def of(cls, curve: Curve) -> Series:
        columns = np.array(curve.points, dtype=float).T
        return cls(curve.name, *columns, style=curve.style, colour=curve.colour)

    def select(self, chosen: np.ndarray) -> Series:
        """The points of a mask or of indices."""
        low, high = (end[chosen] if end is not None else None for end in (self.low, self.high))
        return replace(self, x=self.x[chosen], y=self.y[chosen], low=low, high=high)

    def points(self) -> list[tuple[float, ...]]:
        ends = [end for end in (self.low, self.high) if end is not None]
        return list(zip(*(column.tolist() for column in (self.x, self.y, *ends)), strict=True))


@dataclass(frozen=True)
class CurveView:
    """What is shown of the series: steps `first` to `last`, means of `window` steps, and logarithmic axes (`LOGS`)."""

    first: float | None = None
    last: float | None = None
    window: int = 1
    log: str = ""

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> CurveView:
        """Read from an address; what is no such value is left out."""
        smooth, log = parameters.get("smooth", ""), parameters.get("log", "")
        window = int(smooth) if smooth in {str(one) for one in WINDOWS} else 1
        return cls(_number(parameters, "from"), _number(parameters, "to"), window, log if log in LOGS else "")

    def query(self) -> dict[str, str]:
        """The parameters of an address."""
        given = {"from": self.first, "to": self.last}
        return {
            **{name: f"{value:g}" for name, value in given.items() if value is not None},
            **({"smooth": str(self.window)} if self.window > 1 else {}),
            **({"log": self.log} if self.log else {}),
        }

    def crop(self, series: Series) -> Series:
        """The part of a series within the chosen steps."""
        inside = np.ones(len(series.x), dtype=bool)
        if self.first is not None:
            inside &= series.x >= self.first
        if self.last is not None:
            inside &= series.x <= self.last
        return series if inside.all() else series.select(inside)

    def draw(self, chart: Chart, lines: Sequence[Series]) -> Chart | None:
        """The chart with the curves of these series; None if no point is left."""
        curves: list[Curve] = []
        smoothed, dropped = False, 0
        for number, whole in enumerate(lines):
            series = replace(self.crop(whole), colour=number if whole.colour is None else whole.colour)
            drawable = np.ones(len(series.x), dtype=bool)
            for axis, values in (("x", series.x), ("y", series.y)):
                if axis in self.log:
                    drawable &= values > 0
            dropped += int((~drawable).sum())
            series = series.select(drawable)
            if "y" in self.log and series.low is not None:  # an interval that reaches 0 ends at the smallest value
                series = replace(series, low=np.maximum(series.low, series.y.min(initial=np.inf) / 10))
            if self.window > 1 and series.style == "line" and len(series.x) > 2:
                smoothed = True
                curves.append(_curve(replace(series, style="raw")))
                series = replace(series, y=smooth(series.y, self.window))
            if len(series.x):
                curves.append(_curve(series))
        if not curves:
            return None
        hints = [chart.hint] if chart.hint else []
        hints += [f"means of {self.window} steps; pale: each step"] if smoothed else []
        hints += [f"{dropped:,} points at 0 or below are not on the log axis"] if dropped else []
        return replace(chart, lines=curves, hint="; ".join(hints), log=self.log)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """The centred mean of `window` values, at the ends of those that there are."""
    window = min(window, 2 * ((len(values) - 1) // 2) + 1)
    kernel = np.ones(window)
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


def _curve(series: Series) -> Curve:
    return Curve(series.name, series.select(thin_indices(series.y)).points(), series.style, series.colour)


def _number(parameters: Mapping[str, str], name: str) -> float | None:
    try:
        value = float(parameters.get(name, ""))
    except ValueError:
        return None
    return value if abs(value) < 1e15 else None
