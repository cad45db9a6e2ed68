"""The service over HTTP, as a client meets it: a real `rlvr serve`, a real text endpoint, the bodies of the guide."""

from __future__ import annotations

import contextlib
import json
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")
from rlvr_service import RlvrService
from text_endpoint import Asked, Said, TextEndpoint, serving

FIBONACCI = {
    "task_id": "code_fibonacci",
    "prompt": "Write a function to calculate the nth Fibonacci number",
    "context": "Python programming, should be efficient and handle edge cases",
    "max_iterations": 8,
    "min_confidence": 0.85,
}
SOLUTION = "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n"
METRICS = {
    "total_reward", "average_reward", "improvement_rate", "convergence_iteration", "verifier_accuracy",
    "training_loss", "policy_entropy",
}  # fmt: skip
DETAILED = {
    "session_id", "task_id", "start_time", "end_time", "duration_seconds", "total_iterations", "final_confidence",
    "average_confidence", "confidence_improvement", "total_reward", "average_reward", "reward_trend", "max_reward",
    "min_reward", "correctness_scores", "quality_scores", "average_correctness", "average_quality", "total_errors",
    "unique_error_types", "error_frequency", "error_reduction_rate", "converged", "convergence_iteration",
    "convergence_threshold", "verifier_accuracy", "policy_entropy", "training_loss", "tokens_generated",
    "tokens_per_iteration", "time_per_iteration",
}  # fmt: skip


def script(asked: Asked) -> str | Said:
    """What the model behind the endpoint says: by a word of the task."""
    prompt = asked.prompt
    if "forever" in prompt:
        return Said("Too late.", delay=60.0)
    if "slowly" in prompt:
        return Said("It took me a while, and here it is.", delay=1.0)
    if "refuse" in prompt:
        return Said("", status=400)
    if "144" in prompt or "12 * 12" in prompt:
        return "It is \\boxed{144}."
    if "badly" in prompt:
        return "no"
    return SOLUTION


@pytest.fixture(scope="module")
def endpoint() -> Iterator[TextEndpoint]:
    with serving(script) as server:
        yield server


@pytest.fixture(scope="module")
def service(endpoint: TextEndpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RlvrService]:
    state = tmp_path_factory.mktemp("service")
    with RlvrService(state, "--log-format", "json", LLM_ENDPOINT=endpoint.plain_url) as running:
        yield running


