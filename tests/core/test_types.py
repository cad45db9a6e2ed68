"""The record: its constructor, properties and statistics; what a None reward does; shapes; futures."""

from __future__ import annotations

import asyncio
import math
import threading

import numpy as np
import pytest

from rlvr.core.futures import LazyFuture
from rlvr.core.messages import AdamParams, Datum, ModelInput, SamplingParams, TensorData
from rlvr.core.types import Outcome, Score, StopReason, Task, Trajectory, TrajectoryBatch, mean, std


def trajectory(reward: float | None = 0.0, length: int = 2, **more) -> Trajectory:
    tokens = list(range(5, 5 + length))
    return Trajectory("p", [1, 2], "r", tokens, [-0.5] * length, reward=reward, **more)


def batch(*rewards: float | None) -> TrajectoryBatch:
    return TrajectoryBatch([trajectory(r) for r in rewards])


def test_the_quickstart_trajectory_has_its_properties() -> None:
    """Seed 000's example: nine full tokens, five of them the response, mean log-prob -0.34."""
    traj = Trajectory(
        prompt="What is 2+2?",
        prompt_tokens=[1, 2, 3, 4],
        response="The answer is 4",
        response_tokens=[5, 6, 7, 8, 9],
        logprobs=[-0.5, -0.3, -0.2, -0.4, -0.3],
        attention_mask=[1, 1, 1, 1, 1, 1, 1, 1, 1],
        reward=1.0,
    )
    assert traj.full_tokens == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert traj.num_response_tokens == 5
    assert traj.total_logprob == pytest.approx(-1.7)
    assert traj.mean_logprob == pytest.approx(-0.34)
    assert (traj.reward, traj.advantage, traj.metadata) == (1.0, 0.0, {})
    assert traj.action_mask == [1] * 5


def test_a_new_trajectory_has_reward_zero_and_full_masks() -> None:
    """Defaults: reward 0.0 as in the seed, every token attended to, every response token the policy's own."""
    traj = Trajectory("p", [1, 2], "r", [3], [-0.1])
    assert (traj.reward, traj.attention_mask, traj.action_mask, traj.group_id) == (0.0, [1, 1, 1], [1], "")
    assert not traj.truncated
    assert trajectory(stop_reason=StopReason.LENGTH).truncated


def test_mean_logprob_counts_only_sampled_tokens() -> None:
    """Tokens that the environment wrote have log-prob 0 and are not in the denominator; no tokens give 0."""
    traj = Trajectory("p", [1], "r", [2, 3, 4], [-1.0, 0.0, -3.0], action_mask=[1, 0, 1])
    assert (traj.num_action_tokens, traj.mean_logprob) == (2, -2.0)
    assert Trajectory("p", [1], "", []).mean_logprob == 0.0


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [("logprobs", [-0.1], 2), ("action_mask", [1, 1, 1], 2), ("attention_mask", [1, 1], 4)],
)
def test_a_field_of_the_wrong_length_is_named(field: str, value: list, expected: int) -> None:
    """logprobs and action_mask match the response, attention_mask prompt and response."""
    with pytest.raises(ValueError, match=f"{field} has {len(value)} entries, expected {expected}"):
        Trajectory("p", [1, 2], "r", [3, 4], **{field: value})


def test_text_only_and_unscored_trajectories_say_why_they_cannot_train() -> None:
    """No token ids, or no sampling log-probs: a ValueError that says which."""
    with pytest.raises(ValueError, match="no token ids"):
        Trajectory("p", [], "r", []).require_trainable()
    with pytest.raises(ValueError, match="no sampling log-probs"):
        Trajectory("p", [1], "r", [2]).require_trainable()
    trajectory().require_trainable()


def test_batch_statistics_by_hand() -> None:
    """Rewards 1, 0, 2, 1: mean 1, population std sqrt(2/4); three response lengths' mean; tokens of all."""
    b = TrajectoryBatch([trajectory(1.0, 1), trajectory(0.0, 2), trajectory(2.0, 6), trajectory(1.0, 3)])
    assert (b.mean_reward, b.min_reward, b.max_reward) == (1.0, 0.0, 2.0)
    assert b.std_reward == pytest.approx(math.sqrt(0.5))
    assert b.mean_response_length == 3.0
    assert b.total_tokens == (1 + 2 + 6 + 3) + 4 * 2
    assert (len(b), b[2].reward, [t.reward for t in b]) == (4, 2.0, [1.0, 0.0, 2.0, 1.0])


def test_an_unknown_reward_enters_no_statistic() -> None:
    """None is left out of mean, std, min and max, and a batch of only None (or of nothing) gives zeros."""
    b = batch(1.0, None, 3.0)
    assert (b.rewards, b.mean_reward, b.std_reward, b.min_reward, b.max_reward) == ([1.0, 3.0], 2.0, 1.0, 1.0, 3.0)
    for empty in (batch(None), batch()):
        assert (empty.mean_reward, empty.std_reward, empty.min_reward, empty.max_reward) == (0.0, 0.0, 0.0, 0.0)


