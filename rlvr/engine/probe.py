"""What the engine may rely on in a model, found out by trying it at load.

`splits`: head(backbone(x)) equals the model's logits. `caches`: decoding step by step with our cache equals one plain
pass. `shares`: so does decoding with our attention, and of several rows behind a prompt that is kept once. `forests`:
rows that share what they begin with, and others in the same pass, give the logits of plain rows at every place, and
nothing of a row moves when its neighbours do. Each is tried with random tokens, longer than any window that the config
speaks of; a model whose layers keep a state beside keys and values fails the first of them, and is then asked no more.
Exercised by `tests/test_engine_model.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlvr import draws
from rlvr.engine.forest_attention import forest_attention
from rlvr.engine.model import LanguageModel
from rlvr.engine.prefixes import LEAST_ROWS, LEAST_TOKENS, MOST_KEYS, by_products
from rlvr.engine.rows import grow
from rlvr.engine.runner import RowCache, prefill


@torch.no_grad()
def probed(model: LanguageModel) -> LanguageModel:
    """Set what the model allows; a known sliding window is believed without a trial."""
    text = model.module.config.get_text_config()
    head = model.module.get_output_embeddings()
    length = min(_probe_length(text), model.context)
    tokens = torch.tensor(
        [[draws.integer(model.vocabulary, draws.key("probe"), i) for i in range(length)]], device=model.device
    )
    ends = [length - 1, length // 2]  # two rows of different lengths: a mask that is not honoured shows
    last = model.module(input_ids=tokens, use_cache=False).logits[0, ends].float().abs().max()
    # The logits of an untrained model are too small for a cap on them to show, so the head is turned up meanwhile.
    louder = head.register_forward_hook(lambda _module, _inputs, output: output * (100 / max(float(last), 1e-6)))
    try:
        all_logits = model.module(input_ids=tokens, use_cache=False).logits[0].float()
        logits = all_logits[ends]
        # Rounding is small; a wrong mask or a missing scale differs by the size of the logits themselves.
        near = (0.08 if model.dtype == torch.bfloat16 else 1e-3) * float(logits.abs().max())

        def agrees(other: Tensor, wanted: Tensor = logits) -> bool:
            return other.shape == wanted.shape and float((other.float() - wanted).abs().max()) <= near

        model.splits = _tried(lambda: agrees(model.head(model.hidden(tokens)[0, ends])))
        model.shares = False  # by the model's own attention first, then by ours
        model.caches = not _slides(text) and _tried(lambda: agrees(_decoded(model, tokens, ends)))
        model.shares = model.caches
        if model.shares and by_products(model.device, model.dtype, 1):
            few = [min(ends[0], MOST_KEYS - 1), min(ends[1], MOST_KEYS // 2)]
            model.shares = _tried(lambda: agrees(_decoded(model, tokens, few), all_logits[few]))
        model.shares = model.shares and _tried(lambda: agrees(*_behind_one_prompt(model)))
        model.forests = model.caches and _tried(lambda: agrees(_grown(model, tokens, 1), all_logits))
        model.forests = model.forests and _tried(lambda: _stays(model, tokens))
    finally:
        louder.remove()
    if not model.splits:
        model.notes.append(
            "this model's logits are more than a head on its hidden states: log-probs are not computed in chunks"
        )
    if not model.caches:
        model.notes.append("this model's attention does not fit our cache: sampling recomputes each row, slowly")
    if not model.forests:
        model.notes.append("this model takes no rows that share their beginning: training computes each prompt again")
    return model


def _tried(trial: Callable[[], bool]) -> bool:
    try:
        return trial()
    except (AttributeError, TypeError, RuntimeError, ValueError, IndexError, KeyError, NotImplementedError):
        return False


def _decoded(model: LanguageModel, tokens: Tensor, ends: list[int]) -> Tensor:
    """The logits at `ends`, from our cache."""
    rows = [tokens[0, : end + 1].tolist() for end in ends]
    cache = RowCache()
    _, layers = prefill(model, [row[:-1] for row in rows])
    cache.place(layers, [0, 1], ends, rows=[0, 1], capacity=2, length=max(ends) + 1)
    return model.head(cache.decode(model, torch.tensor([row[-1] for row in rows]), torch.tensor(ends)))


def _behind_one_prompt(model: LanguageModel) -> tuple[Tensor, Tensor]:
    """The logits of the second token of several rows behind one prompt: from our cache, and from plain rows."""
    length = LEAST_TOKENS + 1
    drawn = [draws.integer(model.vocabulary, draws.key("probe prompt"), i) for i in range(length + 2 * LEAST_ROWS)]
    prompt, ends = drawn[:length], [drawn[length + 2 * i : length + 2 * i + 2] for i in range(LEAST_ROWS)]
    cache, count = RowCache(), LEAST_ROWS
    _, layers = prefill(model, [prompt])
    cache.place(
        layers, [0] * count, [length] * count, rows=list(range(count)), capacity=count, length=length + 2, share=True
    )
    for step in range(2):
        fed = torch.tensor([row[step] for row in ends])
        hidden = cache.decode(model, fed, torch.full((count,), length + step))
    rows = torch.tensor([prompt + row for row in ends], device=model.device)
    return model.head(hidden), model.module(input_ids=rows, use_cache=False).logits[:, -1].float()


def _stays(model: LanguageModel, tokens: Tensor) -> bool:
    """Whether a row's own numbers are what they were when the rows beside it in the forest are others."""
    one, other = (_grown(model, tokens, by) for by in (1, 2))
    apart = 1e-2 if model.dtype == torch.bfloat16 else 1e-5
    return float((one - other).abs().max()) <= apart * float(one.abs().max())


def _grown(model: LanguageModel, tokens: Tensor, by: int) -> Tensor:
    """The logits of a row, from a forest in several blocks: with one that leaves it, and one that never shares with it.

    The tokens of the others are moved `by` so many.
    """
    row = tokens[0].cpu().numpy()
    half = len(row) // 2
    leaves = np.concatenate([row[:half], (row[half:] + by) % model.vocabulary])
    alone = (np.flip(row) + by) % model.vocabulary
    alone[0] = (row[0] + by) % model.vocabulary
    rows = [leaves, row, alone]
    grown = grow(rows, block=max(2, len(row) // 4))
    with forest_attention(model.module, grown.forest):
        tokens_1T, depths_1T = (torch.from_numpy(x)[None].to(model.device) for x in (grown.tokens, grown.depths))
        hidden = model.hidden(tokens_1T, position_ids=depths_1T)[0]
    return model.head(hidden[torch.from_numpy(grown.at).to(model.device)[len(row) : 2 * len(row)]]).float()


def _slides(text: Any) -> bool:
    """Whether some layer sees only a window of the context: then a cache of everything is wrong beyond it."""
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"]
    return bool(window) and window < text.max_position_embeddings and "sliding_attention" in kinds


def _probe_length(text: Any) -> int:
    """Longer than any window or chunk the config speaks of, up to 1,024."""
    spans = [v for k, v in text.to_dict().items() if ("window" in k or "chunk" in k) and type(v) is int]
    return max(8, min(max(spans, default=0) + 8, 1024))
