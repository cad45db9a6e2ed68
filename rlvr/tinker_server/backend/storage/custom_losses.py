"""Custom losses of clients: their graphs as they were sent, by session.

A loss is on disk before its id is returned, because the log of a run names it. Those of finished sessions, and of
sessions without a heartbeat for a week, are deleted once no log needs them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from rlvr.algorithms.loss_graph import LossGraph, read_loss_graph
from rlvr.tinker_server.backend.storage.client_sessions import ClientSessions
from rlvr.tinker_server.backend.storage.server_store import ServerStore
from rlvr.tinker_server.protocol.errors import NotFound, UserError
from rlvr.tinker_server.protocol.server_limits import ServerLimits

KEEP_SECONDS = 7 * 86_400.0


class CustomLosses:
    def __init__(
        self, store: ServerStore, sessions: ClientSessions, limits: ServerLimits, clock: Callable[[], float]
    ) -> None:
        self._store, self._sessions, self._limits, self._clock = store, sessions, limits, clock

    def create(self, owner: str, session_id: str, seq_id: int, name: str, inputs: Any, graph: Any) -> str:
        """Check and store a loss; returns its id, which is that of the request too."""
        self._sessions.find(owner, session_id)
        try:
            read_loss_graph(name, inputs, graph)
        except ValueError as error:
            raise UserError(str(error)) from None
        loss, body = f"{session_id}:loss:{seq_id}", json.dumps([name, inputs, graph])
        with self._store.transaction():
            existing = self._store.fetch_one("SELECT body FROM custom_losses WHERE id = ?", loss)
            if existing is not None:
                if existing["body"] != body:
                    raise UserError(
                        f"custom_loss_seq_id {seq_id} names another loss of this session already; give the next number"
                    )
                return loss
            query = "SELECT coalesce(sum(length(body)), 0) AS size FROM custom_losses WHERE owner = ?"
            held = self._store.fetch_all(query, owner)[0]["size"]
            if held + len(body) > self._limits.owner_loss_bytes:
                raise UserError(
                    f"your custom losses take {held:,} bytes, expected at most {self._limits.owner_loss_bytes:,} "
                    "with this one (limits.owner_loss_bytes); close clients whose losses you do not need any more"
                )
            row = {"id": loss, "session": session_id, "owner": owner, "body": body, "created": self._clock()}
            self._store.insert("custom_losses", row)
        return loss

    def read(self, session_id: str, loss_id: str) -> LossGraph:
        """A loss of this session; NotFound for any other one."""
        row = self._store.fetch_one("SELECT body FROM custom_losses WHERE id = ? AND session = ?", loss_id, session_id)
        if row is None:
            raise NotFound(
                f"custom loss {loss_id[:200]!r} is unknown in this session; a loss of ServiceClient.create_custom_loss "
                "belongs to the session that made it"
            )
        return read_loss_graph(*json.loads(row["body"]))

    def is_owned(self, owner: str, loss_id: str) -> bool:
        return (
            self._store.fetch_one("SELECT 1 FROM custom_losses WHERE id = ? AND owner = ?", loss_id, owner) is not None
        )

    def sweep(self) -> None:
        """Delete the losses that nothing needs any more."""
        self._store.execute(
            "DELETE FROM custom_losses WHERE session IN (SELECT id FROM sessions WHERE finished IS NOT NULL OR "
            "heartbeat < ?) AND session NOT IN (SELECT m.session FROM models m JOIN log l ON l.model = m.id)",
            self._clock() - KEEP_SECONDS,
        )
