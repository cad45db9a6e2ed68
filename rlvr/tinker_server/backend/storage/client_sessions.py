"""The sessions of clients: made, kept alive by heartbeats, finished.

The SDK sends a heartbeat every 10 seconds; requesting samples or their results counts as one. The samples of a client
without heartbeats are cancelled (`sample_requests.py`), so that the others get the engine. Left out on purpose:
training, which is completed even if its client is gone.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from rlvr.tinker_server.backend.storage.server_store import Row, ServerStore
from rlvr.tinker_server.protocol.errors import GoneError, NotFound


class Heartbeats:
    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._lock = threading.Lock()
        self._last_beat: dict[str, float] = {}
        self._last_poll = clock()

    def record(self, session: str) -> None:
        with self._lock:
            self._last_beat[session] = self._clock()

    def remove(self, session: str) -> None:
        with self._lock:
            self._last_beat.pop(session, None)

    def live_sessions(self) -> set[str]:
        """Sessions with a heartbeat in the last `seconds`. Poll regularly: after a gap between polls nothing expires,
        since this server may have missed heartbeats."""
        with self._lock:
            now = self._clock()
            if now - self._last_poll > self._seconds / 2:
                self._last_beat = dict.fromkeys(self._last_beat, now)
            self._last_poll = now
            self._last_beat = {session: at for session, at in self._last_beat.items() if at > now - self._seconds}
            return set(self._last_beat)


class ClientSessions:
    def __init__(self, store: ServerStore, heartbeats: Heartbeats, clock: Callable[[], float]) -> None:
        self._store, self._heartbeats, self._clock = store, heartbeats, clock

    def create(
        self,
        owner: str,
        *,
        tags: list[str] | None = None,
        user_metadata: dict[str, Any] | None = None,
        sdk_version: str = "",
        project_id: str | None = None,
        display_name: str | None = None,
    ) -> str:
        session = uuid.uuid4().hex
        info = {
            "tags": tags or [], "user_metadata": user_metadata, "sdk_version": sdk_version, "project_id": project_id,
            "display_name": display_name,
        }  # fmt: skip
        self.insert(owner, session, **info)
        return session

    def insert(self, owner: str, session: str, **info: Any) -> None:
        now, fields = self._clock(), {"user_metadata": None, "project_id": None, "display_name": None, **info}
        row = {"id": session, "owner": owner, "created": now, "heartbeat": now, "info": json.dumps(fields)}
        self._store.insert("sessions", row)

    def set_project(self, owner: str, session_id: str, project_id: str) -> None:
        """Give a session another project. A project is a label: it exists where a session has it."""
        with self._store.transaction():
            row = self._store.fetch_one("SELECT info FROM sessions WHERE id = ? AND owner = ?", session_id, owner)
            if row is None:
                raise NotFound(f"session {session_id[:200]!r} is unknown")
            info = json.dumps({**json.loads(row["info"]), "project_id": project_id})
            self._store.execute("UPDATE sessions SET info = ? WHERE id = ?", info, session_id)

    def find(self, owner: str, session_id: str) -> Row:
        row = self._store.fetch_one("SELECT * FROM sessions WHERE id = ? AND owner = ?", session_id, owner)
        if row is None:
            raise GoneError(f"session {session_id[:200]!r} is unknown here; make a new ServiceClient")
        return row

    def heartbeat(self, owner: str, session_id: str) -> None:
        self.find(owner, session_id)
        self._heartbeats.record(session_id)
        self._store.execute("UPDATE sessions SET heartbeat = ? WHERE id = ?", self._clock(), session_id)

    def finish(self, owner: str, session_id: str, reason: str) -> None:
        self.find(owner, session_id)
        self._store.execute("UPDATE sessions SET finished = ? WHERE id = ?", reason[:1000], session_id)
        self._heartbeats.remove(session_id)
