"""Token losses: literals worked out by hand, an independent numpy version, gradient checks, masks, chunked log-probs.

Legend as in `rlvr.engine.losses`: p trained log-prob, q sampled log-prob, A advantage, r = exp(p - q).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr.algorithms.loss_specs import LOSS_SPECS
from rlvr.algorithms.losses import LOSSES
from rlvr.algorithms.terms.kl import KL_TERMS
from rlvr.clients.custom_loss import build_named_loss
from rlvr.clients.mock.mock_client import FORMULAS, kl_terms
from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.engine.losses import TERMS, kl_penalty, token_logprobs

NAMES = sorted(LOSS_SPECS)
LN2 = math.log(2.0)


def run(name: str, p: list[float], rows: list[int] | None = None, config: dict | None = None, **inputs: list[float]):
    """Terms and d(sum of terms)/dp as lists, in fp64."""
    p_N = torch.tensor(p, dtype=torch.float64, requires_grad=True)
    tensors = {k: torch.tensor(v, dtype=torch.float64) for k, v in inputs.items()}
    row_N = torch.tensor(rows if rows is not None else [0] * len(p))
    terms = TERMS[name](p_N, tensors, {**LOSS_SPECS[name].config, **(config or {})}, row_N)
    (grad,) = torch.autograd.grad(terms.sum(), p_N)
    return terms.tolist(), grad.tolist()


def test_cross_entropy_by_hand() -> None:
    """-w p: w 1, 0.5, 0 at p -2, -4, -8 give 2, 2, 0, with gradient -w."""
    terms, grad = run("cross_entropy", [-2.0, -4.0, -8.0], weights=[1.0, 0.5, 0.0])
    assert terms == [2.0, 2.0, 0.0]
    assert grad == [-1.0, -0.5, 0.0]


def test_importance_sampling_by_hand() -> None:
    """-r A: r = exp(ln 2) = 2 with A 3 gives -6; r = 1/2 with A -4 gives 2. The gradient is the term itself."""
    terms, grad = run("importance_sampling", [-1.0, -3.0], logprobs=[-1.0 - LN2, -3.0 + LN2], advantages=[3.0, -4.0])
    assert terms == pytest.approx([-6.0, 2.0])
    assert grad == pytest.approx([-6.0, 2.0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "term", "slope"),
    [
        # -min(r A, clip(r, 0.8, 1.28) A), and its derivative in p (r's derivative is r): 0 where the clip is taken.
        (1.0, 2.0, -2.0, -2.0),  # inside: -1 * 2
        (1.1, 2.0, -2.2, -2.2),  # inside: -1.1 * 2
        (1.5, 2.0, -2.56, 0.0),  # min(3.0, 1.28 * 2 = 2.56): clipped, no more push up
        (1.5, -2.0, 3.0, 3.0),  # min(-3.0, -2.56) = -3: far above on a bad token, pushed down in full
        (0.5, 2.0, -1.0, -1.0),  # min(1.0, 1.6) = 1: far below on a good token, pushed up in full
        (0.5, -2.0, 1.6, 0.0),  # min(-1.0, 0.8 * -2 = -1.6) = -1.6: clipped, no more push down
        (1.27, 1.0, -1.27, -1.27),  # just inside the upper bound
        (1.29, 1.0, -1.28, 0.0),  # just outside
        (0.81, -1.0, 0.81, 0.81),  # just inside the lower bound
        (0.79, -1.0, 0.8, 0.0),  # just outside
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_ppo_by_hand_on_both_sides_of_both_thresholds(
    ratio: float, advantage: float, term: float, slope: float
) -> None:
    """The pessimistic minimum: the clip binds above for A > 0 and below for A < 0, and nowhere else."""
    bounds = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}
    terms, grad = run("ppo", [math.log(ratio) - 1], config=bounds, logprobs=[-1.0], advantages=[advantage])
    assert terms == pytest.approx([term])
    assert grad == pytest.approx([slope])


@pytest.mark.parametrize(
    ("ratio", "advantage", "term", "slope"),
    [
        # With c = 3: A < 0 pays at most 3 |A|, without a gradient beyond; A > 0 is as without it.
        (2.9, -2.0, 5.8, 5.8),
        (3.1, -2.0, 6.0, 0.0),
        (50.0, -2.0, 6.0, 0.0),
        (0.5, -2.0, 1.6, 0.0),
        (2.9, 2.0, -2.4, 0.0),
        (3.1, 2.0, -2.4, 0.0),
        (1.1, 2.0, -2.2, -2.2),
        (50.0, 0.0, 0.0, 0.0),
    ],
)
@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_dual_clip_by_hand_below_and_above_its_bound(
    name: str, ratio: float, advantage: float, term: float, slope: float
) -> None:
    """One token, whose ratio is its sequence's: torch and numpy, terms and slopes; at c itself min and max agree."""
    config = {"dual_clip_threshold": 3.0}
    inputs: dict[str, Any] = {"logprobs": [-1.0], "advantages": [advantage], "sequence_ratio_mask": [1.0]}
    p = [math.log(ratio) - 1]
    terms, grad = run(name, p, config=config, **inputs)
    assert terms == pytest.approx([term]) and grad == pytest.approx([slope])
    arrays = {key: np.array(value) for key, value in inputs.items()}
    again, slopes = FORMULAS[name](np.array(p), arrays, {**LOSS_SPECS[name].config, **config}, np.array([0]))
    assert again == pytest.approx([term]) and slopes == pytest.approx([slope])
    at_bound, _ = run(name, [math.log(3.0) - 1], config=config, **{**inputs, "advantages": [-2.0]})
    assert at_bound == pytest.approx([6.0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"),
    [
        # clip(r, 0.5, 4): the weight of p A
        (1.0, 2.0, 1.0), (5.0, 2.0, 4.0), (5.0, -2.0, 4.0), (0.25, 2.0, 0.5), (0.25, -2.0, 0.5), (3.9, 1.0, 3.9),
    ],
)  # fmt: skip
def test_cispo_by_hand_no_token_loses_its_gradient(ratio: float, advantage: float, weight: float) -> None:
    """-sg(clip(r)) p A at p = ln r - 1: the clip bounds the weight, for both signs, and the gradient is -weight A."""
    p = math.log(ratio) - 1
    bounds = {"clip_low_threshold": 0.5, "clip_high_threshold": 4.0}
    terms, grad = run("cispo", [p], config=bounds, logprobs=[-1.0], advantages=[advantage])
    assert terms == pytest.approx([-weight * p * advantage])
    assert grad == pytest.approx([-weight * advantage])


@pytest.mark.parametrize(
    ("tau", "x", "advantage", "term", "slope"),
    [
        # sigmoid(ln 3) is 3/4 and sigmoid(-ln 3) 1/4; the term is -(4 / tau) of it, the slope -4 (3/4)(1/4) r, times A.
        (2.0, math.log(3), 1.0, -1.5, -0.75),
        (4.0, -math.log(3), -1.0, 0.25, 0.75),
        (4.0, math.log(3), -2.0, 1.5, 1.5),
        (0.5, 0.0, 3.0, -12.0, -3.0),  # at the sampler's own policy the gradient is that of ppo
    ],
)
def test_sapo_by_hand(tau: float, x: float, advantage: float, term: float, slope: float) -> None:
    """tau (r - 1) = x; the other temperature counts nowhere."""
    ratio = 1 + x / tau
    own, other = ("positive", "negative") if advantage > 0 else ("negative", "positive")
    config = {f"{own}_temperature": tau, f"{other}_temperature": 77.0}
    inputs: dict[str, Any] = {"logprobs": [-1.0], "advantages": [advantage]}
    p = [math.log(ratio) - 1]
    terms, grad = run("sapo", p, config=config, **inputs)
    assert terms == pytest.approx([term]) and grad == pytest.approx([slope * ratio])
    arrays = {key: np.array(value) for key, value in inputs.items()}
    again, slopes = FORMULAS["sapo"](np.array(p), arrays, config, np.array([0]))
    assert again == pytest.approx([term]) and slopes == pytest.approx([slope * ratio])


@pytest.mark.parametrize("name", ["ppo", "importance_sampling", "cispo"])
def test_a_cross_entropy_beside_any_loss_by_hand(name: str) -> None:
    """-w p beside the loss's own term, on the mock client, in one call and in the two passes of a Tinker server.

    A table of four equal logits: p = -ln 4, d p / d logits = onehot - 1/4. Token 1 is the policy's, with advantage 0;
    token 2 the environment's, with weight 3: the loss is 3 ln 4, its slope at the logits -3 (onehot(2) - 1/4).
    """
    from rlvr.clients.mock.mock_client import MockTrainingClient, TablePolicy
    from rlvr.core.messages import Datum, ModelInput

    inputs = {
        "target_tokens": [1, 2], "logprobs": [-math.log(4), 0.0], "advantages": [0.0, 0.0],
        "cross_entropy_weights": [0.0, 3.0],
    }  # fmt: skip
    for call in ("forward_backward", "forward_backward_custom"):
        client = MockTrainingClient(TablePolicy(["a", "b"]))
        client.policy.logits[:] = 0.0
        loss: Any = name if call == "forward_backward" else build_named_loss(name)
        output = getattr(client, call)([Datum(ModelInput([0, 1]), inputs)], loss).result()
        assert output.metrics["loss:sum"] == pytest.approx(3 * math.log(4))
        assert client.policy.gradient == pytest.approx([0.75, 0.75, -2.25, 0.75])


def test_a_cross_entropy_beside_a_loss_needs_one_target_a_token() -> None:
    from rlvr.algorithms.loss_specs import check_batch
    from rlvr.core.messages import Datum, ModelInput

    wide = {"target_tokens": [[1, 2]], "weights": [[0.5, 0.5]], "cross_entropy_weights": [1.0]}
    with pytest.raises(ValueError, match=r"datum 0: cross_entropy_weights need one target per token, got 2"):
        check_batch([Datum(ModelInput([0]), wide)], "cross_entropy", {})


def test_the_options_of_sapo_are_those_of_a_config() -> None:
    words = ["env.name=toy", "client=mock", "rollout.max_tokens=4", "algorithm.loss=sapo"]
    built = build_config(load(None, None, [*words, "algorithm.loss.positive_temperature=2"]))
    assert built.algorithm.resolve().loss.config() == {"positive_temperature": 2.0, "negative_temperature": 1.05}
    with pytest.raises(ValueError, match=r"negative_temperature=0\.0, expected a temperature from 1e-06"):
        build_config(load(None, None, [*words, "algorithm.loss.negative_temperature=0"])).algorithm.resolve()
    from rlvr.algorithms.loss_specs import check_batch
    from rlvr.core.messages import Datum, ModelInput
    from rlvr.core.tensors import TensorData

    ones = {"target_tokens": TensorData(np.zeros(1, np.int64)), "logprobs": TensorData(np.zeros(1, np.float32))}
    row = Datum(ModelInput([0]), {**ones, "advantages": TensorData(np.ones(1, np.float32))})
    for wrong in (0.0, -1.0, 1e-310, 1e39, math.inf, math.nan):
        with pytest.raises(ValueError, match=r"positive_temperature .*expected 1e-06 to 1e\+06"):
            check_batch([row], "sapo", {"positive_temperature": wrong})
    with pytest.raises(ValueError, match=r"the loss sapo has no clip_low, an option of cispo, gspo, ppo"):
        build_config(load(None, None, [*words, "algorithm.clip_low=0.1"]))
    with pytest.raises(ValueError, match=r"did you mean algorithm\.loss.positive_temperature"):
        build_config(load(None, None, [*words, "algorithm.loss.positive_temperatur=2"]))


def test_dro_by_hand() -> None:
    """-(p A - beta (p - q)^2 / 2): p -1, q -3, A 2, beta 1/2 gives -(-2 - 4 / 4) = 3; slope -(2 - 2 / 2) = -1."""
    terms, grad = run("dro", [-1.0], config={"beta": 0.5}, logprobs=[-3.0], advantages=[2.0])
    assert terms == pytest.approx([3.0])
    assert grad == pytest.approx([-1.0])


def test_gspo_by_hand_over_two_sequences() -> None:
    """Each sequence has one ratio: exp of the mean of p - q over its mask; tokens share it and its clip.

    Row 0: p - q = ln 2 and 0 on the mask, 9 off it: s = exp(ln 2 / 2) = sqrt 2, above 1.2. With A = 1 every token is
    clipped: term -1.2, no gradient, masked tokens too. Row 1: p - q = -0.1, -0.1: s = exp(-0.1), inside; A = 1 and -1.
    """
    q = [-1.0 - LN2, -1.0, -10.0, -0.9, -0.9]
    terms, grad = run(
        "gspo",
        [-1.0, -1.0, -1.0, -1.0, -1.0],
        [0, 0, 0, 1, 1],
        logprobs=q,
        advantages=[1.0, 1.0, 1.0, 1.0, -1.0],
        sequence_ratio_mask=[1.0, 1.0, 0.0, 1.0, 1.0],
    )
    s = math.exp(-0.1)
    assert terms == pytest.approx([-1.2, -1.2, -1.2, -s, s])
    assert grad == pytest.approx([0.0, 0.0, 0.0, -s, s])


def test_gspo_takes_the_pessimistic_side_for_bad_answers() -> None:
    """A < 0 with s = 2 above the bound is not clipped: term 2, slope 2; with s = 1/2 it is clipped at 0.8."""
    high = run("gspo", [-1.0], logprobs=[-1.0 - LN2], advantages=[-1.0], sequence_ratio_mask=[1.0])
    low = run("gspo", [-1.0], logprobs=[-1.0 + LN2], advantages=[-1.0], sequence_ratio_mask=[1.0])
    assert (high[0], high[1]) == (pytest.approx([2.0]), pytest.approx([2.0]))
    assert (low[0], low[1]) == (pytest.approx([0.8]), pytest.approx([0.0]))


def test_gspo_without_any_masked_token_is_finite() -> None:
    """An all-zero mask means a mean over nothing: the ratio is 1, not nan."""
    terms, grad = run("gspo", [-1.0], logprobs=[-5.0], advantages=[3.0], sequence_ratio_mask=[0.0])
    assert (terms, grad) == ([-3.0], [-3.0])


def by_numpy(name: str, p, q, a, w, mask, rows, config: dict) -> np.ndarray:
    """The formulas of the papers over again, token by token, without torch."""
    out = np.zeros(len(p))
    for t in range(len(p)):
        r = math.exp(p[t] - q[t])
        lo, hi = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", math.inf)
        most = config.get("dual_clip_threshold", math.inf) * abs(a[t]) if a[t] < 0 else math.inf
        match name:
            case "cross_entropy":
                out[t] = -w[t] * p[t]
            case "importance_sampling":
                out[t] = -r * a[t]
            case "ppo":
                out[t] = min(most, -min(r * a[t], max(lo, min(hi, r)) * a[t]))
            case "cispo":
                out[t] = -max(lo, min(hi, r)) * p[t] * a[t]
            case "dro":
                pulled = q[t] != 0 or a[t] != 0
                out[t] = -(p[t] * a[t] - pulled * config["beta"] / 2 * (p[t] - q[t]) ** 2)
            case "sapo":
                tau = config["positive_temperature" if a[t] > 0 else "negative_temperature"]
                out[t] = -4 / tau / (1 + math.exp(-tau * (r - 1))) * a[t]
            case "gspo":
                counted = [u for u in range(len(p)) if rows[u] == rows[t] and mask[u]]
                s = math.exp(sum(p[u] - q[u] for u in counted) / max(1, len(counted)))
                out[t] = min(most, -min(s * a[t], max(lo, min(hi, s)) * a[t]))
    return out


@given(st.integers(0, 2**32 - 1), st.sampled_from(NAMES), st.booleans())
@settings(max_examples=90, deadline=None)
def test_every_loss_equals_its_formula_derived_again(seed: int, name: str, bounded: bool) -> None:
    """Random tokens of three sequences, against `by_numpy` to 1e-12."""
    rng = np.random.default_rng(seed)
    n = 12
    rows = sorted(rng.integers(0, 3, n).tolist())
    rows = [sorted(set(rows)).index(r) for r in rows]
    p, q, a, w = -rng.random(n) * 3, -rng.random(n) * 3, rng.normal(size=n), rng.random(n)
    q, a = q * rng.integers(0, 2, n), a * rng.integers(0, 2, n)  # either, both or none of them is 0
    mask = rng.integers(0, 2, n).astype(float)
    config = dict(LOSS_SPECS[name].config)
    if bounded and "dual_clip_threshold" in config:
        config["dual_clip_threshold"] = 1.5
    terms, _ = run(
        name, p.tolist(), rows, config, logprobs=q.tolist(), advantages=a.tolist(), weights=w.tolist(),
        sequence_ratio_mask=mask.tolist(),
    )  # fmt: skip
    assert terms == pytest.approx(by_numpy(name, p, q, a, w, mask, rows, config), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "dro"])
