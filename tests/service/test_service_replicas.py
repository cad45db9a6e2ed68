"""Replicas of the service on one PostgreSQL and one engine server: one policy that learns from the sessions of both.

Every part is real: two processes of `rlvr serve`, one of `rlvr serve engine` with a tiny model, and a database server.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")
pytest.importorskip("tinker", reason="the extra [tinker] is not installed")
import httpx2
import sqlalchemy as sa

from rlvr.store import ExperienceStore, open_store
from rlvr.store.tables import groups, sessions
from tests.kit.code_rows import model_folder
from tests.kit.rlvr_service import RlvrService, wait_for
from tests.kit.tinker_server import TinkerServer

SHORT = {
    "task_id": "short", "prompt": "Say little.", "max_iterations": 1,
    "verifiers": [{"name": "length", "options": {"at_most": 12, "unit": "characters"}}],
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base model. The server calls it by its path, where clients find its tokenizer."""
    return model_folder(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerServer]:
    with TinkerServer({str(folder): folder}, tmp_path_factory.mktemp("served")) as server:
        yield server


@pytest.fixture
def model(folder: Path) -> str:
    return f"tinker:{folder}"


def replica(server: TinkerServer, url: str, state: Path, model: str) -> RlvrService:
    return RlvrService(
        state, DATABASE_URL=url, RLVR_MODEL=model, TINKER_BASE_URL=server.url, TINKER_API_KEY=server.key,
        TINKER_TELEMETRY="0", RLVR_BATCH_SIZE="8", RLVR_MAX_TOKENS="8", RLVR_REQUESTS_PER_MINUTE="0",
        RLVR_LEARNING_RATE="0.05",
    )  # fmt: skip


def is_ready(service: RlvrService) -> bool:
    generator = service.get("/health").json()["generator"]
    assert generator["state"] != "down", generator
    return generator["state"] == "ready"


def stats(service: RlvrService) -> dict[str, Any]:
    return service.get("/stats").json()["training_stats"]


def has_learned(service: RlvrService) -> bool:
    """Whether no step can follow: two sessions of 6 episodes are enough for one of 8."""
    return stats(service)["sessions_waiting"] <= 1


def train(service: RlvrService, seed: int) -> str:
    answer = service.post("/train", {**SHORT, "samples": 6, "seed": seed})
    assert answer.status_code == 200, answer.text
    return answer.json()["session_id"]


def answers(service: RlvrService) -> list[str]:
    """What the policy says now, by fixed draws."""
    reply = service.post("/evaluate", {**SHORT, "task_id": "fixed", "samples": 4, "seed": 99})
    assert reply.status_code == 200, reply.text
    rows = service.get("/experiences/fixed", params={"limit": 500}).json()["experiences"]
    return [row["generated_output"] for row in rows if row["session_id"] == reply.json()["session_id"]]


def rows_of(store: ExperienceStore) -> dict[str, tuple[int | None, bool]]:
    """By session: the step that learned from its group, and whether its trajectories are still there."""
    with store.read() as connection:
        found = connection.execute(sa.select(groups.c.session_id, groups.c.step, groups.c.value))
        return {row.session_id: (row.step, row.value is not None) for row in found}


def lasting(server: TinkerServer) -> set[str]:
    """The paths of the weights that the server keeps for good."""
    # Not by the SDK, whose clients leave connections to the garbage collector.
    found = httpx2.get(f"{server.url}/api/v1/checkpoints?limit=1000", headers={"x-api-key": server.key}, timeout=60)
    return {checkpoint["tinker_path"] for checkpoint in found.json()["checkpoints"] if not checkpoint["expires_at"]}


def published(store: ExperienceStore, model: str) -> dict[str, Any]:
    policy = store.policy(model)
    assert policy is not None and policy.state is not None
    return policy.state


