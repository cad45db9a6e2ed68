"""The text of each token, as a notebook and the dashboard show it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]
_UNFINISHED = "\ufffd"  # what a tokenizer decodes a part of a character to
_MOST = 8  # tokens that make a character together
_CONTEXT = 4  # tokens before, on which blanks and the parts of a character may depend


def split_tokens(tokens: Sequence[int], decode: Decode) -> list[tuple[str, int]]:
    """The text that each token adds to those before it, with the number of tokens: several that make one character are
    one piece. Of an id that the tokenizer does not have the text is the id in brackets."""
    pieces: list[tuple[str, int]] = []
    before, group = list[int](), list[int]()
    for place, token in enumerate(tokens, 1):
        group.append(token)
        text = _added_text(before, group, decode)
        if text.endswith(_UNFINISHED) and len(group) < _MOST and place < len(tokens):
            continue
        pieces.append((text, len(group)))
        before, group = [*before, *group][-_CONTEXT:], []
    return pieces


def _added_text(before: list[int], new: list[int], decode: Decode) -> str:
    try:
        prefix, text = decode(before) if before else "", decode([*before, *new])
        return text[len(prefix) :] if text.startswith(prefix) else decode(new)
    except Exception:  # an unknown id; each library has its own error
        return _added_text([], new, decode) if before else f"[{' '.join(map(str, new))}]"
