"""The recorder on a port of this machine, on a thread of its own, for the rollouts of a run."""

from __future__ import annotations

import weakref

from rlvr.recorder.open_rollouts import OpenRollout, OpenRollouts
from rlvr.web.server import BackgroundServer, bind_socket, server_url


class LocalRecorder:
    """Listens on the loopback interface from its first rollout on, until it is no longer used."""

    def __init__(self, model: str = "policy") -> None:
        self.rollouts = OpenRollouts()
        self._model = model
        self._url = ""

    def address(self, rollout: OpenRollout) -> str:
        """The base address of a rollout, without `/v1`."""
        if not self._url:
            self._start()
        return f"{self._url}/r/{rollout.token}"

    def _start(self) -> None:
        try:
            from rlvr.recorder.app import make_app

            listening = bind_socket("127.0.0.1", 0)
            server = BackgroundServer(make_app(self.rollouts, self._model), listening)
        except ImportError as error:
            raise ValueError(
                f"recording the calls of an agent needs a web server, which is not installed ({error}); "
                'pip install "rlvr[serve]"'
            ) from error
        server.__enter__()
        self._url = server_url(listening)
        weakref.finalize(self, server.stop, at_once=True)
