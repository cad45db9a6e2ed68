"""A configured run on the toy policy: end to end without torch, killed and resumed, evaluated, refused early."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlvr.cli.main import run
from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.runs.assembly import assemble
from rlvr.runs.build_job import build_job
from rlvr.runs.run_folder import open_run
from rlvr.runs.run_plan import plan
from rlvr.tracking import RunConsole
from rlvr.training.errors import TrainingStoppedError
from rlvr.training.journal import Journal
from rlvr.training.loop import TrainingLoop
from tests.kit.tiny_run import RunKilled
from tests.kit.tiny_run import attempt as attempt_at
from tests.kit.tiny_run import stored_steps as rows

TOY = """
client: mock
seed: 7
env: {name: toy}
reward: {kwargs: {keywords: [answer, solution]}}
rollout: {max_tokens: 64, temperature: 0.7, top_p: 0.9}
algorithm: {name: reinforce}
training: {steps: 30, prompts_per_step: 8, group_size: 4, optimizer: {learning_rate: 3e-5}}
evaluation: {samples: 8}
run: {checkpoint_every: 4, rollouts_per_step: 2}
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with toy.yaml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.yaml").write_text(TOY)
    return tmp_path


attempt = partial(attempt_at, "toy.yaml")


@pytest.mark.parametrize(
    "words",
    [
        pytest.param((), id="reinforce", marks=pytest.mark.slow),
        pytest.param(
            ("algorithm.name=reinforce_ema", "algorithm.entropy_coef=0.01"),
            id="moving baseline",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("algorithm.name=gspo", "training.num_substeps=2", "algorithm.kl_coef=0.01"), id="gspo, KL in the reward"
        ),
        pytest.param(
            ("algorithm.name=ppo", "algorithm.kl_coef=0.01", "algorithm.kl_in=loss", "algorithm.kl_estimator=k3"),
            id="ppo, KL in the loss",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_killed_run_ends_with_the_same_bits(toy: Path, words: tuple[str, ...]) -> None:
    """Stopped between checkpoints, twice: same weights, same metric rows, same summary as undisturbed."""
    words = (*words, "training.steps=20", "evaluation.tasks=6")
    calm = attempt(*words, "run.name=calm")
    for step in (6, 15):
        with pytest.raises(RunKilled):
            attempt(*words, "run.name=torn", killed_at=step)
    torn = attempt(*words, "run.name=torn")
    assert torn["weights_sha256"] == calm["weights_sha256"]
    assert {**torn, "seconds": 0} == {**calm, "seconds": 0}
    assert rows(toy / "runs" / "torn") == rows(toy / "runs" / "calm")


def test_it_learns_and_the_saved_policy_evaluates_alike(toy: Path, capsys: Any) -> None:
    """`rlvr train`, then `rlvr evaluate` of the run: the pass rate rises, and is the same number both times."""
    assert run(["train", "--config=toy.yaml"]) == 0
    summary = json.loads((toy / "runs" / "toy" / "summary.json").read_text())
    assert summary["final"]["pass@1"]["value"] > summary["baseline"]["pass@1"]["value"] + 0.15
    assert summary["p_value"] < 0.01
    capsys.readouterr()
    assert run(["evaluate", str(toy / "runs" / "toy")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["pass@1"], told["tasks"]) == (summary["final"]["pass@1"], 16)


@pytest.mark.slow
def test_training_the_toy_loads_no_torch(toy: Path) -> None:
    code = "import sys; from rlvr.cli.main import run; c = run(sys.argv[1:]); print(c, 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "train", "--config=toy.yaml", "training.steps=2"],
        cwd=toy, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1:] == ["0 False"], done.stdout + done.stderr


def test_any_environment_with_a_vocabulary_will_do(toy: Path) -> None:
    """Arithmetic, warm-up included: its own end word ends an answer."""
    (toy / "toy.yaml").write_text(TOY.replace("reward: {kwargs: {keywords: [answer, solution]}}\n", ""))
    arithmetic = ("env.name=rpn_arithmetic", "env.kwargs={complexity: [1, 1], flaw: 0.0}", "rollout.max_tokens=6")
    summary = attempt(*arithmetic, "sft.steps=5", "training.steps=2", "evaluation.tasks=20")
    assert summary["tasks"] == 20
    first = json.loads((toy / "runs" / "toy" / "rollouts" / "rl-000000.jsonl").read_text().splitlines()[0])
    assert first["response"]


def test_the_plan_lists_the_main_settings(toy: Path) -> None:
    """The table's size, and the tasks that really are held out where fewer are than asked for."""
    config = build_config(load(None, "toy.yaml"))
    told = plan(assemble(config))
    assert told["model"] == "a table of token logits over 198 words, all weights (client=mock)"
    assert (
        told["evaluation"]
        == "16 held-out tasks (all there are; evaluation.tasks=1,000) x 8 completions, before and after"
    )
    fewer = build_config(load(None, "toy.yaml", ["evaluation.tasks=7"]))
    assert plan(assemble(fewer))["evaluation"].startswith("7 held-out tasks x")


def test_an_impossible_config_is_refused_before_a_run_folder_exists(toy: Path, capsys: Any) -> None:
    (toy / "rows.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n{"prompt": "1 + 2", "answer": "3"}\n')
    mistakes = {
        ("client=moc",): "mock",
        ("env.name=jsonl", "env.kwargs={path: rows.jsonl, heldout_fraction: 0.5}"): "has no `vocabulary`",
        ("env.kwargs={words: [two words]}",): "'two words' is not one word",
    }
    for words, told in mistakes.items():
        assert run(["train", "--config=toy.yaml", *words]) == 2
        assert told in capsys.readouterr().err
    assert not (toy / "runs").exists()


def test_an_option_that_the_table_policy_does_not_support_is_refused(toy: Path, capsys: Any) -> None:
    words = ("algorithm.name=ppo", "algorithm.entropy_coef=0.1", "algorithm.entropy=exact")
    assert run(["train", "--config=toy.yaml", *words]) == 2
    assert "algorithm.entropy=exact is not supported by client=mock" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["training.group_size=1", "algorithm.name=grpo"], "group_size >= 2"),
        (["rollout.temperature=0"], "use a temperature above 0"),
        (
            ["algorithm.entropy_coef=0.1", "algorithm.entropy=exact"],
            "algorithm.entropy=exact is not supported by client=",
        ),
    ],
)
def test_the_plan_refuses_configs_that_training_refuses(toy: Path, words: list[str], message: str) -> None:
    """`rlvr config` says what would run: it must not promise a run that `rlvr train` refuses."""
    config = build_config(load(None, "toy.yaml", words))
    with pytest.raises(ValueError, match=message):
        plan(assemble(config))


def test_a_prompt_that_is_too_long_is_refused_before_anything_runs(toy: Path, capsys: Any) -> None:
    words = ["train", "--config=toy.yaml", "training.max_prompt_tokens=2"]
    assert run([*words, "training.long_prompts=error"]) == 2
    told = capsys.readouterr()
    assert "tokens, more than 2 (training.max_prompt_tokens=2)" in told.err and "baseline" not in told.out
    assert run([*words, "run.name=none-left"]) == 2
    assert "all 24 prompts are longer than 2 tokens" in capsys.readouterr().err


def test_trackers_may_be_turned_on_for_the_rest_of_a_run_and_nothing_else(toy: Path) -> None:
    loaded = load(None, "toy.yaml", ["run.name=same"])
    folder, _ = open_run(loaded, build_config(loaded))
    (folder / "journal.jsonl").write_text('{"event": "attempt"}\n')
    more = load(None, "toy.yaml", ["run.name=same", "tracking.tensorboard=true"])
    assert open_run(more, build_config(more))[0] == folder


def test_a_root_that_is_not_a_folder_is_refused(toy: Path) -> None:
    Path("afile").write_text("")
    loaded = load(None, "toy.yaml", ["run.root=afile"])
    with pytest.raises(ValueError, match=r"run.root=afile: .* cannot be made"):
        open_run(loaded, build_config(loaded))


def test_a_reward_that_can_be_hacked_is_warned_of_unless_another_is_watched(toy: Path) -> None:
    """`boxed` looks at the form alone."""
    words = ["env.name=rpn_arithmetic", "reward.type=boxed", "evaluation.tasks=4"]
    for more, warnings in ([], 1), (["reward.watch=[boxed]"], 1), (["reward.watch=[correct]"], 0):
        loaded = load(None, "toy.yaml", [*words, *more, f"run.name=caution{len(more)}{warnings}"])
        config, told = build_config(loaded), list[str]()
        folder, _ = open_run(loaded, config)
        build_job(assemble(config), folder, lambda text: None, told.append)
        assert len([text for text in told if "can be hacked" in text]) == warnings, told


@pytest.mark.slow
def test_a_resume_without_the_reference_of_its_divergence_is_refused(toy: Path) -> None:
    """Later weights are another reference: a run that took them for it would go on with other numbers."""
    words = ("algorithm.kl_coef=0.01", "training.steps=20", "evaluation.tasks=6", "run.name=torn")
    with pytest.raises(RunKilled):
        attempt(*words, killed_at=10)
    kept = toy / "runs" / "torn" / "checkpoints" / "reference"
    kept.rename(toy / "elsewhere")
    with pytest.raises(TrainingStoppedError, match=r"reference, .* damaged or missing .*; put it back"):
        attempt(*words)
    (toy / "elsewhere").rename(kept)
    assert attempt(*words)["weights_sha256"]


@pytest.mark.slow
def test_a_control_run_does_not_stop_by_the_verifiers_verdicts(toy: Path) -> None:
    """A pass rate that any policy reaches ends a run at its first look, and no control run."""
    words = ("training.steps=6", "evaluation.tasks=6", "evaluation.every=2", "evaluation.interim_samples=64")
    for control, steps in (("none", 2), ("random_reward", 6)):
        composed = load(None, "toy.yaml", [*words, f"training.control={control}", f"run.name={control}"])
        config = build_config(composed)
        config = replace(config, training=replace(config.training, until=0.001))
        folder, _ = open_run(composed, config)
        with RunConsole() as console, Journal(folder) as journal:
            TrainingLoop(build_job(assemble(config), folder, console.note, console.warn), journal, console).run()
        looks = [row["test/env/all/correct"] for row in rows(folder) if "test/env/all/correct" in row]
        assert looks and min(looks) > 0.001  # the goal was met at every look
        assert len(rows(folder)) == steps
