"""A real policy without a neural network: a table of token logits, in numpy, behind the same method names.

The policy says each token with probability softmax(logits)[token], whatever came before: small enough to check by hand,
and it truly learns (every named loss, exact gradients, AdamW). `TablePolicy` holds the weights; `MockSamplingClient`
and `MockTrainingClient` share one. `ScriptedSamplingClient` says what a test tells it to. Used by the toy task
(`rlvr.training.toy_sampler`), by `client=mock` and by tests of everything above the clients, which then need no torch.

Left out on purpose: exact entropy, which only the engine computes.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from rlvr.algorithms.loss_specs import LOSS_SPECS, check_batch, list_inputs
from rlvr.algorithms.losses import TokenLossAttribute
from rlvr.algorithms.losses.loss import CROSS_ENTROPY_INPUT, ENTROPY_INPUT, MAX_LOG_RATIO
from rlvr.clients.client_spec import ClientRequest, ClientSpec
from rlvr.clients.custom_loss import two_passes
from rlvr.clients.mock.tabular_policy import TablePolicy, WordTokenizer, toy_policy
from rlvr.core import rng
from rlvr.core.files import check_name, new_folder
from rlvr.core.futures import Future, LazyFuture
from rlvr.core.machine import describe_processor
from rlvr.core.messages import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    NonFiniteError,
    OptimStepResponse,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    SaveWeightsResponse,
    TensorData,
)
from rlvr.core.protocols import ClientCapabilities, CustomLoss, Feature
from rlvr.core.types import StopReason

Inputs = dict[str, np.ndarray]
Terms = tuple[np.ndarray, np.ndarray]
Formula = Callable[[np.ndarray, Inputs, dict[str, float], np.ndarray], Terms]
__all__ = ["MockSamplingClient", "MockTrainingClient", "ScriptedSamplingClient", "TablePolicy", "WordTokenizer"]
DEFAULT_MAX_TOKENS = 64  # tokens of an answer without max_tokens: a table has no context that could run out


def kl_terms(p: np.ndarray, reference: np.ndarray, estimator: int) -> Terms:
    """The estimators k1, k2 and k3 of the divergence from a reference, with d = reference - p, and their slopes.

    k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d (http://joschu.net/blog/kl-approx.html).
    """
    d = reference - p
    match estimator:
        case 1:
            return -d, np.ones_like(d)
        case 2:
            return d**2 / 2, -d
        case _:
            rise = np.expm1(np.minimum(d, MAX_LOG_RATIO))
            return rise - d, -rise


FORMULAS: Mapping[str, Formula] = TokenLossAttribute("numpy_terms")


class MockSamplingClient:
    """Samples from a copy of the table, so later training does not change it. Methods as in `SamplingClient`."""

    def __init__(self, policy: TablePolicy) -> None:
        self._policy = copy.copy(policy)
        self._policy.logits = policy.logits.copy()
        self._tokenizer = policy.tokenizer
        self._tables: dict[tuple[float, int, float, float], tuple[np.ndarray, np.ndarray]] = {}
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
        if num_samples < 1:
            raise ValueError(f"sample: num_samples={num_samples}, expected at least 1")
        asked = sampling_params
        seed = asked.seed if asked.seed is not None else rng.key("unseeded", self.fingerprint, next(self._calls))
        logprobs, cumulative = self._table(asked)
        length = asked.max_tokens or DEFAULT_MAX_TOKENS
        if asked.temperature == 0:
            tokens_NL = np.full((num_samples, length), logprobs.argmax())
        else:
            keys = [rng.key("sample", seed, index) for index in range(num_samples)]
            drawn_NL = np.searchsorted(cumulative, rng.uniforms(keys, length) * cumulative[-1], side="right")
            # Rounding can put a target at the very end: then it is the last token that adds something.
            tokens_NL = np.minimum(drawn_NL, np.searchsorted(cumulative, cumulative[-1]))
        sequences = [self._cut_at_stop(row_L, logprobs, asked.stop) for row_L in tokens_NL]
        known = self._prompt_logprobs(prompt, asked.temperature or 1.0) if include_prompt_logprobs else None
        return LazyFuture.from_value(SampleResponse(sequences, known, self.fingerprint))

    def _table(self, asked: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
        """Log-probs [V] at the temperature, and the running sum [V] of what may be drawn; both as the engine has it."""
        chosen = (asked.temperature or 1.0, asked.top_k, asked.top_p, asked.min_p)
        if chosen not in self._tables:
            logprobs = self._policy.logprobs(chosen[0])
            order = np.argsort(-logprobs, kind="stable")
            keep = np.arange(len(order)) < (len(order) if asked.top_k < 0 else asked.top_k)
            probs = np.exp(logprobs[order]) * keep
            keep &= (np.cumsum(probs) - probs < asked.top_p * probs.sum()) | (asked.top_p >= 1)
            keep &= probs >= asked.min_p * probs[0]
            keep[0] = True
            allowed = np.zeros(len(probs), dtype=bool)
            allowed[order] = keep
            self._tables[chosen] = logprobs, np.cumsum(np.where(allowed, np.exp(logprobs), 0.0))
        return self._tables[chosen]

    def _cut_at_stop(self, row_L: np.ndarray, logprobs: np.ndarray, stop: Any) -> SampledSequence:
        """The drawn tokens up to the first stop token or stop string."""
        stops: list[Any] = (
            [self._tokenizer.eos_token_id] if stop is None else [stop] if isinstance(stop, str) else [*stop]
        )
        strings = [s for s in stops if isinstance(s, str)]
        if "" in strings:
            raise ValueError("sample: an empty stop string would end every answer at its first token; leave it out")
        hits = np.isin(row_L, [s for s in stops if not isinstance(s, str)])
        length, reason, end_tokens = len(row_L), StopReason.LENGTH, 0
        if hits.any():
            length, reason, end_tokens = int(hits.argmax()) + 1, StopReason.STOP, 1
        for n in range(1, length + 1) if strings else ():
            text = self._tokenizer.decode(row_L[:n])
            if any(s in text for s in strings):
                if n < length or not end_tokens:
                    length, reason, end_tokens = n, StopReason.STOP, 0
                break
        tokens = row_L[:length]
        return SampledSequence(reason, tokens.tolist(), logprobs[tokens].tolist(), end_tokens)

    def _prompt_logprobs(self, prompt: ModelInput, temperature: float) -> list[float | None]:
        self._policy.check_tokens(np.asarray(prompt.tokens), "the prompt")
        return [None, *self._policy.logprobs(temperature)[prompt.tokens[1:]].tolist()]

    def compute_logprobs(self, prompt: ModelInput, temperature: float = 1.0) -> Future[list[float | None]]:
        return LazyFuture.from_value(self._prompt_logprobs(prompt, temperature))

    def get_tokenizer(self) -> WordTokenizer:
        return self._tokenizer


class MockTrainingClient:
    """Trains a `TablePolicy` by exact gradients; methods as in `TrainingClient`. States are saved in `folder`."""

    capabilities = ClientCapabilities(
        "mock",
        losses=FORMULAS.keys(),
        features=frozenset(Feature) - {Feature.FULL_LOGITS, Feature.STEPPERS, Feature.CRITIC},
        scores_at_temperature=True,
    )

    def __init__(self, policy: TablePolicy, folder: Path | None = None) -> None:
        self.policy, self._folder = policy, folder

    @property
    def fingerprint(self) -> str:
        return f"table@{self.policy.version}"

    def forward_backward(
        self, data: list[Datum], loss_fn: str, loss_fn_config: dict[str, float] | None = None
    ) -> Future[ForwardBackwardOutput]:
        return LazyFuture.from_value(self._run(data, loss_fn, loss_fn_config, backward=True))

    def forward(
        self, data: list[Datum], loss_fn: str = "cross_entropy", loss_fn_config: dict[str, float] | None = None
    ) -> Future[ForwardBackwardOutput]:
        return LazyFuture.from_value(self._run(data, loss_fn, loss_fn_config, backward=False))

    def _run(
        self, data: list[Datum], loss_fn: str, config: dict[str, float] | None, *, backward: bool
    ) -> ForwardBackwardOutput:
        settings, targets_N, inputs = self._check_data(data, loss_fn, config)
        lengths = [datum.model_input.length for datum in data]
        row_N = np.repeat(np.arange(len(data)), lengths)
        temperature = settings["temperature"]
        table = self.policy.logprobs(temperature)
        p_N = table[targets_N]
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is an error below
            terms_N, slopes_N = FORMULAS[loss_fn](p_N, inputs, settings, row_N)
            if "kl_weights" in inputs:
                counts_N = inputs["kl_weights"] != 0  # 0 x exp(95) would be nan
                reference_N = np.where(counts_N, inputs["reference_logprobs"], p_N)
                kl_N, rise_N = kl_terms(p_N, reference_N, int(settings["kl_estimator"]))
                terms_N, slopes_N = terms_N + inputs["kl_weights"] * kl_N, slopes_N + inputs["kl_weights"] * rise_N
            if CROSS_ENTROPY_INPUT in inputs:
                weights_N = inputs[CROSS_ENTROPY_INPUT]
                terms_N, slopes_N = terms_N - weights_N * p_N, slopes_N - weights_N
        if (bad_N := ~(np.isfinite(terms_N) & np.isfinite(slopes_N))).any():
            raise NonFiniteError("a loss", sorted(set(row_N[bad_N].tolist())))
        # d log softmax(logits / T)[t] / d logits = (onehot(t) - softmax) / T
        gradient = np.bincount(targets_N, slopes_N, len(table)) - np.exp(table) * slopes_N.sum()
        if backward:
            before = self.policy.gradient
            self.policy.gradient = gradient / temperature + (0.0 if before is None else before)
        outputs = [{"logprobs": TensorData.of(part)} for part in np.split(p_N, np.cumsum(lengths)[:-1])]
        return ForwardBackwardOutput(outputs, {"loss:sum": math.fsum(terms_N)})

    def _check_data(
        self, data: list[Datum], loss_fn: str, config: dict[str, float] | None
    ) -> tuple[dict[str, float], np.ndarray, dict[str, np.ndarray]]:
        """Settings with defaults, targets [N] and inputs [N] end to end; ValueError for what the engine refuses too."""
        if any(ENTROPY_INPUT in datum.loss_fn_inputs for datum in data):
            raise ValueError(
                f"{ENTROPY_INPUT}: the mock client has no exact entropy; use the sampled one "
                "(algorithm.entropy=sampled) or the local client"
            )
        settings = check_batch(data, loss_fn, config, allow_many_targets=False)
        names = ("target_tokens", *list_inputs(data, LOSS_SPECS[loss_fn]))
        inputs = {n: np.concatenate([datum.loss_fn_inputs[n].data for datum in data]) for n in names}
        targets_N = inputs.pop("target_tokens")
        self.policy.check_tokens(targets_N, "target_tokens")
        return settings, targets_N, {name: values.astype(np.float64) for name, values in inputs.items()}

    def forward_backward_custom(
        self, data: list[Datum], loss_fn: CustomLoss, loss_fn_config: dict[str, float] | None = None
    ) -> Future[ForwardBackwardOutput]:
        """The gradient of any function of per-token log-probs (`rlvr.clients.custom_loss`); needs torch."""
        return LazyFuture.from_value(two_passes(self, data, loss_fn, loss_fn_config))

    def optim_step(self, adam_params: AdamParams) -> Future[OptimStepResponse]:
        """One AdamW step, as `torch.optim.AdamW` does it, at `policy.rate` times the rate."""
        self.capabilities.check_optimizer(adam_params)
        policy, a = self.policy, adam_params
        if policy.gradient is None:
            raise ValueError("optim_step: no gradients were accumulated; call forward_backward first")
        norm = float(np.linalg.norm(policy.gradient))
        scale = min(1.0, a.grad_clip_norm / (norm + 1e-6)) if a.grad_clip_norm > 0 else 1.0
        g, policy.gradient = policy.gradient * scale, None
        policy.version, policy.adam_steps = policy.version + 1, policy.adam_steps + 1
        first, second = policy.moments
        policy.moments = np.stack([a.beta1 * first + (1 - a.beta1) * g, a.beta2 * second + (1 - a.beta2) * g * g])
        mean = policy.moments[0] / (1 - a.beta1**policy.adam_steps)
        root = np.sqrt(policy.moments[1] / (1 - a.beta2**policy.adam_steps)) + a.eps
        rate = a.learning_rate * policy.rate
        policy.logits = policy.logits * (1 - rate * a.weight_decay) - rate * mean / root
        return LazyFuture.from_value(OptimStepResponse({"grad_norm": norm}))

    def save_state(self, name: str) -> Future[SaveWeightsResponse]:
        return self._save(name, optimizer=True)

    def save_weights_for_sampler(self, name: str) -> Future[SaveWeightsResponse]:
        return self._save(name, optimizer=False)

    def _save(self, name: str, *, optimizer: bool) -> Future[SaveWeightsResponse]:
        if self._folder is None:
            raise ValueError("this mock client was made without a folder to save in; give it one (folder=Path(...))")
        path = Path(self._folder) / check_name(name, "checkpoint name")
        with new_folder(path) as folder:
            self.policy.save(folder, optimizer=optimizer)
        return LazyFuture.from_value(SaveWeightsResponse(str(path)))

    def load_state(self, path: str) -> Future[None]:
        return LazyFuture.from_value(self.policy.load(Path(path), optimizer=False))

    def load_state_with_optimizer(self, path: str) -> Future[None]:
        return LazyFuture.from_value(self.policy.load(Path(path), optimizer=True))

    def interpolate(self, path: str, share: float) -> Future[None]:
        """Go from the weights saved at `path` that share of the way to the present ones, with a fresh optimizer."""
        logits, version = self.policy.logits, self.policy.version
        self.policy.load(Path(path), optimizer=False)
        self.policy.logits += share * (logits - self.policy.logits)
        self.policy.version = version + 1
        return LazyFuture.from_value(None)

    def create_sampling_client(self, model_path: str | None = None) -> MockSamplingClient:
        """A sampler for the weights as they are now, or for those saved at `model_path`."""
        policy = copy.copy(self.policy)
        if model_path is not None:
            policy.load(Path(model_path), optimizer=False)
        return MockSamplingClient(policy)

    def save_weights_and_get_sampling_client(self, name: str | None = None) -> MockSamplingClient:
        if name is not None:
            self.save_weights_for_sampler(name)
        return self.create_sampling_client()

    def create_critic(self) -> NoReturn:
        """Refuse by ValueError: a table of logits ignores the tokens before, so it has no states to value."""
        raise ValueError("client=mock has no critic; use client=local, or an algorithm without one")

    def get_tokenizer(self) -> WordTokenizer:
        return self.policy.tokenizer

    def weights_sha256(self) -> str:
        return self.policy.sha256()

    def describe_environment(self) -> dict[str, str | int]:
        return {"numpy": np.__version__, "cpu": describe_processor()}

    def close(self) -> None:
        """Nothing to close."""


def _build(request: ClientRequest) -> MockTrainingClient:
    policy = toy_policy(request.vocabulary(), request.seed, end=request.source.end_word or "<end>")
    request.log(f"{len(policy.logits):,} trainable parameters, float64 in numpy")
    return MockTrainingClient(policy, request.folder)


def _describe(request: ClientRequest) -> str:
    return f"a table of token logits over {len(request.vocabulary())} words, all weights (client=mock)"


MOCK = ClientSpec(MockTrainingClient.capabilities, _build, _describe, ClientRequest.vocabulary)


class ScriptedSamplingClient:
    """Answers the i-th completion asked for with `script(i)`: token ids. Every log-prob is 0."""

    fingerprint = "script"

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
        limit, sequences = sampling_params.max_tokens or 1 << 30, list[SampledSequence]()
        for _ in range(num_samples):
            answer = list(self._script(next(self._count)))
            reason = StopReason.LENGTH if len(answer) > limit else StopReason.STOP
            sequences.append(SampledSequence(reason, answer[:limit], [0.0] * len(answer[:limit])))
        return LazyFuture.from_value(SampleResponse(sequences, fingerprint=self.fingerprint))

    def compute_logprobs(self, prompt: ModelInput, temperature: float = 1.0) -> Future[list[float | None]]:
        return LazyFuture.from_value([None] + [0.0] * (prompt.length - 1))

    def get_tokenizer(self) -> Any:
        return self._tokenizer