def test_gradients_pass_gradcheck(name: str) -> None:
    """Finite differences in fp64, on tokens inside and outside the clip, away from its kinks.

    cispo and gspo stop a gradient on purpose: theirs are checked against the derivative with the factor frozen.
    """
    p = torch.tensor([-1.0, -0.5, -1.3, -2.0], dtype=torch.float64, requires_grad=True)
    inputs = {
        "logprobs": torch.tensor([-1.1, -1.5, -0.5, -1.9], dtype=torch.float64),
        "advantages": torch.tensor([1.0, 2.0, -0.5, -1.0], dtype=torch.float64),
        "weights": torch.tensor([1.0, 0.0, 0.5, 2.0], dtype=torch.float64),
    }
    terms, row_N = TERMS[name], torch.tensor([0, 0, 1, 1])
    for dual_clip in (math.inf, 2.0):  # the second token's ratio is e, the third's exp(-0.8), the last one's exp(-0.1)
        config = {**LOSS_SPECS[name].config, "dual_clip_threshold": dual_clip}
        for sign in (1.0, -1.0):
            signed = {**inputs, "advantages": sign * inputs["advantages"]}
            assert torch.autograd.gradcheck(lambda x, i=signed, c=config: terms(x, i, c, row_N), (p,))


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_stopped_gradients_are_those_of_the_papers(seed: int) -> None:
    """cispo: -clip(r) A. gspo: -s A (the token's own score, times s) where the minimum is not the clip, else 0."""
    rng = np.random.default_rng(seed)
    p, q, a = -rng.random(6) * 2, -rng.random(6) * 2, rng.normal(size=6)
    rows, mask = [0, 0, 0, 1, 1, 1], [1.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    _, grad = run("cispo", p.tolist(), logprobs=q.tolist(), advantages=a.tolist())
    assert grad == pytest.approx(-np.clip(np.exp(p - q), 0.0, 4.0) * a)
    _, grad = run("gspo", p.tolist(), rows, logprobs=q.tolist(), advantages=a.tolist(), sequence_ratio_mask=mask)
    gap = p - q
    s = np.exp([(gap[0] + gap[2]) / 2] * 3 + [gap[3:].mean()] * 3)
    free = s * a <= np.clip(s, 0.8, 1.2) * a
    assert grad == pytest.approx(np.where(free, -s * a, 0.0))


@pytest.mark.parametrize("name", NAMES)
def test_zero_advantage_or_weight_means_zero_gradient(name: str) -> None:
    """Tokens outside the mask carry 0 and get exactly nothing (dro keeps its pull towards q: see below)."""
    n = 3
    zero = [0.0] * n
    q = [-1.0, -2.0, -3.0] if name == "dro" else [-1.5, -9.0, -0.1]
    terms, grad = run(
        name, [-1.0, -2.0, -3.0], logprobs=q, advantages=zero, weights=zero, sequence_ratio_mask=[1.0] * n
    )
    assert [abs(x) for x in terms + grad] == [0.0] * 2 * n


def test_dro_alone_keeps_a_gradient_at_zero_advantage() -> None:
    """Its quadratic term pulls p to q: rows without advantage are sent with it, and may be skipped with the others."""
    from rlvr.algorithms import Algorithm
    from rlvr.algorithms.advantages import GroupMeanAdvantage

    _, grad = run("dro", [-1.0], logprobs=[-3.0], advantages=[0.0])
    assert grad == pytest.approx([0.05 * 2.0])
    for name in LOSS_SPECS:
        clip = {"clip_low": 0.2, "clip_high": 0.2} if "clip_low_threshold" in LOSS_SPECS[name].config else {}
        row = Algorithm("x", GroupMeanAdvantage(), LOSSES.find(name)(**clip), "token_mean")
        assert row.has_gradient_at_zero == (name == "dro")
        _, grad = run(name, [-1.0], logprobs=[-3.0], advantages=[0.0], weights=[0.0], sequence_ratio_mask=[1.0])
        assert (grad == [0.0]) == (name != "dro")


@pytest.mark.parametrize(
    ("q", "advantage", "term", "slope"),
    [
        # p -2, beta 1/2: with the pull (1 / 4) (p - q)^2 - p A and (p - q) / 2 - A, without it -p A and -A
        (0.0, 0.0, 0.0, 0.0),  # a prompt as clients send it: no pull
        (-0.0, 0.0, 0.0, 0.0),
        (-3.0, 0.0, 0.25, 0.5),  # sampled, and no better than its group: pulled
        (0.0, 2.0, 5.0, -3.0),  # sampled with probability 1: pulled
        (-1e-7, 0.0, 1.0, -1.0),  # almost 0 is not 0
    ],
)
def test_dro_does_not_pull_a_token_without_log_prob_and_advantage(
    q: float, advantage: float, term: float, slope: float
) -> None:
    """In torch and in numpy, and the same tokens have a gradient; weights of its own decide alone."""
    from rlvr.clients.mock.mock_client import FORMULAS
    from rlvr.engine.losses import find_gradient_tokens

    terms, grad = run("dro", [-2.0], config={"beta": 0.5}, logprobs=[q], advantages=[advantage])
    assert (terms, grad) == (pytest.approx([term], abs=1e-6), pytest.approx([slope], abs=1e-6))
    inputs = {"logprobs": np.array([q]), "advantages": np.array([advantage])}
    found = FORMULAS["dro"](np.array([-2.0]), inputs, {"beta": 0.5}, np.array([0]))
    assert [part.tolist() for part in found] == [pytest.approx(terms), pytest.approx(grad)]
    tensors = {name: torch.tensor(value) for name, value in inputs.items()}
    assert find_gradient_tokens(tensors, LOSS_SPECS["dro"]).tolist() == [slope != 0]
    weighted, _ = run("dro", [-2.0], config={"beta": 0.5}, logprobs=[q], advantages=[0.0], beta_weights=[1.0])
    assert weighted == pytest.approx([(-2.0 - q) ** 2 / 4])


def test_dros_own_weights_scale_its_pull_alone() -> None:
    """p -1, q -3, A 2, beta 1/2: the pull is 1; with weights 1, 1/4 and 0 the terms are 3, 2.25 and 2."""
    terms, grad = run(
        "dro",
        [-1.0] * 3,
        config={"beta": 0.5},
        logprobs=[-3.0] * 3,
        advantages=[2.0] * 3,
        beta_weights=[1.0, 0.25, 0.0],
    )
    assert terms == pytest.approx([3.0, 2.25, 2.0])
    assert grad == pytest.approx([-1.0, -1.75, -2.0])


def test_a_weight_folds_into_dros_advantage_and_weights() -> None:
    """weight x loss(A, b) = loss(weight x A, weight x b), and with one weight for all also of beta."""
    p, q, a, w = [-1.0, -0.4], [-1.3, -0.3], [1.0, -2.0], [0.25, 0.5]
    plain, _ = run("dro", p, logprobs=q, advantages=a)
    scaled = [x * y for x, y in zip(a, w, strict=True)]
    folded, _ = run("dro", p, logprobs=q, advantages=scaled, beta_weights=w)
    assert folded == pytest.approx([x * y for x, y in zip(plain, w, strict=True)])
    constant, _ = run("dro", p, config={"beta": 0.05 * 0.25}, logprobs=q, advantages=[0.25 * x for x in a])
    assert constant == pytest.approx([0.25 * x for x in plain])


def divergence(estimator: int, p: list[float], reference: list[float], weights: list[float], dtype=torch.float64):
    """Terms and slopes of the KL penalty."""
    p_N = torch.tensor(p, dtype=dtype, requires_grad=True)
    given = {
        "reference_logprobs": torch.tensor(reference, dtype=dtype),
        "kl_weights": torch.tensor(weights, dtype=dtype),
    }
    terms = kl_penalty(p_N, given, float(estimator))
    (grad,) = torch.autograd.grad(terms.sum(), p_N)
    return terms.tolist(), grad.tolist()


@pytest.mark.parametrize(
    ("estimator", "term", "slope"),
    [
        # reference = p + ln 2, so d = ln 2: k1 = -ln 2; k2 = ln(2)^2 / 2, slope -d; k3 = 2 - 1 - ln 2, slope 1 - 2
        (1, -LN2, 1.0), (2, LN2**2 / 2, -LN2), (3, 1 - LN2, -1.0),
    ],
)  # fmt: skip
def test_kl_penalties_by_hand(estimator: int, term: float, slope: float) -> None:
    terms, grad = divergence(estimator, [-3.0, -3.0, -3.0], [-3.0 + LN2] * 2 + [-3.0], [1.0, 0.5, 1.0])
    at_zero = 1.0 if estimator == 1 else 0.0
    assert terms == pytest.approx([term, 0.5 * term, 0.0])
    assert grad == pytest.approx([slope, 0.5 * slope, at_zero])


@pytest.mark.parametrize("estimator", [1, 2, 3])
def test_a_token_that_does_not_count_has_no_penalty_however_unlikely_it_is(estimator: int) -> None:
    """Weight 0 on a prompt's token of log-prob -95 (exp(95) is beyond fp32): exactly nothing, and no nan."""
    terms, grad = divergence(estimator, [-95.0, -1.0], [0.0, -1.0], [0.0, 1.0], torch.float32)
    assert [abs(x) for x in (terms[0], grad[0])] == [0.0, 0.0]
    assert all(math.isfinite(x) for x in terms + grad)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_a_positive_weight_folds_into_the_advantage(name: str) -> None:
    """weight x loss(A) = loss(weight x A): the reduction can travel inside the advantage."""
    p, q, a = [-1.0, -0.4, -2.0], [-1.3, -0.3, -1.0], [1.0, -2.0, 0.5]
    plain, _ = run(name, p, logprobs=q, advantages=a, sequence_ratio_mask=[1.0] * 3)
    folded, _ = run(name, p, logprobs=q, advantages=[0.25 * x for x in a], sequence_ratio_mask=[1.0] * 3)
    assert folded == pytest.approx([0.25 * x for x in plain])


def test_the_defaults_are_tinkers() -> None:
    """Thresholds and beta where the caller gives none, and what each loss needs."""
    clip = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    defaults = {
        "cross_entropy": {},
        "importance_sampling": {},
        "ppo": {**clip, "dual_clip_threshold": math.inf},  # the protocol has no second bound
        "gspo": {**clip, "dual_clip_threshold": math.inf},
        "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
        "dro": {"beta": 0.05},
    }
    assert {name: LOSS_SPECS[name].config for name in defaults} == defaults
    assert LOSS_SPECS["gspo"].required == ("logprobs", "advantages", "sequence_ratio_mask")
    assert LOSS_SPECS["cross_entropy"].required == ("weights",)


def gradients(loss: torch.Tensor, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As a step has them: chunks add to the leaves, which `autograd.grad` does not allow."""
    loss.backward()
    return tuple(leaf.grad for leaf in leaves if leaf.grad is not None)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_log_probs_in_chunks_equal_the_whole(chunk: int) -> None:
    """Values and gradients of head and hidden states, whatever the chunk; fp32 out even from a bf16 head."""
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 11, bias=False)
    hidden = torch.randn(7, 8, requires_grad=True)
    targets = torch.tensor([0, 3, 10, 5, 5, 1, 9])
    weights = torch.randn(7)
    expected = (head(hidden) / 0.7).log_softmax(-1)[torch.arange(7), targets]
    wanted = torch.autograd.grad((expected * weights).sum(), (hidden, head.weight))
    got, _ = token_logprobs(head, hidden, targets, 0.7, chunk)
    found = gradients((got * weights).sum(), hidden, head.weight)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(found, wanted)
    narrow, _ = token_logprobs(head.to(torch.bfloat16), hidden.detach().bfloat16(), targets, 1.0, chunk)
    assert narrow.dtype == torch.float32


def test_chunks_never_hold_the_whole_matrix() -> None:
    """The head sees at most `chunk` tokens at a time, in the backward pass too."""
    seen: list[int] = []
    head = torch.nn.Linear(4, 50, bias=False)
    head.register_forward_hook(lambda _m, inputs, _o: seen.append(inputs[0].shape[0]))
    hidden = torch.randn(10, 4, requires_grad=True)
    token_logprobs(head, hidden, torch.arange(10), 1.0, 4)[0].sum().backward()
    assert sorted(seen) == [2, 2, 4, 4, 4, 4]  # three chunks, each forward and again in backward


@pytest.mark.parametrize("frozen", [False, True])
def test_chunks_add_to_the_heads_gradient_one_by_one(frozen: bool) -> None:
    """So that no second table holds their sum; a head over hidden states without a gradient learns all the same."""
    torch.manual_seed(0)
    head = torch.nn.Linear(4, 50, bias=False)
    added: list[bool] = []
    head.weight.register_post_accumulate_grad_hook(lambda _: added.append(True))
    hidden, targets = torch.randn(10, 4, requires_grad=not frozen), torch.arange(10)
    token_logprobs(head, hidden, targets, 1.0, 4)[0].sum().backward()
    assert len(added) == (1 if frozen else 3) and head.weight.grad is not None
    found, head.weight.grad = head.weight.grad, None
    head(hidden).log_softmax(-1)[targets, targets].sum().backward()
    torch.testing.assert_close(found, head.weight.grad)


@pytest.mark.parametrize("chunk", [3, 100])
def test_entropies_come_with_the_log_probs(chunk: int) -> None:
    """-sum p log p of each token's distribution at the temperature, with its gradient; uniform logits give ln V."""
    torch.manual_seed(1)
    head = torch.nn.Linear(8, 11, bias=False)
    hidden, targets = torch.randn(7, 8, requires_grad=True), torch.tensor([0, 3, 10, 5, 5, 1, 9])
    table = (head(hidden) / 0.7).log_softmax(-1)
    expected = -(table.exp() * table).sum(-1)
    weights = torch.randn(7)
    wanted = torch.autograd.grad((expected * weights).sum(), (hidden, head.weight))
    _, entropy = token_logprobs(head, hidden, targets, 0.7, chunk, entropy=True)
    assert entropy is not None
    found = gradients((entropy * weights).sum(), hidden, head.weight)
    torch.testing.assert_close(entropy, expected)
    torch.testing.assert_close(found, wanted)
    _, uniform = token_logprobs(head, torch.zeros(1, 8), targets[:1], 1.0, chunk, entropy=True)
    assert uniform is not None and float(uniform.detach()) == pytest.approx(math.log(11))


@pytest.mark.parametrize("gap", [21.0, 89.0, 800.0])
@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "gspo", "cispo"])
def test_a_ratio_beyond_every_float_is_finite_and_keeps_its_slope(name: str, gap: float) -> None:
    """The ratio counts as exp(20). In fp32, as the engine computes, exp(89) is inf, and inf x 0 was nan.

    A = 1: ppo and gspo clip at 1.2 without a slope. A = -1: exp(20), whose slope is itself. A = 0: nothing. cispo's
    weight is its bound 4.
    """
    p = torch.full((3,), -1.0, requires_grad=True)
    a = torch.tensor([1.0, -1.0, 0.0])
    inputs = {"logprobs": p.detach() - gap, "advantages": a, "sequence_ratio_mask": torch.ones(3)}
    config = dict(LOSS_SPECS[name].config)
    terms = TERMS[name](p, inputs, config, torch.arange(3))
    (slopes,) = torch.autograd.grad(terms.sum(), p)
    huge = math.exp(20.0)
    expected, rises = {
        "importance_sampling": ([-huge, huge, 0.0], [-huge, huge, 0.0]),
        "ppo": ([-1.2, huge, 0.0], [0.0, huge, 0.0]),
        "gspo": ([-1.2, huge, 0.0], [0.0, huge, 0.0]),
        "cispo": ([4.0, -4.0, 0.0], [-4.0, 4.0, 0.0]),  # -4 p A at p -1
    }[name]
    assert terms.tolist() == pytest.approx(expected, rel=1e-6)
    assert slopes.tolist() == pytest.approx(rises, rel=1e-6)
    plain = {key: value.numpy().astype(np.float64) for key, value in inputs.items()}
    mock = FORMULAS[name](p.detach().numpy().astype(np.float64), plain, config, np.arange(3))
    assert [part.tolist() for part in mock] == [pytest.approx(expected), pytest.approx(rises)]


@pytest.mark.parametrize("gap", [21.0, 89.0, 800.0])
def test_k3_beyond_every_float_is_finite(gap: float) -> None:
    """exp(20) - 1 - d with the slope 1 - exp(20) in p, in torch, in numpy, and in a reward."""
    p = torch.tensor([-1.0], requires_grad=True)
    k3 = kl_penalty(p, {"kl_weights": torch.ones(1), "reference_logprobs": p.detach() + gap}, 3)
    (slope,) = torch.autograd.grad(k3.sum(), p)
    value, rise = math.exp(20.0) - 1 - gap, 1 - math.exp(20.0)
    assert (k3.item(), slope.item()) == (pytest.approx(value, rel=1e-6), pytest.approx(rise, rel=1e-6))
    mock = kl_terms(np.array([-1.0]), np.array([-1.0 + gap]), 3)
    assert [part.item() for part in mock] == [pytest.approx(value), pytest.approx(rise)]
    assert KL_TERMS["k3"](np.array([gap])).item() == pytest.approx(value)
