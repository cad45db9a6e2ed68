"""The service over HTTP: a real `rlvr serve`, a real text endpoint, the documented bodies."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")
from tests.kit.rlvr_service import SOLUTION, WRONG, RlvrService, scripted_service

FIBONACCI = {
    "task_id": "code_fibonacci",
    "prompt": "Write a function to calculate the nth Fibonacci number",
    "context": "Python programming, should be efficient and handle edge cases",
    "max_iterations": 8,
    "min_confidence": 0.85,
}
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


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RlvrService]:
    with scripted_service(tmp_path_factory.mktemp("service")) as running:
        yield running


def post_train(service: RlvrService, **body: Any) -> dict[str, Any]:
    answer = service.post("/train", {"task_id": "test", "prompt": "Hello world", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_documented_request_gets_the_documented_response(service: RlvrService):
    answer = post_train(service, **FIBONACCI, verifiers=["draft"])
    assert answer["final_solution"] == SOLUTION and answer["confidence"] >= 0.85 and answer["iterations"] == 1
    assert set(answer["metrics"]) >= METRICS
    (step,) = answer["training_data"]
    assert set(step) >= {"iteration", "prompt", "generated_output", "verifier_feedback", "reward", "timestamp"}
    assert step["iteration"] == 1 and "efficient and handle edge cases" in step["prompt"]
    feedback = ["confidence", "correctness_score", "quality_score", "detailed_feedback", "error_types", "suggestions"]
    assert list(step["verifier_feedback"]) == feedback
    assert answer["metrics"]["verifier_accuracy"] is None  # nothing says what is right
    assert answer["metrics"]["policy_entropy"] > 0


def test_a_request_that_nothing_can_verify_is_no_success(service: RlvrService):
    """The documented request, against a model whose answer is wrong, and with examples that say so."""
    fibonacci = {**FIBONACCI, "task_id": "wrong_fibonacci", "context": "sketchily"}
    plain = post_train(service, **fibonacci)
    assert (plain["final_solution"], plain["confidence"], plain["iterations"]) == (WRONG, None, 1)
    assert plain["training_data"][0]["reward"] is None and not plain["converged"] and plain["derived_tests"] == []
    assert "unverified" in plain["warnings"][0] and '"verifiers": ["draft"]' in plain["warnings"][0]
    aggregate = service.get("/metrics").json()["task_aggregates"]["wrong_fibonacci"]
    assert (aggregate["total_sessions"], aggregate["success_rate"], aggregate["average_confidence"]) == (1, None, None)
    (row,) = service.get("/experiences/wrong_fibonacci").json()["experiences"]
    assert row["outcome"] == "unverified"
    background = service.post("/train?background=true", fibonacci).json()
    assert "unverified" in background["warnings"][0]
    graded = service.post("/grade", {"prompt": FIBONACCI["prompt"], "answers": [WRONG]}).json()
    assert (graded["mean"], graded["results"][0]["outcome"]) == (None, "unverified") and graded["warnings"]
    examples = {**fibonacci, "prompt": f"{FIBONACCI['prompt']}, for example `f(10) = 55`.", "max_iterations": 2}
    answer = service.post("/train", examples)
    if answer.status_code == 503 and answer.json()["code"] == "verifier_unavailable":
        pytest.skip(answer.json()["detail"])
    derived = answer.json()
    assert (derived["confidence"], derived["derived_tests"]) == (0.0, ["assert f(10) == 55"])
    assert derived["training_data"][0]["verifier_feedback"]["error_types"] == ["assertion"]
    assert "examples in the prompt became tests" in derived["warnings"][0]


def test_the_documented_curl_commands_work(service: RlvrService):
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


def test_a_task_with_an_answer_is_judged_by_it_only(service: RlvrService):
    answer = post_train(service, task_id="math_problem", prompt="What is 12 * 12?", answer="144")
    assert answer["confidence"] == 1.0 and answer["metrics"]["verifier_accuracy"] is not None
    wrong = post_train(service, task_id="math_problem", prompt="What is 12 * 12?", answer="145", max_iterations=2)
    assert wrong["confidence"] == 0.0 and wrong["iterations"] == 2


def test_a_task_with_tests_runs_them(service: RlvrService):
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


def test_evaluations_do_not_make_the_buffer_ready_for_training(tmp_path: Path):
    with scripted_service(tmp_path, RLVR_MIN_EXPERIENCES_FOR_TRAINING="1") as service:
        body = {"task_id": "test", "prompt": "Hello world", "verifiers": ["draft"]}
        service.post("/train", {"task_id": "test", "prompt": "Hello world"})  # unverified: nothing to learn from
        service.post("/evaluate", body)
        before = service.get("/stats").json()["training_stats"]
        service.post("/train", body)
        after = service.get("/stats").json()["training_stats"]
        reply = service.post("/evaluate", body).json()
    assert reply["detailed_metrics"]["training_loss"] is None and after["training_loss"] is not None
    assert (before["ready_for_training"], before["total_experiences"] >= 1, before["updates"]) == (False, True, 0)
    assert (after["ready_for_training"], after["updates"]) == (True, 1)


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
        post_train(service, task_id="paged")
    first = service.get("/sessions", params={"task_id": "paged", "limit": 2}).json()
    assert len(first["sessions"]) == 2 and first["next_offset"] == 2
    last = service.get("/sessions", params={"task_id": "paged", "limit": 2, "offset": 2}).json()
    assert len(last["sessions"]) == 1 and last["next_offset"] is None


def test_experiences_are_paged_and_their_task_is_found(service: RlvrService):
    ids = [post_train(service, task_id="HumanEval/0")["session_id"] for _ in range(3)]
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


def test_events_arrive_live_and_resume(service: RlvrService):
    body = {"task_id": "seen", "prompt": "slowly: a limerick", "verifiers": ["draft"]}
    begun = service.post("/train?background=true", body).json()
    seen = events(service, begun["session_id"])
    assert [name for _, name, _ in seen] == ["status", "status", "iteration", "end"]
    assert [number for number, _, _ in seen] == [1, 2, 3, 4]
    assert seen[2][2]["verifier_feedback"]["confidence"] == 1.0 and seen[-1][2]["status"] == "done"
    assert events(service, begun["session_id"], **{"Last-Event-ID": "2"}) == seen[2:]
    assert events(service, begun["session_id"]) == seen  # from the store, once it is over


def test_a_session_can_be_cancelled_once(service: RlvrService):
    begun = service.post("/train?background=true", {"task_id": "ended", "prompt": "forever: an epic"}).json()
    ended = service.post(f"/sessions/{begun['session_id']}/cancel")
    assert ended.status_code == 200 and ended.json()["status"] == "cancelled"
    again = service.post(f"/sessions/{begun['session_id']}/cancel")
    assert again.status_code == 409 and again.json()["code"] == "already_over"


def test_a_rating_enters_the_experience_and_its_reward(service: RlvrService):
    session = post_train(service, task_id="rated", verifiers=["draft"])
    body = {"session_id": session["session_id"], "iteration": 1, "rating": 0.0, "comment": "wrong"}
    rated = service.post("/feedback", body)
    assert rated.status_code == 200 and (rated.json()["rating"], rated.json()["ratings"]) == (0.0, 1)
    (row,) = service.get("/experiences/rated").json()["experiences"]
    assert row["rating"] == 0.0 and row["reward"] == pytest.approx(0.8 * session["training_data"][0]["reward"])
    again = service.post("/feedback", {"experience_id": row["id"], "rating": 1.0}).json()
    assert (again["rating"], again["ratings"]) == (1.0, 1)  # one per person: a second replaces the first
    assert service.post("/feedback", {"experience_id": 10**9, "rating": 1.0}).status_code == 404
    assert service.post("/feedback", {**body, "iteration": 9}).status_code == 404


def test_grade_scores_answers_by_verifiers_or_by_a_grader(service: RlvrService):
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


def test_an_answer_that_fails_its_verdict_is_no_success(service: RlvrService):
    """A grader's high score below its threshold, and a wrong answer whose only vote has the form."""
    grader = {"type": "text_similarity", "name": "like", "evaluation_metric": "fuzzy_match", "pass_threshold": 0.999,
              "input": "{{ sample.output_text }}", "reference": "{{ item.wanted }}"}  # fmt: skip
    item = {"wanted": f"{SOLUTION} # end"}
    asked = {"prompt": FIBONACCI["prompt"], "max_iterations": 1, "min_confidence": 0.999}
    body = {**asked, "task_id": "almost", "grader": grader, "item": item}
    evaluated = service.post("/evaluate", {**body, "task_id": "almost-evaluated"}).json()
    answer = post_train(service, **body)
    assert 0.8 < answer["confidence"] < 0.999
    assert service.get("/metrics").json()["task_aggregates"]["almost"]["success_rate"] == 0.0
    assert service.get("/analysis/almost").json()["analysis"]["success_rate"] == 0.0
    assert evaluated["summary"].startswith("not solved")
    assert "almost-evaluated" not in service.get("/metrics").json()["task_aggregates"]
    kinds = {row["task_id"]: row["kind"] for row in service.get("/sessions").json()["sessions"]}
    assert (kinds["almost"], kinds["almost-evaluated"]) == ("train", "evaluate")
    watched = {"answer": "145", "verifiers": [{"name": "math", "weight": 0}, "draft"], "max_iterations": 2}
    wrong = post_train(service, task_id="outvoted", prompt="What is 12 * 12?", **watched)
    assert (wrong["confidence"], wrong["converged"], wrong["warnings"]) == (0.0, False, [])
    assert service.get("/metrics").json()["task_aggregates"]["outvoted"]["success_rate"] == 0.0


