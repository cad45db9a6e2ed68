"""`algorithm.loss=package.module:function`: a loss of the user's trains, resumes and fails like any other."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import own_losses
import pytest
from own_losses import Leash

import rlvr
from rlvr.algorithms import resolve_algorithm
from rlvr.algorithms.capabilities import check_supported
from rlvr.algorithms.loss_specs import LOSS_SPECS
from rlvr.cli.main import run
from rlvr.clients.custom_loss import try_custom_loss
from rlvr.clients.mock.mock_client import MockTrainingClient
from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.core.protocols import Feature
from rlvr.training.journal import newest_checkpoint
from rlvr.training.schedules.sync import Synchronous
from tests.kit.rounding import BACKWARD, FORWARD, tolerance
from tests.kit.table_trainer import make_trainer, table
from tests.kit.tiny_run import TINY, RunKilled, attempt, stored_steps

TOY = """
client: mock
env: {name: toy}
reward: {type: keyword_contains, kwargs: {keywords: [solution, answer]}}
algorithm: {loss: "LOSS"}
rollout: {max_tokens: 16}
training: {steps: 4, prompts_per_step: 2, group_size: 4, num_substeps: 2, optimizer: {learning_rate: 1.0e-4}}
evaluation: {tasks: 4, samples: 2}
run: {checkpoint_every: 2}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_config(loss: str = "own_losses:ppo_form", name: str = "toy.yaml", text: str = TOY) -> str:
    Path(name).write_text(text.replace("LOSS", loss))
    return name


def train_table(loss: str, cells: dict[str, Any]) -> np.ndarray:
    """The table's logits after six steps of several updates each."""
    client = MockTrainingClient(table())
    options: Any = {"ppo_epochs": 2, "num_substeps": 2, "steps": 6, "target_kl": 50.0}
    trainer = make_trainer(client, cells={"loss": loss, **cells}, sampling={"max_tokens": 3}, **options)
    if trainer.parts.algorithm.needs_reference:
        trainer.reference = client.create_sampling_client()
    schedule = Synchronous(trainer)
    for step in range(6):
        schedule.learn(step)
    return client.policy.logits


@pytest.mark.parametrize(
    "cells",
    [
        {},
        {"kl_coef": 0.1, "kl_in": "loss", "kl_estimator": "k3"},
        {"kl_coef": 0.1, "kl_estimator": "k1"},
        {"entropy_coef": 0.1},
        {"importance_cap": 2.0},
        {"reduction": "sequence_mean", "advantage": "group_normalized"},
    ],
    ids=["alone", "kl in the loss", "kl in the reward", "entropy", "importance cap", "grpo"],
)
def test_a_function_of_ppos_formula_trains_to_the_weights_of_ppo(cells: dict[str, Any]) -> None:
    """Within a millionth of the way: log-probs reach the function as float32, the table computes in float64."""
    start, named, own = table().logits, train_table("ppo", cells), train_table("own_losses:ppo_form", cells)
    assert np.abs(named - start).max() > 0.5
    assert np.abs(own - named).max() < 1e-6 * np.abs(named - start).max()


@pytest.mark.slow
def test_a_transformer_learns_by_a_function_as_by_the_named_loss(folder: Path) -> None:
    """The first update has its loss, its gradient's norm and its rewards; later ones begin at weights of their own."""
    file = write_config(name="tiny.yaml", text=TINY)
    words = ("reward.type=own_losses:count_words", "sft.steps=0")
    attempt(file, "run.name=named", *words)
    attempt(file, "run.name=own", "algorithm.loss=own_losses:ppo_form", *words)
    rows, others = (stored_steps(folder / "runs" / name) for name in ("named", "own"))
    assert [row["updates"] for row in rows] == [1.0] * 3
    first, own = rows[0], others[0]
    assert own["reward"] == first["reward"]
    assert own["loss"] == pytest.approx(first["loss"], rel=0.0, abs=tolerance(FORWARD, 4.0))  # log-probs are about -4
    assert own["grad_norm"] == pytest.approx(first["grad_norm"], rel=tolerance(FORWARD + BACKWARD))
    assert all(row["grad_norm"] > 0.01 and other["loss/rows"] == 8 for row, other in zip(rows, others, strict=True))


def test_it_gets_all_rows_of_an_optimizer_step_with_their_inputs() -> None:
    """Rows of advantage 0 too, since not every term carries the advantage; substeps divide the rows."""
    own_losses.SEEN.clear()
    cells: dict[str, Any] = {"loss": "own_losses:look", "drop_equal_groups": False, "kl_coef": 0.1, "kl_in": "loss"}
    trainer = make_trainer(MockTrainingClient(table()), cells=cells, num_substeps=2)
    trainer.reference = trainer.parts.client.create_sampling_client()
    Synchronous(trainer).learn(0)
    assert [len(rows) for rows in own_losses.SEEN] == [12, 12]  # 6 prompts x 4 completions
    kl = {"kl_weights", "reference_logprobs"}
    inputs = {"target_tokens", "logprobs", "advantages", "mask", "weights"}
    assert all(row == inputs | kl for rows in own_losses.SEEN for row in rows)


