"""How far two float32 results of the same calculation may be apart, from the lengths of its sums.

A kernel chosen for the processor, the number of threads, the rows beside a row in a batch: each changes the order in
which a sum adds its terms, and with it the rounding. Every addition changes its result by a factor 1 + d with |d| <=
u = 2^-24 (half of `finfo.eps`). With independent d of mean 0, a chain of n additions is off by at most LAMBDA sqrt(n)
u times the sum of the terms' sizes, but for a probability of 2 exp(-LAMBDA^2 / 2) = 7e-4 (Higham and Mary, SIAM J.
Sci. Comput. 41(5), 2019, theorem 2.4). Two results of the same sum are then LAMBDA sqrt(n) eps apart at most. Terms
of both signs make the real error smaller still, which is the margin: for the kernels of all processors that could be
tried, with one thread and with two, results were apart by less than a third of the bound. A bf16 product in place of
a float32 one (eps of 2^-7), a row that sees another row, and a missing term are each far beyond it.

Compare gradients before a step, and begin each call at the same weights: no bound in eps holds for two computations
after steps of their own. The loss is curved, so at weights that rounding parted the gradients are further apart than
rounding parts them, and each step widens the gap, by more the larger the learning rate is. The losses of
`tests/kit/loss_calls.py`, one a step, by two computations: the log-probs are equal at the first call, 3e-6 apart at the
third and 1.7e-3 at the eighth with a learning rate of 0.05; with 0.005 they stay within 4e-6. That AdamW divides a
gradient by its own size, so that an entry which is rounding and nothing else moves a weight by up to the learning rate,
is the smaller part: without the entries below 1e-5 of the largest, the gap is the same.

Compare results of the same calculation, done once more by the same program on the same machine, without any of this:
they are equal bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from rlvr.core import rng
from rlvr.core.messages import SampledSequence

LAMBDA = 4.0

# The longest chain of sums through one of the models of tiny.py: each stage hands its relative error to the next,
# so their lengths add up. Per layer: two norms (32), the query (32), its product with a key (16), the softmax and the
# weighted sum over up to 64 tokens, the output (32), the two products of the MLP (32 and, for gpt2, 128). Then a norm
# (32), the head (32) and the sum over the vocabulary (17).
LAYER = 2 * 32 + 32 + 16 + 2 * 64 + 32 + 32 + 128
FORWARD = 2 * LAYER + 32 + 32 + 17
# The way back has the same sums, and those over the tokens of a batch (up to 200) for every weight.
BACKWARD = 2 * FORWARD + 200


def tolerance(terms: int, size: float = 1.0, dtype: torch.dtype = torch.float32) -> float:
    """How far two sums of `terms` terms may be apart, `size` being the sum of the terms' absolute values."""
    return LAMBDA * math.sqrt(terms) * torch.finfo(dtype).eps * size


def close_logprobs(expected: Iterable[float], temperature: float = 1.0) -> Any:
    """These log-probs of a tiny model, up to the rounding of one pass.

    Logits are of the size of the largest log-prob, and of 1 at least; a temperature divides their error too.
    """
    values = np.asarray(list(expected), dtype=np.float64)
    size = float(np.abs(values[np.isfinite(values)]).max(initial=1.0 / temperature))
    return pytest.approx(values, rel=0.0, abs=tolerance(FORWARD, size))


def count_equal_tokens(one: SampledSequence, other: SampledSequence, seed: int, index: int) -> int:
    """How many tokens two samples of completion `index` begin with alike: all, or up to a draw that rounding decides.

    Such a draw lies within rounding of the boundary of the two tokens in the running sum of the probabilities. Ask for
    every token's log-prob (`topk_sample`); without filters and at the temperature 1.
    """
    pairs = enumerate(zip(one.tokens, other.tokens, strict=False))
    differing = next((i for i, (a, b) in pairs if a != b), None)
    if differing is None:
        assert one.tokens == other.tokens
        return len(one.tokens)
    assert one.topk_logprobs is not None
    logprobs = np.array([value for _, value in sorted(one.topk_logprobs[differing])], dtype=np.float64)
    running = np.exp(logprobs).cumsum()
    draw = rng.uniform(rng.key("sample", seed, index), differing) * running[-1]
    low, high = sorted((one.tokens[differing], other.tokens[differing]))
    bound = tolerance(FORWARD, float(np.abs(logprobs).max()))
    assert np.abs(running[low:high] - draw).max() <= bound, f"token {differing}: {low} and {high}, draw {draw:.9f}"
    return differing


def close_loss(expected: float, terms: Iterable[float]) -> Any:
    """This sum over tokens, each term with the rounding of one pass, and independent of the others."""
    return pytest.approx(expected, rel=0.0, abs=tolerance(FORWARD, math.hypot(*terms)))


def assert_gradients_close(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    """Two gradients of a tiny model; an entry's terms are of the size of the largest entry at most."""
    assert one.keys() == other.keys()
    size = max(float(g.abs().max()) for g in other.values())
    assert size > 0
    bound = tolerance(FORWARD + BACKWARD, size)
    for name in one:
        apart = float((one[name] - other[name]).abs().max())
        assert apart <= bound, f"{name}: {apart:.2e} apart, {bound:.2e} allowed"


def close_norm(gradients: Mapping[str, torch.Tensor]) -> Any:
    """The norm of these gradients of a tiny model, each entry as far off as `assert_gradients_close` allows."""
    norm = math.hypot(*(float(g.double().norm()) for g in gradients.values()))
    size = max(float(g.abs().max()) for g in gradients.values())
    entries = sum(g.numel() for g in gradients.values())
    # By the triangle inequality norms are apart by the norm of the difference at most.
    return pytest.approx(norm, rel=0.0, abs=tolerance(FORWARD + BACKWARD, size) * math.sqrt(entries))
