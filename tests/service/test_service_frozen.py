"""Health and metrics of a service whose PostgreSQL is frozen answer in time, and name the database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")
from tests.kit.postgres import Server, cluster, freeze, missing
from tests.kit.rlvr_service import SOLUTION, RlvrService, wait_for
from tests.kit.text_endpoint import serving

pytestmark = pytest.mark.timeout(200)
CLIENT_S = 10.0  # far above what a probe may take, far below a statement's time limit


@pytest.fixture
def own_postgres() -> Iterator[Server]:
    """A cluster of this file's own, to freeze."""
    if why := missing():
        pytest.skip(why)
    with cluster() as server:
        yield server


def test_probes_and_metrics_answer_while_the_database_is_frozen(tmp_path: Path, own_postgres: Server):
    with (
        serving(lambda asked: SOLUTION) as endpoint,
        RlvrService(tmp_path, "--database", own_postgres.database(), LLM_ENDPOINT=endpoint.plain_url) as service,
    ):
        wait_for(lambda: service.get("/health/ready").status_code == 200)
        with freeze(own_postgres):
            for _ in range(3):  # the first too, whose last check was a good one
                ready = service.get("/health/ready", timeout=CLIENT_S)
                assert ready.status_code == 503 and "database: not answering" in ready.json()["detail"]
                assert ready.json()["database"] == {"state": "down", "detail": "not answering"}
            assert service.get("/health", timeout=CLIENT_S).json()["database"]["state"] == "down"
            assert service.get("/health/live", timeout=CLIENT_S).status_code == 200
            scraped = service.get("/metrics/prometheus", timeout=CLIENT_S)
            assert scraped.status_code == 200 and "rlvr_database_up 0.0" in scraped.text
            metrics = service.get("/metrics", timeout=CLIENT_S)
            assert metrics.status_code == 503 and metrics.json()["code"] == "store_down"
            assert "not answering" in metrics.json()["detail"]
        wait_for(lambda: service.get("/health/ready").status_code == 200)
        assert "rlvr_database_up 1.0" in service.get("/metrics/prometheus").text


def test_a_sqlite_file_that_was_moved_away_is_named(tmp_path: Path):
    with (
        serving(lambda asked: SOLUTION) as endpoint,
        RlvrService(
            tmp_path, "--database", f"sqlite:///{tmp_path}/store.db", LLM_ENDPOINT=endpoint.plain_url
        ) as service,
    ):
        wait_for(lambda: service.get("/health/ready").status_code == 200)
        (tmp_path / "store.db").rename(tmp_path / "aside.db")
        ready = service.get("/health/ready")
        assert ready.status_code == 503 and "moved away or replaced" in ready.json()["database"]["detail"]
        refused = service.post("/train", {"task_id": "t", "prompt": "Say something.", "max_iterations": 1})
        assert refused.status_code == 503 and "moved away or replaced" in refused.json()["detail"]
        (tmp_path / "aside.db").rename(tmp_path / "store.db")
        wait_for(lambda: service.get("/health/ready").status_code == 200)
