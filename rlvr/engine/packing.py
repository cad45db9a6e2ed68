"""Packs the datums of a call into the rows of its forward passes.

There are two plans, and `make_micro_batches` takes the cheaper one for each micro-batch. *Plain*: datums of similar
length share a batch, padded on the right. *Tree*: all datums lie end to end in one row without padding, and a prefix
that several have in common lies there once, so the prompt of a group is computed once for all its completions. Sorted,
the datums are the paths of prefix trees in preorder; token i attends to token j exactly where j <= i < end of j's
subtree.

    datums  a b c d      row   a b c d e x y         Prefixes are found by comparing tokens: no group or prompt is
            a b c e      end   5 5 5 4 5 7 7         declared, and any caller's datums can share them.
            x y

Attention over a tree is computed in blocks of queries, each with the keys that it can see: its ancestors from before
the block, and the block itself (`rlvr.engine.tree_attention`). The mask is then tokens x (ancestors + block).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlvr.core.messages import Datum

# Queries of an attention block. More if datums are long, or their ancestors would be copied too often; fewer if all are
# short, or most keys of a block would be masked (a step of the run `arithmetic`: an eighth less time).
BLOCK, SHORT_BLOCK, SHORT = 128, 64, 32
PADDING = -1


@dataclass(frozen=True)
class PrefixTree:
    """The structure of a tree for attention in blocks of Q queries. Nodes beyond the last are padding that sees itself.

    `depths_T`: each node's position in its rows. `ends_T`: one past the last node of its subtree. `ancestors_CA`: for
    each block, the earlier nodes that its first node descends from, -1 where there are fewer.
    """

    depths_T: np.ndarray
    ends_T: np.ndarray
    ancestors_CA: np.ndarray

    @property
    def block(self) -> int:
        return len(self.ends_T) // len(self.ancestors_CA)


@dataclass(frozen=True)
class PackedTree:
    """A tree with its tokens [T] and the node of each token of the rows [N]."""

    tokens: np.ndarray
    index: np.ndarray
    tree: PrefixTree


@dataclass(frozen=True)
class MicroBatch:
    """Datums `indices` (into the call's data), of `lengths` tokens, that run together as `tokens_BT`.

    Their tokens, laid end to end, are at `index_N` among the B x T places. With a tree B is 1, several datums may have
    one place, and `positions_BT` gives its depth.
    """

    indices: list[int]
    lengths: list[int]
    tokens_BT: Tensor
    index_N: Tensor
    tree: PrefixTree | None = None
    positions_BT: Tensor | None = None

    @property
    def datum_N(self) -> Tensor:
        """The position in `indices` of the datum that each token belongs to."""
        return torch.repeat_interleave(torch.tensor(self.lengths)).to(self.index_N.device)


def target_width(datum: Datum) -> int:
    """Targets per token: 0 if `target_tokens` are [T], K if they are [T, K]."""
    shape = datum.loss_fn_inputs["target_tokens"].data.shape
    return shape[1] if len(shape) == 2 else 0


def make_micro_batches(
    data: Sequence[Datum], micro_tokens: int, device: torch.device, *, tree: bool, pack: bool, linear_work: float
) -> list[MicroBatch]:
    """Split a call into micro-batches of at most `micro_tokens` tokens (or one datum).

    `tree` lets datums share prefixes, `pack` lets datums that share nothing lie in one row. `linear_work` is the work
    of a token outside attention, in units of the work of attending to one key.
    """
    if not (tree or pack):
        return [_pad(data, batch, device) for batch in _batch_by_length(data, range(len(data)), micro_tokens)]
    tokens = [np.fromiter(d.model_input.tokens, np.int64, d.model_input.length) for d in data]
    batches: list[MicroBatch] = []
    plain: list[int] = []
    for batch in _batch_by_prefix(data, tokens, micro_tokens, tree, pack):
        packed = build_tree([tokens[i] for i in batch], share=tree)
        tree_work = len(packed.tokens) * (linear_work + packed.tree.ancestors_CA.shape[1] + packed.tree.block)
        plain_work = 0.0
        for rows in _batch_by_length(data, batch, micro_tokens):
            longest = len(tokens[rows[0]])
            plain_work += len(rows) * longest * (linear_work + longest / 2)
        if plain_work <= tree_work:
            plain += batch
            continue
        lengths = [len(tokens[i]) for i in batch]
        arrays = (packed.tokens[None], packed.index, packed.tree.depths_T[None])
        tokens_1T, index_N, positions_1T = (torch.from_numpy(x).to(device) for x in arrays)
        batches.append(MicroBatch(batch, lengths, tokens_1T, index_N, packed.tree, positions_1T))
    return batches + [_pad(data, rows, device) for rows in _batch_by_length(data, plain, micro_tokens)]


def _batch_by_length(data: Sequence[Datum], indices: Sequence[int], micro_tokens: int) -> list[list[int]]:
    """Batches of similar lengths, the longest first, so that memory peaks at once.

    Datums share a batch only with those of as many targets per token: none is padded to another number.
    """
    order = sorted(indices, key=lambda i: (-target_width(data[i]), -data[i].model_input.length, i))
    batches: list[list[int]] = []
    for i in order:
        first = data[batches[-1][0]] if batches else None
        if (
            first is None
            or first.model_input.length * (len(batches[-1]) + 1) > micro_tokens
            or target_width(first) != target_width(data[i])
        ):
            batches.append([])
        batches[-1].append(i)
    return batches


def _pad(data: Sequence[Datum], batch: list[int], device: torch.device) -> MicroBatch:
    lengths = [data[i].model_input.length for i in batch]
    longest = max(lengths)
    tokens = np.zeros((len(batch), longest), np.int64)
    for row, i in enumerate(batch):
        tokens[row, : lengths[row]] = data[i].model_input.tokens
    index = np.concatenate([row * longest + np.arange(length) for row, length in enumerate(lengths)])
    return MicroBatch(batch, lengths, torch.from_numpy(tokens).to(device), torch.from_numpy(index).to(device))


def _batch_by_prefix(
    data: Sequence[Datum], tokens: Sequence[np.ndarray], micro_tokens: int, tree: bool, pack: bool
) -> list[list[int]]:
    """Batches in the order of the tokens, cut where a tree would have more than `micro_tokens`."""
    keys = [row.astype(">u4").tobytes() for row in tokens]  # big-endian: bytes compare as the numbers do
    order = sorted(range(len(data)), key=lambda i: (-target_width(data[i]), keys[i], i))
    batches: list[list[int]] = []
    size = 0
    for i in order:
        shared = common_prefix(tokens[batches[-1][-1]], tokens[i]) if batches and tree else 0
        size += len(tokens[i]) - shared
        if (
            not batches
            or size > micro_tokens
            or target_width(data[batches[-1][0]]) != target_width(data[i])
            or not (shared or pack)
        ):
            batches.append([])
            size = len(tokens[i])
        batches[-1].append(i)
    return batches


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two rows begin with in common."""
    shorter = min(len(a), len(b))
    differ = a[:shorter] != b[:shorter]
    return int(differ.argmax()) if differ.any() else shorter


def build_tree(rows: Sequence[np.ndarray], *, share: bool = True, block: int = 0) -> PackedTree:
    """Build the tree of sorted rows, in preorder: a row adds the nodes that it does not share with the row before.

    `block` is the number of queries that attend together; 0 for one that suits the rows.
    """
    path = np.empty(0, np.int64)  # the nodes of the previous row, by depth
    previous = np.empty(0, np.int64)
    paths: list[np.ndarray] = []
    closed: list[tuple[np.ndarray, int]] = []  # nodes whose subtrees end, and where
    starts: list[int] = []  # the first node that each row adds
    size = 0
    for row in rows:
        shared = common_prefix(previous, row) if share else 0
        closed.append((path[shared:], size))
        starts.append(size)
        path = np.concatenate([path[:shared], np.arange(size, size + len(row) - shared)])
        size += len(row) - shared
        paths.append(path)
        previous = row
    closed.append((path, size))
    longest = max(map(len, rows))
    block = block or min(size, SHORT_BLOCK if longest <= SHORT else max(BLOCK, -(-longest // 4 // 64) * 64))
    count = -(-size // block)
    total = count * block
    tokens, depths = np.zeros(total, np.int64), np.zeros(total, np.int64)
    ends = np.arange(1, total + 1)
    for nodes, end in closed:
        ends[nodes] = end
    for row, nodes in zip(rows, paths, strict=True):
        tokens[nodes] = row
        depths[nodes] = np.arange(len(row))
    above: list[np.ndarray] = []
    for first in range(0, size, block):
        row = int(np.searchsorted(starts, first, side="right")) - 1  # of equal rows the last: the others add nothing
        above.append(paths[row][: depths[first]])
    ancestors = np.full((count, max(map(len, above))), PADDING)
    for block_ancestors, nodes in zip(ancestors, above, strict=True):
        block_ancestors[: len(nodes)] = nodes
    return PackedTree(tokens, np.concatenate(paths), PrefixTree(depths, ends, ancestors))
