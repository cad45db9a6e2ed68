"""One run folder as a dashboard reads it: state, metrics, evaluations, completions, findings. Read-only, and live."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlvr.chat.token_texts import Decode
from rlvr.service.dashboard.curve_view import Series
from rlvr.service.dashboard.dashboard_data import (
    Chart,
    Note,
    Work,
    as_mapping,
    finite_number,
    visible_text,
)
from rlvr.service.dashboard.heldout_answers import HeldoutAnswers
from rlvr.service.dashboard.heldout_changes import AFTER, BEFORE, STAGES
from rlvr.service.dashboard.run_charts import ENDS, run_series
from rlvr.service.dashboard.run_files import (
    SMALL,
    MetricsFile,
    PhaseMetrics,
    is_run_locked,
    is_shallow,
    open_file,
    parse_row,
    read_json,
    size_and_mtime,
)
from rlvr.service.dashboard.token_pieces import load_decode
from rlvr.tracking.console import format_metrics
from rlvr.training.evaluate import Evaluation, stored_evaluation
from rlvr.training.run_diagnosis import RunDiagnosis, diagnose_run

RECENT_S = 60.0
NAME = 200  # characters of the name of a run
FIGURES = {"pass rate": "pass rate, training", "held-out": "pass rate, held-out, interim"}  # beside held-out pass@1
MARKS = ("metrics.jsonl", "resolved.yaml", "journal.jsonl")  # a folder with one of these is a run's


def is_run(folder: Path) -> bool:
    return any((folder / mark).is_file() for mark in MARKS)


class RunReader:
    """One run folder; thread-safe."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self._lock = threading.RLock()
        self._metrics = MetricsFile(folder / "metrics.jsonl")
        self._heldout = {stage: HeldoutAnswers(self._evaluation_file(stage).with_suffix(".jsonl")) for stage in STAGES}
        self._decode: Decode | None = None
        self._cached: dict[str, tuple[object, Any]] = {}

    def revision(self) -> object:
        places = ("metrics.jsonl", "summary.json", "rollouts", "evaluations", ".lock")
        return (self.name, *(size_and_mtime(self.folder / place) for place in places))

    def last_change(self) -> float | None:
        times = [size_and_mtime(self.folder / name)[1] for name in (*MARKS, "summary.json")]
        return max(times) / 1e9 or None

    def status(self) -> str:
        """`writing` is a run with new metrics and no lock on this machine: another machine may train it."""
        if (self.folder / "summary.json").is_file():
            return "finished"
        if is_run_locked(self.folder / ".lock"):
            return "running"
        return (
            "writing" if time.time() - size_and_mtime(self.folder / "metrics.jsonl")[1] / 1e9 < RECENT_S else "stopped"
        )

    def metrics(self, phase: str = "rl") -> PhaseMetrics:
        with self._lock:
            self._metrics.refresh()
            return self._metrics.of(phase)

    def config(self) -> dict[str, Any]:
        """`resolved.yaml`, or {} if it cannot be read."""
        path = self.folder / "resolved.yaml"

        def load() -> dict[str, Any]:
            from rlvr.config import read  # limits what aliases expand to; the service's pages do without it

            try:
                return read(path) if path.is_file() and path.stat().st_size < SMALL // 16 else {}
            except (OSError, ValueError):
                return {}

        return self._cache("config", size_and_mtime(path), load)

    def summary(self) -> Mapping[str, Any]:
        path = self.folder / "summary.json"
        return self._cache("summary", size_and_mtime(path), lambda: as_mapping(read_json(path)))

    def machine(self) -> Mapping[str, Any]:
        """What the run computes with: versions of code and libraries, processor, device; {} if it is not known."""
        path = self.folder / "journal.jsonl"

        def load() -> Mapping[str, Any]:
            try:
                with open_file(path) as file:
                    rows = [parse_row(line) for line in file.read(SMALL).splitlines() if b'"run"' in line]
            except OSError:
                return {}
            attempts = [row for row in rows if row and row.get("event") == "run" and is_shallow(row)]
            return {key: value for key, value in attempts[-1].items() if key != "event"} if attempts else {}

        return as_mapping(self.summary().get("machine")) or self._cache("machine", size_and_mtime(path), load)

    def evaluation(self, stage: str) -> Evaluation | None:
        """An evaluation of `STAGES`; None if there is none, or none that can be read."""
        return self._read_evaluation(stage)[0]

    def evaluation_stamp(self, stage: str) -> object:
        return size_and_mtime(self._evaluation_file(stage))

    def heldout_answers(self, stage: str, task: str) -> list[dict[str, Any]] | None:
        """The stored completions of a held-out task; None if the run stores none."""
        with self._lock:
            answers = self._heldout[stage]
            return answers.rows(task) if answers.is_stored else None

    def work(self) -> Work:
        metrics, sft = self.metrics(), self.metrics("sft")
        trained = metrics if metrics.num_rows else sft
        row: dict[str, Any] = {}
        for older in trained.rows[-10:]:  # metrics that are not measured every step keep their last value
            row |= older
        step = int(finite_number(row.get("step")) or 0) + 1 if row else 0
        phase, key = ("training", "training") if metrics.num_rows else ("fine-tuning", "sft")
        steps = finite_number(as_mapping(self.config().get(key)).get("steps"))
        status, changed = self.status(), self.last_change()
        about = "" if not row else f"{phase} step {step:,}" + (f" of {int(steps):,}" if steps else "")
        shown = format_metrics({k: v for k, v in row.items() if k != "loss" or not metrics.num_rows})
        return Work(
            id=self.name,
            name=self.name,
            status=status,
            live=status in ("running", "writing"),
            about=about or "nothing measured yet",
            changed=changed,
            done=1.0 if status == "finished" else min(1.0, step / steps) if steps and metrics.num_rows else None,
            figures=self._heldout_figure()
            | {FIGURES.get(name, name): text.replace("%", " %") for name, text in shown.items()},
        )

    def series(self, metric: str, phase: str = "rl") -> Series | None:
        """A metric over the steps. Interim evaluations are of the policy after a step, and have intervals."""
        with self._lock:
            metrics = self.metrics(phase)
            ends = [f"{metric}/low", f"{metric}/high"]
            is_heldout = metric.startswith("test/")
            names = [metric, *ends] if is_heldout and {*ends} <= {*metrics.names} else [metric]
            x, *columns = metrics.steps_and_values(*names)
        if not len(x):
            return None
        return Series(self.name, x + is_heldout, *columns, style="dots" if is_heldout else "line")

    def ends(self, metric: str) -> Series | None:
        """The evaluations before and after training, as far as they are there, at step 0 and after the last one."""
        rates = list[tuple[float, ...]]()
        steps = self.metrics().steps_and_values("step")[0]
        for stage, step in ((BEFORE, 0.0), (AFTER, steps[-1] + 1 if len(steps) else 0.0)):
            if metric in ENDS and (evaluation := self.evaluation(stage)) and evaluation.results:
                rate = evaluation.metrics()[ENDS[metric]]
                rates.append((step, rate.value, rate.low, rate.high))
        if not rates:
            return None
        x, y, *bounds = np.array(rates).T
        low, high = (np.where(np.isnan(end), y, end) for end in bounds)  # one task has no interval
        return Series("held-out, before and after", x, y, low, high, "ends")

    def chart_series(self, metric: str = "") -> list[tuple[Chart, list[Series]]]:
        return run_series(self.series, self.ends, metric)

    def metric_names(self) -> list[str]:
        names = {name for phase in ("rl", "sft") for name in self.metrics(phase).names}
        return sorted(names - {"step"})[:500]

    def diagnosis(self) -> RunDiagnosis | None:
        """What `rlvr doctor` says of the run; None if its metrics have values that no run writes."""
        rows = [*self.metrics("sft").rows, *self.metrics().rows]
        files = ("metrics.jsonl", "rollouts", "evaluations/baseline.json", "evaluations/final.json")

        def diagnose() -> RunDiagnosis | None:
            try:
                return diagnose_run(self.folder, rows)
            except (TypeError, ValueError, ArithmeticError):
                return None

        return self._cache("diagnosis", tuple(size_and_mtime(self.folder / file) for file in files), diagnose)

    def notes(self) -> list[Note]:
        if diagnosis := self.diagnosis():
            notes = [
                Note(f.severity, visible_text(f.fact, 1000), visible_text(f.remedy, 1000), f.code)
                for f in diagnosis.findings
            ]
        else:
            notes = [Note("note", "metrics.jsonl has values that no run writes; it cannot be diagnosed")]
        if self._metrics.damaged:
            notes.append(Note("note", f"{self._metrics.damaged:,} lines of metrics.jsonl are damaged and left out"))
        problems = (self._read_evaluation(stage)[1] for stage in STAGES)
        return notes + [Note("note", problem) for problem in problems if problem]

    def at_step(self, step: int) -> dict[str, float]:
        metrics = self.metrics()
        found: dict[str, float] = {}
        for name in metrics.names:
            steps, values = metrics.steps_and_values(name)
            if name != "step" and len(at := values[steps == step]):
                found[name] = float(at[-1])
        return found

    def _heldout_figure(self) -> dict[str, str]:
        """The held-out pass rate, before and after training if both are known."""
        rates = [
            finite_number(as_mapping(as_mapping(self.summary().get(stage)).get("pass@1")).get("value"))
            for stage in STAGES
        ]
        shown = [f"{100 * rate:.1f} %" for rate in rates if rate is not None]
        return {"held-out pass@1": " → ".join(shown)} if len(shown) == len(STAGES) else {}

    def _evaluation_file(self, stage: str) -> Path:
        return self.folder / "evaluations" / f"{stage}.json"

    def _read_evaluation(self, stage: str) -> tuple[Evaluation | None, str]:
        """(the evaluation, what is wrong with its file)."""
        path = self._evaluation_file(stage)

        def load() -> tuple[Evaluation | None, str]:
            if not path.is_file():
                return None, ""
            try:
                if path.stat().st_size > 4 * SMALL:
                    return None, f"evaluations/{path.name} has more than {4 * SMALL >> 20} MiB and is left out"
                return stored_evaluation(path), ""
            except (ValueError, OSError, RecursionError, ArithmeticError):
                return None, f"evaluations/{path.name} is half written or damaged, and is left out"

        return self._cache(f"evaluation {stage}", size_and_mtime(path), load)

    def _cache(self, name: str, state: object, make: Any) -> Any:
        """What `make` returned for this state of the files."""
        with self._lock:
            if name not in self._cached or self._cached[name][0] != state:
                self._cached[name] = (state, make())
            return self._cached[name][1]

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
