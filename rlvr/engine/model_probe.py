"""Finds out what the engine may rely on in a model, by trying it at load.

A model whose logits depend on later tokens is refused. `has_plain_head`: head(backbone(x)) equals the model's logits.
`can_cache`: decoding step by step with our cache equals one plain pass. `can_share_prompts`: so does decoding with our
attention, also of several rows behind one kept prompt. `can_pack`: rows that share a prefix in a tree give the logits
of plain rows at every place, and a row's numbers do not change with its neighbours. Each is tried with random tokens,
more of them than any window holds: long windows are shortened for the trial. A model whose layers keep a state beside
keys and values fails `can_cache`, and the rest is not tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlvr.core import rng
from rlvr.engine.kv_cache import KVCache, NewRow, prefill
from rlvr.engine.model import LanguageModel
from rlvr.engine.packing import build_tree
from rlvr.engine.shared_prompts import MAX_KEYS, MIN_ROWS, MIN_TOKENS, prefers_products
from rlvr.engine.tree_attention import use_tree_attention

MOST_TOKENS = 1024  # of a trial
TRIED_WINDOW = 24  # tokens of a window during the trial, if it has more
WINDOWS = ("sliding_window", "attention_chunk_size")  # which `transformers` reads from the config in every pass


def probe_model(model: LanguageModel) -> LanguageModel:
    """Set the model's capabilities and notes; ValueError if it is not a causal language model."""
    with _shorten_windows(model):
        _try_shortcuts(model)
    if not model.has_plain_head:
        model.notes.append(
            "this model's logits are more than a head on its hidden states: log-probs are not computed in chunks"
        )
    if not model.can_cache:
        model.notes.append("this model's attention does not fit our cache: sampling recomputes each row, slowly")
    if not model.can_pack:
        model.notes.append("this model cannot pack rows that share a prefix: training computes each prompt again")
    return model


