"""On-policy distillation: its advantages by hand, its gradient against the reverse KL itself, and that it learns."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from rlvr.algorithms import resolve_algorithm
from rlvr.algorithms.advantages import RunningBaseline
from rlvr.algorithms.optimizers import OptimizerSection
from rlvr.algorithms.terms.distillation import add_teacher_advantages, measure_teacher_kl
from rlvr.algorithms.update import Passes, UpdateInputs, make_datum, update
from rlvr.clients.mock.mock_client import MockTrainingClient, TablePolicy
from rlvr.core.futures import LazyFuture
from rlvr.core.messages import AdamParams, ModelInput
from rlvr.core.types import Trajectory
from rlvr.training.schedules.sync import Synchronous
from tests.kit.table_trainer import make_trainer


class Scripted:
    """A teacher that thinks log-prob -token of every token."""

    def compute_logprobs(self, prompt: ModelInput, temperature: float = 1.0) -> Any:
        return LazyFuture.from_value([None, *(-float(token) for token in prompt.tokens[1:])])


def answers() -> list[Trajectory]:
    """Two of one group: rewards 1 and 0; the environment wrote the second token of the first."""
    return [
        Trajectory("p", [9, 9], "r", [1, 7, 2], [-0.5, 0.0, -4.0], reward=1.0, group_id="g", rollout_id="0",
                   action_mask=[1, 0, 1]),
        Trajectory("p", [9, 9], "r", [3], [-1.0], reward=0.0, group_id="g", rollout_id="1"),
    ]  # fmt: skip


def test_token_advantages_by_hand() -> None:
    """A = -+0.5 of the group; log policy - log teacher: 0.5, -2 and 2; coefficient 0.1; weight 1/3 a token."""
    items, row = answers(), resolve_algorithm("grpo", teacher_coef=0.1)
    add_teacher_advantages(row.select(items), Scripted(), 0.1, 1.0)
    assert items[0].token_advantages == pytest.approx([0.5 - 0.05, 0.5 - 0.7, 0.5 + 0.2])
    assert items[1].token_advantages == pytest.approx([-0.5 - 0.2])
    sent = [make_datum(row, t, w).loss_fn_inputs["advantages"].tolist() for t, w in row.weigh(items, 5)]
    assert sent == [pytest.approx([0, 0.15, 0, 0.7 / 3]), pytest.approx([0, -0.7 / 3])]
    assert measure_teacher_kl(items) == pytest.approx((0.5 - 2.0 + 2.0) / 3)
    add_teacher_advantages(items, Scripted(), 0.1, 1.0, lambda t: [-1.0] * len(t.logprobs))
    assert items[1].token_advantages[-1] == pytest.approx(-0.7 - 0.2), "added to what stands there"
    assert items[0].token_advantages[-1] == pytest.approx(0.7 - 0.1), "by the trainer's -1, not the sampler's -4"


def test_a_critic_learns_nothing_of_the_teacher() -> None:
    """Lambda 1 and values of 1/4: advantages 1 - 1/4 and 0 - 1/4, less the teacher's part; the returns are rewards."""
    items, row = answers(), resolve_algorithm("ppo_critic", gae_lambda=1.0, teacher_coef=0.1)
    for t in items:
        t.values = [0.25] * (t.num_response_tokens + 1)
    add_teacher_advantages(row.select(items), Scripted(), 0.1, 1.0)
    assert [items[0].token_advantages[i] for i in (0, 2)] == pytest.approx([0.75 - 0.05, 0.75 + 0.2])
    assert items[1].token_advantages == pytest.approx([-0.25 - 0.2])
    assert (items[0].returns, items[1].returns) == ([1.0, 0.0, 1.0], [0.0])


def test_without_a_task_reward_only_the_teacher_counts() -> None:
    items, row = answers(), resolve_algorithm("distillation")
    add_teacher_advantages(row.select(items), Scripted(), row.flat["teacher_coef"], 1.0)
    assert items[1].token_advantages == [-2.0] and items[1].advantage == 0.0
    assert len(row.weigh(items, 5)) == 2
    row.select(items)
    assert items[1].token_advantages == [], "those of an earlier update do not stay"


def test_the_expected_gradient_is_that_of_the_reverse_kl() -> None:
    """Over every token of a table, each as often as the policy samples it: d KL(policy || teacher) / d logits."""
    student, teacher = (TablePolicy(["a", "b", "c"], seed=seed, spread=1.5) for seed in (1, 2))
    client = MockTrainingClient(student)
    log_p, log_t = student.logprobs(), teacher.logprobs()
    p = np.exp(log_p)
    gradient = np.zeros(len(p))
    for token in range(len(p)):
        items = [Trajectory("p", [2], "r", [token], [float(log_p[token])], reward=0.0, rollout_id="0")]
        update(
            client, resolve_algorithm("distillation"), items, lambda n: AdamParams(0.0), Passes(),
            UpdateInputs(RunningBaseline(), 1, teacher=MockTrainingClient(teacher).create_sampling_client()),
            check=lambda _, token=token: np.add(gradient, p[token] * student.gradient, out=gradient),
        )  # fmt: skip
    kl = float((p * (log_p - log_t)).sum())
    assert gradient == pytest.approx(p * (log_p - log_t - kl), abs=1e-6)  # the client's inputs are float32


def test_a_policy_becomes_its_teacher() -> None:
    """No reward is learned from: the divergence from a teacher that says b falls from above 0.7 to below 0.05."""
    teacher = TablePolicy(["say", "a", "b"])
    teacher.logits[teacher.tokenizer.ids["b"]] += 3.0
    trainer = make_trainer(algorithm="distillation", steps=60, optimizer=OptimizerSection(learning_rate=0.1))
    parts = trainer.parts
    object.__setattr__(parts, "teacher", MockTrainingClient(teacher).create_sampling_client())
    schedule = Synchronous(trainer)
    gaps = [schedule.learn(step)[0]["teacher/kl"] for step in range(60)]
    assert gaps[0] > 0.7 and abs(sum(gaps[-10:]) / 10) < 0.05, gaps


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match=r"algorithm.teacher_coef=1.0 without a teacher: set teacher.model"):
        update(
            MockTrainingClient(TablePolicy(["a"])), resolve_algorithm("distillation"), answers(),
            lambda n: AdamParams(1.0), Passes(), UpdateInputs(RunningBaseline(), 1),
        )  # fmt: skip
    for wrong in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"algorithm.teacher_coef="):
            resolve_algorithm("grpo", teacher_coef=wrong)
    with pytest.raises(ValueError, match=r"algorithm.advantage=zero learns from a teacher alone"):
        resolve_algorithm("grpo", advantage="zero")
    for options in ({"control": "random_reward"}, {"false_positives": 0.1}):
        with pytest.raises(ValueError, match=r"no effect with algorithm.advantage=zero, which reads no reward"):
            make_trainer(algorithm="distillation", **options)
    assert not resolve_algorithm("grpo", teacher_coef=0.5).drop_equal_groups, "equal rewards have a gradient then"
