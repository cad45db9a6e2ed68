"""The gradient is TRL's: its own trainer's loss on the same rollouts, for every loss of both and every shortcut.

Three ways to one gradient, in fp32: ours through `update`, TRL's GRPOTrainer, and the loss written down over padded
rows (`tests/kit/trl_losses.py`). A shortcut is a setting of the engine that may change the work and not the result.
"""

from __future__ import annotations

import copy
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlvr.algorithms.advantages import RunningBaseline
from rlvr.algorithms.reductions import REDUCTIONS
from rlvr.algorithms.terms.importance import IMPORTANCE_MODES
from rlvr.algorithms.terms.kl import Kl
from rlvr.algorithms.update import Passes, UpdateInputs, loss_config, make_datum, update
from rlvr.clients.local import LocalSamplingClient, LocalTrainingClient
from rlvr.core.messages import AdamParams
from rlvr.core.types import Trajectory
from rlvr.engine.engine_options import LoraConfig
from tests.kit.tiny import gradients
from tests.kit.trl_losses import (
    BUDGET,
    EQUAL_GROUPS,
    Case,
    batch_of,
    difference,
    gradients_of,
    perturb,
    plain_logprobs,
    plain_loss,
    remember,
    rollouts,
    trl_gradient,
    trl_trainer,
)

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed: pip install trl"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing.*` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:You are using 'rollout_func':UserWarning"),
]
CLOSE = 1e-5
LORA = LoraConfig(4, 8.0)
CLIP = {"epsilon": 0.2, "epsilon_high": 0.28}
DAPO = {"loss_type": "dapo", **CLIP}
CASES = [
    Case("dapo", "dapo", DAPO),
    Case("dr_grpo", "dr_grpo", {"loss_type": "dr_grpo", "epsilon": 0.2}),
    Case("grpo", "grpo_original", {"loss_type": "grpo", "epsilon": 0.2}),
    Case("ppo", "ppo", DAPO),
    Case("gspo", "gspo", {"loss_type": "grpo", "epsilon": 3e-4, "epsilon_high": 4e-4,
                          "importance_sampling_level": "sequence"}),
    Case("cispo", "cispo", {"loss_type": "cispo", "epsilon_high": 1.5}, {"clip_high": 0.5}),
    Case("on-policy", "dapo", DAPO, on_policy=True),
    Case("kl", "grpo_original", {"loss_type": "grpo", "epsilon": 0.2, "beta": 0.04},
         {"kl_coef": 0.04, "kl_in": "loss", "kl_estimator": "k3"}),
    Case("cold", "dapo", DAPO, temperature=0.7),
    Case("truncated-masked", "dapo", DAPO, {"mask_truncated": True}, temperature=1.3),
    Case("turns", "grpo_original", {"loss_type": "grpo", "epsilon": 0.2}, turns=True),
    Case("untied", "dr_grpo", {"loss_type": "dr_grpo", "epsilon": 0.2}, model="llama"),
    Case("window", "grpo_original", {"loss_type": "grpo", "epsilon": 0.2}, model="mistral"),
    Case("soft-capped", "dapo", DAPO, model="gemma2"),
    Case("lora", "grpo_original", {"loss_type": "grpo", "epsilon": 0.2}, lora=True),
    Case("two-sided", "dapo", {**DAPO, "delta": 1.3}, {"dual_clip": 1.3}),
    Case("sapo", "sapo", {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 5.0},
         {"loss.positive_temperature": 2.0, "loss.negative_temperature": 5.0}),
]  # fmt: skip
PLAIN = {"tree": False, "pack": False}
SHORTCUTS: dict[str, dict[str, Any]] = {
    "as-it-is": {},
    "none": PLAIN,
    "tree-alone": {"pack": False},
    "packing-alone": {"tree": False},
    "micro-batches": {"micro_tokens": 300},
    "padded-micro-batches": {**PLAIN, "micro_tokens": 200},
    "row-by-row": {"micro_tokens": 1},
    "chunks": {"logit_elements": 17 * 20},
    "checkpointing": {"gradient_checkpointing": True},
    "everything": {"micro_tokens": 300, "logit_elements": 17 * 7, "gradient_checkpointing": True},
}


def training_client(case: Case, fresh: Callable[..., Any], folder: Path, **limits: Any) -> LocalTrainingClient:
    """A client on the case's weights, in an engine with these limits."""
    engine = fresh(case.model, **limits)
    policy = engine.create_policy("policy", lora=LORA if case.lora else None)
    if case.lora:  # B starts at zero, where A has no gradient
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for p in policy.parameters.values():
                p.add_(torch.randn(p.shape, generator=generator) * 0.1)
    return LocalTrainingClient(engine, policy, folder)


