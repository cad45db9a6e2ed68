"""The engine: one model, many policies on it, one lock around the device.

Sampling requests are queued (`enqueue`), and every `advance` takes all that runs one step further. A server's thread
calls both. `sample` is both as a future, which advances the engine until its own request is done. A loop that submits a
whole batch before it reads a result therefore gets the same batches, and the same bits, every time. Training calls run
under the same lock, in the order of the calls.

`rlvr.clients.local` and the server speak the Tinker protocol over this; nothing else above the engine uses it directly.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from rlvr.core import rng
from rlvr.core.futures import LazyFuture
from rlvr.core.messages import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    OptimStepResponse,
    PromptTargets,
    SampleResponse,
    SamplingParams,
    TensorData,
)
from rlvr.engine import malloc
from rlvr.engine.adapter_files import read_adapter
from rlvr.engine.engine_options import EngineLimits, LoraConfig
from rlvr.engine.learner import Learner, check_data, with_zero_weights
from rlvr.engine.lora import LoraBank
from rlvr.engine.model import LanguageModel
from rlvr.engine.muon import hidden_matrices
from rlvr.engine.policy import NO_ADAPTER, Policy, Snapshot
from rlvr.engine.sampler import Sampler
from rlvr.engine.scheduler import SampledToken, SamplingRequest


@dataclass(eq=False)
class LogprobRequest:
    """A call of `Engine.logprobs` with its result; `row` is None for a prompt of one token, which needs no pass."""

    snapshot: Snapshot
    temperature: float
    row: Datum | None
    logprobs: list[float | None] | None = None
    error: Exception | None = None

    @property
    def is_done(self) -> bool:
        """Whether the request was computed or has failed."""
        return self.logprobs is not None or self.error is not None


class GradientSource(Protocol):
    """What computes the gradients of adapters in other processes; `AdapterTrainers` does."""

    def forward_backward(
        self,
        policy: Policy,
        data: Sequence[Datum],
        loss_fn: str,
        config: dict[str, float] | None = None,
        *,
        backward: bool = True,
        after_batch: Callable[[], None] | None = None,
    ) -> ForwardBackwardOutput:
        """Do what `Learner.forward_backward` does, in the other processes."""
        ...

    def close(self) -> None:
        """End the processes."""
        ...


class Engine:
    """One model with the policies that are trained on it: adapters, or all of its weights.

    `LocalTrainingClient(engine, policy, folder)` is its interface for loops. `model` is what `load_model` or
    `build_model` gave, `policies` are those made here, by name, `lock` is held by every call that computes. With
    `trainers` these compute the gradients of adapters.
    """

    def __init__(
        self, model: LanguageModel, limits: EngineLimits = EngineLimits(), trainers: GradientSource | None = None
    ) -> None:
        malloc.keep_freed_memory()
        self.model = model
        self.limits = limits
        self.lock = threading.RLock()
        self.bank = LoraBank(model)  # owns the adapters' hooks on the model; sampler and learner use it
        self.policies: dict[str, Policy] = {}
        self._sampler = Sampler(model, self.bank, limits)
        self._learner = Learner(model, self.bank, limits)
        self.trainers = trainers
        self._unseeded = itertools.count()
        self._base: weakref.WeakSet[Snapshot] = weakref.WeakSet()  # of the base model, which must not be trained then
        self._logprob_requests: list[weakref.ref[LogprobRequest]] = []  # weak: a dropped future keeps no weights alive

    def create_policy(self, name: str, *, lora: LoraConfig | None = None, seed: int = 0) -> Policy:
        """Create a trainable set of weights: an adapter with `lora`, else the model itself (then the only policy)."""
        with self.lock:
            if name in self.policies:
                raise ValueError(f"a policy named {name!r} exists already; choose another name")
            others = self.policies or self.bank.installed or self._base
            if any(p.lora is None for p in self.policies.values()) or (lora is None and others):
                raise ValueError(
                    "full fine-tuning changes the base weights and cannot share an engine; give it its own"
                )
            for p in self.model.parameters().values():
                p.requires_grad_(lora is None)
            parameters = self.model.parameters() if lora is None else self.bank.init_weights(lora, seed)
            matrices = hidden_matrices(self.model.module) if lora is None else None
            self.policies[name] = Policy(name, parameters, lora, matrices)
            return self.policies[name]

    def drop_policy(self, name: str) -> None:
        """Drop an adapter, which cannot be trained any more. Its snapshots, and what samples from them, live on."""
        with self.lock:
            if name not in self.policies:
                raise ValueError(f"there is no policy named {name!r} to drop; known: {', '.join(self.policies)}")
            if self.policies[name].lora is None:
                raise ValueError(f"policy {name!r} is the model itself and cannot be dropped; drop the engine")
            del self.policies[name]

    # Snapshots

    def snapshot(self, policy: Policy) -> Snapshot:
        """The weights as they are now. Takes the lock, so never in the middle of a step."""
        with self.lock:
            return policy.snapshot()

    def base_snapshot(self) -> Snapshot:
        """The model without any adapter. Its rows share batches with those of adapters."""
        with self.lock:
            self._check_base_unchanged("the base model alone")
            snapshot = Snapshot(f"{self.model.name or 'base'}@0", copy=NO_ADAPTER)
            self._base.add(snapshot)
            return snapshot

    def load_snapshot(self, folder: Path) -> Snapshot:
        """Load the adapter saved in `folder` (peft's format, any rank) to sample from; it needs no policy."""
        with self.lock:
            self._check_base_unchanged(f"the adapter {folder}")
            self.bank.install()
            config, weights, fingerprint = read_adapter(folder, self.bank)
            return Snapshot(fingerprint, copy=weights, scale=config.alpha / config.rank)

    def load_weights(self, folder: Path, policy: Policy) -> Snapshot:
        """Load all weights that a run saved in `folder` to sample from. They become the model's own: no copy is kept
        of earlier ones unless a snapshot needs them. ValueError naming what is damaged or does not fit."""
        from rlvr.engine.checkpoint import read_snapshot

        snapshot = read_snapshot(folder, policy, self.model)  # without the lock: others are sampled from meanwhile
        with self.lock:
            policy.adopt(snapshot)
        return snapshot

    def _check_base_unchanged(self, what: str) -> None:
        if any(p.lora is None for p in self.policies.values()):
            raise ValueError(
                f"{what} cannot be sampled from: a policy of this engine trains all weights of the model; load the "
                "model into an engine of its own"
            )

    # Sampling

    def enqueue(
        self,
        snapshot: Snapshot,
        prompt: ModelInput,
        count: int,
        params: SamplingParams,
        *,
        prompt_logprobs: bool = False,
        topk_prompt: int = 0,
        topk_sample: int = 0,
        prompt_targets: PromptTargets | None = None,
        prompt_last: int | None = None,
        prompt_alternatives: int = 0,
        on_token: Callable[[SampledToken], None] | None = None,
    ) -> SamplingRequest:
        """Check a request and queue it; `advance` computes. Without a seed in the params each call samples anew.

        Only the last `prompt_last` tokens of the prompt are scored, by default all but the first. `prompt_alternatives`
        is how many tokens are drawn in each place of the prompt but the first, with replacement and at the temperature
        of the params.
        `on_token` is called with every token when it is sampled, in the thread that advances the engine.
        """
        tokens = prompt.to_ints()
        self._check_sampling(tokens, count, topk_prompt, topk_sample)
        scored = len(tokens) - 1 if prompt_last is None else prompt_last
        if prompt_last is not None and not 1 <= prompt_last < len(tokens):
            raise ValueError(f"sample: prompt_logprobs_last_n={prompt_last}, expected 1 to {len(tokens) - 1}")
        if prompt_alternatives < 0:
            raise ValueError(f"sample: prompt_alt_tokens_k={prompt_alternatives}, expected at least 0")
        if prompt_targets is not None:
            self._check_targets(prompt_targets, len(tokens))
        stops = self._resolve_stops(params)
        if params.seed is None:
            params = replace(params, seed=rng.key("unseeded", snapshot.fingerprint, next(self._unseeded)))
        room = self.model.context - len(tokens)
        budget = min(params.max_tokens or room, room)
        request = SamplingRequest(
            tokens,
            count,
            params,
            snapshot,
            budget,
            *stops,
            prompt_logprobs,
            topk_prompt,
            topk_sample,
            prompt_targets,
            scored,
            prompt_alternatives,
            on_token,
        )
        with self.lock:
            self._sampler.scheduler.add(request)
        return request

    def check_request(self, prompt: ModelInput, count: int, params: SamplingParams) -> None:
        """ValueError for what `enqueue` would refuse, for a request that another engine samples."""
        self._check_sampling(prompt.to_ints(), count, 0, 0)
        self._resolve_stops(params)

    def _check_sampling(self, tokens: list[int], count: int, topk_prompt: int, topk_sample: int) -> None:
        if not tokens:
            raise ValueError("sample: the prompt is empty; give at least one token (a begin token, say)")
        if len(tokens) >= self.model.context:
            raise ValueError(
                f"sample: the prompt has {len(tokens)} tokens and the model's context is {self.model.context}: no room "
                "for an answer; shorten the prompt or use a model with a longer context"
            )
        if min(tokens) < 0 or max(tokens) >= self.model.vocabulary:
            wrong = min(tokens) if min(tokens) < 0 else max(tokens)
            raise ValueError(f"sample: the prompt holds token {wrong}, outside 0..{self.model.vocabulary - 1}")
        if count < 1:
            raise ValueError(f"sample: num_samples={count}, expected at least 1")
        for name, top in (("topk_prompt_logprobs", topk_prompt), ("topk_sample_logprobs", topk_sample)):
            if not 0 <= top <= self.model.vocabulary:
                raise ValueError(f"sample: {name}={top}, expected 0 (off) to {self.model.vocabulary} (every token)")

    def _check_targets(self, targets: PromptTargets, length: int) -> None:
        for what, values_N, low, high in (
            ("position", targets.positions_N, 1, length - 1),
            ("token", targets.tokens_N, 0, self.model.vocabulary - 1),
        ):
            if len(wrong := values_N[(values_N < low) | (values_N > high)]):
                raise ValueError(f"sample: target_prompt_logprobs hold the {what} {wrong[0]}, outside {low}..{high}")

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens of the model and its tokenizer that end a completion."""
        ends = self.model.module.generation_config.eos_token_id if self.model.module.generation_config else None
        ends = [ends] if isinstance(ends, int) else list(ends or [])
        if self.model.tokenizer.eos_token_id is not None:
            ends.append(self.model.tokenizer.eos_token_id)
        return frozenset(ends)

    def _resolve_stops(self, params: SamplingParams) -> tuple[frozenset[int], tuple[str, ...]]:
        """The stop tokens and stop strings; by default the end tokens."""
        if params.stop is None:
            return self.end_tokens, ()
        stops = [params.stop] if isinstance(params.stop, str) else list(params.stop)
        strings = tuple(s for s in stops if isinstance(s, str))
        if "" in strings:
            raise ValueError("sample: an empty stop string would end every answer at its first token; leave it out")
        if wrong := [s for s in stops if not isinstance(s, (str, int))]:
            raise ValueError(f"sample: stop holds {wrong[0]!r:.80}, expected strings or token ids (whole numbers)")
        return frozenset(s for s in stops if isinstance(s, int)), strings

    def advance(self, chosen: Callable[[SamplingRequest], bool] = lambda _: True) -> list[SamplingRequest]:
        """Take everything that runs one step further; returns the requests that finished or failed in it.

        With `chosen`, only those requests go on, unless none of them has room before others end. Reading a future of
        `sample` advances too, so also check `request.is_done`.
        """
        with self.lock:
            return self._sampler.advance(chosen)

    @property
    def idle(self) -> bool:
        """Whether no request is waiting or running."""
        return self._sampler.idle

    def cancel(self, request: SamplingRequest) -> None:
        """Fail a request that is not done. The other requests go on unchanged."""
        with self.lock:
            self._sampler.cancel(request)

    def release(self) -> None:
        """Free the memory that sampling holds and does not use. A server calls it after a while without requests."""
        with self.lock:
            self._sampler.release()
            malloc.release_free_memory()

    def sample(
        self, snapshot: Snapshot, prompt: ModelInput, count: int, params: SamplingParams, **options: Any
    ) -> LazyFuture[SampleResponse]:
        """`enqueue` as a future, which advances the engine until its own request is done."""
        request = self.enqueue(snapshot, prompt, count, params, **options)
        return LazyFuture(lambda: self._finish(request), lambda: self._step(request), lambda: request.is_done)

    def _step(self, request: SamplingRequest) -> bool:
        """Advance once unless the request is done; returns whether it is done."""
        with self.lock:
            if not request.is_done:
                assert not self.idle, "a request that is not done is not queued"
                self._sampler.advance()
        return request.is_done

    def _finish(self, request: SamplingRequest) -> SampleResponse:
        with self.lock:
            while not self._step(request):
                pass
        return request.response()

    # Training

    def forward_backward(
        self,
        policy: Policy,
        data: Sequence[Datum],
        loss_fn: str,
        config: dict[str, float] | None,
        *,
        backward: bool = True,
        after_batch: Callable[[], None] | None = None,
    ) -> ForwardBackwardOutput:
        """Add the gradient of a named loss to the policy's, or with `backward=False` only compute log-probs [T].

        `after_batch` is called after each micro-batch. It may sample and train other policies (without `trainers`), and
        must not change this one.
        """
        with self.lock:
            self._check_current(policy)
            if backward:
                self._sampler.make_room_for_training()
            source = self.trainers if self.trainers and policy.lora and not policy.is_critic else self._learner
            return source.forward_backward(policy, data, loss_fn, config, backward=backward, after_batch=after_batch)

    def optim_step(self, policy: Policy, adam: AdamParams) -> OptimStepResponse:
        """One step of AdamW, or of the `stepper` of the parameters, with the policy's accumulated gradients."""
        with self.lock:
            self._check_current(policy)
            done = self._learner.optim_step(policy, adam)
            malloc.release_unused_heap()
            return done

    def _check_current(self, policy: Policy) -> None:
        if self.policies.get(policy.name) is not policy:
            raise ValueError(f"policy {policy.name!r} was dropped and cannot be trained; create one and load its state")

    def logprobs(
        self, snapshot: Snapshot, prompt: ModelInput, temperature: float = 1.0
    ) -> LazyFuture[list[float | None]]:
        """Queue the log-probs of every token given those before it; None for the first. Checked as a row of training.

        As with `sample`, everything that is queued when a result is first read is computed together.
        """
        tokens = prompt.to_ints()
        request = LogprobRequest(snapshot, temperature, None, [None for _ in tokens])
        if len(tokens) > 1:
            row = Datum(ModelInput(tokens[:-1]), {"target_tokens": TensorData.of(tokens[1:])})
            [row] = with_zero_weights([row])
            check_data([row], "cross_entropy", {"temperature": temperature}, self.model.context, self.model.vocabulary)
            request = LogprobRequest(snapshot, temperature, row)
        with self.lock:
            self._logprob_requests.append(weakref.ref(request))
        return LazyFuture(lambda: self._finish_logprobs(request))

    def _finish_logprobs(self, request: LogprobRequest) -> list[float | None]:
        with self.lock:
            if not request.is_done:
                waiting = [r for ref in self._logprob_requests if (r := ref()) is not None and not r.is_done]
                key = (request.snapshot, request.temperature)
                self._compute_logprobs([r for r in waiting if (r.snapshot, r.temperature) == key])
                self._logprob_requests = [weakref.ref(r) for r in waiting if not r.is_done]
        if request.error is not None:
            raise request.error
        assert request.logprobs is not None
        return request.logprobs

    def _compute_logprobs(self, requests: list[LogprobRequest]) -> None:
        """Compute requests of one snapshot and temperature. Sets all results or none, so a retry is possible."""
        first, rows = requests[0], [r.row for r in requests if r.row is not None]
        try:
            results = self._learner.logprobs(first.snapshot, rows, first.temperature)
        except Exception as error:
            for request in requests:
                request.error = error
            return
        for request, logprobs in zip(requests, results, strict=True):
            request.logprobs = [None, *logprobs.tolist()]
