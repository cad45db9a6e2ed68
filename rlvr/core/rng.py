"""Counter-based random numbers: every draw of a run is a pure function of its purpose.

A stateful generator gives other numbers after a restart, with another worker count or another batch order. Here, a
draw is `uniform(key("rollout", seed, step, task, sample), position)`: nothing is stored, nothing is consumed, so a
resumed run and an undisturbed one see the same numbers. `uniforms` is the same function over numpy arrays and
`rlvr.engine.sampling.uniform` over tensors; tests hold the three together.

Not for secrets: keys are hashes of public facts.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np

_MASK = (1 << 64) - 1
GOLDEN, MIX1, MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def key(*parts: int | str) -> int:
    """A 63-bit key for a purpose, e.g. `key("rollout", 42, 7, "task-3")`. Order and type of the parts matter."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def bits(key: int, position: int) -> int:
    """64 pseudo-random bits: the SplitMix64 output function (Steele et al. 2014) at `key + (position + 1) * golden`."""
    z = (key + (position + 1) * GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * MIX1) & _MASK
    z = ((z ^ (z >> 27)) * MIX2) & _MASK
    return z ^ (z >> 31)


def uniform(key: int, position: int = 0) -> float:
    """A float64 in (0, 1), both ends out so that logarithms are finite: 52 bits and a half (53 would round to 1)."""
    return ((bits(key, position) >> 12) + 0.5) * 2.0**-52


def uniforms(keys: Sequence[int], count: int) -> np.ndarray:
    """`uniform(key, position)` for every key and the positions 0 to count - 1: [len(keys), count], the same bits."""
    positions = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)  # unsigned products wrap, as masks do
    z = np.asarray(keys, dtype=np.uint64)[:, None] + positions
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX2)
    z = z ^ (z >> np.uint64(31))
    return ((z >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def integer(n: int, key: int, position: int = 0) -> int:
    """An integer in [0, n). The bias of the multiply-shift is below n / 2**64."""
    return (bits(key, position) * n) >> 64


def choice(weights: Sequence[float], key: int, position: int = 0) -> int:
    """An index drawn in proportion to non-negative finite `weights`."""
    total = math.fsum(weights)
    if not (total > 0 and math.isfinite(total) and min(weights) >= 0):
        raise ValueError(f"choice: weights {list(weights)} must be finite, not negative and not all zero")
    target, acc = uniform(key, position) * total, 0.0
    for index, weight in enumerate(weights):
        acc += weight
        if target < acc:
            return index
    return max(i for i, w in enumerate(weights) if w > 0)


def permutation(n: int, key: int) -> list[int]:
    """A permutation of range(n), by sorting hashes: the same on every platform and library version."""
    return sorted(range(n), key=lambda i: bits(key, i))
