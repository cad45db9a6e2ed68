"""What the gradient is compared with: TRL's own trainer on given rollouts, and the losses written down once more.

Used by `test_same_gradient.py`. `Case` is one comparison: a row of `rlvr.algorithms` beside TRL's settings for
the same loss. The rollouts are made here, of groups that differ in size, length and prompt; the plain loss pads every
row, holds all logits, and shares nothing with the engine or with TRL. Left out: everything of TRL's before the loss
(generation, rewards, advantages), which the test runs by itself.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlvr.algorithms.registry import resolve_algorithm
from rlvr.algorithms.specs import Algorithm
from rlvr.core.types import StopReason, Trajectory
from tests.kit.tiny import END_ID

BUDGET = 24  # tokens an answer may have
PAD_ID = 16


@dataclass(frozen=True)
class Case:
    """One comparison. `trl` are settings of a GRPOConfig; `on_policy`: the trained weights sampled the answers."""

    name: str
    row: str
    trl: dict[str, Any]
    cells: dict[str, Any] = field(default_factory=dict[str, Any])
    temperature: float = 1.0
    model: str = "qwen3"
    on_policy: bool = False
    lora: bool = False
    turns: bool = False

    @property
    def algorithm(self) -> Algorithm:
        """The row, without DAPO's filter: TRL's denominators count groups of equal rewards."""
        return resolve_algorithm(self.row, **{"drop_equal_groups": False, **self.cells})


_rng = random.Random(7)


def _tokens(count: int) -> list[int]:
    """Tokens below 15: 15 ends an answer, 16 is the padding."""
    return [_rng.randrange(END_ID) for _ in range(count)]


# Groups of (prompt, answers): an answer is (tokens without the end, reward, truncated).
Group = tuple[list[int], list[tuple[list[int], float, bool]]]
COMMON, TWIN = _tokens(20), _tokens(13)
GROUPS: list[Group] = [
    (COMMON, [(_tokens(20), 1.0, False), (_tokens(3), 0.0, False), (_tokens(24), 0.0, True),
              (_tokens(11), 1.0, False)]),
    (
        [(COMMON[0] + 1) % END_ID, *_tokens(149)],
        [([], 1.0, False), (_tokens(24), 0.0, True), (_tokens(9), 0.0, False), (_tokens(15), 1.0, False),
         (_tokens(14), 0.5, False)],
    ),
    (COMMON[:1], [(_tokens(3), 0.0, False), (_tokens(5), 0.0, False), (_tokens(1), 0.0, True)]),  # rewards are equal
    # Begins as the first group does; answers that are equal, that begin alike, and one that begins another.
    (
        [*COMMON, *_tokens(20)],
        [(TWIN, 0.5, False), (TWIN, 0.0, False), ([*TWIN[:9], *_tokens(6)], 1.0, False), (TWIN[:4], 0.25, True),
         (_tokens(23), 1.0, False)],
    ),
]  # fmt: skip
EQUAL_GROUPS: list[Group] = [  # what TRL's own loop can take: as many answers for every prompt
    GROUPS[0],
    (GROUPS[2][0], [*GROUPS[2][1], (_tokens(4), 0.0, False)]),
    (GROUPS[3][0], GROUPS[3][1][1:]),
]


def rollouts(turns: bool = False, groups: list[Group] = GROUPS) -> list[Trajectory]:
    """The answers of `groups`; with `turns` an environment wrote the second and third token of the longer ones."""
    made: list[Trajectory] = []
    for g, (prompt, answers) in enumerate(groups):
        for i, (tokens, reward, truncated) in enumerate(answers):
            response = list(tokens) if truncated else [*tokens, END_ID]
            mask = [1] * len(response)
            if turns and len(mask) > 4:
                mask[1:3] = [0, 0]
            made.append(
                Trajectory(
                    "", list(prompt), "", response, reward=reward, action_mask=mask, group_id=f"g{g}",
                    rollout_id=f"g{g}.{i}", stop_reason=StopReason.LENGTH if truncated else StopReason.STOP,
                )
            )  # fmt: skip
    return made


def perturb(module: Any, size: float = 0.02, seed: int = 5) -> Any:
    """Other weights near the module's: the policy that sampled, or the one a KL compares with."""
    other = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * size)
    return other


