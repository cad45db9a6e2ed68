"""Prompts that several running rows share: their keys and values are kept and read once for all of them.

A row's attention then has two parts: over its prompt's keys, with the queries of all rows of that prompt together, and
over its own keys. Both give the log-sum-exp of their scores, by which they are merged exactly (Milakov and
Gimelshein 2018, arXiv:1805.02867; Juravsky et al. 2024, arXiv:2402.05099). Only models whose attention the probe could
replace (`rlvr.engine.attention`) share prompts. Left out on purpose: prompts of which only a prefix is shared.

Legend: R = rows, G = prompts, N = most rows of one prompt, M = rows that share, H = key-value heads, Q = query heads of
one, L = keys, D = head width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlvr.engine.attention import get_attention_state, replace_attention

NAME = "rlvr_shared_prompts"
MIN_ROWS, MIN_TOKENS = 4, 32  # of one prompt: with fewer, the second part of attention costs more than it saves
MAX_KEYS = 512  # of a row: with more, reading them is what takes the time, and the fused kernel reads them once
MAX_SETS = 4  # sets of prompts at once: each is a call of its own in every layer


class SharedPrompts:
    """Prompts of one prefill, [G, H, L, D] for each layer, and the running rows that begin with each."""

    def __init__(self, prefilled: list[tuple[Tensor, Tensor]], prompts: Sequence[int], lengths: Sequence[int]) -> None:
        """Keep the prompts `prompts` of a prefill, the first `lengths` tokens of each."""
        keys, longest = prefilled[0][0], max(lengths)
        self.device = keys.device
        at = None if len(prompts) == len(keys) else torch.tensor(prompts, device=self.device)
        self.layers = [
            (k[:, :, :longest], v[:, :, :longest]) if at is None else (k[at, :, :longest], v[at, :, :longest])
            for k, v in prefilled
        ]
        self.tokens = len(self.layers[0][0]) * longest  # tokens whose keys and values are kept
        self.mask_G11L: Tensor | None = None
        if min(lengths) < longest:
            beyond_GL = torch.arange(longest) >= torch.tensor(lengths)[:, None]
            mask_GL = torch.zeros(beyond_GL.shape, dtype=keys.dtype).masked_fill(beyond_GL, -torch.inf)
            self.mask_G11L = mask_GL[:, None, None].to(self.device)

    def assign_rows(self, prompts: Sequence[int], rows: Sequence[int]) -> None:
        """Let row `rows[i]` begin with prompt `prompts[i]`: builds the table [G, N] of the rows of each prompt."""
        counts = Counter[int]()
        places: list[tuple[int, int]] = []
        for prompt in prompts:
            places.append((prompt, counts[prompt]))
            counts[prompt] += 1
        width = max(counts.values())
        table = torch.zeros(len(self.layers[0][0]), width, dtype=torch.long)
        for (prompt, place), row in zip(places, rows, strict=True):
            table[prompt, place] = row
        self.table_GN = table.to(self.device)
        self.rows_M = torch.tensor(rows, device=self.device)
        self.places_M = torch.tensor([prompt * width + place for prompt, place in places], device=self.device)

    def attend(self, layer: int, query_RHQD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """The rows' attention over their prompts: outputs [M, H, Q, D] and logs of the sums of weights [M, H, Q, 1]."""
        keys, values = self.layers[layer]
        (count, width), (heads, share, size) = self.table_GN.shape, query_RHQD.shape[1:]
        query_GHXD = query_RHQD[self.table_GN].transpose(1, 2).reshape(count, heads, width * share, size)
        out, log_sum = fused_attention(query_GHXD, keys, values, self.mask_G11L, scale)
        out_MHQD = out.view(count, heads, width, share, size).transpose(1, 2).flatten(0, 1)[self.places_M]
        log_MHQ = log_sum.reshape(count, heads, width, share).transpose(1, 2).flatten(0, 1)[self.places_M]
        return out_MHQD, log_MHQ[..., None]


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of [B, H, Q, D], and the log of each query's sum of weights, [B, H, Q] in fp32."""
    if query.device.type == "cpu":
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return fused(query, key, value, 0.0, False, attn_mask=mask, scale=scale)
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    if mask is not None:
        scores = scores + mask
    log_sum = scores.logsumexp(-1)
    return ((scores - log_sum[..., None]).exp() @ value.float()).to(query.dtype), log_sum


def product_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, logs: bool = True
) -> tuple[Tensor, Tensor]:
    """`fused_attention` by batched products: faster for few queries over each key. Without `logs` the second tensor is
    empty."""
    (B, H, Q, D), L = query.shape, key.shape[2]
    scores = query.new_zeros(1, 1, 1) if mask is None else mask.expand(B, H, Q, L).reshape(B * H, Q, L)
    keys, values = key.reshape(B * H, L, D), value.reshape(B * H, L, -1)
    scores = torch.baddbmm(scores, query.reshape(B * H, Q, D), keys.transpose(1, 2), alpha=scale)
    out = torch.bmm(scores.softmax(-1), values)
    return out.view(B, H, Q, -1), scores.logsumexp(-1).view(B, H, Q) if logs else scores.new_empty(0)


def prefers_products(device: torch.device, dtype: torch.dtype, length: int) -> bool:
    """Whether to use `product_attention` for a row's own keys: faster in fp32 on a CPU for up to MAX_KEYS keys.

    Not in bf16: it would round the scores.
    """
    return device.type == "cpu" and dtype == torch.float32 and length <= MAX_KEYS


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **more: Any,
) -> tuple[Tensor, None]:
    """One token a row, as `transformers` calls it: queries [R, H x Q, 1, D], the rows' own keys, [R, 1, H x Q, D]."""
    shared = get_attention_state(module, NAME, dropout, more)
    assert query.shape[2] == 1
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query_RHQD = query.view(query.shape[0], key.shape[1], -1, query.shape[3])
    if prefers_products(query.device, query.dtype, key.shape[2]):
        out_RHQD, log_RHQ = product_attention(query_RHQD, key, value, attention_mask, scale, logs=bool(shared))
    else:
        out_RHQD, log_RHQ = fused_attention(query_RHQD, key, value, attention_mask, scale)
    for prompts in shared:
        prompt_out, prompt_log = prompts.attend(module.layer_idx, query_RHQD, scale)
        rows = prompts.rows_M
        share = torch.sigmoid(prompt_log - log_RHQ[rows][..., None]).to(prompt_out.dtype)
        out_RHQD[rows] = torch.lerp(out_RHQD[rows], prompt_out, share)
    return out_RHQD.reshape(query.shape[0], 1, -1, query.shape[3]), None


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)


def use_shared_prompts(module: Any, prompts: list[SharedPrompts], *, always: bool) -> AbstractContextManager[None]:
    """In this context the model's decoding steps attend to the shared `prompts` and to each row's own keys.

    Without prompts the model's own attention runs; with `always` this one, over the rows' own keys.
    """
    return replace_attention(module, NAME, prompts if prompts or always else None)
