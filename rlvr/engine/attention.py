"""Exchanges the attention of a `transformers` model for one of ours, by name and for one pass.

What that pass attends over is held beside the name, under the config that all attention modules of a model share.
Exercised through its two users, `rlvr.engine.forest_attention` (training) and `rlvr.engine.prefixes` (sampling).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

# What a model may say to attention that asks nothing more of it than a scale.
PLAIN = ("is_causal", "dropout", "scaling", "position_ids", "use_cache", "cache_position", "output_attentions")
_over: dict[tuple[str, int], Any] = {}


@contextmanager
def exchanged(module: Any, name: str, over: Any) -> Iterator[None]:
    """Within the block the model attends by the function registered as `name`, which asks `attended` for `over`.

    None changes nothing.
    """
    if over is None:
        yield
        return
    config = module.config.get_text_config()
    key, was = (name, id(config)), config._attn_implementation
    outer = _over.get(key)
    _over[key] = over
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = was
        del _over[key]
        if outer is not None:
            _over[key] = outer


def attended(module: Any, name: str, dropout: float, more: Mapping[str, Any]) -> Any:
    """What an attention module is to attend over; NotImplementedError where it asks for `more` than a scale."""
    asked = [key for key, given in more.items() if given is not None and key not in PLAIN]
    if asked or dropout:
        raise NotImplementedError(f"{name} attention knows no {', '.join(asked) or 'dropout'}")
    return _over[name, id(module.config)]
