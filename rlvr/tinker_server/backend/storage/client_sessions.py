"""The sessions of clients: made, kept alive by heartbeats, finished.

Exercised by tests/test_tinker_backend_sampling.py and tests/test_tinker_backend_tenants.py.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any

from rlvr.tinker_server.backend.sampling.heartbeats import Heartbeats
from rlvr.tinker_server.backend.storage.server_store import Row, ServerStore
from rlvr.tinker_server.protocol.errors import GoneError


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
        session, now = uuid.uuid4().hex, self._clock()
        info = {
            "tags": tags or [], "user_metadata": user_metadata, "sdk_version": sdk_version, "project_id": project_id,
            "display_name": display_name,
        }  # fmt: skip
        row = {"id": session, "owner": owner, "created": now, "heartbeat": now, "info": json.dumps(info)}
        self._store.insert("sessions", row)
        return session

    def find(self, owner: str, session_id: str) -> Row:
        row = self._store.one("SELECT * FROM sessions WHERE id = ? AND owner = ?", session_id, owner)
        if row is None:
            raise GoneError(f"session {session_id[:200]!r} is unknown here; make a new ServiceClient")
        return row

    def heartbeat(self, owner: str, session_id: str) -> None:
        self.find(owner, session_id)
        self._heartbeats.record(session_id)
        self._store.run("UPDATE sessions SET heartbeat = ? WHERE id = ?", self._clock(), session_id)

    def finish(self, owner: str, session_id: str, reason: str) -> None:
        self.find(owner, session_id)
        self._store.run("UPDATE sessions SET finished = ? WHERE id = ?", reason[:1000], session_id)
        self._heartbeats.remove(session_id)