def test_weights_carry_the_reduction_to_terms_without_an_advantage() -> None:
    """With kl_in=loss and k2 to the policy that sampled, the KL is the pull of `pulls`: the loss is twice as large."""
    cells: dict[str, Any] = {"loss": "own_losses:pulls", "drop_equal_groups": False}
    trainer = make_trainer(MockTrainingClient(table()), cells=cells, ppo_epochs=3)
    metrics, _ = Synchronous(trainer).learn(0)
    assert metrics["loss"] == pytest.approx(metrics["loss/pull"])
    assert metrics["updates"] == 3 and metrics["grad_norm"] == 0  # on-policy the pull has no slope


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bits_and_shows_the_functions_metrics(folder: Path) -> None:
    file = write_config()
    whole = attempt(file, "run.name=whole")
    with pytest.raises(RunKilled):
        attempt(file, "run.name=killed", killed_at=3)
    again = attempt(file, "run.name=killed")
    assert again["weights_sha256"] == whole["weights_sha256"]
    rows = stored_steps(folder / "runs" / "whole")
    assert stored_steps(folder / "runs" / "killed") == rows
    steps = [row for row in rows if row["phase"] == "rl" and row["updates"]]
    assert steps and all({"loss/rows", "loss/first_term", "loss"} <= row.keys() for row in steps)


def test_a_run_is_not_resumed_with_a_changed_function(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    source = Path(own_losses.__file__).read_text()
    (folder / "changing.py").write_text(source)
    file = write_config("changing:ppo_form")
    with pytest.raises(RunKilled):
        attempt(file, killed_at=2)
    (folder / "changing.py").write_text(source.replace("1.28", "1.2"))
    with pytest.raises(ValueError, match=r"the source of algorithm.loss \(changing.py\)"):
        attempt(file)
    (folder / "changing.py").write_text(source)
    assert attempt(file)["weights_sha256"]


@pytest.mark.slow
def test_a_function_that_fails_in_the_middle_spoils_nothing(folder: Path) -> None:
    """The error names it and its line; once it works the run goes on to the bits of one that never failed."""
    file = write_config("own_losses:breaks_on_demand")
    whole = attempt(file, "run.name=whole")
    with pytest.raises(RunKilled):
        attempt(file, "run.name=broken", killed_at=2)
    Path("break").touch()
    with pytest.raises(ValueError, match=r"own_losses:breaks_on_demand raised IndexError: no such row .*own_losses.py"):
        attempt(file, "run.name=broken")
    Path("break").unlink()
    assert attempt(file, "run.name=broken")["weights_sha256"] == whole["weights_sha256"]
    assert stored_steps(folder / "runs" / "broken") == stored_steps(folder / "runs" / "whole")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("no_tuple", "returned a Tensor of shape []"),
        ("per_token", "a Tensor of shape [10]"),
        ("no_gradient", "has no gradient"),
        ("not_a_number", "is not finite"),
        ("infinite_slope", "is not finite (first seen in rows [0])"),
        ("raises", "raised KeyError: 'advantage'"),
        ("text_metric", "the metric 'mood' as a str"),
        ("taken_name", "a metric named 'loss:sum'"),
    ],
)
def test_a_wrong_function_is_refused_before_a_run_begins(name: str, problem: str) -> None:
    with pytest.raises(ValueError) as refused:
        try_custom_loss(resolve_algorithm("ppo", loss=f"own_losses:{name}"))
    assert problem in str(refused.value) and f"algorithm.loss=own_losses:{name}" in str(refused.value)


def test_right_functions_pass_the_trial_under_every_option() -> None:
    for cells in ({}, {"kl_coef": 0.1, "kl_in": "loss"}, {"entropy_coef": 0.1}, {"importance_cap": 2.0}):
        for name in ("ppo_form", "pulls", "look"):
            try_custom_loss(resolve_algorithm("ppo", loss=f"own_losses:{name}", **cells))


