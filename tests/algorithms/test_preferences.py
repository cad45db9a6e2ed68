"""DPO, IPO and KTO: literals worked out by hand, the papers' formulas on a real model, the pairs of a group, mistakes.

Legend as in `rlvr.algorithms.losses.preferences`: h the sum of log policy - log reference over a completion.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlvr.algorithms import Algorithm, resolve_algorithm
from rlvr.algorithms.advantages import RunningBaseline
from rlvr.algorithms.losses.preferences import Pairing, mismatch_completions
from rlvr.algorithms.optimizers import OptimizerSection
from rlvr.algorithms.update import Passes, UpdateInputs, make_datum, update
from rlvr.clients.mock.mock_client import MockTrainingClient, TablePolicy
from rlvr.core.messages import AdamParams, Datum
from rlvr.core.types import Trajectory
from rlvr.training.schedules.sync import Synchronous
from tests.kit.rounding import assert_gradients_close
from tests.kit.table_trainer import collect, fixed_lag_trainer, make_trainer, run_fixed_lag
from tests.kit.tiny import data, gradients

SIGMOID_1 = 1 / (1 + math.exp(-1.0))


def answer(rollout: str, reward: float | None, tokens: list[int], group: str = "g", **more: Any) -> Trajectory:
    q = [-1.0] * len(tokens)
    return Trajectory(
        "p", [1, 2], "r", tokens, q, reward=reward, group_id=group, rollout_id=rollout,
        reference_logprobs=[-1.0] * len(tokens), **more,
    )  # fmt: skip


def evaluate(row: Algorithm, items: list[Trajectory], p: list[list[float]]) -> tuple[float, list[list[float]], dict]:
    """The loss, its gradient in the completions' log-probs `p`, and what it reports."""
    selected = row.select(items)
    rows = [(t, 1.0) for t in selected]
    leaves = [
        torch.tensor([-9.0, *p[items.index(t)]], dtype=torch.float64).requires_grad_(True) for t in selected
    ]  # the prompt's second token has a log-prob too, which counts nowhere
    is_mean = row.reduction == "sequence_mean"
    of_rows = row.loss.of_rows(selected, is_mean=is_mean, divergence=None)
    loss, reported = of_rows([make_datum(row, t, w) for t, w in rows], leaves)
    grads = torch.autograd.grad(loss, leaves)
    assert all(float(g[0]) == 0 for g in grads)
    return float(loss.detach()), [g[1:].tolist() for g in grads], {name: float(x) for name, x in reported.items()}


def test_dpo_by_hand() -> None:
    """h_w = 3 of two tokens, h_l = -7 of one; beta 0.1: -log sigmoid(1), slopes -+0.1 (1 - sigmoid(1)) a token."""
    items = [answer("0", 1.0, [3, 4]), answer("1", 0.0, [5])]
    loss, grads, reported = evaluate(resolve_algorithm("dpo"), items, [[0.0, 1.0], [-8.0]])
    slope = 0.1 * (1 - SIGMOID_1)
    assert loss == pytest.approx(-math.log(SIGMOID_1))
    assert grads == [pytest.approx([-slope, -slope]), pytest.approx([slope])]
    assert reported == {"margin": pytest.approx(10.0), "accuracy": 1.0, "pairs": 1.0}


def test_ipo_by_hand() -> None:
    """(10 - 1 / (2 * 0.1))^2 = 25, slopes 2 * 5 = 10; by means, h_w = 1.5: (8.5 - 5)^2, half of the slope a token."""
    items = [answer("0", 1.0, [3, 4]), answer("1", 0.0, [5])]
    loss, grads, _ = evaluate(resolve_algorithm("ipo"), items, [[0.0, 1.0], [-8.0]])
    assert (loss, grads) == (pytest.approx(25.0), [pytest.approx([10.0, 10.0]), pytest.approx([-10.0])])
    loss, grads, _ = evaluate(resolve_algorithm("ipo", reduction="sequence_mean"), items, [[0.0, 1.0], [-8.0]])
    assert (loss, grads) == (pytest.approx(12.25), [pytest.approx([3.5, 3.5]), pytest.approx([-7.0])])


def test_kto_by_hand() -> None:
    """h = 12 (preferred) and 2: z = 7, beta 0.2: both 1 - sigmoid(1), the mean of both; z has no gradient."""
    items = [answer("0", 1.0, [3]), answer("1", 0.0, [5])]
    loss, grads, reported = evaluate(resolve_algorithm("kto", beta=0.2), items, [[11.0], [1.0]])
    slope = 0.5 * 0.2 * SIGMOID_1 * (1 - SIGMOID_1)
    assert loss == pytest.approx(1 - SIGMOID_1)
    assert grads == [pytest.approx([-slope]), pytest.approx([slope])]
    assert reported == {"divergence": 7.0}
    below = evaluate(resolve_algorithm("kto", beta=0.2), items, [[-3.0], [-11.0]])[2]
    assert below == {"divergence": 0.0}, "an estimated divergence below 0 is 0"


