"""A training run, or a folder of runs, as the source of a dashboard: what `rlvr view RUNDIR` shows.

    RunSource(Path("runs"))             # every run in it
    RunSource(Path("runs/arithmetic"))  # this one

Read-only, and live while a run trains. Of a run's checkpoints only the tokenizer is opened, weights never.
Exercised by tests/test_dashboard_runs.py.
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

from rlvr.service.dashboard.charts import run_charts, run_summary
from rlvr.service.dashboard.data import (
    PAGE,
    Chart,
    Choices,
    Comparison,
    Detail,
    Entry,
    Found,
    Line,
    Note,
    Query,
    Work,
    line,
    mapping,
    number,
    thinned,
    verdicts_of,
    visible,
)
from rlvr.service.dashboard.pieces import MOST, Decode, load_decode, pieces
from rlvr.service.dashboard.run_files import (
    BUDGET,
    SMALL,
    Metrics,
    Rollouts,
    entry,
    is_held,
    numbers,
    read_json,
    stamp,
)
from rlvr.tracking.console import shown
from rlvr.training.signal import findings

RECENT = 60.0  # seconds
MARKS = ("metrics.jsonl", "resolved.yaml", "journal.jsonl")  # a folder with one of these is a run's


def is_run(folder: Path) -> bool:
    return any((folder / mark).is_file() for mark in MARKS)


class RunSource:
    """`folder` is a run, or holds runs. A folder that is neither is a ValueError."""

    noun, status_noun, step_noun, can_rate = "run", "stop reason", "step", False

    def __init__(self, folder: Path, budget: int = BUDGET) -> None:
        self.folder, self.budget, self.single = folder, budget, is_run(folder)
        self._runs: dict[str, Run] = {}
        self._lock = threading.Lock()
        self.title = visible(folder.resolve().name, 100)
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder; expected one that `rlvr train` wrote, or one of such folders")
        if not self._refreshed():
            raise ValueError(
                f"{folder} holds no run: neither it nor a folder in it has {' or '.join(MARKS)}; "
                "give the folder that `rlvr train` named at its end, or the one above it"
            )

    def revision(self) -> object:
        return tuple(run.revision() for run in self._refreshed().values())

    def health(self) -> dict[str, Any] | None:
        return None

    def works(self, offset: int = 0, limit: int = PAGE) -> tuple[list[Work], int]:
        """The run that changed last comes first."""
        runs = sorted(self._refreshed().values(), key=lambda run: -(run.changed() or 0))
        return [run.work() for run in runs[offset : offset + limit]], len(runs)

    def work(self, work: str) -> Work | None:
        run = self._run(work)
        return run.work() if run else None

    def texts(self, work: str) -> list[tuple[str, str]]:
        return []

    def charts(self, work: str = "", metric: str = "") -> list[Chart]:
        if run := self._run(work):
            return run.charts(metric)
        charts = [
            ("Pass rate", "env/all/correct", True, "share of judged answers of a step that pass"),
            ("Reward", "reward", False, "mean over the answers of a step"),
        ]
        found: list[Chart] = []
        for title, name, share, hint in charts:
            lines = [Line(run.name, points) for run in self._newest(8) if (points := run.curve(name))]
            if lines:
                found.append(Chart(title, lines, share, hint=hint))
        return found

    def metrics(self, work: str) -> list[str]:
        run = self._run(work)
        return run.metrics_known() if run else []

    def notes(self, work: str) -> list[Note]:
        run = self._run(work)
        return run.notes() if run else []

    def comparisons(self, work: str) -> list[Comparison]:
        run = self._run(work)
        return run_summary(read_json(run.folder / "summary.json")) if run else []

    def choices(self, work: str) -> Choices:
        tasks, outcomes, statuses, steps = set[str](), set[str](), set[str](), set[int]()
        for run in self._chosen(work):
            more = run.choices()
            tasks |= set(more.tasks)
            outcomes |= set(more.outcomes)
            statuses |= set(more.statuses)
            steps |= set(more.steps or ())
        bounds = (min(steps), max(steps)) if steps else None
        return Choices(sorted(tasks)[:1000], sorted(outcomes), sorted(statuses), bounds)

    def entries(self, query: Query) -> Found:
        """Run after run, the one that changed last first."""
        entries: list[Entry] = []
        skip, total, complete = query.offset, 0, True
        for run in self._chosen(query.work):
            page = run.entries(replace(query, offset=skip, limit=query.limit - len(entries)))
            entries += page.entries
            skip, total, complete = max(0, skip - page.total), total + page.total, complete and page.complete
        return Found(entries, total, complete)

    def detail(self, key: str) -> Detail | None:
        match = re.fullmatch(r"(.+):([0-9]{1,9}):([0-9]{1,9})", key)
        run = self._run(match[1]) if match else None
        return run.detail(int(match[2]), int(match[3])) if match and run else None

    def at_step(self, work: str, step: int) -> dict[str, float]:
        run = self._run(work)
        return run.at_step(step) if run else {}

    def rate(self, key: str, owner: str, rating: float) -> None:
        raise ValueError("a run folder is shown read-only: a rating has no place to go")

    def _refreshed(self) -> dict[str, Run]:
        with self._lock:
            folders = [self.folder] if self.single else self._inside()
            names = {folder.resolve().name if self.single else folder.name: folder for folder in folders}
            for gone in self._runs.keys() - names.keys():
                del self._runs[gone]
            for name, folder in names.items():
                if name not in self._runs:
                    self._runs[name] = Run(name, folder, self.budget)
            return dict(self._runs)

    def _inside(self) -> list[Path]:
        try:
            return sorted(place for place in self.folder.iterdir() if place.is_dir() and is_run(place))
        except OSError:
            return []

    def _run(self, name: str) -> Run | None:
        return self._refreshed().get(name) if name else None

    def _chosen(self, name: str) -> list[Run]:
        if name:
            run = self._run(name)
            return [run] if run else []
        return self._newest(20)

    def _newest(self, most: int) -> list[Run]:
        return sorted(self._refreshed().values(), key=lambda run: -(run.changed() or 0))[:most]


class Run:
    """One run folder. Every method may be called from any thread."""

    def __init__(self, name: str, folder: Path, budget: int) -> None:
        self.name, self.folder = visible(name, 200), folder
        self._lock = threading.RLock()
        self._metrics, self._rollouts = Metrics(folder / "metrics.jsonl"), Rollouts(folder / "rollouts", budget)
        self._decode: Decode | None = None
        self._config: tuple[float, dict[str, Any]] | None = None

    def revision(self) -> object:
        places = ("metrics.jsonl", "summary.json", "rollouts", ".lock")
        return (self.name, *(stamp(self.folder / place) for place in places), self._rollouts.known)

    def changed(self) -> float | None:
        times = [stamp(self.folder / name)[1] for name in (*MARKS, "summary.json")]
        return max(times) / 1e9 or None

    def status(self) -> str:
        """`writing` is a run that nobody is seen to hold and whose metrics are new: another machine's, say."""
        if (self.folder / "summary.json").is_file():
            return "finished"
        if is_held(self.folder / ".lock"):
            return "running"
        return "writing" if time.time() - stamp(self.folder / "metrics.jsonl")[1] / 1e9 < RECENT else "stopped"

    def rows(self, phase: str = "rl") -> list[dict[str, Any]]:
        with self._lock:
            self._metrics.refresh()
            return self._metrics.of(phase)

    def config(self) -> dict[str, Any]:
        """`resolved.yaml`, or nothing where it cannot be read."""
        path = self.folder / "resolved.yaml"
        changed = stamp(path)[1]
        with self._lock:
            if self._config is None or self._config[0] != changed:
                try:
                    text = path.read_bytes() if path.stat().st_size < SMALL // 16 else b""
                    self._config = (changed, dict(mapping(yaml.safe_load(text))))
                except (OSError, yaml.YAMLError, RecursionError, ValueError):
                    self._config = (changed, {})
            return self._config[1]

    def work(self) -> Work:
        rows, warm = self.rows(), self.rows("sft")
        row: dict[str, Any] = {}
        for older in (rows or warm)[-10:]:  # a metric that is not measured every step keeps its last value
            row |= older
        step = int(number(row.get("step")) or 0) + 1 if row else 0
        phase, key = ("training", "training") if rows else ("warm-up", "sft")
        steps = number(mapping(self.config().get(key)).get("steps"))
        status, changed = self.status(), self.changed()
        about = "" if not row else f"{phase} step {step:,}" + (f" of {int(steps):,}" if steps else "")
        return Work(
            id=self.name,
            name=self.name,
            status=status,
            live=status in ("running", "writing"),
            about=about or "nothing measured yet",
            changed=changed,
            done=1.0 if status == "finished" else min(1.0, step / steps) if steps and rows else None,
            figures=shown({k: v for k, v in row.items() if k != "loss" or not rows}),
        )

    def curve(self, name: str, phase: str = "rl") -> list[tuple[float, float]]:
        return curve(self.rows(phase), name)

    def charts(self, metric: str) -> list[Chart]:
        chosen = [Chart(visible(metric, 100), [Line("", points)])] if (points := self.curve(metric)) else []
        return chosen + run_charts(self.curve)

    def metrics_known(self) -> list[str]:
        rows = self.rows()
        names = {name for row in (*rows[:3], *rows[-20:]) for name, value in row.items() if number(value) is not None}
        return sorted(names - {"step"})[:500]

    def notes(self) -> list[Note]:
        found: list[Note] = []
        try:
            found = [Note(f.severity, visible(f.fact, 1000), visible(f.remedy, 1000)) for f in findings(self.rows())]
        except (TypeError, ValueError, OverflowError, ArithmeticError):
            found.append(Note("note", "metrics.jsonl holds values that no run writes; it cannot be diagnosed"))
        if self._metrics.damaged:
            found.append(Note("note", f"{self._metrics.damaged:,} lines of metrics.jsonl are damaged and left out"))
        return found

    def choices(self) -> Choices:
        with self._lock:
            self._rollouts.refresh()
            steps, (tasks, outcomes, statuses) = self._rollouts.steps(), self._rollouts.choices()
        return Choices(tasks, outcomes, statuses, (steps[0], steps[-1]) if steps else None)

    def entries(self, query: Query) -> Found:
        with self._lock:
            self._rollouts.refresh()
            places = self._rollouts.found(query.step, query.task, query.outcome, query.status)
            page = places[query.offset : query.offset + query.limit]
            rows = self._rollouts.rows(page)
            complete = self._rollouts.complete
        return Found([entry(self.name, *at, rows[at]) for at in page if at in rows], len(places), complete)

    def detail(self, step: int, place: int) -> Detail | None:
        with self._lock:
            around = self._rollouts.rows([(step, other) for other in range(max(0, place - 64), place + 65)])
        row = around.get((step, place))
        if row is None:
            return None
        mine = entry(self.name, step, place, row)
        near = [entry(self.name, *at, other) for at, other in around.items() if at != (step, place)]
        ids, logprobs = numbers(row.get("response_tokens")), numbers(row.get("logprobs"))
        decode = self._decoder() if ids and len(ids) == len(logprobs) else None
        return Detail(
            entry=mine,
            prompt=visible(row.get("prompt")),
            answer=visible(row.get("response")),
            verdicts=verdicts_of(row.get("scores")),
            pieces=pieces([int(i) for i in ids], logprobs, decode) if decode else [],
            pieces_note=_why(ids, logprobs, decode),
            facts={
                "group": mine.group,
                "rollout": visible(row.get("rollout_id"), 200),
                "level": line(row.get("level")),
                "sampled by": line(row.get("policy_fingerprint")),
                "sum of log-probs": f"{sum(logprobs):.3f}" if logprobs else "",
            },
            siblings=[e for e in near if e.group == mine.group and mine.group],
        )

    def at_step(self, step: int) -> dict[str, float]:
        row = next((row for row in self.rows() if row.get("step") == step), {})
        return {name: known for name, value in row.items() if (known := number(value)) is not None and name != "step"}

    def _decoder(self) -> Decode | None:
        """The tokenizer beside the newest weights, or in the folder that the run began with."""
        name = mapping(self.config().get("model")).get("name")
        try:
            beside = sorted(self.folder.glob("checkpoints/*/tokenizer.json"), key=os.path.getmtime)
            start = [Path(name) / "tokenizer.json"] if isinstance(name, str) and Path(name).is_dir() else []
        except (OSError, ValueError):
            return None
        file = next(iter([*reversed(beside), *start]), None)
        with self._lock:
            if file is not None and self._decode is None:
                self._decode = load_decode(file)
            return self._decode


def curve(rows: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    pairs = ((number(row.get("step")), number(row.get(name))) for row in rows)
    return thinned([(step, value) for step, value in pairs if step is not None and value is not None])


def _why(ids: list[float], logprobs: list[float], decode: Decode | None) -> str:
    if not ids:
        return "no tokens are stored with this answer"
    if len(ids) != len(logprobs):
        return "tokens and log-probs do not match, so they are not shown"
    if decode is None:
        return "no tokenizer.json lies beside this run's weights, so its tokens cannot be told apart"
    return f"the first {MOST:,} of {len(ids):,} tokens" if len(ids) > MOST else ""