def pad(trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
    """As TRL lays a batch out: prompts padded on the left, answers on the right, masks of both."""

    def rows(lists: list[list[Any]], fill: float, left: bool, kind: torch.dtype) -> Tensor:
        width = max(map(len, lists))
        room = [[fill] * (width - len(row)) for row in lists]
        return torch.tensor([r + row if left else row + r for row, r in zip(lists, room, strict=True)], dtype=kind)

    prompts, answers = [t.prompt_tokens for t in trajectories], [t.response_tokens for t in trajectories]
    long, real = torch.int64, torch.float32
    return {
        "prompt_ids": rows(prompts, PAD_ID, True, long),
        "prompt_mask": rows([[1] * len(p) for p in prompts], 0, True, long),
        "completion_ids": rows(answers, PAD_ID, False, long),
        "completion_mask": rows([[1] * len(a) for a in answers], 0, False, long),
        "tool_mask": rows([t.action_mask for t in trajectories], 1, False, long),
        "old_per_token_logps": rows([t.logprobs for t in trajectories], 0.0, False, real),
        "advantages": torch.tensor([t.advantage for t in trajectories], dtype=real),
    }


def batch_of(case: Case, trajectories: Sequence[Trajectory], reference: Tensor | None) -> dict[str, Tensor]:
    """The dictionary that TRL's `_compute_loss` takes; truncated answers are masked as its trainer masks them."""
    inputs = pad(trajectories)
    if case.algorithm.mask_truncated:
        kept = torch.tensor([[not t.truncated] for t in trajectories])
        for name in ("completion_mask", "tool_mask"):
            inputs[name] = inputs[name] * kept.long()
    if case.on_policy:
        del inputs["old_per_token_logps"]  # TRL takes the log-probs of now
    if reference is not None:
        inputs["ref_per_token_logps"] = reference
    inputs["num_items_in_batch"] = (inputs["completion_mask"] * inputs["tool_mask"]).sum()
    return inputs


def plain_logprobs(module: Any, trajectories: Sequence[Trajectory], temperature: float) -> Tensor:
    """Log-probs of every answer's tokens [B, R], by one padded pass and a whole table of logits."""
    inputs = pad(trajectories)
    tokens_BT = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask_BT = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
    logits_BTV = module(input_ids=tokens_BT, attention_mask=mask_BT, position_ids=positions_BT, use_cache=False).logits
    width = inputs["completion_ids"].shape[1]
    table_BRV = torch.log_softmax(logits_BTV[:, -width - 1 : -1].float() / temperature, -1)
    return table_BRV.gather(-1, inputs["completion_ids"][..., None])[..., 0] * inputs["completion_mask"]


def remember(module: Any, trajectories: Sequence[Trajectory], temperature: float) -> None:
    """Give every answer the log-probs under `module`, as the policy that sampled it."""
    with torch.no_grad():
        found = plain_logprobs(module, trajectories, temperature)
    for t, row in zip(trajectories, found, strict=True):
        t.logprobs = [float(p) * acted for p, acted in zip(row, t.action_mask, strict=False)]


def plain_loss(case: Case, module: Any, trajectories: Sequence[Trajectory], reference: Tensor | None) -> Tensor:
    """The loss of the paper, answer by answer, from a padded pass."""
    algorithm, kind = case.algorithm, case.trl["loss_type"]
    counted = [not (algorithm.mask_truncated and t.truncated) for t in trajectories]
    p_BR = plain_logprobs(module, trajectories, case.temperature)
    total, actions = p_BR.new_zeros(()), 0
    bounds = algorithm.loss.config()
    low, high = bounds.get("clip_low_threshold", 0.0), bounds.get("clip_high_threshold", float("inf"))
    for i, t in enumerate(trajectories):
        if not counted[i]:
            continue
        acted = torch.tensor(t.action_mask, dtype=torch.bool)
        p = p_BR[i, : len(acted)][acted]
        q = p.detach() if case.on_policy else torch.tensor(t.logprobs)[acted]
        ratio = torch.exp(p - q)
        if algorithm.loss.name == "gspo":
            ratio = torch.exp((p - q).mean()).expand(len(p))
        if algorithm.loss.name == "cispo":
            terms = -ratio.detach().clamp(low, high) * p * t.advantage
        elif algorithm.loss.name == "sapo":
            tau = bounds["positive_temperature" if t.advantage > 0 else "negative_temperature"]
            terms = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * t.advantage
        else:
            terms = -torch.minimum(ratio * t.advantage, ratio.clamp(low, high) * t.advantage)
        if (dual_clip := bounds.get("dual_clip_threshold")) is not None and t.advantage < 0:
            terms = terms.clamp(max=-dual_clip * t.advantage)
        if reference is not None:
            d = reference[i, : len(acted)][acted] - p
            terms = terms + algorithm.flat["kl_coef"] * (torch.exp(d) - d - 1)
        total = total + (terms.mean() if kind in ("grpo", "sapo") else terms.sum())
        actions += len(p)
    answers = sum(counted)
    return total / {"grpo": answers, "sapo": answers, "dr_grpo": answers * BUDGET}.get(kind, actions)


def trl_trainer(case: Case, module: Any, tokenizer: Any, folder: Path, **more: Any) -> Any:
    """TRL's GRPOTrainer on `module`, with the settings of the case."""
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    rows = more.pop("rows", [{"prompt": "1"}] * 4)
    given = {name: more.pop(name) for name in ("rollout_func", "reward_funcs", "callbacks") if name in more}
    settings = {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "num_generations": 4, "use_cpu": True,
        "max_completion_length": BUDGET, "temperature": case.temperature, "report_to": [], "disable_tqdm": True,
        "save_strategy": "no", "bf16": False, "gradient_checkpointing": False,
        "use_bias_correction_kl": False, **{name: value for name, value in case.trl.items() if name != "beta"}, **more,
    }  # fmt: skip
    trainer = GRPOTrainer(
        module, given.pop("reward_funcs", lambda prompts, **_: [0.0] * len(prompts)), args=GRPOConfig(**settings),
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer, **given,
    )  # fmt: skip
    # A coefficient at the start makes TRL load the reference from a model hub; its log-probs are given here.
    trainer.beta = case.trl.get("beta", 0.0)
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def rewards_of(trajectory: Trajectory) -> dict[str, list[float]]:
    """The weight and value of each of its rewards, by name."""
    return trajectory.reward_parts or {"earned": [1.0, trajectory.reward or 0.0]}


def earn(name: str) -> Any:
    """A reward function of TRL's that gives what the rollouts brought under this name."""

    def reward(**columns: Any) -> list[float]:
        return columns[name]

    reward.__name__ = name
    return reward


def trl_gradient(
    case: Case, module: Any, tokenizer: Any, folder: Path, trajectories: Sequence[Trajectory], **settings: Any
) -> dict[str, Tensor]:
    """The gradient with which TRL's own loop would step, given these answers of groups of four and their rewards."""
    from transformers import TrainerCallback

    by_group: dict[str, list[Trajectory]] = {}
    for t in trajectories:
        by_group.setdefault(t.group_id, []).append(t)
    found: dict[str, Tensor] = {}

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            found.update(gradients_of(model))

    def answer(prompts: list[str], trainer: Any) -> dict[str, Any]:
        left = {group: iter(answers) for group, answers in by_group.items()}
        taken = [next(left[prompt]) for prompt in prompts]
        return {
            "prompt_ids": [t.prompt_tokens for t in taken],
            "completion_ids": [t.response_tokens for t in taken],
            "logprobs": [t.logprobs for t in taken],
            **{name: [rewards_of(t)[name][1] for t in taken] for name in weights},
        }

    weights = {name: weight for name, (weight, _) in rewards_of(trajectories[0]).items()}

    trainer = trl_trainer(
        case, module, tokenizer, folder, rows=[{"prompt": group} for group in by_group], max_steps=1, max_grad_norm=0.0,
        rollout_func=answer, reward_funcs=[earn(name) for name in weights], reward_weights=list(weights.values()),
        callbacks=[Keep()], logging_steps=1, **settings,
    )  # fmt: skip
    if "vllm_importance_sampling_mode" in case.trl:  # then it compares what the rollouts brought with the trainer
        trainer.use_vllm, trainer._last_loaded_step = True, 0
    trainer.train()
    return found


def gradients_of(module: Any) -> dict[str, Tensor]:
    """By the names that the engine gives them: an adapter's are those of peft's files."""
    return {
        name.removeprefix("base_model.model.").replace(".default", ""): p.grad.clone()
        for name, p in module.named_parameters()
        if p.grad is not None
    }


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, float]:
    """Norm of the difference over the norm: of everything, and of the tensor where it is largest."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    apart = {name: float((found[name] - expected[name]).double().norm()) for name in expected}
    norms = {name: float(expected[name].double().norm()) for name in expected}
    whole = sum(d**2 for d in apart.values()) ** 0.5 / sum(n**2 for n in norms.values()) ** 0.5
    return whole, max(apart[name] / norms[name] for name in expected)
