"""Process rewards: an advantage for each turn, by hand; and where what a turn earned comes from."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rlvr.algorithms import resolve_algorithm
from rlvr.algorithms.optimizers import OptimizerSection
from rlvr.algorithms.update import make_datum
from rlvr.core.messages import ModelInput, SampledSequence, SampleResponse, SamplingParams
from rlvr.core.protocols import StepResult
from rlvr.core.types import Outcome, Score, StopReason, Task, Trajectory
from rlvr.reward import resolve_reward
from rlvr.rollout import Group, rollout, score
from rlvr.training.schedules.sync import Synchronous
from tests.kit.table_trainer import Letters, make_trainer


def episode(rollout: str, reward: float | None, turns: list[float], lengths: list[int], **more: Any) -> Trajectory:
    """Turns of `lengths` sampled tokens, with one token of the environment between two turns."""
    mask: list[int] = []
    starts: list[int] = []
    for length in lengths:
        mask += [0] * bool(mask)
        starts.append(len(mask))
        mask += [1] * length
    return Trajectory(
        "p", [1], "r", [2] * len(mask), [-0.5 * m for m in mask], reward=reward, group_id="g", rollout_id=rollout,
        action_mask=mask, turn_starts=starts, turn_rewards=turns, **more,
    )  # fmt: skip


def test_advantages_of_turns_by_hand() -> None:
    """Turns earned 1, 0 and 0, 3: mean 1, deviation sqrt(6) / 2; a turn has what it and the later ones earned."""
    items = [episode("0", 1.0, [1.0, 0.0], [2, 1]), episode("1", 3.0, [0.0, 3.0], [1, 2])]
    row = resolve_algorithm("grpo_process")
    row.select(items)
    s = math.sqrt(6) / 2 + 1e-6
    assert items[0].token_advantages == pytest.approx([-1 / s, -1 / s, 0, -1 / s])
    assert items[1].token_advantages == pytest.approx([1 / s, 0, 2 / s, 2 / s])
    assert (items[0].advantage, items[1].advantage) == (pytest.approx(-1 / s), pytest.approx(5 / 3 / s))
    sent = make_datum(row, items[1], 0.5).loss_fn_inputs["advantages"].tolist()
    assert sent == pytest.approx([0.5 / s, 0.0, 1 / s, 1 / s]), "0 on the environment's token"


def test_the_rest_of_a_reward_less_its_penalty_is_the_last_turns() -> None:
    """A verifier's 1 with a penalty of 0.5 beside turns of 0.25 and 0: they earned 0.25 and 0.25."""
    items = [episode("0", 1.0, [0.25, 0.0], [1, 1], penalty=0.5), episode("1", 0.25, [], [1, 1])]
    resolve_algorithm("grpo_process").select(items)
    # 0.25, 0.25, 0, 0.25: mean 3/16, deviation sqrt(3) / 16.
    s = math.sqrt(3) / 16 + 1e-6
    assert items[0].token_advantages == pytest.approx([2 / 16 / s, 0, 1 / 16 / s])
    assert items[1].token_advantages == pytest.approx([-2 / 16 / s, 0, 1 / 16 / s])


def test_a_rewritten_history_is_one_episode_and_an_unknown_reward_is_in_no_mean() -> None:
    """Two trajectories of a rollout, whose turns earned 0 and 2; the other rollout failed to be judged."""
    parts = [episode("0", 2.0, [0.0], [1]), episode("0", 2.0, [2.0], [2]), episode("1", None, [9.0], [1])]
    row = resolve_algorithm("grpo_process")
    selected = row.select(parts)
    s = 1 + 1e-6
    assert parts[0].token_advantages == [0.0] and parts[1].token_advantages == pytest.approx([1 / s, 1 / s])
    assert selected == parts[:2] and parts[2].token_advantages == [0.0]


class Ask:
    """Two turns of one token; the environment gives 0.5 for the first and 0 for the second."""

    def __init__(self) -> None:
        self.turn = 0

    async def initial_observation(self) -> tuple[ModelInput, Any]:
        return ModelInput([1, 2]), None

    async def step(self, action: list[int], *, extra: dict[str, Any] | None = None) -> StepResult:
        self.turn += 1
        if self.turn == 2:
            return StepResult(0.0, True)
        return StepResult(0.5, False, ModelInput([1, 2, *action, 3]))


