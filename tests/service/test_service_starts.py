"""How the service starts and stops, with keys and without, with a generator and without."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")
from rlvr.engine import malloc
from rlvr.service.serve_service import build, lifespan
from rlvr.service.settings import Settings
from rlvr.web.auth import ApiKeys
from tests.kit.forked_process import run_forked
from tests.kit.paths import ROOT
from tests.kit.rlvr_service import RlvrService, scripted_service
from tests.kit.server_process import FRESH


def test_keys_are_required_everywhere_but_at_health(tmp_path: Path):
    keys = "first-key-of-the-team,second-key-of-the-team"
    with scripted_service(tmp_path, keys=keys) as service:
        mine = service.post("/train?background=true", {"task_id": "t", "prompt": "slowly, a sonnet"}).json()
        other = {"authorization": "Bearer second-key-of-the-team"}
        assert service.get("/stats", headers={"authorization": ""}).status_code == 401
        reply = service.get("/health", headers={"authorization": ""})
        assert reply.status_code == 200 and reply.json()["generator"]["name"] == ""
        assert service.get("/health").json()["generator"]["name"] and "http" not in reply.text
        assert service.get(f"/sessions/{mine['session_id']}", headers=other).status_code == 200
        answer = service.post(f"/sessions/{mine['session_id']}/cancel", headers=other)
        assert answer.status_code == 403 and answer.json()["code"] == "not_yours"
        for path in ("/feedback", "/grade", "/train"):
            assert service.post(path, {}, headers={"authorization": ""}).status_code == 401
        assert "first-key" not in service.said and "second-key" not in service.said


def test_without_a_generator_it_starts_and_train_names_the_remedy(tmp_path: Path):
    service = RlvrService(tmp_path, LLM_ENDPOINT="none")
    service.command = FRESH  # for the figures
    with service:
        print(f"ready after {service.started_after:.2f} s, {service.memory_mb():.0f} MB at rest")
        reply = service.get("/health").json()
        assert reply["status"] == "degraded" and reply["generator"]["state"] == "absent"
        assert service.get("/health/ready").status_code == 503 and service.get("/health/live").status_code == 200
        answer = service.post("/train", {"task_id": "t", "prompt": "p"})
        assert answer.status_code == 503 and answer.json()["code"] == "no_generator"
        assert all(word in answer.json()["detail"] for word in ("LLM_ENDPOINT", "RLVR_MODEL", "--demo"))
        assert service.get("/stats").json()["training_stats"]["policy_entropy"] is None
        assert service.post("/grade", {"answers": ["A good answer."]}).status_code == 200


def test_the_start_script_becomes_the_installed_command_with_its_options(tmp_path: Path):
    """A clone without an environment of its own; the command that it finds says what it was given, and as whom."""
    script = tmp_path / "scripts" / "start-rlvr-service.sh"
    script.parent.mkdir()
    script.write_bytes((Path(__file__).parents[2] / "scripts" / script.name).read_bytes())
    command = tmp_path / "bin" / "rlvr"
    command.parent.mkdir()
    command.write_text('#!/bin/sh\necho $$; printf "%s\\n" "$@"\n')
    command.chmod(0o755)
    for path, code in ((f"{command.parent}:/usr/bin:/bin", 0), ("/usr/bin:/bin", 127)):
        words = ["bash", str(script), "--demo", "two words"]
        started = subprocess.Popen(words, env={"PATH": path}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        said, complaint = started.communicate(timeout=60)
        assert started.returncode == code
        assert said.splitlines() == ([f"{started.pid}", "serve", "--demo", "two words"] if code == 0 else [])
        assert ("make setup" in complaint) == (code != 0)


@pytest.mark.slow
def test_the_start_script_passes_signals_and_options_on(tmp_path: Path):
    script = Path(__file__).parents[2] / "scripts" / "start-rlvr-service.sh"
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    service = RlvrService(tmp_path, PATH=path)
    service.command = (str(script),)
    with service:
        assert service.get("/health/live").status_code == 200
        assert service.stop() == 0 and '"stopped"' in service.said


def test_with_a_json_log_every_line_is_json_from_the_start_to_the_stop(tmp_path: Path):
    with scripted_service(tmp_path) as service:
        service.stop()
        assert all(line.startswith("{") for line in service.said.splitlines()), service.said
        events = [line["event"] for line in service.log_records()]
    assert events[0].startswith("listening at http://127.0.0.1:") and events[-1] == "stopped"


@pytest.mark.slow
def test_a_stop_answers_waiting_clients_and_keeps_their_sessions(tmp_path: Path):
    with scripted_service(tmp_path, RLVR_MIN_CONFIDENCE="1") as service:
        assert service.post("/train", {"task_id": "before", "prompt": "p", "max_iterations": 1}).status_code == 200
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
def test_a_failed_start_is_one_message(
    options: tuple[str, ...], environment: dict[str, str], said: str, tmp_path: Path
):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        given = ["--state", str(tmp_path)] if "--state" not in options and "engine" not in options else []
        given += [port if option == "TAKEN" else option for option in options]
        where = {} if "--port" in options or "PORT" in environment else {"PORT": "0"}
        environment = {"PATH": "/usr/bin:/bin", **where, **environment}
        done = run_forked(["-m", "rlvr.cli.main", "serve", *given], env=environment, timeout=60)
    assert done.returncode == 2, done.stderr
    assert said.replace("TAKEN", port) in done.stderr and "Traceback" not in done.stderr


def test_a_running_service_returns_the_memory_that_large_requests_left_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else malloc keeps it: after thousands of bodies the process stays as large as they were together."""
    returned: list[int] = []
    monkeypatch.setattr(malloc, "TRIM_SECONDS", 0.001)
    monkeypatch.setattr(malloc, "release_free_memory", returned.append)
    service = build(Settings(state=tmp_path, dashboard=False), ApiKeys.load(None), 0)

    async def live() -> None:
        async with lifespan(service, lambda _: None):
            while len(returned) < 2:
                await asyncio.sleep(0.001)

    asyncio.run(live())
    service.store.close()
    if service.name_lock is not None:
        service.name_lock.close()
    assert set(returned) == {malloc.KEPT_BYTES}


def test_requests_may_name_verifiers_of_the_operator_s_imports_and_no_others(tmp_path: Path):
    (tmp_path / "house_rules.py").write_text(
        "import rlvr\n\n"
        "@rlvr.register_reward('polite')\n"
        "def polite(prompt, response, meta=None):\n"
        "    return float('please' in response)\n"
    )
    names = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    body = {"answers": ["Tea, please.", "Coffee."], "verifiers": ["polite"]}
    with RlvrService(tmp_path / "state", LLM_ENDPOINT="none", RLVR_IMPORTS="house_rules", **names) as service:
        graded = service.post("/grade", body).json()
        assert [one["value"] for one in graded["results"]] == [1.0, 0.0]
        assert service.post("/grade", {**body, "verifiers": ["house_rules:polite"]}).status_code == 422
    with RlvrService(tmp_path / "other", LLM_ENDPOINT="none", **names) as service:
        refused = service.post("/grade", body)
        assert refused.status_code == 422 and "'polite' is unknown here" in refused.text


def test_an_import_that_fails_stops_the_start_with_one_message(tmp_path: Path):
    words = [sys.executable, "-m", "rlvr", "serve", "--state", str(tmp_path / "state"), "--port", "0"]
    environment = {**os.environ, "RLVR_IMPORTS": "no_such_rules", "LLM_ENDPOINT": "none"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "imports: 'no_such_rules' failed to import: ModuleNotFoundError" in done.stderr
