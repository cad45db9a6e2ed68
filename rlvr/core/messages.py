"""The messages of the four primitives: what samplers and trainers take and return.

Names and fields are those of the public `tinker` SDK, so that a recipe written for it runs in-process by changing an
import. Left out on purpose: images. No torch: a `TensorData` (`rlvr.core.tensors`) holds a numpy array.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, overload

import numpy as np

from rlvr.core.tensors import TensorData, as_array
from rlvr.core.types import StopReason, Trajectory


@dataclass(frozen=True)
class EncodedTextChunk:
    """A run of token ids inside a `ModelInput`."""

    tokens: Sequence[int]

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, init=False)
class ModelInput:
    """Token ids a model reads. `ModelInput.from_ints([1, 2, 3]).to_ints() == [1, 2, 3]`.

    Also made of text chunks, which are joined: `ModelInput(chunks=[EncodedTextChunk([1, 2]), EncodedTextChunk([3])])`.
    """

    tokens: list[int]

    def __init__(self, tokens: Sequence[int] | None = None, *, chunks: Sequence[Any] | None = None) -> None:
        if (tokens is None) == (chunks is None):
            raise ValueError("ModelInput: give either tokens or chunks (ModelInput.empty() for nothing)")
        if chunks is not None:
            tokens = [token for chunk in chunks for token in _text(chunk)]
        object.__setattr__(self, "tokens", tokens if isinstance(tokens, list) else list(tokens or ()))

    @classmethod
    def from_ints(cls, tokens: Sequence[int]) -> ModelInput:
        """The input of these token ids."""
        return cls(list(tokens))

    @classmethod
    def empty(cls) -> ModelInput:
        return cls([])

    def append(self, chunk: EncodedTextChunk) -> ModelInput:
        """A new input with the chunk's tokens at its end."""
        return ModelInput([*self.tokens, *_text(chunk)])

    def append_int(self, token: int) -> ModelInput:
        return ModelInput([*self.tokens, token])

    def to_ints(self) -> list[int]:
        return list(self.tokens)

    @property
    def chunks(self) -> list[EncodedTextChunk]:
        return [EncodedTextChunk(self.tokens)] if self.tokens else []

    @property
    def length(self) -> int:
        return len(self.tokens)


def _text(chunk: Any) -> Sequence[int]:
    if (tokens := getattr(chunk, "tokens", None)) is None:
        raise ValueError(
            f"ModelInput: a chunk of kind {type(chunk).__name__}; only text (EncodedTextChunk) is supported"
        )
    return tokens


# Inputs that are floats even if a plain list holds integers, such as weights [0, 1].
_FLOATS = ("weights", "advantages", "logprobs", "clip_low_threshold", "clip_high_threshold", "sequence_ratio_mask")


@dataclass(frozen=True, init=False)
class Datum:
    """One row of training: `model_input` [T] and arrays of length T, e.g. `target_tokens`, `logprobs`, `advantages`.

    At place t the model has read the tokens 0 to t and predicts `target_tokens[t]`. docs/loss-functions.md says which
    arrays a loss takes. An array may be given as a `TensorData`, a list, or a numpy or torch array; token ids become
    int64, all else float32.
    """

    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData]

    def __init__(self, model_input: ModelInput, loss_fn_inputs: Mapping[str, Any]) -> None:
        object.__setattr__(self, "model_input", model_input)
        object.__setattr__(self, "loss_fn_inputs", {name: _tensor(name, v) for name, v in loss_fn_inputs.items()})

    @classmethod
    def from_trajectory(
        cls,
        trajectory: Trajectory,
        weight: float = 1.0,
        *,
        advantages: Any = None,
        logprobs: Any = None,
        observed: Mapping[str, Any] | None = None,
        **inputs: Any,
    ) -> Datum:
        """The training projection: inputs all but last, targets all but first, the rest shifted alike.

        `advantages` hold `trajectory.advantage * weight` where the policy acted and 0 elsewhere; `weight` is the
        reduction (1 / tokens in the batch, ...), which folds into the advantage because every loss is a sum. Given
        `advantages` [R] (still to be weighted), `logprobs` [R] and further `inputs` [R] take the place of the
        trajectory's own or stand beside them; they too are 0 where the policy did not act. Those `observed` [R] are 0
        where it did, and on the prompt.
        """
        trajectory.require_trainable()
        tokens = trajectory.full_tokens
        lead = len(trajectory.prompt_tokens) - 1
        mask = np.concatenate([np.zeros(lead), np.asarray(trajectory.action_mask, dtype=np.float64)])

        def align(values_R: Any, mask_T: np.ndarray = mask) -> TensorData:
            return TensorData.of(np.concatenate([np.zeros(lead), np.asarray(values_R, dtype=np.float64)]) * mask_T)

        own = np.full(len(trajectory.response_tokens), trajectory.advantage)
        chosen = own if advantages is None else np.asarray(advantages, dtype=np.float64)
        return cls(
            ModelInput(tokens[:-1]),
            {
                "target_tokens": TensorData.of(tokens[1:]),
                "logprobs": align(trajectory.logprobs if logprobs is None else logprobs),
                "advantages": align(chosen * weight),
                **{name: align(values) for name, values in inputs.items()},
                **{name: align(values, 1 - mask) for name, values in (observed or {}).items()},
            },
        )

    @classmethod
    def from_completion(
        cls, prompt: Sequence[int], completion: Sequence[int], weight: float | Sequence[float] = 1.0
    ) -> Datum:
        """A cross-entropy row: this weight on every completion token, or one for each; 0 on the prompt."""
        tokens = [*prompt, *completion]
        each = [weight] * len(completion) if isinstance(weight, (int, float)) else weight
        weights = [0.0] * (len(prompt) - 1) + [*each]
        return cls(
            ModelInput(tokens[:-1]),
            {"target_tokens": TensorData.of(tokens[1:]), "weights": TensorData.of(np.asarray(weights))},
        )


