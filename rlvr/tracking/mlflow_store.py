"""MLflow: one MLflow run for one run of ours, however often it is stopped and taken up again.

    MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri runs/mlruns

The default store is a folder, which `mlflow-skinny` can write without a server or a database. In it a metric is a file,
and `rl/reward` cannot be a file and a folder at once, so the slashes after the phase's become dots: `rl/reward.min`.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlvr.core.variants import setting
from rlvr.tracking.tracker import (
    MetricRow,
    RunMemory,
    Status,
    TrackedRun,
    TrackerOptions,
    mask_settings,
    without_passwords,
)

# Only where the user has not said otherwise. Telemetry stays off. MLflow calls its folder store "maintained only" and
# asks for this word. A server that does not answer may hold up a training step for seconds, not for minutes.
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
_METRICS, _PARAMS = 1000, 100  # the most that one call may carry
_LONGEST = 500  # characters of a parameter's value; what is longer is whole in resolved.yaml
_IN_EVERY_ROW = "time/step"


@dataclass(frozen=True)
class MlflowOptions(TrackerOptions):
    """MLflow: the store at `uri` (None: a local one, `mlruns` in the run's root), under `experiment`."""

    name = "mlflow"
    switch = "mlflow"

    uri: str | None = setting(None, flat="mlflow_uri")
    experiment: str = setting("rlvr", flat="experiment")

    def open(self, run: TrackedRun) -> MlflowStore:
        uri = self.uri or (run.folder.parent / "mlruns").absolute().as_uri()
        return MlflowStore(uri, self.experiment, run.name, run.config, run.folder)


class MlflowStore:
    """Sends rows in batches, at most every few seconds, and each step of a phase once."""

    name = "MLflow"
    interval = 5.0

    def __init__(self, uri: str, experiment: str, run_name: str, config: Mapping[str, Any], folder: Path) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            from mlflow import MlflowClient
        except ModuleNotFoundError as error:
            raise ValueError(
                f"tracking.mlflow=true, but {error.name} is not installed; it comes with the extra: "
                "pip install 'rlvr[mlflow]'"
            ) from error
        for chatty in ("mlflow", "urllib3.connectionpool"):  # what matters of theirs comes as an exception
            logging.getLogger(chatty).setLevel(logging.ERROR)
        try:
            self._client = MlflowClient(tracking_uri=uri)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"tracking.mlflow_uri: a store of this kind needs {error.name}, which is not installed (a database "
                "needs the whole of MLflow: pip install mlflow); leave mlflow_uri out for a local folder"
            ) from error
        except Exception as error:  # MLflow's own classes for a URI of no known kind
            raise ValueError(
                f"tracking.mlflow_uri: MLflow cannot use it ({without_passwords(str(error))}); expected http(s)://..., "
                "a folder, or sqlite:///file, or leave it out"
            ) from error
        self._experiment, self._run_name, self._folder = experiment, run_name, folder
        self._params = dict(_flatten(mask_settings(config)))
        self._memory = RunMemory(folder / "mlflow.json", dict(_flatten(config)))
        self._run = ""
        self._there: dict[str, set[int]] = {}  # steps of a phase that the store has

    def begin(self, kept: Sequence[MetricRow]) -> None:
        """Go on in the MLflow run that the run folder remembers, or start one. Kept rows it lacks are sent again."""
        self._run = self._stored_run() or self._new()
        self.write(kept)

    def write(self, rows: Sequence[MetricRow]) -> None:
        from mlflow.entities import Metric

        new = [row for row in rows if row.step not in self._steps(row.phase)]
        metrics = [
            Metric(metric_name(row.phase, name), value, int(1000 * row.time), row.step)
            for row in new
            for name, value in row.metrics.items()
        ]
        for start in range(0, len(metrics), _METRICS):
            self._client.log_batch(self._run, metrics=metrics[start : start + _METRICS])
        for row in new:
            self._steps(row.phase).add(row.step)

    def close(self, status: Status) -> None:
        if self._run:
            self._client.set_terminated(self._run, status)

    def _steps(self, phase: str) -> set[int]:
        """Steps of the phase that the store has: after a kill, redone steps must not show twice."""
        if phase not in self._there:
            history = self._client.get_metric_history(self._run, metric_name(phase, _IN_EVERY_ROW))
            self._there[phase] = {metric.step for metric in history}
        return self._there[phase]

    def _stored_run(self) -> str | None:
        """The MLflow run of an earlier attempt at this very config, if it is still there."""
        from mlflow.exceptions import MlflowException

        run = self._memory.read()
        if run is None:
            return None
        try:
            found = self._client.get_run(run)
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            raise
        if found.info.lifecycle_stage != "active":
            return None
        self._client.update_run(run, status="RUNNING")
        return run

    def _new(self) -> str:
        from mlflow.entities import Param

        self._there = {}
        known = self._client.get_experiment_by_name(self._experiment)
        experiment = known.experiment_id if known else self._client.create_experiment(self._experiment)
        tags = {"rlvr.folder": str(self._folder.absolute())}
        run = self._client.create_run(experiment, run_name=self._run_name, tags=tags).info.run_id
        params = [Param(name, value) for name, value in self._params.items()]
        for start in range(0, len(params), _PARAMS):
            self._client.log_batch(run, params=params[start : start + _PARAMS])
        self._memory.store(run)
        return run


def metric_name(phase: str, name: str) -> str:
    """A metric's name as MLflow and its folder store take it: `pass@1` is `pass_at_1`."""
    plain = name.replace("@", "_at_").replace("/", ".")
    return f"{phase}/{re.sub(r'[^A-Za-z0-9_. :-]', '_', plain)}"[:250]


def _flatten(config: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) of every setting."""
    if isinstance(config, Mapping) and config:
        for name, value in config.items():
            yield from _flatten(value, f"{key}.{name}" if key else str(name))
    else:
        plain = isinstance(config, str) and config.isprintable()
        text = config if plain else json.dumps(config, default=str)
        yield re.sub(r"[^A-Za-z0-9_. :-]", "_", key)[:250], text[:_LONGEST]
