"""Sampling from logits: counter-based random draws, filters, log-probs. Pure functions over tensors, no model.

Legend: R = rows, V = vocabulary, N = completions, several of which may sample from one row (`of_N`; None: one each).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rlvr.core.messages import LikeliestTokens, NonFiniteError, PromptAlternatives, PromptTargets
from rlvr.core.rng import GOLDEN, MIX1, MIX2
from rlvr.engine.losses import token_logprobs

# Inverse CDF needs one random draw a row, Gumbel-max one a value. Above this many tokens rounding in the cumulative sum
# flips more choices than Gumbel-max does.
GUMBEL_ABOVE = 4096
BLOCK = 256  # tokens that Gumbel-max first draws as one
# Probabilities per draw: the fp64 copies of the inverse CDF stay in a core's cache; blocks, or a device, want more.
AT_ONCE, AT_ONCE_IN_BLOCKS, AT_ONCE_ON_DEVICE = 1 << 16, 1 << 20, 1 << 24


def _as_int64(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift(x: Tensor, by: int) -> Tensor:
    """Logical right shift: torch's int64 shift keeps the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def uniform(keys: Tensor, positions: Tensor) -> Tensor:
    """`rlvr.core.rng.uniform` over int64 tensors that broadcast: float64 in (0, 1), the same bits."""
    z = keys + (positions + 1) * _as_int64(GOLDEN)
    z = (z ^ _shift(z, 30)) * _as_int64(MIX1)
    z = (z ^ _shift(z, 27)) * _as_int64(MIX2)
    z = z ^ _shift(z, 31)
    return (_shift(z, 12).double() + 0.5) * 2.0**-52


