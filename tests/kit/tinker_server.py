"""A real server in a process of its own, on a free port of this machine, for tests that talk to it as clients do.

    with TinkerServer({"Qwen/Qwen3-8B": folder}, tmp_path / "state") as server:
        client = tinker.ServiceClient(base_url=server.url, api_key=server.key)

`kill` is what a power cut is; `start` begins again on the same port and state folder.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.kit.server_process import ServerProcess

os.environ.setdefault("TINKER_TELEMETRY", "0")  # of the SDK in this process: not wanted in tests
PATIENCE = 90.0  # seconds; importing torch takes a few on a busy machine


class TinkerServer(ServerProcess):
    def __init__(self, models: Mapping[str, Path], state: Path, *options: str, keys: str = "") -> None:
        self.state, self.key = state, keys.split(",")[0] or "tml-no-key-needed"
        super().__init__(
            [
                "engine",
                *(part for name, folder in models.items() for part in ("--model", f"{name}={folder}")),
                *("--state", str(state), "engine.threads=1", *options),
            ],
            {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RLVR_API_KEYS": keys},
            r"TINKER_BASE_URL=(http://\S+)",
            PATIENCE,
        )

    def saved(self, path: str) -> str:
        """The folder of a state that was saved at `path` (tinker://run/weights/name), for the engine in process."""
        [folder] = (self.state / "runs" / path.removeprefix("tinker://").replace(":", ".")).iterdir()
        return str(folder)

    def log(self) -> str:
        return (self.state / "server.log").read_text(encoding="utf-8")


def aborted_at_exit(done: subprocess.CompletedProcess[str]) -> bool:
    """Whether a program that uses the SDK, run with `-X faulthandler`, aborted when all of its Python was over.

    A program that ends as soon as it has its last answer may: the thread of the SDK's transport (pyqwest: Rust) that
    passed this answer on then asks for the GIL of an interpreter that is being finalized, and CPython before 3.14 ends
    such a thread by `pthread_exit`, which cannot unwind Rust's frames and aborts. On a busy machine that is one run in
    thirty; what our own programs do about it is `rlvr.clients.tinker_sdk.end_session`. Whether the work was done is for
    the caller.
    """
    told = "Fatal Python error: Aborted" in done.stderr and "<no Python frame>" in done.stderr
    return done.returncode == -signal.SIGABRT and told and "most recent call first):\n  File" not in done.stderr


@contextmanager
def serving(app: Any) -> Iterator[int]:
    """An application on a free port of this machine, on a thread of this process; its port."""
    import uvicorn

    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)
        listening.close()
