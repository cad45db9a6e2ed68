"""Seed 001: code RL on MBPP. Its dictionary, reward, loop, results table and advanced topics, as its document says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlvr.algorithms.losses.clipped import Ppo
from rlvr.cli.main import run
from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.core.types import Task, Trajectory
from rlvr.envs import resolve_environment
from rlvr.reward import resolve_reward
from rlvr.runs.assembly import assemble
from rlvr.runs.run_plan import plan
from rlvr.training.evaluate import stored_evaluation
from tests.kit.code_rows import REAL, mbpp_file, model_folder
from tests.kit.forked_process import run_forked

ROOT = Path(__file__).parents[2]
DICTIONARY = {
    "base_model": "meta-llama/Llama-3.2-1B",
    "lora_rank": 32,
    "num_train_problems": 100,
    "num_iterations": 20,
    "problems_per_iteration": 10,
    "samples_per_problem": 4,
    "learning_rate": 5e-5,
    "temperature": 0.8,
    "max_tokens": 400,
    "ppo_epochs": 1,
    "ppo_clip_low": 0.8,
    "ppo_clip_high": 1.2,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("hub") / "model")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def small(model: Path, rows: Path, *more: str) -> list[str]:
    return [
        "train", "--config-name=mbpp", f"model.name={model}", f"env.kwargs.path={rows}", "num_iterations=2",
        "num_train_problems=20", "problems_per_iteration=2", "samples_per_problem=3", "rollout.max_tokens=8",
        "evaluation.tasks=4", "evaluation.samples=2", "evaluation.k=2", "engine.threads=1", "lora_rank=2", *more,
    ]  # fmt: skip


def metrics(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("runs", folder, "metrics.jsonl").read_text().splitlines()]


def test_every_key_of_the_dictionary_means_what_it_says_and_none_is_ignored() -> None:
    words = [f"{key}={value}" for key, value in DICTIONARY.items()]
    config = build_config(load(None, str(ROOT / "rlvr/configs/mbpp.yaml"), words), pytest.fail)
    assert (config.model.name, config.model.lora and config.model.lora.rank) == ("meta-llama/Llama-3.2-1B", 32)
    assert config.env.kwargs == {"num_train_problems": 100}
    t, row = config.training, config.algorithm.resolve()
    assert (t.steps, t.prompts_per_step, t.group_size, t.ppo_epochs) == (20, 10, 4, 1)
    assert (t.optimizer.learning_rate, config.rollout.temperature, config.rollout.max_tokens) == (5e-5, 0.8, 400)
    assert (row.advantage.name, row.loss) == ("group_mean", Ppo(0.2, 0.2))


def test_the_shipped_config_is_the_dictionary() -> None:
    """`rlvr train --config-name=mbpp` alone is the recipe: naming every value again changes nothing."""
    words = [f"{key}={value}" for key, value in DICTIONARY.items()]
    assert build_config(load("mbpp")) == build_config(load("mbpp", None, words))


def compute_reward(all_passed: bool, num_passed: int, total_tests: int) -> float:
    """The document's."""
    if all_passed:
        return 1.0
    elif num_passed > 0:
        return 0.5 * (num_passed / total_tests)
    else:
        return -0.5


def test_the_reward_is_the_documents_to_the_bit() -> None:
    cases = [(passed, total) for total in range(1, 8) for passed in range(total + 1)]
    meta = {total: {"tests": [f"assert f({i}) == {i}" for i in range(total)]} for _, total in cases}
    answers = [
        Trajectory("", [], f"def f(x):\n    return x if x < {passed} else None", [], task=Task("t", "", meta[total]))
        for passed, total in cases
    ]
    values = [score.value for score in resolve_reward("code").score(answers)]
    assert values == [compute_reward(passed == total, passed, total) for passed, total in cases]


@pytest.mark.parametrize("rows", ["real", "own"])
def test_the_loop_runs_whole_on_mbpp(rows: str, model: Path, here: Path, capsys: Any) -> None:
    """Baseline, two iterations of sample, execute, reward, advantage, update, and the table; every answer is judged."""
    if rows == "real" and not REAL.is_dir():
        pytest.skip("the MBPP files are not beside the project")
    assert run(small(model, REAL if rows == "real" else mbpp_file(here))) == 0
    steps = metrics("mbpp")
    assert [m["step"] for m in steps] == [0, 1]
    assert all(m["verifier/error_rate"] == m["verifier/invalid_rate"] == 0 for m in steps)
    assert all(m["reward"] == -0.5 and m["rewards/code/num_tests/mean"] == 3 for m in steps)  # a random model's answers
    assert "FINAL RESULTS" in (said := capsys.readouterr().out + capsys.readouterr().err) and "Mean Reward" in said
    assert stored_evaluation(Path("runs/mbpp/evaluations/final.json")).unjudged == 0


