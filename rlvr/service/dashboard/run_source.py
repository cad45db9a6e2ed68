"""A training run, or a folder of runs, as the source of a dashboard: what `rlvr view RUNDIR` shows.

    RunSource(Path("runs"))             # every run in it
    RunSource(Path("runs/arithmetic"))  # this one

Read-only, and live while a run trains. Of a checkpoint only the tokenizer is opened, never the weights.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlvr.service.dashboard.curve_view import CurveView, Series
from rlvr.service.dashboard.dashboard_data import (
    PAGE,
    AnswerDetail,
    AnswerPage,
    Chart,
    Choices,
    GroupPage,
    MachineGroup,
    Neighbours,
    Note,
    Query,
    Source,
    Suspicion,
    Work,
    visible_text,
)
from rlvr.service.dashboard.heldout_changes import AFTER, STAGES, HeldoutChanges, list_changes
from rlvr.service.dashboard.rollout_index import FILTERS, SORTS, RolloutIndex
from rlvr.service.dashboard.row_details import answer_detail
from rlvr.service.dashboard.run_charts import draw_charts, metric_chart
from rlvr.service.dashboard.run_files import answer_row
from rlvr.service.dashboard.run_machines import run_machines
from rlvr.service.dashboard.run_reader import MARKS, NAME, RunReader, is_run
from rlvr.service.dashboard.run_rollouts import BUDGET, RolloutReader
from rlvr.service.dashboard.study_reader import StudyReader, is_study
from rlvr.service.dashboard.suspicions import find_cautions, find_suspicions

RUNS = 20  # the newest, whose rollouts are in tables of all runs
SIBLINGS = 256  # of a group, beside a rollout
MACHINES = 8  # runs whose parts are shown
MOST_CHANGES = 16  # comparisons of evaluations that are kept
OVERVIEW = ("env/all/correct", "test/env/all/correct", "reward")  # metrics of the newest runs in one chart each

Side = tuple[str, str]  # a run and one of `STAGES`


class RunSource(Source):
    """The dashboard's source of training runs; ValueError unless `folder` is a run or holds runs."""

    noun, status_noun, step_noun = "run", "stop reason", "step"
    filters, sorts, can_group, has_suspicions = FILTERS, SORTS, True, True

    def __init__(self, folder: Path, budget: int = BUDGET) -> None:
        self.folder, self.single = folder, is_run(folder)
        self._index = RolloutIndex(answer_key)
        self._reader = RolloutReader(self._index, budget)
        self._runs: dict[str, RunReader] = {}
        self._studies: dict[str, StudyReader] = {}
        self._changes: OrderedDict[tuple[Side, Side], tuple[object, HeldoutChanges | None]] = OrderedDict()
        self._lock = threading.Lock()
        self.title = visible_text(folder.resolve().name, 100)
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder; expected a run folder of `rlvr train`, or a folder of runs")
        if not self.runs():
            raise ValueError(
                f"{folder} holds no run: neither it nor a folder in it has {' or '.join(MARKS)}; "
                "give the folder that `rlvr train` named at its end, or the one above it"
            )

    def revision(self) -> object:
        runs = self.runs()
        return (
            self._index.revision,
            self._reader.share,
            *(run.revision() for run in runs.values()),
            *(study.revision() for study in self.studies()),
        )

    def works(self, offset: int = 0, limit: int = PAGE) -> tuple[list[Work], int]:
        """The runs, the one that changed last first. Those of a study are on its page."""
        runs = [run for run in self._newest(None) if "/" not in run.name]
        return [run.work() for run in runs[offset : offset + limit]], len(runs)

    def names(self) -> dict[str, str]:
        return {run.name: run.name for run in self._newest(1000)}

    def studies(self) -> list[StudyReader]:
        """The studies in the folder, or the folder itself if it is one."""
        self.runs()
        return list(self._studies.values())

    def study(self, name: str) -> StudyReader | None:
        return next((study for study in self.studies() if study.name == name), None)

    def changes(self, before: Side, after: Side) -> HeldoutChanges | None:
        """How the held-out tasks changed from one evaluation to another; None unless both can be read."""
        runs = [self.run(name) for name, _ in (before, after)]
        if None in runs or not {before[1], after[1]} <= STAGES.keys():
            return None
        sides = [(run, stage) for run, (_, stage) in zip(runs, (before, after), strict=True) if run is not None]
        state = tuple(run.evaluation_stamp(stage) for run, stage in sides)
        with self._lock:
            stored = self._changes.get((before, after))
        if stored is None or stored[0] != state:
            first, second = (run.evaluation(stage) for run, stage in sides)
            stored = (state, list_changes(first, second) if first and second else None)
            with self._lock:
                self._changes[before, after] = stored
                while len(self._changes) > MOST_CHANGES:
                    self._changes.popitem(last=False)
        return stored[1]

    def choose_pair(self) -> tuple[str, str]:
        """The two runs that Compare opens with: the newest ones with a last evaluation on tasks of one environment,
        or else the newest two; the earlier one first."""
        runs = self._newest(50)
        measured = [run for run in runs if run.evaluation(AFTER)]
        pairs = [
            (one, other)
            for number, one in enumerate(measured)
            for other in measured[number + 1 :]
            if one.config().get("env") == other.config().get("env")
        ]
        later, earlier = next(iter(pairs), (runs[0], runs[min(1, len(runs) - 1)]))
        return earlier.name, later.name

    def work(self, work: str) -> Work | None:
        run = self.run(work)
        return run.work() if run else None

    def charts(self, work: str = "") -> list[Chart]:
        if run := self.run(work):
            return draw_charts(run.chart_series(), CurveView())
        return draw_charts(self.overview_series(), CurveView())

    def overview_series(self) -> list[tuple[Chart, list[Series]]]:
        """The charts of the newest runs, a metric in each."""
        names = [run.name for run in self._newest(8)]
        return [(metric_chart(metric), self.run_series(metric, names)) for metric in OVERVIEW]

    def run_series(self, metric: str, runs: Sequence[str]) -> list[Series]:
        """A metric of several runs; a run has the same colour in every chart, also in those that lack another one."""
        known = self.runs()
        return [
            replace(series, colour=number)
            for number, name in enumerate(runs)
            if (run := known.get(name)) and (series := run.series(metric)) is not None
        ]

    def choices(self, work: str) -> Choices:
        self._read_rollouts(work)
        return self._index.choices(work)

    def answers(self, query: Query) -> AnswerPage:
        self._read_rollouts(query.work)
        return replace(self._index.page(query, self._reader.share), note=self._reader.note)

    def groups(self, query: Query) -> GroupPage:
        self._read_rollouts(query.work)
        return replace(self._index.groups(query, self._reader.share), note=self._reader.note)

    def neighbours(self, query: Query, grouped: bool, key: str) -> Neighbours | None:
        place = _parse_key(key)
        return self._index.neighbours(query, grouped, *place) if place else None

    def suspicions(self, work: str) -> list[Suspicion]:
        self._read_rollouts(work)
        return find_suspicions(self._index, work)

    def cautions(self, work: str) -> list[Note]:
        """What is known of the rewards of the runs, and how their rollouts can be had for a look of one's own."""
        return find_cautions({run.name: run.config() for run in self._select(work)})

    def machines(self) -> list[MachineGroup]:
        return [group for run in self._newest(RUNS) if (group := run_machines(run))][:MACHINES]

    def detail(self, key: str) -> AnswerDetail | None:
        if (place := _parse_key(key)) is None or (run := self.run(place[0])) is None:
            return None
        file = place[:2]
        if not self._reader.is_read(file) or not self._index.offsets(*place):
            self._read_rollouts(run.name, file)
        rows = self._reader.rows_at(file, self._index.offsets(*place))
        if place[2] not in rows:
            return None
        episode = {answer_key(*file, other): row for other, row in rows.items()}
        shown = answer_row(run.name, place[1], key, rows[place[2]])
        return answer_detail(key, shown, episode, run.decoder(), self._index.group_of(*place, SIBLINGS))

    def at_step(self, work: str, step: int) -> dict[str, float]:
        run = self.run(work)
        return run.at_step(step) if run else {}

    def _read_rollouts(self, work: str, file: tuple[str, int] | None = None) -> None:
        """Read the rollouts of a run, or of the newest runs, into the table."""
        newest = self._newest(None)
        self._index.rank([run.name for run in newest])
        chosen = [run for run in newest if run.name == work] + [run for run in newest[:RUNS] if run.name != work]
        self._reader.refresh({run.name: run.folder / "rollouts" for run in chosen}, file)

    def runs(self) -> dict[str, RunReader]:
        """The runs by their names. It looks for new ones: a page that reads many asks once."""
        with self._lock:
            found, studies = self._find_runs()
            names = {visible_text(name, NAME): folder for name, folder in found.items()}  # as addresses have them
            self._studies = {
                name: self._studies.get(name) or StudyReader(name, folder, prefix)
                for name, (folder, prefix) in studies.items()
            }
            for gone in self._runs.keys() - names.keys():
                del self._runs[gone]
            for name, folder in names.items():
                if name not in self._runs:
                    self._runs[name] = RunReader(name, folder)
            return dict(self._runs)

    def _find_runs(self) -> tuple[dict[str, Path], dict[str, tuple[Path, str]]]:
        """The folders of runs by their names, and those of studies with what the names of their runs begin with."""
        if self.single:
            return {self.folder.resolve().name: self.folder}, {}
        if is_study(self.folder):
            runs = {place.name: place for place in list_folders(self.folder) if is_run(place)}
            return runs, {self.folder.resolve().name: (self.folder, "")}
        runs, studies = dict[str, Path](), dict[str, tuple[Path, str]]()
        for place in list_folders(self.folder):
            if is_run(place):
                runs[place.name] = place
            elif is_study(place):
                studies[place.name] = place, f"{place.name}/"
                runs |= {f"{place.name}/{one.name}": one for one in list_folders(place) if is_run(one)}
        return runs, studies

    def run(self, name: str) -> RunReader | None:
        return self.runs().get(name) if name else None

    def _select(self, name: str) -> list[RunReader]:
        if name:
            run = self.run(name)
            return [run] if run else []
        return self._newest(RUNS)

    def _newest(self, most: int | None) -> list[RunReader]:
        return sorted(self.runs().values(), key=lambda run: -(run.last_change() or 0))[:most]


def list_folders(folder: Path) -> list[Path]:
    try:
        return sorted(place for place in folder.iterdir() if place.is_dir())
    except OSError:
        return []


def _parse_key(key: str) -> tuple[str, int, int] | None:
    match = re.fullmatch(r"(.+):([0-9]{1,9}):([0-9]{1,9})", key)
    return (match[1], int(match[2]), int(match[3])) if match else None


def answer_key(run: str, step: int, place: int) -> str:
    return f"{run}:{step}:{place}"
