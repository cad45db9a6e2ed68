"""What estimators estimate: expected gradients by enumerating every answer, against the exact gradient.

The policy is a table of token logits, so an answer's probability is the product of its tokens'. Each possible answer is
sent to the client with its probability as its weight: the gradient is then the expectation, without any sampling.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlvr.algorithms import Algorithm, resolve_algorithm
from rlvr.algorithms.advantages import RunningBaseline
from rlvr.algorithms.penalties import penalize
from rlvr.algorithms.sampler_logprobs import fill_reference_logprobs
from rlvr.algorithms.terms.kl import KL_TERMS
from rlvr.algorithms.update import loss_config, make_datum
from rlvr.clients.mock.mock_client import MockTrainingClient, TablePolicy
from rlvr.core.types import Trajectory
from rlvr.engine.losses import kl_penalty

WORDS = ["a", "b", "c", "d"]
LENGTH = 2  # tokens of an answer: 36 answers over six words


def policy(seed: int) -> TablePolicy:
    made = TablePolicy(WORDS, seed, spread=4.0)
    made.logits[1] = 0.5  # the word that is never said, too: every answer is possible
    return made


def expected_gradient(row: Algorithm, temperature: float = 1.0, reward: Any = lambda tokens: 0.0) -> np.ndarray:
    """The gradient of the loss in the logits, over all answers, when the policy samples them itself."""
    table, reference = policy(3), MockTrainingClient(policy(8)).create_sampling_client()
    client = MockTrainingClient(table)
    logprobs = table.logprobs(temperature)
    batch = [
        Trajectory("p", [0], "r", list(tokens), logprobs[list(tokens)].tolist(), reward=reward(tokens))
        for tokens in itertools.product(range(len(logprobs)), repeat=LENGTH)
    ]
    if row.needs_reference:
        fill_reference_logprobs(batch, reference, temperature)
    penalize(batch, row, LENGTH)
    row.select(batch, RunningBaseline())
    data = [make_datum(row, t, float(np.exp(sum(t.logprobs)))) for t in batch]
    client.forward_backward(data, row.loss.name, loss_config(row, client, temperature))
    assert table.gradient is not None
    return table.gradient


def exact(of: Any, temperature: float = 1.0) -> np.ndarray:
    """The gradient of `of(log p, log ref)` of one token's distribution, times the tokens of an answer."""
    logits = torch.tensor(policy(3).logits, requires_grad=True)
    reference = torch.tensor(policy(8).logprobs(temperature))
    of((logits / temperature).log_softmax(-1), reference).backward()
    assert logits.grad is not None
    return LENGTH * logits.grad.numpy()


