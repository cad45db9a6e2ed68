"""Seed 003's custom loop, as its text has it: unchanged against a server, and in process by the imports that our page
says. Only the names that it leaves open are given: `dataset`, `compute_reward`, and imports of `chz`."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from rlvr.cli.main import run
from tests.kit.forked_process import run_forked
from tests.kit.tinker_model import write_model
from tests.kit.tinker_server import TinkerServer, aborted_at_exit

ROOT = Path(__file__).parents[2]
SEEDS = Path(os.environ.get("RLVR_SHARED", ROOT.parent / "shared")) / "seeds"
NAME = "Qwen/Qwen3-8B"
BEFORE = "import sys\nimport chz\n"
AFTER = """
dataset = [[("What is 2 + 3?", "5"), ("What is 4 + 4?", "8")], [("What is 1 + 6?", "7"), ("What is 0 + 2?", "2")]] * 2

def compute_reward(content, answer):
    rewards.append(len(content) % 5 / 5)  # hardly ever the same for a whole group
    return rewards[-1]

rewards = []
main(chz.entrypoint(Config, allow_hyphens=False))
print("all done:", len(rewards), len(set(rewards)), flush=True)
"""
WORDS = [f"model_name={NAME}", "batch_size=2", "group_size=4", "max_tokens=6", "learning_rate=1e-3"]


@pytest.fixture(scope="module")
def blocks() -> list[str]:
    """The Python blocks of the seed."""
    found = sorted(SEEDS.glob("003*"))
    if not found:
        pytest.skip(f"{SEEDS}/003* is absent: the seed is not part of the project")
    return re.findall(r"```python\n(.*?)```", found[0].read_text(encoding="utf-8"), re.S)


@pytest.fixture(scope="module")
def loop(blocks: list[str]) -> str:
    [code] = [block for block in blocks if "for batch_idx, batch_rows in enumerate(dataset)" in block]
    return code


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder where the model's name is a folder."""
    folder = tmp_path_factory.mktemp("seed003")
    write_model(folder / NAME, steps=20)
    return folder


def test_the_page_of_losses_that_it_points_to_has_those_that_it_names(blocks: list[str]) -> None:
    page = (ROOT / "docs" / "loss-functions.md").read_text(encoding="utf-8")
    text = sorted(SEEDS.glob("003*"))[0].read_text(encoding="utf-8")
    named = re.findall(r"^\| `(\w+)` \|", text.partition("## Loss Functions for RL")[2], re.M)
    assert len(named) == 4 and not [name for name in named if f"### `{name}`" not in page]


def runs(code: str, place: Path, **environment: str) -> None:
    """Four batches of two questions, all answers rewarded, and no two states of the weights alike."""
    given = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TINKER_TELEMETRY": "0", **environment}
    command = ["-X", "faulthandler", "-c", BEFORE + code + AFTER, *WORDS]
    done = run_forked(command, cwd=place, env=given, timeout=200)
    ended = done.returncode == 0 or ("TINKER_BASE_URL" in environment and aborted_at_exit(done))
    assert ended and done.stdout, (done.returncode, done.stdout[-300:], done.stderr[-3000:])
    last = re.fullmatch(r"all done: (\d+) (\d+)", done.stdout.splitlines()[-1])
    assert last and int(last[1]) == 4 * 2 * 4 and int(last[2]) > 1, done.stdout[-300:]
    saved = [sorted(place.rglob(f"{batch:06d}/**/adapter_model.safetensors")) for batch in range(4)]
    assert all(len(found) == 1 for found in saved), saved
    assert len({found[0].read_bytes() for found in saved}) == 4, "a step left the weights as they were"


def test_it_runs_unchanged_against_a_server(loop: str, place: Path, tmp_path: Path) -> None:
    pytest.importorskip("tinker_cookbook", reason="tinker-cookbook is not installed (see the Makefile)")
    pytest.importorskip("fastapi", reason="the extra [serve] is not installed")
    (tmp_path / "Qwen").symlink_to(place / "Qwen")
    with TinkerServer({NAME: place / NAME}, tmp_path / "state") as server:
        runs(loop, tmp_path, TINKER_BASE_URL=server.url, TINKER_API_KEY=server.key)


def test_it_runs_in_process_by_its_imports(loop: str, place: Path, tmp_path: Path) -> None:
    """Every line that the table of docs/tinker/recipes.md translates, and no other."""
    pytest.importorskip("chz", reason="chz, which comes with the SDK, is not installed")
    page = (ROOT / "docs" / "tinker" / "recipes.md").read_text(encoding="utf-8")
    table = dict(re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|$", page, re.M))
    lines = [table.get(line, line) for line in loop.splitlines()]
    assert sum(line in table for line in loop.splitlines()) == 5
    (tmp_path / "Qwen").symlink_to(place / "Qwen")
    code = "\n".join(lines)
    assert not re.search(r"^(import|from) tinker", code, re.M)
    runs(code, tmp_path)


CONFIG = """
client: mock
env: {name: toy}
reward: {kwargs: {keywords: [answer, solution]}}
rollout: {max_tokens: 4}
training: {steps: 3, prompts_per_step: 2, group_size: 4, max_steps_off_policy: 1}
evaluation: {samples: 2, tasks: 4}
"""


def test_its_reward_curve_is_drawn_from_our_metrics(
    blocks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snippet with pandas, its path being that of a run of `rlvr train`."""
    pytest.importorskip("pandas")
    from matplotlib.figure import Figure

    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(CONFIG)
    assert run(["train", "--config=run.yaml"]) == 0
    rows = [json.loads(line) for line in Path("runs/run/metrics.jsonl").read_text().splitlines()]
    [snippet] = [block for block in blocks if "read_json" in block]
    axes = Figure().subplots()
    exec(snippet.replace("/tmp/rl-loop/metrics.jsonl", "runs/run/metrics.jsonl"), {"plt": axes})
    [line] = axes.get_lines()
    assert np.asarray(line.get_ydata()).tolist() == [row["env/all/reward/total"] for row in rows] and len(rows) == 3