def test_compute_advantages_subtracts_the_mean_or_the_given_baseline() -> None:
    """Rewards 1, None, 3: mean baseline 2 gives -1, 0, 1; baseline 0.5 gives 0.5, 0, 2.5. The fields are set."""
    b = batch(1.0, None, 3.0)
    assert b.compute_advantages() == [-1.0, 0.0, 1.0]
    assert b.compute_advantages(baseline=0.5) == [0.5, 0.0, 2.5]
    assert [t.advantage for t in b] == [0.5, 0.0, 2.5]


def test_normalised_advantages_have_mean_zero_and_std_one() -> None:
    """(r - baseline), centred over its population std: the baseline cancels; equal rewards give exact zeros."""
    b = batch(0.0, 1.0, 2.0, None)
    scale = math.sqrt(2 / 3)
    assert b.compute_advantages(0.5, normalize=True) == pytest.approx([-1 / scale, 0.0, 1 / scale, 0.0])
    assert batch(0.1, 0.1, 0.1).compute_advantages(0.5, normalize=True) == [0.0, 0.0, 0.0]


def test_groups_keep_the_order_of_first_appearance() -> None:
    """Grouping is by id, never by prompt text."""
    b = TrajectoryBatch([trajectory(group_id=g) for g in "bab"])
    assert {g: len(members) for g, members in b.groups().items()} == {"b": 2, "a": 1}
    assert list(b.groups()) == ["b", "a"]


def test_mean_and_std_of_equal_values_are_exact() -> None:
    """0.1 three times: mean 0.1 to the bit and std 0, so no group of equal rewards gets a rounding gradient."""
    for value in (0.1, 0.3, 1 / 3, 1e-9, 7e22):
        for n in (1, 3, 7, 10):
            assert (mean([value] * n), std([value] * n)) == (value, 0.0)
    assert (mean([]), std([])) == (0.0, 0.0)
    assert std([1.0, 3.0]) == 1.0


@pytest.mark.parametrize("outcome", list(Outcome))
def test_a_score_has_a_value_exactly_when_the_answer_was_judged(outcome: Outcome) -> None:
    """error and invalid carry None; passed, failed and timeout a finite number."""
    if outcome in (Outcome.ERROR, Outcome.INVALID):
        assert Score(None, outcome).value is None
        with pytest.raises(ValueError, match="value is None exactly when"):
            Score(0.0, outcome)
    else:
        assert Score(0.5, outcome).value == 0.5
        with pytest.raises(ValueError, match="value is None exactly when"):
            Score(None, outcome)
        with pytest.raises(ValueError, match="not finite"):
            Score(math.nan, outcome)


def test_a_task_shows_chat_messages_as_text() -> None:
    """Text stays as it is; messages become role: content lines."""
    assert Task("t", "2+2?").prompt_text == "2+2?"
    assert Task("t", [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]).prompt_text == (
        "system: a\nuser: b"
    )


def test_the_training_projection_shifts_by_one_and_masks_environment_tokens() -> None:
    """Prompt 1 2, response 3 4 5 with 4 from the environment: inputs 1..4, targets 2..5, zeros off the policy."""
    traj = Trajectory("p", [1, 2], "r", [3, 4, 5], [-0.5, -9.0, -0.25], action_mask=[1, 0, 1])
    traj.advantage = 2.0
    datum = Datum.from_trajectory(traj, weight=0.25)
    assert datum.model_input.to_ints() == [1, 2, 3, 4]
    assert {k: v.tolist() for k, v in datum.loss_fn_inputs.items()} == {
        "target_tokens": [2, 3, 4, 5],
        "logprobs": [0.0, -0.5, 0.0, -0.25],
        "advantages": [0.0, 0.5, 0.0, 0.5],
    }
    assert datum.loss_fn_inputs["target_tokens"].dtype == "int64"
    assert datum.loss_fn_inputs["advantages"].dtype == "float32"


def test_the_training_projection_takes_per_token_values_and_further_inputs() -> None:
    """Given advantages are weighted, log-probs replace the sampler's, further inputs stand beside; all masked alike."""
    traj = Trajectory("p", [1, 2], "r", [3, 4, 5], [-0.5, -9.0, -0.25], action_mask=[1, 0, 1], advantage=7.0)
    datum = Datum.from_trajectory(
        traj, 0.5, advantages=np.array([1.0, 2.0, 4.0]), logprobs=[-1.0, -2.0, -4.0], kl_weights=[8.0, 8.0, 16.0]
    )
    assert {k: v.tolist() for k, v in datum.loss_fn_inputs.items()} == {
        "target_tokens": [2, 3, 4, 5],
        "logprobs": [0.0, -1.0, 0.0, -4.0],
        "advantages": [0.0, 0.5, 0.0, 2.0],
        "kl_weights": [0.0, 8.0, 0.0, 16.0],
    }
    assert datum.loss_fn_inputs["kl_weights"].dtype == "float32"
    assert traj.logprobs == [-0.5, -9.0, -0.25], "the record keeps what the sampler said"