def check_accounts(store: ExperienceStore, model: str, acknowledged: list[str]) -> int:
    """No session that a client was told of is lost, none was learned from twice; returns the number of steps."""
    state, rows = published(store, model), rows_of(store)
    assert set(acknowledged) <= set(rows)
    assert all((step is None) == has_value for step, has_value in rows.values())
    by_step = Counter(step for step, _ in rows.values() if step)
    assert sorted(by_step) == list(range(1, state["steps"] + 1)), "every step has the sessions it learned from"
    assert state["sessions"] == sum(by_step.values()), "a session was learned from twice, or by a lost step"
    assert state["dropped"] == state["refused"] == 0
    assert state["silent"] == sum(step == 0 for step, _ in rows.values())
    with store.read() as connection:
        ended = sa.select(sessions.c.id).where(sessions.c.kind == "train", sessions.c.status == "done")
        done = set(connection.scalars(ended))
    assert done <= set(rows)
    return state["steps"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_replicas_train_one_policy_and_the_other_one_takes_over_when_the_learner_is_killed(
    postgres: Any, server: TinkerServer, model: str, tmp_path: Path
):
    url = postgres.database()
    services = [replica(server, url, tmp_path / name, model) for name in "ab"]
    with ExitStack() as ends, closing(open_store(url)) as store, ThreadPoolExecutor(4) as pool:
        for service in services:
            ends.callback(service.stop)
        list(pool.map(RlvrService.start, services))  # both at once: one of them makes the run
        for service in services:
            wait_for(lambda service=service: is_ready(service))
        before = [answers(service) for service in services]
        assert before[0] == before[1], "two replicas sample from the same weights"
        told = list(pool.map(lambda i: train(services[i % 2], i), range(16)))
        wait_for(lambda: stats(services[0])["updates"] >= 1)  # a step may take all sessions that wait
        wait_for(lambda: has_learned(services[0]))
        after = [answers(service) for service in services]
        assert after[0] == after[1] != before[0]
        first, second = (stats(service) for service in services)
        assert first["updates"] == first["sampled_step"] == second["updates"] == second["sampled_step"]
        assert sorted((first["is_learner"], second["is_learner"])) == [0, 1]
        names = [service.get("/health").json()["instance"] for service in services]
        leader = names.index(first["learner"])
        assert (first, second)[leader]["is_learner"] == 1
        assert f"{names[leader]} learns" in services[1 - leader].get("/health").json()["generator"]["detail"]
        text = services[1 - leader].get("/metrics/prometheus").text
        assert f"rlvr_sampled_step {float(first['updates'])}" in text and "rlvr_is_learner 0.0" in text
        steps = check_accounts(store, model, told)
        state = published(store, model)
        assert wait_for(lambda: lasting(server) == {state["path"], state["sampler"]}), "older weights expire"

        # The learner is killed while it learns; the sessions of the other one go on.
        flood = [pool.submit(train, services[1 - leader], 100 + i) for i in range(24)]
        lost = pool.submit(lambda: [train(services[leader], 200 + i) for i in range(8)])
        wait_for(lambda: published(store, model)["steps"] > steps)
        services[leader].kill()
        told += [one.result() for one in flood]
        assert lost.exception() is not None  # its client saw the connection end
        wait_for(lambda: stats(services[1 - leader])["is_learner"] == 1)
        wait_for(lambda: has_learned(services[1 - leader]))
        taken_over = check_accounts(store, model, told)
        services[leader].start()
        wait_for(lambda: is_ready(services[leader]))
        told += list(pool.map(lambda i: train(services[i % 2], 300 + i), range(8)))
        wait_for(lambda: stats(services[leader])["updates"] > taken_over)
        wait_for(lambda: has_learned(services[leader]))
        again = [answers(service) for service in services]
        assert again[0] == again[1] != after[0]
        # A graceful stop leaves the lease: the other one learns at once.
        services[1 - leader].stop()
        wait_for(lambda: stats(services[leader])["is_learner"] == 1, 10.0)
        assert check_accounts(store, model, told) >= taken_over + 1


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_learner_that_sleeps_is_replaced_and_a_restarted_engine_server_is_used_again(
    postgres: Any, server: TinkerServer, model: str, tmp_path: Path
):
    url = postgres.database()
    services = [replica(server, url, tmp_path / name, model) for name in "ab"]
    with ExitStack() as ends, closing(open_store(url)) as store, ThreadPoolExecutor(8) as pool:
        for service in services:
            ends.callback(service.stop)
            service.start()
            wait_for(lambda service=service: is_ready(service))
        sleeper, other = services  # the first one holds the lease
        told = [train(other, seed) for seed in range(8)]
        pending = [pool.submit(train, sleeper, 50 + seed) for seed in range(6)]
        sleeper.signal(signal.SIGSTOP)
        try:
            wait_for(lambda: stats(other)["is_learner"] == 1)
            told += [train(other, 100 + seed) for seed in range(8)]
            wait_for(lambda: has_learned(other))
        finally:
            sleeper.signal(signal.SIGCONT)
        told += [one.result() for one in pending]
        wait_for(lambda: has_learned(other))
        assert (stats(sleeper)["is_learner"], stats(other)["is_learner"]) == (0, 1)
        steps = check_accounts(store, model, told)

        server.kill()
        server.start()
        for service in services:
            wait_for(lambda service=service: service.post("/train", {**SHORT, "samples": 2}).status_code == 200)
        told += list(pool.map(lambda i: train(services[i % 2], 200 + i), range(8)))
        wait_for(lambda: published(store, model)["steps"] > steps)
        wait_for(lambda: has_learned(other))
        check_accounts(store, model, told)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_replica_with_another_model_is_down_with_the_reason(
    postgres: Any, server: TinkerServer, model: str, tmp_path: Path
):
    url = postgres.database()
    with replica(server, url, tmp_path / "a", model) as first:
        wait_for(lambda: is_ready(first))
        with replica(server, url, tmp_path / "b", "tinker:another") as other:
            health = wait_for(lambda: (h := other.get("/health").json())["generator"]["state"] == "down" and h)
            assert f"trains {model} in this database" in health["generator"]["detail"]
        assert stats(first)["is_learner"] == 1
