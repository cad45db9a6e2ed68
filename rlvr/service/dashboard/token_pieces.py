"""The text of each token, so that an answer can be shaded by the tokens' log-probs.

The `tokenizers` library alone reads a `tokenizer.json` (20 MB less than `transformers`, and no code of a model folder
runs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rlvr.service.dashboard.dashboard_data import TokenPiece, visible_text

MOST = 4000  # tokens shown
LARGEST = 64 << 20  # bytes of a tokenizer.json
Decode = Callable[[Sequence[int]], str]


def load_decode(file: Path) -> Decode | None:
    """A function from ids to text; None if the file is not a tokenizer or the library is missing."""
    try:
        from tokenizers import Tokenizer

        if file.stat().st_size > LARGEST:
            return None
        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # the library raises bare Exceptions for a damaged file
        return None
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)


def token_pieces(ids: Sequence[int], logprobs: Sequence[float], decode: Decode) -> list[TokenPiece]:
    """A piece for every token; tokens that make a letter together are one, with the sum of their log-probs.

    A token's text is what it adds to the text before it: some tokenizers drop a leading blank.
    """
    pieces: list[TokenPiece] = []
    before: list[int] = []
    group: list[int] = []
    total = 0.0
    for token, logprob in zip(ids[:MOST], logprobs[:MOST], strict=False):
        group.append(token)
        total += logprob
        text = _added_text(before, group, decode)
        if text.endswith("�") and len(group) < 8:
            continue
        pieces.append(TokenPiece(visible_text(text), total, " ".join(map(str, group))))
        before, group, total = group[-4:], [], 0.0
    if group:
        pieces.append(TokenPiece(visible_text(_added_text(before, group, decode)), total, " ".join(map(str, group))))
    return pieces


def _added_text(before: list[int], new: list[int], decode: Decode) -> str:
    try:
        prefix, text = decode(before) if before else "", decode([*before, *new])
    except Exception:  # an unknown id
        return f"[{' '.join(map(str, new))}]"
    return text[len(prefix) :] if text.startswith(prefix) else decode(new)
