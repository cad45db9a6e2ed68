"""Counted randomness: pure functions of their key, uniform, independent, and the same over tensors."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import scipy
from hypothesis import given
from hypothesis import strategies as st

from rlvr.core import rng

PINNED_KEY = 3647848541417240829
PINNED_BITS = [11285346819934539226, 14320305074453288881, 4575780000678344071]
SMALL = 1e-4  # a p-value below this fails; everything here is fixed by its keys, so a passing test always passes


def test_rng_are_pinned() -> None:
    """Literals: a change of these numbers changes every run that was ever resumed."""
    assert rng.key("rollout", 42, 7, "task-3") == PINNED_KEY
    assert [rng.bits(PINNED_KEY, i) for i in (0, 1, 2**40)] == PINNED_BITS


def test_splitmix_agrees_with_its_published_stream() -> None:
    """SplitMix64 from state 1234567: the first outputs of the reference implementation."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [rng.bits(1234567, i) for i in range(4)] == expected


def test_keys_do_not_depend_on_the_process() -> None:
    """No salted hash: another interpreter gives the same key."""
    code = "from rlvr.core import rng; print(rng.key('a', 1))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert int(out.stdout) == rng.key("a", 1)


def test_key_tells_order_type_and_count_apart() -> None:
    """1 and '1', (a, b) and (b, a), (ab) and (a, b) are different purposes; all keys fit 63 bits."""
    keys = [rng.key(*parts) for parts in (("1",), (1,), ("a", "b"), ("b", "a"), ("ab",), ("a",), (), (0,), (-1,))]
    assert len(set(keys)) == len(keys)
    assert all(0 <= k < 1 << 63 for k in keys)


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40))
def test_uniform_is_strictly_between_zero_and_one(key: int, position: int) -> None:
    """Both logarithms that Gumbel noise takes are finite."""
    u = rng.uniform(key, position)
    assert 0.0 < u < 1.0
    assert math.isfinite(-math.log(-math.log(u)))


def test_the_extreme_bits_stay_strictly_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """All bits one must not round up to 1.0 (its Gumbel noise would be infinite), all bits zero not give 0."""
    monkeypatch.setattr(rng, "bits", lambda key, position: (1 << 64) - 1)
    assert rng.uniform(0) < 1.0
    monkeypatch.setattr(rng, "bits", lambda key, position: 0)
    assert rng.uniform(0) > 0.0


@pytest.mark.parametrize("along", ["positions", "keys"])
def test_uniform_is_uniform_and_pairs_are_independent(along: str) -> None:
    """Chi-square over 20 cells and over 10 x 10 cells of neighbours, along positions and along keys."""
    n = 20_000
    if along == "positions":
        u = [rng.uniform(rng.key("chi"), i) for i in range(n)]
    else:
        u = [rng.uniform(rng.key("chi", i)) for i in range(n)]
    cells = [0] * 20
    pairs = [0] * 100
    for i, x in enumerate(u):
        cells[int(x * 20)] += 1
        if i % 2:
            pairs[int(u[i - 1] * 10) * 10 + int(x * 10)] += 1
    assert scipy.stats.chisquare(cells).pvalue > SMALL
    assert scipy.stats.chisquare(pairs).pvalue > SMALL


def test_torch_draws_equal_python_draws_bit_for_bit() -> None:
    """engine.sampling.uniform over int64 tensors, with the largest keys and positions, broadcast."""
    import torch

    from rlvr.engine.sampling import uniform

    keys = [0, 1, 2**63 - 1, *(rng.key("torch", i) for i in range(200))]
    positions = [0, 1, 2, 151_935, 2**40]
    got = uniform(torch.tensor(keys)[:, None], torch.tensor(positions)[None])
    assert got.dtype == torch.float64
    assert got.tolist() == [[rng.uniform(k, p) for p in positions] for k in keys]


@given(st.integers(1, 10**9), st.integers(0, 2**63 - 1))
def test_integer_stays_in_its_range(n: int, key: int) -> None:
    """[0, n) for any n."""
    assert 0 <= rng.integer(n, key) < n


def test_integer_is_uniform() -> None:
    """Chi-square over 7 values."""
    counts = [0] * 7
    for i in range(7_000):
        counts[rng.integer(7, rng.key("int"), i)] += 1
    assert scipy.stats.chisquare(counts).pvalue > SMALL


def test_choice_is_in_proportion_and_never_takes_a_zero_weight() -> None:
    """Weights 1, 0, 3, 4: chi-square of 8,000 draws, and index 1 never."""
    counts = [0, 0, 0, 0]
    for i in range(8_000):
        counts[rng.choice([1, 0, 3, 4], rng.key("choice"), i)] += 1
    assert counts[1] == 0
    assert scipy.stats.chisquare([counts[0], *counts[2:]], [1000, 3000, 4000]).pvalue > SMALL


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [1.0, -1.0, 2.0], [math.nan], [math.inf, 1.0]])
def test_choice_refuses_weights_that_are_no_distribution(weights: list[float]) -> None:
    """Empty, all zero, negative, nan and infinite weights are the caller's mistake."""
    with pytest.raises(ValueError, match="choice: weights"):
        rng.choice(weights, 1)


@given(st.integers(0, 200), st.integers(0, 2**63 - 1))
def test_permutation_is_a_permutation(n: int, key: int) -> None:
    """Every index once, the same every time."""
    assert sorted(rng.permutation(n, key)) == list(range(n))
    assert rng.permutation(n, key) == rng.permutation(n, key)


def test_permutations_are_uniform() -> None:
    """The 24 orders of four things, over 4,800 keys."""
    counts: dict[tuple[int, ...], int] = {}
    for i in range(4_800):
        order = tuple(rng.permutation(4, rng.key("perm", i)))
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert scipy.stats.chisquare(list(counts.values())).pvalue > SMALL


def test_uniforms_are_the_scalar_draws() -> None:
    """The same bits for any keys, the largest included, at every position."""
    keys = [0, 1, PINNED_KEY, 2**63 - 1, 2**64 - 1]
    table = rng.uniforms(keys, 70)
    assert table.shape == (5, 70)
    assert table.tolist() == [[rng.uniform(key, position) for position in range(70)] for key in keys]