def trained(service: RlvrService, **body: Any) -> dict[str, Any]:
    answer = service.post("/train", {"task_id": "test", "prompt": "Hello world", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_guides_request_gets_the_guides_answer(service: RlvrService):
    answer = trained(service, **FIBONACCI)
    assert answer["final_solution"] == SOLUTION and answer["confidence"] >= 0.85 and answer["iterations"] == 1
    assert set(answer["metrics"]) >= METRICS
    (step,) = answer["training_data"]
    assert set(step) >= {"iteration", "prompt", "generated_output", "verifier_feedback", "reward", "timestamp"}
    assert step["iteration"] == 1 and "efficient and handle edge cases" in step["prompt"]
    feedback = ["confidence", "correctness_score", "quality_score", "detailed_feedback", "error_types", "suggestions"]
    assert list(step["verifier_feedback"]) == feedback
    assert answer["metrics"]["verifier_accuracy"] is None  # nothing says what is right
    assert answer["metrics"]["policy_entropy"] > 0


def test_the_guides_curl_lines_work_as_they_stand(service: RlvrService):
    def curl(*options: str) -> Any:
        done = subprocess.run(["curl", "-sS", *options], capture_output=True, text=True, timeout=30, check=True)
        return json.loads(done.stdout)

    assert curl(f"{service.url}/health")["status"] == "ok"
    body = '{"task_id":"test","prompt":"Hello world"}'
    answer = curl("-X", "POST", f"{service.url}/train", "-H", "Content-Type: application/json", "-d", body)
    assert {"session_id", "final_solution", "confidence", "iterations", "training_data", "metrics"} <= set(answer)
    assert set(curl(f"{service.url}/metrics")) == {"task_aggregates", "timestamp"}
    assert set(curl(f"{service.url}/stats")) == {"training_stats", "global_stats", "timestamp"}
    assert curl(f"{service.url}/experiences/test")["count"] >= 1
    assert curl(f"{service.url}/analysis/test")["analysis"]["total_experiences"] >= 1


def test_a_task_with_an_answer_is_judged_by_it_and_by_nothing_else(service: RlvrService):
    answer = trained(service, task_id="math_problem", prompt="What is 12 * 12?", answer="144")
    assert answer["confidence"] == 1.0 and answer["metrics"]["verifier_accuracy"] is not None
    wrong = trained(service, task_id="math_problem", prompt="What is 12 * 12?", answer="145", max_iterations=2)
    assert wrong["confidence"] == 0.0 and wrong["iterations"] == 2


def test_a_task_with_tests_is_run(service: RlvrService):
    tests = ["assert fibonacci(10) == 55", "assert fibonacci(0) == 0"]
    answer = service.post("/train", {**FIBONACCI, "tests": tests})
    if answer.status_code == 503 and answer.json()["code"] == "verifier_unavailable":
        pytest.skip(answer.json()["detail"])
    assert answer.json()["confidence"] == 1.0
    answer = service.post("/train", {**FIBONACCI, "tests": ["assert fibonacci(10) == 54"], "max_iterations": 1})
    assert answer.json()["confidence"] == 0.0


def test_evaluate_measures_and_learns_nothing(service: RlvrService):
    before = service.get("/stats").json()["training_stats"]["updates"]
    answer = service.post("/evaluate", {"task_id": "badly", "prompt": "badly, please", "max_iterations": 3})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert set(found) >= {"session_id", "task_id", "summary", "detailed_metrics", "recommendations"}
    assert set(found["detailed_metrics"]) == DETAILED
    assert found["detailed_metrics"]["error_frequency"].get("too_short", 0) >= 1
    assert service.get("/stats").json()["training_stats"]["updates"] == before


def test_a_background_session_is_polled_watched_and_listed(service: RlvrService):
    begun = service.post("/train?background=true", {"task_id": "later", "prompt": "slowly: a haiku"})
    assert begun.status_code == 202 and begun.json()["status"] in ("queued", "running")
    session_id = begun.json()["session_id"]
    assert begun.headers["location"] == f"/sessions/{session_id}"
    while (state := service.get(f"/sessions/{session_id}").json())["status"] in ("queued", "running"):
        time.sleep(0.1)
    assert state["status"] == "done" and state["answer"]["final_solution"].startswith("It took me a while")
    rows = service.get("/sessions", params={"task_id": "later", "status": "done"}).json()
    assert [row["session_id"] for row in rows["sessions"]] == [session_id] and rows["next_offset"] is None


def test_sessions_are_paged(service: RlvrService):
    for _ in range(3):
        trained(service, task_id="paged")
    first = service.get("/sessions", params={"task_id": "paged", "limit": 2}).json()
    assert len(first["sessions"]) == 2 and first["next_offset"] == 2
    last = service.get("/sessions", params={"task_id": "paged", "limit": 2, "offset": 2}).json()
    assert len(last["sessions"]) == 1 and last["next_offset"] is None


def test_experiences_are_paged_and_their_task_is_found(service: RlvrService):
    ids = [trained(service, task_id="HumanEval/0")["session_id"] for _ in range(3)]
    page = service.get("/experiences/HumanEval/0", params={"limit": 2}).json()
    assert page["count"] == 3 and len(page["experiences"]) == 2
    rest = service.get("/experiences/HumanEval/0", params={"limit": 2, "after": page["next_after"]}).json()
    assert rest["next_after"] is None and len(rest["experiences"]) == 1
    assert [row["session_id"] for row in page["experiences"] + rest["experiences"]] == ids
    assert service.get("/analysis/HumanEval/0").json()["analysis"]["total_experiences"] == 3


def events(service: RlvrService, session_id: str, **headers: str) -> list[tuple[int, str, dict[str, Any]]]:
    answer = service.get(f"/sessions/{session_id}/events", headers=headers)
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = [dict(line.split(": ", 1) for line in block.splitlines()) for block in answer.text.split("\n\n")]
    return [(int(b["id"]), b["event"], json.loads(b["data"])) for b in blocks if "data" in b]


def test_events_come_as_they_happen_and_go_on_where_a_client_was(service: RlvrService):
    begun = service.post("/train?background=true", {"task_id": "seen", "prompt": "slowly: a limerick"}).json()
    told = events(service, begun["session_id"])
    assert [name for _, name, _ in told] == ["status", "status", "iteration", "end"]
    assert [number for number, _, _ in told] == [1, 2, 3, 4]
    assert told[2][2]["verifier_feedback"]["confidence"] == 1.0 and told[-1][2]["status"] == "done"
    assert events(service, begun["session_id"], **{"Last-Event-ID": "2"}) == told[2:]
    assert events(service, begun["session_id"]) == told  # from the store, once it is over


def test_a_session_can_be_cancelled_once(service: RlvrService):
    begun = service.post("/train?background=true", {"task_id": "ended", "prompt": "forever: an epic"}).json()
    ended = service.post(f"/sessions/{begun['session_id']}/cancel")
    assert ended.status_code == 200 and ended.json()["status"] == "cancelled"
    again = service.post(f"/sessions/{begun['session_id']}/cancel")
    assert again.status_code == 409 and again.json()["code"] == "already_over"


def test_a_rating_enters_the_experience_and_its_reward(service: RlvrService):
    session = trained(service, task_id="rated")
    body = {"session_id": session["session_id"], "iteration": 1, "rating": 0.0, "comment": "wrong"}
    rated = service.post("/feedback", body)
    assert rated.status_code == 200 and (rated.json()["rating"], rated.json()["ratings"]) == (0.0, 1)
    (row,) = service.get("/experiences/rated").json()["experiences"]
    assert row["rating"] == 0.0 and row["reward"] == pytest.approx(0.8 * session["training_data"][0]["reward"])
    again = service.post("/feedback", {"experience_id": row["id"], "rating": 1.0}).json()
    assert (again["rating"], again["ratings"]) == (1.0, 1)  # one per person: a second replaces the first
    assert service.post("/feedback", {"experience_id": 10**9, "rating": 1.0}).status_code == 404
    assert service.post("/feedback", {**body, "iteration": 9}).status_code == 404


def test_given_answers_are_graded_by_verifiers_and_by_a_graders_configuration(service: RlvrService):
    body = {"prompt": "12 * 12?", "answer": "144", "answers": ["\\boxed{144}", "\\boxed{146}"]}
    answer = service.post("/grade", body)
    assert answer.status_code == 200, answer.text
    assert [one["value"] for one in answer.json()["results"]] == [1.0, 0.0] and answer.json()["mean"] == 0.5
    words = {"name": "required_words", "options": {"words": ["tea"]}}
    answer = service.post("/grade", {"answers": ["Tea, please.", "Coffee."], "verifiers": [words]})
    assert [one["value"] for one in answer.json()["results"]] == [1.0, 0.0]
    grader = {
        "type": "string_check", "name": "exact", "operation": "eq",
        "input": "{{ sample.output_text }}", "reference": "{{ item.reference_answer }}",
    }  # fmt: skip
    items = [{"item": {"reference_answer": "a"}, "sample": {"output_text": text}} for text in "ab"]
    answer = service.post("/grade", {"grader": grader, "items": items})
    assert answer.status_code == 200, answer.text
    assert [one["value"] for one in answer.json()["results"]] == [1.0, 0.0]
    answer = service.post("/grade", {"grader": {**grader, "operation": "same"}, "items": items})
    assert answer.status_code == 422 and answer.json()["field"] == "grader"


BASE = {"task_id": "t", "prompt": "p"}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/train", {"prompt": "p"}, "task_id"),
        ("/train", {"task_id": "t"}, "prompt"),
        ("/train", {**BASE, "prompt": ""}, "prompt"),
        ("/train", {**BASE, "prompt": " \n"}, ""),
        ("/train", {**BASE, "prompt": "x" * 100_001}, "prompt"),
        ("/train", {**BASE, "prompt": 5}, "prompt"),
        ("/train", {**BASE, "prompt": "a\x00b"}, ""),
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
        ("/train", {**BASE, "verifiers": [{"name": "draft", "weight": -1}]}, "verifiers.0.weight"),
        ("/train", {**BASE, "verifiers": [{"name": "os:system"}]}, "verifiers.0.name"),
        ("/train", {**BASE, "verifiers": ["nothing_like_it"]}, "verifiers"),
        ("/train", {**BASE, "verifiers": [{"name": "judge", "options": {"base_url": "http://x"}}]}, "verifiers"),
        ("/train?background=perhaps", BASE, "background"),
        ("/evaluate", {"task_id": "t"}, "prompt"),
        ("/feedback", {"experience_id": 1}, "rating"),
        ("/feedback", {"experience_id": 1, "rating": 1.5}, "rating"),
        ("/feedback", {"rating": 1.0}, ""),
        ("/feedback", {"experience_id": 1, "session_id": "s", "iteration": 1, "rating": 1.0}, ""),
        ("/feedback", {"session_id": "s", "rating": 1.0}, ""),
        ("/grade", {}, ""),
        ("/grade", {"answers": ["a"], "items": [{"sample": {}}]}, ""),
        ("/grade", {"answers": [5]}, "answers.0"),
        ("/grade", {"grader": {"type": "python"}, "answers": ["a"]}, ""),
    ],
)
def test_what_is_wrong_with_a_body_is_told_with_its_field(service: RlvrService, path: str, body: Any, field: str):
    answer = service.post(path, body)
    assert answer.status_code == 422, answer.text
    told = answer.json()
    assert told.get("field", "") == field and told["code"] == "invalid" and told["detail"]
    assert told["request_id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b'{"task_id": "t", "prompt": "\\ud800"}', b"[" * 100_000,
     b'{"task_id": "t", "prompt": "p", "min_confidence": NaN}', b'{"task_id": "t", "prompt": "p", "seed": 1e999}'],
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_a_422_and_never_a_fault(service: RlvrService, content: bytes):
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
def test_what_is_not_here_is_told_as_json(service: RlvrService, method: str, path: str, status: int, code: str):
    with service.client() as client:
        answer = client.request(method, path)
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert set(answer.json()) == {"detail", "code", "request_id"}
    assert status != 405 or answer.headers["allow"]


def test_an_endpoint_that_refuses_is_a_typed_failure_that_keeps_its_session(service: RlvrService):
    answer = service.post("/train", {"task_id": "refused", "prompt": "refuse this"})
    assert answer.status_code == 502 and answer.json()["code"] == "endpoint_refused"
    state = service.get(f"/sessions/{answer.json()['session_id']}").json()
    assert state["status"] == "failed" and state["error"]["code"] == "endpoint_refused"
    assert service.get("/experiences/refused").json() == {
        "task_id": "refused", "experiences": [], "count": 0, "next_after": None,
    }  # fmt: skip
    assert service.get("/analysis/refused").json()["analysis"]["average_reward"] is None


def test_a_client_that_hangs_up_loses_its_answer_and_not_the_session(service: RlvrService):
    body = json.dumps({"task_id": "gone", "prompt": "slowly: an ode"}).encode()
    head = b"POST /train HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", service.port)) as connection:
        connection.sendall(head % len(body) + body)
        while not service.get("/sessions", params={"task_id": "gone"}).json()["sessions"]:
            time.sleep(0.05)
    deadline = time.monotonic() + 20
    while (row := service.get("/sessions", params={"task_id": "gone"}).json()["sessions"][0])["status"] != "done":
        assert time.monotonic() < deadline, row
        time.sleep(0.1)