def entropy(p: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    return -(p.exp() * p).sum()


def reverse_kl(p: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    return (p.exp() * (p - ref)).sum()


def forward_kl(p: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    return (ref.exp() * (ref - p)).sum()


RAW = {"advantage": "raw"}  # every reward is 0 here: what is left is the option's own gradient
TEMPERATURES = pytest.mark.parametrize("temperature", [1.0, 0.6])


@TEMPERATURES
@pytest.mark.parametrize("name", ["reinforce", "reinforce_pp", "cispo", "gspo"])
def test_the_sampled_entropy_bonus_climbs_the_entropy(name: str, temperature: float) -> None:
    """Its expected gradient is -coefficient x that of the exact entropy, whatever the loss it travels with."""
    found = expected_gradient(resolve_algorithm(name, entropy_coef=0.3, **RAW), temperature)
    assert found == pytest.approx(-0.3 * exact(entropy, temperature), abs=1e-6)
    assert np.abs(found).max() > 0.01


@TEMPERATURES
def test_k1_in_the_reward_descends_the_reverse_kl(temperature: float) -> None:
    found = expected_gradient(resolve_algorithm("reinforce", kl_coef=0.3, kl_estimator="k1", **RAW), temperature)
    assert found == pytest.approx(0.3 * exact(reverse_kl, temperature), abs=1e-6)
    assert np.abs(found).max() > 0.01


@TEMPERATURES
def test_k2_in_the_loss_descends_the_reverse_kl(temperature: float) -> None:
    row = resolve_algorithm("reinforce", kl_coef=0.3, kl_estimator="k2", kl_in="loss", **RAW)
    assert expected_gradient(row, temperature) == pytest.approx(0.3 * exact(reverse_kl, temperature), abs=1e-6)


def test_k3_in_the_loss_descends_the_forward_kl() -> None:
    """What GRPO's penalty pulls along on the policy's own samples: the gradient of KL(reference || policy)."""
    row = resolve_algorithm("reinforce", kl_coef=0.3, kl_estimator="k3", kl_in="loss", **RAW)
    found = expected_gradient(row)
    assert found == pytest.approx(0.3 * exact(forward_kl), abs=1e-6)
    assert np.abs(found - 0.3 * exact(reverse_kl)).max() > 0.01


def test_k1_in_the_loss_has_no_gradient_on_average() -> None:
    row = resolve_algorithm("reinforce", kl_coef=0.3, kl_estimator="k1", kl_in="loss", **RAW)
    assert expected_gradient(row) == pytest.approx(np.zeros(6), abs=1e-6)


@pytest.mark.parametrize("advantage", ["raw", "batch_mean"])
def test_a_constant_baseline_changes_no_expected_gradient(advantage: str) -> None:
    """The policy gradient of the expected number of a's, with and without the baseline."""
    row = resolve_algorithm("reinforce", advantage=advantage)
    found = expected_gradient(row, reward=lambda tokens: float(tokens.count(2)))
    assert found == pytest.approx(-exact(lambda p, ref: p.exp()[2]), abs=1e-6)


def test_under_an_importance_cap_the_entropy_bonus_is_that_of_the_policy_that_is_trained() -> None:
    """Answers come from another sampler; weighed back, their expected gradient is the trained policy's."""
    row = resolve_algorithm("reinforce", advantage="raw", entropy_coef=1.0, importance_cap=1e6)
    table, sampler = policy(3), policy(8).logprobs()
    client, trained = MockTrainingClient(table), table.logprobs()
    data = []
    for tokens in map(list, itertools.product(range(len(sampler)), repeat=LENGTH)):
        answer = Trajectory("p", [0], "r", tokens, sampler[tokens].tolist())
        data.append(make_datum(row, answer, float(np.exp(sum(answer.logprobs))), trained[tokens].tolist()))
    client.forward_backward(data, row.loss.name, loss_config(row, client, 1.0))
    assert table.gradient == pytest.approx(-exact(entropy), abs=1e-6)


POLICY = (0.8, 0.9, 0.5)  # the probability of `a` as the first token, and as the second one after `a` and after `b`


def two_tokens(x: torch.Tensor, first: int, second: int) -> torch.Tensor:
    """The log-probs [2] of a completion of two tokens out of {a, b} = {0, 1}; x [3] are the log-odds of `a`."""
    signs = torch.tensor([1.0 - 2.0 * first, 1.0 - 2.0 * second], dtype=x.dtype)
    return torch.nn.functional.logsigmoid(signs * torch.stack([x[0], x[1 + first]]))


def expected_of_two(kind: str) -> np.ndarray:
    """The gradient in the three log-odds, over all four completions, of a KL to the uniform policy.

    `exact` is the KL of whole completions, `loss k2` the expected gradient of k2 as a term of the loss, `reward k2`
    that of k2 as a cost of the completion: its sum times the gradient of the completion's log-prob.
    """
    where, _, estimator = kind.partition(" ")
    x = torch.tensor([np.log(p / (1 - p)) for p in POLICY], dtype=torch.float64, requires_grad=True)
    reference = torch.full((2,), np.log(0.5), dtype=x.dtype)
    total = x.new_zeros(())
    for tokens in itertools.product((0, 1), repeat=2):
        p = two_tokens(x, *tokens)
        if where == "exact":
            total = total + p.sum().exp() * (p - reference).sum()
        elif where == "loss":
            inputs = {"kl_weights": torch.ones(2, dtype=x.dtype), "reference_logprobs": reference}
            total = total + p.sum().exp().detach() * kl_penalty(p, inputs, float(estimator[1])).sum()
        else:
            cost = float(KL_TERMS[estimator]((reference - p).detach().numpy()).sum())
            total = total + p.sum().exp().detach() * cost * p.sum()
    (gradient,) = torch.autograd.grad(total, x)
    return gradient.numpy()


@pytest.mark.parametrize(
    ("kind", "gradient", "apart", "cosine"),
    [
        ("exact", (0.281, 0.158, 0.0), 0.0, 1.0),
        ("reward k1", (0.281, 0.158, 0.0), 0.0, 1.0),
        ("loss k2", (0.222, 0.158, 0.0), 0.18, 0.99),
        ("loss k3", (0.300, 0.320, 0.0), 0.51, 0.95),
        ("reward k2", (-0.004, -0.081, 0.0), 1.15, -0.53),
        ("reward k3", (-0.019, -0.162, 0.0), 1.36, -0.59),
    ],
)
def test_the_divergences_of_two_tokens_are_those_of_the_page(
    kind: str, gradient: tuple[float, ...], apart: float, cosine: float
) -> None:
    """With one token k2 in the loss is exact; with two it misses that the first one decides what the second one costs.

    By hand, the first log-odds: exact 0.8 x 0.2 (ln 4 + KL after a, 0.368), k2 in the loss 0.16 ln 4 = 0.222.
    """
    exact, found = expected_of_two("exact"), expected_of_two(kind)
    assert exact[0] == pytest.approx(0.16 * (np.log(4) + 0.9 * np.log(1.8) + 0.1 * np.log(0.2)), rel=1e-12)
    assert found == pytest.approx(np.array(gradient), abs=6e-4)
    assert np.linalg.norm(found - exact) / np.linalg.norm(exact) == pytest.approx(apart, abs=6e-3)
    assert found @ exact / np.linalg.norm(found) / np.linalg.norm(exact) == pytest.approx(cosine, abs=6e-3)
    page = (Path(__file__).parents[2] / "docs" / "loss-functions.md").read_text(encoding="utf-8")
    cells = [*(f"{value:.3f}" for value in gradient[:2]), f"{100 * apart:.0f} %", f"{cosine:.2f}"]
    assert f"| {' | '.join(cells)} |" in page, cells
