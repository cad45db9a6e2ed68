"""How datums become rows: what a tree shares, which token attends to which, and that it equals plain rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr.core.messages import Datum, ModelInput, TensorData
from rlvr.engine.packing import build_tree, common_prefix, make_micro_batches
from rlvr.engine.tree_attention import TreeBlocks, use_tree_attention
from tests.kit.rounding import FORWARD, assert_gradients_close, tolerance
from tests.kit.tiny import CONFIGS

CPU = torch.device("cpu")


def datum(*tokens: int, wide: int = 0) -> Datum:
    shape = (len(tokens), wide) if wide else (len(tokens),)
    inputs = {"target_tokens": TensorData(np.zeros(shape, np.int64)), "weights": TensorData(np.ones(shape, np.float32))}
    return Datum(ModelInput(list(tokens)), inputs)


def plan(data: list[Datum], micro_tokens: int = 1000, **how: Any) -> list[Any]:
    """By default with attention free of charge, so that what saves tokens is what is taken."""
    return make_micro_batches(data, micro_tokens, CPU, **{"tree": True, "pack": True, "linear_work": 1e9, **how})


def test_a_tree_by_hand() -> None:
    """Two answers to one prompt, an answer that begins as another does, and a row of its own; blocks of three."""
    rows = [np.array(row) for row in ([7, 8, 1, 2], [7, 8, 1, 3], [7, 8, 4], [9, 9])]
    packed = build_tree(rows, block=3)
    assert packed.tokens.tolist() == [7, 8, 1, 2, 3, 4, 9, 9, 0]
    assert packed.tree.depths_T.tolist() == [0, 1, 2, 3, 3, 2, 0, 1, 0]
    assert packed.tree.ends_T.tolist() == [6, 6, 5, 4, 5, 6, 8, 8, 9]
    assert packed.index.tolist() == [0, 1, 2, 3, 0, 1, 2, 4, 0, 1, 5, 6, 7]
    assert packed.tree.ancestors_CA.tolist() == [[-1, -1, -1], [0, 1, 2], [-1, -1, -1]]
    mask = TreeBlocks(packed.tree, CPU, torch.float32).make_mask(None)[:, 0] == 0
    assert mask.shape == (3, 3, 6)
    assert mask.int().tolist() == [
        [[0, 0, 0, 1, 0, 0], [0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1]],
        [[1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 1, 0], [1, 1, 0, 0, 0, 1]],
        [[0, 0, 0, 1, 0, 0], [0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 1]],
    ]  # the last place is padding, and sees itself: a query that sees nothing would be nan


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=12), st.integers(1, 7))
def test_every_token_sees_the_tokens_before_it_in_its_own_row_and_no_other(rows: list[list[int]], block: int) -> None:
    """Against the definition, for any rows and blocks; and equal beginnings are there once."""
    arrays = [np.array(row) for row in sorted(rows)]
    packed = build_tree(arrays, block=block)
    blocks = TreeBlocks(packed.tree, CPU, torch.float32)
    distinct = {tuple(row[: n + 1]) for row in rows for n in range(len(row))}
    assert len(np.unique(packed.index)) == len(distinct)
    masks = {window: blocks.make_mask(window)[:, 0] for window in (None, 1, 3)}
    seen, *_ = (mask == 0 for mask in masks.values())
    assert all(set(mask.unique().tolist()) <= {0.0, -torch.inf} for mask in masks.values())
    before = packed.tree.ancestors_CA
    start = 0
    for row in arrays:
        places = packed.index[start : start + len(row)]
        start += len(row)
        assert packed.tokens[places].tolist() == row.tolist()
        assert packed.tree.depths_T[places].tolist() == list(range(len(row)))
        for depth, place in enumerate(places):
            c, q = divmod(int(place), block)
            keys = np.concatenate([before[c], np.arange(c * block, (c + 1) * block)])
            assert sorted(keys[seen[c, q].numpy()]) == sorted(places[: depth + 1])
            for window in (1, 3):
                near = (masks[window][c, q] == 0).numpy()
                assert sorted(keys[near]) == sorted(places[max(0, depth + 1 - window) : depth + 1])


def test_a_beginning_in_common_is_counted() -> None:
    row = np.array([1, 2, 3])
    assert [common_prefix(row, np.array(other)) for other in ([1, 2, 3], [1, 2], [1, 3, 3], [2], [1, 2, 3, 4])] == [
        3,
        2,
        1,
        0,
        3,
    ]


def test_a_tree_is_cut_where_it_would_hold_too_much() -> None:
    """Six tokens at most: the fourth answer does not fit, so that the prompt is computed twice."""
    data = [datum(5, 5, 5, n) for n in (1, 2, 3, 4, 6)] + [datum(5, 5, 5, 1)]
    first, second = plan(data, micro_tokens=6)
    assert [first.indices, second.indices] == [[0, 5, 1, 2], [3, 4]]
    assert [first.tokens_BT.tolist(), second.tokens_BT.tolist()] == [[[5, 5, 5, 1, 2, 3]], [[5, 5, 5, 4, 6]]]
    assert first.datum_N.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4


def test_each_saving_can_be_turned_off() -> None:
    data = [datum(5, 5, 5, n) for n in (1, 2)] + [datum(6, 1)]
    assert [b.tokens_BT.tolist() for b in plan(data)] == [[[5, 5, 5, 1, 2, 6, 1]]]
    assert [b.tokens_BT.tolist() for b in plan(data, pack=False)] == [[[5, 5, 5, 1, 2]], [[6, 1]]]
    assert [b.tokens_BT.tolist() for b in plan(data, tree=False)] == [[[5, 5, 5, 1, 5, 5, 5, 2, 6, 1]]]
    (padded,) = plan(data, tree=False, pack=False)
    assert padded.tokens_BT.tolist() == [[5, 5, 5, 1], [5, 5, 5, 2], [6, 1, 0, 0]]
    assert padded.tree is None and padded.index_N.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_plain_rows_are_taken_where_a_tree_saves_nothing() -> None:
    """Rows of equal length that share nothing are as short padded, and attention is causal there by itself."""
    data = [datum(*[n] * 40) for n in range(4)]
    (batch,) = plan(data, linear_work=10.0)
    assert batch.tree is None and batch.tokens_BT.shape == (4, 40)


def test_each_batch_is_laid_out_as_suits_it() -> None:
    """A group goes into a tree; a long datum of its own, in another batch, stays a plain row, where it is cheaper."""
    data = [datum(*range(400))] + [datum(*[500] * 30, n) for n in range(8)]
    shared, plain = plan(data, micro_tokens=400, linear_work=10.0)
    assert (len(shared.indices), plain.indices) == (8, [0])
    assert shared.tree is not None and plain.tree is None


def test_rows_with_several_targets_share_no_batch_with_others() -> None:
    data = [datum(1, 2), datum(1, 2, wide=3), datum(1, 3), datum(1, 3, wide=3)]
    for how in ({}, {"tree": False, "pack": False}):
        assert sorted(sorted(b.indices) for b in plan(data, **how)) == [[0, 2], [1, 3]]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"])
def test_a_tree_computes_the_same_as_plain_rows(kind: str, checkpointing: bool, tokenizer: Any) -> None:
    """Hidden states and gradients, in blocks that cut rows anywhere; keys with fewer heads than queries, too."""
    from rlvr.engine.model_loading import build_model

    config = {**CONFIGS[kind], "initializer_range": 0.2}
    model = build_model(config, tokenizer, seed=1, device="cpu", dtype="float32")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, model.vocabulary, n).tolist() for n in (9, 3)]
    rows = sorted(p + rng.integers(0, 3, n).tolist() for p in prompts for n in (1, 4, 7, 11))
    weights = [torch.randn(len(row), 32, generator=torch.manual_seed(i)) for i, row in enumerate(rows)]

    def gradients() -> dict[str, torch.Tensor]:
        found = {name: p.grad.clone() for name, p in model.parameters().items() if p.grad is not None}
        model.module.zero_grad()
        return found

    plain = [model.hidden_states(torch.tensor([row]))[0] for row in rows]
    sum(((h * w).sum() for h, w in zip(plain, weights, strict=True)), torch.tensor(0.0)).backward()
    wanted = gradients()
    for block in (0, 5):
        packed = build_tree([np.array(row) for row in rows], block=block)
        with use_tree_attention(model.module, packed.tree), model.checkpoint_layers(checkpointing):
            hidden = model.hidden_states(
                torch.tensor(packed.tokens)[None], position_ids=torch.tensor(packed.tree.depths_T)[None]
            )[0]
            (hidden[torch.tensor(packed.index)] * torch.cat(weights)).sum().backward()
        expected = torch.cat(plain)
        atol = tolerance(FORWARD, float(expected.detach().abs().max()))
        torch.testing.assert_close(hidden[torch.tensor(packed.index)], expected, rtol=0.0, atol=atol)
        assert_gradients_close(gradients(), wanted)
