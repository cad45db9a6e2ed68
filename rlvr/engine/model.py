"""A causal language model as the engine sees it: hidden states, a head, a device, a dtype, and its capabilities.

`rlvr.engine.model_probe` sets the capabilities at load, so an unusual architecture is slower, never wrong:
`has_plain_head` (head(backbone(x)) equals the model's logits; false if it scales or caps them), `can_cache` (our KV
cache equals one plain pass; false for linear attention), `can_share_prompts` (so does our attention behind a prompt
kept once for several rows; false for sliding windows) and `can_pack` (so do rows that share a prefix in training).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

T = TypeVar("T")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class LanguageModel:
    """A language model and its tokenizer. `module` is the `transformers` model in evaluation mode (no dropout: sampler
    and trainer must agree)."""

    module: Any
    tokenizer: Any
    name: str = ""
    notes: list[str] = field(default_factory=list[str])
    has_plain_head: bool = True
    can_cache: bool = True
    can_share_prompts: bool = True
    can_pack: bool = True
    is_sharded: bool = False  # set by `rlvr.engine.sharding`

    def __post_init__(self) -> None:
        self.module.eval()
        self.architecture: type = type(self.module)  # a module that is sharded has another class
        self.device: torch.device = next(self.module.parameters()).device
        self.dtype: torch.dtype = next(self.module.parameters()).dtype
        text = self.module.config.get_text_config()
        # The most tokens of a row, prompt and completion together.
        self.context = int(
            getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None) or 1 << 30
        )
        if (fixed := _fixed_rope_length(text, self.context)) < self.context:
            self.notes.append(
                f"rows are limited to {fixed} tokens of {self.context}: beyond them this model's rotary embedding "
                "(longrope) depends on the longest row of a batch, so sampling and training would differ"
            )
            self.context = fixed
        # Environments that add to a conversation read the room from here.
        if (longest := getattr(self.tokenizer, "model_max_length", None)) is not None:
            self.tokenizer.model_max_length = min(longest, self.context)
        # Rows of the embedding; larger ids are not tokens.
        self.vocabulary = int(self.module.get_input_embeddings().weight.shape[0])
        # transformers uses scaled-dot-product attention where the model has it; eager attention adds its masks.
        self.adds_masks: bool = getattr(self.module.config, "_attn_implementation", "") == "eager"

    @property
    def window(self) -> int:
        """The tokens that a sliding layer sees, itself included; 0 if every layer sees the whole context."""
        text = self.module.config.get_text_config()
        window = getattr(text, "sliding_window", None) or 0
        kinds = getattr(text, "layer_types", None) or ["sliding_attention"]
        return window if window < self.context and "sliding_attention" in kinds else 0

    @property
    def mixes_windows(self) -> bool:
        """Whether there are layers of more than one kind: such a model takes a mask for each."""
        return len(set(getattr(self.module.config.get_text_config(), "layer_types", None) or [])) > 1

    def hidden_states(self, tokens_BT: Tensor, **how: Any) -> Tensor:
        """The input of the head, [B, T, D]; the logits themselves if the model has no plain head."""
        if not self.has_plain_head:
            return self.module(input_ids=tokens_BT, use_cache="past_key_values" in how, **how).logits
        return self.backbone(tokens_BT, **how)

    def backbone(self, tokens_BT: Tensor, **how: Any) -> Tensor:
        """The last hidden state [B, T, D], which a value head reads whatever kind the model's own head is."""
        return self.module.base_model(input_ids=tokens_BT, use_cache="past_key_values" in how, **how).last_hidden_state

    def head(self, hidden_ND: Tensor) -> Tensor:
        """Logits [N, V] of hidden states [N, D]."""
        return self.module.get_output_embeddings()(hidden_ND) if self.has_plain_head else hidden_ND

    @property
    def linear_work(self) -> float:
        """The work of a token outside attention, in units of the work of attending to one key.

        Multiplying by P weights of a layer is 2 P operations; a key of width W takes 4 W.
        """
        text = self.module.config.get_text_config()
        layers = int(getattr(text, "num_hidden_layers", 1))
        heads = int(getattr(text, "num_attention_heads", 1))
        width = heads * int(getattr(text, "head_dim", None) or text.hidden_size // heads)
        tables = {id(e.weight): e.weight.numel() for e in (self.module.get_input_embeddings(), self._output())}
        inner = sum(p.numel() for p in self.module.parameters()) - sum(tables.values())
        return inner / layers / (2 * width)

    def _output(self) -> Any:
        return self.module.get_output_embeddings() or self.module.get_input_embeddings()

    @contextmanager
    def one_pass(self) -> Iterator[Callable[[Callable[[], T]], T]]:
        """One forward and backward pass. Yields a function that calls the function given to it, which may use backbone
        and head."""
        if not self.is_sharded:
            yield lambda compute: compute()
            return
        try:
            yield self.module.compute_pass
        finally:
            self.module.reshard()

    @contextmanager
    def checkpoint_layers(self, on: bool) -> Iterator[None]:
        """In this context (backward pass included) layers keep only their input and recompute the rest.

        The implementation of `transformers` needs training mode, which turns dropout on.
        """
        layers = [m for m in self.module.modules() if on and isinstance(m, GradientCheckpointingLayer)]
        for layer in layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        try:
            yield
        finally:
            for layer in layers:
                del layer.forward

    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters by name, tied ones once."""
        return dict(self.module.named_parameters())


def _fixed_rope_length(text: Any, context: int) -> int:
    """The length up to which each row's rotary frequencies are its own. Longrope takes others for a longer batch."""
    rope: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]  # one, or one for each kind of layer
    return min([context, *(k["original_max_position_embeddings"] for k in kinds if k.get("rope_type") == "longrope")])