def _tensor(name: str, given: Any) -> TensorData:
    if isinstance(given, TensorData):
        return given
    try:
        given = given.to_numpy() if hasattr(given, "sparse_crow_indices") else given  # the SDK's own TensorData
        return TensorData(np.array(as_array(given)), "float32" if name in _FLOATS else None)
    except ValueError as error:
        raise ValueError(f"Datum: loss_fn_inputs[{name!r}]: {error}") from error


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. `stop` None ends at the end-of-sequence token, [] never, else strings or token ids.

    `max_tokens` None samples to the end of the model's context. `top_k` -1, `top_p` 1 and `min_p` 0 are off; `min_p`
    leaves out tokens of less than that share of the likeliest one's probability. They cut in that order, as in
    transformers (vLLM cuts by `min_p` first): `top_p` counts the probability of what `top_k` leaves. `seed` makes every
    draw a function of (seed, sample index, token position); None lets the client choose one. Log-probs come back at
    `temperature`, before `top_k`, `top_p` and `min_p`; temperature 0 is greedy.
    """

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] | Sequence[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        rules = (
            (
                "max_tokens",
                self.max_tokens is None or self.max_tokens >= 1,
                "at least 1, or None for the whole context",
            ),
            ("temperature", 0 <= self.temperature < float("inf"), "a finite number, at least 0"),
            ("top_k", self.top_k == -1 or self.top_k >= 1, "-1 (off) or at least 1"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p < 1, "in [0, 1)"),
        )
        for name, fine, expected in rules:
            if not fine:
                raise ValueError(f"SamplingParams: {name}={getattr(self, name)!r}, expected {expected}")


@dataclass(frozen=True, eq=False)
class PromptTargets:
    """Tokens to score in places of a prompt: `tokens_N` at `positions_N` (from 1), given the tokens before each.

    The token that the prompt itself has there is not read.
    """

    positions_N: np.ndarray
    tokens_N: np.ndarray


@dataclass(frozen=True, eq=False)
class PromptAlternatives:
    """Tokens [P - 1, K] drawn in each place of a prompt but the first, with their log-probs at temperature 1."""

    tokens_PK: np.ndarray
    logprobs_PK: np.ndarray


class LikeliestTokens(Sequence[tuple[int, float]]):
    """The likeliest tokens of one position with their log-probs, likeliest first: a sequence of pairs.

    It holds two arrays [K], and makes a pair when it is asked for. An answer may have millions of pairs (1,024
    completions of 32 tokens x 128): as objects of Python they keep the garbage collector busy for a third of a second,
    in which no other thread runs.
    """

    __slots__ = ("logprobs", "tokens")

    def __init__(self, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        self.tokens, self.logprobs = tokens, logprobs

    def __len__(self) -> int:
        return len(self.tokens)

    @overload
    def __getitem__(self, index: int) -> tuple[int, float]: ...
    @overload
    def __getitem__(self, index: slice) -> LikeliestTokens: ...
    def __getitem__(self, index: int | slice) -> tuple[int, float] | LikeliestTokens:
        if isinstance(index, slice):
            return LikeliestTokens(self.tokens[index], self.logprobs[index])
        return int(self.tokens[index]), float(self.logprobs[index])

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(self.tokens.tolist(), self.logprobs.tolist(), strict=True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)  # pyright: ignore[reportUnknownArgumentType]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


@dataclass(frozen=True)
class SampledSequence:
    """One completion: sampled `tokens` [R], the stop token included, their `logprobs` [R] and why it ended.

    `end_tokens` of them, at the end, are a stop token and no part of the answer's text; None where the sampler does
    not say. A stop string stays in the text. `topk_logprobs` [R], where they were asked for: the likeliest tokens of
    each position with their log-probs, likeliest first. `sequence_id` is a server's name for it, None without one.
    """

    stop_reason: StopReason
    tokens: list[int]
    logprobs: list[float] | None = None
    end_tokens: int | None = None
    topk_logprobs: Sequence[Sequence[tuple[int, float]]] | None = None
    sequence_id: str | None = None


@dataclass(frozen=True)
class SampleResponse:
    """The completions of one prompt. `fingerprint` names the weights.

    `prompt_logprobs` and `topk_prompt_logprobs` [P], at temperature 1, start with None and are there where asked for;
    so are `prompt_target_logprobs` [N], those of `PromptTargets`, and `prompt_alternatives`. The first two begin with
    further None where only the last tokens are scored.
    `prompt_cache_hit_tokens` are those a service did not charge for again: 0 here, where nothing is charged.
    """

    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    fingerprint: str = ""
    topk_prompt_logprobs: Sequence[Sequence[tuple[int, float]] | None] | None = None
    prompt_cache_hit_tokens: int = 0
    prompt_target_logprobs: list[float] | None = None
    prompt_alternatives: PromptAlternatives | None = None


@dataclass(frozen=True)
class AdamParams:
    """One AdamW step (Loshchilov and Hutter, arXiv:1711.05101), with the defaults of the Tinker protocol.

    `weight_decay` is decoupled: a weight shrinks by learning rate x decay. `grad_clip_norm` bounds the global L2 norm
    of the gradient; 0 means no clipping. With eps 0 a weight without gradient would become 0 / 0.

    A subclass is a step of another optimizer: the function at `stepper` steps some of the weights, AdamW the others.
    """

    title: ClassVar[str] = "AdamW"
    """The optimizer's name for people."""
    stepper: ClassVar[str] = ""
    """`package.module:function` of `(policy, params)`, which steps some weights of a `rlvr.engine.policy.Policy` by
    their gradients and returns their names. What it keeps of a weight, one tensor of its shape, is in
    `policy.momenta`."""
    needs_matrices: ClassVar[str] = ""
    """Why it cannot step an adapter; "" if it can."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def __post_init__(self) -> None:
        below_one, kind = ("beta1", "beta2", "momentum"), type(self).__name__
        for name, value in vars(self).items():
            if not 0 <= value < (1 if name in below_one else float("inf")):
                expected = "in [0, 1)" if name in below_one else "a finite number, at least 0"
                raise ValueError(f"{kind}: {name}={value!r}, expected {expected}")
        if not self.eps > 0:
            raise ValueError(f"{kind}: eps={self.eps!r}, expected a finite number above 0 (1e-8, say)")

    @property
    def rates(self) -> dict[str, float]:
        """The learning rates, by name."""
        return {name: value for name, value in vars(self).items() if name.endswith("learning_rate")}


@dataclass(frozen=True)
class MuonParams(AdamParams):
    """One step of Muon (`rlvr.engine.muon`) for the matrices inside the model, and of AdamW for all other weights.

    Matrices take `matrix_learning_rate` and `momentum`; the other weights what AdamW takes. Both take the gradient
    clipped to `grad_clip_norm`, and `weight_decay`, each times its own learning rate.
    """

    title = "Muon"
    stepper = "rlvr.engine.muon:step_matrices"
    needs_matrices = "Muon is for whole weight matrices, and the factors of one are not"

    matrix_learning_rate: float = 0.02
    momentum: float = 0.95


@dataclass(frozen=True)
class ForwardBackwardOutput:
    """What a forward or a forward-backward pass returns.

    `loss_fn_outputs` has per datum `{"logprobs": [T]}`: log-probs of the targets in nats, at the temperature of the
    call. `metrics` are named `name:reduction`; `loss:sum`, the loss summed over all tokens of the call, is always
    there.
    """

    loss_fn_outputs: list[dict[str, TensorData]]
    metrics: dict[str, float]
    loss_fn_output_type: str = "TensorDataRecord"


@dataclass(frozen=True)
class OptimStepResponse:
    """What the step reports: `grad_norm`, the global L2 norm of the gradient before clipping.

    Where several processes share the step, `ranks/...` say how busy they were since the last one. What else a client
    reports stands in the metrics of the run under its name.
    """

    metrics: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def of_client(self) -> dict[str, float]:
        """What the client reports beside the norm: numbers by name."""
        return {name: float(value) for name, value in self.metrics.items() if name != "grad_norm"}


@dataclass(frozen=True)
class SaveWeightsResponse:
    """Where weights were saved: a folder, or an address at a server."""

    path: str


class NonFiniteError(RuntimeError):
    """A loss, log-prob or gradient was nan or infinite. `rows` are the datums it was first seen in (may be empty).

    The policy keeps its weights and the gradients it had accumulated before the call.
    """

    def __init__(self, what: str, rows: Sequence[int]) -> None:
        super().__init__(f"{what} is not finite" + (f" (first seen in rows {list(rows)[:8]})" if rows else ""))
        self.rows = list(rows)