def test_metrics_are_json_or_prometheus_text_as_is_asked(service: RlvrService):
    trained(service, task_id="counted")
    assert service.get("/metrics").json()["task_aggregates"]["counted"]["total_sessions"] == 1
    assert service.get("/metrics", headers={"accept": "*/*"}).headers["content-type"] == "application/json"
    for path, accept in (("/metrics", "text/plain"), ("/metrics/prometheus", "*/*")):
        text = service.get(path, headers={"accept": accept})
        assert text.headers["content-type"].startswith("text/plain"), text.headers
        lines = text.text.splitlines()
        assert any(
            line.startswith('rlvr_http_requests_total{method="POST",route="/train",status="200"}') for line in lines
        )
        assert 'rlvr_generator_state{kind="endpoint",state="ready"} 1.0' in lines
        assert 'rlvr_task_total_sessions{task_id="counted"} 1.0' in lines and "rlvr_database_up 1.0" in lines
        assert any(line.startswith("process_resident_memory_bytes") for line in lines)
    scraper = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    assert service.get("/metrics", headers={"accept": scraper}).text.endswith("# EOF\n")


def test_health_tells_who_generates_and_how_the_database_is(service: RlvrService):
    told = service.get("/health").json()
    assert told["generator"]["kind"] == "endpoint" and told["generator"]["learns"] == "strategies"
    assert told["database"] == {"state": "ready", "detail": ""} and told["uptime_seconds"] > 0
    assert service.get("/health/live").json() == {"status": "ok"}
    assert service.get("/health/ready").status_code == 200