@pytest.mark.parametrize("reduction", ["sequence_sum", "sequence_mean"])
def test_of_given_completions_kto_estimates_the_divergence_by_mismatched_ones(
    reduction: str, client: Callable[..., Any]
) -> None:
    """On an engine whose policy has moved: z is the mean h of each prompt with the next one's completion."""
    trainer = client("qwen3")
    old = copy.deepcopy(trainer._engine.model.module)
    reference = trainer.create_sampling_client()
    items = [answer(str(i), float(i != 1), tokens) for i, tokens in enumerate(([3, 4, 5], [6, 7], [8]))]
    for i, t in enumerate(items):
        t.prompt_tokens, t.attention_mask = [1, 2 + i], []
    others = [answer("", None, items[(i + 1) % 3].response_tokens) for i in range(3)]
    for other, t in zip(others, items, strict=True):
        other.prompt_tokens = t.prompt_tokens
    imitated = [Datum.from_completion(t.prompt_tokens, t.response_tokens, 1.0) for t in others]
    trainer.forward_backward(imitated, "cross_entropy")
    trainer.optim_step(AdamParams(3e-2))
    module = copy.deepcopy(trainer._engine.model.module)

    def compute_h(t: Trajectory) -> float:
        total = float((plain_h(module, t) - plain_h(old, t)).sum().detach())
        return total / len(t.response_tokens) if reduction == "sequence_mean" else total

    h, z = [compute_h(t) for t in items], sum(map(compute_h, others)) / 3
    measured = update(
        trainer, resolve_algorithm("kto", reduction=reduction), items, lambda n: AdamParams(0.0), Passes(),
        UpdateInputs(RunningBaseline(), 5, reference=reference, is_given=True),
    )  # fmt: skip
    assert z > 0.1 and abs(z - sum(h) / 3) > 0.01, "it is not the mean of the completions themselves"
    assert measured.metrics()["loss/divergence"] == pytest.approx(z, rel=1e-4)
    terms = [1 / (1 + math.exp(0.1 * side * (x - z))) for x, side in zip(h, (1, -1, 1), strict=True)]
    assert measured.loss == pytest.approx(sum(terms) / 3, rel=1e-4)


def test_a_mismatched_completion_is_cut_to_the_context_and_is_never_the_prompt_s_own() -> None:
    items = [answer("0", 1.0, [3, 4, 5]), answer("1", 0.0, [6, 7]), answer("2", 0.0, [8])]
    assert [t.response_tokens for t in mismatch_completions(items)] == [[6, 7], [8], [3, 4, 5]]
    items[2].prompt_tokens = [1, 2, 3]
    assert [t.response_tokens for t in mismatch_completions(items, 4)] == [[6, 7], [8], [3]]
    with pytest.raises(ValueError, match="has 1 completions and needs at least 2"):
        mismatch_completions(items[:1])


def test_pairs_are_all_those_of_a_group_and_every_group_counts_alike() -> None:
    """Group a: two preferred with one other, 2 pairs; group b: 1 pair; c: no pair; weights 1/4, 1/4, 1/2."""
    items = [
        answer("a0", 1.0, [3], "a"), answer("a1", 0.0, [4], "a"), answer("a2", 1.0, [5], "a"),
        answer("b0", 0.0, [3], "b"), answer("b1", 0.8, [4], "b"), answer("b2", None, [5], "b"),
        answer("c0", 0.7, [3], "c"), answer("c1", 0.9, [4], "c"),
    ]  # fmt: skip
    row = resolve_algorithm("dpo")
    rows, equal = row.loss.keep_comparable(row.weigh(row.select(items), 5))
    assert [t.rollout_id for t, _ in rows] == ["a0", "a1", "a2", "b0", "b1"] and equal == 0
    pairing = Pairing.of([t for t, _ in rows])
    assert sorted(pairing.pairs) == [(0, 1, 0.25), (2, 1, 0.25), (4, 3, 0.5)]


def test_the_loss_weighs_every_group_alike() -> None:
    """Margins 1 and 2 of one group, 5 of the other: 16 / 4 + 9 / 4 + 0 / 2, and their mean with the same weights."""
    items = [
        answer("a0", 1.0, [3], "a"), answer("a1", 0.0, [4], "a"), answer("a2", 1.0, [5], "a"),
        answer("b0", 0.0, [3], "b"), answer("b1", 1.0, [4], "b"),
    ]  # fmt: skip
    loss, _, reported = evaluate(resolve_algorithm("ipo"), items, [[0.0], [-1.0], [1.0], [-1.0], [4.0]])
    assert loss == pytest.approx(6.25)
    assert reported == {"margin": pytest.approx(3.25), "accuracy": 1.0, "pairs": 3.0}


