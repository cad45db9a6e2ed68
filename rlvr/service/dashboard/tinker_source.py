"""The state folder of a Tinker server as the source of a dashboard: `rlvr view runs/server`.

Its training runs with their checkpoints, and the metrics of the requests whose results the server keeps: those of the
last hour (`result_seconds`) that are in a snapshot. The records are read as they are, by a connection that cannot
write, while the server works or after it.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from rlvr.service.dashboard.dashboard_data import (
    PAGE,
    Chart,
    Curve,
    Source,
    Work,
    as_mapping,
    finite_number,
    one_line,
    thin_points,
    visible_text,
)
from rlvr.service.dashboard.run_files import size_and_mtime
from rlvr.tinker_server.backend.storage.server_store import KEPT, RECORDS
from rlvr.tinker_server.protocol.proto import ForwardBackwardOutput

ALIVE_S = 60.0  # since the last heartbeat of a client that still trains
MOST_CHECKPOINTS, MOST_CHARTS = 200, 24
READ = 32 << 20  # bytes of results that a page reads, the newest first


class TinkerSource(Source):
    """The dashboard's source of a Tinker server; ValueError if its records cannot be read."""

    noun, status_noun, step_noun, can_compare = "run", "stop reason", "request", False
    has_answers = has_machines = False
    filters = frozenset[str]()

    def __init__(self, folder: Path) -> None:
        self._file, self.title = folder / RECORDS, visible_text(folder.resolve().name, 100)
        try:
            self._count()
        except sqlite3.Error as error:
            raise ValueError(f"{self._file} is not the records of a Tinker server ({error})") from error

    def revision(self) -> object:
        return [size_and_mtime(self._file.with_name(f"{RECORDS}{end}")) for end in ("", "-wal")]

    def works(self, offset: int = 0, limit: int = PAGE) -> tuple[list[Work], int]:
        return list(self._read_works("1", limit, offset)), self._count()

    def work(self, work: str) -> Work | None:
        return next(self._read_works("id = ?", work, 1, 0), None)

    def _count(self) -> int:
        return self._fetch(f"SELECT count(*) n FROM models WHERE {KEPT}")[0]["n"]

    def _read_works(self, rule: str, *values: Any) -> Iterator[Work]:
        """The training runs that the rule chooses, the newest first."""
        rows = self._fetch(
            "SELECT m.*, s.finished, s.heartbeat, (SELECT count(*) FROM checkpoints c WHERE c.run = m.id AND "
            "NOT c.deleted) saved, (SELECT max(seq) FROM (SELECT seq FROM log l WHERE l.model = m.id UNION ALL SELECT "
            "m.snapshot_seq)) last FROM (SELECT * FROM models WHERE "
            f"{KEPT} AND {rule} ORDER BY created DESC, id LIMIT ? OFFSET ?) m LEFT JOIN sessions s ON s.id = m.session "
            "ORDER BY m.created DESC, m.id",
            *values,
        )
        for row in rows:
            is_live = row["finished"] is None and time.time() - (row["heartbeat"] or 0) < ALIVE_S
            id, status = visible_text(row["id"], 200), "running" if is_live else "stopped"
            figures = {"requests": f"{row['last'] or 0:,}", "checkpoints": f"{row['saved']:,}"}
            figures |= {"API key": one_line(row["owner"], 60)} if row["owner"] else {}
            yield Work(id, id, "finished" if row["finished"] is not None else status, is_live,
                       about=f"{one_line(row['base_model'], 100)}, rank {row['rank']}",
                       changed=row["last_request"] or row["created"], figures=figures)  # fmt: skip

    def texts(self, work: str) -> list[tuple[str, str]]:
        """The checkpoints of a run, and what its client said of it."""
        rows = self._fetch("SELECT * FROM checkpoints WHERE run = ? AND NOT deleted ORDER BY created DESC LIMIT ?",
                           work, MOST_CHECKPOINTS)  # fmt: skip
        lines = [f"{row['kind']}/{row['name']}: after request {row['seq']}, {(row['size'] or 0) / 1e6:,.1f} MB, "
                 f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime(row['created']))} UTC" for row in rows]  # fmt: skip
        [about] = self._fetch("SELECT metadata FROM models WHERE id = ?", work) or [{"metadata": None}]
        given = {"Checkpoints": "\n".join(lines) or "none yet", "Metadata of the client": about["metadata"]}
        return [(title, visible_text(text)) for title, text in given.items() if text]

    def charts(self, work: str = "") -> list[Chart]:
        """A chart a metric, over the numbers of the requests."""
        rows = self._fetch(
            "SELECT seq, form, body FROM (SELECT *, sum(length(body)) OVER (ORDER BY seq DESC) read FROM results WHERE "
            "model = ? AND form != 'failed') WHERE read <= ? ORDER BY seq",
            work, READ,
        )  # fmt: skip
        points: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            for name, value in read_metrics(row["form"], row["body"]).items():
                if (number := finite_number(value)) is not None and one_line(name) == name:
                    points.setdefault(name, []).append((float(row["seq"]), number))
        hint = "of the requests whose results the server keeps"
        return [Chart(name, [Curve("", thin_points(found))], x="request", hint=hint, unit=name)
                for name, found in list(points.items())[:MOST_CHARTS]]  # fmt: skip

    def _fetch(self, query: str, *values: Any) -> list[sqlite3.Row]:
        with closing(sqlite3.connect(f"{self._file.absolute().as_uri()}?mode=ro", uri=True)) as db:
            db.row_factory = sqlite3.Row
            return db.execute(query, values).fetchall()


def read_metrics(form: str, body: bytes) -> Mapping[str, Any]:
    """The metrics of a stored result."""
    if form == "proto":
        return ForwardBackwardOutput.FromString(body).metrics
    return as_mapping(as_mapping(json.loads(body)).get("metrics"))
