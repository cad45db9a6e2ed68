"""A causal language model as the engine sees it: hidden states, a head, a device, a dtype, and what it can do.

Any model that `transformers` loads (a folder or hub name) or builds from a config. Probes at load decide what the
engine may rely on, so that an unusual architecture is slower, never wrong (`rlvr.engine.probe`): `splits` (head of
backbone equals the model's logits; false where a model scales or caps its logits), `caches` (decoding step by step with
our cache equals one plain pass; false for sliding windows and linear attention), `shares` (so does decoding with our
attention, also behind a prompt that is kept once for several rows) and `forests` (so do rows that share what they begin
with in training).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from rlvr import draws
from rlvr.engine.tokenizer import first_line

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class LanguageModel:
    """`module` is the `transformers` model in evaluation mode (no dropout: sampler and trainer must agree)."""

    module: Any
    tokenizer: Any
    name: str = ""
    notes: list[str] = field(default_factory=list[str])
    splits: bool = True
    caches: bool = True
    shares: bool = True
    forests: bool = True

    def __post_init__(self) -> None:
        self.module.eval()
        self.device: torch.device = next(self.module.parameters()).device
        self.dtype: torch.dtype = next(self.module.parameters()).dtype
        text = self.module.config.get_text_config()
        # Most tokens a row may have, prompt and completion together.
        self.context = int(
            getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None) or 1 << 30
        )
        # Where an environment that adds to a conversation reads how much room there is.
        if (longest := getattr(self.tokenizer, "model_max_length", None)) is not None:
            self.tokenizer.model_max_length = min(longest, self.context)
        # Rows of the embedding: ids at or above it are not tokens.
        self.vocabulary = int(self.module.get_input_embeddings().weight.shape[0])
        # transformers takes its scaled-dot-product attention where the model has it; the plain one adds its masks.
        self.adds_masks: bool = getattr(self.module.config, "_attn_implementation", "") == "eager"

    def hidden(self, tokens_BT: Tensor, **how: Any) -> Tensor:
        """What the head reads, [B, T, D] (or the logits themselves where the model cannot be split)."""
        if not self.splits:
            return self.module(input_ids=tokens_BT, use_cache="past_key_values" in how, **how).logits
        return self.module.base_model(input_ids=tokens_BT, use_cache="past_key_values" in how, **how).last_hidden_state

    def head(self, hidden_ND: Tensor) -> Tensor:
        """Logits [N, V] of hidden states [N, D]."""
        return self.module.get_output_embeddings()(hidden_ND) if self.splits else hidden_ND

    @property
    def linear_work(self) -> float:
        """The work of a token outside attention, in units of the work that attending to one key is.

        A product with P weights of a layer is 2 P operations, a key of width W takes 4 W.
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
    def checkpointed(self, on: bool) -> Iterator[None]:
        """Within the block (backward pass included) layers keep their input only and compute the rest again.

        That of `transformers` is for a module in training mode, where dropout is on too.
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


@contextmanager
def without_progress_bar() -> Iterator[None]:
    """transformers draws one over the files it loads or saves; it would break the live display."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def pick_device(asked: str) -> torch.device:
    """`auto` is CUDA where there is one."""
    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if asked.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"model.device={asked}: no CUDA device is visible here; use model.device=cpu or auto")
    try:
        return torch.device(asked)
    except RuntimeError as error:
        raise ValueError(f"model.device={asked!r}: {first_line(error)}") from error


def pick_dtype(asked: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a CUDA device that has it, else float32."""
    if asked == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    if asked not in DTYPES:
        raise ValueError(f"model.dtype={asked!r}: expected auto, {' or '.join(DTYPES)}")
    return DTYPES[asked]


def build_model(config: dict[str, Any], tokenizer: Any, *, seed: int, device: str, dtype: str) -> LanguageModel:
    """A model with random weights from `config` (`model_type` and the fields of its `transformers` config).

    The vocabulary and the special tokens come from the tokenizer. The weights are a function of `seed` alone.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    where = pick_device(device)
    fields = dict(config)
    model_type = fields.pop("model_type", None)
    if not model_type:
        raise ValueError("model.config: model_type is missing; give one that transformers knows, e.g. qwen3 or llama")
    try:
        defaults = AutoConfig.for_model(model_type)
        unknown = [name for name in fields if not hasattr(defaults, name)]
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: not a field of a {model_type} config")
        ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        full = AutoConfig.for_model(model_type, **{"vocab_size": len(tokenizer), **ids, **fields})
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"model.config: {first_line(error)}") from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(draws.key("weights", seed))
        module = AutoModelForCausalLM.from_config(full, dtype=torch.float32)
    module = module.to(device=where, dtype=pick_dtype(dtype, where))
    from rlvr.engine.probe import probed

    return probed(LanguageModel(module, tokenizer, name=f"{model_type} from scratch"))


def load_model(name: str, tokenizer: Any, *, device: str, dtype: str) -> LanguageModel:
    """A pretrained model from a local folder or the hub. No remote code is run."""
    from transformers import AutoModelForCausalLM

    where = pick_device(device)
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not (Path(name).expanduser() / "config.json").exists():
        raise ValueError(f"model.name={name!r}: no such model folder (no config.json there)")
    try:
        with without_progress_bar():
            module: Any = AutoModelForCausalLM.from_pretrained(  # safetensors only: a pickle can run code
                str(Path(name).expanduser()) if Path(name).expanduser().exists() else name,
                dtype=pick_dtype(dtype, where),
                use_safetensors=True,
            )
        module = module.to(where)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"model.name={name!r} cannot be loaded: {first_line(error)}") from error
    if len(tokenizer) > module.get_input_embeddings().weight.shape[0]:
        raise ValueError(
            f"model.name={name!r}: the tokenizer has {len(tokenizer)} tokens but the model's embedding only "
            f"{module.get_input_embeddings().weight.shape[0]} rows; they do not belong together"
        )
    from rlvr.engine.probe import probed

    return probed(LanguageModel(module, tokenizer, name=name))
