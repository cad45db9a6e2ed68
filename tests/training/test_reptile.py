"""Reptile: the outer step by hand, families in turn, and a run that is killed ends with the bits of a calm one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlvr.clients.mock.mock_client import MockTrainingClient, TablePolicy
from rlvr.core.messages import AdamParams
from rlvr.core.types import Task
from rlvr.engine.engine_options import LoraConfig
from rlvr.training.errors import TrainingStoppedError
from rlvr.training.journal import Checkpoint, Journal, Position
from rlvr.training.parts import StepBatch
from rlvr.training.schedules import ScheduleSection
from rlvr.training.schedules.reptile import Reptile
from tests.kit.table_trainer import Letters, make_trainer
from tests.kit.tiny import data
from tests.kit.tiny_run import TINY, RunKilled, attempt


class Families(Letters):
    """Family a wants the letter a, family b the letter b."""

    levels = ("a", "b")

    def train(self, seed: int, index: int, level: str) -> Task:
        return Task(f"{level}{index}", "say", {"answer": level}, level)


def make_schedule(folder: Path, journal: Journal, source: Letters | None = None, **options: Any) -> Reptile:
    client = MockTrainingClient(TablePolicy(["say", "a", "b"]), folder / "checkpoints")
    trainer = make_trainer(client, source=source or Families(), steps=12)
    object.__setattr__(trainer.options, "schedule", ScheduleSection(name="reptile", **options))
    return Reptile(trainer, journal)


def logits(schedule: Reptile) -> np.ndarray:
    client: Any = schedule.trainer.parts.client
    return client.policy.logits


def list_levels(collected: StepBatch) -> set[str]:
    return {t.task.level for t in collected.all if t.task is not None}


def test_the_outer_step_goes_a_share_of_the_way_by_hand(tmp_path: Path) -> None:
    """From 1, 2 to 5, 0 a quarter of the way: 1 + .25 x 4 = 2 and 2 - .25 x 2 = 1.5. The optimizer begins anew."""
    policy = TablePolicy(["a", "b"])  # two words more: the end and the unknown one
    client = MockTrainingClient(policy, tmp_path)
    policy.logits = np.array([0.0, -30.0, 1.0, 2.0])
    start = client.save_weights_for_sampler("start").result().path
    policy.logits, policy.moments, policy.adam_steps = np.array([8.0, -30.0, 5.0, 0.0]), np.ones((2, 4)), 7
    client.interpolate(start, 0.25).result()
    assert policy.logits.tolist() == [2.0, -30.0, 2.0, 1.5]
    assert policy.adam_steps == 0 and not policy.moments.any()


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["all weights", "adapter"])
def test_the_engine_makes_the_same_outer_step_and_samplers_keep_theirs(
    client: Callable[..., Any], lora: LoraConfig | None
) -> None:
    trainer = client("qwen3", lora=lora)
    policy = trainer.policy
    start = trainer.save_weights_for_sampler("start").result().path
    saved = {name: p.detach().clone() for name, p in policy.parameters.items()}
    for seed in range(2):
        trainer.forward_backward(data(seed=seed), "cross_entropy").result()
        trainer.optim_step(AdamParams(0.01)).result()
    moved = {name: p.detach().clone() for name, p in policy.parameters.items()}
    sampler, before = trainer.create_sampling_client(), trainer.fingerprint
    digest = sampler.weights_sha256()
    trainer.interpolate(start, 0.25).result()
    for name, p in policy.parameters.items():
        assert torch.equal(p.detach(), saved[name] + 0.25 * (moved[name] - saved[name])), name
    assert any(not torch.equal(saved[name], moved[name]) for name in saved)
    assert trainer.fingerprint != before and sampler.weights_sha256() == digest
    trainer.forward_backward(data(), "cross_entropy").result()
    trainer.optim_step(AdamParams(0.01)).result()
    assert {float(state["step"]) for state in policy.optimizer.state.values()} == {1.0}


def test_a_loop_learns_one_family_and_the_outer_step_follows_it(tmp_path: Path) -> None:
    """With outer_rate=1 a loop of three steps ends at the adapted weights W'; with 0.25 at W + 0.25 (W' - W)."""
    ends: dict[float, np.ndarray] = {}
    for rate in (1.0, 0.25):
        folder = tmp_path / str(rate)
        with Journal(folder) as journal:
            schedule = make_schedule(folder, journal, inner_steps=3, outer_rate=rate)
            begin = logits(schedule).copy()
            levels = [list_levels(schedule.learn(step)[1]) for step in range(3)]
            ends[rate] = logits(schedule).copy()
            assert len(levels[0]) == 1 and levels[0] == levels[1] == levels[2]
            assert list_levels(schedule.learn(3)[1]) == {"a", "b"} - levels[0]
    assert np.abs(ends[1.0] - begin).max() > 0.1
    np.testing.assert_allclose(ends[0.25], begin + 0.25 * (ends[1.0] - begin), rtol=1e-12)


def test_each_pass_goes_through_all_families_in_an_order_of_its_own(tmp_path: Path) -> None:
    source = Families()
    source.levels = ("a", "b", "c", "d")
    with Journal(tmp_path) as journal:
        schedule = make_schedule(tmp_path, journal, source, inner_steps=2)
        order = [list_levels(schedule.learn(2 * loop)[1]).pop() for loop in range(12)]
    passes = [order[first : first + 4] for first in (0, 4, 8)]
    assert [sorted(one) for one in passes] == [["a", "b", "c", "d"]] * 3
    assert passes[0] != passes[1] or passes[1] != passes[2]


def test_the_folders_of_loops_that_no_resume_needs_are_deleted(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        schedule = make_schedule(tmp_path, journal, inner_steps=2)
        for step in range(6):
            schedule.learn(step)
        kept = lambda: sorted(folder.name for folder in (tmp_path / "checkpoints").glob("outer-*"))  # noqa: E731
        assert kept() == ["outer-000000", "outer-000002", "outer-000004"]
        schedule.delete_before(3)  # step 3 is the second of the loop that began with step 2
        assert kept() == ["outer-000002", "outer-000004"]
        schedule.finish()
        assert kept() == []


def test_a_resume_within_a_loop_needs_the_weights_it_began_with(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        schedule = make_schedule(tmp_path, journal, inner_steps=2)
        schedule.restore(Checkpoint(Position(2, 4), "checkpoints/rl-000004"), 4)  # between two loops
        with pytest.raises(TrainingStoppedError, match=r"outer-000004.*missing.*run\.name"):
            schedule.restore(Checkpoint(Position(2, 5), "checkpoints/rl-000005"), 5)


def test_an_environment_of_one_level_is_refused(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal, pytest.raises(ValueError, match=r"families.*single level.*schedule=sync"):
        make_schedule(tmp_path, journal, Letters())


FAMILIES = (
    TINY.replace(
        "env: {name: rpn_arithmetic, kwargs: {complexity: [1, 1], flaw: 0.0}}",
        "env: {name: sorting, kwargs: {digits: 2, orders: [0, 1, 2]}}",
    ).replace("sft: {steps: 2, batch_size: 8}", "sft: {steps: 0}")
    + "curriculum: {by: uniform}\n"
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(FAMILIES)
    words = ("training.schedule.name=reptile", "training.schedule.inner_steps=3", "training.steps=6")

    def start(*more: str, killed_at: int = 0) -> dict[str, Any]:
        return attempt("tiny.yaml", *words, *more, killed_at=killed_at)

    return start


@pytest.mark.slow
def test_a_run_killed_within_loops_and_between_them_ends_with_the_same_bits(
    run: Callable[..., dict[str, Any]],
) -> None:
    calm = run("run.name=calm", "run.checkpoint_every=2")
    for step in (2, 3, 5):
        with pytest.raises(RunKilled):
            run("run.name=torn", "run.checkpoint_every=2", killed_at=step)
    torn = run("run.name=torn", "run.checkpoint_every=2")
    assert torn["weights_sha256"] == calm["weights_sha256"]
    assert not list(Path("runs/torn/checkpoints").glob("outer-*"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["training.steps=5"], r"training\.steps=5.*multiple of training\.schedule\.inner_steps=3"),
        (["evaluation.every=2"], r"evaluation\.every=2.*multiple of"),
        (["curriculum.by=pass_rate"], r"curriculum\.by=pass_rate.*leave it out"),
        (["curriculum.replay=0.5"], r"curriculum\.replay.*leave it out"),
        (["training.schedule.outer_rate=0"], r"outer_rate=0.*above 0, at most 1"),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_settings_that_contradict_it_are_refused(
    run: Callable[..., dict[str, Any]], words: list[str], expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        run(*words)
