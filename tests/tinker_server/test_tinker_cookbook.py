"""Recipes of tinker-cookbook, unmodified, in processes of their own against a server of ours: they run to their end.

That they learn is measured by benchmarks/tinker_cookbook.py, which takes minutes.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.forked_process import run_forked
from tests.kit.tinker_model import write_model
from tests.kit.tinker_server import TinkerServer, aborted_at_exit

pytest.importorskip("tinker_cookbook", reason="tinker-cookbook is not installed (see the Makefile)")
pytest.importorskip("pylatexenc", reason="pylatexenc, which the cookbook's mathematics needs, is not installed")
pytest.importorskip("fastapi", reason="the extra [serve] is not installed")
pytestmark = pytest.mark.timeout(400)
NAME = "Qwen/Qwen3-8B"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder where the names of a model and of data sets on the hub are folders."""
    folder = tmp_path_factory.mktemp("cookbook")
    write_model(folder / NAME, steps=60, context=4_096)
    sums = [(x, y) for x in range(12) for y in range(12)]  # a batch of sl_basic is 128
    asked = [f"What is {x} + {y}?" for x, y in sums]
    answers = [str(x + y) for x, y in sums]
    pairs = list(zip(asked, answers, strict=True))
    gsm8k = [{"question": q, "answer": f"Add.\n#### {a}"} for q, a in pairs]
    said = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in pairs]
    compared = [
        {name: f"\n\nHuman: {q}\n\nAssistant: {text}" for name, text in (("chosen", a), ("rejected", a + "0"))}
        for q, a in pairs
    ]
    asked_only = [{"question": q, "final_answer": a} for q, a in pairs]
    pages = [{"text": "Before and after it many were known, however most of them later on. " * 20}] * 200
    for name, rows in (
        ("openai/gsm8k", gsm8k), ("HuggingFaceH4/no_robots", said), ("Anthropic/hh-rlhf", compared),
        ("zwhe99/DeepMath-103K", asked_only), ("Salesforce/wikitext", pages),
    ):  # fmt: skip
        (folder / name).mkdir(parents=True)
        text = "\n".join(json.dumps(row) for row in rows)
        for split in ("train", "test"):
            (folder / name / f"{split}.jsonl").write_text(text, encoding="utf-8")
    (folder / "talks.jsonl").write_text("\n".join(map(json.dumps, said)), encoding="utf-8")
    for name, config in (("openai/gsm8k", "main"), ("Salesforce/wikitext", "wikitext-103-raw-v1")):
        files = "".join(f"\n  - split: {split}\n    path: {split}.jsonl" for split in ("train", "test"))
        card = f"---\nconfigs:\n- config_name: {config}\n  data_files:{files}\n---\n"
        (folder / name / "README.md").write_text(card, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[TinkerServer]:
    options = ("--device", "cpu", "--alias", "stable_reinforce=cispo")
    with TinkerServer({NAME: place / NAME}, place / "state", *options) as running:
        yield running


def environment(server: TinkerServer, place: Path) -> dict[str, str]:
    return {
        **os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.key, "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "HF_HOME": str(place / "hf"),
    }  # fmt: skip


def recipe(server: TinkerServer, place: Path, module: str, log: str, *options: str) -> list[dict[str, Any]]:
    """Run it to its end; its rows of metrics, a row per batch."""
    command = ["-X", "faulthandler", "-m", f"tinker_cookbook.recipes.{module}"]
    options = (f"model_name={NAME}", f"log_path={log}", *options)
    done = run_forked([*command, *options], cwd=place, env=environment(server, place), timeout=300)
    assert done.returncode == 0 or aborted_at_exit(done), (done.stdout + done.stderr)[-4_000:]
    lines = (place / log / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if set(row) - {"step"} > {n for n in row if n.startswith("tokens/")}]  # not the sums


SMALL = ("env=arithmetic", "lora_rank=4", "group_size=4", "groups_per_batch=4", "save_every=1")


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
    assert all(row["stable_reinforce_computed_as_cispo"] == 1 for row in rows), "a run says which loss it had"


@pytest.mark.slow
def test_decisions_are_scored_and_trained(server: TinkerServer, place: Path) -> None:
    """`decisions.forecasting` and `.demo` ask for the log-probs of chosen tokens in a prompt."""
    markets = [
        {
            "submission_id": str(i), "event_ticker": f"event {i}", "title": f"Is {i} even?", "category": "sums",
            "snapshot_time": f"2025-{month}-01", "close_time": f"2025-{month}-02", "markets": json.dumps(["even"]),
            "market_outcome": json.dumps({"even": 1 - i % 2}), "sources": json.dumps([{"title": "A", "summary": "B"}]),
        }
        for i, month in enumerate(["08"] * 8 + ["11"] * 4)
    ]  # fmt: skip
    with open(place / "markets.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(markets[0]))
        writer.writeheader()
        writer.writerows(markets)
    options = ("lora_rank=4", "data_path=markets.csv", "batch_size=4", "max_steps=2", "eval_every=1")
    rows = recipe(server, place, "decisions.forecasting", "forecasting", *options)
    assert [row["train/target_prob:mean"] > 0 for row in rows if "train/loss" in row] == [True, True]
    scores = [row["test/brier_reward"] for row in rows if "test/brier_reward" in row]
    assert len(scores) == 3 and all(-1 <= score <= 1 for score in scores) and scores[0] != scores[-1]

    command = ["-X", "faulthandler", "-m", "tinker_cookbook.recipes.decisions.demo", f"model_name={NAME}"]
    demo = subprocess.run(
        [sys.executable, *command], input="How do I pay?\n\n", cwd=place, env=environment(server, place),
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert demo.returncode == 0 or aborted_at_exit(demo), demo.stderr[-4_000:]
    teams = json.loads(demo.stdout[demo.stdout.index("{") : demo.stdout.index("}") + 1])
    assert list(teams) == ["billing", "sdk", "console", "cookbook"] and abs(sum(teams.values()) - 1) < 1e-3


@pytest.mark.slow
def test_rl_loop_and_sl_loop(server: TinkerServer, place: Path) -> None:
    few = ("lora_rank=4", "batch_size=4", "max_steps=2", "save_every=1")
    rows = recipe(server, place, "rl_loop", "rl", *few, "group_size=4", "max_tokens=8", "loss_fn=importance_sampling")
    assert [row["progress/batch"] for row in rows] == [0, 1] and all("reward/total" in row for row in rows)
    rows = recipe(server, place, "sl_loop", "sl", *few)
    assert len(rows) == 2 and all(row["train_mean_nll"] > 0 for row in rows)


GROUPS = ("group_size=4", "max_tokens=8", "eval_every=0")
PLAIN = "renderer_name=role_colon"  # these recipes have a default for another model
FEW = (  # 4 groups of 4 for the recipe's 128 of 16, which are part of an object in its code
    "dataset_builder=tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder", "dataset_builder.batch_size=4",
    "dataset_builder.group_size=4", "dataset_builder.renderer_name=qwen3",
    f"dataset_builder.model_name_for_tokenizer={NAME}",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "options", "metric"),
    [
        ("sl_basic", (), "train_mean_nll"),  # a batch of 128, which is part of its code
        ("rl_basic", ("max_tokens=8", "lora_rank=4", *FEW), "env/all/reward/total"),
        ("chat_sl.train", ("dataset=no_robots", "batch_size=4", "lora_rank=4"), "train_mean_nll"),
        ("chat_sl.train", ("dataset=talks.jsonl", "batch_size=4", "lora_rank=4"), "train_mean_nll"),
        ("prompt_distillation.train", ("file_path=talks.jsonl", "batch_size=4", "lora_rank=4"), "train_mean_nll"),
        ("preference.dpo.train", ("dataset=hhh", "batch_size=4"), "dpo_loss"),
        ("preference.shorter.train", (PLAIN, "batch_size=4", *GROUPS), "env/all/reward/total"),
        ("multiplayer_rl.guess_number.train", (PLAIN, "batch_size=4", *GROUPS), "env/all/reward/total"),
        ("math_rl.train", ("env=gsm8k", "groups_per_batch=4", *GROUPS), "env/all/reward/total"),
        (
            "distillation.on_policy_distillation",
            (f"teacher_model={NAME}", "dataset=deepmath", "groups_per_batch=4", "lora_rank=4", *GROUPS),
            "teacher_kl",
        ),
        (
            "rl_numerics_check.train",
            ("groups_per_batch=2", "lora_rank=4", "task.num_pages_min=2", "task.num_pages_max=3", *GROUPS),
            "env/all/reward/total",
        ),
    ],
)
def test_other_recipes_run_to_their_end(
    server: TinkerServer, place: Path, module: str, options: tuple[str, ...], metric: str
) -> None:
    """One step of each; its row has the figure that the recipe is about."""
    log = "-".join([module, *(word.partition("=")[2] for word in options[:1])])
    rows = recipe(server, place, module, log, "max_steps=1", *options)
    assert any(metric in row for row in rows), rows
