"""From logits to tokens: filters against brute force, frequencies, greedy, and which log-probs come back."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import scipy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rlvr.core import rng
from rlvr.engine import sampling
from rlvr.engine.sampling import GUMBEL_ABOVE, draw_next_tokens, filter_logprobs, sample
from tests.kit.rounding import tolerance

SMALL = 1e-4


def keys(n: int, purpose: str) -> torch.Tensor:
    return torch.tensor([rng.key(purpose, i) for i in range(n)])


def kept_by_hand(probs: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Which tokens stay, one by one, from the definitions; each cut looks at what the one before left."""
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    order = order if top_k == -1 else order[:top_k]
    whole, before, kept = sum(probs[order]), 0.0, [order[0]]
    for token in order[1:]:
        before += probs[kept[-1]]
        if top_p < 1 and before / whole >= top_p:
            break
        kept.append(token)
    return {token for token in kept if probs[token] >= min_p * probs[order[0]]}


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([-1, 1, 3, 50]),
    st.sampled_from([1.0, 0.05, 0.5, 0.9]),
    st.sampled_from([0.0, 0.02, 0.3]),
)
@settings(max_examples=150, deadline=None)
def test_filters_equal_brute_force(seed: int, top_k: int, top_p: float, min_p: float) -> None:
    """top_k, top_p and min_p, alone and together; what stays keeps its log-prob, the rest is -inf."""
    logits = np.random.default_rng(seed).normal(size=(2, 20)) * 2
    logprobs = torch.tensor(logits).log_softmax(-1)
    off = torch.tensor([-1]), torch.tensor([1.0]), torch.tensor([0.0])
    got = filter_logprobs(
        logprobs,
        torch.cat([torch.tensor([top_k]), off[0]]),
        torch.cat([torch.tensor([top_p], dtype=torch.float64), off[1].double()]),
        torch.cat([torch.tensor([min_p], dtype=torch.float64), off[2].double()]),
    )
    expected = kept_by_hand(logprobs[0].exp().numpy(), top_k, top_p, min_p)
    assert {i for i in range(20) if got[0, i] > -math.inf} == expected
    assert torch.equal(got[0, sorted(expected)], logprobs[0, sorted(expected)])
    assert torch.equal(got[1], logprobs[1])  # a row that asks for none is untouched beside one that does


