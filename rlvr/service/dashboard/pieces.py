"""Tokens as the text each of them stands for, so that an answer can be shaded by how likely every token was.

The tokenizer is read from its `tokenizer.json` by the `tokenizers` library alone (20 MB less than `transformers`, and
no code of a model folder is run). Exercised by tests/test_dashboard_runs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rlvr.service.dashboard.data import Piece, visible

MOST = 4000  # tokens that are shown
LARGEST = 64 << 20  # bytes of a tokenizer.json
Decode = Callable[[Sequence[int]], str]


def load_decode(file: Path) -> Decode | None:
    """What turns ids into text; None where the file is no tokenizer, or the library is missing."""
    try:
        from tokenizers import Tokenizer

        if file.stat().st_size > LARGEST:
            return None
        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # the library raises bare Exceptions for a damaged file
        return None
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)


def pieces(ids: Sequence[int], logprobs: Sequence[float], decode: Decode) -> list[Piece]:
    """A piece for every token. Tokens that only together make a letter become one, with the sum of their log-probs.

    A token's text is what it adds to the one before: some tokenizers drop a blank at the beginning.
    """
    found: list[Piece] = []
    before: list[int] = []
    held: list[int] = []
    total = 0.0
    for token, logprob in zip(ids[:MOST], logprobs[:MOST], strict=False):
        held.append(token)
        total += logprob
        text = _added(before, held, decode)
        if text.endswith("�") and len(held) < 8:
            continue
        found.append(Piece(visible(text), total, " ".join(map(str, held))))
        before, held, total = held[-4:], [], 0.0
    if held:
        found.append(Piece(visible(_added(before, held, decode)), total, " ".join(map(str, held))))
    return found


def _added(before: list[int], new: list[int], decode: Decode) -> str:
    try:
        prefix, text = decode(before) if before else "", decode([*before, *new])
    except Exception:  # an id that the tokenizer does not have
        return f"[{' '.join(map(str, new))}]"
    return text[len(prefix) :] if text.startswith(prefix) else decode(new)
