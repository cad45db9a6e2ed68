"""The folder of a study as a dashboard reads it: its variants and seeds, and the statistics that it stored."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlvr.service.dashboard.curve_view import Series, smooth
from rlvr.service.dashboard.dashboard_data import as_list, as_mapping, finite_number, visible_text
from rlvr.service.dashboard.run_files import read_json, size_and_mtime
from rlvr.studies import SPECIFICATION
from rlvr.studies.seed_statistics import summarize_steps

MOST_SEEDS, MOST_RUNS = 200, 1000  # that are shown


def is_study(folder: Path) -> bool:
    return (folder / SPECIFICATION).is_file()


@dataclass(frozen=True)
class SeedRuns:
    """A variant of a study: the names of its runs by their seeds."""

    variant: str
    runs: dict[int, str]

    @property
    def label(self) -> str:
        """The variant without the sections of its keys."""
        return re.sub(r"[\w.]*\.(?=\w+=)", "", self.variant)


class StudyReader:
    """Reads a study's folder; the names of its runs begin with `prefix` in the dashboard."""

    def __init__(self, name: str, folder: Path, prefix: str) -> None:
        self.name, self.folder, self.prefix = visible_text(name, 200), folder, prefix

    def revision(self) -> object:
        return tuple(size_and_mtime(self.folder / file) for file in (SPECIFICATION, "summary.json"))

    def variants(self) -> list[SeedRuns]:
        """As the specification has them; [] if it is damaged."""
        stored = as_mapping(read_json(self.folder / SPECIFICATION))
        seeds = [seed for seed in as_list(stored.get("seeds")) if isinstance(seed, int)][:MOST_SEEDS]
        found: list[SeedRuns] = []
        for variant in map(as_mapping, as_list(stored.get("variants"))[: MOST_RUNS // max(1, len(seeds))]):
            name, start = visible_text(variant.get("name"), 300), variant.get("folder")
            if isinstance(start, str):
                runs = {seed: visible_text(f"{self.prefix}{start}seed-{seed}", 200) for seed in seeds}
                found.append(SeedRuns(name, runs))
        return found

    def statistics(self) -> list[list[Sequence[str]]]:
        """The rows of the study's own table; [] while no run has finished, or if its summary is damaged."""
        from rlvr.studies.study_report import statistics_rows  # loads `rlvr.config`, which other pages do without

        try:
            return statistics_rows(as_mapping(read_json(self.folder / "summary.json")))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError):
            return []

    def results(self) -> dict[str, Mapping[str, Any]]:
        """What the study's summary says of each run, by the run's name."""
        runs = as_list(as_mapping(read_json(self.folder / "summary.json")).get("runs"))
        return {
            visible_text(f"{self.prefix}{run['run']}", 200): run
            for run in map(as_mapping, runs)
            if isinstance(run.get("run"), str)
        }


def seed_dots(study: StudyReader, side: str) -> list[Series]:
    """The pass rate of each seed with its interval over tasks, a series a variant; `side` is before or after."""
    results, found = study.results(), list[Series]()
    for number, variant in enumerate(study.variants()):
        rows = list[list[float]]()
        for seed, run in variant.runs.items():
            rate = as_mapping(as_mapping(results.get(run)).get(side))
            values = [finite_number(rate.get(key)) for key in ("value", "low", "high")]
            if None not in values:
                rows.append([float(seed), *(value for value in values if value is not None)])
        if rows:
            x, y, low, high = np.array(rows).T
            found.append(Series(variant.label or study.name, x, y, low, high, "ends", number))
    return found


def seed_bands(named: Sequence[tuple[str, Sequence[Series]]], metric: str, window: int, is_share: bool) -> list[Series]:
    """Each seed as a pale line; for the steps that all of them have, their mean in its 95 % interval over seeds."""
    found: list[Series] = []
    for number, (name, members) in enumerate(named):
        lines = [Series(one.name, one.x, smooth(one.y, window), style="raw", colour=number) for one in members]
        curves = [dict(zip(map(int, one.x), map(float, one.y), strict=True)) for one in lines]
        steps = summarize_steps(curves, metric)
        found += lines
        if steps:
            rows = [[step, one["mean"], _or(one["low"], one["least"]), _or(one["high"], one["most"])]
                    for step, one in steps.items()]  # fmt: skip
            x, y, low, high = np.array(rows, dtype=float).T
            if is_share:
                low, high = low.clip(0, 1), high.clip(0, 1)
            title = f"{name}: mean of {len(members)} seed{'s' if len(members) > 1 else ''}"
            found.append(Series(title, x, y, low, high, "band", number))
    return found


def _or(end: float | None, otherwise: float) -> float:
    return otherwise if end is None else end