def test_filters_by_hand() -> None:
    """Probabilities 0.5, 0.25, 0.125, 0.125: the nucleus of 0.6 has two, min_p 0.4 two, top_k 3 three."""
    logprobs = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64).log()

    def count_kept(top_k: int = -1, top_p: float = 1.0, min_p: float = 0.0) -> int:
        got = filter_logprobs(logprobs, torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))
        return int((got > -math.inf).sum())

    assert count_kept(top_p=0.6) == 2  # 0.5 is not enough, 0.75 is
    assert count_kept(top_p=0.5) == 1  # exactly enough
    assert count_kept(top_p=1e-9) == 1
    assert count_kept(min_p=0.4) == 2  # 0.25 >= 0.4 * 0.5
    assert count_kept(top_k=3) == 3
    assert count_kept(top_p=0.76) == 3  # 0.75 is not enough
    assert count_kept(top_k=2, top_p=0.6) == 1  # of the two that stay the first has 2/3
    assert count_kept(top_k=3, top_p=0.76) == 2  # 6/7 of the three
    assert count_kept(top_k=3, top_p=0.6, min_p=0.6) == 1


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([-1, 1, 2, 5, 40, 200]),
    st.sampled_from([1.0, 0.05, 0.5, 0.9, 0.99]),
    st.sampled_from([0.0, 0.02, 0.3]),
    st.sampled_from([0.5, 1.0, 3.0]),
)
@settings(max_examples=300, deadline=None)
def test_what_stays_is_what_the_warpers_of_transformers_leave(
    seed: int, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    """In the order of its `generate`; random logits in fp64, where no two are equal and no sum meets a limit."""
    logits = torch.tensor(np.random.default_rng(seed).normal(size=(3, 60)) * 2)
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    warpers = [TopKLogitsWarper(top_k)] if top_k > 0 else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    for warp in warpers:
        scores = warp(None, scores)
    got = filter_logprobs(
        (logits / temperature).log_softmax(-1),
        torch.full((3,), top_k), torch.full((3,), top_p, dtype=torch.float64), torch.full((3,), min_p),
    )  # fmt: skip
    assert torch.equal(got > -math.inf, scores > -math.inf)
    assert torch.allclose(got.softmax(-1), scores.softmax(-1), rtol=1e-12, atol=0)


def test_ties_keep_exactly_top_k() -> None:
    """Equal logits: k tokens stay, not all of them."""
    got = filter_logprobs(
        torch.zeros(1, 8).log_softmax(-1), torch.tensor([3]), torch.tensor([1.0]), torch.tensor([0.0])
    )
    assert int((got > -math.inf).sum()) == 3


@pytest.mark.parametrize("size", [7, GUMBEL_ABOVE + 4])
def test_pick_draws_in_proportion_and_never_an_impossible_token(size: int) -> None:
    """Chi-square on both sides of the change of method: a few live tokens among -inf ones, first and last included."""
    live = {0: 0.1, 3: 0.2, 4: 0.4, size - 2: 0.3}
    row = torch.full((size,), -math.inf)
    for token, p in live.items():
        row[token] = math.log(p)
    counts = dict.fromkeys(live, 0)
    n, step = 4_000, 250 if size > GUMBEL_ABOVE else 4_000
    all_keys = keys(n, f"pick {size}")
    for at in range(0, n, step):
        tokens = draw_next_tokens(row.expand(step, size), all_keys[at : at + step], torch.arange(at, at + step))
        for token in tokens.tolist():
            counts[token] += 1  # a KeyError here is a token of probability zero
    assert scipy.stats.chisquare(list(counts.values()), [p * n for p in live.values()]).pvalue > SMALL


@pytest.mark.parametrize("size", [7, GUMBEL_ABOVE + 4])
def test_pick_needs_no_normalisation(size: int) -> None:
    """What a filter leaves does not sum to one: shifting all log-probs draws the same tokens."""
    row = torch.randn(size, generator=torch.Generator().manual_seed(0)).double()
    one, other = (
        draw_next_tokens((row + shift).expand(50, size), keys(50, "shift"), torch.arange(50)) for shift in (0.0, -1.0)
    )
    assert torch.equal(one, other)


@pytest.mark.parametrize("size", [5, GUMBEL_ABOVE + 4])
def test_extreme_noise_still_picks_a_possible_token(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draw at either end of (0, 1), where rounding bites, takes the first or last token that has probability."""
    row = torch.full((1, size), -math.inf)
    row[0, 1], row[0, 3] = math.log(0.7), math.log(0.3)
    for u in (2.0**-53, 1 - 2.0**-53):

        def fixed_uniform(k: torch.Tensor, p: torch.Tensor, u: float = u) -> torch.Tensor:
            return torch.full(torch.broadcast_shapes(k.shape, p.shape), u, dtype=torch.float64)

        monkeypatch.setattr(sampling, "uniform", fixed_uniform)
        token = int(draw_next_tokens(row, torch.tensor([1]), torch.tensor([0])))
        assert token == (1 if size > GUMBEL_ABOVE else {2.0**-53: 1}.get(u, 3))


def test_a_row_draws_the_same_whatever_its_neighbours() -> None:
    """A token is a function of the row's key and position: order and company do not matter."""
    for size in (11, GUMBEL_ABOVE + 1):
        rows = torch.randn(6, size, generator=torch.Generator().manual_seed(1))
        k, positions = keys(6, "rows"), torch.arange(6)
        whole = draw_next_tokens(rows, k, positions).tolist()
        assert [int(draw_next_tokens(rows[i : i + 1], k[i : i + 1], positions[i : i + 1])) for i in range(6)] == whole
        order = torch.tensor([3, 1, 5, 0, 2, 4])
        assert draw_next_tokens(rows[order], k[order], positions[order]).tolist() == [whole[i] for i in order.tolist()]


def test_gumbel_noise_of_one_row_does_not_repeat_along_positions() -> None:
    """Tokens and positions must not share a counter: flat logits over many positions hit fresh tokens."""
    size = GUMBEL_ABOVE + 1
    tokens = draw_next_tokens(torch.zeros(200, size), torch.full((200,), 12345), torch.arange(200)).tolist()
    assert len(set(tokens)) > 185  # 200 of 4097: about 195 distinct are expected
    steps = {b - a for a, b in itertools.pairwise(tokens)}
    assert len(steps) > 185  # a shared counter would move the maximum by one each time


def draw_tokens(logits: torch.Tensor, temperature: Any, filters: Any = None, n: int | None = None):
    n = n or logits.shape[0]
    temps = torch.full((n,), temperature) if isinstance(temperature, float) else torch.tensor(temperature)
    return sample(logits.expand(n, -1), temps, keys(n, "sample"), torch.arange(n), filters)[:2]


def close_to(expected: float, largest: float) -> Any:
    """A log-prob of one of three logits up to `largest`: a division, three exponentials, their sum, a difference."""
    return pytest.approx(expected, rel=0.0, abs=tolerance(8, largest))


def test_greedy_takes_the_best_with_its_log_prob_at_temperature_one() -> None:
    """Temperature 0, beside a row that samples."""
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, 0.0, 0.0]])
    tokens, logprobs = draw_tokens(logits, [0.0, 1.0])
    assert tokens[0] == 1
    assert float(logprobs[0]) == close_to(3 - math.log(math.e + math.e**2 + math.e**3), 3)
    assert float(logprobs[1]) == close_to(-math.log(3), 3)


def test_log_probs_are_at_the_temperature_and_before_the_filters() -> None:
    """softmax(logits / T) of the whole vocabulary, though top_k 1 leaves one token (whose filtered log-prob is 0)."""
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    only_best = (torch.tensor([1]), torch.tensor([1.0]), torch.tensor([0.0]))
    tokens, logprobs = draw_tokens(logits, 0.5, only_best)
    assert tokens.tolist() == [1]
    assert float(logprobs[0]) == close_to(6 - math.log(math.e**2 + math.e**6 + math.e**4), 6)


def test_the_temperature_shapes_the_frequencies() -> None:
    """Chi-square of 4,000 draws at T = 0.5 and 2 against softmax(logits / T)."""
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    for temperature in (0.5, 2.0):
        tokens, _ = draw_tokens(logits, temperature, n=4_000)
        expected = (logits[0].double() / temperature).softmax(-1) * 4_000
        assert scipy.stats.chisquare(torch.bincount(tokens, minlength=3).tolist(), expected.tolist()).pvalue > SMALL


def test_half_precision_logits_are_scored_in_fp32() -> None:
    """bf16 logits give fp32 log-probs, equal to those of the same numbers in fp32."""
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(2)).bfloat16()
    tokens, logprobs = draw_tokens(logits, 1.0)
    assert logprobs.dtype == torch.float32
    assert torch.equal(logprobs, logits.float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0])
