"""An optimizer of the user's, named by its path in a config: no file of the package knows it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.runs.assembly import assemble
from rlvr.runs.run_plan import plan
from tests.kit.tiny_run import TINY, RunKilled, attempt, stored_steps

LION = '''
"""Lion (Chen et al. 2023, arXiv:2302.06675): steps of the sign of an average, for the weights of linear layers."""
from dataclasses import dataclass

import torch

from rlvr.algorithms.optimizers import Optimizer
from rlvr.core.messages import AdamParams
from rlvr.core.protocols import Feature


@dataclass(frozen=True)
class LionParams(AdamParams):
    title = "Lion"
    stepper = "own_lion:step"

    blend: float = 0.9


@dataclass(frozen=True)
class Lion(Optimizer):
    """Step matrices by Lion."""

    name = "lion"
    title = "Lion"
    needs = (Feature.STEPPERS,)

    blend: float = 0.9

    def make_params(self, adam, share):
        return LionParams(**vars(adam), blend=self.blend)


@torch.no_grad()
def step(policy, params):
    stepped = [name for name, master in policy.masters.items() if master.ndim == 2 and master.grad is not None]
    for name in stepped:
        master = policy.masters[name]
        average = policy.momenta.setdefault(name, torch.zeros_like(master))
        master.sub_(params.learning_rate * average.lerp(master.grad, 1 - params.blend).sign())
        average.lerp_(master.grad, 0.01)
    return stepped
'''
OPTIMIZER = "training.optimizer={name: 'own_lion:Lion', learning_rate: 0.001, kwargs: {blend: 0.8}}"
TOY = """
client: mock
env: {name: toy}
reward: {kwargs: {keywords: [answer]}}
rollout: {max_tokens: 8}
training: {steps: 1}
"""
LEARNS = "training.control=random_reward"  # so that every step has a gradient


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_lion.py").write_text(LION)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    return str(tmp_path / "tiny.yaml")


def run(config: str, name: str, *words: str, killed_at: int = 0) -> Path:
    root = Path(config).parent
    attempt(config, OPTIMIZER, LEARNS, f"run.root={root}", f"run.name=run_{name}", *words, killed_at=killed_at)
    return root / f"run_{name}"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (last,) = folder.glob("checkpoints/final-*")
    return load_file(last / "model.safetensors")


def test_a_step_of_the_users_optimizer_moves_each_matrix_by_its_rate(config: str) -> None:
    before, after = (weights(run(config, f"{n}", f"training.steps={n}")) for n in (1, 2))
    moves = [(after[name] - before[name]).abs() for name in after if after[name].ndim == 2]
    for move in moves:
        assert torch.minimum(move, (move - 0.001).abs()).max() < 1e-6  # 0 where the gradient is 0, else the rate
    assert sum(move.count_nonzero() for move in moves) > 1000


@pytest.mark.slow
def test_a_run_with_it_that_was_killed_goes_on_to_the_same_bits(config: str) -> None:
    calm = run(config, "calm")
    with pytest.raises(RunKilled):
        run(config, "killed", killed_at=2)
    killed = run(config, "killed")
    assert stored_steps(killed) == stored_steps(calm)
    assert all(torch.equal(tensor, weights(killed)[name]) for name, tensor in weights(calm).items())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["training.optimizer.kwargs.blnd=1"], "does not take 'blnd' .did you mean 'blend'"),
        (["training.optimizer.kwargs.blend=much"], "blend='much'.*valid number"),
        (["training.optimizer.momentum=0.8"], "no effect.*own_lion:Lion has no momentum"),
        (["training.optimizer.name=adamw"], "adamw has its options beside its name"),
        (["training.optimizer.name='own_lion:Leo'"], "own_lion' has no 'Leo'"),
    ],
)
def test_a_config_that_cannot_be_is_refused_before_the_run(config: str, words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(config, "refused", *words)


def test_a_client_that_has_adamw_alone_refuses_it_before_the_run(config: str) -> None:
    (file := Path(config).with_name("toy.yaml")).write_text(TOY)
    composed = load(None, str(file), [OPTIMIZER])
    with pytest.raises(ValueError, match=r"optimizer\.name=lion is not supported by client=mock, which has AdamW"):
        plan(assemble(build_config(composed)))
