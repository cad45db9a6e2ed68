"""`rlvr view PATH`: the dashboard of a run, a folder of runs, a recording or a Tinker server's state folder, on this
machine. Read-only and live."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fastapi import FastAPI

from rlvr.service.dashboard.dashboard_app import attach
from rlvr.service.dashboard.recording_source import RecordingSource
from rlvr.service.dashboard.run_source import RunSource
from rlvr.service.dashboard.tinker_source import TinkerSource
from rlvr.tinker_server.backend.storage.server_store import RECORDS
from rlvr.web.server import bind_socket, is_loopback, run_server, server_url


def view(path: Path, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. ValueError unless `host` is a loopback name."""
    if not is_loopback(host):
        raise ValueError(
            f"--host {host} can be reached from other machines, and the dashboard of a run has no keys; expected "
            "127.0.0.1 or localhost. From elsewhere forward the port: ssh -L 3036:127.0.0.1:3036 this-machine"
        )
    opened = RecordingSource if path.is_file() else TinkerSource if (path / RECORDS).is_file() else RunSource
    source = opened(path)
    with bind_socket(host, port) as listening:
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        dashboard = attach(app, source)

        def on_start() -> None:
            say(f"{source.title} at {server_url(listening)} (Ctrl-C stops)")

        run_server(app, listening, on_ready=on_start, on_stop=dashboard.stop, ws="none", timeout_graceful_shutdown=2)
