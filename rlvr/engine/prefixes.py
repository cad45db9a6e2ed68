"""Prompts that several running rows share: their keys and values are kept and read once for all of them.

A row's attention is then in two parts, over its prompt's keys with the queries of all its prompt's rows together, and
over its own keys; both give the log of the sum of their weights, which puts them together exactly (Milakov and
Gimelshein 2018, arXiv:1805.02867; Juravsky et al. 2024, arXiv:2402.05099). The attention of a `transformers` model is
exchanged by name for it (`rlvr.engine.attention`), so only models that the probe found to take that
share prompts here. Exercised by `tests/test_engine_speed_paths.py`. Left out on purpose: prompts that share a beginning
only.

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

from rlvr.engine.attention import attended, exchanged

NAME = "rlvr_shared_prompts"
LEAST_ROWS, LEAST_TOKENS = 4, 32  # of one prompt: with fewer, the second part of attention costs more than it saves
MOST_KEYS = 512  # of a row: with more, reading them is what takes the time, and the fused kernel reads them once
MOST = 4  # sets of prompts at once: each is a call of its own in every layer


class SharedPrompts:
    """The prompts of one prefill, [G, H, L, D] for each layer, and which running rows begin with which."""

    def __init__(self, computed: list[tuple[Tensor, Tensor]], prompts: Sequence[int], lengths: Sequence[int]) -> None:
        """Prompts `prompts` of those that were `computed`, `lengths` tokens of them."""
        keys, longest = computed[0][0], max(lengths)
        self.device = keys.device
        at = None if len(prompts) == len(keys) else torch.tensor(prompts, device=self.device)
        self.layers = [
            (k[:, :, :longest], v[:, :, :longest]) if at is None else (k[at, :, :longest], v[at, :, :longest])
            for k, v in computed
        ]
        self.places = len(self.layers[0][0]) * longest  # keys and values held
        self.mask_G11L: Tensor | None = None
        if min(lengths) < longest:
            beyond_GL = torch.arange(longest) >= torch.tensor(lengths)[:, None]
            mask_GL = torch.zeros(beyond_GL.shape, dtype=keys.dtype).masked_fill(beyond_GL, -torch.inf)
            self.mask_G11L = mask_GL[:, None, None].to(self.device)

    def settle(self, prompts: Sequence[int], rows: Sequence[int]) -> None:
        """Row `rows[i]` begins with prompt `prompts[i]`: where each one's queries stand in a table [G, N]."""
        taken = Counter[int]()
        places: list[tuple[int, int]] = []
        for prompt in prompts:
            places.append((prompt, taken[prompt]))
            taken[prompt] += 1
        width = max(taken.values())
        table = torch.zeros(len(self.layers[0][0]), width, dtype=torch.long)
        for (prompt, place), row in zip(places, rows, strict=True):
            table[prompt, place] = row
        self.table_GN = table.to(self.device)
        self.rows_M = torch.tensor(rows, device=self.device)
        self.places_M = torch.tensor([prompt * width + place for prompt, place in places], device=self.device)

    def part(self, layer: int, query_RHQD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """The rows' attention over their prompts: outputs [M, H, Q, D], logs of the sums of weights [M, H, Q, 1]."""
        keys, values = self.layers[layer]
        (count, width), (heads, share, size) = self.table_GN.shape, query_RHQD.shape[1:]
        asked = query_RHQD[self.table_GN].transpose(1, 2).reshape(count, heads, width * share, size)
        out, log_sum = weighed(asked, keys, values, self.mask_G11L, scale)
        out_MHQD = out.view(count, heads, width, share, size).transpose(1, 2).flatten(0, 1)[self.places_M]
        log_MHQ = log_sum.reshape(count, heads, width, share).transpose(1, 2).flatten(0, 1)[self.places_M]
        return out_MHQD, log_MHQ[..., None]


def weighed(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of [B, H, Q, D] and the log of the sum of weights of each query, [B, H, Q] in fp32."""
    if query.device.type == "cpu":
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return fused(query, key, value, 0.0, False, attn_mask=mask, scale=scale)
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    if mask is not None:
        scores = scores + mask
    log_sum = scores.logsumexp(-1)
    return ((scores - log_sum[..., None]).exp() @ value.float()).to(query.dtype), log_sum


def multiplied(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, logs: bool = True
) -> tuple[Tensor, Tensor]:
    """The same by batched products, which few queries over each key are better served by; `logs` empty if not asked."""
    (B, H, Q, D), L = query.shape, key.shape[2]
    scores = query.new_zeros(1, 1, 1) if mask is None else mask.expand(B, H, Q, L).reshape(B * H, Q, L)
    keys, values = key.reshape(B * H, L, D), value.reshape(B * H, L, -1)
    scores = torch.baddbmm(scores, query.reshape(B * H, Q, D), keys.transpose(1, 2), alpha=scale)
    out = torch.bmm(scores.softmax(-1), values)
    return out.view(B, H, Q, -1), scores.logsumexp(-1).view(B, H, Q) if logs else scores.new_empty(0)


def by_products(device: torch.device, dtype: torch.dtype, length: int) -> bool:
    """Whether rows attend to their own `length` keys by `multiplied`: in bf16 its scores would be rounded."""
    return device.type == "cpu" and dtype == torch.float32 and length <= MOST_KEYS


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
    running = attended(module, NAME, dropout, more)
    assert query.shape[2] == 1
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query_RHQD = query.view(query.shape[0], key.shape[1], -1, query.shape[3])
    if by_products(query.device, query.dtype, key.shape[2]):
        out_RHQD, log_RHQ = multiplied(query_RHQD, key, value, attention_mask, scale, logs=bool(running))
    else:
        out_RHQD, log_RHQ = weighed(query_RHQD, key, value, attention_mask, scale)
    for prompts in running:
        theirs, their_log = prompts.part(module.layer_idx, query_RHQD, scale)
        rows = prompts.rows_M
        share = torch.sigmoid(their_log - log_RHQ[rows][..., None]).to(theirs.dtype)
        out_RHQD[rows] = torch.lerp(out_RHQD[rows], theirs, share)
    return out_RHQD.reshape(query.shape[0], 1, -1, query.shape[3]), None


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)


def one_token_attention(module: Any, prompts: list[SharedPrompts], ours: bool) -> AbstractContextManager[None]:
    """Within the block a step of the model attends over `prompts` beside the rows' own keys.

    Without any the model attends by itself, unless `ours` is asked for.
    """
    return exchanged(module, NAME, prompts if prompts or ours else None)