def filter_logprobs(logprobs_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> Tensor:
    """Log-probs with the tokens outside top-k, the top-p nucleus or min-p x the best probability set to -inf.

    In that order, as transformers' logits warpers: the nucleus is of what top-k leaves, renormalised. Of equal tokens
    at the edge exactly as many stay as top-k says (theirs keeps all). The best token always stays. top_k -1, top_p 1
    and min_p 0 mean off.
    """
    ordered, order = logprobs_RV.double().sort(-1, descending=True)
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    in_top_k = rank < torch.where(top_k_R < 0, ordered.shape[-1], top_k_R)[:, None]
    probs = ordered.exp() * in_top_k
    before = probs.cumsum(-1) - probs
    nucleus = before < top_p_R[:, None] * probs.sum(-1, keepdim=True)
    keep = in_top_k & (nucleus | (top_p_R[:, None] >= 1)) & (probs >= min_p_R[:, None] * probs[:, :1])
    keep[:, 0] = True
    kept = torch.zeros_like(keep).scatter(-1, order, keep)
    return logprobs_RV.masked_fill(~kept, -torch.inf)


def draw_next_tokens(logprobs_RV: Tensor, keys_N: Tensor, positions_N: Tensor, of_N: Tensor | None = None) -> Tensor:
    """Sample a token for each [N] from exp(logprobs) of its row, in fp64. The probabilities need not sum to one."""
    size = logprobs_RV.shape[-1]
    draw, at_once = (_draw_by_gumbel, AT_ONCE_IN_BLOCKS) if size > GUMBEL_ABOVE else (_draw_by_cdf, AT_ONCE)
    rows = max(1, (at_once if logprobs_RV.device.type == "cpu" else AT_ONCE_ON_DEVICE) // size)
    tables = logprobs_RV.split(rows) if of_N is None else (logprobs_RV[of] for of in of_N.split(rows))
    parts = zip(tables, keys_N.split(rows), positions_N.split(rows), strict=True)
    return torch.cat([draw(*part) for part in parts])


def _draw_by_gumbel(logprobs_RV: Tensor, keys_R: Tensor, positions_R: Tensor) -> Tensor:
    """A block of tokens by its probability, then a token of it by its share (B = blocks, S = tokens of one).

    Two Gumbel-max draws over V / S and S values are the same distribution as one over V, whose noise takes longer on a
    processor than the model's head.
    """
    rows, size = logprobs_RV.shape
    blocks = -(-size // BLOCK)
    table_RBS = pad(logprobs_RV, (0, blocks * BLOCK - size), value=-torch.inf).view(rows, blocks, BLOCK)
    # A sub-key for each (row, position): the draws of a position must not be those of the row's tokens.
    row_keys = (uniform(keys_R, positions_R) * 2.0**62).long()[:, None]
    places = torch.arange(max(blocks, BLOCK), device=logprobs_RV.device)[None]
    block_R = _take_by_gumbel(table_RBS.exp().sum(-1).log(), row_keys, places[:, :blocks])
    token_R = _take_by_gumbel(
        table_RBS[torch.arange(rows, device=places.device), block_R],
        row_keys,
        blocks + block_R[:, None] * BLOCK + places[:, :BLOCK],  # counters that no block has
    )
    return block_R * BLOCK + token_R


def _take_by_gumbel(logprobs_RN: Tensor, keys_R1: Tensor, places_RN: Tensor) -> Tensor:
    noise_RN = uniform(keys_R1, places_RN).log_().neg_().log_().neg_()
    return noise_RN.add_(logprobs_RN).argmax(-1)


def _draw_by_cdf(logprobs_RV: Tensor, keys_R: Tensor, positions_R: Tensor) -> Tensor:
    return _invert_cdf(logprobs_RV, uniform(keys_R, positions_R)[:, None])[:, 0]


def _invert_cdf(logprobs_RV: Tensor, draws_RK: Tensor) -> Tensor:
    """The tokens [R, K] at the uniform `draws_RK` of the distribution of each row, which need not sum to one."""
    cumulative = logprobs_RV.double().exp().cumsum(-1)
    total_R1 = cumulative[:, -1:].contiguous()
    # The first token whose running sum exceeds the target. Rounding can put the target at the very end, where
    # filtered tokens (probability 0) may follow: then take the last token that adds something.
    found = torch.searchsorted(cumulative, draws_RK * total_R1, right=True)
    return torch.minimum(found, torch.searchsorted(cumulative, total_R1, right=False))


def sample(
    logits_RV: Tensor,
    temperature_R: Tensor,
    keys_N: Tensor,
    positions_N: Tensor,
    filters: tuple[Tensor, Tensor, Tensor] | None,
    of_N: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample tokens [N]; returns them, their log-probs [N] and the table [R, V] under softmax(logits / T), unfiltered.

    Temperature 0 is greedy, with log-probs at temperature 1. `filters` holds top_k, top_p and min_p per row, None if no
    row has any. A row whose logits are not finite gets the log-prob nan and an arbitrary token instead of an error: its
    neighbours may belong to other callers.
    """
    greedy_R = temperature_R == 0
    scale = torch.where(greedy_R, torch.ones_like(temperature_R), temperature_R)
    logprobs_RV = (logits_RV.float() / scale[:, None]).log_softmax(-1)
    broken_R = ~torch.isfinite(logprobs_RV.amax(-1))
    any_broken = bool(broken_R.any())
    if any_broken:
        logprobs_RV = logprobs_RV.masked_fill(broken_R[:, None], 0.0)
    source = logprobs_RV if filters is None else filter_logprobs(logprobs_RV, *filters)
    tokens_N = draw_next_tokens(source, keys_N, positions_N, of_N)
    at_N = torch.arange(len(tokens_N), device=tokens_N.device) if of_N is None else of_N
    if bool(greedy_R.any()):
        tokens_N = torch.where(greedy_R[at_N], logprobs_RV.argmax(-1)[at_N], tokens_N)
    logprobs_N = logprobs_RV[at_N, tokens_N]
    return tokens_N, logprobs_N.masked_fill(broken_R[at_N], torch.nan) if any_broken else logprobs_N, logprobs_RV


def top_tokens(logprobs_RV: Tensor, count: int) -> list[LikeliestTokens]:
    """Per row the `count` likeliest tokens with their log-probs, likeliest first."""
    values, ids = logprobs_RV.topk(count, dim=-1)
    return [LikeliestTokens(*row) for row in zip(ids.cpu().numpy(), values.cpu().numpy(), strict=True)]


def score_prompt(
    head: Callable[[Tensor], Tensor], hidden_PD: Tensor, tokens_P: Tensor, chunk: int, top: int
) -> tuple[list[float], list[LikeliestTokens]]:
    """Log-probs at temperature 1 of each token given the hidden state before it, and the `top` likeliest tokens there.

    Runs `chunk` positions at a time, so the logits of a long prompt never exist at once.
    """
    logprobs: list[float] = []
    likeliest: list[LikeliestTokens] = []
    for hidden, tokens in zip(hidden_PD.split(chunk), tokens_P.split(chunk), strict=True):
        table = head(hidden).float().log_softmax(-1)
        logprobs += table.gather(-1, tokens[:, None])[:, 0].tolist()
        if top:
            likeliest += top_tokens(table, top)
    if not all(map(math.isfinite, logprobs)):
        raise NonFiniteError("a log-prob of the prompt", [])
    return logprobs, likeliest


def score_targets(
    head: Callable[[Tensor], Tensor], hidden_LD: Tensor, targets: PromptTargets, chunk: int
) -> list[float]:
    """Log-probs [N] at temperature 1 of chosen tokens, each given the hidden state before its place in the prompt.

    Only the states that a target needs go through the head, `chunk` at a time.
    """
    tokens_N = torch.from_numpy(targets.tokens_N).to(hidden_LD.device)
    before_N = torch.from_numpy(targets.positions_N).to(hidden_LD.device) - 1
    used_U, of_N = before_N.unique(return_inverse=True)
    logprobs_N, _ = token_logprobs(head, hidden_LD[used_U], tokens_N, 1.0, chunk, of_N=of_N)
    if not bool(torch.isfinite(logprobs_N).all()):
        raise NonFiniteError("a log-prob of the prompt", [])
    return logprobs_N.tolist()


def draw_alternatives(
    head: Callable[[Tensor], Tensor], hidden_PD: Tensor, count: int, key: int, temperature: float, chunk: int
) -> PromptAlternatives:
    """Draw `count` tokens in every place of a prompt, with replacement, `chunk` places at a time.

    The draws are at the temperature (0 takes the best token), their log-probs at temperature 1.
    """
    device = hidden_PD.device
    draws_K = torch.arange(count, device=device) << 32  # counters: a draw is the same however many there are
    tokens: list[np.ndarray] = [np.empty((0, count), np.int64)]
    logprobs: list[np.ndarray] = [np.empty((0, count), np.float32)]
    for start in range(0, len(hidden_PD), chunk):
        table_RV = head(hidden_PD[start : start + chunk]).float().log_softmax(-1)
        if not bool(torch.isfinite(table_RV.amax(-1)).all()):
            raise NonFiniteError("a log-prob of the prompt", [])
        if temperature == 0:
            tokens_RK = table_RV.argmax(-1)[:, None].expand(-1, count)
        else:
            source_RV = table_RV if temperature == 1 else (table_RV / temperature).log_softmax(-1)
            places_R = torch.arange(start, start + len(table_RV), device=device)
            draws_RK = uniform(torch.tensor(key, device=device), places_R[:, None] + draws_K)
            tokens_RK = _invert_cdf(source_RV, draws_RK)
        tokens.append(tokens_RK.cpu().numpy())
        logprobs.append(table_RV.gather(-1, tokens_RK).cpu().numpy())
    return PromptAlternatives(np.concatenate(tokens), np.concatenate(logprobs))