def test_a_penalty_and_reference_log_probs_begin_empty() -> None:
    assert (trajectory().penalty, trajectory().reference_logprobs) == (0.0, [])


def test_a_supervised_row_weighs_the_completion_only() -> None:
    """Prompt 1 2, completion 3 4: the target 2 has weight 0."""
    datum = Datum.from_completion([1, 2], [3, 4], 0.5)
    assert datum.model_input.to_ints() == [1, 2, 3]
    assert datum.loss_fn_inputs["target_tokens"].tolist() == [2, 3, 4]
    assert datum.loss_fn_inputs["weights"].tolist() == [0.0, 0.5, 0.5]


def test_tensor_data_is_float32_or_int64_and_goes_round() -> None:
    """Whatever comes in: lists, numpy of other widths, torch; shapes stay."""
    import torch

    assert TensorData.of([1, 2]).dtype == "int64"
    assert TensorData.of(np.float64([1, 2])).dtype == "float32"
    assert TensorData.of([True, False]).tolist() == [1, 0]
    back = TensorData.from_torch(torch.ones(2, 3, requires_grad=True))
    assert (back.shape, back.dtype, back.to_torch().tolist()) == ([2, 3], "float32", [[1.0] * 3] * 2)
    assert back.to_numpy() is back.data
    assert ModelInput.from_ints((1, 2)).length == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0}, {"temperature": -0.1}, {"temperature": math.inf}, {"temperature": math.nan},
        {"top_k": 0}, {"top_k": -2}, {"top_p": 0.0}, {"top_p": 1.1}, {"min_p": -0.1}, {"min_p": 1.0},
    ],
)  # fmt: skip
def test_sampling_params_out_of_range_are_named(wrong: dict) -> None:
    """Each setting has its range; the message begins with the culprit."""
    with pytest.raises(ValueError, match=f"SamplingParams: {next(iter(wrong))}="):
        SamplingParams(**wrong)


def test_defaults_are_tinkers() -> None:
    """The numbers of the public SDK: a recipe that leaves them out means these."""
    adam = AdamParams()
    assert (adam.learning_rate, adam.beta1, adam.beta2, adam.eps) == (1e-4, 0.9, 0.95, 1e-12)
    assert (adam.weight_decay, adam.grad_clip_norm) == (0.0, 0.0)
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, -1, 1.0, 0.0)
    assert (params.stop, params.max_tokens) == (None, None)


@pytest.mark.parametrize(
    "wrong",
    [{"learning_rate": math.nan}, {"learning_rate": -1e-3}, {"beta1": 1.0}, {"grad_clip_norm": -1.0}, {"eps": 0.0}],
)
def test_adam_params_out_of_range_are_named(wrong: dict) -> None:
    """A schedule that yields nan, or a negative rate, is refused before it reaches the weights."""
    with pytest.raises(ValueError, match=f"AdamParams: {next(iter(wrong))}="):
        AdamParams(**wrong)


def test_a_future_computes_once_and_keeps_its_value() -> None:
    """Asked twice, awaited, or made from a value: the work runs once."""
    calls: list[int] = []
    future = LazyFuture(lambda: calls.append(1) or 7)

    async def await_value() -> int:
        return await future

    assert calls == []
    assert (future.result(), future.result(), asyncio.run(await_value()), calls) == (7, 7, 7, [1])
    assert LazyFuture.from_value(3).result() == 3


def test_a_future_keeps_its_error() -> None:
    """A failure is raised again each time, and the work is not repeated."""
    calls: list[int] = []

    def work() -> None:
        calls.append(1)
        raise ValueError("broken")

    future = LazyFuture(work)
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            future.result()
    assert calls == [1]


def test_a_future_that_was_interrupted_is_not_done() -> None:
    """Ctrl-C in the work passes through and is not kept: asked again, the future works again."""
    outcomes: list[BaseException | int] = [KeyboardInterrupt(), 7]

    def work() -> int:
        outcome = outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    future = LazyFuture(work)
    with pytest.raises(KeyboardInterrupt):
        future.result()
    assert future.result() == 7


def test_a_timeout_bounds_the_wait_for_another_thread() -> None:
    """While one thread computes, another's result(timeout) gives up with TimeoutError; later both have the value."""
    entered, go = threading.Event(), threading.Event()

    def work() -> int:
        entered.set()
        assert go.wait(10)
        return 5

    future = LazyFuture(work)
    first = threading.Thread(target=future.result)
    first.start()
    assert entered.wait(10)
    with pytest.raises(TimeoutError, match="still computing"):
        future.result(timeout=0.01)
    go.set()
    first.join()
    assert future.result(timeout=0.01) == 5
