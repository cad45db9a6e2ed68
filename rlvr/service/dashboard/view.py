"""`rlvr view RUNDIR`: the dashboard of a run, or of a folder of runs, on this machine. Read-only, live while it trains.

Exercised by tests/test_dashboard_mount.py and, in a browser, by tests/test_dashboard_browser.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rlvr.service.dashboard.runs import RunSource
from rlvr.service.listening import bound, is_loopback, server_class, url_of

EXTRA = 'pip install "rlvr[serve]"'


def view(folder: Path, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. `host` is one of this machine's own names; a ValueError otherwise."""
    try:
        import nicegui  # noqa: F401 - say it is missing before a port is taken
        import uvicorn
        from fastapi import FastAPI

        from rlvr.service.dashboard.mount import attach
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; the dashboard needs an extra: {EXTRA}") from error

    if not is_loopback(host):
        raise ValueError(
            f"--host {host} can be reached from other machines, and whoever sees a run sees its data; expected "
            "127.0.0.1 or localhost. To look from elsewhere forward the port: ssh -L 3036:127.0.0.1:3036 this-machine"
        )
    source = RunSource(folder)
    with bound(host, port) as listening:
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        attach(app, source)
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2)

        def begun() -> None:
            say(f"{source.title} at {url_of(listening)} (Ctrl-C stops)")

        server_class(uvicorn)(config, begun, lambda: None).run(sockets=[listening])
