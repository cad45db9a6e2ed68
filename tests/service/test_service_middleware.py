"""The door of the service: keys, Host and Origin, rates, sizes, headers; and the parts it is made of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")
import httpx2
from fastapi import FastAPI, Request

from rlvr.service.http.app import FAILURES, describe_failure
from rlvr.service.http.service_middleware import ServiceMiddleware
from rlvr.service.settings import ServiceLimits
from rlvr.web.auth import ApiKeys, owner_of
from rlvr.web.middleware import register_error_handlers
from rlvr.web.rate_limit import RateLimit
from rlvr.web.server import check_exposure

KEY, OTHER = "correct-horse-battery", "another-key-entirely"
LOCAL = "http://127.0.0.1:3035"


def application() -> FastAPI:
    app = FastAPI()
    register_error_handlers(app, describe_failure, FAILURES)

    @app.get("/stats")
    @app.get("/health")
    @app.get("/ui/page")
    async def look(request: Request) -> dict[str, str]:
        return {"owner": request.state.owner}

    @app.post("/train")
    async def make(request: Request) -> dict[str, int]:
        return {"bytes": len(await request.body())}

    @app.get("/broken")
    async def raise_error() -> None:
        raise ZeroDivisionError("of our own")

    return app


def asking(keys: list[str] | None = None, base: str = LOCAL, **options: Any) -> Callable[..., httpx2.Response]:
    limits = options.pop("limits", ServiceLimits())
    door = ServiceMiddleware(application(), ApiKeys(keys or []), limits, options.pop("cors_origins", ()), **options)

    def ask(method: str, path: str, **request: Any) -> httpx2.Response:
        async def send() -> httpx2.Response:
            transport = httpx2.ASGITransport(door, raise_app_exceptions=False)
            async with httpx2.AsyncClient(transport=transport, base_url=base) as client:
                return await client.request(method, path, **request)

        return asyncio.run(send())

    return ask


def test_without_keys_every_caller_is_the_same_owner():
    answer = asking()("GET", "/stats")
    assert answer.status_code == 200 and answer.json() == {"owner": "local"}


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:3035", "127.0.0.1.evil.example", "", "10.0.0.1:3035"),
        *("localhost:4102.evil.com", "localhost:80:80", "[::1]evil.com", "[::1].evil.com:80", "evil.com/@localhost"),
        *("localhost:123456", "user@localhost", "localhost:80a", "[localhost]", " localhost", "localhost\t:80"),
    ],
)
def test_without_keys_other_host_names_are_refused(host: str):
    answer = asking()("GET", "/stats", headers={"host": host})
    assert answer.status_code == 403 and answer.json()["code"] == "wrong_host"


@pytest.mark.parametrize("host", ["localhost:3035", "127.0.0.1", "[::1]:3035", "[::1]", "LocalHost:80", "localhost:"])
def test_every_loopback_host_name_is_accepted(host: str):
    assert asking()("GET", "/stats", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "http://127.0.0.1:8000", "null", "http://localhost:3035"])
def test_without_keys_other_origins_are_refused(origin: str):
    for method, path in (("GET", "/stats"), ("POST", "/train")):
        answer = asking()(method, path, headers={"origin": origin})
        assert answer.status_code == 403 and answer.json()["code"] == "wrong_origin"
    assert asking()("GET", "/stats", headers={"origin": LOCAL}).status_code == 200


def test_a_key_is_required_and_identifies_the_owner():
    ask = asking([KEY, OTHER])
    answer = ask("GET", "/stats")
    assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert set(answer.json()) == {"detail", "code", "request_id"} and answer.json()["code"] == "no_key"
    for headers in ({"authorization": f"Bearer {KEY}"}, {"authorization": f"bearer  {KEY}"}, {"x-api-key": KEY}):
        assert ask("GET", "/stats", headers=headers).json() == {"owner": owner_of(KEY)}
    assert ask("GET", "/stats", headers={"x-api-key": OTHER}).json() == {"owner": owner_of(OTHER)}
    for headers in ({"authorization": f"Basic {KEY}"}, {"x-api-key": KEY[:-1]}, {"x-api-key": KEY + "x"}):
        assert ask("GET", "/stats", headers=headers).status_code == 401


def test_health_and_paths_with_own_auth_need_no_key():
    ask = asking([KEY], has_own_auth=lambda path: path.startswith("/ui/"))
    assert ask("GET", "/health").json() == {"owner": ""}
    assert ask("GET", "/ui/page").status_code == 200 and ask("GET", "/nothing").status_code == 401


def test_with_keys_any_host_and_origin_are_accepted():
    headers = {"host": "service.example", "origin": "https://elsewhere.example", "x-api-key": KEY}
    answer = asking([KEY])("GET", "/stats", headers=headers)
    assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers


def test_only_origins_in_the_settings_may_read_responses():
    ask = asking(cors_origins=("https://app.example",))
    asked = {"origin": "https://app.example", "access-control-request-method": "POST"}
    preflight = ask("OPTIONS", "/train", headers=asked)
    assert preflight.status_code == 204 and preflight.headers["access-control-allow-origin"] == "https://app.example"
    assert "POST" in preflight.headers["access-control-allow-methods"]
    answer = ask("GET", "/stats", headers={"origin": "https://app.example"})
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "https://app.example"
    assert ask("OPTIONS", "/train", headers={"origin": "https://evil.example"}).status_code == 403


def test_a_large_body_is_refused_by_its_length_and_while_it_arrives():
    ask = asking(limits=ServiceLimits(max_body=1000))
    assert ask("POST", "/train", content=b"x" * 1000).json() == {"bytes": 1000}
    assert ask("POST", "/train", content=b"x" * 1001).status_code == 413

    async def pieces():
        for _ in range(20):
            yield b"x" * 100

    answer = ask("POST", "/train", content=pieces())
    assert answer.status_code == 413 and answer.json()["code"] == "body_too_large"
    assert answer.headers["connection"] == "close"


def test_writes_and_reads_have_separate_rate_limits_per_key():
    ask = asking([KEY, OTHER], limits=ServiceLimits(requests_per_minute=6, reads_per_minute=0))
    mine, others = {"x-api-key": KEY}, {"x-api-key": OTHER}
    statuses = [ask("POST", "/train", headers=mine).status_code for _ in range(11)]
    assert statuses == [200] * 10 + [429]
    refused = ask("POST", "/train", headers=mine)
    assert refused.json()["code"] == "too_many_requests" and 1 <= int(refused.headers["retry-after"]) <= 10
    assert ask("POST", "/train", headers=others).status_code == 200
    assert ask("GET", "/stats", headers=mine).status_code == 200


def test_a_token_bucket_fills_steadily_up_to_its_limit():
    now = [0.0]
    rate = RateLimit(60, clock=lambda: now[0])
    assert [rate.acquire("a") for _ in range(11)] == [0.0] * 10 + [1.0]
    now[0] += 0.25
    assert rate.acquire("a") == 0.75
    now[0] += 0.75
    assert rate.acquire("a") == 0.0 and rate.acquire("a") == 1.0
    now[0] += 3600
    assert [rate.acquire("a") for _ in range(11)][-2:] == [0.0, 1.0]
    assert all(RateLimit(0).acquire("a") == 0.0 for _ in range(1000))


def test_every_response_has_its_id_and_security_headers():
    answer = asking()("GET", "/stats")
    assert answer.headers["x-request-id"].startswith("req-")
    assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["x-frame-options"] == "DENY"
    assert (
        answer.headers["cache-control"] == "no-store"
        and "default-src 'none'" in (answer.headers["content-security-policy"])
    )


@pytest.mark.parametrize("given", ["a", "0b8f-1.2:3_4", "Root=1-67891233-abcdef", "x" * 128])
def test_the_id_that_a_client_gives_is_echoed(given: str):
    for path in ("/stats", "/broken"):
        answer = asking()("GET", path, headers={"x-request-id": given})
        assert answer.headers.get_list("x-request-id") == [given]
    assert answer.json()["request_id"] == given


@pytest.mark.parametrize("given", ["", " ", "x" * 129, "two words", "a\tb", "<b>", "-a", '"', "a;b", "\u00e4"])
def test_another_id_is_replaced(given: str):
    answer = asking()("GET", "/stats", headers={"x-request-id": given.encode("latin-1")})
    [id] = answer.headers.get_list("x-request-id")
    assert id.startswith("req-") and len(id) == 20


def test_an_internal_error_is_reported_without_details():
    answer = asking()("GET", "/broken")
    assert answer.status_code == 500 and answer.json()["code"] == "internal"
    assert answer.json()["request_id"] == answer.headers["x-request-id"] and "of our own" not in answer.text


def test_keys_come_from_a_file_and_the_environment_and_short_ones_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "keys"
    file.write_text(f"# of the team\n{KEY}  # mine\n\n")
    monkeypatch.setenv("RLVR_API_KEYS", f"{OTHER}, ")
    keys = ApiKeys.load(file)
    assert keys.owner(KEY) == owner_of(KEY) and keys.owner(OTHER) == owner_of(OTHER) and keys.owner("") is None
    with pytest.raises(ValueError, match="at least 12 printable") as error:
        ApiKeys(["short-key"])
    assert "short" not in str(error.value) and "number 1" in str(error.value)
    with pytest.raises(ValueError, match="'tml-' and then at least 8"):
        ApiKeys([KEY], prefix="tml-")
    file.write_text("# none\n")
    monkeypatch.delenv("RLVR_API_KEYS")
    with pytest.raises(ValueError, match="holds no key"):
        ApiKeys.load(file)
    with pytest.raises(ValueError, match="cannot be read"):
        ApiKeys.load(tmp_path / "missing")


def test_other_machines_need_keys():
    with pytest.raises(ValueError, match="no API key is set"):
        check_exposure("0.0.0.0", ApiKeys([]))
    check_exposure("0.0.0.0", ApiKeys([KEY]))
    check_exposure("127.0.0.5", ApiKeys([]))
    check_exposure("::1", ApiKeys([]))
    with pytest.raises(ValueError, match="expected an IP address"):
        check_exposure("my.host", ApiKeys([]))
