"""The folder of a model's benchmarks: what was asked, every completion with its verdicts, and the results.

    OUT/model.json                     the hash of the weights; other weights are refused
    OUT/gsm8k/benchmark.json           the settings and the hash of the tasks; others are refused
    OUT/gsm8k/completions.jsonl        a line a task: prompt, completions, verdicts, in the order of the tasks
    OUT/gsm8k/result.json              the numbers
    OUT/summary.json  OUT/table.md     the numbers of all benchmarks in the folder

Tasks are sampled and stored in chunks. A chunk counts when all its lines are there: what a kill leaves of one is cut
off and sampled again, so that a continued benchmark has the same batches, and bits, as one that never stopped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlvr.config import difference
from rlvr.core.files import lock_file, read_json, remove_leftovers, write_atomic
from rlvr.core.types import Score
from rlvr.reward import Reward
from rlvr.training.journal import RunLockedError
from rlvr.training.judged_tasks import JudgedTask, TaskCount, TaskResult

MODEL, SETTINGS, COMPLETIONS, RESULT = "model.json", "benchmark.json", "completions.jsonl", "result.json"
_REMEDY = "put the file back, or choose another --out"
_IGNORED = ("env.kwargs.path",)  # the hash of the tasks says whether the rows are the same


@contextmanager
def open_benchmarks(folder: Path, model: Mapping[str, str]) -> Iterator[None]:
    """Lock the folder and store the model's hash; ValueError if it is of other weights, or holds other files."""
    if folder.is_dir() and not (folder / MODEL).exists() and any(e.name[0] != "." for e in folder.iterdir()):
        raise ValueError(f"{folder} exists and holds other files than benchmarks; choose another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ValueError(f"{folder} cannot be made ({error.strerror}); choose another --out") from error
    lock = lock_file(folder / ".lock")
    if lock is None:
        raise RunLockedError(f"benchmarks are running in {folder}; wait for them, or choose another --out")
    with lock:
        remove_leftovers(folder)
        _store_once(folder / MODEL, model, ["model"], f"{folder} holds benchmarks of another model")
        yield


class BenchmarkFolder:
    """The folder of one benchmark; it is made, or checked to be of the same settings and tasks."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], tasks: Sequence[str], chunk: int) -> None:
        folder.mkdir(exist_ok=True)
        remove_leftovers(folder)
        other = f"{folder} holds a benchmark of other settings"
        _store_once(folder / SETTINGS, {**settings, "chunk": chunk}, _IGNORED, other)
        self.folder, self.records = folder, list[dict[str, Any]]()
        self._path = folder / COMPLETIONS
        whole = self._path.read_bytes().split(b"\n")[:-1] if self._path.exists() else []
        done = len(whole) if len(whole) == len(tasks) else len(whole) // chunk * chunk
        for number, line in enumerate(whole[:done], 1):
            self.records.append(_read_record(line, f"{self._path}, line {number}", tasks[number - 1 : number]))
        if self._path.exists():
            write_atomic(self._path, b"".join(line + b"\n" for line in whole[:done]))

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Store the records of a chunk; they are on disk when this returns."""
        with open(self._path, "ab") as file:
            file.write(b"".join(json.dumps(record).encode() + b"\n" for record in records))
            file.flush()
            os.fsync(file.fileno())
        self.records += [dict(record) for record in records]

    def finish(self, result: Mapping[str, Any]) -> None:
        """Store the numbers."""
        write_atomic(self.folder / RESULT, json.dumps(result, indent=2) + "\n")


def make_record(judged: JudgedTask, count: TaskCount, verifiers: Sequence[Reward]) -> dict[str, Any]:
    """A task's line: what the model read and wrote, each verdict, and what is counted of the task."""
    completions = [
        {
            "response": t.response if t.answer is None else t.answer,
            "tokens": t.num_action_tokens,
            "truncated": t.truncated,
            "verdicts": {v.name: _verdict(t.scores[v.name]) for v in verifiers},
        }
        for t in judged.completions
    ]
    return {
        "id": judged.task.id,
        "prompt": judged.completions[0].read_prompt,
        "completions": completions,
        **asdict(count),
    }


def read_count(record: Mapping[str, Any]) -> TaskCount:
    """The counts of a stored task, read from its record."""
    result = None if record["result"] is None else TaskResult(**record["result"])
    return TaskCount(result, record["unjudged"], record["truncated"], record["tokens"])


def _verdict(score: Score) -> dict[str, Any]:
    parts = {"outcome": score.outcome.value, "value": score.value, "reason": score.reason, "detail": score.detail}
    return {key: value for key, value in parts.items() if value != ""}


def list_results(folder: Path) -> dict[str, dict[str, Any]]:
    """The finished benchmarks of a folder, by name."""
    files = sorted(folder.glob(f"*/{RESULT}"))
    return {file.parent.name: read_json(file, "the numbers of a benchmark", _REMEDY) for file in files}


def _read_record(line: bytes, where: str, task: Sequence[str]) -> dict[str, Any]:
    try:
        record = json.loads(line)
        if [record["id"]] != list(task):
            raise ValueError(f"the task {record['id']!r}, expected {''.join(task) or 'no more'}")
        read_count(record)
        assert all(type(record[key]) is int for key in ("unjudged", "truncated", "tokens"))
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"{where} is damaged ({error!r:.120}); {_REMEDY}") from None
    return record


def _store_once(path: Path, content: Mapping[str, Any], ignored: Sequence[str], other: str) -> None:
    """Store what the folder's results were made with; ValueError if something else is stored there."""
    if path.exists():
        stored = read_json(path, "what benchmarks are of", _REMEDY)
        if changed := difference(content, stored, ignore=list(ignored)):
            raise ValueError(f"{other}: {', '.join(changed[:6])}; give the same settings, or choose another --out")
        return
    write_atomic(path, json.dumps(content, indent=1) + "\n")
