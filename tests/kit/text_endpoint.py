"""A scripted text endpoint on this machine: a real HTTP server whose answers a test writes.

    with serving(lambda asked: "4" if "2 + 2" in asked.prompt else EndpointReply("", status=500)) as server:
        ...  # server.plain_url is a plain `/generate`, server.chat_url the base of an OpenAI-compatible API

Both dialects are there at once. The script's return value is sent: a text as a good reply in the dialect of the
request, an `EndpointReply` with its status, headers, delay, slowness or broken connection. `server.asked` is every
request, in order.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


@dataclass(frozen=True)
class EndpointRequest:
    """One request. `prompt` is the plain prompt, or the contents of the messages; `number` counts from 0."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    number: int
    at: float

    @property
    def chat(self) -> bool:
        return self.path.endswith("/chat/completions")

    @property
    def prompt(self) -> str:
        if not self.chat:
            return self.body["prompt"]
        return "\n\n".join(message["content"] for message in self.body["messages"])


@dataclass(frozen=True)
class EndpointReply:
    """What goes out. `raw` takes the place of the reply's JSON; `drip` is seconds between two bytes of it.

    `close` breaks the connection: "before" the status line, or "within" the body. `field` is where the plain dialect
    has its text. Without `usage` no tokens are counted.
    """

    text: str = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict[str, str])
    raw: str | None = None
    delay: float = 0.0
    drip: float = 0.0
    close: str = ""
    field: str = "text"
    finish: str | None = "stop"
    usage: tuple[int, int] | None = (10, 5)

    def content(self, chat: bool) -> bytes:
        if self.raw is not None:
            return self.raw.encode()
        reply: dict[str, Any] = {self.field: self.text}
        if chat:
            message = {"role": "assistant", "content": self.text}
            reply = {"choices": [{"index": 0, "message": message, "finish_reason": self.finish}]}
        elif self.finish == "length":
            reply["finish_reason"] = "length"
        if self.usage:
            reply["usage"] = dict(zip(("prompt_tokens", "completion_tokens"), self.usage, strict=True))
        return json.dumps(reply).encode()


Script = Callable[[EndpointRequest], str | EndpointReply]


class TextEndpoint(ThreadingHTTPServer):
    """The server; `script` may be changed while it runs. Not to be made by hand: `serving`."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, script: Script, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.script = script
        self.asked: list[EndpointRequest] = []
        self.at_once = self.max_concurrent = 0
        self.lock = threading.Lock()
        self.ending = threading.Event()
        self.port = self.server_address[1]
        self.plain_url = f"http://127.0.0.1:{self.port}/generate"
        self.chat_url = f"http://127.0.0.1:{self.port}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that gave up


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: TextEndpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server = self.server
        with server.lock:
            asked = EndpointRequest(self.path, dict(self.headers.items()), body, len(server.asked), time.monotonic())
            server.asked.append(asked)
            server.at_once += 1
            server.max_concurrent = max(server.max_concurrent, server.at_once)
        try:
            said = server.script(asked)
            said = EndpointReply(said) if isinstance(said, str) else said
            self._send(said, said.content(asked.chat))
        finally:
            with server.lock:
                server.at_once -= 1

    def _send(self, said: EndpointReply, content: bytes) -> None:
        if said.delay:
            self.server.ending.wait(said.delay)
        if said.close == "before":
            self.close_connection = True
            return
        self.send_response(said.status)
        for name, value in {"content-type": "application/json", **said.headers}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        if said.close == "within":
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
        elif said.drip:
            for i in range(len(content)):
                self.wfile.write(content[i : i + 1])
                if self.server.ending.wait(said.drip):
                    return
        else:
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def serving(script: Script, port: int = 0) -> Iterator[TextEndpoint]:
    """A running endpoint, until the block ends; what it is still saying is cut off."""
    server = TextEndpoint(script, port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("NO_PROXY", "127.0.0.1")
            yield server
    finally:
        server.ending.set()
        server.shutdown()
        server.server_close()
        thread.join(5)


def unused_port() -> int:
    """A port of this machine without a listener."""
    with TextEndpoint(lambda asked: "") as server:
        return server.port
