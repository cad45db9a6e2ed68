"""A recording of `rlvr record`, or one of another project, as the source of a dashboard: `rlvr view traffic.jsonl`.

Each rollout is a work, and each of its branches an answer. The file is read again when it has changed.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlvr.chat.token_texts import Decode
from rlvr.recorder.recording import RecordedRollout
from rlvr.recorder.rows import make_rows
from rlvr.recorder.traces import load_recording
from rlvr.service.dashboard.dashboard_data import (
    PAGE,
    AnswerDetail,
    AnswerPage,
    Chart,
    Choices,
    GroupPage,
    Neighbours,
    Note,
    Query,
    Source,
    Work,
    one_line,
    visible_text,
)
from rlvr.service.dashboard.rollout_index import FILTERS, SORTS, RolloutIndex
from rlvr.service.dashboard.row_details import answer_detail
from rlvr.service.dashboard.run_files import answer_row, size_and_mtime
from rlvr.service.dashboard.token_pieces import load_decode
from rlvr.training.rollout_rows import trajectory_row

Rows = dict[str, dict[str, Any]]
SIBLINGS = 256  # of a group, beside an answer


@dataclass
class _Rollout:
    """A rollout, its answers by their keys, and why it has none."""

    work: Work
    rows: Rows = field(default_factory=Rows)
    problem: str = ""


class RecordingSource(Source):
    """The dashboard's source of a recording; ValueError if `file` is another file."""

    noun, status_noun, step_noun, can_compare = "rollout", "stop reason", "step", False
    filters, sorts, can_group = FILTERS - {"steps"}, tuple(one for one in SORTS if one != "step"), True
    answer_noun, answer_nouns = "branch", "branches"
    has_machines = False

    def __init__(self, file: Path) -> None:
        self.file, self.title = file, visible_text(file.name, 100)
        self._lock = threading.Lock()
        self._stamp: object = None
        self._rollouts: dict[str, _Rollout] = {}
        self._decode: Decode | None = None
        self._index = _make_index()
        self._refresh()

    def revision(self) -> object:
        return size_and_mtime(self.file)

    def works(self, offset: int = 0, limit: int = PAGE) -> tuple[list[Work], int]:
        found = [one.work for one in self._refresh().values()]
        return found[offset : offset + limit], len(found)

    def work(self, work: str) -> Work | None:
        found = self._refresh().get(work)
        return found.work if found else None

    def charts(self, work: str = "") -> list[Chart]:
        return []

    def notes(self, work: str) -> list[Note]:
        found = self._refresh().get(work)
        return [Note("problem", found.problem)] if found and found.problem else []

    def choices(self, work: str) -> Choices:
        self._refresh()
        return self._index.choices(work)

    def answers(self, query: Query) -> AnswerPage:
        self._refresh()
        return self._index.page(query)

    def groups(self, query: Query) -> GroupPage:
        self._refresh()
        return self._index.groups(query)

    def neighbours(self, query: Query, grouped: bool, key: str) -> Neighbours | None:
        rollout, _, number = key.rpartition(":")
        known = key in self._rows_of(rollout)
        return self._index.neighbours(query, grouped, rollout, 0, int(number)) if known else None

    def detail(self, key: str) -> AnswerDetail | None:
        rollout, _, number = key.rpartition(":")
        rows = self._rows_of(rollout)
        if key not in rows:
            return None
        group = self._index.group_of(rollout, 0, int(number), SIBLINGS)
        return answer_detail(key, answer_row(rollout, None, key, rows[key]), rows, self._decode, group)

    def _rows_of(self, rollout: str) -> Rows:
        found = self._refresh().get(rollout)
        return found.rows if found else {}

    def _refresh(self) -> dict[str, _Rollout]:
        """The rollouts, the newest first."""
        with self._lock:
            if (now := size_and_mtime(self.file)) != self._stamp:
                recording = load_recording(self.file)
                if self._decode is None and recording.model:
                    self._decode = load_decode(Path(recording.model) / "tokenizer.json")
                read = [self._read(one) for one in reversed(recording.rollouts)]
                self._rollouts = {one.work.id: one for one in read}
                index = _make_index()
                index.rank(list(self._rollouts))
                for work, one in self._rollouts.items():
                    index.add(work, 0, None, [(place, 0, row) for place, row in enumerate(one.rows.values())])
                self._index, self._stamp = index, now
            return self._rollouts

    def _read(self, rollout: RecordedRollout) -> _Rollout:
        rows, problem, id = Rows(), "", visible_text(rollout.id, 200)
        try:
            for number, row in enumerate(make_rows(rollout, _Texts(self._decode) if self._decode else None)):
                rows[f"{id}:{number}"] = {**json.loads(trajectory_row(row)), "task_id": rollout.group}
        except ValueError as error:  # such as calls of several temperatures
            problem = visible_text(f"{error}; it cannot be trained", 1000)
        ended = rollout.calls[-1].ended if rollout.calls else None
        calls = len(rollout.calls)
        figures = {"branches": f"{len(rows):,}", "sampled tokens": f"{_count_tokens(rollout):,}"}
        if rollout.reward is not None:
            figures["reward"] = f"{rollout.reward:g}"
        about = f"{calls:,} call{'' if calls == 1 else 's'}" + (f" of {rollout.group}" if rollout.group else "")
        work = Work(id, id, "recorded", about=one_line(about), changed=ended or None,
                    figures=figures)  # fmt: skip
        return _Rollout(work, rows, problem)


def _make_index() -> RolloutIndex:
    """A table in which the rollouts of one task are a group."""
    return RolloutIndex(lambda rollout, file, place: f"{rollout}:{place}", groups_of_works=False)


def _count_tokens(rollout: RecordedRollout) -> int:
    return sum(len(choice.tokens) for call in rollout.calls for choice in call.choices)


@dataclass(frozen=True)
class _Texts:
    """A tokenizer, as far as rows of a recording need one."""

    of: Decode

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return self.of(tokens)
