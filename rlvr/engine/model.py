"""A causal language model as the engine sees it: hidden states, a head, a device, a dtype, and what it can do.

Any model that `transformers` loads (a folder or hub name) or builds from a config. Two probes at load decide what the
engine may rely on, so that an unusual architecture is slower, never wrong: `splits` (head(backbone(x)) equals the
model's logits; false where a model scales or caps its logits) and `caches` (decoding step by step with our cache
equals one plain pass; false for sliding windows and linear attention).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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
    return probed(LanguageModel(module, tokenizer, name=name))


@torch.no_grad()
def probed(model: LanguageModel) -> LanguageModel:
    """Set `splits` and `caches` by trying them on random tokens; a known sliding window is believed without a trial."""
    from rlvr.engine.runner import RowCache, prefill

    text = model.module.config.get_text_config()
    head = model.module.get_output_embeddings()
    length = min(_probe_length(text), model.context)
    tokens = torch.tensor(
        [[draws.integer(model.vocabulary, draws.key("probe"), i) for i in range(length)]], device=model.device
    )
    ends = [length - 1, length // 2]  # two rows of different lengths: a mask that is not honoured shows
    last = model.module(input_ids=tokens, use_cache=False).logits[0, ends].float().abs().max()
    # The logits of an untrained model are too small for a cap on them to show, so the head is turned up meanwhile.
    louder = head.register_forward_hook(lambda _module, _inputs, output: output * (100 / max(float(last), 1e-6)))
    try:
        logits = model.module(input_ids=tokens, use_cache=False).logits[0, ends].float()
        # Rounding is small; a wrong mask or a missing scale differs by the size of the logits themselves.
        near = (0.08 if model.dtype == torch.bfloat16 else 1e-3) * float(logits.abs().max())

        def agrees(other: Tensor) -> bool:
            return other.shape == logits.shape and float((other.float() - logits).abs().max()) <= near

        model.splits = agrees(model.head(model.hidden(tokens)[0, ends]))
        try:
            rows = [tokens[0, : end + 1].tolist() for end in ends]
            cache = RowCache()
            _, layers = prefill(model, [row[:-1] for row in rows])
            cache.place(layers, [0, 1], ends, rows=[0, 1], capacity=2, length=length)
            hidden = cache.decode(model, torch.tensor([row[-1] for row in rows]), torch.tensor(ends))
            model.caches = agrees(model.head(hidden)) and not _slides(text)
        except (AttributeError, TypeError, RuntimeError, ValueError, IndexError, NotImplementedError):
            model.caches = False
    finally:
        louder.remove()
    if not model.splits:
        model.notes.append("this model changes its logits after the head: log-probs are not computed in chunks")
    if not model.caches:
        model.notes.append("this model's attention does not fit our cache: sampling recomputes each row, slowly")
    return model


def _slides(text: Any) -> bool:
    """Whether some layer sees only a window of the context: then a cache of everything is wrong beyond it."""
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"]
    return bool(window) and window < text.max_position_embeddings and "sliding_attention" in kinds


def _probe_length(text: Any) -> int:
    """Longer than any window or chunk the config speaks of, up to 1,024."""
    spans = [v for k, v in text.to_dict().items() if ("window" in k or "chunk" in k) and type(v) is int]
    return max(8, min(max(spans, default=0) + 8, 1024))
