"""`rlvr env serve`: the tasks and the reward of an environment behind an address."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra [serve] is not installed")

from rlvr.cli.main import run
from rlvr.envs.ecosystems.task_server import TaskServer
from rlvr.envs.registry import resolve_environment
from rlvr.reward import resolve_reward
from rlvr.web.server import BackgroundServer, bind_socket, server_url


def judge(prompt: str, response: str, meta: dict[str, Any]) -> float:
    if response == "break":
        raise KeyError("lost")
    return float(response == meta["answer"])


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    rows = [{"prompt": f"{n} + 1?", "answer": str(n + 1), "level": str(n % 2)} for n in range(40)]
    rows[0]["prompt"] = [{"role": "system", "content": "Add."}, {"role": "user", "content": "0 + 1?"}]  # type: ignore
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = resolve_environment("dataset", path=str(path), level_field="level", heldout_fraction=0.3)
    listening = bind_socket("127.0.0.1", 0)
    with BackgroundServer(TaskServer("dataset", source, resolve_reward(judge)).app, listening):
        yield server_url(listening)


def ask(url: str, body: Any = None) -> dict[str, Any]:
    raw = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, raw), timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return {"status": error.code, **json.load(error)}


def test_tasks_of_both_sides_are_listed_in_pages(url: str) -> None:
    held = ask(f"{url}/tasks?count=1000")["tasks"]
    assert 3 <= len(held) <= 30 and [task["ref"] for task in held] == [f"heldout/{n}" for n in range(len(held))]
    assert ask(f"{url}/tasks?start=1&count=2")["tasks"] == held[1:3]
    assert ask(f"{url}/tasks?start=1000")["tasks"] == []
    trained = ask(f"{url}/tasks?side=train&seed=3&level=1&start=50&count=3")["tasks"]
    assert [task["ref"] for task in trained] == [f"train/3/{n}/1" for n in (50, 51, 52)]
    assert {task["level"] for task in trained} == {"1"}
    assert not {task["id"] for task in trained} & {task["id"] for task in held}
    assert all(task["messages"][-1]["content"].endswith("+ 1?") for task in [*held, *trained])


def test_answers_are_judged_and_a_verifier_that_fails_gives_no_zero(url: str) -> None:
    for task in [ask(f"{url}/tasks")["tasks"][0], ask(f"{url}/tasks?side=train&seed=1")["tasks"][4]]:
        right = str(int(task["messages"][-1]["content"].split()[0]) + 1)
        given = [ask(f"{url}/score", {"ref": task["ref"], "answer": said}) for said in (right, "no", "break")]
        assert [(one["value"], one["outcome"]) for one in given] == [(1.0, "passed"), (0.0, "failed"), (None, "error")]
        assert "lost" in given[2]["detail"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("tasks?side=test", None, r"test/0/0/0"),
        ("tasks?side=train&level=7", None, "of '0', '1'"),
        ("tasks?start=-1", None, "start='-1'"),
        ("score", {"ref": "heldout/1000", "answer": ""}, "there is no task 'heldout/1000'"),
        ("score", {"ref": "heldout/0"}, "answer=None"),
        ("score", [], "two texts"),
    ],
)
def test_mistakes_are_answered_with_what_is_expected(url: str, path: str, body: Any, words: str) -> None:
    refused = ask(f"{url}/{path}", body)
    assert refused["status"] == 400 and words in refused["error"]["message"]


def test_what_cannot_be_served_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["env", "serve", "tests.kit.turn_letters:TurnLetters"]) == 2
    assert "only tasks of one turn" in capsys.readouterr().err.replace("\n", " ")
    for words, expected in (
        (["toy", "--host", "0.0.0.0"], "can be reached from other machines"),
        (["toy", "nonsense"], "expected key=value"),
        (["toi"], "did you mean 'toy'"),
    ):
        assert run(["env", "serve", *words]) == 2
        assert expected in capsys.readouterr().err.replace("\n", " ")
