"""Data sets by the `datasets` library: folders that it saved, a small hub on this machine, one that does not answer."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from rlvr.envs import resolve_environment

ROOT = Path(__file__).parents[2]
ROWS = [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(20)]
COMMIT = "a" * 40


def open_rows(**options: Any) -> Any:
    return resolve_environment("dataset", **{"heldout_fraction": 0, **options})


# --- saved folders --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a `Dataset` and a `DatasetDict`, as `save_to_disk` writes them."""
    datasets = pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("saved")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(folder / "one"))
    splits = {"train": datasets.Dataset.from_list(ROWS[:15]), "validation": datasets.Dataset.from_list(ROWS[15:])}
    datasets.DatasetDict(splits).save_to_disk(str(folder / "splits"))
    return folder


def test_a_saved_data_set_is_read(saved: Path) -> None:
    source = open_rows(path=str(saved / "one"))
    assert source.describe_data() == "20 rows, prompt from 'question', answer from 'answer'"
    tasks = {(task.prompt, task.meta["answer"]) for task in (source.train(0, i, "") for i in range(20))}
    assert tasks == {(row["question"], row["answer"]) for row in ROWS}


def test_a_saved_data_set_with_splits_holds_one_out(saved: Path) -> None:
    path = str(saved / "splits")
    for other in ({}, {"heldout_path": path}):
        source = resolve_environment("dataset", path=path, heldout_split="validation", **other)
        assert source.size and (source.size(""), len(source.heldout(None))) == (15, 5)
    with pytest.raises(
        ValueError, match=r"no split 'test'; it has train, validation; set env.kwargs.split or heldout_split"
    ):
        resolve_environment("dataset", path=path, heldout_path=path)
    with pytest.raises(ValueError, match=r"no split 'valid' \(did you mean 'validation'\?\); it has train, validation"):
        open_rows(path=str(saved / "splits"), split="valid")


def test_a_damaged_saved_data_set_is_named(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(ValueError, match=r"cannot be read .*save the data set again"):
        open_rows(path=str(tmp_path))


def test_without_the_package_the_remedy_is_named(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    for options in ({"path": str(saved / "one")}, {"name": "acme/sums"}):
        with pytest.raises(ValueError, match=r"'datasets'.*pip install 'rlvr\[data\]'"):
            open_rows(**options)


def test_offline_by_the_environment_the_cache_alone_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        ValueError, match=r"'acme/sums' is not in the cache, and HF_HUB_OFFLINE is set .*set env.kwargs.path="
    ):
        open_rows(name="acme/sums")


# --- a hub ----------------------------------------------------------------------------------------------------------


class SmallHub(BaseHTTPRequestHandler):
    """One data set, acme/sums with train.jsonl, by the hub's own addresses."""

    body = "".join(json.dumps(row) + "\n" for row in ROWS).encode()

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.endswith("/train.jsonl"):
            asked = self.headers.get("Range")
            first, _, last = (asked or "bytes=0-").removeprefix("bytes=").partition("-")
            part = self.body[int(first) : int(last or len(self.body)) + 1]
            end = int(first) + len(part) - 1
            more = {"Content-Range": f"bytes {first}-{end}/{len(self.body)}"} if asked else {}
            self.send(206 if asked else 200, part, ETag='"rows"', **{"X-Repo-Commit": COMMIT}, **more)
        elif "/resolve/" in path and "/acme/sums/" in path:
            self.send(404, b"", **{"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        elif "/acme/sums/tree/" in path:
            self.send_json([{"type": "file", "path": "train.jsonl", "size": len(self.body), "oid": "b" * 40}])
        elif path.startswith("/api/datasets/acme/sums"):
            self.send_json({"id": "acme/sums", "sha": COMMIT, "siblings": [{"rfilename": "train.jsonl"}], "tags": []})
        else:
            self.send(200 if path == "/" else 404, b"{}", **{"X-Error-Code": "RepoNotFound"})

    def send_json(self, value: Any) -> None:
        self.send(200, json.dumps(value).encode(), **{"Content-Type": "application/json"})

    def send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), SmallHub)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


SCRIPT = """
import json, sys, time
from rlvr.envs import resolve_environment
for options in json.loads(sys.argv[1]):
    began = time.monotonic()
    try:
        said = resolve_environment("dataset", heldout_fraction=0, **options).describe_data()
    except ValueError as error:
        said = str(error)
    print(json.dumps([said, time.monotonic() - began]))
"""


def ask(endpoint: str, home: Path, *options: dict[str, Any]) -> list[tuple[str, float]]:
    """What a new process says of each of these data sets, with the seconds: the library reads its address once."""
    pytest.importorskip("datasets")
    offline = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
    kept = {name: value for name, value in os.environ.items() if name not in offline}
    own = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "*", "no_proxy": "*", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(options)],
        env={**kept, **own}, cwd=home, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_a_data_set_of_a_hub_is_fetched_streamed_and_later_read_from_the_cache(hub: str, tmp_path: Path) -> None:
    fetched, streamed, wrong, unknown = ask(
        hub,
        tmp_path,
        {"name": "acme/sums"},
        {"name": "acme/sums", "streaming": True, "max_rows": 5},
        {"name": "acme/sums", "split": "trian"},
        {"name": "acme/none"},
    )
    assert fetched[0] == "20 rows, prompt from 'question', answer from 'answer'"
    assert streamed[0] == "the first 5 rows, prompt from 'question', answer from 'answer'"
    known = "dataset: 'acme/sums' has no split 'trian' (did you mean 'train'?); it has train"
    assert wrong[0] == f"{known}; set env.kwargs.split or heldout_split"
    assert "could not be loaded from the hub (" in unknown[0] and "set env.kwargs.path=" in unknown[0]
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and never answers
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        cached, missing = ask(address, tmp_path, {"name": "acme/sums"}, {"name": "acme/other"})
    assert cached[0] == fetched[0]
    assert f"'acme/other' is not in the cache, and the hub at {address} does not answer within 3 s" in missing[0]
    assert "set env.kwargs.path=" in missing[0] and missing[1] < 5


@pytest.mark.slow
def test_a_hub_that_is_not_there_is_said_within_seconds(tmp_path: Path) -> None:
    """No server at the port, and a name that no server has: neither waits for the library's own retries."""
    for endpoint in ("http://127.0.0.1:9", "http://no-such-hub.invalid"):
        ((said, seconds),) = ask(endpoint, tmp_path, {"name": "acme/sums"})
        assert f"the hub at {endpoint} does not answer" in said
        assert seconds < 10  # the import of `datasets` in it, on a busy machine
