"""Mistakes of clients and failures behind the service: a status, a code, a field, a remedy."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")
from rlvr.store import open_store
from rlvr.store.records import Session, Status
from tests.kit.rlvr_service import RlvrService, scripted_service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RlvrService]:
    with scripted_service(tmp_path_factory.mktemp("service"), RLVR_REQUESTS_PER_MINUTE="0") as running:
        yield running


BASE = {"task_id": "t", "prompt": "p"}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/train", {"prompt": "p"}, "task_id"),
        ("/train", {"task_id": "t"}, "prompt"),
        ("/train", {**BASE, "prompt": ""}, "prompt"),
        ("/train", {**BASE, "prompt": " \n"}, "prompt"),
        ("/train", {**BASE, "answer": " "}, "answer"),
        ("/train", {**BASE, "verifiers": ["math"]}, "verifiers"),
        ("/train", {**BASE, "prompt": "x" * 100_001}, "prompt"),
        ("/train", {**BASE, "prompt": 5}, "prompt"),
        ("/train", {**BASE, "prompt": "a\x00b"}, "body"),
        ("/train", {**BASE, "task_id": "../etc"}, "task_id"),
        ("/train", {**BASE, "task_id": "t" * 129}, "task_id"),
        ("/train", {**BASE, "max_iterations": 0}, "max_iterations"),
        ("/train", {**BASE, "max_iterations": 51}, "max_iterations"),
        ("/train", {**BASE, "max_iterations": 2.5}, "max_iterations"),
        ("/train", {**BASE, "max_iterations": "3"}, "max_iterations"),
        ("/train", {**BASE, "min_confidence": 1.01}, "min_confidence"),
        ("/train", {**BASE, "min_confidence": True}, "min_confidence"),
        ("/train", {**BASE, "max_iteration": 3}, "max_iteration"),
        ("/train", {**BASE, "samples": 33}, "samples"),
        ("/train", {**BASE, "tests": "assert True"}, "tests"),
        ("/train", {**BASE, "tests": [5]}, "tests.0"),
        ("/train", {**BASE, "tests": ["double(2) == 4"]}, "tests.0"),
        ("/train", {**BASE, "tests": ["assert f(1) == 2", {"input": "1", "output": "2"}]}, "tests"),
        ("/train", {**BASE, "tests": ["assert f(1) == 2"], "entry_point": "not a name"}, "entry_point"),
        ("/train", {**BASE, "tests": ["assert f(1) == 2"], "answer_names": ["a b"]}, "answer_names.0"),
        ("/train", {**BASE, "answer_names": ["f"]}, "body"),
        ("/train", {**BASE, "grader": {"type": "python"}}, "grader"),
        ("/train", {**BASE, "grader": {"type": "string_check"}, "answer": "1"}, "body"),
        ("/train", {**BASE, "item": {"x": 1}}, "body"),
        ("/train", {**BASE, "verifiers": [{"name": "draft", "weight": -1}]}, "verifiers.0.weight"),
        ("/train", {**BASE, "verifiers": [{"name": "os:system"}]}, "verifiers.0.name"),
        ("/train", {**BASE, "verifiers": ["nothing_like_it"]}, "verifiers"),
        ("/train", {**BASE, "verifiers": [{"name": "judge", "options": {"base_url": "http://x"}}]}, "verifiers"),
        ("/train?background=perhaps", BASE, "background"),
        ("/train?backgroud=true", BASE, "backgroud"),
        ("/grade?partial=true", {"answers": ["a"], "answer": "a"}, "partial"),
        ("/evaluate", {"task_id": "t"}, "prompt"),
        ("/feedback", {"experience_id": 1}, "rating"),
        ("/feedback", {"experience_id": 1, "rating": 1.5}, "rating"),
        ("/feedback", {"rating": 1.0}, "body"),
        ("/feedback", {"experience_id": 1, "session_id": "s", "iteration": 1, "rating": 1.0}, "body"),
        ("/feedback", {"session_id": "s", "rating": 1.0}, "body"),
        ("/grade", {}, "body"),
        ("/grade", {"answers": ["a"], "items": [{"sample": {}}]}, "body"),
        ("/grade", {"answers": [5]}, "answers.0"),
        ("/grade", {"grader": {"type": "python"}, "answers": ["a"]}, "body"),
    ],
)
def test_a_wrong_body_names_the_field(service: RlvrService, path: str, body: Any, field: str):
    answer = service.post(path, body)
    assert answer.status_code == 422, answer.text
    reply = answer.json()
    assert reply.get("field", "") == field and reply["code"] == "invalid" and reply["detail"]
    assert reply["request_id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'"x"', b"[" * 50_000, b"null"])
def test_a_body_that_is_no_object_is_the_field_at_fault(service: RlvrService, content: bytes):
    with service.client() as client:
        answer = client.post("/train", content=content, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["field"]) == (422, "body"), answer.text


@pytest.mark.parametrize("task_id", ["a/../b", "a/..", "a/.", "a/./b", "a//b", "a/", "..", "/a", "a/%2e%2e/b"])
def test_a_task_id_that_a_path_would_resolve_is_refused(service: RlvrService, task_id: str):
    answer = service.post("/train", {"task_id": task_id, "prompt": "p"})
    assert (answer.status_code, answer.json()["field"]) == (422, "task_id"), answer.text


@pytest.mark.parametrize("task_id", ["a/b", "a/.hidden", "a/..b", "a/...", "a..b/c", "a.", "org/set@1:2+x-y"])
def test_the_answers_of_a_task_are_found_under_its_id(service: RlvrService, task_id: str):
    assert service.post("/train", {"task_id": task_id, "prompt": "p", "max_iterations": 1}).status_code == 200
    assert service.get(f"/experiences/{task_id}").json()["task_id"] == task_id
    assert service.get(f"/analysis/{task_id}").json()["analysis"]["total_experiences"] == 1


def test_head_answers_where_get_does_without_a_body(service: RlvrService):
    done = service.post("/train", {"task_id": "t", "prompt": "p", "max_iterations": 1}).json()
    paths = ("/health", "/health/live", "/health/ready", "/sessions", "/stats", "/metrics", "/metrics/prometheus")
    ids = (f"/sessions/{done['session_id']}", f"/sessions/{done['session_id']}/events", "/sessions/never_seen")
    with service.client() as client:
        for path in (*paths, *ids, "/analysis", "/openapi.json", "/train"):
            known, head = client.get(path), client.head(path)
            assert (head.status_code, head.content) == (known.status_code, b""), path
            assert head.headers["content-type"] == known.headers["content-type"]
    assert "failed by our fault" not in service.said


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({**BASE, "max_iteration": 3}, "max_iteration: unknown field of this request (did you mean 'max_iterations'?)"),
        ({**BASE, "verifiers": [{"name": "draft", "option": {}}]}, "(did you mean 'options'?)"),
        ({**BASE, "task_id": "two words"}, "task_id: expected letters, digits and"),
        ({**BASE, "verifiers": ["math"]}, "verifier 'math' compares with `answer`"),
        ({**BASE, "answer": 7}, "answer: 7 given, expected text"),
        ({**BASE, "prompt": ["a"]}, "prompt: a list given, expected text"),
        ({**BASE, "min_confidence": True}, "min_confidence: true given, expected a number"),
        ({**BASE, "min_confidence": 1.01}, "min_confidence: 1.01 given, expected less than or equal to 1"),
        ({**BASE, "max_iterations": "3"}, "max_iterations: text given, expected a whole number"),
        ({**BASE, "tests": "assert f(1) == 2"}, "tests: text given, expected a list, each entry an assert statement"),
        ({**BASE, "tests": [5]}, "tests.0: 5 given, expected an assert statement as text, or an object with input"),
        ({**BASE, "tests": ["assert f(1) == 2", "assert f(1) =="]}, "tests[1] does not parse"),
        ({**BASE, "tests": [{"input": "1", "output": 2}]}, "tests.0.output: 2 given, expected text"),
        ({**BASE, "verifiers": "math"}, "verifiers: text given, expected a list, each entry a verifier's name"),
        ({**BASE, "verifiers": [5]}, "verifiers.0: 5 given, expected a verifier's name, or an object with name"),
        ({**BASE, "grader": "python"}, "grader: text given, expected an object"),
    ],
)
def test_a_mistake_names_the_remedy(service: RlvrService, body: Any, words: str):
    assert words in service.post("/train", body).json()["detail"]


def test_a_wrong_query_value_and_a_wrong_method_name_what_is_taken(service: RlvrService):
    assert "background: 'yep' given, expected true or false" in service.post("/train?background=yep", BASE).text
    answer = service.get("/train")
    assert answer.status_code == 405 and "GET /train: this path takes POST; /openapi.json describes it" in answer.text


@pytest.mark.parametrize("inner", ['"prompt": "a", "prompt": "b"', '"prompt": "p", "item": {"prompt": 1, "prompt": 2}'])
def test_a_key_given_twice_is_refused(service: RlvrService, inner: str):
    with service.client() as client:
        content = f'{{"task_id": "t", {inner}}}'
        answer = client.post("/train", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 422 and answer.json()["field"] == "prompt", answer.text
    assert "give each key once" in answer.json()["detail"]


@pytest.mark.parametrize("path", ["/sessions?task=t", "/stats?task_id=t", "/experiences/t?limits=3", "/metrics?x="])
def test_an_unknown_query_parameter_is_refused(service: RlvrService, path: str):
    answer = service.get(path)
    assert answer.status_code == 422 and "unknown query parameter" in answer.json()["detail"], answer.text
    assert service.get("/health/live?probe=7").status_code == 200


def test_a_task_that_no_verifier_can_judge_is_the_requests_mistake(service: RlvrService):
    grader = {
        "type": "string_check",
        "operation": "eq",
        "input": "{{ sample.output_text }}",
        "reference": "{{ item.x }}",
    }
    answer = service.post("/train", {**BASE, "grader": grader, "item": {"y": "1"}})
    assert (answer.status_code, answer.json()["code"]) == (422, "task_invalid"), answer.text
    assert "item.x" in answer.json()["detail"] and answer.json()["session_id"]


def test_a_whole_number_may_have_a_point(service: RlvrService):
    """JSON Schema counts 2.0 as an integer."""
    body = {**BASE, "max_iterations": 2.0, "verifiers": [{"name": "repetition", "options": {"words": 3.0}}]}
    assert service.post("/train", body).status_code == 200


def test_a_form_body_names_the_required_header(service: RlvrService):
    with service.client() as client:  # what `curl -d` sends by itself
        answer = client.post("/train", content=b'{"task_id": "t", "prompt": "p"}',
                             headers={"content-type": "application/x-www-form-urlencoded"})  # fmt: skip
    assert answer.status_code == 422 and "Content-Type: application/json" in answer.json()["detail"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b'{"task_id": "t", "prompt": "\\ud800"}', b"[" * 100_000,
     b'{"task_id": "t", "prompt": "p", "min_confidence": NaN}', b'{"task_id": "t", "prompt": "p", "seed": 1e999}'],
)  # fmt: skip
def test_a_body_that_is_not_a_json_object_is_a_422(service: RlvrService, content: bytes):
    with service.client() as client:
        answer = client.post("/train", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 422 and answer.json()["code"] == "invalid", answer.text


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/experiences/never_seen", 404, "not_found"),
        ("GET", "/analysis/never_seen", 404, "not_found"),
        ("GET", "/sessions/never_seen", 404, "not_found"),
        ("GET", "/sessions/never_seen/events", 404, "not_found"),
        ("POST", "/sessions/never_seen/cancel", 404, "not_found"),
        ("GET", "/api/nothing", 404, "not_found"),
        ("GET", "/", 404, "not_found"),
        ("GET", "/%00", 404, "not_found"),
        ("GET", "/experiences/%00", 404, "not_found"),
        ("GET", "/train", 405, "method_not_allowed"),
        ("DELETE", "/sessions/x", 405, "method_not_allowed"),
    ],
)
def test_unknown_things_are_404_as_json(service: RlvrService, method: str, path: str, status: int, code: str):
    with service.client() as client:
        answer = client.request(method, path)
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert set(answer.json()) == {"detail", "code", "request_id"}
    assert status != 405 or answer.headers["allow"]


def test_a_training_run_in_the_store_has_a_name_and_no_evaluation_of_a_session(service: RlvrService):
    with closing(open_store(f"sqlite:///{service.state / 'service.sqlite'}")) as store:
        store.add_session(Session("of-a-run", "", "", kind="run", name="sums", status=Status.DONE))
    assert service.get("/sessions/of-a-run").json()["name"] == "sums"
    refused = service.get("/sessions/of-a-run/evaluation")
    assert (refused.status_code, refused.json()["code"]) == (409, "training_run")


def test_a_refusing_endpoint_is_an_error_code_and_keeps_the_session(service: RlvrService):
    answer = service.post("/train", {"task_id": "refused", "prompt": "refuse this"})
    assert answer.status_code == 502 and answer.json()["code"] == "endpoint_refused"
    state = service.get(f"/sessions/{answer.json()['session_id']}").json()
    assert state["status"] == "failed" and state["error"]["code"] == "endpoint_refused"
    assert service.get("/experiences/refused").json() == {
        "task_id": "refused", "experiences": [], "count": 0, "next_after": None,
    }  # fmt: skip
    assert service.get("/analysis/refused").json()["analysis"]["average_reward"] is None


def test_a_client_that_disconnects_loses_the_response_and_not_the_session(service: RlvrService):
    body = json.dumps({"task_id": "gone", "prompt": "slowly: an ode"}).encode()
    head = b"POST /train HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    deadline = time.monotonic() + 20
    with socket.create_connection(("127.0.0.1", service.port)) as connection:
        connection.sendall(head % len(body) + body)
        while not service.get("/sessions", params={"task_id": "gone"}).json()["sessions"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    while (row := service.get("/sessions", params={"task_id": "gone"}).json()["sessions"][0])["status"] != "done":
        assert time.monotonic() < deadline, row
        time.sleep(0.1)
