"""How the datums of a call become the rows of its forward passes.

Two plans, and `planned` takes for each micro-batch the one with less work. *Plain*: datums of like length share a
batch, padded on the right to the longest. *Forest*: all datums lie end to end in one row without padding, and a
beginning that several have in common lies there once, so that the prompt of a group is computed once however many
answers follow. Sorted, the datums are the paths of a forest in preorder; node j is seen by node i exactly where
j <= i < end of j's subtree.

    datums  a b c d      row   a b c d e x y         The forest knows nothing of groups or prompts: what is
            a b c e      end   5 5 5 4 5 7 7         equal is shared, for any caller's datums.
            x y

Attention over a forest is computed in blocks of queries, each with the keys that it can see: its ancestors from before
the block, and the block itself (`rlvr.engine.forest_attention`). So the mask is tokens x (ancestors + block), and
siblings cost each other nothing beyond their block.

Exercised by `tests/test_engine_rows.py`; that the gradient stays the same, by `tests/test_same_gradient.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlvr.messages import Datum

BLOCK = 128  # queries of an attention block; more where datums are long, or their ancestors would be copied too often
PADDING = -1


@dataclass(frozen=True)
class Forest:
    """What attention needs of a forest in blocks of Q queries; nodes beyond the last are padding that sees itself.

    `ancestors_CA`: for each block the nodes before it that its first node descends from, -1 where there are fewer.
    `ends_T`: one past the last node of each node's subtree.
    """

    ends_T: np.ndarray
    ancestors_CA: np.ndarray

    @property
    def block(self) -> int:
        return len(self.ends_T) // len(self.ancestors_CA)


@dataclass(frozen=True)
class MicroBatch:
    """Datums `indices` (into the call's data) that run together, in `tokens_BT`; `lengths` are theirs.

    Their tokens, laid end to end, are at `at_N` among the B x T places; with a forest (then B = 1) one place may be
    several datums', and `positions_BT` says how deep it is in them.
    """

    indices: list[int]
    lengths: list[int]
    tokens_BT: Tensor
    at_N: Tensor
    forest: Forest | None = None
    positions_BT: Tensor | None = None

    @property
    def row_N(self) -> Tensor:
        """Which of `indices` a token belongs to."""
        return torch.repeat_interleave(torch.tensor(self.lengths)).to(self.at_N.device)


def width(datum: Datum) -> int:
    """Targets per token: 0 where `target_tokens` are one row, K where they are [T, K]."""
    shape = datum.loss_fn_inputs["target_tokens"].data.shape
    return shape[1] if len(shape) == 2 else 0


def planned(
    data: Sequence[Datum], micro_tokens: int, device: torch.device, *, tree: bool, pack: bool, linear: float
) -> list[MicroBatch]:
    """The micro-batches of a call, each of at most `micro_tokens` tokens (or one datum).

    `tree` lets datums share what they begin with, `pack` lets those lie in one row that share nothing. `linear` is the
    work of a token outside attention, in units of the work that attending to one key is.
    """
    if not (tree or pack):
        return [_padded(data, batch, device) for batch in _plain(data, range(len(data)), micro_tokens)]
    tokens = [np.fromiter(d.model_input.tokens, np.int64, d.model_input.length) for d in data]
    batches = _forests(data, tokens, micro_tokens, tree, pack)
    found: list[MicroBatch] = []
    as_rows: list[int] = []
    for batch in batches:
        g = grow([tokens[i] for i in batch], share=tree)
        in_forest = len(g.tokens) * (linear + g.forest.ancestors_CA.shape[1] + g.forest.block)
        in_rows = 0.0
        for rows in _plain(data, batch, micro_tokens):
            longest = len(tokens[rows[0]])
            in_rows += len(rows) * longest * (linear + longest / 2)
        if in_rows <= in_forest:
            as_rows += batch
            continue
        lengths = [len(tokens[i]) for i in batch]
        laid = (torch.from_numpy(x).to(device) for x in (g.tokens[None], g.at, g.depths[None]))
        tokens_1T, at_N, positions_1T = laid
        found.append(MicroBatch(batch, lengths, tokens_1T, at_N, g.forest, positions_1T))
    return found + [_padded(data, rows, device) for rows in _plain(data, as_rows, micro_tokens)]


def _plain(data: Sequence[Datum], which: Sequence[int], micro_tokens: int) -> list[list[int]]:
    """Longest rows first, so that memory peaks at once and rows of like length share a batch.

    Rows with several targets per token share one only with those of as many: none is padded to another's number.
    """
    order = sorted(which, key=lambda i: (-width(data[i]), -data[i].model_input.length, i))
    batches: list[list[int]] = []
    for i in order:
        first = data[batches[-1][0]] if batches else None
        if (
            first is None
            or first.model_input.length * (len(batches[-1]) + 1) > micro_tokens
            or width(first) != width(data[i])
        ):
            batches.append([])
        batches[-1].append(i)
    return batches


def _padded(data: Sequence[Datum], batch: list[int], device: torch.device) -> MicroBatch:
    lengths = [data[i].model_input.length for i in batch]
    longest = max(lengths)
    tokens = np.zeros((len(batch), longest), np.int64)
    for row, i in enumerate(batch):
        tokens[row, : lengths[row]] = data[i].model_input.tokens
    at = np.concatenate([row * longest + np.arange(length) for row, length in enumerate(lengths)])
    return MicroBatch(batch, lengths, torch.from_numpy(tokens).to(device), torch.from_numpy(at).to(device))


def _forests(
    data: Sequence[Datum], tokens: Sequence[np.ndarray], micro_tokens: int, tree: bool, pack: bool
) -> list[list[int]]:
    """Datums in the order of their tokens, cut where a forest would hold more than `micro_tokens`."""
    keys = [row.astype(">u4").tobytes() for row in tokens]  # big-endian: bytes compare as the numbers do
    order = sorted(range(len(data)), key=lambda i: (-width(data[i]), keys[i], i))
    batches: list[list[int]] = []
    size = 0
    for i in order:
        shared = 0
        if batches and tree:
            shared = common(tokens[batches[-1][-1]], tokens[i])
        size += len(tokens[i]) - shared
        if not batches or size > micro_tokens or width(data[batches[-1][0]]) != width(data[i]) or not (shared or pack):
            batches.append([])
            size = len(tokens[i])
        batches[-1].append(i)
    return batches


def common(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two rows begin with in common."""
    least = min(len(a), len(b))
    differ = a[:least] != b[:least]
    return int(differ.argmax()) if differ.any() else least


@dataclass(frozen=True)
class Grown:
    """A forest with its tokens [T], their depths (positions) [T] and the places [N] of the datums' tokens in it."""

    tokens: np.ndarray
    depths: np.ndarray
    at: np.ndarray
    forest: Forest


def grow(rows: Sequence[np.ndarray], *, share: bool = True, block: int = 0) -> Grown:
    """The forest of sorted rows, in preorder: a row adds the nodes that it does not share with the one before it.

    `block` is the number of queries that attend together; 0 for one that suits the rows.
    """
    path = np.empty(0, np.int64)  # the nodes of the row before, by depth
    before = np.empty(0, np.int64)
    paths: list[np.ndarray] = []
    closed: list[tuple[np.ndarray, int]] = []  # nodes whose subtrees end, and where
    starts: list[int] = []  # the first node that each row adds
    size = 0
    for row in rows:
        shared = common(before, row) if share else 0
        closed.append((path[shared:], size))
        starts.append(size)
        path = np.concatenate([path[:shared], np.arange(size, size + len(row) - shared)])
        size += len(row) - shared
        paths.append(path)
        before = row
    closed.append((path, size))
    block = block or min(size, max(BLOCK, -(-max(map(len, rows)) // 4 // 64) * 64))
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
    for place, nodes in zip(ancestors, above, strict=True):
        place[: len(nodes)] = nodes
    return Grown(tokens, depths, np.concatenate(paths), Forest(ends, ancestors))
