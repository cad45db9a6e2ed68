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

from rlvr.service.http.app import tell_errors
from rlvr.service.http.door import Door
from rlvr.service.http.rates import Rate
from rlvr.service.keys import Keys, owner_of
from rlvr.service.listening import check_exposure
from rlvr.service.settings import Limits

KEY, OTHER = "correct-horse-battery", "another-key-entirely"
LOCAL = "http://127.0.0.1:3035"


def application() -> FastAPI:
    app = FastAPI()
    tell_errors(app)

    @app.get("/stats")
    @app.get("/health")
    @app.get("/ui/page")
    async def look(request: Request) -> dict[str, str]:
        return {"owner": request.state.owner}

    @app.post("/train")
    async def make(request: Request) -> dict[str, int]:
        return {"bytes": len(await request.body())}

    @app.get("/broken")
    async def broken() -> None:
        raise ZeroDivisionError("of our own")

    return app


def asking(keys: list[str] | None = None, base: str = LOCAL, **options: Any) -> Callable[..., httpx2.Response]:
    limits = options.pop("limits", Limits())
    door = Door(application(), Keys(keys or []), limits, options.pop("cors_origins", ()), **options)

    def ask(method: str, path: str, **request: Any) -> httpx2.Response:
        async def send() -> httpx2.Response:
            transport = httpx2.ASGITransport(door, raise_app_exceptions=False)
            async with httpx2.AsyncClient(transport=transport, base_url=base) as client:
                return await client.request(method, path, **request)

        return asyncio.run(send())

    return ask


def test_without_keys_everybody_on_this_machine_is_the_same_owner():
    answer = asking()("GET", "/stats")
    assert answer.status_code == 200 and answer.json() == {"owner": "local"}


@pytest.mark.parametrize("host", ["evil.example", "evil.example:3035", "127.0.0.1.evil.example", "", "10.0.0.1:3035"])
def test_without_keys_a_name_that_is_not_this_machines_is_refused(host: str):
    answer = asking()("GET", "/stats", headers={"host": host})
    assert answer.status_code == 403 and answer.json()["code"] == "wrong_host"


@pytest.mark.parametrize("host", ["localhost:3035", "127.0.0.1", "[::1]:3035"])
def test_every_name_of_this_machine_will_do(host: str):
    assert asking()("GET", "/stats", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "http://127.0.0.1:8000", "null", "http://localhost:3035"])
def test_without_keys_a_page_of_another_origin_is_refused_even_of_another_port_here(origin: str):
    for method, path in (("GET", "/stats"), ("POST", "/train")):
        answer = asking()(method, path, headers={"origin": origin})
        assert answer.status_code == 403 and answer.json()["code"] == "wrong_origin"
    assert asking()("GET", "/stats", headers={"origin": LOCAL}).status_code == 200


def test_a_key_is_asked_for_and_tells_whose_request_it_is():
    ask = asking([KEY, OTHER])
    answer = ask("GET", "/stats")
    assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert set(answer.json()) == {"detail", "code", "request_id"} and answer.json()["code"] == "no_key"
    for headers in ({"authorization": f"Bearer {KEY}"}, {"authorization": f"bearer  {KEY}"}, {"x-api-key": KEY}):
        assert ask("GET", "/stats", headers=headers).json() == {"owner": owner_of(KEY)}
    assert ask("GET", "/stats", headers={"x-api-key": OTHER}).json() == {"owner": owner_of(OTHER)}
    for headers in ({"authorization": f"Basic {KEY}"}, {"x-api-key": KEY[:-1]}, {"x-api-key": KEY + "x"}):
        assert ask("GET", "/stats", headers=headers).status_code == 401


def test_health_and_what_asks_for_keys_by_itself_need_none():
    ask = asking([KEY], own_door=lambda path: path.startswith("/ui/"))
    assert ask("GET", "/health").json() == {"owner": ""}
    assert ask("GET", "/ui/page").status_code == 200 and ask("GET", "/nothing").status_code == 401


def test_with_keys_any_name_and_origin_will_do():
    headers = {"host": "service.example", "origin": "https://elsewhere.example", "x-api-key": KEY}
    answer = asking([KEY])("GET", "/stats", headers=headers)
    assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers


