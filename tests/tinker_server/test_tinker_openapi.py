"""/openapi.json of the Tinker server: it is complete, and the server answers as it says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")
pytest.importorskip("google.protobuf", reason="the extra [serve] is not installed")

from tests.kit.open_server import NAME, open_endpoints, text_engine

KEY = "tml-a-secret-key"
KIT = Path(__file__).parents[1] / "kit"
METHODS = {"get", "post", "put", "patch", "delete"}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    """Of a server with a key."""
    with open_endpoints({NAME: text_engine()}, tmp_path_factory.mktemp("state"), [KEY]) as (_, port):
        base, headers = f"http://127.0.0.1:{port}", {"x-api-key": KEY}
        with httpx2.Client(base_url=base, headers=headers, trust_env=False, verify=False, timeout=60) as made:
            yield made


@pytest.fixture(scope="module")
def document(client: httpx2.Client) -> dict[str, Any]:
    return client.get("/openapi.json").json()


def references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        if isinstance(part.get("$ref"), str):
            yield part["$ref"]
        for inner in part.values():
            yield from references(inner)
    elif isinstance(part, list):
        for inner in part:
            yield from references(inner)


def test_every_reference_of_the_document_can_be_followed(document: dict[str, Any]):
    found = set(references(document))
    assert {"#/components/schemas/LoraFields", "#/components/schemas/ChatMessage"} <= found
    for reference in found:
        part: Any = document
        for name in reference.removeprefix("#/").split("/"):
            part = part[name]


def test_every_parameter_of_a_path_is_described(document: dict[str, Any]):
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            described = {one["name"] for one in operation["parameters"] if one["in"] == "path"}
            assert described == set(re.findall(r"\{(\w+)\}", path)), (method, path)


def test_every_body_that_a_route_reads_is_described(document: dict[str, Any]):
    without = {
        path for path, methods in document["paths"].items() if "requestBody" not in methods.get("post", "requestBody")
    }
    assert without == {
        "/api/v1/auth/token", "/r/{token}/close", "/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/publish"
    }  # fmt: skip


def test_the_document_says_which_requests_need_a_key_and_the_server_refuses_these_without_one(
    client: httpx2.Client, document: dict[str, Any]
):
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            answer = httpx2.request(method, f"{client.base_url}{path}", trust_env=False, verify=False)
            assert (answer.status_code == 401) == bool(operation.get("security")), (method, path, answer.status_code)


def test_a_refused_method_is_answered_with_all_methods_of_the_path(client: httpx2.Client, document: dict[str, Any]):
    for path, methods in document["paths"].items():
        answer = client.request("TRACE", path)
        allowed = set(answer.headers["allow"].lower().split(", "))
        assert answer.status_code == 405, path
        assert allowed - {"head"} == METHODS & set(methods), path
        assert ("head" in allowed) == ("get" in methods), path


def test_a_server_without_keys_names_none(tmp_path: Path):
    with open_endpoints({NAME: text_engine()}, tmp_path) as (_, port):
        found = httpx2.get(f"http://127.0.0.1:{port}/openapi.json", trust_env=False, verify=False).json()
    assert "securitySchemes" not in found["components"]


@pytest.mark.slow
@pytest.mark.timeout(1_560)
def test_schemathesis_finds_nothing_with_all_checks(client: httpx2.Client, document: dict[str, Any], tmp_path: Path):
    """As in tests/service/test_service_openapi.py. What has no session or run is answered 404, so that few operations
    of the protocol do their work here; the tests of the SDK have them do it."""
    pytest.importorskip("schemathesis", reason="the extra [dev] is not installed")
    file = tmp_path / "openapi.json"
    file.write_text(json.dumps(document))
    command = [
        sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()",
        "--config-file", str(KIT / "schemathesis_tinker.toml"), "run", str(file), "--url", str(client.base_url),
        "--checks", "all", "--max-examples", "5", "--seed", "1", "--no-color", "--request-timeout", "300",
        "--suppress-health-check", "all",
    ]  # fmt: skip
    hooks = str(KIT / "schemathesis_tinker_hooks.py")
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": hooks, "RLVR_TEST_KEY": KEY}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1_500, env=environment)
    found = re.search(r"^=+ (?:ERRORS|FAILURES) =+$", done.stdout, re.MULTILINE)
    assert done.returncode == 0, f"{done.stdout[found.start() if found else 0 :][:6_000]}{done.stderr[-2_000:]}"
