"""Access to the dashboard: its own addresses only, no other origin, and with API keys only with a key."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from fastapi import FastAPI

from rlvr.service.dashboard.dashboard_app import (
    PAGES,
    PAGES_PER_MINUTE,
    PAGES_SHARE,
    Dashboard,
    attach,
    is_dashboard,
)
from rlvr.service.dashboard.dashboard_data import OWNER
from rlvr.service.dashboard.run_source import RunSource
from rlvr.service.dashboard.sign_in import COOKIE, SECONDS, SignIn, local
from tests.kit.dashboard_fixtures import make_run

KEYS = {"tml-right": "owner-1"}


@pytest.fixture
def app(tmp_path: Path) -> FastAPI:
    found = FastAPI(docs_url=None, redoc_url=None)

    @found.post("/train")
    def train() -> str:
        return "trained"

    attach(found, RunSource(make_run(tmp_path / "run")))
    return found


def ask(
    app: Any, path: str, method: str = "GET", headers: dict[str, str] | None = None, body: bytes = b"", query: str = ""
) -> tuple[int, dict[str, str], str]:
    """Send one ASGI request."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    given = {"host": "127.0.0.1:1", **(headers or {})}
    scope = {
        "type": "http", "method": method, "path": path, "query_string": query.encode(), "scheme": "http",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()], "server": ("127.0.0.1", 1),
        "client": ("127.0.0.1", 2), "root_path": "", "http_version": "1.1",
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    answered = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], answered, b"".join(message.get("body", b"") for message in sent[1:]).decode()


@pytest.mark.parametrize(
    ("path", "ours"),
    [
        ("/", True), ("/ui", True), ("/ui/run/x", True), ("/_nicegui/3/static/a.js", True), ("/favicon.ico", True),
        ("/_nicegui_ws/socket.io/", True), ("/train", False), ("/uix", False), ("/nope", False), ("//ui/", False),
        ("/experiences/ui/", False),
    ],
)  # fmt: skip
def test_the_dashboard_has_these_addresses(path: str, ours: bool):
    assert is_dashboard(path) is ours


def test_unknown_addresses_and_wrong_methods_stay_the_applications(app: FastAPI):
    assert ask(app, "/nope")[::2] == (404, '{"detail":"Not Found"}')
    assert ask(app, "/train")[0] == 405
    assert ask(app, "/train", "POST")[::2] == (200, '"trained"')


@pytest.mark.parametrize(
    "headers",
    [{"host": "evil.example"}, {"host": "127.0.0.1.evil.example"}, {"host": ""}, {"origin": "http://evil.example"},
     {"origin": "http://127.0.0.1:2"}, {"origin": "null"}, {"host": "[::1"}],
)  # fmt: skip
def test_other_host_names_and_origins_are_refused(app: FastAPI, headers: dict[str, str]):
    assert ask(app, "/", headers=headers)[0] == 403


