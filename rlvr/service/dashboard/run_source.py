"""A training run, or a folder of runs, as the source of a dashboard: what `rlvr view RUNDIR` shows.

    RunSource(Path("runs"))             # every run in it
    RunSource(Path("runs/arithmetic"))  # this one

Read-only, and live while a run trains. Of a checkpoint only the tokenizer is opened, never the weights.
"""

from __future__ import annotations

import os
import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from rlvr.chat.token_texts import Decode
from rlvr.service.dashboard.dashboard_data import (
    PAGE,
    AnswerDetail,
    AnswerPage,
    Chart,
    Choices,
    Comparison,
    Curve,
    GroupPage,
    Neighbours,
    Note,
    Query,
    Source,
    Suspicion,
    Work,
    as_mapping,
    finite_number,
    thin_points,
    visible_text,
)
from rlvr.service.dashboard.rollout_index import FILTERS, SORTS, RolloutIndex
from rlvr.service.dashboard.row_details import answer_detail
from rlvr.service.dashboard.run_charts import failing_groups, run_charts, run_summary
from rlvr.service.dashboard.run_files import (
    SMALL,
    MetricsFile,
    answer_row,
    is_held,
    read_json,
    stamp,
)
from rlvr.service.dashboard.run_rollouts import BUDGET, RolloutReader
from rlvr.service.dashboard.suspicions import find_cautions, find_suspicions
from rlvr.service.dashboard.token_pieces import load_decode
from rlvr.tracking.console import format_metrics
from rlvr.training.run_diagnosis import RunDiagnosis, diagnose_run

RECENT_S = 60.0
RUNS = 20  # the newest, whose rollouts are in tables of all runs
SIBLINGS = 256  # of a group, beside a rollout
MARKS = ("metrics.jsonl", "resolved.yaml", "journal.jsonl")  # a folder with one of these is a run's


def is_run(folder: Path) -> bool:
    return any((folder / mark).is_file() for mark in MARKS)


class RunSource(Source):
    """`folder` is a run or holds runs; ValueError otherwise."""

    noun, status_noun, step_noun = "run", "stop reason", "step"
    filters, sorts, can_group, has_suspicions = FILTERS, SORTS, True, True

    def __init__(self, folder: Path, budget: int = BUDGET) -> None:
        self.folder, self.single = folder, is_run(folder)
        self._index = RolloutIndex(answer_key)
        self._reader = RolloutReader(self._index, budget)
        self._runs: dict[str, RunFolder] = {}
        self._lock = threading.Lock()
        self.title = visible_text(folder.resolve().name, 100)
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder; expected a run folder of `rlvr train`, or a folder of runs")
        if not self._refresh():
            raise ValueError(
                f"{folder} holds no run: neither it nor a folder in it has {' or '.join(MARKS)}; "
                "give the folder that `rlvr train` named at its end, or the one above it"
            )

    def revision(self) -> object:
        return self._index.revision, self._reader.share, tuple(run.revision() for run in self._refresh().values())

    def works(self, offset: int = 0, limit: int = PAGE) -> tuple[list[Work], int]:
        """The runs, the one that changed last first."""
        runs = self._newest(None)
        return [run.work() for run in runs[offset : offset + limit]], len(runs)

    def work(self, work: str) -> Work | None:
        run = self._run(work)
        return run.work() if run else None

    def charts(self, work: str = "", metric: str = "") -> list[Chart]:
        if run := self._run(work):
            return run.charts(metric)
        charts = [
            ("Pass rate", "env/all/correct", True, "share of judged answers of a step that pass"),
            ("Reward", "reward", False, "mean over the answers of a step"),
        ]
        overview: list[Chart] = []
        for title, name, share, hint in charts:
            curves = [Curve(run.name, points) for run in self._newest(8) if (points := run.curve(name))]
            if curves:
                overview.append(Chart(title, curves, share, hint=hint))
        return overview

    def metrics(self, work: str) -> list[str]:
        run = self._run(work)
        return run.metric_names() if run else []

    def notes(self, work: str) -> list[Note]:
        run = self._run(work)
        return run.notes() if run else []

    def comparisons(self, work: str) -> list[Comparison]:
        run = self._run(work)
        return [*run_summary(read_json(run.folder / "summary.json")), *failing_groups(run.diagnosis())] if run else []

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

    def detail(self, key: str) -> AnswerDetail | None:
        if (place := _parse_key(key)) is None or (run := self._run(place[0])) is None:
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
        run = self._run(work)
        return run.at_step(step) if run else {}

    def _read_rollouts(self, work: str, file: tuple[str, int] | None = None) -> None:
        """Read the rollouts of a run, or of the newest runs, into the table."""
        newest = self._newest(None)
        self._index.rank([run.name for run in newest])
        chosen = [run for run in newest if run.name == work] + [run for run in newest[:RUNS] if run.name != work]
        self._reader.refresh({run.name: run.folder / "rollouts" for run in chosen}, file)

    def _refresh(self) -> dict[str, RunFolder]:
        with self._lock:
            folders = [self.folder] if self.single else self._run_folders()
            names = {folder.resolve().name if self.single else folder.name: folder for folder in folders}
            for gone in self._runs.keys() - names.keys():
                del self._runs[gone]
            for name, folder in names.items():
                if name not in self._runs:
                    self._runs[name] = RunFolder(name, folder)
            return dict(self._runs)

    def _run_folders(self) -> list[Path]:
        try:
            return sorted(place for place in self.folder.iterdir() if place.is_dir() and is_run(place))
        except OSError:
            return []

    def _run(self, name: str) -> RunFolder | None:
        return self._refresh().get(name) if name else None

    def _select(self, name: str) -> list[RunFolder]:
        if name:
            run = self._run(name)
            return [run] if run else []
        return self._newest(RUNS)

    def _newest(self, most: int | None) -> list[RunFolder]:
        return sorted(self._refresh().values(), key=lambda run: -(run.last_change() or 0))[:most]


