"""`rlvr.serve`: both servers on a thread of the program that starts them."""

from __future__ import annotations

import json
import logging
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rlvr
from tests.kit.chat_rows import qwen_folder

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


serve: Any = rlvr.serve  # for arguments of wrong types


def ask(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode() if body else None, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())


def test_the_engine_server_answers_beside_the_program_and_leaves_nothing_behind(model: Path) -> None:
    root, threads = logging.getLogger(), threading.active_count()
    before = list(root.handlers), root.level, logging.getLogger("rlvr").level
    with rlvr.serve({"small": model}, engine={"threads": 1}, limits={"session_seconds": 600}, quiet=True) as server:
        assert server.url.startswith("http://127.0.0.1:") and server.is_open
        assert [one["id"] for one in ask(f"{server.url}/v1/models")["data"]] == ["small"]
        body = {"model": "small", "prompt": "4 + 5 =", "max_tokens": 2, "seed": 1}
        first = ask(f"{server.url}/v1/completions", body)["choices"][0]["text"]
        assert first == ask(f"{server.url}/v1/completions", body)["choices"][0]["text"]
        with pytest.raises(ValueError, match=r"cannot listen.*another port"):
            rlvr.serve(model, port=int(server.url.rpartition(":")[2]), state="other", quiet=True)
        with pytest.raises(ValueError, match="in use by another server"):
            rlvr.serve(model, quiet=True)
    assert not server.is_open and "closed" in repr(server)
    server.close()
    assert (list(root.handlers), root.level, logging.getLogger("rlvr").level) == before
    assert "serving small" in Path("runs/server/server.log").read_text()
    assert threading.active_count() <= threads
    with pytest.raises(OSError, match="refused"):
        ask(f"{server.url}/v1/models")


def test_a_run_is_served_and_is_a_model_to_start_from(model: Path) -> None:
    def digits(prompt: str, response: str, meta: dict[str, Any]) -> float:
        return float(any(character.isdigit() for character in response))

    rows = [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(20)]
    short: dict[str, Any] = {
        "steps": 1, "group_size": 2, "prompts_per_step": 2, "max_tokens": 4, "lora": {"rank": 2}, "threads": 1,
        "evaluation": {"tasks": 2, "samples": 1}, "quiet": True,
    }  # fmt: skip
    run = rlvr.train(model, rows, digits, **short)
    with rlvr.serve(run, quiet=True) as server:
        assert [one["id"] for one in ask(f"{server.url}/v1/models")["data"]] == [str(run.folder)]
    verdicts = rlvr.verify(run, digits)
    assert [one["value"] for one in verdicts] == [row["reward"] for row in run.rollouts()]
    assert rlvr.verify(run, "exact_match").counts.unjudged == 0, "the reference is there"
    second = rlvr.train(run, rows, digits, name="second", **short)
    assert second.settings["model"]["start_from"] == str(run.folder)
    assert second.settings["model"]["name"] == str(model)


def test_the_service_answers_beside_the_program(model: Path) -> None:
    with rlvr.serve(model, service=True, training={"max_iterations": 2}, quiet=True) as server:
        health = ask(f"{server.url}/health")
        for _ in range(600):  # the model is loaded meanwhile
            if health["generator"]["state"] != "loading":
                break
            time.sleep(0.1)
            health = ask(f"{server.url}/health")
        assert health["generator"]["name"] == str(model)
    with pytest.raises(OSError, match="refused"):
        ask(f"{server.url}/health")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda model: serve(), ["serve: model is missing"]),
        (lambda model: serve("./none"), ["model='./none'", "no such folder"]),
        (lambda model: serve(3), ["serve: model is of type int"]),
        (lambda model: serve(model, devise="cpu"), ["'devise' is no setting", "did you mean 'device'"]),
        (lambda model: serve(model, database="x"), ["one of the service (service=True)"]),
        (lambda model: serve(model, service=True, trainers=1), ["one of the engine server"]),
        (lambda model: serve(model, engine={"thread": 1}), ["engine.thread ", "engine.threads"]),
        (lambda model: serve(model, host="0.0.0.0"), ["host=0.0.0.0 can be reached", "keys=FILE"]),
        (lambda model: serve(model, port="80"), ["port='80'", "0 takes any free"]),
        (lambda model: serve(model, aliases="x"), ["aliases='x'"]),
        (lambda model: serve(model, state=5), ["serve: state=5 is of type int", "a path"]),
        (lambda model: serve(model, keys=5), ["serve: keys=5 is of type int"]),
        (lambda model: serve(model, log=5), ["log=5", "a log level"]),
        (lambda model: serve(model, trainers="2"), ["trainers='2'", "a whole number"]),
        (lambda model: serve({"a=b": model}), ["the name 'a=b'", "without ="]),
        (lambda model: serve([model], service=True), ["the service has one model"]),
        (lambda model: serve(service=True, training={"foo": 1}), ["training.foo"]),
    ],
)  # fmt: skip
def test_a_mistake_is_named_before_anything_is_loaded(
    model: Path, call: Callable[[Path], Any], said: list[str]
) -> None:
    with pytest.raises(ValueError) as error:
        call(model)
    assert all(words in str(error.value) for words in said), error.value