@torch.no_grad()
def _try_shortcuts(model: LanguageModel) -> None:
    text = model.module.config.get_text_config()
    head = model.module.get_output_embeddings()
    longest = _longest_span(text, model.context)
    length = max(8, min(longest + 8, MOST_TOKENS, model.context))
    tokens = torch.tensor(
        [[rng.integer(model.vocabulary, rng.key("probe"), i) for i in range(length)]], device=model.device
    )
    ends = [length - 1, length // 2]  # two rows of different lengths show a mask that is ignored
    last = model.module(input_ids=tokens, use_cache=False).logits[0, ends].float().abs().max()
    # A cap on the logits does not show at the small logits of an untrained model, so the head is scaled up meanwhile.
    hook = head.register_forward_hook(lambda _module, _inputs, output: output * (100 / max(float(last), 1e-6)))
    try:
        all_logits = model.module(input_ids=tokens, use_cache=False).logits[0].float()
        logits = all_logits[ends]
        # Rounding is small; a wrong mask or a missing scale differs by the size of the logits themselves.
        near = (0.08 if model.dtype == torch.bfloat16 else 1e-3) * float(logits.abs().max())

        def agrees(other: Tensor, expected: Tensor = logits) -> bool:
            return other.shape == expected.shape and float((other.float() - expected).abs().max()) <= near

        if not _is_causal(model, tokens, all_logits):
            raise ValueError(
                f"model {model.name!r} ({model.module.config.model_type}) is not causal: a token's logits change with "
                "the tokens after it; expected a decoder-only language model, such as Llama, Qwen or Gemma"
            )
        model.has_plain_head = _passes(lambda: agrees(model.head(model.hidden_states(tokens)[0, ends])))
        model.can_share_prompts = False  # by the model's own attention first, then by ours
        model.can_cache = longest < MOST_TOKENS and _passes(lambda: agrees(_decode_with_cache(model, tokens, ends)))
        model.can_share_prompts = model.can_cache
        if model.can_share_prompts and prefers_products(model.device, model.dtype, 1):
            few = [min(ends[0], MAX_KEYS - 1), min(ends[1], MAX_KEYS // 2)]
            model.can_share_prompts = _passes(lambda: agrees(_decode_with_cache(model, tokens, few), all_logits[few]))
        model.can_share_prompts = model.can_share_prompts and _passes(lambda: agrees(*_decode_shared(model)))
        model.can_pack = model.can_cache and _passes(lambda: agrees(_logits_in_tree(model, tokens, 1), all_logits))
        model.can_pack = model.can_pack and _passes(lambda: _is_independent(model, tokens))
    finally:
        hook.remove()


def _passes(trial: Callable[[], bool]) -> bool:
    try:
        return trial()
    except (AttributeError, TypeError, RuntimeError, ValueError, IndexError, KeyError, NotImplementedError):
        return False


def _decode_with_cache(model: LanguageModel, tokens: Tensor, ends: list[int]) -> Tensor:
    """The logits at `ends`, decoded with our cache."""
    rows = [tokens[0, : end + 1].tolist() for end in ends]
    cache = KVCache()
    _, layers = prefill(model, [row[:-1] for row in rows])
    new = [NewRow(i, end, reach=end) for i, end in enumerate(ends)]
    cache.insert(layers, new, capacity=2, length=max(ends) + 1)
    return model.head(cache.decode(model, torch.tensor([row[-1] for row in rows]), torch.tensor(ends)))


def _decode_shared(model: LanguageModel) -> tuple[Tensor, Tensor]:
    """The logits of the second token of several rows behind one shared prompt: from our cache, and from plain rows."""
    length = MIN_TOKENS + 1
    sampled = [rng.integer(model.vocabulary, rng.key("probe prompt"), i) for i in range(length + 2 * MIN_ROWS)]
    prompt, ends = sampled[:length], [sampled[length + 2 * i : length + 2 * i + 2] for i in range(MIN_ROWS)]
    cache, count = KVCache(), MIN_ROWS
    _, layers = prefill(model, [prompt])
    new = [NewRow(0, length, reach=length)] * count
    cache.insert(layers, new, capacity=count, length=length + 2, share=True)
    for step in range(2):
        step_tokens = torch.tensor([row[step] for row in ends])
        hidden = cache.decode(model, step_tokens, torch.full((count,), length + step))
    rows = torch.tensor([prompt + row for row in ends], device=model.device)
    return model.head(hidden), model.module(input_ids=rows, use_cache=False).logits[:, -1].float()


def _is_independent(model: LanguageModel, tokens: Tensor) -> bool:
    """Whether a row's logits stay the same when the other rows of the tree change."""
    one, other = (_logits_in_tree(model, tokens, offset) for offset in (1, 2))
    tolerance = 1e-2 if model.dtype == torch.bfloat16 else 1e-5
    return float((one - other).abs().max()) <= tolerance * float(one.abs().max())


def _logits_in_tree(model: LanguageModel, tokens: Tensor, offset: int) -> Tensor:
    """The logits of a row, from a tree of several blocks with two other rows.

    One row branches off halfway and the other shares nothing; their tokens differ from the row's by `offset`.
    """
    row = tokens[0].cpu().numpy()
    half = len(row) // 2
    branch = np.concatenate([row[:half], (row[half:] + offset) % model.vocabulary])
    alone = (np.flip(row) + offset) % model.vocabulary
    alone[0] = (row[0] + offset) % model.vocabulary
    packed = build_tree([branch, row, alone], block=max(2, len(row) // 4))
    with use_tree_attention(model.module, packed.tree):
        tokens_1T, depths_1T = (
            torch.from_numpy(x)[None].to(model.device) for x in (packed.tokens, packed.tree.depths_T)
        )
        hidden = model.hidden_states(tokens_1T, position_ids=depths_1T)[0]
    return model.head(hidden[torch.from_numpy(packed.index).to(model.device)[len(row) : 2 * len(row)]]).float()


def _is_causal(model: LanguageModel, tokens: Tensor, logits: Tensor) -> bool:
    """Whether the logits of the first half stay the same when the tokens of the second half change."""
    half = tokens.shape[1] // 2
    other = tokens.clone()
    other[:, half:] = (other[:, half:] + 1) % model.vocabulary
    changed = model.module(input_ids=other, use_cache=False).logits[0, :half].float()
    tolerance = 0.08 if model.dtype == torch.bfloat16 else 1e-3
    return float((changed - logits[:half]).abs().max()) <= tolerance * float(logits[:half].abs().max())


@contextmanager
def _shorten_windows(model: LanguageModel) -> Iterator[None]:
    """In this context windows hold at most `TRIED_WINDOW` tokens, so that a short row reaches beyond them."""
    text = model.module.config.get_text_config()
    windows = {name: getattr(text, name, None) for name in WINDOWS}
    long = {k: v for k, v in windows.items() if type(v) is int and TRIED_WINDOW < v < model.context}
    holders = [(part, k) for part in (text, *model.module.modules()) for k in long if getattr(part, k, None) == long[k]]
    try:
        for part, name in holders:
            setattr(part, name, TRIED_WINDOW)
        yield
    finally:
        for part, name in holders:
            setattr(part, name, long[name])


def _longest_span(text: Any, context: int) -> int:
    """The largest window or chunk that the config speaks of and that ends before the context does; 0 without any."""
    spans = [v for k, v in text.to_dict().items() if ("window" in k or "chunk" in k) and type(v) is int]
    return max((v for v in spans if v < context), default=0)
