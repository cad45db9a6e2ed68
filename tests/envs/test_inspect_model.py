"""The provider `rlvr` of Inspect, by the real `inspect eval`: a run of ours, a server that is there, and mistakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra [serve] is not installed")
pytest.importorskip("transformers", reason="the extra [train] is not installed")

from rlvr.cli.main import run
from rlvr.envs.ecosystems.guest_process import GUESTS
from tests.kit.ecosystems import find_interpreter
from tests.kit.open_server import NAME, open_endpoints, text_engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
TASKS = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, system_message, use_tools
from inspect_ai.tool import tool


@tool
def add():
    async def execute(a: int, b: int) -> str:
        \"\"\"Add two numbers.

        Args:
            a: the first
            b: the second
        \"\"\"
        return str(a + b)

    return execute


@task
def sorts():
    samples = [Sample(input=f"sort {n} 1 2 :", target="1 2") for n in (0, 3)]
    return Task(samples, solver=generate(), scorer=includes())


@task
def chat():
    solver = [system_message("Add."), use_tools(add()), generate(seed=1)]
    return Task([Sample(input="What is 4 + 5?", target="9")], solver=solver, scorer=includes())
"""
RUN = """
env: {name: sorting}
model:
  tokenizer: words
  device: cpu
  config: {model_type: gpt2, n_embd: 16, n_layer: 1, n_head: 2, n_positions: 32}
rollout: {max_tokens: 6}
training: {steps: 1, prompts_per_step: 2, group_size: 2}
evaluation: {tasks: 2, samples: 1}
engine: {threads: 1}
run: {name: sorts}
"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_interpreter("inspect")
    monkeypatch.chdir(tmp_path)
    Path("tasks.py").write_text(TASKS)


def evaluate(task: str, model: str, *words: str) -> tuple[dict[str, Any], str]:
    """(the log of the evaluation, what it printed)"""
    program = Path(find_interpreter("inspect")).with_name("inspect")
    command = [program, "eval", f"tasks.py@{task}", "--model", model, "--max-tokens", "6", "--display", "plain"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (GUESTS, ROOT))), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *words, "--log-format", "json", "--log-dir", "logs"], env=env, capture_output=True, text=True
    )
    logs = sorted(Path("logs").glob("*.json"), key=lambda path: path.stat().st_mtime)
    return json.loads(logs[-1].read_text()) if logs else {}, f"{done.stdout}{done.stderr}"


def test_a_run_of_ours_is_evaluated_and_its_server_ends() -> None:
    Path("run.yaml").write_text(RUN)
    assert run(["train", "--config=run.yaml"]) == 0
    log, said = evaluate("sorts", "rlvr/runs/sorts", "-M", f"python={sys.executable}")
    assert log["status"] == "success", said[-3000:]
    assert len(log["samples"]) == 2 and log["eval"]["model"] == "rlvr/runs/sorts"
    for sample in log["samples"]:
        answer = sample["output"]
        assert answer["metadata"]["system_fingerprint"].startswith("sorts/")
        assert answer["usage"]["output_tokens"] <= 6 and answer["usage"]["input_tokens"] == 5
        assert answer["choices"][0]["stop_reason"] in ("stop", "max_tokens")
        assert set(answer["choices"][0]["message"]["content"].split()) <= set("0123456789:") | {"sort"}
    listed = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(b"policy=" + os.fsencode(Path("runs/sorts").resolve()) in one for one in listed)


def test_a_server_that_is_there_and_mistakes(tmp_path: Path) -> None:
    with open_endpoints({NAME: text_engine()}, tmp_path / "state") as (_, port):
        address = ("--model-base-url", f"http://127.0.0.1:{port}/v1")
        log, said = evaluate("chat", f"rlvr/{NAME}", *address)
        assert log["status"] == "success", said[-3000:]
        (sample,) = log["samples"]
        assert [message["role"] for message in sample["messages"][:2]] == ["system", "user"]
        again, _ = evaluate("chat", f"rlvr/{NAME}", *address)
        first, second = (one["samples"][0]["output"]["choices"][0]["message"]["content"] for one in (log, again))
        assert first == second, "the same seed gives the same answer"
        log, said = evaluate("chat", "rlvr/nobody", *address)
        assert log["status"] == "error" and "answered 404" in said + json.dumps(log)
    log, said = evaluate("sorts", "rlvr/runs/none", "-M", f"python={sys.executable}")
    assert log["status"] == "error" and "there is no such folder" in json.dumps(log)
    _, said = evaluate("sorts", "rlvr/runs/none", "-M", "python=/no/such/python")
    assert "is no program" in said
