"""Recipes of tinker-cookbook, unmodified, in processes of their own against a server of ours: they run to their end.

That they learn is measured by benchmarks/tinker_cookbook.py, which takes minutes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tinker_model import write_model
from tinker_server import TinkerServer, aborted_at_exit

from tests.forked_process import run_forked

pytest.importorskip("tinker_cookbook", reason="tinker-cookbook is not installed (see the Makefile)")
pytest.importorskip("pylatexenc", reason="pylatexenc, which the cookbook's mathematics needs, is not installed")
pytest.importorskip("fastapi", reason="the extra [serve] is not installed")
pytestmark = pytest.mark.timeout(400)
NAME = "Qwen/Qwen3-8B"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder where the names of a model and of two data sets on the hub are folders."""
    folder = tmp_path_factory.mktemp("cookbook")
    write_model(folder / NAME, steps=60)
    sums = [(x, y) for x in range(6) for y in range(6)]
    asked = [f"What is {x} + {y}?" for x, y in sums]
    answers = [str(x + y) for x, y in sums]
    gsm8k = [{"question": q, "answer": f"Add.\n#### {a}"} for q, a in zip(asked, answers, strict=True)]
    said = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in zip(asked, answers, strict=True)
    ]
    for name, rows in (("openai/gsm8k", gsm8k), ("HuggingFaceH4/no_robots", said)):
        (folder / name).mkdir(parents=True)
        text = "\n".join(json.dumps(row) for row in rows)
        (folder / name / "train.jsonl").write_text(text, encoding="utf-8")
    configs = "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: train.jsonl\n---\n"
    (folder / "openai/gsm8k/README.md").write_text(configs, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[TinkerServer]:
    options = ("--device", "cpu", "--alias", "stable_reinforce=cispo")
    with TinkerServer({NAME: place / NAME}, place / "state", *options) as running:
        yield running


def recipe(server: TinkerServer, place: Path, module: str, log: str, *options: str) -> list[dict[str, Any]]:
    """Run it to its end; its rows of metrics, a row per batch."""
    environment = {
        **os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.key, "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "HF_HOME": str(place / "hf"),
    }  # fmt: skip
    command = ["-X", "faulthandler", "-m", f"tinker_cookbook.recipes.{module}"]
    options = (f"model_name={NAME}", f"log_path={log}", "lora_rank=4", *options)
    done = run_forked([*command, *options], cwd=place, env=environment, timeout=300)
    assert done.returncode == 0 or aborted_at_exit(done), (done.stdout + done.stderr)[-4_000:]
    lines = (place / log / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if set(row) - {"step"} > {n for n in row if n.startswith("tokens/")}]  # not the sums


SMALL = ("env=arithmetic", "group_size=4", "groups_per_batch=4", "save_every=1")


@pytest.mark.slow
def test_the_loop_trains_and_a_resumed_one_goes_on(server: TinkerServer, place: Path) -> None:
    options = (*SMALL, "loss_fn=importance_sampling")
    rows = recipe(server, place, "math_rl.train", "sync", *options, "max_steps=2", "num_substeps=2")
    assert [row["progress/batch"] for row in rows] == [0, 1]
    assert all(abs(row["optim/kl_sample_train_v1"]) < 1e-3 for row in rows)  # on policy: one model, one arithmetic
    assert all(-0.1 <= row["env/all/reward/total"] <= 1 for row in rows)  # the recipe takes 0.1 for a wrong format
    rows = recipe(server, place, "math_rl.train", "sync", *options, "max_steps=3", "behavior_if_log_dir_exists=resume")
    assert [row["progress/batch"] for row in rows] == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("log", "options"),
    [
        ("stream", ("stream_minibatch_config.groups_per_batch=4", "stream_minibatch_config.num_minibatches=2")),
        ("async", ("max_steps_off_policy=1",)),
    ],
)
def test_streaming_and_asynchronous_loops_train_with_the_aliased_loss(
    server: TinkerServer, place: Path, log: str, options: tuple[str, ...]
) -> None:
    """No loss_fn is given: stable_reinforce, the recipe's default, which this server serves as cispo."""
    rows = recipe(server, place, "math_rl.train", log, *SMALL, "max_steps=2", *options)
    assert rows and all("env/all/reward/total" in row for row in rows)


@pytest.mark.slow
def test_rl_loop_and_sl_loop(server: TinkerServer, place: Path) -> None:
    few = ("batch_size=4", "max_steps=2", "save_every=1")
    rows = recipe(server, place, "rl_loop", "rl", *few, "group_size=4", "max_tokens=8", "loss_fn=importance_sampling")
    assert [row["progress/batch"] for row in rows] == [0, 1] and all("reward/total" in row for row in rows)
    rows = recipe(server, place, "sl_loop", "sl", *few)
    assert len(rows) == 2 and all(row["train_mean_nll"] > 0 for row in rows)
