"""Attention over a forest of rows (`rlvr.engine.rows`), put into a `transformers` model for one forward pass.

    with forest_attention(model.module, forest):
        hidden_1TD = model.hidden(tokens_1T, position_ids=depths_1T)

`transformers` lets a model's attention be exchanged by name; ours is one name, and the forest of the pass is held
beside it. Each block of queries is given the keys of its ancestors before the block and of the block itself, under a
mask of [blocks, queries, keys] that all layers share. What a model asks of attention beyond a scale (a window, a cap,
sinks) is refused: then the probe at load finds that the model takes no forests, and it gets plain rows.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlvr.engine.attention import attended, exchanged
from rlvr.engine.rows import Forest

NAME = "rlvr_forest"


class Blocks:
    """The forest of the pass that runs, as tensors.

    Legend: C = blocks, Q = queries of a block, A = ancestors of a block, K = A + Q keys, H = heads, D = head width.
    """

    def __init__(self, forest: Forest, device: torch.device, dtype: torch.dtype) -> None:
        ancestors_CA, ends_T = forest.ancestors_CA, forest.ends_T
        count, block = len(ancestors_CA), forest.block
        own_CQ = np.arange(len(ends_T)).reshape(count, block)
        keys_CK = np.concatenate([ancestors_CA, own_CQ], axis=1)
        until_CK = np.where(keys_CK < 0, -1, ends_T[keys_CK])
        queries_CQ1 = own_CQ[:, :, None]
        seen_CQK = (keys_CK[:, None] <= queries_CQ1) & (queries_CQ1 < until_CK[:, None])
        mask = torch.zeros(seen_CQK.shape, dtype=dtype).masked_fill(~torch.from_numpy(seen_CQK), -torch.inf)
        self.mask_C1QK = mask[:, None].to(device)
        self.ancestors_CA = torch.from_numpy(ancestors_CA).clamp(min=0).to(device)

    def laid_out(self, given_1HTD: Tensor, ancestors: bool) -> Tensor:
        """[1, H, T, D] as [C, H, K, D], or with `ancestors` false as [C, H, Q, D]."""
        count, depth = self.ancestors_CA.shape
        heads, _, size = given_1HTD.shape[1:]
        own_CHQD = given_1HTD[0].unflatten(1, (count, -1)).transpose(0, 1)
        if not ancestors or not depth:
            return own_CHQD
        # The gradient of an embedding adds up rows that several blocks read; that of indexing does it one by one.
        table_TX = given_1HTD[0].transpose(0, 1).reshape(-1, heads * size)
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
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention of [1, H, T, D] as `transformers` calls it: the output is [1, T, H, D]."""
    if attention_mask is not None:
        raise NotImplementedError(f"{NAME} attention knows no other mask")
    blocks = attended(module, NAME, dropout, more)
    queries = blocks.laid_out(query, ancestors=False)
    shared = query.shape[1] // key.shape[1]  # query heads of one key head
    keys, values = (blocks.laid_out(x, ancestors=True) for x in (key, value))
    if shared > 1:
        keys, values = keys.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1)
    out_CHQD = F.scaled_dot_product_attention(queries, keys, values, attn_mask=blocks.mask_C1QK, scale=scaling)
    return out_CHQD.transpose(1, 2).flatten(0, 1)[None], None


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)


def forest_attention(module: Any, forest: Forest | None) -> AbstractContextManager[None]:
    """Within the block (the backward pass of checkpointed layers included) the model attends over `forest`, if any."""
    return exchanged(module, NAME, forest and Blocks(forest, module.device, module.dtype))
