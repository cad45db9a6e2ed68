"""`rlvr record` and `rlvr rows` as a user types them, and an unmodified client in between."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra [serve] is not installed")
pytest.importorskip("transformers", reason="the extra [train] is not installed")
pytest.importorskip("openai", reason="openai is not installed")

import openai

from tests.kit.chat_rows import qwen_folder
from tests.kit.open_server import TOOLS_TEMPLATE

ROOT = Path(__file__).parents[2]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return qwen_folder(tmp_path / "model", TOOLS_TEMPLATE)


@pytest.fixture
def recorder(tmp_path: Path, model: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """(base URL of OpenAI's clients, process)."""
    words = ["record", "--model", str(model), "--out", str(tmp_path / "traffic.jsonl"), "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "rlvr", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"OPENAI_BASE_URL=(\S+)", line):
                yield found[1], process
                break
        if process.poll() is None:
            process.kill()
        process.stderr.read()


def post(url: str, **body: Any) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


@pytest.mark.slow
def test_traffic_is_recorded_and_shown_as_rows(tmp_path: Path, recorder: tuple[str, subprocess.Popen[str]]) -> None:
    url, process = recorder
    client = openai.OpenAI(base_url=url, api_key="any")
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    for _ in range(2):
        answer = client.chat.completions.create(model="any", messages=messages, max_tokens=8, seed=3)
        messages += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "go on"}]
    assert post(f"{url.removesuffix('/v1')}/reward", reward=0.5)["reward"] == 0.5
    recorded = [json.loads(line) for line in (tmp_path / "traffic.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in recorded] == ["recording", "call", "call", "reward"]
    first, second = recorded[1:3]
    assert second["prompt"][: len(first["prompt"]) + 8] == first["prompt"] + first["choices"][0]["tokens"]
    token = url.split("/")[-2]
    assert token not in (tmp_path / "traffic.jsonl").read_text(), "the address is a secret"
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    command = [sys.executable, "-m", "rlvr", "rows", str(tmp_path / "traffic.jsonl")]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert "2 calls, 1 branches, reward 0.5" in shown and shown.count("SAMPLED") == 2
    assert shown.splitlines()[-1].endswith("16 are trained")
