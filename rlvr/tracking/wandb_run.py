"""Weights & Biases: one run there for one run of ours, however often it is stopped and taken up again.

    WANDB_MODE=offline rlvr train --config-name=arithmetic tracking.wandb=true
    wandb sync runs/arithmetic/wandb/offline-run-...                       # later: the newest folder is the whole run

A row of `metrics.jsonl` is a step there, by its number in that file; the charts of a phase have its own steps as their
axis (`rl/step`). A row whose number is there already is not sent, so steps that are done again after a kill show once.
W&B cannot read an offline run back: a resumed one writes a new folder, with the same id and every row from the first.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlvr.core.variants import setting
from rlvr.tracking.run_report import comparison_rows
from rlvr.tracking.tracker import MetricRow, RunMemory, Status, TrackedRun, TrackerOptions, mask_settings

_EXIT_CODES: Mapping[Status, int] = {"FINISHED": 0, "FAILED": 1, "KILLED": 255}
_SETTINGS: Mapping[str, Any] = {
    "silent": True,  # what matters comes as an exception; other lines would break the live display
    "console": "off",
    "init_timeout": 10.0,  # a server that does not answer may hold up a step for seconds, the end of a run for longer
    "finish_timeout": 60.0,
    "finish_timeout_raises": True,
    "x_disable_meta": True,  # it has the command line, where a secret may stand
    "save_code": False,
}


@dataclass(frozen=True)
class WandbOptions(TrackerOptions):
    """Weights & Biases: a run in `project`, with `tags`.

    If `project` has its default, the variable WANDB_PROJECT counts; the other settings are its own variables
    (WANDB_ENTITY, WANDB_MODE=offline).
    """

    name = "wandb"
    switch = "wandb"

    project: str = setting("rlvr", flat="experiment")
    tags: tuple[str, ...] = setting((), flat="wandb_tags")

    def open(self, run: TrackedRun) -> WandbRun:
        is_default = self.project == type(self).project
        project = None if is_default and "WANDB_PROJECT" in os.environ else self.project
        return WandbRun(project, run.name, self.tags, run.config, run.folder, run.say)


class WandbRun:
    """Gives rows to W&B's own process, which sends them in the background."""

    name = "Weights & Biases"
    interval = 0.0

    def __init__(
        self,
        project: str | None,
        run_name: str,
        tags: Sequence[str],
        config: Mapping[str, Any],
        folder: Path,
        say: Callable[[str], None],
    ) -> None:
        """Without a `project` W&B takes that of WANDB_PROJECT."""
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise ValueError(
                f"tracking.wandb=true, but {error.name} is not installed; it comes with the extra: "
                "pip install 'rlvr[wandb]'"
            ) from error
        try:
            wandb.setup(wandb.Settings(silent=True))
            wandb.login(verify=False)  # reads the key, and asks for one in a terminal; connects to nothing
        except wandb.Error as error:
            raise ValueError(
                f"tracking.wandb=true: {error} Or set WANDB_API_KEY; WANDB_MODE=offline needs no account and writes to "
                "the run folder"
            ) from error
        self._project, self._run_name, self._tags = project, run_name, tuple(tags)
        self._config, self._folder, self._say = mask_settings(config), folder, say
        self._memory = RunMemory(folder / "wandb.json", config)
        self._run: Any = None
        self._numbers: dict[tuple[str, int], int] = {}  # of the rows, by phase and step
        self._next = 0  # the first number that W&B does not have

    def begin(self, kept: Sequence[MetricRow]) -> None:
        """Go on in the W&B run that the run folder remembers, or start one. Kept rows it lacks are sent again."""
        if self._run is None:
            self._open()
        self.write(kept)

    def _open(self) -> None:
        import wandb

        run_id = self._memory.read()
        if run_id is None:
            self._memory.store(run_id := secrets.token_hex(4))
        self._run = wandb.init(
            project=self._project,
            id=run_id,
            name=self._run_name,
            tags=self._tags,
            config=self._config,
            dir=self._folder,
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(**_SETTINGS),
        )
        self._next = self._run.step
        if self._run.offline:
            self._say(f"{self.name}: offline; later `wandb sync {Path(self._run.dir).parent}`")
        elif self._run.url:
            self._say(f"{self.name}: {self._run.url}")

    def write(self, rows: Sequence[MetricRow]) -> None:
        for row in rows:
            first = not any(phase == row.phase for phase, _ in self._numbers)
            number = self._numbers.setdefault((row.phase, row.step), len(self._numbers))
            if first and row.phase != "summary":
                self._run.define_metric(f"{row.phase}/*", step_metric=f"{row.phase}/step")
            if number < self._next:
                continue
            named = {f"{row.phase}/{name}": value for name, value in row.metrics.items()}
            if row.summary:
                self._run.summary.update(named)
                self._run.log({"results": _table(row.summary)}, step=number)
            else:
                self._run.log({**named, f"{row.phase}/step": row.step}, step=number)
            self._next = number + 1

    def close(self, status: Status) -> None:
        if self._run is not None:
            self._run.finish(exit_code=_EXIT_CODES[status])


def _table(summary: Mapping[str, Any]) -> Any:
    """Baseline against trained, as W&B shows tables."""
    import wandb

    rows: Any = [list(row) for row in comparison_rows(summary)]
    return wandb.Table(columns=["metric", "baseline", "trained", "change"], data=rows)
