"""How datums become rows: what a forest shares, who sees whom in it, and that it computes what plain rows compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr.engine.forest_attention import Blocks, forest_attention
from rlvr.engine.rows import common, grow, planned
from rlvr.messages import Datum, ModelInput, TensorData

CPU = torch.device("cpu")


def datum(*tokens: int, wide: int = 0) -> Datum:
    shape = (len(tokens), wide) if wide else (len(tokens),)
    inputs = {"target_tokens": TensorData(np.zeros(shape, np.int64)), "weights": TensorData(np.ones(shape, np.float32))}
    return Datum(ModelInput(list(tokens)), inputs)


def plan(data: list[Datum], micro_tokens: int = 1000, **how: Any) -> list[Any]:
    """By default with attention free of charge, so that what saves tokens is what is taken."""
    return planned(data, micro_tokens, CPU, **{"tree": True, "pack": True, "linear": 1e9, **how})


def test_a_forest_by_hand() -> None:
    """Two answers to one prompt, an answer that begins as another does, and a row of its own; blocks of three."""
    rows = [np.array(row) for row in ([7, 8, 1, 2], [7, 8, 1, 3], [7, 8, 4], [9, 9])]
    grown = grow(rows, block=3)
    assert grown.tokens.tolist() == [7, 8, 1, 2, 3, 4, 9, 9, 0]
    assert grown.depths.tolist() == [0, 1, 2, 3, 3, 2, 0, 1, 0]
    assert grown.forest.ends_T.tolist() == [6, 6, 5, 4, 5, 6, 8, 8, 9]
    assert grown.at.tolist() == [0, 1, 2, 3, 0, 1, 2, 4, 0, 1, 5, 6, 7]
    assert grown.forest.ancestors_CA.tolist() == [[-1, -1, -1], [0, 1, 2], [-1, -1, -1]]
    mask = Blocks(grown.forest, CPU, torch.float32).mask_C1QK[:, 0] == 0
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
    grown = grow(arrays, block=block)
    blocks = Blocks(grown.forest, CPU, torch.float32)
    distinct = {tuple(row[: n + 1]) for row in rows for n in range(len(row))}
    assert len(np.unique(grown.at)) == len(distinct)
    seen = blocks.mask_C1QK[:, 0] == 0
    before = grown.forest.ancestors_CA
    start = 0
    for row in arrays:
        places = grown.at[start : start + len(row)]
        start += len(row)
        assert grown.tokens[places].tolist() == row.tolist()
        assert grown.depths[places].tolist() == list(range(len(row)))
        for depth, place in enumerate(places):
            c, q = divmod(int(place), block)
            keys = np.concatenate([before[c], np.arange(c * block, (c + 1) * block)])
            assert sorted(keys[seen[c, q].numpy()]) == sorted(places[: depth + 1])


def test_a_beginning_in_common_is_counted() -> None:
    row = np.array([1, 2, 3])
    assert [common(row, np.array(other)) for other in ([1, 2, 3], [1, 2], [1, 3, 3], [2], [1, 2, 3, 4])] == [
        3,
        2,
        1,
        0,
        3,
    ]


def test_a_forest_is_cut_where_it_would_hold_too_much() -> None:
    """Six tokens at most: the fourth answer does not fit, so that the prompt is computed twice."""
    data = [datum(5, 5, 5, n) for n in (1, 2, 3, 4, 6)] + [datum(5, 5, 5, 1)]
    first, second = plan(data, micro_tokens=6)
    assert [first.indices, second.indices] == [[0, 5, 1, 2], [3, 4]]
    assert [first.tokens_BT.tolist(), second.tokens_BT.tolist()] == [[[5, 5, 5, 1, 2, 3]], [[5, 5, 5, 4, 6]]]
    assert first.row_N.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4


def test_each_saving_can_be_turned_off() -> None:
    data = [datum(5, 5, 5, n) for n in (1, 2)] + [datum(6, 1)]
    assert [b.tokens_BT.tolist() for b in plan(data)] == [[[5, 5, 5, 1, 2, 6, 1]]]
    assert [b.tokens_BT.tolist() for b in plan(data, pack=False)] == [[[5, 5, 5, 1, 2]], [[6, 1]]]
    assert [b.tokens_BT.tolist() for b in plan(data, tree=False)] == [[[5, 5, 5, 1, 5, 5, 5, 2, 6, 1]]]
    (padded,) = plan(data, tree=False, pack=False)
    assert padded.tokens_BT.tolist() == [[5, 5, 5, 1], [5, 5, 5, 2], [6, 1, 0, 0]]
    assert padded.forest is None and padded.at_N.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_plain_rows_are_taken_where_a_forest_saves_nothing() -> None:
    """Rows of equal length that share nothing are as short padded, and attention is causal there by itself."""
    data = [datum(*[n] * 40) for n in range(4)]
    (batch,) = plan(data, linear=10.0)
    assert batch.forest is None and batch.tokens_BT.shape == (4, 40)


def test_each_batch_is_laid_out_as_suits_it() -> None:
    """A group goes into a forest; a long datum of its own, in another batch, stays a plain row, where it is cheaper."""
    data = [datum(*range(400))] + [datum(*[500] * 30, n) for n in range(8)]
    forest, plain = plan(data, micro_tokens=400, linear=10.0)
    assert (len(forest.indices), plain.indices) == (8, [0])
    assert forest.forest is not None and plain.forest is None


def test_rows_with_several_targets_share_no_batch_with_others() -> None:
    data = [datum(1, 2), datum(1, 2, wide=3), datum(1, 3), datum(1, 3, wide=3)]
    for how in ({}, {"tree": False, "pack": False}):
        assert sorted(sorted(b.indices) for b in plan(data, **how)) == [[0, 2], [1, 3]]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"])
def test_a_forest_computes_what_plain_rows_compute(kind: str, checkpointing: bool, tokenizer: Any) -> None:
    """Hidden states and gradients, in blocks that cut rows anywhere; keys with fewer heads than queries, too."""
    from test_engine_model import CONFIGS

    from rlvr.engine.model import build_model

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

    plain = [model.hidden(torch.tensor([row]))[0] for row in rows]
    sum(((h * w).sum() for h, w in zip(plain, weights, strict=True)), torch.tensor(0.0)).backward()
    wanted = gradients()
    for block in (0, 5):
        grown = grow([np.array(row) for row in rows], block=block)
        with forest_attention(model.module, grown.forest), model.checkpointed(checkpointing):
            hidden = model.hidden(torch.tensor(grown.tokens)[None], position_ids=torch.tensor(grown.depths)[None])[0]
            (hidden[torch.tensor(grown.at)] * torch.cat(weights)).sum().backward()
        torch.testing.assert_close(hidden[torch.tensor(grown.at)], torch.cat(plain), rtol=1e-4, atol=1e-5)
        for name, gradient in gradients().items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-4)
