"""The Tinker server's records are not written into a file that a restart would not find."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")
from rlvr.tinker_server.backend.storage.server_store import ServerStore
from rlvr.tinker_server.protocol.errors import ServerError


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_file_that_was_moved_away_is_named_and_works_again_when_it_is_back(tmp_path: Path, is_replaced: bool):
    path, aside = tmp_path / "server.sqlite", tmp_path / "aside.sqlite"
    with closing(ServerStore(path)) as store:
        store.insert("deleted_runs", {"id": "a"})
        path.rename(aside)
        if is_replaced:
            path.write_bytes(b"")
        with pytest.raises(ServerError, match="moved away or replaced"):
            store.insert("deleted_runs", {"id": "lost"})
        aside.rename(path)
        store.insert("deleted_runs", {"id": "b"})
        assert [row["id"] for row in store.fetch_all("SELECT id FROM deleted_runs ORDER BY id")] == ["a", "b"]