def test_what_is_logged_has_the_ids_of_its_request_and_session_and_no_body(service: RlvrService):
    answer = service.post("/train", {"task_id": "logged", "prompt": "A secret to be kept"})
    request_id, session_id = answer.headers["x-request-id"], answer.json()["session_id"]
    deadline = time.monotonic() + 5  # a request is written down once it is answered
    while len(lines := [line for line in service.logged() if line.get("request_id") == request_id]) < 2:
        assert time.monotonic() < deadline, lines
        time.sleep(0.05)
    assert {line["event"] for line in lines} >= {"request", "session over"}
    assert any(line.get("session_id") == session_id for line in lines)
    assert "A secret to be kept" not in service.said


def test_the_openapi_document_has_every_path_with_examples(service: RlvrService):
    document = service.get("/openapi.json").json()
    assert {"/train", "/evaluate", "/health", "/metrics", "/stats", "/feedback", "/grade"} <= set(document["paths"])
    assert document["components"]["schemas"]["TrainBody"]["examples"][0] == FIBONACCI
    problem = document["paths"]["/train"]["post"]["responses"]["422"]["content"]["application/json"]["schema"]
    assert problem == {"$ref": "#/components/schemas/ProblemReply"}


def test_keys_are_asked_for_everywhere_but_at_health(endpoint: TextEndpoint, tmp_path: Path):
    keys = "first-key-of-the-team,second-key-of-the-team"
    with RlvrService(tmp_path, keys=keys, LLM_ENDPOINT=endpoint.plain_url) as service:
        mine = service.post("/train?background=true", {"task_id": "t", "prompt": "slowly, a sonnet"}).json()
        other = {"authorization": "Bearer second-key-of-the-team"}
        assert service.get("/stats", headers={"authorization": ""}).status_code == 401
        assert service.get("/health", headers={"authorization": ""}).status_code == 200
        assert service.get(f"/sessions/{mine['session_id']}", headers=other).status_code == 200
        answer = service.post(f"/sessions/{mine['session_id']}/cancel", headers=other)
        assert answer.status_code == 403 and answer.json()["code"] == "not_yours"
        for path in ("/feedback", "/grade", "/train"):
            assert service.post(path, {}, headers={"authorization": ""}).status_code == 401
        assert "first-key" not in service.said and "second-key" not in service.said


