"""Access to the dashboard: its own addresses only, no other origin, and with API keys only with a key."""

from __future__ import annotations

import asyncio
import json
import re
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
from rlvr.service.dashboard.page_changes import PageChanges
from rlvr.service.dashboard.run_source import RunSource
from rlvr.service.dashboard.session_source import StoreSource
from rlvr.service.dashboard.sign_in import COOKIE, SECONDS, SignIn, to_local_address
from tests.kit.dashboard_fixtures import add_step, fill_store, make_run
from tests.kit.dashboard_html import elements, find, parse_html

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

    arriving = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return arriving.pop() if arriving else await asyncio.Event().wait()

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
        ("/", True), ("/ui", True), ("/ui/run/x", True), ("/ui/assets/chart.js", True), ("/favicon.ico", False),
        ("/train", False), ("/uix", False), ("/nope", False), ("//ui/", False), ("/experiences/ui/", False),
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


def test_a_rating_from_a_page_of_another_origin_is_refused(tmp_path: Path):
    store = fill_store(f"sqlite:///{tmp_path}/store.sqlite")
    app = FastAPI()
    attach(app, StoreSource(store))
    own, other = "http://127.0.0.1:1", "http://evil.example"
    for origin, status, said, ratings in ((other, 403, "another origin", 0), (own, 200, "Saved: 0.75", 1)):
        answered = ask(app, "/ui/trajectory/2", "POST", {"origin": origin}, b"rating=0.75")
        found = store.experience(2)
        assert answered[0] == status and said in answered[2] and found is not None and found.ratings == ratings
    for body in (b"", b"rating=2", b"rating=" + b"1" * 9000, b"rating=nan"):
        assert "Not saved" in ask(app, "/ui/trajectory/2", "POST", body=body)[2]
    assert "Saved" not in ask(app, "/ui/trajectory/2", query="notice=Saved")[2]
    assert ask(app, "/ui/trajectories", "POST")[0] == 405
    store.close()


def test_a_page_may_load_and_run_the_dashboards_files_only(app: FastAPI):
    """No inline script or style, no other origin; and what a page names is there."""
    for path in ("/", "/ui/trajectories", "/ui/nothing"):
        _, headers, text = ask(app, path)
        rules = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
        assert (rules["default-src"], rules["script-src"], rules["style-src"]) == ("'none'", "'self'", "'self'")
        assert rules["connect-src"] == rules["form-action"] == "'self'" and "unsafe" not in str(rules)
        root = parse_html(text)
        assert [given for _, given in find(root, "script")] == [{"type": "module", "src": "/ui/assets/dashboard.js"}]
        assert not [*find(root, "style")] and "://" not in text
        for address in re.findall(r'"(/ui/assets/[^"]*)"', text):
            assert ask(app, address)[0] == 200
    scripts = [ask(app, f"/ui/assets/{name}.js")[2] for name in ("dashboard", "chart", "picture")]
    assert {*re.findall(r'from "(.*)"', "".join(scripts))} == {"./chart.js", "./picture.js"}
    assert ask(app, "/ui/assets/../dashboard_app.py")[0] == ask(app, "/ui/assets/nothing")[0] == 404


@pytest.mark.parametrize("headers", [{}, {"x-forwarded-prefix": "/out/er/"}, {"x-forwarded-prefix": '"><script>'}])
def test_all_addresses_are_under_the_prefix_where_it_is_mounted(tmp_path: Path, headers: dict[str, str]):
    run, outer = make_run(tmp_path / "runs" / "first"), FastAPI()
    make_run(tmp_path / "runs" / "second")
    inner = FastAPI()
    attach(inner, RunSource(run.parent))
    outer.mount("/deep/here", inner)
    prefix = "/out/er/deep/here" if "er" in str(headers) else "/deep/here"
    for path in ("/", "/ui/run/first", "/ui/trajectories", "/ui/trajectory/first:1:1", "/ui/compare", "/ui/machines"):
        status, _, text = ask(outer, f"/deep/here{path}", headers=headers)
        assert status == 200
        root = parse_html(text)
        found = [given[name] for _, given, *_ in elements(root) for name in ("href", "src", "action", "data-events")
                 if name in given and not given[name].startswith("#")]  # fmt: skip
        assert len(found) > 8 and all(one.startswith(f"{prefix}/") for one in found), found
        for chart in find(root, "figure"):
            assert json.loads(chart[1]["data-chart"])["zoom"].startswith((prefix, "/deep")[path == "/"]) or path == "/"
        for address in {given["href"] for _, given, *_ in find(root, "a") if "curves.csv" in given.get("href", "")}:
            where, _, query = address.removeprefix("/out/er").partition("?")
            assert ask(outer, where, query=query)[0] == 200
    dashboard = Dashboard(RunSource(run), KEYS.get)
    status, _, text = ask(dashboard, "/ui/hacks", headers={"x-forwarded-prefix": "/out"})
    assert status == 401 and 'action="/out/ui/sign-in"' in text and 'value="/ui/hacks"' in text
    body = urlencode({"key": "tml-right", "next": "/ui/hacks"}).encode()
    location = ask(dashboard, SignIn.path, "POST", {"x-forwarded-prefix": "/out"}, body)[1]["location"]
    assert location == "/out/ui/hacks"


def test_open_pages_are_told_of_changes_and_end_with_the_server(tmp_path: Path):
    """One check serves all streams; a page that shows an older state is told at once."""
    run = make_run(tmp_path / "run")
    changes = PageChanges(RunSource(run))
    seen = changes.read()

    async def follow() -> list[str]:
        older, newest = changes.stream("older"), changes.stream(seen)
        assert await anext(older) == await anext(newest) == "retry: 2000\n\n"
        told = [await anext(older)]
        waiting = asyncio.ensure_future(anext(newest))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        add_step(run, 4)
        told.append(await asyncio.wait_for(waiting, 30))
        rest = asyncio.ensure_future(anext(newest, "the end"))
        await asyncio.sleep(0)
        changes.end()
        assert await asyncio.wait_for(rest, 30) == "the end"
        await older.aclose()
        return told

    assert asyncio.run(follow()) == [f"data: {seen}\n\n", f"data: {changes.read()}\n\n"]
    assert changes.read() != seen


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
    assert "<script" not in text and "<style" not in text
    assert headers["cache-control"] == "no-store"


@pytest.mark.parametrize("path", ["/ui/events", "/ui/curves.csv", "/ui/nothing", "/ui/assets"])
def test_without_a_cookie_nothing_is_answered_but_files_of_the_package(dashboard_with_keys: Dashboard, path: str):
    assert ask(dashboard_with_keys, path)[0] == 401
    assert ask(dashboard_with_keys, "/ui/assets/style.css")[0] == 200


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
    assert enter(dashboard_with_keys, "tml-right", wanted)[1]["location"] == "/" == to_local_address(wanted)


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
    assert read_pages(dashboard, draw, ["anna"] * 50, "/ui/events") == [200] * 50  # no pages
