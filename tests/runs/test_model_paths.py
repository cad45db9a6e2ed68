"""A model's name that can only be a path is never looked for on the hub."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlvr

PATHS = (
    "./does/not/exist",
    "/does/not/exist",
    "~/does-not-exist",
    "does/not/exist",
    "does-not-exist/",
    "..",
    "does\\not",
)
PROGRAM = """
import json, sys
import rlvr
from rlvr.cli.main import run

codes = [run(["train", "--config-name=dataset", "env.kwargs.path=tasks.jsonl", f"model.name={name}"]) for name in NAMES]
for name in NAMES:
    try:
        rlvr.train(name, "tasks.jsonl", steps=1, quiet=True)
        codes.append(0)
    except ValueError as error:
        codes.append(2)
        print(error, file=sys.stderr)
print(json.dumps(codes))
"""


@pytest.fixture
def hub() -> Iterator[socket.socket]:
    """The address of a hub, where something listens and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        yield listening


def name_models(hub: socket.socket, folder: Path, *names: str) -> tuple[list[int], str, bool]:
    """The exit codes of runs with these models, what they say, and whether one asked the hub."""
    rows = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(6) for b in range(6)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    place = {
        **{name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"},
        "PYTHONPATH": str(Path(rlvr.__file__).parents[1]), "HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}",
        "HF_HOME": str(folder / "hub"),
    }  # fmt: skip
    program = [sys.executable, "-c", f"NAMES = {names!r}\n{PROGRAM}"]
    done = subprocess.run(program, cwd=folder, env=place, capture_output=True, text=True)
    try:
        hub.accept()[0].close()
    except BlockingIOError:
        return json.loads(done.stdout.splitlines()[-1]), done.stderr, False
    return json.loads(done.stdout.splitlines()[-1]), done.stderr, True


def test_a_path_that_is_not_there_is_refused_without_asking_the_hub(hub: socket.socket, tmp_path: Path) -> None:
    """From the command line and from Python, with what to do."""
    codes, said, has_asked = name_models(hub, tmp_path, *PATHS)
    assert codes == [2] * 2 * len(PATHS) and not has_asked
    for name in PATHS:
        assert said.count(f"model.name={name}: no ") == 2, said
    assert not (tmp_path / "runs" / "dataset").exists()


@pytest.mark.slow
def test_a_name_of_the_hub_is_asked_for(hub: socket.socket, tmp_path: Path) -> None:
    """Otherwise the test above would prove nothing."""
    codes, said, has_asked = name_models(hub, tmp_path, "owner/name")
    assert codes == [2, 2] and has_asked, said