@pytest.mark.slow
def test_rlvr_train_py_takes_the_dictionary_and_what_is_typed_on_top(model: Path, here: Path) -> None:
    """`python rlvr_train.py` of the document; a folder stands for the model that has to be downloaded."""
    words = [w for w in small(model, mbpp_file(here))[2:] if not w.startswith(("model.name", "rollout.max_tokens"))]
    done = run_forked(
        [str(ROOT / "examples/rlvr_train.py"), f"base_model={model}", "max_tokens=8", *words], timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(metrics("rlvr_train")) == 2 and "FINAL RESULTS" in done.stdout + done.stderr


@pytest.mark.slow
def test_start_from_checkpoint_begins_where_the_supervised_run_ended(model: Path, here: Path) -> None:
    """An SFT run on the reference programs, then RL from it, given the run or its checkpoint: the very same weights."""
    rows = mbpp_file(here)
    sft = ["training.mode=sft", "sft.steps=3", "sft.batch_size=4", "run.name=sft", "run.keep_checkpoints=9"]
    words = [w for w in small(model, rows) if not w.startswith(("num_iterations", "problems_per", "samples_per"))]
    assert run([*words, *sft]) == 0
    keep = "run.keep_checkpoints=9"
    assert run(small(model, rows, "start_from_checkpoint=runs/sft", "run.name=rl", keep)) == 0
    ended, began, trained = (weights(f"runs/{place}") for place in ("sft/final", "rl/rl", "rl/final"))
    assert ended == began != weights("runs/sft/sft") and trained == began  # equal rewards taught nothing
    checkpoint = Path("runs/sft/checkpoints/final-000003")
    assert run(small(model, rows, f"start_from_checkpoint={checkpoint}", "run.name=again", keep)) == 0
    assert weights("runs/again/rl") == ended


@pytest.mark.slow
def test_a_whole_model_to_start_from_takes_the_place_of_the_base(model: Path, here: Path, capsys: Any) -> None:
    """A run that trained all weights: they are the next run's weights, or the base under its adapter."""
    rows = mbpp_file(here)

    def words(*more: str) -> list[str]:
        return [w for w in small(model, rows, *more, "run.keep_checkpoints=9") if not w.startswith("lora_rank")]

    sft = [w for w in words() if not w.startswith(("num_iterations", "problems_per", "samples_per"))]
    sft += ["training.mode=sft", "sft.steps=2", "sft.batch_size=4", "run.name=sft", "model.lora=null"]
    assert run(sft) == 0
    assert run(words("start_from_checkpoint=runs/sft", "run.name=rl", "model.lora=null")) == 0
    assert weights("runs/rl/rl") == weights("runs/sft/final") != weights("runs/sft/sft")
    assert run(words("start_from_checkpoint=runs/sft", "run.name=under", "model.lora.rank=2")) == 0
    assert "checkpoints/final-000002, LoRA rank 2" in capsys.readouterr().out
    config = json.loads(Path("runs/under/checkpoints/final-000002/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "runs/sft/checkpoints/final-000002"
    assert run(words("start_from_checkpoint=runs/under", "run.name=refused", "model.lora=null")) == 2
    assert "this run trains all weights: set model.lora" in capsys.readouterr().err


def weights(place: str) -> str:
    """The hash of the weights saved before the phase at `runs/NAME/PHASE` began, or after the last step (`final`)."""
    folder, _, phase = place.rpartition("/")
    (place,) = Path(folder, "checkpoints").glob("final-*" if phase == "final" else f"{phase}-000000")
    return json.loads((place / "policy.json").read_text())["weights_sha256"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("tinker://a/b", "give client=tinker"),
        ("./nowhere", "there is no such folder"),
        ("./empty", "it holds no weights that are known here"),
    ],
)
def test_a_start_that_cannot_be_had_is_refused_before_the_run(
    given: str, message: str, model: Path, here: Path
) -> None:
    (here / "empty").mkdir()
    rows = mbpp_file(here)
    config = build_config(load("mbpp", None, [w for w in small(model, rows, f"start_from_checkpoint={given}")[2:]]))
    with pytest.raises(ValueError, match=message):
        plan(assemble(config, resolve_environment("mbpp", path=str(rows))))


def test_an_adapter_of_another_shape_is_refused(model: Path, here: Path, capsys: Any) -> None:
    rows = mbpp_file(here)
    sft = ["training.mode=sft", "sft.steps=1", "sft.batch_size=2", "run.name=sft"]
    words = [w for w in small(model, rows) if not w.startswith(("num_iterations", "problems_per", "samples_per"))]
    assert run([*words, *sft]) == 0
    assert run(small(model, rows, "start_from_checkpoint=runs/sft", "model.lora.alpha=7", "run.name=rl")) == 2
    assert "has rank 2, alpha 32" in capsys.readouterr().err