def test_a_grader_works_in_train_as_in_grade(service: RlvrService):
    grader = {"type": "string_check", "name": "same", "operation": "eq",
              "input": "{{ sample.output_text }}", "reference": "{{ item.wanted }}"}  # fmt: skip
    for wanted, confidence in ((SOLUTION, 1.0), ("something else", 0.0)):
        item = {"wanted": wanted}
        graded = service.post(
            "/grade", {"grader": grader, "items": [{"item": item, "sample": {"output_text": SOLUTION}}]}
        )
        assert graded.json()["mean"] == confidence
        answer = post_train(service, task_id="graded", grader=grader, item=item, max_iterations=1)
        assert (answer["confidence"], answer["metrics"]["verified_by"]) == (confidence, ["grader"])
    refused = [service.post("/grade", {"grader": {"type": "no"}, "items": [{"sample": {}}]}),
               service.post("/train", {"task_id": "t", "prompt": "p", "grader": {"type": "no"}})]  # fmt: skip
    assert [answer.json()["field"] for answer in refused] == ["grader", "grader"]
    assert all("string_check" in answer.json()["detail"] for answer in refused)


def test_metrics_are_json_or_prometheus_text_by_accept_header(service: RlvrService):
    post_train(service, task_id="counted")
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


def test_health_has_the_states_of_generator_and_database(service: RlvrService):
    reply = service.get("/health").json()
    assert reply["generator"]["kind"] == "endpoint" and reply["generator"]["learns"] == "strategies"
    assert reply["database"] == {"state": "ready", "detail": ""} and reply["uptime_seconds"] > 0
    assert service.get("/health/live").json() == {"status": "ok"}
    assert service.get("/health/ready").status_code == 200


def test_log_records_have_request_and_session_ids_and_no_body(service: RlvrService):
    answer = service.post("/train", {"task_id": "logged", "prompt": "A secret to be kept"})
    request_id, session_id = answer.headers["x-request-id"], answer.json()["session_id"]
    deadline = time.monotonic() + 5  # a request is written down once it is answered
    while len(lines := [line for line in service.log_records() if line.get("request_id") == request_id]) < 2:
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
    assert problem == {"$ref": "#/components/schemas/ProblemResponse"}


@pytest.mark.slow
def test_a_database_that_is_down_is_a_503_and_is_used_again_later(service: RlvrService):
    assert service.post("/train", {"task_id": "test", "prompt": "Hello world"}).status_code == 200
    row = service.get("/experiences/test").json()["experiences"][0]
    body = {"experience_id": row["id"], "rating": 0.5}
    with contextlib.closing(sqlite3.connect(service.state / "service.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")  # another process writes, and does not come to an end
        answer = service.post("/feedback", body)
        assert answer.status_code == 503 and answer.json()["code"] == "store_down", answer.text
        assert answer.headers["retry-after"] == "5" and service.get("/health").status_code == 200
        other.execute("ROLLBACK")
    assert service.post("/feedback", body).status_code == 200