def test_a_pair_of_equal_tokens_is_left_out_and_counted() -> None:
    """A verifier that contradicts itself: the loss of such a pair is a constant."""
    items = [answer("0", 1.0, [3]), answer("1", 0.0, [3]), answer("2", 0.0, [4])]
    row = resolve_algorithm("dpo")
    rows, equal = row.loss.keep_comparable(row.weigh(row.select(items), 5))
    assert ([t.rollout_id for t, _ in rows], equal) == (["0", "2"], 1)


def test_a_completion_of_two_trajectories_is_one() -> None:
    """A rewritten history: h is the sum over both, and they stand in one pair."""
    items = [answer("0", 1.0, [3]), answer("0", 1.0, [4]), answer("1", 0.0, [5])]
    loss, grads, reported = evaluate(resolve_algorithm("ipo"), items, [[0.0], [1.0], [-8.0]])
    assert (loss, reported["pairs"]) == (pytest.approx(25.0), 1.0)
    assert grads == [pytest.approx([10.0]), pytest.approx([10.0]), pytest.approx([-10.0])]
    loss, grads, _ = evaluate(resolve_algorithm("ipo", reduction="sequence_mean"), items, [[0.0], [1.0], [-8.0]])
    assert loss == pytest.approx(12.25), "the mean over the tokens of both"
    assert grads == [pytest.approx([3.5]), pytest.approx([3.5]), pytest.approx([-7.0])]


def plain_h(module: Any, t: Trajectory) -> Tensor:
    """Log-probs of the sampled tokens by a pass of the transformers model."""
    table = module(input_ids=torch.tensor([t.full_tokens]), use_cache=False).logits[0].double().log_softmax(-1)
    chosen = table[torch.arange(len(t.full_tokens) - 1), torch.tensor(t.full_tokens[1:])][len(t.prompt_tokens) - 1 :]
    return chosen[torch.tensor(t.action_mask, dtype=torch.bool)]


PAPERS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    # Completions 0 and 2 are preferred to 1 and 3, in one group: four pairs.
    "dpo": lambda h: (
        sum((torch.log1p(torch.exp(-0.1 * (h[w] - h[o]))) for w in (0, 2) for o in (1, 3)), Tensor([0])) / 4
    ),
    "ipo": lambda h: sum(((h[w] - h[o] - 5.0) ** 2 for w in (0, 2) for o in (1, 3)), Tensor([0])) / 4,
    "kto": lambda h: (
        sum(
            (
                1
                / (1 + torch.exp((0.1 if i % 2 == 0 else -0.1) * (x - max(0.0, float(torch.stack(h).detach().mean())))))
                for i, x in enumerate(h)
            ),
            Tensor([0]),
        )
        / 4
    ),
}


@pytest.mark.parametrize("name", sorted(PAPERS))
def test_the_gradient_of_an_update_is_that_of_the_paper(name: str, client: Callable[..., Any]) -> None:
    """On an engine whose policy has moved from the reference, against a plain pass; one token is the environment's."""
    trainer = client("qwen3", micro_tokens=64)
    old = copy.deepcopy(trainer._engine.model.module)
    reference = trainer.create_sampling_client()
    trainer.forward_backward(data(), "cross_entropy")
    trainer.optim_step(AdamParams(3e-2))
    module = copy.deepcopy(trainer._engine.model.module)
    texts = ([3, 4, 5], [6, 7], [8], [9, 10, 11, 12])
    items = [answer(str(i), float(i % 2 == 0), tokens) for i, tokens in enumerate(texts)]
    items[3].action_mask = [1, 1, 0, 1]
    taken: list[Any] = []
    measured = update(
        trainer, resolve_algorithm(name), items, lambda n: AdamParams(0.0), Passes(),
        UpdateInputs(RunningBaseline(), 5, reference=reference), check=lambda _: taken.append(gradients(trainer)),
    )  # fmt: skip
    h = [(plain_h(module, t) - plain_h(old, t).detach()).sum() for t in items]
    assert max(abs(float(x.detach())) for x in h) > 0.1, "the policy has moved"
    expected = PAPERS[name](h).sum()
    expected.backward()
    assert_gradients_close(taken[0], {k: p.grad for k, p in module.named_parameters() if p.grad is not None})
    assert measured.loss == pytest.approx(float(expected.detach()), rel=1e-4)


