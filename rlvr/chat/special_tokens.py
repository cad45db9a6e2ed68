"""The texts of special tokens, which what others say must not become."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@lru_cache(maxsize=16)
def special_token_texts(tokenizer: Any) -> tuple[str, ...]:
    """The texts of a tokenizer's special and added tokens."""
    added = getattr(tokenizer, "get_added_vocab", None)
    return tuple(dict.fromkeys([*getattr(tokenizer, "all_special_tokens", []), *(added() if added else [])]))


def strip_special(text: str, special: Iterable[str]) -> str:
    """Replace each `special` text by a blank, and leave out addresses of objects, which differ from run to run."""
    return blank_special(_ADDRESS.sub("", text), special)


def blank_special(text: str, special: Iterable[str]) -> str:
    """Replace each `special` text by a blank, including those that only form when another is replaced."""
    special = [s for s in special if s.strip()]
    while present := [s for s in special if s in text]:
        for s in present:
            text = text.replace(s, " ")
    return text