class RunFolder:
    """One run folder; thread-safe."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = visible_text(name, 200), folder
        self._lock = threading.RLock()
        self._metrics = MetricsFile(folder / "metrics.jsonl")
        self._decode: Decode | None = None
        self._config: tuple[float, dict[str, Any]] | None = None
        self._diagnosis: tuple[object, RunDiagnosis | None] | None = None

    def revision(self) -> object:
        places = ("metrics.jsonl", "summary.json", "rollouts", ".lock")
        return (self.name, *(stamp(self.folder / place) for place in places))

    def last_change(self) -> float | None:
        times = [stamp(self.folder / name)[1] for name in (*MARKS, "summary.json")]
        return max(times) / 1e9 or None

    def status(self) -> str:
        """`writing` is a run with new metrics and no lock on this machine: another machine may train it."""
        if (self.folder / "summary.json").is_file():
            return "finished"
        if is_held(self.folder / ".lock"):
            return "running"
        return "writing" if time.time() - stamp(self.folder / "metrics.jsonl")[1] / 1e9 < RECENT_S else "stopped"

    def rows(self, phase: str = "rl") -> list[dict[str, Any]]:
        with self._lock:
            self._metrics.refresh()
            return self._metrics.of(phase)

    def config(self) -> dict[str, Any]:
        """`resolved.yaml`, or {} if it cannot be read."""
        path = self.folder / "resolved.yaml"
        changed = stamp(path)[1]
        with self._lock:
            if self._config is None or self._config[0] != changed:
                try:
                    text = path.read_bytes() if path.stat().st_size < SMALL // 16 else b""
                    self._config = (changed, dict(as_mapping(yaml.safe_load(text))))
                except (OSError, yaml.YAMLError, RecursionError, ValueError):
                    self._config = (changed, {})
            return self._config[1]

    def work(self) -> Work:
        rows, sft_rows = self.rows(), self.rows("sft")
        row: dict[str, Any] = {}
        for older in (rows or sft_rows)[-10:]:  # metrics that are not measured every step keep their last value
            row |= older
        step = int(finite_number(row.get("step")) or 0) + 1 if row else 0
        phase, key = ("training", "training") if rows else ("fine-tuning", "sft")
        steps = finite_number(as_mapping(self.config().get(key)).get("steps"))
        status, changed = self.status(), self.last_change()
        about = "" if not row else f"{phase} step {step:,}" + (f" of {int(steps):,}" if steps else "")
        return Work(
            id=self.name,
            name=self.name,
            status=status,
            live=status in ("running", "writing"),
            about=about or "nothing measured yet",
            changed=changed,
            done=1.0 if status == "finished" else min(1.0, step / steps) if steps and rows else None,
            figures=format_metrics({k: v for k, v in row.items() if k != "loss" or not rows}),
        )

    def curve(self, name: str, phase: str = "rl") -> list[tuple[float, float]]:
        return curve(self.rows(phase), name)

    def charts(self, metric: str) -> list[Chart]:
        extra = [Chart(visible_text(metric, 100), [Curve("", points)])] if (points := self.curve(metric)) else []
        return extra + run_charts(self.curve)

    def metric_names(self) -> list[str]:
        rows = self.rows()
        names = {
            name for row in (*rows[:3], *rows[-20:]) for name, value in row.items() if finite_number(value) is not None
        }
        return sorted(names - {"step"})[:500]

    def diagnosis(self) -> RunDiagnosis | None:
        """What `rlvr doctor` says of the run; None if its metrics have values that no run writes."""
        rows = [*self.rows("sft"), *self.rows()]
        files = ("metrics.jsonl", "rollouts", "evaluations/final.json")
        state = tuple(stamp(self.folder / file) for file in files)
        with self._lock:
            if self._diagnosis is None or self._diagnosis[0] != state:
                try:
                    self._diagnosis = (state, diagnose_run(self.folder, rows))
                except (TypeError, ValueError, ArithmeticError):
                    self._diagnosis = (state, None)
            return self._diagnosis[1]

    def notes(self) -> list[Note]:
        if diagnosis := self.diagnosis():
            notes = [
                Note(f.severity, visible_text(f.fact, 1000), visible_text(f.remedy, 1000)) for f in diagnosis.findings
            ]
        else:
            notes = [Note("note", "metrics.jsonl has values that no run writes; it cannot be diagnosed")]
        if self._metrics.damaged:
            notes.append(Note("note", f"{self._metrics.damaged:,} lines of metrics.jsonl are damaged and left out"))
        return notes

    def at_step(self, step: int) -> dict[str, float]:
        row = next((row for row in self.rows() if row.get("step") == step), {})
        numbers = {name: finite_number(value) for name, value in row.items() if name != "step"}
        return {name: number for name, number in numbers.items() if number is not None}

    def decoder(self) -> Decode | None:
        """The tokenizer beside the newest weights, or in the initial model's folder."""
        name = as_mapping(self.config().get("model")).get("name")
        try:
            saved = sorted(self.folder.glob("checkpoints/*/tokenizer.json"), key=os.path.getmtime)
            initial = [Path(name) / "tokenizer.json"] if isinstance(name, str) and Path(name).is_dir() else []
        except (OSError, ValueError):
            return None
        file = next(iter([*reversed(saved), *initial]), None)
        with self._lock:
            if file is not None and self._decode is None:
                self._decode = load_decode(file)
            return self._decode


def _parse_key(key: str) -> tuple[str, int, int] | None:
    match = re.fullmatch(r"(.+):([0-9]{1,9}):([0-9]{1,9})", key)
    return (match[1], int(match[2]), int(match[3])) if match else None


def answer_key(run: str, step: int, place: int) -> str:
    return f"{run}:{step}:{place}"


def curve(rows: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    pairs = ((finite_number(row.get("step")), finite_number(row.get(name))) for row in rows)
    return thin_points([(step, value) for step, value in pairs if step is not None and value is not None])
