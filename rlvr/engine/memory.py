"""What a run on one device holds in memory, computed from a model's config and the options of the run.

    shape = read_shape(json.loads(Path("my-model/config.json").read_text()))
    estimate_memory(shape, EngineLimits(), dtype="bfloat16", row_tokens=1024, rows=64).total     # bytes

For dense decoders of the Llama kind (`FAMILIES`). The parts that depend on weights are exact; what a pass of training
keeps is counted operation by operation, as `transformers` and this engine compute. Left out: the libraries themselves
(0.3 to 1 GiB), what an allocator loses between blocks, the sampler's prepacked copy of the weights on a CPU. No torch
here, so that a run can be planned without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlvr.algorithms.optimizers import AdamW, Optimizer
from rlvr.engine.engine_options import EngineLimits, LoraConfig

GIB = 2**30
FP32 = 4
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
# What the `transformers` class has that the config does not say: biases of queries, keys and values; norms of heads.
FAMILIES = {"llama": (False, False), "mistral": (False, False), "qwen2": (True, False), "qwen3": (False, True)}
ADAMW = AdamW()
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder. `width` is the hidden size, `inner` the intermediate size of an MLP or an expert;
    `queries` and `keys` are widths: heads x `head`, the width of a head.

    Each layer has `experts`, of which a token passes through `active_experts`; 1 and 1 for a dense model.
    """

    vocabulary: int
    width: int
    inner: int
    layers: int
    queries: int
    keys: int
    head: int
    is_tied: bool
    has_biases: bool
    has_head_norms: bool
    experts: int = 1
    active_experts: int = 1

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Input and output width of the linear layers of a block, by name."""
        return {
            "q_proj": (self.width, self.queries),
            "k_proj": (self.width, self.keys),
            "v_proj": (self.width, self.keys),
            "o_proj": (self.queries, self.width),
            "gate_proj": (self.width, self.inner),
            "up_proj": (self.width, self.inner),
            "down_proj": (self.inner, self.width),
        }

    @property
    def linear_weights(self) -> int:
        """The number of weights in the linear layers of all blocks, which Muon steps."""
        return self.layers * self._count_block(self.experts)

    @property
    def active_weights(self) -> int:
        """The number of weights that a token is multiplied by: the linear layers of its experts, and the head."""
        return self.layers * self._count_block(self.active_experts) + self.vocabulary * self.width

    def _count_block(self, experts: int) -> int:
        sizes = {name: width_in * width_out for name, (width_in, width_out) in self.linears.items()}
        inner = sum(sizes.pop(name) for name in ("gate_proj", "up_proj", "down_proj"))
        router = self.width * self.experts if self.experts > 1 else 0
        return sum(sizes.values()) + experts * inner + router

    @property
    def embedding_weights(self) -> int:
        """The number of weights in the embedding and the head; a tied head counts once."""
        return self.vocabulary * self.width * (1 if self.is_tied else 2)

    @property
    def parameters(self) -> int:
        """The number of all weights."""
        biases = self.queries + 2 * self.keys if self.has_biases else 0
        norms = 2 * self.width + (2 * self.head if self.has_head_norms else 0)
        return self.embedding_weights + self.linear_weights + self.layers * (biases + norms) + self.width

    def count_adapter(self, lora: LoraConfig) -> int:
        """Weights of an adapter, without targets on all linear layers of the blocks."""
        linears = {**self.linears, "lm_head": (self.width, self.vocabulary)}
        names = lora.targets or tuple(self.linears)
        if unknown := [name for name in names if name not in linears]:
            raise ValueError(f"lora.targets: {', '.join(unknown)}; expected some of {', '.join(linears)}")
        return sum(lora.rank * sum(linears[name]) * (1 if name == "lm_head" else self.layers) for name in names)


def read_shape(config: Mapping[str, Any]) -> ModelShape | None:
    """The shape from a `transformers` config, as `config.json` has it; None for a model of another kind.

    This estimate leaves out models with experts: `rlvr.engine.capacity` reads them, for a coarser one.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or not all(isinstance(config.get(name), int) for name in _SIZES):
        return None
    vocabulary, width, inner, layers, heads = (int(config[name]) for name in _SIZES)
    head = int(config.get("head_dim") or width // heads)
    key_heads = int(config.get("num_key_value_heads") or heads)
    has_biases, has_head_norms = family
    return ModelShape(
        vocabulary, width, inner, layers, heads * head, key_heads * head, head,
        bool(config.get("tie_word_embeddings", False)), has_biases, has_head_norms,
    )  # fmt: skip


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by part. A pass of training and one of sampling are never at once, so `total` takes the larger.

    `weights` in the model's dtype; `state`: fp32 masters of low-precision weights and the optimizer's moments;
    `copies`: of the trainable weights, for a reference policy or a sampler that is behind; `cache`: keys and values,
    which stay between passes. In training `gradients`, `activations` of a micro-batch and `logits`; in sampling
    `sampling_tables`, the probabilities of the running rows.
    """

    weights: int
    adapter: int
    state: int
    copies: int
    cache: int
    gradients: int
    activations: int
    logits: int
    sampling_tables: int

    @property
    def persistent(self) -> int:
        """The bytes that are held all the time."""
        return self.weights + self.adapter + self.state + self.copies + self.cache

    @property
    def total(self) -> int:
        return self.persistent + max(self.gradients + self.activations + self.logits, self.sampling_tables)


def estimate_memory(
    shape: ModelShape,
    limits: EngineLimits,
    *,
    dtype: str,
    row_tokens: int,
    rows: int,
    lora: LoraConfig | None = None,
    optimizer: Optimizer = ADAMW,
    copies: int = 0,
    critic: bool = False,
    evaluated_rows: int = 0,
) -> MemoryEstimate:
    """Estimate the memory of a run with `rows` rows a step, the longest of `row_tokens` tokens (prompt and completion).

    An evaluation samples `evaluated_rows`, at most `limits.max_rows` at once, as a step does. `copies`: further copies
    of the trainable weights, one for a KL reference, one for sampling ahead of training. A `critic` has trainable
    weights and an optimizer of its own, AdamW.
    """
    size = DTYPE_BYTES[dtype]
    trained = shape.count_adapter(lora) if lora else shape.parameters
    is_low = lora is None and size < FP32  # an adapter is fp32 itself
    moments = optimizer.count_states(trained, shape.linear_weights) + critic * ADAMW.count_states(
        trained, shape.linear_weights
    )
    at_once = min(max(rows, evaluated_rows), limits.max_rows)
    cached_tokens = at_once * row_tokens
    if limits.cache_tokens:
        cached_tokens = min(cached_tokens, max(limits.cache_tokens, row_tokens))
    tokens = min(max(limits.micro_tokens, row_tokens), rows * row_tokens)
    block = _attention_block(limits, row_tokens)
    chunk = max(1, limits.logit_elements // shape.vocabulary)
    return MemoryEstimate(
        weights=shape.parameters * size * (1 if lora else 1 + critic),
        adapter=trained * FP32 * (1 + critic) if lora else 0,
        state=FP32 * (moments + (trained * (1 + critic) if is_low else 0)),
        copies=copies * trained * (FP32 if lora else size),
        cache=cached_tokens * 2 * shape.keys * shape.layers * size,
        # Each micro-batch's gradients have the weights' dtype and are then added to those of the masters.
        gradients=trained * (FP32 + (size if is_low else 0)),
        activations=-(-tokens // block) * block * _token_activations(shape, limits, size, row_tokens),
        # fp32 logits and their gradient, in low precision the gradient once more; and the gradient of the head, which
        # each chunk computes before it is added.
        logits=min(tokens, chunk) * shape.vocabulary * (2 * FP32 + (size if size < FP32 else 0))
        + (0 if lora else shape.vocabulary * shape.width * size),
        # Logits, log-probs, and the rows gathered for the draws.
        sampling_tables=at_once * shape.vocabulary * 3 * FP32,
    )


def count_gathered(shape: ModelShape, *, has_adapter: bool) -> int:
    """Weights that a rank of several holds whole at a time, and their gradients: embedding and head for a whole pass,
    two blocks while they compute. The base of an adapter has no gradients."""
    block = shape.linear_weights // shape.layers
    return shape.embedding_weights + 2 * block + (0 if has_adapter else shape.embedding_weights + block)


def _token_activations(shape: ModelShape, limits: EngineLimits, size: int, row_tokens: int) -> int:
    """Bytes that a token of a micro-batch keeps for the backward pass."""
    layer = _layer_activations(shape, limits, size, row_tokens)
    last = _norm_activations(shape.width, size) + shape.width * size  # the last norm, and what the head reads
    if (block := _attention_block(limits, row_tokens)) > 1:
        last += (row_tokens + block) * size  # the mask, which all layers share
    if limits.gradient_checkpointing:
        return shape.layers * shape.width * size + layer + last
    return shape.layers * layer + last


def _attention_block(limits: EngineLimits, row_tokens: int) -> int:
    """Queries that attend together (`rlvr.engine.packing`); 1 if rows are padded side by side."""
    return max(128, -(-row_tokens // 4 // 64) * 64) if limits.tree or limits.pack else 1


def _layer_activations(shape: ModelShape, limits: EngineLimits, size: int, row_tokens: int) -> int:
    """Bytes that one token keeps in one layer: what its operations save for their gradients."""
    attention = 2 * shape.queries + 2 * shape.keys  # queries, output, keys, values
    if (block := _attention_block(limits, row_tokens)) > 1:
        # A block holds keys and values of its own and of its ancestors, for every head, and the output once more in the
        # order of the tokens.
        attention = 3 * shape.queries + int(2 * shape.queries * (1 + row_tokens / block))
    norms = 2 * _norm_activations(shape.width, size)
    if shape.has_head_norms:
        norms += _norm_activations(shape.queries + shape.keys, size) - (shape.queries + shape.keys) * size
    return norms + (attention + 4 * shape.inner) * size


def _norm_activations(width: int, size: int) -> int:
    """An RMS norm keeps its input in fp32, the normalized input, and its output, which the next layers read."""
    return width * (FP32 + 2 * size)
