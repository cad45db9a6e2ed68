"""How `update()` uses a batch: epochs, minibatches, the divergence limit, the first look, and what it adds up.

The policy is a table of token logits; `tests/algorithms/test_formulas.py` holds the gradients against the papers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlvr.algorithms import Algorithm, resolve_algorithm
from rlvr.algorithms.advantages import RunningBaseline
from rlvr.algorithms.update import Passes, StreamPlan, UpdateInputs, make_datum, update, update_streamed
from rlvr.algorithms.update_statistics import UpdateStatistics
from rlvr.clients.mock.mock_client import MockTrainingClient, TablePolicy
from rlvr.core.messages import AdamParams, Datum
from rlvr.core.types import Trajectory


def table(rate: float = 1.0) -> MockTrainingClient:
    return MockTrainingClient(TablePolicy(["a", "b", "c", "d"], seed=2, spread=2.0, rate=rate))


def sample_answers(client: MockTrainingClient, count: int = 8) -> list[Trajectory]:
    """Answers of one token or two, at the policy's log-probs; the word a is right; groups of four."""
    table_V = client.policy.logprobs()
    items: list[Trajectory] = []
    for i in range(count):
        tokens = [2 + (i * 3 + j) % 4 for j in range(1 + i % 2)]
        items.append(
            Trajectory(
                "p", [2], "r", tokens, table_V[tokens].tolist(), reward=float(tokens[0] == 2), group_id=str(i // 4),
                rollout_id=str(i),
            )
        )  # fmt: skip
    return items


class RecordingClient(MockTrainingClient):
    """Writes down the order of its calls."""

    def __init__(self, policy: TablePolicy) -> None:
        super().__init__(policy)
        self.calls: list[str] = []
        self.sent: list[list[Datum]] = []

    def _run(self, data: list[Datum], *args: Any, backward: bool, **how: Any) -> Any:
        self.calls.append("forward_backward" if backward else "forward")
        self.sent.append(data)
        return super()._run(data, *args, backward=backward, **how)

    def optim_step(self, adam_params: AdamParams) -> Any:
        self.calls.append(f"step {adam_params.learning_rate}")
        return super().optim_step(adam_params)


def run(
    client: MockTrainingClient, row: Algorithm, passes: Passes, batch: list[Trajectory], rate: float = 0.1, **how: Any
) -> UpdateStatistics:
    check = {"check": how.pop("check")} if "check" in how else {}
    return update(
        client, row, batch, lambda n: AdamParams(rate * (n + 1)), passes,
        UpdateInputs(RunningBaseline(), 4, **{"key": 5, **how}), **check,
    )  # fmt: skip


PPO = resolve_algorithm("ppo", drop_equal_groups=False, advantage="batch_mean")


def test_epochs_times_minibatches_are_the_optimizer_steps() -> None:
    """2 epochs of 3 minibatches: six steps, each with its own parameters, every token trained twice."""
    client = RecordingClient(table().policy)
    batch = sample_answers(client)
    measured = run(client, PPO, Passes(2, 3), batch)
    assert client.calls == [x for n in range(6) for x in ("forward_backward", f"step {0.1 * (n + 1)}")]
    assert (measured.updates, measured.tokens) == (6, 2 * sum(t.num_action_tokens for t in batch))
    assert measured.rates == {"learning_rate": pytest.approx(0.6)}


def test_every_epoch_has_an_order_of_its_own() -> None:
    """Steps of one answer each, told apart by their rewards: both epochs have all, in different orders."""
    client = RecordingClient(table().policy)
    batch = sample_answers(client)
    for i, t in enumerate(batch):
        t.reward = 3.0**i
    run(client, PPO, Passes(2, 8), batch)
    order = [float(datum.loss_fn_inputs["advantages"].data[-1]) for [datum] in client.sent]
    assert len(set(order)) == 8 and sorted(order[:8]) == sorted(order[8:]) and order[:8] != order[8:]


def test_the_gap_to_the_sampler_is_that_of_the_first_epoch() -> None:
    """On-policy it is 0 there, up to float32; the second epoch begins a large step further."""
    client = table()
    measured = run(client, PPO, Passes(2, 1), sample_answers(client), rate=1.0)
    assert measured.metrics()["optim/kl_sample_train_v2"] == pytest.approx(0.0, abs=1e-9)
    assert measured.approx_kl > 0.01


def test_more_minibatches_than_answers_are_as_many_as_answers() -> None:
    client = table()
    assert run(client, PPO, Passes(1, 50), sample_answers(client)).updates == 8


def test_target_kl_is_measured_before_each_further_pass_and_ends_the_update() -> None:
    """A huge rate: one step, a look without gradient, and no more. What the look saw is what is reported."""
    client = RecordingClient(table().policy)
    measured = run(client, PPO, Passes(4, 1, 0.01), sample_answers(client), rate=3.0)
    assert client.calls == ["forward_backward", "step 3.0", "forward"]
    assert client.policy.gradient is None, "nothing may be left over for the next step"
    assert measured.approx_kl > 0.01, "the divergence that ended the update is the last one that was measured"


def test_target_kl_that_is_not_reached_changes_nothing_but_the_looks() -> None:
    looked, plainly = table(), table()
    run(looked, PPO, Passes(3, 2, 1e9), sample_answers(looked))
    run(plainly, PPO, Passes(3, 2), sample_answers(plainly))
    assert (looked.policy.logits == plainly.policy.logits).all()


def test_check_sees_the_first_pass_before_any_step_and_may_stop_it() -> None:
    client = RecordingClient(table().policy)
    before = client.policy.logits.copy()
    seen: list[tuple[int, list[str]]] = []

    def check(measured: UpdateStatistics) -> None:
        seen.append((measured.updates, list(client.calls)))
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        run(client, PPO, Passes(2, 2), sample_answers(client), check=check)
    assert seen == [(1, ["forward_backward"])]
    assert (client.policy.logits == before).all()


def test_check_is_asked_once() -> None:
    client, seen = table(), []
    run(client, PPO, Passes(3, 2), sample_answers(client), check=lambda m: seen.append(m.updates))
    assert seen == [1]


def test_the_same_key_gives_the_same_bits_and_another_other_minibatches() -> None:
    weights: list[np.ndarray] = []
    for key in (1, 1, 2):
        client = table()
        run(client, PPO, Passes(2, 3), sample_answers(client), key=key)
        weights.append(client.policy.logits)
    assert (weights[0] == weights[1]).all() and not (weights[0] == weights[2]).all()


def test_the_importance_cap_keeps_the_log_probs_of_before_the_first_step() -> None:
    """Two epochs: one pass without gradient at the start, none later; the second epoch's ratios are to those."""
    client = RecordingClient(table().policy)
    batch = sample_answers(client)
    before = client.policy.logprobs()
    for t in batch:
        t.logprobs = [x - 0.5 for x in t.logprobs]  # the sampler thought each token less likely: a ratio of exp(0.5)
    row = resolve_algorithm("ppo", advantage="batch_mean", importance_cap=1.5)
    run(client, row, Passes(2, 1), batch, rate=1.0)
    assert [c.split()[0] for c in client.calls] == ["forward", *["forward_backward", "step"] * 2]
    assert np.abs(client.policy.logprobs() - before).max() > 0.1
    for data in client.sent[1:]:
        for datum in data:
            tokens = datum.loss_fn_inputs["target_tokens"].data
            assert datum.loss_fn_inputs["logprobs"].data == pytest.approx(before[tokens], abs=1e-6)
    weights = 1.5 / sum(t.num_action_tokens for t in batch)  # the cap: exp(0.5) = 1.65 is above it
    sent = sorted(float(datum.loss_fn_inputs["advantages"].data[0]) for datum in client.sent[1])
    assert sent == pytest.approx(sorted(t.advantage * weights for t in batch), rel=1e-5)


def test_clipping_is_counted_by_the_advantages_that_were_sent() -> None:
    """Equal rewards, but an entropy bonus lifts rare tokens: their clip above 1 + epsilon is counted."""
    client = table()
    batch = sample_answers(client)
    for t in batch:
        t.reward = 1.0
    row = resolve_algorithm("ppo", advantage="batch_mean", entropy_coef=1.0, clip_low=0.01, clip_high=0.01)
    measured = run(client, row, Passes(2, 1), batch, rate=1.0)
    assert measured.clipped["high"] > 0


def test_an_update_without_anything_to_learn_makes_no_call() -> None:
    client = RecordingClient(table().policy)
    batch = sample_answers(client)
    for t in batch:
        t.reward = None
    measured = run(client, PPO, Passes(2, 2), batch)
    assert client.calls == [] and measured.metrics() == {"updates": 0.0, "tokens_trained": 0.0}


def test_losses_add_up_and_are_means_over_the_steps() -> None:
    """Two steps at rate 0: the same loss twice, so their mean is either; the parts are entropy and KL."""
    client = table()
    batch = sample_answers(client)
    reference = table().create_sampling_client()
    row = resolve_algorithm("reinforce", entropy_coef=0.5, kl_coef=0.5, kl_in="loss", kl_estimator="k2")
    client.policy.logits = client.policy.logits * 0.5
    twice = run(client, row, Passes(2, 1), batch, rate=0.0, reference=reference)
    once = run(client, row, Passes(1, 1), batch, rate=0.0, reference=reference)
    assert (twice.loss, *twice.term_losses.values()) == pytest.approx((once.loss, *once.term_losses.values()))
    now, old = client.policy.logprobs(), table().policy.logprobs()
    kl = sum(0.5 * (now[t] - old[t]) ** 2 for x in batch for t in x.response_tokens) / len(batch)
    assert once.term_losses["kl"] == pytest.approx(0.5 * kl, rel=1e-5) and kl > 0.01


def test_a_kl_without_a_reference_names_the_missing_reference() -> None:
    client = table()
    with pytest.raises(ValueError, match="reference"):
        run(client, resolve_algorithm("grpo_original", kl_coef=0.1), Passes(), sample_answers(client))


def test_an_answer_without_tokens_is_an_error_and_never_left_out_in_silence() -> None:
    """A text-only endpoint's answer cannot train, with or without options."""
    client = table()
    batch = [*sample_answers(client), Trajectory("p", [], "r", [], reward=1.0)]
    with pytest.raises(ValueError, match="no token ids"):
        run(client, PPO, Passes(), batch)


def test_cispo_counts_every_weight_that_it_bounds() -> None:
    """Its bounds hold whatever the sign of the advantage, unlike those of a clipped gradient."""
    for loss, expected in (("cispo", 1.0), ("ppo", 0.0)):
        client = table()
        batch = sample_answers(client)
        for t in batch:
            t.reward, t.logprobs = -1.0, [x - 2.0 for x in t.logprobs]  # ratios of exp(2), advantages below 0
        row = resolve_algorithm("ppo", loss=loss, advantage="raw", clip_low=0.2, clip_high=0.2)
        measured = run(client, row, Passes(), batch)
        assert measured.metrics()["clip_ratio/region_mean"] == expected


def written_answers(client: MockTrainingClient) -> list[Trajectory]:
    """Two groups of four; the environment wrote two tokens into every other answer. Group 1 has equal rewards."""
    items = sample_answers(client)
    for i, t in enumerate(items):
        t.reward = 1.0 if i >= 4 else t.reward
        if i % 2:
            t.response_tokens, t.action_mask = [*t.response_tokens, 5, 5, 2], [*t.action_mask, 0, 0, 1]
            t.logprobs = [*t.logprobs, 0.0, 0.0, float(client.policy.logprobs()[2])]
            t.attention_mask = [1] * (1 + len(t.response_tokens))
    return items


def test_answers_of_equal_rewards_learn_what_the_environment_wrote_and_others_are_not_sent() -> None:
    """By hand for token_mean: 8 tokens of the environment's in 8 answers, each with coefficient / 8."""
    client = RecordingClient(table().policy)
    batch = written_answers(client)
    run(client, resolve_algorithm("echo", reduction="token_mean", observation_coef=0.4), Passes(), batch)
    [sent] = client.sent
    assert len(sent) == 6, "in group 1 the answers without such tokens teach nothing"
    for datum in sent:
        weights = datum.loss_fn_inputs["cross_entropy_weights"].data
        written = datum.loss_fn_inputs["target_tokens"].data == 5
        assert len(weights) < 4 or written[-3:-1].all()
        assert (weights[-3:-1] == pytest.approx(0.05)) if len(weights) > 3 else not weights.any()


@pytest.mark.parametrize("reduction", ["sequence_mean", "constant", "sequence_sum"])
def test_a_streamed_update_learns_observations_as_a_whole_one_does(reduction: str) -> None:
    row, gradients = resolve_algorithm("echo", reduction=reduction, observation_coef=0.4), list[np.ndarray]()
    for streams in (False, True):
        client = table()
        batch, inputs = written_answers(client), UpdateInputs(RunningBaseline(), 4)

        def keep(statistics: UpdateStatistics, client: MockTrainingClient = client) -> None:
            assert client.policy.gradient is not None
            gradients.append(client.policy.gradient.copy())

        if streams:
            parts = [batch[:4], batch[4:]]
            update_streamed(client, row, parts, lambda n: AdamParams(0.1), StreamPlan(1, 2, 8), inputs, keep)
        else:
            update(client, row, batch, lambda n: AdamParams(0.1), Passes(), inputs, keep)
    assert gradients[0] == pytest.approx(gradients[1]) and np.abs(gradients[0]).max() > 0.01


def test_a_completion_of_two_trajectories_counts_once_in_a_streamed_update() -> None:
    """By hand for sequence_sum: each token of 4 trajectories that are 3 completions has 1 / 3 of its reward."""
    client = RecordingClient(table().policy)
    batch = sample_answers(client, 4)
    for t in batch:
        t.reward = 1.0
    batch[1].rollout_id = batch[0].rollout_id
    row = resolve_algorithm("reinforce", advantage="raw", reduction="sequence_sum")
    inputs = UpdateInputs(RunningBaseline(), 4)
    update_streamed(client, row, [batch[:2], batch[2:]], lambda n: AdamParams(0.1), StreamPlan(1, 2, 3), inputs)
    for datum in (datum for data in client.sent for datum in data):
        assert datum.loss_fn_inputs["advantages"].data[-1] == pytest.approx(1 / 3)


def test_a_loss_of_weights_has_them_beside_a_term() -> None:
    """raft imitates: its weight is the advantage of an accepted completion, 1, by the reduction, 1 / 4 here."""
    row = resolve_algorithm("raft", kl_coef=0.1, kl_in="loss", kl_estimator="k2")
    [accepted, *_] = sample_answers(table())
    accepted.advantage, accepted.reference_logprobs = 1.0, [-1.0]
    datum = make_datum(row, accepted, 0.25)
    assert datum.loss_fn_inputs["weights"].data.tolist() == [0.25]
    assert datum.loss_fn_inputs["kl_weights"].data.tolist() == pytest.approx([0.025])
