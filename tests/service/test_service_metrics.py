"""What the service measures of itself, and that alert rules, dashboard and documentation name only what it emits.

Rules and expressions are tried with Prometheus's own programs (Debian's package prometheus) where they are installed.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.kit.rlvr_service import RlvrService, scripted_service

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
# There once something was learned, or if replicas share a policy (tests/service/test_service_replicas.py).
OPTIONAL = {
    "rlvr_learning_rate",  # of weights; strategies are drawn by evidence
    "rlvr_training_loss", "rlvr_sampled_step", "rlvr_is_learner", "rlvr_sessions_waiting", "rlvr_sessions_dropped",
}  # fmt: skip
MATH = {"task_id": "product", "prompt": "What is 12 * 12?", "answer": "144"}
Samples = Callable[..., float]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RlvrService]:
    """Two training sessions that pass, an evaluation that does, one that fails twice, one whose endpoint refuses it."""
    with scripted_service(tmp_path_factory.mktemp("metrics")) as running:
        for _ in range(2):
            assert running.post("/train", MATH).status_code == 200
        assert running.post("/evaluate", MATH).status_code == 200
        wrong = {"task_id": "sum", "prompt": "Add badly.", "answer": "4", "max_iterations": 2}
        assert running.post("/evaluate", wrong).status_code == 200
        assert running.post("/train", {"task_id": "no", "prompt": "refuse this"}).status_code == 502
        assert running.post("/grade", {"answer": "1", "answers": ["\\boxed{1}"] * 3}).status_code == 200
        yield running


@pytest.fixture(scope="module")
def text(service: RlvrService) -> str:
    return service.get("/metrics/prometheus").text


@pytest.fixture(scope="module")
def sample(text: str) -> Samples:
    """The value of a sample by its name and labels."""
    found = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    return lambda name, **labels: found[name, frozenset(labels.items())]


def emitted(text: str) -> set[str]:
    """The names under which Prometheus keeps the metrics, also those that have no sample yet."""
    names: set[str] = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M):
        names |= {f"{name}_{end}" for end in ("bucket", "sum", "count")} if kind == "histogram" else set()
        names.add(name)
    return names


def test_completions_are_counted_by_kind_place_and_outcome(sample: Samples):
    counts = {
        (kind, attempt, outcome): sample("rlvr_completions_total", kind=kind, attempt=attempt, outcome=outcome)
        for kind in ("train", "evaluate")
        for attempt in ("first", "later")
        for outcome in ("passed", "failed")
    }
    assert {key: value for key, value in counts.items() if value} == {
        ("train", "first", "passed"): 2, ("evaluate", "first", "passed"): 1, ("evaluate", "first", "failed"): 1,
        ("evaluate", "later", "failed"): 1,
    }  # fmt: skip


def test_the_success_rate_is_that_of_training_sessions(sample: Samples, text: str):
    assert sample("rlvr_success_rate") == 1.0  # of the three answers of evaluations two failed
    assert sample("rlvr_experiences") == 5
    assert "# HELP rlvr_experiences Answers of sessions in the database, also those" in text


def test_sessions_have_their_length_and_how_they_ended(sample: Samples):
    assert sample("rlvr_sessions_ended_total", kind="train", status="done") == 2
    assert sample("rlvr_sessions_ended_total", kind="train", status="failed") == 1
    assert sample("rlvr_session_seconds_count", kind="evaluate") == 2
    assert sample("rlvr_session_iterations_sum", kind="evaluate") == 3
    assert 0 < sample("rlvr_session_seconds_sum", kind="evaluate") < 60


def test_the_generator_has_its_latency_its_errors_and_its_tokens(sample: Samples):
    assert sample("rlvr_generator_seconds_count") == 5 and 0 < sample("rlvr_generator_seconds_sum") < 60
    assert sample("rlvr_generator_errors_total", code="endpoint_refused") == 1
    assert sample("rlvr_tokens_total", of="prompt") > 20 and sample("rlvr_tokens_total", of="completion") > 5


def test_verifiers_have_their_time_and_verdicts_also_those_of_grade(sample: Samples):
    assert sample("rlvr_verdicts_total", verifier="math", outcome="passed") == 3 + 3
    assert sample("rlvr_verdicts_total", verifier="math", outcome="failed") == 2
    assert sample("rlvr_verifier_seconds_count", verifier="math") == 5 + 1, "the answers of a request are one call"


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\b(?:rlvr|process)_[a-z_]+", text)) - {"rlvr_key", "rlvr_alerts", "rlvr_pass_rates"}


@pytest.mark.parametrize("path", ["deploy/alerts.yml", "deploy/alerts_test.yml", "deploy/grafana-dashboard.json"])
def test_rules_and_dashboard_name_only_metrics_that_are_emitted(path: str, text: str):
    named = names_in((ROOT / path).read_text(encoding="utf-8"))
    assert len(named) > 5 and named <= emitted(text) | OPTIONAL


def test_the_page_and_the_service_name_the_same_metrics(text: str):
    page = (ROOT / "docs" / "service" / "operations.md").read_text(encoding="utf-8")
    tasks = ["total_sessions", "average_confidence", "success_rate", "best_confidence"]
    named = names_in(page) | {f"rlvr_task_{name}" for name in tasks}
    assert named <= emitted(text) | OPTIONAL
    families = set(re.findall(r"^# TYPE (rlvr_\S+) ", text, re.M))
    unexplained = {name for name in families - named if not name.endswith("_created")}
    assert unexplained == set(), "metrics that no page explains"


def dashboard_expressions() -> list[str]:
    panels = json.loads((DEPLOY / "grafana-dashboard.json").read_text(encoding="utf-8"))["panels"]
    assert len({panel["title"] for panel in panels}) == len(panels) > 10
    return [target["expr"].replace("$__rate_interval", "20s") for panel in panels for target in panel["targets"]]


@pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool here (Debian's package prometheus)")
def test_the_rules_fire_where_they_must_and_only_there():
    for command in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(["promtool", *command], cwd=DEPLOY, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
    rules, tests = ((DEPLOY / name).read_text(encoding="utf-8") for name in ("alerts.yml", "alerts_test.yml"))
    assert set(re.findall(r"alert: (\w+)", rules)) == set(re.findall(r"alertname: (\w+)", tests)), "each one is tried"


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("prometheus"), reason="no prometheus here (Debian's package prometheus)")
def test_a_real_prometheus_scrapes_the_service_and_evaluates_the_dashboard(service: RlvrService, tmp_path: Path):
    rules = (DEPLOY / "alerts.yml").read_text(encoding="utf-8").replace("interval: 1m", "interval: 1s")
    (tmp_path / "alerts.yml").write_text(rules)
    where = service.url.removeprefix("http://")
    (tmp_path / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files: [alerts.yml]\nscrape_configs:\n"
        f"  - {{job_name: rlvr, metrics_path: /metrics/prometheus, static_configs: [{{targets: ['{where}']}}]}}\n"
    )
    port = free_port()
    command = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data", "--log.level=error"]
    process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], cwd=tmp_path)
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:

            def query(expression: str) -> list[Any]:
                answer = client.get("/api/v1/query", params={"query": expression}).json()
                assert answer["status"] == "success", (expression, answer)
                return answer["data"]["result"]

            wait_until(lambda: client.get("/-/ready").status_code == 200)
            wait_until(lambda: bool(query("rlvr_database_up offset 3s")))
            for _ in range(20):
                assert service.post("/train", MATH).status_code == 200
            wait_until(lambda: bool(query('rlvr:pass_rate:6h{kind="train"}')))
            [point] = query('rlvr:pass_rate:6h{kind="train"}')
            assert float(point["value"][1]) == 1.0
            empty = [expression for expression in dashboard_expressions() if not query(expression)]
            allowed = ("later", "rlvr_training_loss", "rlvr_generator_errors", "queued")
            assert [one for one in empty if not any(word in one for word in allowed)] == []
            assert query('ALERTS{alertstate="firing"}') == []
    finally:
        process.terminate()
        process.wait(20)


def free_port() -> int:
    import socket

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def wait_until(is_so: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            if is_so():
                return
        except httpx2.TransportError:
            pass
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.2)
