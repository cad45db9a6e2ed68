"""`rlvr serve` in a process of its own, on a free port of this machine, for tests that talk to it as clients do.

    with RlvrService(tmp_path / "state", LLM_ENDPOINT=endpoint.plain_url) as service:
        service.post("/train", {"task_id": "t", "prompt": "2 + 2?"})

`kill` is what a power cut is; `start` begins again on the same port and state folder.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from tests.kit.server_process import ServerProcess
from tests.kit.text_endpoint import EndpointReply, EndpointRequest, serving

PATIENCE = 60.0  # seconds; two on a quiet core
OURS = re.compile(r"RLVR_|LLM_|JUDGE_|DATABASE_URL|PORT$|HOST$|LOG_LEVEL|RUST_LOG")  # of the environment of the tests


def wait_for(what: Callable[[], Any], seconds: float = 90.0) -> Any:
    """The first true value of `what()`; AssertionError after `seconds`."""
    until = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < until, "it did not come to pass"
        time.sleep(0.1)
    return found


SOLUTION = "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n"
WRONG = "def f(n):\n    return n + 1\n"


class RlvrService(ServerProcess):
    def __init__(self, state: Path, *options: str, dashboard: bool = False, keys: str = "", **environment: str) -> None:
        outer = {name: value for name, value in os.environ.items() if not OURS.match(name)}
        super().__init__(
            ["--state", str(state), *([] if dashboard else ["--no-dashboard"]), *options],
            {**outer, "OMP_NUM_THREADS": "1", "RLVR_API_KEYS": keys, **environment},
            r"listening at (http://[^\s\"]+)",
            PATIENCE,
        )
        self.state = state
        self._headers = {"authorization": f"Bearer {keys.split(',')[0]}"} if keys else {}

    def client(self, **options: Any) -> httpx2.Client:
        # Nothing here is encrypted; reading the certificates would take more time than most requests.
        options = {"timeout": 60, "trust_env": False, "verify": False, **options}
        return httpx2.Client(base_url=self.url, headers=self._headers, **options)

    def get(self, path: str, **options: Any) -> httpx2.Response:
        with self.client() as client:
            return client.get(path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx2.Response:
        with self.client() as client:
            return client.post(path, json=body, **options)

    def log_records(self) -> list[dict[str, Any]]:
        """What it wrote down, as JSON."""
        return [json.loads(line) for line in self.said.splitlines() if line.startswith("{")]


def script(asked: EndpointRequest) -> str | EndpointReply:
    """The reply of the model behind the endpoint, by a word of the task."""
    prompt = asked.prompt
    if "forever" in prompt:
        return EndpointReply("Too late.", delay=60.0)
    if "slowly" in prompt:
        return EndpointReply("It took me a while, and here it is.", delay=1.0)
    if "refuse" in prompt:
        return EndpointReply("", status=400)
    if "144" in prompt or "12 * 12" in prompt:
        return "It is \\boxed{144}."
    if "badly" in prompt:
        return "no"
    if "sketchily" in prompt:
        return WRONG
    return SOLUTION


@contextmanager
def scripted_service(state: Path, *options: str, **environment: str) -> Iterator[RlvrService]:
    """A service with the scripted model that logs as JSON."""
    with (
        serving(script) as endpoint,
        RlvrService(state, "--log-format", "json", *options, LLM_ENDPOINT=endpoint.plain_url, **environment) as running,
    ):
        yield running