@pytest.mark.parametrize("origin", ["http://evil.example", "http://127.0.0.1:2"])
def test_a_websocket_of_another_origin_is_closed(app: FastAPI, origin: str):
    """NiceGUI would accept it, and a page of any site could then read the data."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"127.0.0.1:1"), (b"origin", origin.encode())]
    scope = {"type": "websocket", "path": "/_nicegui_ws/socket.io/", "headers": headers, "query_string": b""}
    asyncio.run(app({**scope, "root_path": "", "scheme": "ws", "subprotocols": []}, receive, send))
    assert [(message["type"], message["code"]) for message in sent] == [("websocket.close", 1008)]


@pytest.fixture
def dashboard_with_keys(tmp_path: Path) -> Dashboard:
    return Dashboard(RunSource(make_run(tmp_path / "locked")), KEYS.get, loopback_only=False)


def enter(dashboard_with_keys: Dashboard, key: str, wanted: str = "/") -> tuple[int, dict[str, str], str]:
    body = urlencode({"key": key, "next": wanted}).encode()
    return ask(dashboard_with_keys, SignIn.path, "POST", body=body)


@pytest.mark.parametrize("path", ["/", "/ui/trajectories", "/ui/trajectory/first:1:1"])
def test_without_a_cookie_a_page_is_the_form_without_data(dashboard_with_keys: Dashboard, path: str):
    status, headers, text = ask(dashboard_with_keys, path, query="task=a%22b")
    assert status == 401 and "API key of this service" in text and "locked" not in text
    assert f'value="{path}?task=a%22b"' in text
    assert "script-src" not in headers["content-security-policy"]  # default-src 'none': no script at all
    assert headers["cache-control"] == "no-store"


@pytest.mark.parametrize("path", ["/_nicegui/3.0/static/x.js", "/_nicegui_ws/socket.io/", "/ui/assets/style.css"])
def test_without_a_cookie_nothing_else_is_answered(dashboard_with_keys: Dashboard, path: str):
    assert ask(dashboard_with_keys, path)[0] in (401, 403)


def test_a_key_is_exchanged_for_a_cookie_that_scripts_and_other_sites_cannot_use(dashboard_with_keys: Dashboard):
    status, headers, _ = enter(dashboard_with_keys, "tml-right", "/ui/trajectories?task=a")
    assert (status, headers["location"]) == (303, "/ui/trajectories?task=a")
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and "tml-right" not in cookie
    value = cookie.split(";")[0]
    assert dashboard_with_keys.sign_in is not None
    assert dashboard_with_keys.sign_in.owner({"headers": [(b"cookie", f"other=1; {value}".encode())]}) == "owner-1"
    assert dashboard_with_keys.sign_in.owner({"headers": [(b"cookie", f"{value}x".encode())]}) is None


@pytest.mark.parametrize("key", ["", "tml-wrong", "x" * 5000])
def test_a_wrong_key_is_refused(dashboard_with_keys: Dashboard, key: str):
    status, headers, text = enter(dashboard_with_keys, key)
    assert status in (401, 413) and "set-cookie" not in headers and 'role="alert"' in text


def test_a_cookie_ends_after_half_a_day():
    now = [0.0]
    sign_in = SignIn(KEYS.get, clock=lambda: now[0])
    answered = ask(sign_in, SignIn.path, "POST", body=b"key=tml-right")[1]["set-cookie"].split(";")[0]
    headers = {"headers": [(b"cookie", answered.encode())]}
    now[0] = SECONDS - 1
    assert sign_in.owner(headers) == "owner-1"
    now[0] = SECONDS + 1
    assert sign_in.owner(headers) is None
    assert COOKIE in answered


@pytest.mark.parametrize("wanted", ["http://evil", "//evil", "/\\evil", "javascript:x", "", "/a\r\nSet-Cookie: x"])
def test_signing_in_redirects_to_the_dashboard_only(dashboard_with_keys: Dashboard, wanted: str):
    assert enter(dashboard_with_keys, "tml-right", wanted)[1]["location"] == "/" == local(wanted)


def test_an_address_cannot_break_out_of_the_form(dashboard_with_keys: Dashboard):
    text = ask(dashboard_with_keys, '/ui/"><script>alert(1)</script>', query='x="><script>')[2]
    assert "<script" not in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["{runs}/nothing"], "is not a folder"),
        (["{runs}/run/rollouts"], "holds no run"),
        (["{runs}", "--host", "0.0.0.0"], "can be reached from other machines"),
        (["{runs}", "--host", "somewhere"], "expected an IP address of this machine"),
        (["{runs}", "--port", "70000"], "cannot listen on 127.0.0.1:70000"),
    ],
)
def test_a_mistake_at_rlvr_view_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
):
    from rlvr.cli.main import run

    make_run(tmp_path / "run")
    assert run(["view", *(option.format(runs=tmp_path) for option in options)]) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


def read_pages(dashboard: Dashboard, inner: Any, keys: list[str], path: str = "/") -> list[int]:
    """The statuses of as many requests at once, each of a user who is signed in, from an application `inner`."""
    assert dashboard.sign_in is not None
    dashboard._inner, statuses = inner, list[int]()
    dashboard.sign_in.owner = lambda scope: dict(scope["headers"])[b"cookie"].decode()

    async def run() -> None:
        async def get(key: str) -> None:
            async def send(message: Any) -> None:
                if message["type"] == "http.response.start":
                    statuses.append(message["status"])
                elif key.startswith("slow"):
                    await asyncio.sleep(0.2)

            receive: Any = asyncio.Event().wait
            headers = [(b"host", b"127.0.0.1"), (b"cookie", key.encode())]
            await dashboard({"type": "http", "path": path, "headers": headers}, receive, send)

        await asyncio.gather(*map(get, keys))

    asyncio.run(run())
    return statuses


def test_pages_of_one_user_are_drawn_one_after_the_other_and_so_many_a_minute(tmp_path: Path):
    dashboard = Dashboard(RunSource(make_run(tmp_path / "run")), KEYS.get)
    drawn, at_once, most = list[str](), Counter[str](), Counter[str]()

    async def draw(scope: Any, receive: Any, send: Any) -> None:
        user = scope[OWNER]
        at_once[user] += 1
        most[user] = max(most[user], at_once[user])
        await asyncio.sleep(0.001)
        at_once[user] -= 1
        drawn.append(user)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    statuses = Counter(read_pages(dashboard, draw, [*["anna"] * 100, "bob"]))
    assert most == {"anna": PAGES_SHARE, "bob": 1} and drawn.index("bob") <= PAGES_SHARE
    assert statuses[200] + statuses[429] == 101 and PAGES_PER_MINUTE / 10 < statuses[200] < PAGES_PER_MINUTE / 5
    slow = [f"slow {number}" for number in range(4 * PAGES)]
    assert read_pages(dashboard, draw, [*slow, "carl"]) == [200] * (4 * PAGES + 1)
    assert read_pages(dashboard, draw, ["anna"] * 50, "/_nicegui/x.js") == [200] * 50  # no pages
