"""Replaces the attention of a `transformers` model with ours, by name and for one pass.

The state that the pass attends over is stored beside the name, under the config that all attention modules of a model
share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

# Arguments that a model may pass to its attention without asking for more than a scale.
PLAIN = ("is_causal", "dropout", "scaling", "position_ids", "use_cache", "cache_position", "output_attentions")
_states: dict[tuple[str, int], Any] = {}


@contextmanager
def replace_attention(module: Any, name: str, state: Any) -> Iterator[None]:
    """In this context the model attends by the function registered as `name`, with `state`; None changes nothing."""
    if state is None:
        yield
        return
    config = module.config.get_text_config()
    key, previous = (name, id(config)), config._attn_implementation
    outer = _states.get(key)
    _states[key] = state
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = previous
        del _states[key]
        if outer is not None:
            _states[key] = outer


def get_attention_state(module: Any, name: str, dropout: float, more: Mapping[str, Any]) -> Any:
    """The `state` that `replace_attention` was given; NotImplementedError if the model passes more than a scale."""
    unsupported = [key for key, value in more.items() if value is not None and key not in PLAIN]
    if unsupported or dropout:
        raise NotImplementedError(f"{name} attention does not support {', '.join(unsupported) or 'dropout'}")
    return _states[name, id(module.config)]