def gradient(case: Case, client: Any, answers: list[Trajectory], reference: Any = None) -> dict[str, torch.Tensor]:
    """What `update` hands to the optimizer."""
    found: dict[str, torch.Tensor] = {}
    update(
        client, case.algorithm, copy.deepcopy(answers), lambda _: AdamParams(), Passes(),
        UpdateInputs(RunningBaseline(), BUDGET, case.temperature, reference=reference),
        check=lambda _: found.update(gradients(client)),
    )  # fmt: skip
    return found


class Setting:
    """One case's rollouts and weights, with the gradients of TRL and of the plain loss on them."""

    def __init__(self, case: Case, fresh: Callable[..., Any], tokenizer: Any, folder: Path) -> None:
        self.case, self.fresh, self.folder = case, fresh, folder
        module = fresh(case.model).model.module
        self.other = perturb(module)
        if case.lora:
            from peft import PeftModel

            path = self.client().save_weights_for_sampler("start").result().path
            module = PeftModel.from_pretrained(module, path, is_trainable=True)
        self.trajectories = rollouts(case.turns)
        remember(module if case.on_policy else self.other, self.trajectories, case.temperature)
        case.algorithm.select(self.trajectories)
        reference = None
        if case.algorithm.term(Kl):
            with torch.no_grad():
                reference = plain_logprobs(self.other, self.trajectories, case.temperature)
        plain_loss(case, module, self.trajectories, reference).backward()
        self.plain = gradients_of(module)
        module.zero_grad()
        self.module = module
        trainer = trl_trainer(case, module, tokenizer, folder)
        trainer.model.train()  # no tiny model has dropout; TRL divides otherwise where it evaluates
        trainer._compute_loss(trainer.model, batch_of(case, self.trajectories, reference)).backward()
        self.trl = gradients_of(trainer.model)

    def client(self, **limits: Any) -> Any:
        return training_client(self.case, self.fresh, self.folder, **limits)

    def ours(self, **limits: Any) -> dict[str, torch.Tensor]:
        """The gradient that `update` hands to the optimizer."""
        reference = None
        if self.case.algorithm.term(Kl):
            engine = self.fresh(self.case.model)
            engine.model.module.load_state_dict(self.other.state_dict())
            reference = LocalSamplingClient(engine, engine.base_snapshot())
        return gradient(self.case, self.client(**limits), self.trajectories, reference)


@pytest.fixture(scope="module")
def setting(fresh: Callable[..., Any], tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Setting] = {}

    def get(case: Case) -> Setting:
        if case.name not in made:
            made[case.name] = Setting(case, fresh, tokenizer, tmp_path_factory.mktemp(case.name))
        return made[case.name]

    return get


by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


# Quick: every loss with our defaults and with all shortcuts at once, and each shortcut alone with the first loss.
PAIRS = [
    pytest.param(case, shortcut, id=f"{case.name}-{shortcut}", marks=[pytest.mark.slow] * (not quick))
    for case in CASES
    for shortcut in SHORTCUTS
    for quick in [case is CASES[0] or shortcut in ("as-it-is", "everything")]
]


@pytest.mark.parametrize(("case", "shortcut"), PAIRS)
def test_the_gradient_is_that_of_trl(case: Case, shortcut: str, setting: Callable[[Case], Setting]) -> None:
    here = setting(case)
    whole, worst = difference(here.ours(**SHORTCUTS[shortcut]), here.trl)
    assert whole <= CLOSE and worst <= CLOSE


@by_name
def test_trls_gradient_and_ours_are_that_of_the_loss_written_down(
    case: Case, setting: Callable[[Case], Setting]
) -> None:
    here = setting(case)
    for found in (here.trl, here.ours()):
        whole, worst = difference(found, here.plain)
        assert whole <= CLOSE and worst <= CLOSE


def test_the_shortcuts_are_taken(setting: Callable[[Case], Setting]) -> None:
    """What the comparisons stand on: beginnings are shared, across more than one block of attention, and rows cut."""
    here = setting(CASES[0])
    data = [make_datum(here.case.algorithm, t, 1.0) for t in here.trajectories]
    tokens = sum(d.model_input.length for d in data)

    def plan(name: str) -> list[Any]:
        return here.client(**SHORTCUTS[name])._engine._learner._batches(data)

    [shared] = plan("as-it-is")
    assert shared.tree.ancestors_CA.shape[0] > 1 and shared.tree.ancestors_CA.max() > 0
    assert len(shared.index_N.unique()) < 0.6 * tokens
    [packed] = plan("packing-alone")
    assert packed.tree is not None and len(packed.index_N.unique()) == tokens
    assert all(b.tree is None for b in plan("none"))
    trees, cut = plan("tree-alone"), plan("micro-batches")
    assert len(trees) == 2 and all(b.tree is not None for b in trees)
    assert len(cut) > 1 and any(b.tree is not None for b in cut)
    assert sum(len(b.index_N.unique()) for b in cut) > len(shared.index_N.unique())


