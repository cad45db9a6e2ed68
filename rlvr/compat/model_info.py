"""What a recipe asks about a model by its name alone: its tokenizer, and the renderer it was made for.

Left out on purpose: a table of models. What a model folder or hub name holds is asked of its tokenizer.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from rlvr.engine.tokenizer import load_tokenizer, silence_transformers


@lru_cache(maxsize=8)
def get_tokenizer(model_name: str) -> Any:
    """The tokenizer of a model folder or hub name."""
    silence_transformers()
    return load_tokenizer(model_name)


def get_recommended_renderer_name(model_name: str) -> str:
    """`chat_template` for a model whose tokenizer has one, else `role_colon` (see `rlvr.compat.renderers`)."""
    return "role_colon" if getattr(get_tokenizer(model_name), "chat_template", None) is None else "chat_template"
