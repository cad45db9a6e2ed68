"""Training through an agent that cannot be changed: to the same bits as our own tool loop, and through kills."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra [serve] is not installed")
pytest.importorskip("transformers", reason="the extra [train] is not installed")

from tests.kit.killed_runs import run_until_done

ROOT = Path(__file__).parents[2]
TASKS = "{p: 97, operations: [1, 3], with_tool: true, flaw: 0.25}"
SHORT = (
    "sft.steps=30 training.steps=2 training.prompts_per_step=4 training.group_size=4 evaluation.tasks=12 "
    "evaluation.samples=2 evaluation.every=0"
)


@pytest.fixture
def agent() -> Iterator[str]:
    """The address of an agent, a process of its own."""
    command = [sys.executable, str(ROOT / "tests/kit/tool_agent.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.kill()


def train(folder: Path, name: str, *words: str) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "rlvr",
        "train",
        "--config-name=tool_use",
        f"run.root={folder}",
        f"run.name={name}",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *SHORT.split(), *words], capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / name / "summary.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_agent_process_trains_to_the_bits_of_our_own_tool_loop(tmp_path: Path, agent: str) -> None:
    """The same task, the same draws: what reaches the trainer is what was sampled, to the last bit of the weights."""
    own = train(tmp_path, "own")
    kwargs = f"{{inner: tool_arithmetic, inner_kwargs: {TASKS}, url: '{agent}', rules: {{max_concurrent: 1024}}}}"
    through = train(tmp_path, "agent", "env.name=agent", f"env.kwargs={kwargs}")
    assert through["weights_sha256"] == own["weights_sha256"]
    rows = [json.loads(line) for line in (tmp_path / "agent" / "metrics.jsonl").read_text().splitlines()]
    assert [row["env/all/stop/finished"] for row in rows if row["phase"] == "rl"] == [1.0, 1.0]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_is_killed_among_its_agents_ends_with_the_same_bits(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"kill seed {seed}")
    inner = "inner: rpn_arithmetic, inner_kwargs: {complexity: [1, 2], flaw: 0.3}"
    words = ("env.name=agent", f"env.kwargs={{{inner}, function: 'tests.kit.agents_of_tests:once'}}")
    _, undisturbed, rows = run_until_done(tmp_path / "calm", 0, 0, "", *words)
    kills, summary, killed_rows = run_until_done(tmp_path / "killed", seed, 6, "", *words)
    assert kills >= 3, "the run ended before it was killed often enough: the test tested too little"
    assert summary == undisturbed and killed_rows == rows


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is made of Linux namespaces")
def test_the_sandbox_changes_no_bit_of_a_run(tmp_path: Path) -> None:
    command = f"command: ['{sys.executable}', '{ROOT / 'tests/kit/asking_agent.py'}']"
    runs: list[dict[str, Any]] = []
    for name, sandbox in (("open", ""), ("sandboxed", ", sandbox: {}")):
        kwargs = f"{{inner: tool_arithmetic, inner_kwargs: {TASKS}, {command}{sandbox}}}"
        runs.append(train(tmp_path, name, "env.name=agent", f"env.kwargs={kwargs}"))
    assert runs[0]["weights_sha256"] == runs[1]["weights_sha256"]
    rows = [json.loads(line) for line in (tmp_path / "sandboxed" / "metrics.jsonl").read_text().splitlines()]
    assert [row["env/all/stop/finished"] for row in rows if row["phase"] == "rl"] == [1.0, 1.0]
