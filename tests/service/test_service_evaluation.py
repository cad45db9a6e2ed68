"""`rlvr evaluate-service` against a real service over a scripted endpoint: what it reports, and its exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlvr.cli.main import run
from rlvr.service.evaluation.evaluation_tasks import TASKS
from tests.kit.evaluation_answers import BAD, GOOD
from tests.kit.rlvr_service import RlvrService
from tests.kit.text_endpoint import EndpointReply, EndpointRequest, serving, unused_port

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "test_rlvr_evaluation.py"


def task_of(asked: EndpointRequest) -> str:
    return next(task.id for task in TASKS if task.prompt in asked.prompt)


class Endpoint:
    """The script of the endpoint, set by each test."""

    def __init__(self) -> None:
        self.script: Callable[[EndpointRequest], str | EndpointReply] = lambda asked: GOOD[task_of(asked)]


@pytest.fixture(scope="module")
def endpoint() -> Endpoint:
    return Endpoint()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, endpoint: Endpoint) -> Iterator[RlvrService]:
    with serving(lambda asked: endpoint.script(asked)) as server:
        state = tmp_path_factory.mktemp("service") / "state"
        with RlvrService(state, keys="sk-evaluation-test", LLM_ENDPOINT=server.plain_url) as running:
            yield running


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLVR_API_KEY", "sk-evaluation-test")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return tmp_path


def suite(service: RlvrService, *options: str) -> tuple[int, dict[str, Any]]:
    code = run(["evaluate-service", "--url", service.url, "--out", "report.json", *options])
    return code, json.loads(Path("report.json").read_text())


def test_good_answers_meet_every_threshold(service: RlvrService, endpoint: Endpoint, capsys: Any) -> None:
    endpoint.script = lambda asked: GOOD[task_of(asked)]
    code, report = suite(
        service, "--min-success", "1", "--min-solved", "1", "--min-convergence", "1", "--max-errors", "0"
    )
    assert code == 0 and report["held"] and report["complete"], report["broken"]
    assert [r["task_id"] for r in report["results"]] == [task.id for task in TASKS]
    assert all(r["confidence"] == 1 and r["iterations"] == 1 and r["converged"] for r in report["results"])
    overall = report["overall"]
    assert overall["success_rate"]["value"] == overall["solved_rate"]["value"] == 1
    assert overall["success_rate"]["low"] == pytest.approx(13 / (13 + 1.96**2), abs=1e-3)  # Wilson's for 13 of 13
    assert overall["error_rate"]["value"] == 0 and overall["tokens"] > 0 and overall["time_per_iteration"] > 0
    assert overall["improvement_rate"]["value"] is None  # no session needed a second try
    assert list(report["categories"]) == ["code_generation", "problem_solving", "creative_writing", "complex_reasoning"]
    shown = capsys.readouterr()
    assert "all thresholds held" in shown.out and "code_fibonacci" in shown.out
    assert (
        "[13/13]" in shown.err
        and "designs were checked by rules only" in shown.err
        and "this service has no judge" in shown.err
    )


@pytest.mark.slow
def test_bad_answers_meet_no_threshold(service: RlvrService, endpoint: Endpoint, capsys: Any) -> None:
    endpoint.script = lambda asked: BAD[task_of(asked)][2]
    code, report = suite(service, "--quick", "--max-iterations", "2")
    assert code == 1 and not report["held"]
    assert report["overall"]["success_rate"]["value"] == 0 and report["overall"]["error_rate"]["value"] == 0
    assert report["broken"] == ["success rate 0.000, expected at least 0.5"]
    assert report["overall"]["error_types"] and "not held: success rate" in capsys.readouterr().out


def test_a_better_second_answer_is_an_improvement(service: RlvrService, endpoint: Endpoint) -> None:
    seen: dict[str, int] = {}

    def better(asked: EndpointRequest) -> str:
        name = task_of(asked)
        seen[name] = seen.get(name, 0) + 1
        return GOOD[name] if seen[name] % 2 == 0 else "\\boxed{205}"

    endpoint.script = better
    options = ["--tasks", "math_problem", "logic_boxes", "--repeats", "2", "--concurrency", "1"]
    code, report = suite(service, *options, "--min-improvement", "0.5")
    assert code == 0, report
    assert [(r["task_id"], r["repeat"]) for r in report["results"]] == [
        ("math_problem", 0), ("math_problem", 1), ("logic_boxes", 0), ("logic_boxes", 1),
    ]  # fmt: skip
    assert all((r["iterations"], r["improvement"]) == (2, 1) for r in report["results"])
    assert report["overall"]["error_types"] == {"wrong_value": 4}


def test_the_service_learns_nothing_from_an_evaluation(service: RlvrService) -> None:
    learned = service.get("/health").json()["generator"]
    assert learned.get("updates", 0) == 0


def test_a_failing_endpoint_is_an_error_and_not_a_wrong_answer(service: RlvrService, endpoint: Endpoint) -> None:
    def half(asked: EndpointRequest) -> str | EndpointReply:
        return EndpointReply("", status=401) if task_of(asked) == "math_problem" else GOOD[task_of(asked)]

    endpoint.script = half
    code, report = suite(service, "--tasks", "math_problem", "logic_boxes")
    overall = report["overall"]
    assert overall["success_rate"]["value"] == 1 and overall["error_rate"]["value"] == 0.5
    assert code == 1 and report["broken"] == ["error rate 0.500, expected at most 0.1"]
    (failed,) = [r for r in report["results"] if r["error"]]
    assert failed["task_id"] == "math_problem" and failed["error"]["code"].startswith("endpoint_")
    assert failed["confidence"] is None


@pytest.mark.slow
def test_a_late_session_is_cancelled_and_counts_as_an_error(service: RlvrService, endpoint: Endpoint) -> None:
    endpoint.script = lambda asked: EndpointReply("x", delay=20)
    code, report = suite(service, "--tasks", "math_problem", "--timeout", "1")
    (late,) = report["results"]
    assert code == 1 and late["error"]["code"] == "timeout" and late["status"] == "cancelled"


@pytest.mark.slow
def test_ctrl_c_cancels_running_sessions_and_keeps_the_results(service: RlvrService, endpoint: Endpoint) -> None:
    waiting = threading.Event()

    def slow(asked: EndpointRequest) -> str | EndpointReply:
        if task_of(asked) == "math_problem":
            return GOOD["math_problem"]
        waiting.set()
        return EndpointReply("x", delay=30)

    endpoint.script = slow
    command = [sys.executable, str(SCRIPT), "--url", service.url, "--out", "report.json", "--concurrency", "1"]
    command += ["--tasks", "math_problem", "logic_boxes"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert waiting.wait(60)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    report = json.loads(Path("report.json").read_text())
    assert process.returncode == 130, err
    assert [r["task_id"] for r in report["results"]] == ["math_problem"] and not report["complete"]
    assert "incomplete: 1 of 2 sessions" in out and "stopped after 1 of 2 sessions" in err
    ended = _until(lambda: service.get("/sessions", params={"task_id": "logic_boxes"}).json()["sessions"][0])
    assert ended["status"] == "cancelled"


def _until(look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    end = time.monotonic() + 30
    while (found := look())["status"] in ("queued", "running") and time.monotonic() < end:
        time.sleep(0.1)
    return found


def test_the_documented_commands_run(service: RlvrService, endpoint: Endpoint) -> None:
    endpoint.script = lambda asked: GOOD[task_of(asked)]
    environment = {**os.environ, "RLVR_API_KEY": "sk-evaluation-test"}
    command = [sys.executable, str(SCRIPT), "--tasks", "code_fibonacci", "math_problem", "--url", service.url]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "code_fibonacci" in done.stdout and "math_problem" in done.stdout and "code_sorting" not in done.stdout


def test_a_missing_key_names_the_variable(service: RlvrService, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.delenv("RLVR_API_KEY")
    assert run(["evaluate-service", "--url", service.url, "--quick"]) == 2
    assert "RLVR_API_KEY" in capsys.readouterr().err


def test_no_service_and_a_bad_result_have_different_exit_codes(tmp_path: Path, capsys: Any) -> None:
    assert run(["evaluate-service", "--url", f"http://127.0.0.1:{unused_port()}", "--quick"]) == 3
    assert "no service answers" in capsys.readouterr().err
    with RlvrService(tmp_path / "state", LLM_ENDPOINT="none") as empty:
        assert run(["evaluate-service", "--url", empty.url, "--quick"]) == 3
    assert "LLM_ENDPOINT" in capsys.readouterr().err
    with serving(lambda asked: "") as other:  # something else that speaks HTTP
        assert run(["evaluate-service", "--url", f"http://127.0.0.1:{other.port}"]) == 3


def test_an_available_judge_judges_designs(tmp_path: Path) -> None:
    def script(asked: EndpointRequest) -> str:
        if not asked.chat:
            return GOOD[task_of(asked)]
        system = asked.body["messages"][0]["content"]
        assert "Judge advice on splitting" in system
        return json.dumps({"id": system.split('{"id": "')[-1][:8], "reason": "no decision", "score": 5})

    with serving(script) as server:
        judge = {"JUDGE_ENDPOINT": server.chat_url, "JUDGE_MODEL": "judge"}
        with RlvrService(tmp_path / "state", LLM_ENDPOINT=server.plain_url, **judge) as service:
            code, report = suite(service, "--tasks", "reasoning_architecture", "--max-iterations", "1")
            assert report["judged_by_model"] == ["reasoning_architecture"]
            assert code == 1 and report["results"][0]["confidence"] == pytest.approx((8 + 4 * 0.5) / 12)
            code, report = suite(service, "--tasks", "reasoning_architecture", "--no-judge")
            assert code == 0 and report["judged_by_model"] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "code_fibonaci"], "did you mean 'code_fibonacci'"),
        (["code_fibonacci"], "name tasks after --tasks"),
        (["--quick", "--tasks", "math_problem"], "--quick has no effect with --tasks"),
        (["--repeats", "0"], "--repeats 0: expected a number from 1"),
        (["--target", "1.5"], "--target 1.5"),
        (["--min-success", "2"], "--min-success 2.0: expected a number from 0 to 1"),
        (["--url", "not a url"], "--url 'not a url'"),
    ],
)
def test_a_wrong_option_is_refused_before_any_request(options: list[str], message: str, capsys: Any) -> None:
    assert run(["evaluate-service", *options]) == 2
    assert message in capsys.readouterr().err