def test_a_database_that_takes_nothing_is_a_503_and_is_used_again_when_it_does(service: RlvrService):
    row = service.get("/experiences/test").json()["experiences"][0]
    body = {"experience_id": row["id"], "rating": 0.5}
    with contextlib.closing(sqlite3.connect(service.state / "service.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")  # another process writes, and does not come to an end
        answer = service.post("/feedback", body)
        assert answer.status_code == 503 and answer.json()["code"] == "store_down", answer.text
        assert answer.headers["retry-after"] == "5" and service.get("/health").status_code == 200
        other.execute("ROLLBACK")
    assert service.post("/feedback", body).status_code == 200


def test_without_a_generator_it_starts_says_so_and_train_tells_the_remedy(tmp_path: Path):
    with RlvrService(tmp_path) as service:
        print(f"ready after {service.started_after:.2f} s, {service.memory_mb():.0f} MB at rest")
        told = service.get("/health").json()
        assert told["status"] == "degraded" and told["generator"]["state"] == "absent"
        assert service.get("/health/ready").status_code == 503 and service.get("/health/live").status_code == 200
        answer = service.post("/train", {"task_id": "t", "prompt": "p"})
        assert answer.status_code == 503 and answer.json()["code"] == "no_generator"
        assert all(word in answer.json()["detail"] for word in ("LLM_ENDPOINT", "RLVR_MODEL", "--demo"))
        assert service.get("/stats").json()["training_stats"]["policy_entropy"] is None
        assert service.post("/grade", {"answers": ["A good answer."]}).status_code == 200


def test_a_stop_answers_who_waits_and_what_was_done_is_there_after_the_next_start(
    endpoint: TextEndpoint, tmp_path: Path
):
    with RlvrService(tmp_path, LLM_ENDPOINT=endpoint.plain_url, RLVR_MIN_CONFIDENCE="1") as service:
        trained(service, task_id="before")
        answers: list[Any] = []
        body = {"task_id": "stopped", "prompt": "slowly, badly", "max_iterations": 20}
        waiting = threading.Thread(target=lambda: answers.append(service.post("/train", body)))
        waiting.start()
        while not service.get("/sessions", params={"task_id": "stopped", "status": "running"}).json()["sessions"]:
            time.sleep(0.05)
        assert service.stop() == 0
        waiting.join()
        assert answers[0].status_code in (200, 503), answers[0].text
        assert "Traceback" not in service.said
        service.start()
        assert service.get("/experiences/before").json()["count"] == 1
        (row,) = service.get("/sessions", params={"task_id": "stopped"}).json()["sessions"]
        assert row["status"] in ("interrupted", "done")
        assert answers[0].status_code == 200 or answers[0].json()["session_id"] == row["session_id"]


@pytest.mark.parametrize(
    ("options", "environment", "said"),
    [
        (("--port", "TAKEN"), {}, "cannot listen on 127.0.0.1:TAKEN"),
        (("--host", "0.0.0.0"), {}, "no API key is set"),
        ((), {"RLVR_LOG": "loud"}, "log filter 'loud'"),
        ((), {"PORT": "x"}, "port='x' (from PORT)"),
        ((), {"DATABASE_URL": "mysql://x/y"}, "mysql"),
        (("--keys", "/nonexistent"), {}, "cannot be read"),
        (("--state", "/proc/nothing"), {}, "cannot be made"),
        (("--port", "1", "engine"), {}, "--port before 'engine' has no effect"),
    ],
)  # fmt: skip
def test_a_start_that_cannot_be_is_one_message(
    options: tuple[str, ...], environment: dict[str, str], said: str, tmp_path: Path
):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        given = ["--state", str(tmp_path)] if "--state" not in options and "engine" not in options else []
        given += [port if option == "TAKEN" else option for option in options]
        where = {} if "--port" in options or "PORT" in environment else {"PORT": "0"}
        done = subprocess.run(
            [sys.executable, "-m", "rlvr.cli", "serve", *given], capture_output=True, text=True, timeout=60,
            env={"PATH": "/usr/bin:/bin", **where, **environment},
        )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert said.replace("TAKEN", port) in done.stderr and "Traceback" not in done.stderr
