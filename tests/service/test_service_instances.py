"""Two services on one PostgreSQL: one buffer, and nothing lost or doubled when one of them is killed or the database
goes away and comes back."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")
import httpx2

from tests.kit.rlvr_service import RlvrService, wait_for
from tests.kit.text_endpoint import EndpointReply, TextEndpoint, serving


@pytest.fixture(scope="module")
def endpoint() -> Iterator[TextEndpoint]:
    def script(asked: Any) -> EndpointReply:
        return EndpointReply(
            "short" if "again and again" in asked.prompt else "An answer that rules accept.", delay=0.2
        )

    with serving(script) as server:
        yield server


def pair(url: str, folder: Path, endpoint: TextEndpoint) -> tuple[RlvrService, RlvrService]:
    both = {"DATABASE_URL": url, "LLM_ENDPOINT": endpoint.plain_url, "RLVR_MIN_CONFIDENCE": "1"}
    both["RLVR_CONVERGENCE_THRESHOLD"] = "0"  # so that a session of bad answers takes all its iterations
    return RlvrService(folder / "a", **both), RlvrService(folder / "b", **both)


@pytest.mark.slow
def test_killing_one_of_two_instances_loses_and_doubles_no_answer(
    postgres: Any, tmp_path: Path, endpoint: TextEndpoint
):
    first, second = pair(postgres.database(), tmp_path, endpoint)
    with ExitStack() as ends, ThreadPoolExecutor(2) as threads:
        ends.callback(first.stop)
        ends.callback(second.stop)
        list(threads.map(RlvrService.start, (first, second)))  # both at once, on an empty database
        one = first.post("/train", {"task_id": "shared", "prompt": "Say something."}).json()
        (row,) = second.get("/experiences/shared").json()["experiences"]
        assert row["session_id"] == one["session_id"]
        body = {"task_id": "killed", "prompt": "again and again", "max_iterations": 12, "verifiers": ["draft"]}
        begun = {
            service: [service.post("/train?background=true", body).json()["session_id"] for _ in range(3)]
            for service in (first, second)
        }
        wait_for(lambda: second.get("/experiences/killed").json()["count"] >= 9)
        first.kill()
        seen = {id_: events(second, id_, 2) for id_ in begun[first]}  # what was known when it died
        first.start()
        states = {id_: first.get(f"/sessions/{id_}").json() for id_ in begun[first]}
        assert {state["status"] for state in states.values()} == {"interrupted"}
        assert all(state["error"]["code"] == "interrupted" for state in states.values())
        for id_ in begun[second]:
            state = wait_for(lambda id_=id_: done(first, id_))
            assert state["status"] == "done" and state["iterations"] == 12
        rows = everything(first, "killed")
        places = Counter((row["session_id"], row["sample"], row["iteration"]) for row in rows)
        assert max(places.values()) == 1
        for id_ in (*begun[first], *begun[second]):
            iterations = sorted(row["iteration"] for row in rows if row["session_id"] == id_)
            assert iterations == list(range(1, len(iterations) + 1)) and iterations
        assert all(len(seen[id_]) <= len([r for r in rows if r["session_id"] == id_]) for id_ in seen)
        totals = {service.get("/stats").json()["global_stats"]["total_experiences"] for service in (first, second)}
        assert totals == {len(rows) + 1}
        assert first.get("/analysis/killed").json() == second.get("/analysis/killed").json()


@pytest.mark.slow
def test_a_lost_database_is_reported_and_used_again_when_it_is_back(
    postgres: Any, tmp_path: Path, endpoint: TextEndpoint
):
    first, _ = pair(postgres.database(), tmp_path, endpoint)
    with first:
        assert first.post("/train", {"task_id": "before", "prompt": "Say something."}).status_code == 200
        body = {"task_id": "during", "prompt": "again and again", "max_iterations": 4, "verifiers": ["draft"]}
        begun = first.post("/train?background=true", body).json()
        try:
            postgres.stop()
            reply = first.get("/health").json()
            assert reply["database"]["state"] == "down" and reply["status"] == "degraded"
            assert first.get("/health/live").status_code == 200 and first.get("/health/ready").status_code == 503
            assert "rlvr_database_up 0.0" in first.get("/metrics/prometheus").text
            # Requests wait half a minute for a restart; later ones are told at once.
            with ThreadPoolExecutor(5) as threads:
                early = list(threads.map(first.get, ("/stats", "/metrics", "/experiences/before", "/sessions")))
            began = time.monotonic()
            late = first.post("/train", {"task_id": "during", "prompt": "p"})
            assert time.monotonic() - began < 10
            for answer in (*early, late):
                assert (answer.status_code, answer.json()["code"]) == (503, "store_down"), answer.text
                assert "not reachable" in answer.json()["detail"] and str(postgres.folder) not in answer.text
        finally:
            postgres.start()
        wait_for(lambda: first.get("/health").json()["status"] == "ok")
        state = wait_for(lambda: done(first, begun["session_id"]))
        # Its own patience may be over too; the row has the number of its answers all the same.
        assert state["status"] == "done" or state["error"]["code"] == "store_down"
        assert first.get("/experiences/during").json()["count"] == state["iterations"]
        assert first.get("/experiences/before").json()["count"] == 1


@pytest.mark.slow
def test_new_requests_wait_for_a_database_that_restarts(postgres: Any, tmp_path: Path, endpoint: TextEndpoint):
    first, _ = pair(postgres.database(), tmp_path, endpoint)
    with first, ThreadPoolExecutor(4) as threads:
        id = first.post("/train", {"task_id": "before", "prompt": "Say something."}).json()["session_id"]
        postgres.stop()
        try:
            asked = [
                threads.submit(first.post, "/train", {"task_id": "meanwhile", "prompt": "Say something."}),
                threads.submit(first.post, "/feedback", {"session_id": id, "iteration": 1, "rating": 1.0}),
                threads.submit(first.get, "/stats"),
            ]
            time.sleep(2.0)
            assert not any(one.done() for one in asked)
        finally:
            postgres.start()
        assert [one.result().status_code for one in asked] == [200, 200, 200]


@pytest.mark.slow
def test_two_instances_have_the_same_stats(postgres: Any, tmp_path: Path, endpoint: TextEndpoint):
    """The strategies that one has learned are in the other's numbers at once, before it works on a session."""
    first, second = pair(postgres.database(), tmp_path, endpoint)
    for service in (first, second):
        service._environment["RLVR_MIN_EXPERIENCES_FOR_TRAINING"] = "2"
    with first, second:
        assert second.get("/stats").json()["training_stats"]["updates"] == 0
        for number in range(3):
            body = {"task_id": "t", "prompt": "Say 7 again and again.", "answer": "7", "max_iterations": number + 1}
            assert first.post("/train", body).status_code == 200
            mine, others = (without_times(service.get("/stats").json()) for service in (first, second))
            assert mine == others
        assert mine["training_stats"]["updates"] > 0 and mine["training_stats"]["verifier_accuracy"] is not None


def without_times(stats: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in stats.items() if name != "timestamp"}


def done(service: RlvrService, session_id: str) -> dict[str, Any] | None:
    answer = service.get(f"/sessions/{session_id}")
    state = answer.json()
    return state if answer.status_code == 200 and state["status"] not in ("queued", "running") else None


def events(service: RlvrService, session_id: str, seconds: float) -> list[str]:
    """The iterations that a watcher of a session gets within a time."""
    lines: list[str] = []
    until = time.monotonic() + seconds
    try:
        with service.client() as client, client.stream("GET", f"/sessions/{session_id}/events", timeout=1.0) as answer:
            for line in answer.iter_lines():
                if line == "event: iteration":
                    lines.append(line)
                if line == "event: end" or time.monotonic() > until:
                    break
    except httpx2.ReadTimeout:
        pass
    return lines


def everything(service: RlvrService, task_id: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    after: int | None = None
    while True:
        asked = {"limit": 7} | ({} if after is None else {"after": after})
        page = service.get(f"/experiences/{task_id}", params=asked).json()
        rows += page["experiences"]
        if (after := page["next_after"]) is None:
            assert page["count"] == len(rows)
            return rows