@pytest.mark.parametrize(
    "shortcut",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("as-it-is", "everything"))) for name in SHORTCUTS],
)
def test_echo_adds_the_gradient_of_the_tokens_between_the_turns(
    shortcut: str, setting: Callable[[Case], Setting]
) -> None:
    """TRL's gradient of answers of two turns, and the mean cross-entropy of what the environment wrote between them."""
    here = setting(next(case for case in CASES if case.name == "turns"))
    echo = Case("echo", "echo", here.case.trl, {"observation_coef": 0.3}, turns=True)
    found = gradient(echo, here.client(**SHORTCUTS[shortcut]), here.trajectories)
    here.module.zero_grad()
    p_BR = plain_logprobs(here.module, here.trajectories, 1.0)
    written = [
        row[: len(t.action_mask)][~torch.tensor(t.action_mask, dtype=torch.bool)]
        for t, row in zip(here.trajectories, p_BR, strict=True)
    ]
    (-0.3 * torch.stack([p.mean() if len(p) else p.sum() for p in written]).mean()).backward()
    added = gradients_of(here.module)
    here.module.zero_grad()
    whole, worst = difference(found, {name: g + added[name] for name, g in here.trl.items()})
    assert whole <= CLOSE and worst <= CLOSE
    whole, _ = difference(found, here.trl)
    assert whole > 0.01, "the tokens between the turns count"


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[8]], ids=lambda case: case.name)
def test_answers_without_an_advantage_may_be_left_out(case: Case, setting: Callable[[Case], Setting]) -> None:
    """`weigh` skips a group, and an answer at its group's mean; computed like the others, they change nothing."""
    here, algorithm = setting(case), case.algorithm
    client = here.client()
    selected = algorithm.select(copy.deepcopy(here.trajectories))
    weights = REDUCTIONS[algorithm.reduction](selected, BUDGET)
    assert len(algorithm.weigh(selected, BUDGET)) == len(selected) - 4
    data = [make_datum(algorithm, t, w) for t, w in zip(selected, weights, strict=True)]
    client.forward_backward(data, algorithm.loss.name, loss_config(algorithm, client, case.temperature)).result()
    for expected in (here.ours(), here.trl):
        whole, worst = difference(gradients(client), expected)
        assert whole <= CLOSE and worst <= CLOSE


@pytest.mark.parametrize("name", ["dapo", "grpo", "lora", "turns"])
def test_the_answers_lie_on_both_sides_of_both_bounds(name: str, setting: Callable[[Case], Setting]) -> None:
    """Ratios between the bounds, and beyond each of them with either sign of the advantage: clipped, or left alone."""
    here = setting(next(case for case in CASES if case.name == name))
    with torch.no_grad():
        now = plain_logprobs(here.module, here.trajectories, 1.0)
    low, high = here.case.algorithm.loss.config().values()
    cells = [
        (t.advantage > 0, float(p - q < math.log(low)) + 2 * float(p - q > math.log(high)))
        for t, row in zip(here.trajectories, now, strict=True)
        for p, q, acted in zip(row, t.logprobs, t.action_mask, strict=False)
        if acted and t.advantage
    ]
    assert len(set(cells)) == 6, sorted(set(cells))


# Where our denominators count less than TRL's, everything else is the same: (row, cells, TRL's loss, who counts).
FEWER: list[tuple[str, dict[str, Any], Callable[[Trajectory], int]]] = [
    ("grpo_original", {"mask_truncated": True}, lambda t: 1),
    ("dr_grpo", {"mask_truncated": True}, lambda t: 1),
    ("dapo", {"drop_equal_groups": True}, lambda t: t.num_action_tokens),
]


@pytest.mark.parametrize(("row", "cells", "size"), FEWER, ids=lambda value: value if isinstance(value, str) else "")
def test_tokens_excluded_from_the_denominator_change_the_scale_alone(
    row: str, cells: dict[str, Any], size: Callable[[Trajectory], int], setting: Callable[[Case], Setting]
) -> None:
    """Masked answers count in TRL's number of answers, groups of equal rewards in its number of tokens."""
    loss = row.removesuffix("_original")
    here = setting(Case(f"fewer-{row}", row, {"loss_type": loss, **CLIP}, {"clip_high": 0.28, **cells}))
    kept = here.case.algorithm.select(copy.deepcopy(here.trajectories))
    factor = sum(map(size, kept)) / sum(map(size, here.trajectories))
    whole, worst = difference({name: g * factor for name, g in here.ours().items()}, here.trl)
    assert factor < 0.95 and whole <= CLOSE and worst <= CLOSE


