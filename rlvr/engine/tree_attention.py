"""Attention over a prefix tree of rows (`rlvr.engine.packing`), for one forward pass of a `transformers` model.

    with use_tree_attention(model.module, tree):
        hidden_1TD = model.hidden_states(tokens_1T, position_ids=depths_1T)

Each block of queries gets the keys of its ancestors before the block and of the block itself, under a mask of
[blocks, queries, keys] that all layers of one window share. A layer may have a sliding window, a cap on its scores
(Gemma 2) and sinks (gpt-oss). A model that asks for more raises here; the probe at load then finds that it cannot pack,
and it gets plain rows.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlvr.engine.attention import get_attention_state, replace_attention
from rlvr.engine.packing import PrefixTree

NAME = "rlvr_tree"


class TreeBlocks:
    """The tree of the current pass, as tensors.

    Legend: C = blocks, Q = queries of a block, A = ancestors of a block, K = A + Q keys, H = heads, D = head width.
    """

    def __init__(self, tree: PrefixTree, device: torch.device, dtype: torch.dtype) -> None:
        ancestors_CA, ends_T, depths_T = (
            torch.from_numpy(x).to(device) for x in (tree.ancestors_CA, tree.ends_T, tree.depths_T)
        )
        count, self.block = len(ancestors_CA), tree.block
        self.ancestors_CA = ancestors_CA.clamp(min=0)
        # Of the queries 0..Q-1 of its block, those before `until` see a key; none sees a place without an ancestor.
        own_CQ = ends_T.view(count, self.block)
        ends_CK = torch.cat([ends_T[self.ancestors_CA].masked_fill(ancestors_CA < 0, 0), own_CQ], 1)
        starts_C1 = torch.arange(0, len(ends_T), self.block, device=device)[:, None]
        self.until_CK = (ends_CK - starts_C1).clamp(0, self.block).int()
        self.depths_T = depths_T.int()
        self.dtype = dtype
        self.masks: dict[int | None, Tensor] = {}

    def make_mask(self, window: int | None) -> Tensor:
        """The mask to add [C, 1, Q, K] in layers where a token sees the last `window` tokens; None for all of them.

        Made on the device: of a long row it has more elements than the pass has activations.
        """
        if window not in self.masks:
            count, depth = self.ancestors_CA.shape
            place_Q = torch.arange(self.block, dtype=torch.int32, device=self.until_CK.device)
            unseen_CQK = place_Q[:, None] >= self.until_CK[:, None]
            unseen_CQK[:, :, depth:] |= place_Q > place_Q[:, None]
            if window is not None:
                own_CQ = self.depths_T.view(count, self.block)
                depths_CK = torch.cat([self.depths_T[self.ancestors_CA], own_CQ], 1)
                unseen_CQK |= depths_CK[:, None] <= own_CQ[:, :, None] - window
            mask = torch.zeros(unseen_CQK.shape, dtype=self.dtype, device=unseen_CQK.device)
            self.masks[window] = mask.masked_fill_(unseen_CQK, -torch.inf)[:, None]
        return self.masks[window]

    def to_blocks(self, states_1HTD: Tensor, *, ancestors: bool) -> Tensor:
        """Lay [1, H, T, D] out as [C, H, K, D], or without `ancestors` as [C, H, Q, D]."""
        count, depth = self.ancestors_CA.shape
        heads, _, size = states_1HTD.shape[1:]
        own_CHQD = states_1HTD[0].unflatten(1, (count, -1)).transpose(0, 1)
        if not ancestors or not depth:
            return own_CHQD
        # The gradient of an embedding sums rows that several blocks read at once; that of indexing, one by one.
        table_TX = states_1HTD[0].transpose(0, 1).reshape(-1, heads * size)
        above_CAX = F.embedding(self.ancestors_CA, table_TX)
        above_CHAD = above_CAX.view(count, depth, heads, size).transpose(1, 2)
        return torch.cat([above_CHAD, own_CHQD], dim=2)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention of [1, H, T, D] as `transformers` calls it: the output is [1, T, H, D]."""
    if attention_mask is not None:
        raise NotImplementedError(f"{NAME} attention does not support another mask")
    blocks = get_attention_state(module, NAME, dropout, more)
    queries = blocks.to_blocks(query, ancestors=False)
    heads_per_key = query.shape[1] // key.shape[1]
    keys, values = (blocks.to_blocks(x, ancestors=True) for x in (key, value))
    if heads_per_key > 1:
        keys, values = keys.repeat_interleave(heads_per_key, 1), values.repeat_interleave(heads_per_key, 1)
    mask = blocks.make_mask(sliding_window)
    if softcap is None and s_aux is None:
        out_CHQD = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling)
    else:
        scores = queries @ keys.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        scores = (scores if softcap is None else softcap * torch.tanh(scores / softcap)) + mask
        if s_aux is not None:  # a sink of each head takes part in the softmax and adds nothing
            scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
        out_CHQD = weights[..., : keys.shape[2]] @ values
    return out_CHQD.transpose(1, 2).flatten(0, 1)[None], None


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)


def use_tree_attention(module: Any, tree: PrefixTree | None) -> AbstractContextManager[None]:
    """In this context (the backward pass of checkpointed layers belongs inside) the model attends over `tree`."""
    return replace_attention(module, NAME, tree and TreeBlocks(tree, module.device, module.dtype))