@pytest.mark.slow
def test_the_command_refuses_a_wrong_function_and_leaves_no_progress(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And once it is right, the same command trains."""
    file = write_config("own_losses:per_token")
    assert run(["train", f"--config={file}"]) == 2
    assert "algorithm.loss=own_losses:per_token" in capsys.readouterr().err
    assert newest_checkpoint(folder / "runs" / "toy") is None
    write_config()
    assert run(["train", f"--config={file}"]) == 0
    assert json.loads((folder / "runs" / "toy" / "summary.json").read_text())["weights_sha256"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["algorithm.loss=own_losses:pppo_form"], "did you mean 'ppo_form'"),
        (["algorithm.loss=no_such_module:f"], "importing 'no_such_module' failed"),
        (["algorithm.loss=own_losses:SEEN"], "expected a function"),
        (["algorithm.loss=own_losses"], "or a path 'package.module:function'"),
        (["algorithm.clip_low=0.1"], "algorithm.clip_low (the loss own_losses:ppo_form has no clip_low"),
        (["algorithm.beta=0.1"], "has no beta"),
        (["algorithm.entropy_coef=0.1", "algorithm.entropy=exact"], "use entropy=sampled"),
        (
            ["training.schedule=fixed_lag", "training.num_minibatches=2", "training.num_substeps=1"],
            "gets all rows of an optimizer step",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(
    words: list[str], problem: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", f"--config={write_config()}", *words]) == 2
    assert problem in capsys.readouterr().err


def test_a_client_that_takes_no_function_is_refused() -> None:
    algorithm = resolve_algorithm("ppo", loss="own_losses:ppo_form")
    able = MockTrainingClient.capabilities
    check_supported(algorithm, able)
    with pytest.raises(ValueError, match=r"algorithm.loss=own_losses:ppo_form is not supported by client=mock"):
        check_supported(algorithm, replace(able, features=able.features - {Feature.OWN_LOSS}))


# --- a class with settings ---------------------------------------------------------------------------------------


def read_loss(*words: str) -> Any:
    return build_config(load(None, write_config(), words)).algorithm.resolve().loss


@pytest.mark.parametrize("name", ["own_losses:Leash", "leash_of_tests"])
def test_a_class_takes_its_settings_from_the_command_line(name: str, folder: Path) -> None:
    rlvr.register(Leash)
    loss = read_loss(f"algorithm.loss={name}")
    assert isinstance(loss, Leash) and (loss.name, loss.strength, loss.config()) == (name, 0.1, {"strength": 0.1})
    loss = read_loss(f"algorithm.loss.name={name}", "algorithm.loss.kwargs.strength=0.3")
    assert loss.config() == {"strength": 0.3} and loss == type(loss)(strength=0.3)
    assert LOSS_SPECS[name] is Leash.spec


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["algorithm.loss.name=own_losses:Leash", "algorithm.loss.kwargs.strenth=1"], ["'strenth'", "strength"]),
        (["algorithm.loss.name=own_losses:Leash", "algorithm.loss.kwargs.strength=-1"], ["strength=-1", "at least 0"]),
        (["algorithm.loss.name=own_losses:Leash", "algorithm.loss.kwargs.strength=much"], ["strength='much'"]),
        (["algorithm.loss.name=own_losses:Leash", "algorithm.loss.beta=1"], ["no beta"]),
        (["algorithm.loss.name=ppo", "algorithm.loss.kwargs.strength=1"], ["loss.kwargs", "beside its name"]),
        (["algorithm.loss.kwargs.strength=1"], ["own_losses:ppo_form", "strength"]),
    ],
)
def test_settings_that_a_loss_does_not_have_are_refused(
    words: list[str], said: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", f"--config={write_config()}", *words]) == 2
    told = capsys.readouterr().err
    assert all(part in told for part in said), told


@pytest.mark.slow
def test_a_class_trains_alike_from_python_from_the_command_line_and_after_a_kill(folder: Path) -> None:
    """Its settings matter, and every way gives the same bits."""
    rlvr.register(Leash)
    file = write_config("own_losses:Leash")
    words = ("algorithm.loss.kwargs.strength=0.3", "training.ppo_epochs=2", "training.optimizer.learning_rate=0.5")
    ends = {"typed": attempt(file, *words, "run.name=typed")["weights_sha256"]}
    with pytest.raises(RunKilled):
        attempt(file, *words, "run.name=killed", killed_at=3)
    ends["resumed"] = attempt(file, *words, "run.name=killed")["weights_sha256"]
    made = rlvr.train(
        config=file, loss=Leash(strength=0.3), training={"ppo_epochs": 2, "optimizer.learning_rate": 0.5}, quiet=True
    )
    ends["python"] = made.summary["weights_sha256"]
    assert made.settings["algorithm"]["loss"]["kwargs"] == {"strength": 0.3}
    ends["named"] = attempt(file, *words, "algorithm.loss=leash_of_tests", "run.name=named")["weights_sha256"]
    assert len(set(ends.values())) == 1
    assert attempt(file, *words[1:], "run.name=other")["weights_sha256"] != ends["typed"]


def test_the_engine_in_this_process_learns_by_a_class_at_a_path(folder: Path) -> None:
    file = write_config(name="tiny.yaml", text=TINY)
    words = ("reward.type=own_losses:count_words", "sft.steps=0", "training.steps=1")
    attempt(file, *words, "algorithm.loss.name=own_losses:Leash", "algorithm.loss.kwargs.strength=0.3")
    (row,) = stored_steps(folder / "runs" / "tiny")
    assert row["updates"] == 1 and row["grad_norm"] > 0.01


def test_the_name_in_a_request_follows_no_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server looks names up in the same table: only what its own process has loaded is in it."""
    monkeypatch.syspath_prepend(folder)
    (folder / "never_imported.py").write_text("raise SystemExit('imported')")
    assert "never_imported:Loss" not in LOSS_SPECS and "own_losses:DoublePpo" not in LOSS_SPECS
    assert "never_imported" not in sys.modules
