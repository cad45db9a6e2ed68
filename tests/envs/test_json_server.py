"""Servers that answer JSON: the limits hold for every kind, and what they fail at is an error with a reason."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rlvr.envs.ecosystems.json_server import MAX_BYTES, HttpStatusError, JsonServer
from rlvr.envs.limited_calls import EpisodeError
from rlvr.envs.registry import resolve_environment


class Nonsense(BaseHTTPRequestHandler):
    """Answers by the first word of the path."""

    def do_GET(self) -> None:
        word = self.path.split("/")[1]
        if word == "moved":
            self.send_response(307)
            self.send_header("Location", "http://127.0.0.1:9/elsewhere")
            self.end_headers()
            return
        if word == "status":
            self.wfile.write(b"NONSENSE\r\n\r\n")
            return
        self.send_response(500 if word == "broken" else 404 if word == "missing" else 200)
        if word == "cookie":
            seen = self.headers.get("Cookie", "")
            self.send_header("Set-Cookie", "session=mine; path=/")
            self.end_headers()
            self.wfile.write(b"[%d]" % bool(seen))
            return
        self.end_headers()
        if word == "drip":
            for _ in range(100):
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(0.05)
        if word == "large":
            self.wfile.write(b'"' + b"x" * MAX_BYTES)
        texts = {"nan": "[NaN]", "deep": "[" * 100_000, "broken": "why it broke", "cut": '{"a": '}
        self.wfile.write(texts.get(word, "{}").encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *_: Any) -> None:
        return

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:  # the client has gone
            self.close_connection = True


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Nonsense) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/moved", "redirects to http://127.0.0.1:9/elsewhere, which is not followed"),
        ("/status", "NONSENSE"),
        ("/broken", "500 .* why it broke"),
        ("/nan", "NaN, which is no number of JSON"),
        ("/deep", "nested too deep"),
        ("/cut", "no JSON"),
        ("/large", "more than 16 MB"),
        ("/drip", "no answer in time"),
    ],
)
def test_what_is_no_answer_is_an_error_that_says_why(url: str, path: str, words: str) -> None:
    server = JsonServer("kind", url, 0.5 if path == "/drip" else 20)
    for ask in (lambda: server.get(path), lambda: server.post(path, {"a": 1})):
        with pytest.raises(EpisodeError, match=f"kind: {url}{path}: .*{words}"):
            ask()


def test_a_status_has_its_number_and_sessions_their_own_cookies(url: str) -> None:
    server = JsonServer("kind", url.removeprefix("http://"), 20)
    with pytest.raises(HttpStatusError) as caught:
        server.get("/missing")
    assert caught.value.code == 404
    assert [server.get("/cookie"), server.get("/cookie")] == [[0], [1]]
    assert server.begin_session().get("/cookie") == [0]


@pytest.mark.parametrize("url", ["ftp://a", "http://", "file:///etc/passwd"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="no address of a server"):
        JsonServer("kind", url, 20)


def test_a_server_of_something_else_is_named(url: str) -> None:
    for name, options in ((f"nemo_gym:{url}", {"rows": "none.jsonl"}), (f"openenv:{url}", {})):
        with pytest.raises(ValueError, match=f"{name.partition(':')[0]}.*{url.partition('://')[2]}"):
            resolve_environment(name, **options)
