"""The recorder on this machine, on a thread of its own, for the rollouts of a run."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref

from rlvr.recorder.open_rollouts import OpenRollout, OpenRollouts


class LocalRecorder:
    """Listens from its first rollout on, until it is no longer used: on the loopback interface, or, if programs see it
    at the address `seen_at`, on a Unix socket in a private folder, to which something else passes their calls on."""

    def __init__(self, model: str = "policy", seen_at: str = "") -> None:
        self.rollouts = OpenRollouts()
        self.socket_path = ""
        self._model, self._seen_at = model, seen_at
        self._url = ""

    def address(self, rollout: OpenRollout) -> str:
        """The base address of a rollout, without `/v1`."""
        if not self._url:
            self._start()
        return f"{self._url}/r/{rollout.token}"

    def _start(self) -> None:
        try:
            from rlvr.recorder.app import make_app
            from rlvr.web.server import BackgroundServer, bind_socket, bind_unix_socket, server_url

            app = make_app(self.rollouts, self._model)
            if self._seen_at:
                folder = tempfile.mkdtemp(prefix="rlvr-recorder-")  # mode 0700
                weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
                self.socket_path = os.path.join(folder, "calls")
                listening = bind_unix_socket(self.socket_path)
                server = BackgroundServer(app, listening, loop="asyncio")  # uvloop takes no Unix socket here
            else:
                listening = bind_socket("127.0.0.1", 0)
                server = BackgroundServer(app, listening)
        except ImportError as error:
            raise ValueError(
                f"recording the calls of an agent needs a web server, which is not installed ({error}); "
                'pip install "rlvr[serve]"'
            ) from error
        server.__enter__()
        self._url = self._seen_at or server_url(listening)
        weakref.finalize(self, server.stop, at_once=True)
