"""A real policy without a neural network: a table of token logits, in numpy, behind the same method names.

The policy says each token with probability softmax(logits)[token], whatever came before: small enough to check by
hand, and it truly learns (gradients, AdamW and all). `TablePolicy` holds the weights; `MockSamplingClient` and
`MockTrainingClient` share one. `ScriptedSamplingClient` says what a test tells it to. Used by the toy task and by
tests of everything above the clients, which then need no torch.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlvr import draws
from rlvr.files import checked_name, new_folder
from rlvr.protocols import (
    AdamParams,
    CustomLoss,
    Datum,
    ForwardBackwardOutput,
    Future,
    LazyFuture,
    ModelInput,
    NonFiniteError,
    OptimStepResponse,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    SaveWeightsResponse,
    TensorData,
)
from rlvr.types import StopReason


class WordTokenizer:
    """Words split at blanks; id 0 is the end token, id 1 stands for every word outside the vocabulary."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(dict.fromkeys(["<end>", "<unk>", *words]))
        self.ids = {word: i for i, word in enumerate(self.words)}
        self.eos_token_id: int | None = 0

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [self.ids.get(word, 1) for word in text.split()]

    def __call__(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.encode(text) for text in texts]}

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        hidden = {0, 1} if skip_special_tokens else set[int]()
        return " ".join(self.words[int(i)] for i in token_ids if int(i) not in hidden)


class TablePolicy:
    """`logits` [V] are the weights; `gradient` accumulates until a step; AdamW's moments beside them."""

    def __init__(self, words: Sequence[str], seed: int = 0, spread: float = 0.1) -> None:
        self.tokenizer = WordTokenizer(words)
        size = len(self.tokenizer.words)
        self.logits = np.array([spread * (draws.uniform(draws.key("table", seed), i) - 0.5) for i in range(size)])
        self.logits[1] = -30.0  # the unknown word is for prompts: the policy never says it
        self.gradient: np.ndarray | None = None
        self.moments = np.zeros((2, size))
        self.version = 0

    def logprobs(self, temperature: float = 1.0) -> np.ndarray:
        scaled = self.logits / temperature
        return scaled - scaled.max() - math.log(np.exp(scaled - scaled.max()).sum())


# d(loss term)/d(log-prob) of each named loss: what the engine's losses give by automatic differentiation.
def _cross_entropy(p: np.ndarray, x: dict[str, np.ndarray], c: dict[str, float]) -> tuple[np.ndarray, np.ndarray]:
    return -x["weights"] * p, -x["weights"]


def _importance_sampling(p: np.ndarray, x: dict[str, np.ndarray], c: dict[str, float]) -> tuple[np.ndarray, np.ndarray]:
    term = -np.exp(p - x["logprobs"]) * x["advantages"]
    return term, term


def _ppo(p: np.ndarray, x: dict[str, np.ndarray], c: dict[str, float]) -> tuple[np.ndarray, np.ndarray]:
    ratio, advantage = np.exp(p - x["logprobs"]), x["advantages"]
    clipped = np.clip(ratio, c.get("clip_low_threshold", 0.8), c.get("clip_high_threshold", 1.2)) * advantage
    free = ratio * advantage <= clipped
    return -np.minimum(ratio * advantage, clipped), np.where(free, -ratio * advantage, 0.0)


LOSSES: dict[str, Callable[..., tuple[np.ndarray, np.ndarray]]] = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
}