def test_only_an_origin_that_the_settings_name_may_read_answers():
    ask = asking(cors_origins=("https://app.example",))
    asked = {"origin": "https://app.example", "access-control-request-method": "POST"}
    preflight = ask("OPTIONS", "/train", headers=asked)
    assert preflight.status_code == 204 and preflight.headers["access-control-allow-origin"] == "https://app.example"
    assert "POST" in preflight.headers["access-control-allow-methods"]
    answer = ask("GET", "/stats", headers={"origin": "https://app.example"})
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "https://app.example"
    assert ask("OPTIONS", "/train", headers={"origin": "https://evil.example"}).status_code == 403


def test_a_body_beyond_the_limit_is_refused_by_its_length_and_while_it_arrives():
    ask = asking(limits=Limits(max_body=1000))
    assert ask("POST", "/train", content=b"x" * 1000).json() == {"bytes": 1000}
    assert ask("POST", "/train", content=b"x" * 1001).status_code == 413

    async def pieces():
        for _ in range(20):
            yield b"x" * 100

    answer = ask("POST", "/train", content=pieces())
    assert answer.status_code == 413 and answer.json()["code"] == "body_too_large"
    assert answer.headers["connection"] == "close"


def test_requests_that_make_work_and_those_that_look_have_rates_of_their_own_by_key():
    ask = asking([KEY, OTHER], limits=Limits(requests_per_minute=6, reads_per_minute=0))
    mine, others = {"x-api-key": KEY}, {"x-api-key": OTHER}
    statuses = [ask("POST", "/train", headers=mine).status_code for _ in range(11)]
    assert statuses == [200] * 10 + [429]
    refused = ask("POST", "/train", headers=mine)
    assert refused.json()["code"] == "too_many_requests" and 1 <= int(refused.headers["retry-after"]) <= 10
    assert ask("POST", "/train", headers=others).status_code == 200
    assert ask("GET", "/stats", headers=mine).status_code == 200


def test_a_rate_fills_up_steadily_and_to_its_limit():
    now = [0.0]
    rate = Rate(60, clock=lambda: now[0])
    assert [rate.wait("a") for _ in range(11)] == [0.0] * 10 + [1.0]
    now[0] += 0.25
    assert rate.wait("a") == 0.75
    now[0] += 0.75
    assert rate.wait("a") == 0.0 and rate.wait("a") == 1.0
    now[0] += 3600
    assert [rate.wait("a") for _ in range(11)][-2:] == [0.0, 1.0]
    assert all(Rate(0).wait("a") == 0.0 for _ in range(1000))


def test_every_answer_says_its_id_and_lets_a_browser_do_nothing_with_it():
    answer = asking()("GET", "/stats")
    assert answer.headers["x-request-id"].startswith("req-")
    assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["x-frame-options"] == "DENY"
    assert (
        answer.headers["cache-control"] == "no-store"
        and "default-src 'none'" in (answer.headers["content-security-policy"])
    )


def test_a_fault_of_ours_is_told_without_its_details():
    answer = asking()("GET", "/broken")
    assert answer.status_code == 500 and answer.json()["code"] == "internal"
    assert answer.json()["request_id"] == answer.headers["x-request-id"] and "of our own" not in answer.text


def test_keys_come_from_a_file_and_the_environment_and_short_ones_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "keys"
    file.write_text(f"# of the team\n{KEY}  # mine\n\n")
    monkeypatch.setenv("RLVR_API_KEYS", f"{OTHER}, ")
    keys = Keys.load(file)
    assert keys.owner(KEY) == owner_of(KEY) and keys.owner(OTHER) == owner_of(OTHER) and keys.owner("") is None
    with pytest.raises(ValueError, match="at least 12 printable") as error:
        Keys(["short-key"])
    assert "short-key" not in str(error.value)
    with pytest.raises(ValueError, match="'tml-' and then at least 8"):
        Keys([KEY], prefix="tml-")
    file.write_text("# none\n")
    monkeypatch.delenv("RLVR_API_KEYS")
    with pytest.raises(ValueError, match="holds no key"):
        Keys.load(file)
    with pytest.raises(ValueError, match="cannot be read"):
        Keys.load(tmp_path / "missing")


def test_other_machines_may_only_come_in_with_keys():
    with pytest.raises(ValueError, match="no API key is set"):
        check_exposure("0.0.0.0", Keys([]))
    check_exposure("0.0.0.0", Keys([KEY]))
    check_exposure("127.0.0.5", Keys([]))
    check_exposure("::1", Keys([]))
    with pytest.raises(ValueError, match="expected an IP address"):
        check_exposure("my.host", Keys([]))