@pytest.mark.parametrize(("name", "rate"), [("dpo", 0.1), ("ipo", 0.1), ("kto", 0.1), ("raft", 0.2)])
def test_a_policy_learns_what_the_verifier_accepts(name: str, rate: float) -> None:
    """A table of logits over four words, of which one is right: from a third of the completions to nearly all."""
    trainer = make_trainer(algorithm=name, optimizer=OptimizerSection(learning_rate=rate), steps=30)
    trainer.reference = trainer.parts.client.save_weights_and_get_sampling_client()
    schedule = Synchronous(trainer)
    rewards = [schedule.learn(step)[0]["reward"] for step in range(30)]
    assert rewards[0] < 0.5 and sum(rewards[-5:]) / 5 > 0.85


def test_substeps_keep_groups_together() -> None:
    """Six groups in three optimizer steps: every pair that the batch has is in one of them."""
    trainer = make_trainer(algorithm="dpo", num_substeps=3)
    trainer.reference = trainer.parts.client.save_weights_and_get_sampling_client()
    batch = collect(trainer, 0)
    pairs = len(Pairing.of([t for t in resolve_algorithm("dpo").select(batch.batch)]).pairs)
    metrics = trainer.update(0, batch)
    assert metrics["updates"] == 3 and pairs > 0
    assert metrics["loss/pairs"] * 3 + metrics["equal_pairs"] == pytest.approx(pairs)


def test_an_equal_pair_is_counted_once_for_all_epochs() -> None:
    items = [answer("0", 1.0, [3]), answer("1", 0.0, [3]), answer("2", 0.0, [2])]
    client = make_trainer().parts.client
    measured = update(
        client, resolve_algorithm("dpo"), items, lambda n: AdamParams(0.1), Passes(epochs=3),
        UpdateInputs(RunningBaseline(), 1, reference=client.save_weights_and_get_sampling_client()),
    )  # fmt: skip
    assert (measured.updates, measured.equal_pairs) == (3, 1)


def test_substeps_keep_the_trajectories_of_a_completion_together() -> None:
    """Four completions with a rewritten history in two optimizer steps: each has both trajectories of two of them."""
    items = [answer(str(c), float(c < 2), [c, half]) for c in range(4) for half in (0, 1)]
    steps: list[list[int]] = []

    class RecordingClient(MockTrainingClient):
        def forward_backward_custom(self, data: list[Datum], *args: Any) -> Any:
            steps.append([datum.model_input.to_ints()[2] for datum in data])
            return super().forward_backward_custom(data, *args)

    client = RecordingClient(TablePolicy(["a", "b", "c", "d"]))
    for key in range(5):
        update(
            client, resolve_algorithm("kto"), items, lambda n: AdamParams(0.1), Passes(substeps=2),
            UpdateInputs(RunningBaseline(), 2, key=key, reference=client.save_weights_and_get_sampling_client()),
        )  # fmt: skip
    assert len(steps) == 10 and all(step.count(c) == 2 for step in steps for c in step)


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_without_a_pair_no_step_is_made(reward: float) -> None:
    items = [answer("0", reward, [3]), answer("1", reward, [4])]
    client, row = make_trainer().parts.client, resolve_algorithm("dpo", drop_equal_groups=False)
    measured = update(
        client, row, items, lambda n: AdamParams(0.1), Passes(),
        UpdateInputs(RunningBaseline(), 1, reference=client.save_weights_and_get_sampling_client()),
    )  # fmt: skip
    assert measured.metrics() == {"updates": 0.0, "tokens_trained": 0.0, "equal_pairs": 0.0}


def test_what_cannot_work_is_refused() -> None:
    client = make_trainer().parts.client
    with pytest.raises(ValueError, match=r"algorithm.loss=dpo without a reference"):
        update(
            client, resolve_algorithm("dpo"), [answer("0", 1.0, [3])], lambda n: AdamParams(0.1), Passes(),
            UpdateInputs(RunningBaseline(), 1),
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"group_size=1 has no signal"):
        make_trainer(algorithm="dpo", group_size=1)
    with pytest.raises(ValueError, match=r"algorithm.loss=ipo gets all rows of an optimizer step in one call"):
        make_trainer(algorithm="ipo", num_minibatches=2)


def test_dpo_runs_under_a_fixed_lag(tmp_path: Any) -> None:
    """Completions of an older policy are pairs as good as any: nothing of them is compared with the sampler."""
    trainer = fixed_lag_trainer(algorithm="dpo", max_steps_off_policy=1)
    trainer.reference = trainer.parts.client.save_weights_and_get_sampling_client()
    assert [row["updates"] for row in run_fixed_lag(trainer, tmp_path)] == [1.0] * 8