# By TRL's scale_rewards: our estimator, and ours over theirs. TRL divides by the sample's std, we by the population's.
# The deviation is of the n rewards of a group of four, or of all groups.
SCALES = {
    "none": ("group_mean", 0),
    "group": ("group_normalized", 4),
    "batch": ("group_mean_batch_std", 4 * len(EQUAL_GROUPS)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "accumulated"), [("none", 1), ("group", 2), ("batch", 1)])
@pytest.mark.parametrize("loss", ["dapo", "dr_grpo", "grpo"])
def test_a_whole_step_of_trl_has_the_gradient_of_ours(
    loss: str, scale: str, accumulated: int, fresh: Callable[..., Any], tokenizer: Any, tmp_path: Path
) -> None:
    """TRL's loop from answers and rewards to the optimizer: its advantages, masks, batches and denominators."""
    advantage, n = SCALES[scale]
    factor = ((n - 1) / n) ** 0.5 if n else 1.0
    name = {"grpo": "grpo_original"}.get(loss, loss)
    case = Case("step", name, {"loss_type": loss, "scale_rewards": scale}, {"advantage": advantage, "clip_high": 0.2})
    answers = rollouts(groups=EQUAL_GROUPS)
    for t in answers:
        t.reward = 1000.0 * (t.reward or 0.0)  # beside which what both add to a std, 1e-4 and 1e-6, is nothing
    module = copy.deepcopy(fresh().model.module)
    remember(module, answers, 1.0)
    size = {"per_device_train_batch_size": len(answers) // accumulated, "gradient_accumulation_steps": accumulated}
    expected = trl_gradient(case, module, tokenizer, tmp_path, answers, **size)
    found = gradient(case, training_client(case, fresh, tmp_path), answers)
    whole, worst = difference({name: g * factor for name, g in found.items()}, expected)
    assert whole <= CLOSE and worst <= CLOSE


@pytest.mark.slow
def test_a_step_of_trl_with_several_rewards_has_the_gradient_of_gdpo(
    fresh: Callable[..., Any], tokenizer: Any, tmp_path: Path
) -> None:
    """TRL's `normalize_then_sum` over two weighted rewards. Its last std is the sample's, ours the population's."""
    answers = rollouts(groups=EQUAL_GROUPS)
    for place, t in enumerate(answers):
        # Values and weights beside which what both add to a std is nothing. The first is equal in group 1.
        t.reward_parts = {"right": [3e3, 1000.0 * (t.reward or 0.0)], "form": [2e4, 500.0 * (place * place % 7)]}
        t.reward = sum(weight * value for weight, value in t.reward_parts.values())
    case = Case("gdpo", "gdpo", {"loss_type": "grpo", "multi_objective_aggregation": "normalize_then_sum"})
    module = copy.deepcopy(fresh().model.module)
    remember(module, answers, 1.0)
    expected = trl_gradient(case, module, tokenizer, tmp_path, answers, per_device_train_batch_size=len(answers))
    found = gradient(case, training_client(case, fresh, tmp_path), answers)
    n = len(answers)
    whole, worst = difference({name: g * ((n - 1) / n) ** 0.5 for name, g in found.items()}, expected)
    assert whole <= CLOSE and worst <= CLOSE


@pytest.mark.slow
@pytest.mark.parametrize("mode", IMPORTANCE_MODES)
@pytest.mark.parametrize("loss", ["dapo", "sapo"])
def test_a_step_of_trl_that_corrects_its_sampler_has_the_gradient_of_ours(
    loss: str, mode: str, fresh: Callable[..., Any], tokenizer: Any, tmp_path: Path
) -> None:
    """TRL's own importance weights, between the log-probs that came with the answers and those of its model."""
    words = {"mode": mode, "clip_min": 0.9, "clip_max": 1.1}
    cells = {"importance_cap": 1.1, "importance_floor": 0.9, "importance_mode": mode, "advantage": "group_mean"}
    case = Case(
        "importance", loss,
        {"loss_type": loss, "scale_rewards": "none", **{f"vllm_importance_sampling_{k}": v for k, v in words.items()}},
        {**cells, **({"clip_high": 0.2} if loss == "dapo" else {})},
    )  # fmt: skip
    answers = rollouts(groups=EQUAL_GROUPS)
    module = copy.deepcopy(fresh().model.module)
    remember(perturb(module, 0.01), answers, 1.0)
    expected = trl_gradient(case, module, tokenizer, tmp_path, answers, per_device_train_batch_size=len(answers))
    found = gradient(case, training_client(case, fresh, tmp_path), answers)
    whole, worst = difference(found, expected)
    assert whole <= CLOSE and worst <= CLOSE