class MockSamplingClient:
    """Samples from a copy of the table, so later training does not change it."""

    def __init__(self, policy: TablePolicy) -> None:
        self._table = {1.0: policy.logprobs()}
        self._logits, self._tokenizer = policy.logits.copy(), policy.tokenizer
        self._calls = itertools.count()
        self.fingerprint = f"table@{policy.version}"

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
    ) -> Future[SampleResponse]:
        if not prompt.tokens:
            raise ValueError("sample: the prompt is empty; give at least one token")
        asked = sampling_params
        seed = asked.seed if asked.seed is not None else draws.key("unseeded", self.fingerprint, next(self._calls))
        temperature = asked.temperature or 1.0
        scaled = self._logits / temperature
        logprobs = scaled - scaled.max() - math.log(np.exp(scaled - scaled.max()).sum())
        cumulative = np.cumsum(np.exp(logprobs))
        stops = {self._tokenizer.eos_token_id} if asked.stop is None else set(np.atleast_1d(np.asarray(asked.stop)))
        sequences: list[SampledSequence] = []
        for index in range(num_samples):
            tokens: list[int] = []
            key, reason = draws.key("sample", seed, index), StopReason.LENGTH
            for position in range(asked.max_tokens or 64):
                target = draws.uniform(key, position) * cumulative[-1]
                drawn = int(np.searchsorted(cumulative, target, side="right"))
                tokens.append(drawn if asked.temperature else int(logprobs.argmax()))
                if tokens[-1] in stops:
                    reason = StopReason.STOP
                    break
            sequences.append(SampledSequence(reason, tokens, [float(logprobs[t]) for t in tokens]))
        known = [None, *(float(logprobs[t]) for t in prompt.tokens[1:])] if include_prompt_logprobs else None
        return LazyFuture.done(SampleResponse(sequences, known, self.fingerprint))

    def compute_logprobs(self, prompt: ModelInput) -> Future[list[float | None]]:
        return LazyFuture.done([None, *(float(self._table[1.0][t]) for t in prompt.tokens[1:])])

    def get_tokenizer(self) -> WordTokenizer:
        return self._tokenizer