class Words:
    eos_token_id = 9

    def decode(self, tokens: Any, *, skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, tokens))


class Says4:
    fingerprint = "says 4"

    def sample(self, prompt: ModelInput, count: int, params: SamplingParams, scored: bool = False) -> Any:
        from rlvr.core.futures import LazyFuture

        said = [SampledSequence(StopReason.STOP, [4, 9], [-0.1, -0.1]) for _ in range(count)]
        return LazyFuture.from_value(SampleResponse(said, None, self.fingerprint))

    def get_tokenizer(self) -> Any:
        return Words()


def judge_turns(prompt: str, response: str, meta: Any = None) -> Score:
    return Score(0.75, Outcome.PASSED, turns=(0.25, 0.5))


def judge_three(prompt: str, response: str, meta: Any = None) -> Score:
    return Score(0.75, Outcome.PASSED, turns=(0.25, 0.5, 0.0))


def play() -> list[Trajectory]:
    group = Group("g", Task("t", "p"), [Ask(), Ask()])
    return rollout([group], Says4(), SamplingParams(max_tokens=2), seed=1)


def test_turns_are_what_the_environment_gave_and_what_a_verifier_says() -> None:
    """The environment's, by its weight, plus `Score.turns`; without a weight the verifier's alone."""
    reward = resolve_reward("tests.core.test_process:judge_turns")
    for weight, expected in ((0.0, [0.25, 0.5]), (2.0, [1.25, 0.5])):
        played = play()
        assert played[0].turn_rewards == [0.5, 0.0] and played[0].turn_starts == [0, 3]
        score(played, reward.plus_environment(weight))
        assert played[0].turn_rewards == expected and played[0].reward == 0.75 + weight * 0.5
    played = play()
    score(played, resolve_reward("environment"))
    assert played[1].turn_rewards == [0.5, 0.0] and played[1].reward == 0.5


def test_a_verifier_that_scores_another_number_of_turns_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"scored 3 turns of an episode of 2 \(Score.turns\)"):
        score(play(), resolve_reward("tests.core.test_process:judge_three").plus_environment(0.0))
    with pytest.raises(ValueError, match="turns nan is not finite"):
        Score(1.0, Outcome.PASSED, turns=(math.nan,))


class SayTwice:
    """Two turns of one word; the environment gives 0.5 for each `a`."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.turn = tokenizer, 0
        self.seen = tokenizer.encode("say")

    async def initial_observation(self) -> tuple[ModelInput, Any]:
        return ModelInput(self.seen), None

    async def step(self, action: list[int], *, extra: dict[str, Any] | None = None) -> StepResult:
        self.turn += 1
        reward = 0.5 * (self.tokenizer.decode(action) == "a")
        self.seen = [*self.seen, *action, *self.tokenizer.encode("say")]
        return StepResult(reward, self.turn == 2, None if self.turn == 2 else ModelInput(self.seen))


class TwoTurns(Letters):
    max_turns = 2

    def env(self, task: Task, tokenizer: Any) -> Any:
        return SayTwice(tokenizer)


def test_a_policy_learns_from_the_rewards_of_its_turns() -> None:
    """From about a third of the words to nearly all; one turn's luck is not the other's praise."""
    trainer = make_trainer(
        algorithm="grpo_process", source=TwoTurns(), reward=resolve_reward("environment"), steps=30,
        optimizer=OptimizerSection(learning_rate=0.1),
    )  # fmt: skip
    schedule = Synchronous(trainer)
    rows = [schedule.learn(step) for step in range(30)]
    rewards = [row[0]["reward"] for row in rows]
    assert rewards[0] < 0.5 and sum(rewards[-5:]) / 5 > 0.85
    mixed = next(t for t in rows[0][1].batch if t.turn_rewards == [0.5, 0.0])
    assert mixed.token_advantages[-1] < 0, "the turn that failed is not praised for the one before"
