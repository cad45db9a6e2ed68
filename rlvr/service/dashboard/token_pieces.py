"""The text of each token, so that an answer can be shaded by the tokens' log-probs.

The `tokenizers` library alone reads a `tokenizer.json` (20 MB less than `transformers`, and no code of a model folder
runs).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rlvr.chat.token_texts import Decode, split_tokens
from rlvr.service.dashboard.dashboard_data import TokenPiece, visible_text

MOST = 4000  # tokens shown
LARGEST = 64 << 20  # bytes of a tokenizer.json


def load_decode(file: Path) -> Decode | None:
    """A function from ids to text; None if the file is not a tokenizer or the library is missing."""
    try:
        from tokenizers import Tokenizer

        if file.stat().st_size > LARGEST:
            return None
        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # the library raises bare Exceptions for a damaged file
        return None
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def token_pieces(ids: Sequence[int], logprobs: Sequence[float], decode: Decode) -> list[TokenPiece]:
    """A piece for every token; tokens that make a letter together are one, with the sum of their log-probs."""
    pieces, place = list[TokenPiece](), 0
    for text, count in split_tokens(ids[:MOST], decode):
        end = place + count
        of_piece = " ".join(map(str, ids[place:end]))
        pieces.append(TokenPiece(visible_text(text), math.fsum(logprobs[place:end]), of_piece, place))
        place = end
    return pieces
