"""Wrong verdicts on purpose: their rates, that the same completion is judged alike, and the correction on average."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rlvr.algorithms.optimizers import OptimizerSection
from rlvr.core.types import Outcome, Score, Task, Trajectory, mean
from rlvr.training.schedules.sync import Synchronous
from rlvr.training.training_options import TrainingOptions
from rlvr.training.verifier_noise import add_noise
from tests.kit.table_trainer import make_trainer


def answers(value: float, count: int = 4000, outcome: Outcome | None = None) -> list[Trajectory]:
    outcome = outcome or (Outcome.PASSED if value == 1 else Outcome.FAILED)
    return [
        Trajectory("p", [1], f"answer {i}", [2], [-0.5], reward=value, rollout_id=str(i), task=Task("t", "p"),
                   scores={"math": Score(value, outcome)})
        for i in range(count)
    ]  # fmt: skip


def noisy(items: list[Trajectory], seed: int = 1, **options: Any) -> list[float | None]:
    add_noise(items, "math", TrainingOptions(**options), seed)
    return [t.reward for t in items]


@pytest.mark.parametrize(("value", "rate"), [(0.0, 0.1), (1.0, 0.25)])
def test_verdicts_are_wrong_at_the_rates(value: float, rate: float) -> None:
    """4000 answers: a share within four standard deviations of the rate; the true verdict stays in the scores."""
    items = answers(value)
    for t in items:
        t.reward_parts = {"math": [1.0, value]}
    rewards = noisy(items, false_positives=0.1, false_negatives=0.25)
    wrong = sum(r != value for r in rewards) / 4000
    assert abs(wrong - rate) < 4 * math.sqrt(rate * (1 - rate) / 4000)
    assert {t.scores["math"].value for t in items} == {value} and not any(t.reward_parts for t in items)


def test_the_same_completion_of_a_task_is_always_judged_alike_and_another_seed_otherwise() -> None:
    options = {"false_positives": 0.3}
    assert noisy(answers(0.0, 200), **options) == noisy(answers(0.0, 200), **options)
    assert noisy(answers(0.0, 200), **options) != noisy(answers(0.0, 200), 2, **options)
    twice = answers(0.0, 2)
    twice[1].response = twice[0].response
    first, second = noisy(twice, **options)
    assert first == second


def test_the_correction_is_right_on_average_by_hand() -> None:
    """fp 0.1, fn 0.3: 0 becomes -1/6 and 1 becomes 3/2; 0.9 (-1/6) + 0.1 (3/2) = 0, 0.7 (3/2) + 0.3 (-1/6) = 1."""
    rates = {"false_positives": 0.1, "false_negatives": 0.3, "noise_correction": True}
    for value in (0.0, 1.0):
        rewards = [r for r in noisy(answers(value), **rates) if r is not None]
        assert {round(r, 9) for r in rewards} == {round(-1 / 6, 9), 1.5}
        assert mean(rewards) == pytest.approx(value, abs=0.15)


def test_partial_rewards_are_kept_where_the_verdict_is_and_unknown_ones_always() -> None:
    items = answers(0.4, 100, Outcome.FAILED)
    items[7].reward, items[8].turn_rewards = None, [0.4]
    rewards = noisy(items, false_positives=0.5)
    assert set(rewards) == {0.4, 1.0, None} and rewards[7] is None
    assert items[8].turn_rewards == [], "what single turns earned is not the noisy reward"


def test_all_trajectories_of_a_rollout_have_one_verdict() -> None:
    items = answers(0.0, 60)
    for i, t in enumerate(items):
        t.rollout_id = str(i // 2)
    rewards = noisy(items, false_positives=0.5)
    assert rewards[::2] == rewards[1::2] and set(rewards) == {0.0, 1.0}


def test_a_run_learns_from_the_noisy_rewards_and_reports_the_true_ones() -> None:
    """With 40 % false positives a policy still learns the right word, and what fails is not in `env/all/correct`."""
    trainer = make_trainer(
        steps=40, optimizer=OptimizerSection(learning_rate=0.1), false_positives=0.4, noise_correction=True
    )
    schedule = Synchronous(trainer)
    rows = [schedule.learn(step)[0] for step in range(40)]
    assert any(row["reward"] != row["env/all/correct"] for row in rows)
    assert mean([row["env/all/correct"] for row in rows[-5:]]) > 0.8 > 0.5 > rows[0]["env/all/correct"]
    assert trainer.parts.curriculum.pass_rate == {"": 0.5}, "nothing but the rewards learns from verdicts"


@pytest.mark.parametrize(("advantage", "is_same"), [("group_mean", True), ("raw", False)])
def test_a_baseline_and_adamw_leave_nothing_of_the_correction(advantage: str, is_same: bool) -> None:
    """Rewards scaled and shifted alike: the same weights after ten steps, unless there is no baseline."""
    logits: list[Any] = []
    for is_corrected in (False, True):
        trainer = make_trainer(
            steps=10, optimizer=OptimizerSection(learning_rate=0.1), cells={"advantage": advantage},
            false_positives=0.2, false_negatives=0.2, noise_correction=is_corrected,
        )  # fmt: skip
        schedule = Synchronous(trainer)
        for step in range(10):
            schedule.learn(step)
        client: Any = trainer.parts.client
        logits.append(client.policy.logits)
    assert (logits[1] == pytest.approx(logits[0], abs=1e-4)) == is_same


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"false_positives": -0.1}, "at least 0 whose sum is below 1"),
        ({"false_positives": 0.5, "false_negatives": 0.5}, "whose sum is below 1"),
        ({"false_positives": math.nan}, "expected chances"),
        ({"false_positives": 0.1, "control": "random_reward"}, "random_reward replaces every reward"),
        ({"noise_correction": True}, "no effect without false_positives or false_negatives"),
    ],
)
def test_rates_that_say_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingOptions(**options)
