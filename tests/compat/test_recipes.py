"""The recipes run as commands: a warm-up on conversations, then reinforcement learning, by a loop and by our own."""

from __future__ import annotations

import json
import os
import re
import signal
import string
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlvr.compat.recipes import math_rl, rl_basic, rl_loop, sl_basic
from rlvr.compat.recipes.arguments import Recipe, parse
from rlvr.compat.recipes.schedules import AsyncConfig, StreamMinibatchConfig
from rlvr.config import load
from rlvr.config.build_config import build_config
from tests.kit.forked_process import Program, run_forked
from tests.kit.tiny import CONFIGS

LIGHT = ["evaluation.tasks=4", "engine.threads=1", "model.device=cpu"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny base model that has no chat template."""
    from rlvr.engine.model_loading import build_model
    from rlvr.engine.tokenizer import build_tokenizer

    place = tmp_path_factory.mktemp("base") / "model"
    tokenizer = build_tokenizer("pieces", string.printable, end="<eos>", pad="<pad>")
    model = build_model(CONFIGS["qwen3"], tokenizer, seed=1, device="cpu", dtype="float32")
    model.module.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GSM8K's two files, with questions made here whose answers are single digits."""
    place = tmp_path_factory.mktemp("rows")
    for split, first in (("train", 0), ("test", 100)):
        made = [{"question": f"{i} pens?", "answer": f"#### {i % 3}"} for i in range(first, first + 12)]
        (place / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    return place


@pytest.fixture(scope="module")
def warm(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base model after `sl_basic` on answers that are a box with any of three digits in it."""
    from rlvr.compat.problem_envs import SUFFIX

    place = tmp_path_factory.mktemp("warm")
    talks = [
        [{"role": "user", "content": f"{i} pens?{SUFFIX}"}, {"role": "assistant", "content": f"\\boxed{{{i * 7 % 3}}}"}]
        for i in range(40)
    ]
    (place / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    words = [f"model_name={base}", f"data={place / 'talks.jsonl'}", f"log_path={place / 'run'}", "batch_size=20"]
    words += ["max_steps=60", "learning_rate=0.01", "max_tokens=12", "model.lora=null", *LIGHT]
    assert Recipe("sl_basic", sl_basic.WORDS).run(words) == 0
    losses = [row["loss"] for row in metrics(place / "run") if row["phase"] == "sft"]
    assert losses[-1] < 0.5 * losses[0]
    [checkpoint] = (place / "run" / "checkpoints").glob("final-*")
    return checkpoint


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_loop_learns_from_rewards_and_logs_them(warm: Path, rows: Path, tmp_path: Path) -> None:
    """`reward/total` is in metrics.jsonl under log_path, as pandas reads it; the adapter is saved."""
    words = [f"model_name={warm}", f"data={rows}", f"log_path={tmp_path}", "batch_size=4", "group_size=8"]
    rl_loop.main(parse(rl_loop.Config, [*words, "max_tokens=12", "learning_rate=1e-3", "lora_rank=4"]))
    found = metrics(tmp_path)
    assert [row["step"] for row in found] == [0, 1, 2]
    assert all(0 <= row["reward/total"] == row["env/all/reward/total"] <= 1 for row in found)
    assert any(0 < row["reward/total"] < 1 and row["trained/answers"] >= 8 for row in found), found
    assert list((tmp_path / "weights").glob("*/train-0/weights/final/adapter_model.safetensors"))


@pytest.mark.slow
def test_the_loop_gives_the_same_through_the_sdk_and_a_server(warm: Path, rows: Path, tmp_path: Path) -> None:
    """`base_url` asks a server by the public SDK: the same rewards, step by step, as the loop in one process."""
    pytest.importorskip("tinker", reason="the SDK is what speaks to the server")
    (tmp_path / "tiny").symlink_to(warm)  # where the SDK looks for a tokenizer of the model's name
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TINKER_API_KEY": "tml-test", "CUDA_VISIBLE_DEVICES": ""}
    how: dict[str, Any] = {"cwd": tmp_path, "env": environment}
    words = ["model_name=tiny", f"data={rows}", "batch_size=4", "group_size=4", "max_tokens=12", "lora_rank=4"]
    words += ["learning_rate=1e-3", "max_steps=2"]
    recipe = ["-m", "rlvr.compat.recipes.rl_loop", *words]
    serve = ["-m", "rlvr.cli.main", "serve", "engine", "--model=tiny=./tiny", "--port=0", "--device=cpu"]
    server = Program(serve, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **how)
    assert server.stdout is not None
    try:
        url = next(found[0] for line in server.stdout if (found := re.search(r"http://127.0.0.1:\d+", line)))
        for more in (["log_path=here"], ["log_path=there", f"base_url={url}"]):
            done = run_forked([*recipe, *more], timeout=120, **how)
            assert done.returncode == 0, done.stderr
    finally:
        server.send_signal(signal.SIGTERM)
        server.stdout.read()
        server.wait(30)
        server.stdout.close()
    here, there = ([row["reward/total"] for row in metrics(tmp_path / name)] for name in ("here", "there"))
    assert here == there and len(here) == 2


@pytest.mark.slow
def test_rl_basic_trains_with_the_cookbooks_reward(warm: Path, rows: Path, tmp_path: Path) -> None:
    """Format and correctness are in the metrics, under the cookbook's names; log_path is the run's folder."""
    words = [f"model_name={warm}", f"data={rows}", f"log_path={tmp_path / 'run'}", "batch_size=4", "group_size=4"]
    words += [
        "max_steps=2",
        "learning_rate=0.001",
        "max_tokens=12",
        "lora_rank=4",
        *LIGHT,
        "env.kwargs.options.convo_prefix=null",
    ]
    assert Recipe("rl_basic", rl_basic.WORDS).run(words) == 0
    found = [row for row in metrics(tmp_path / "run") if row["phase"] == "rl"]
    assert len(found) == 2
    for row in found:
        assert row["env/all/reward/total"] == row["reward/total"]
        expected = row["env/all/correct"] + 0.1 * (row["env/all/format"] - 1)
        assert row["reward/total"] == pytest.approx(expected)
    assert any(0 < row["env/all/correct"] < 1 for row in found)


@pytest.mark.slow
def test_math_rl_streams_sums_made_by_a_builder(warm: Path, tmp_path: Path) -> None:
    """`env=arithmetic` with the cookbook's word for minibatches; the last batch is held out for the evaluation."""
    words = [f"model_name={warm}", "env=arithmetic", f"log_path={tmp_path / 'run'}", "max_steps=1", "lora_rank=4"]
    words += ["stream_minibatch_config.groups_per_batch=4", "stream_minibatch_config.num_minibatches=2", *LIGHT]
    words += ["algorithm.reduction=sequence_sum", "env.kwargs.options.largest=2", "evaluation.samples=4"]
    assert math_rl.run(words) == 0
    [row] = [row for row in metrics(tmp_path / "run") if row["phase"] == "rl"]
    assert row["rollout/groups"] == 4.0


def test_the_two_schedules_become_settings() -> None:
    stream = StreamMinibatchConfig(groups_per_batch=128, num_minibatches=8)
    assert stream.settings() == ["training.prompts_per_step=128", "training.num_minibatches=8"]
    late = AsyncConfig(max_steps_off_policy=3, groups_per_batch=64)
    assert late.settings() == ["training.prompts_per_step=64", "training.max_steps_off_policy=3"]


@dataclass
class Words:
    name: str = "a"
    size: int = 1
    rate: float = 0.1
    most: int | None = 3
    place: str | None = None


def test_words_become_fields_of_their_kind() -> None:
    assert parse(Words, []) == Words()
    given = ["name=b=c", "size=2", "rate=1e-4", "most=None", "place=/tmp", "size=3"]
    assert parse(Words, given) == Words("b=c", 3, 1e-4, None, "/tmp")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nam=x"], "'nam' is not a setting of this recipe"),
        (["size=two"], "size='two': expected a whole number"),
        (["rate=high"], "rate='high': expected a number"),
        (["--size=2"], "'--size=2': expected key=value"),
        (["size"], "'size': expected key=value"),
    ],
)
def test_a_wrong_word_is_named(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(Words, words)


def test_a_recipe_takes_its_words_and_every_setting_of_train(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = Recipe("rl_basic", rl_basic.WORDS)
    assert recipe.overrides(["batch_size=2", "evaluation.tasks=3", "seed=4", "log_path=/tmp/x/y"]) == [
        "training.prompts_per_step=2",
        "evaluation.tasks=3",
        "seed=4",
        "run.root=/tmp/x",
        "run.name=y",
    ]
    assert recipe.run(["batchsize=2"]) == 2
    assert "'batchsize' is not a setting of rl_basic" in capsys.readouterr().err
    assert math_rl.run(["env=chess"]) == 2
    assert "expected arithmetic, gsm8k or package.module:Builder" in capsys.readouterr().err


def test_math_rl_takes_the_cookbooks_word_for_a_batch_and_not_two_that_disagree() -> None:
    recipe = Recipe("math_rl", math_rl.WORDS)
    assert recipe.overrides(["groups_per_batch=8"]) == ["training.prompts_per_step=8"]
    same = recipe.overrides(["groups_per_batch=8", "async_config.groups_per_batch=8"])
    assert set(same) == {"training.prompts_per_step=8"}
    with pytest.raises(ValueError, match=r"batch_size=8 and groups_per_batch=9 set .*give one"):
        recipe.overrides(["batch_size=8", "groups_per_batch=9"])


@pytest.mark.parametrize(("recipe", "line"), [
    (rl_basic, "batch_size +128 +training.prompts_per_step"),
    (math_rl, "groups_per_batch +100 +training.prompts_per_step"),
    (sl_basic, "learning_rate +0.0002 +sft.optimizer.learning_rate"),
])  # fmt: skip
def test_help_says_each_word_with_its_default(recipe: Any, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = recipe.__name__.rpartition(".")[2]
    assert Recipe(name, recipe.WORDS, recipe.__doc__).run(["model_name=x", "--help"]) == 0
    said = capsys.readouterr().out
    assert re.search(f"^{line}$", said, re.M) and f"python -m rlvr.compat.recipes.{name}" in said
    assert all(re.search(rf"^{re.escape(word)} ", said, re.M) for word in recipe.WORDS if "=" not in word)


def test_a_loss_that_clips_brings_the_bounds_that_the_sdk_gives_it() -> None:
    recipe = Recipe("math_rl", math_rl.WORDS)
    assert recipe.overrides(["loss_fn=cispo"]) == [
        "algorithm.loss=cispo", "algorithm.clip_low=1.0", "algorithm.clip_high=3.0",
    ]  # fmt: skip
    own = recipe.overrides(["loss_fn=ppo", "algorithm.clip_high=0.3"])
    assert own == ["algorithm.loss=ppo", "algorithm.clip_low=0.2", "algorithm.clip_high=0.3"]
    for loss in ("ppo", "cispo", "gspo"):
        stale = recipe.overrides([f"loss_fn={loss}", "async_config.max_steps_off_policy=2", "model_name=x"])
        build_config(load(None, str(Path(rl_basic.__file__).parent / "math_rl.yaml"), stale))


def test_the_recipes_are_commands() -> None:
    """`python -m`, with a mistake: one line on standard error and exit code 2, before anything heavy is loaded."""
    for name in ("rl_basic", "rl_loop", "math_rl", "sl_basic"):
        done = subprocess.run(
            [sys.executable, "-m", f"rlvr.compat.recipes.{name}", "nonsense=1"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 2, done.stderr
        assert f"{name}: 'nonsense' is not a setting" in done.stderr
    helped = subprocess.run(
        [sys.executable, "-m", "rlvr.compat.recipes.rl_loop", "--help"], capture_output=True, text=True
    )
    assert helped.returncode == 0 and re.search("^learning_rate +4e-05$", helped.stdout, re.M), helped.stderr