class MockTrainingClient:
    """Trains a `TablePolicy` by exact gradients."""

    scores_at_temperature = True

    def __init__(self, policy: TablePolicy, folder: Path | None = None) -> None:
        self.policy, self._folder = policy, folder

    def forward_backward(
        self, data: list[Datum], loss_fn: str, loss_fn_config: dict[str, float] | None = None
    ) -> Future[ForwardBackwardOutput]:
        return LazyFuture.done(self._run(data, loss_fn, loss_fn_config or {}, backward=True))

    def forward(
        self, data: list[Datum], loss_fn: str = "cross_entropy", loss_fn_config: dict[str, float] | None = None
    ) -> Future[ForwardBackwardOutput]:
        return LazyFuture.done(self._run(data, loss_fn, loss_fn_config or {}, backward=False))

    def _run(
        self, data: list[Datum], loss_fn: str, config: dict[str, float], *, backward: bool
    ) -> ForwardBackwardOutput:
        if loss_fn not in LOSSES:
            raise ValueError(f"loss_fn {loss_fn!r} is not one the mock client has; known: {', '.join(LOSSES)}")
        if not data:
            raise ValueError("data is empty: there is nothing to compute (were all groups filtered out?)")
        temperature = config.get("temperature", 1.0)
        table = self.policy.logprobs(temperature)
        probabilities = np.exp(table)
        outputs: list[dict[str, TensorData]] = []
        gradient, total = np.zeros_like(table), 0.0
        for datum in data:
            inputs = {name: t.data.astype(np.float64) for name, t in datum.loss_fn_inputs.items()}
            targets = datum.loss_fn_inputs["target_tokens"].data
            terms, slopes = LOSSES[loss_fn](table[targets], inputs, config)
            total += float(terms.sum())
            # d log softmax(logits / T)[t] / d logits = (onehot(t) - softmax) / T
            np.add.at(gradient, targets, slopes / temperature)
            gradient -= probabilities * slopes.sum() / temperature
            outputs.append({"logprobs": TensorData.of(table[targets])})
        if not (math.isfinite(total) and np.isfinite(gradient).all()):
            raise NonFiniteError("a loss", [])
        if backward:
            before = self.policy.gradient
            self.policy.gradient = gradient if before is None else before + gradient
        return ForwardBackwardOutput(outputs, {"loss:sum": total})

    def forward_backward_custom(self, data: list[Datum], loss_fn: CustomLoss) -> Future[ForwardBackwardOutput]:
        raise ValueError("the mock client has no custom losses (they are torch functions); use the local client")

    def optim_step(self, adam_params: AdamParams) -> Future[OptimStepResponse]:
        """One AdamW step, as `torch.optim.AdamW` does it."""
        policy, a = self.policy, adam_params
        if policy.gradient is None:
            raise ValueError("optim_step: no gradients were accumulated; call forward_backward first")
        norm = float(np.linalg.norm(policy.gradient))
        scale = min(1.0, a.grad_clip_norm / (norm + 1e-6)) if a.grad_clip_norm > 0 else 1.0
        g, policy.gradient = policy.gradient * scale, None
        policy.version += 1
        policy.moments[0] = a.beta1 * policy.moments[0] + (1 - a.beta1) * g
        policy.moments[1] = a.beta2 * policy.moments[1] + (1 - a.beta2) * g * g
        mean = policy.moments[0] / (1 - a.beta1**policy.version)
        root = np.sqrt(policy.moments[1] / (1 - a.beta2**policy.version)) + a.eps
        policy.logits = policy.logits * (1 - a.learning_rate * a.weight_decay) - a.learning_rate * mean / root
        return LazyFuture.done(OptimStepResponse({"grad_norm": norm}))

    def save_state(self, name: str) -> Future[SaveWeightsResponse]:
        if self._folder is None:
            raise ValueError("this mock client was made without a folder to save in")
        path = self._folder / checked_name(name, "checkpoint name")
        policy = self.policy
        state = {"logits": policy.logits.tolist(), "moments": policy.moments.tolist(), "version": policy.version}
        with new_folder(path) as folder:
            (folder / "table.json").write_text(json.dumps(state))
        return LazyFuture.done(SaveWeightsResponse(str(path)))

    save_weights_for_sampler = save_state

    def load_state(self, path: str) -> Future[None]:
        state = json.loads((Path(path) / "table.json").read_text())
        self.policy.logits = np.asarray(state["logits"])
        self.policy.gradient = None
        return LazyFuture.done(None)

    def load_state_with_optimizer(self, path: str) -> Future[None]:
        self.load_state(path)
        state = json.loads((Path(path) / "table.json").read_text())
        self.policy.moments, self.policy.version = np.asarray(state["moments"]), int(state["version"])
        return LazyFuture.done(None)

    def save_weights_and_get_sampling_client(self, name: str | None = None) -> MockSamplingClient:
        if name is not None:
            self.save_state(name)
        return MockSamplingClient(self.policy)

    def get_tokenizer(self) -> WordTokenizer:
        return self.policy.tokenizer


class ScriptedSamplingClient:
    """Answers the i-th completion asked for with `script(i)`: token ids. Every log-prob is 0."""

    def __init__(self, tokenizer: Any, script: Callable[[int], Sequence[int]]) -> None:
        self._tokenizer, self._script, self._count = tokenizer, script, itertools.count()
        self.prompts: list[list[int]] = []

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
    ) -> Future[SampleResponse]:
        self.prompts += [prompt.to_ints()] * num_samples
        answers = [list(self._script(next(self._count))) for _ in range(num_samples)]
        limit = sampling_params.max_tokens or 1 << 30
        return LazyFuture.done(
            SampleResponse(
                [
                    SampledSequence(
                        StopReason.LENGTH if len(a) > limit else StopReason.STOP, a[:limit], [0.0] * len(a[:limit])
                    )
                    for a in answers
                ],
                fingerprint="script",
            )
        )

    def compute_logprobs(self, prompt: ModelInput) -> Future[list[float | None]]:
        return LazyFuture.done([None] + [0.0] * (prompt.length - 1))

    def get_tokenizer(self) -> Any:
        return self._tokenizer
