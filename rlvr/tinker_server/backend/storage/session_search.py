"""A search of an owner's sessions, newest first, in the form that the SDK reads (`RestClient.search_sessions`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from rlvr.tinker_server.backend.storage.checkpoints import ALIVE
from rlvr.tinker_server.backend.storage.queries import iso_time, metadata_texts
from rlvr.tinker_server.backend.storage.server_store import Row, ServerStore

ROWS = 500  # read at a time: a reader keeps the others waiting
MICROSECONDS = 1_000_000
OWNER_URN = "urn:rlvr:owner:"


@dataclass(frozen=True)
class SessionFilter:
    """What a session must be. It matches by `session_id` or by the words of its `display_name` where both are given.

    `statuses`: active or client_finished, with the reasons that match, None for any. `after`: when the last session of
    the previous page was made, in microseconds, and its id.
    """

    session_id: str | None = None
    display_name: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = field(default_factory=dict[str, str])
    owner_urns: list[str] | None = None
    statuses: Sequence[tuple[str, Sequence[str] | None]] | None = None
    limit: int = 50
    after: tuple[int, str] | None = None

    def matches(self, row: Row, info: dict[str, Any], status: tuple[str, str] | None) -> bool:
        """Whether a session's record matches, but for the place after which the page begins."""
        if self.session_id is not None or self.display_name is not None:
            name, words = (info["display_name"] or "").casefold(), (self.display_name or "").casefold().split()
            is_named = self.display_name is not None and bool(words) and all(word in name for word in words)
            if row["id"] != self.session_id and not is_named:
                return False
        if self.project_ids is not None and info["project_id"] not in self.project_ids:
            return False
        metadata = {key: str(value) for key, value in (info["user_metadata"] or {}).items()}
        if any(metadata.get(key) != value for key, value in self.user_metadata.items()):
            return False
        if self.owner_urns is not None and OWNER_URN + row["owner"] not in self.owner_urns:
            return False
        if self.statuses is None:
            return True
        kind, reason = status or ("", "")
        return any(wanted == kind and (reasons is None or reason in reasons) for wanted, reasons in self.statuses)


class SessionSearch:
    def __init__(self, store: ServerStore, live_seconds: float, clock: Callable[[], float]) -> None:
        self._store, self._live_seconds, self._clock = store, live_seconds, clock

    def search(self, owner: str, wanted: SessionFilter) -> dict[str, Any]:
        """One page, and where the next one begins."""
        found: list[dict[str, Any]] = []
        last = (0, "")
        for row in self._newest_first(owner, wanted.after):
            info, status = json.loads(row["info"]), self._status(row)
            if not wanted.matches(row, info, status):
                continue
            if len(found) == wanted.limit:
                return {"sessions": found, "next_cursor": _describe_cursor(*last)}
            found.append(self._describe(row, info, status))
            last = _place(row)
        return {"sessions": found, "next_cursor": None}

    def _newest_first(self, owner: str, after: tuple[int, str] | None) -> Iterator[Row]:
        latest, seen = (after[0] + 1) / MICROSECONDS if after else self._clock() + 1e9, after
        while True:
            rows = self._store.fetch_all(
                "SELECT * FROM sessions WHERE owner = ? AND created <= ? ORDER BY created DESC, id DESC LIMIT ?",
                owner,
                latest,
                ROWS,
            )
            new = [row for row in rows if seen is None or _place(row) < seen]
            yield from new
            if len(rows) < ROWS or not new:
                return
            seen, latest = _place(new[-1]), rows[-1]["created"]

    def _status(self, row: Row) -> tuple[str, str] | None:
        """The status and, of a finished session, the reason; None for a session that is not known to run."""
        if row["finished"] is not None:
            return "client_finished", row["finished"]
        return ("active", "") if row["heartbeat"] > self._clock() - self._live_seconds else None

    def _describe(self, row: Row, info: dict[str, Any], status: tuple[str, str] | None) -> dict[str, Any]:
        [saved] = self._store.fetch_all(
            f"SELECT count(*) AS n, coalesce(sum(size), 0) AS size FROM checkpoints WHERE {ALIVE} AND run IN "
            "(SELECT id FROM models WHERE session = ?)",
            self._clock(),
            row["id"],
        )
        described: dict[str, Any] | None = {"type": status[0]} if status else None
        if status and status[0] == "client_finished":
            described = {"type": status[0], "reason": {"type": status[1]}, "detail": None}
        return {
            "session_id": row["id"], "created_at": iso_time(row["created"]), "owner": row["owner"],
            "project_id": info["project_id"] or "", "status": described, "checkpoints_count": saved["n"],
            "display_name": info["display_name"], "checkpoint_storage_bytes": saved["size"],
            "user_metadata": metadata_texts(json.dumps(info["user_metadata"]) if info["user_metadata"] else None),
        }  # fmt: skip

    def storage(self, owner: str, project: str | None = None) -> dict[str, Any]:
        """What an owner's checkpoints take, by project; nothing is charged, so it has no prices."""
        rows = self._store.fetch_all(
            f"SELECT json_extract(s.info, '$.project_id') AS project, count(*) AS n, sum(c.size) AS size "
            f"FROM checkpoints c JOIN models m ON m.id = c.run JOIN sessions s ON s.id = m.session "
            f"WHERE c.owner = ? AND {ALIVE} GROUP BY project ORDER BY size DESC",
            owner,
            self._clock(),
        )
        return {
            "data": [
                {
                    "project_id": row["project"], "org_user_urn": OWNER_URN + owner, "checkpoint_count": row["n"],
                    "size_bytes": row["size"], "size_gigabytes": row["size"] / 1e9,
                }
                for row in rows
                if project in (None, row["project"])
            ]
        }  # fmt: skip


def _place(row: Row) -> tuple[int, str]:
    """By which sessions are ordered: a client's cursor has whole microseconds."""
    return round(row["created"] * MICROSECONDS), row["id"]


def _describe_cursor(created: int, session: str) -> dict[str, str]:
    seconds, rest = divmod(created, MICROSECONDS)
    at = datetime.fromtimestamp(seconds, UTC).replace(microsecond=rest)
    return {"last_created_at": at.isoformat(), "last_session_id": session}


def read_cursor(created: datetime, session: str) -> tuple[int, str]:
    """The place of a client's cursor, as `_place` gives it for a session."""
    seconds = int(created.replace(microsecond=0).timestamp())
    return seconds * MICROSECONDS + created.microsecond, session
