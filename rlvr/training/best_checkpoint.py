"""Keeps the weights with the best interim evaluation of reinforcement learning beside the last checkpoints.

    checkpoints/best.json      {"checkpoint": folder, "step": steps done, "pass_rate": {value, low, high}, "tasks": n}
    checkpoints/best-STEP/     the weights without the optimizer (at a server, with it)

If the last step is the best, `best.json` names the last checkpoint and there is no second copy. The rows of the run
decide what the best is; `best.json` follows each checkpoint. A checkpoint's own best stays as long as the checkpoint
does, so a run that falls back to it has lost nothing.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rlvr.core.files import find_damage, read_json, write_atomic
from rlvr.core.weights_place import CHECKPOINTS
from rlvr.training.interim import InterimResult, find_best, read_interim_results
from rlvr.training.metric_values import Rows, select_rl_rows

BEST = "best"
_FINAL = re.compile(r"final-\d{6,}|done-0{6}")  # the second of older runs


def name_final(steps: int) -> str:
    """The name of the checkpoint after the last step of training, which has made that many."""
    return f"final-{steps:06d}"


def is_final_name(name: str) -> bool:
    """Whether a checkpoint has the name of one after the last step, in this version or an older one."""
    return _FINAL.fullmatch(name) is not None


class BestCheckpoint:
    """The best checkpoint of the run in `folder`. `save` writes the present weights as the checkpoint of a name.

    `tasks` is the size of an interim evaluation. With `save` None nothing is kept, and `results` are still collected.
    """

    def __init__(self, folder: Path, tasks: int, save: Callable[[str], None] | None) -> None:
        self.results: list[InterimResult] = []
        self._folder, self._tasks, self._save = folder / CHECKPOINTS, tasks, save
        self._saved: list[InterimResult] = []  # those whose weights are on disk
        self._last_step, self._final = 0, ""  # of reinforcement learning, once it is over, and its checkpoint

    def restore(self, rows: Rows, final: str, warn: Callable[[str], None]) -> None:
        """Take up the rows of earlier attempts that still stand. `final` is the checkpoint after the last step of
        reinforcement learning, "" before it has ended."""
        self.results, steps = read_interim_results(rows), [int(row["step"]) + 1 for row in select_rl_rows(rows)]
        self._last_step, self._final = (steps[-1], final) if final and steps else (0, "")
        self._saved = [
            r for r in self.results if r.step == self._last_step or not find_damage(self._folder / self._name(r))
        ]
        best = find_best(self.results)
        if self._save and best is not None and best not in self._saved:
            warn(
                f"{self._folder / self._name(best)}, the best checkpoint, is damaged or missing; the next best is kept"
            )

    def collect(self, row: Mapping[str, Any]) -> None:
        """Take up a new row, which may have an interim evaluation."""
        self.results += read_interim_results([row])

    def save(self, row: Mapping[str, Any], *, is_last: bool) -> None:
        """Save the weights if the evaluation of the row is the best so far. The last step's are saved anyway."""
        for result in read_interim_results([row]):
            if self._save is None or find_best([*self._saved, result]) is not result:
                continue
            if is_last:
                self._last_step, self._final = result.step, name_final(result.step)
            else:
                self._save(self._name(result))
            self._saved.append(result)

    def publish(self, steps: Iterable[int]) -> None:
        """Write `best.json`, and delete the weights that neither it nor a checkpoint after one of `steps` needs."""
        best = find_best(self._saved)
        if self._save is None or best is None:
            return
        write_atomic(self._folder / f"{BEST}.json", json.dumps(self.describe(), indent=2) + "\n")
        needed = [best, *(find_best(r for r in self._saved if r.step <= step) for step in steps)]
        self._saved = [result for result in self._saved if result in needed]
        names = [self._name(result) for result in self._saved]
        for place in self._folder.glob(f"{BEST}-{'[0-9]' * 6}"):
            if place.name not in names:
                shutil.rmtree(place, ignore_errors=True)

    def describe(self) -> dict[str, Any] | None:
        """The content of `best.json`, None if there is no best checkpoint."""
        if self._save is None or (best := find_best(self._saved)) is None:
            return None
        where = {"checkpoint": self._name(best), "step": best.step}
        rate = {key: getattr(best.pass_rate, key) for key in ("value", "low", "high")}
        return {**where, "pass_rate": rate, "tasks": self._tasks}

    def _name(self, result: InterimResult) -> str:
        return self._final if result.step == self._last_step else f"{BEST}-{result.step:06d}"


def resolve_best(place: Path) -> Path:
    """The folder of the best checkpoint for `RUN/checkpoints/best`; any other path is itself."""
    if place.name != BEST or place.parent.name != CHECKPOINTS:
        return place
    path = place.parent / f"{BEST}.json"
    if not path.exists():
        raise ValueError(
            f"{place}: this run has no best checkpoint; it needs interim evaluations (evaluation.every) and "
            "run.keep_best=true"
        )
    remedy = "give the path of a checkpoint"
    name = read_json(path, "the name of the best checkpoint", remedy).get("checkpoint")
    if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
        raise ValueError(f"{path}: {name!r:.80} is not the name of a checkpoint; {remedy}")
    return place.parent / name
