"""The engine: one model, many policies on it, one lock around the chip.

Sampling requests queue up (`enqueue`) and every `advance` takes all that runs one step further. A server's one thread
calls both; `sample` is both as a future, whose reader advances until its answer is there. A loop that submits a whole
batch before it reads a result therefore gets the same batches, and the same bits, every time. Training calls run under
the same lock, in the order they are asked for.

`rlvr.clients.local` and the server speak the Tinker protocol over this; nothing else above the engine uses it directly.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlvr import draws
from rlvr.engine import heap
from rlvr.engine.adapter_files import read_adapter
from rlvr.engine.lora import LoraBank
from rlvr.engine.model import LanguageModel
from rlvr.engine.options import EngineLimits, LoraConfig
from rlvr.engine.policy import NO_ADAPTER, Policy, Snapshot
from rlvr.engine.sampler import Sampler
from rlvr.engine.scheduler import Request
from rlvr.engine.step import Learner, checked, supervised_view
from rlvr.futures import LazyFuture
from rlvr.messages import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    OptimStepResponse,
    SampleResponse,
    SamplingParams,
    TensorData,
)


class Engine:
    def __init__(self, model: LanguageModel, limits: EngineLimits = EngineLimits()) -> None:
        heap.keep()
        self.model = model
        self.limits = limits
        self.lock = threading.RLock()
        self.bank: LoraBank | None = None
        self.policies: dict[str, Policy] = {}
        self._sampler = Sampler(model, limits)
        self._learner = Learner(model, None, limits)
        self._unseeded = itertools.count()
        self._base: weakref.WeakSet[Snapshot] = weakref.WeakSet()  # of the model alone, which must not be trained then
        self._questions: list[weakref.ref[Question]] = []  # weak: an answer nobody waits for holds no weights

    def create_policy(self, name: str, *, lora: LoraConfig | None = None, seed: int = 0) -> Policy:
        """A trainable set of weights: an adapter with `lora`, else the model itself (then the only policy)."""
        with self.lock:
            if name in self.policies:
                raise ValueError(f"a policy named {name!r} exists already")
            others = self.policies or self.bank or self._base
            if any(p.lora is None for p in self.policies.values()) or (lora is None and others):
                raise ValueError(
                    "full fine-tuning changes the base weights and cannot share an engine; give it its own"
                )
            for p in self.model.parameters().values():
                p.requires_grad_(lora is None)
            parameters = self.model.parameters() if lora is None else self._adapters().new(lora, seed)
            self.policies[name] = Policy(name, parameters, lora)
            return self.policies[name]

    def drop_policy(self, name: str) -> None:
        """Forget an adapter: it cannot be trained any more. Its snapshots, and what they are sampling, live on."""
        with self.lock:
            if name not in self.policies:
                raise ValueError(f"there is no policy named {name!r} to drop; known: {', '.join(self.policies)}")
            if self.policies[name].lora is None:
                raise ValueError(f"policy {name!r} is the model itself and cannot be dropped; drop the engine")
            del self.policies[name]

    def _adapters(self) -> LoraBank:
        if self.bank is None:
            self.bank = self._learner.bank = self._sampler.bank = LoraBank(self.model)
        return self.bank

    # Snapshots

    def snapshot(self, policy: Policy) -> Snapshot:
        """The weights as they are now; under the lock, so never in the middle of a step."""
        with self.lock:
            return policy.snapshot()

    def base_snapshot(self) -> Snapshot:
        """The model without any adapter. Its rows share batches with those of adapters."""
        with self.lock:
            self._base_stays("the base model alone")
            snapshot = Snapshot(f"{self.model.name or 'base'}@0", copy=NO_ADAPTER)
            self._base.add(snapshot)
            return snapshot

    def load_snapshot(self, folder: Path) -> Snapshot:
        """The adapter saved in `folder` (peft's format, any rank), to sample from; no policy is needed for it."""
        with self.lock:
            self._base_stays(f"the adapter {folder}")
            config, weights, fingerprint = read_adapter(folder, self._adapters())
            return Snapshot(fingerprint, copy=weights, scale=config.alpha / config.rank)

    def _base_stays(self, what: str) -> None:
        if any(p.lora is None for p in self.policies.values()):
            raise ValueError(f"{what} cannot be sampled from: all weights of the model are trained in this engine")

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
    ) -> Request:
        """Check a request and put it in line; `advance` computes. Without a seed in the params each call draws anew."""
        tokens = prompt.to_ints()
        room = self.model.context - len(tokens)
        if not tokens:
            raise ValueError("sample: the prompt is empty; give at least one token (a begin token, say)")
        if room < 1:
            raise ValueError(
                f"sample: the prompt has {len(tokens)} tokens and the model's context is {self.model.context}: no room "
                "for an answer; shorten the prompt or use a model with a longer context"
            )
        if min(tokens) < 0 or max(tokens) >= self.model.vocabulary:
            wrong = min(tokens) if min(tokens) < 0 else max(tokens)
            raise ValueError(f"sample: the prompt holds token {wrong}, outside 0..{self.model.vocabulary - 1}")
        if count < 1:
            raise ValueError(f"sample: num_samples={count}, expected at least 1")
        for name, asked in (("topk_prompt_logprobs", topk_prompt), ("topk_sample_logprobs", topk_sample)):
            if not 0 <= asked <= self.model.vocabulary:
                raise ValueError(f"sample: {name}={asked}, expected 0 (off) to {self.model.vocabulary} (every token)")
        ids, strings = self._stops(params)
        if params.seed is None:
            params = replace(params, seed=draws.key("unseeded", snapshot.fingerprint, next(self._unseeded)))
        budget = min(params.max_tokens or room, room)
        request = Request(
            tokens, count, params, snapshot, budget, ids, strings, prompt_logprobs, topk_prompt, topk_sample
        )
        with self.lock:
            self._sampler.scheduler.add(request)
        return request

    def _stops(self, params: SamplingParams) -> tuple[frozenset[int], tuple[str, ...]]:
        if params.stop is None:
            ends = self.model.module.generation_config.eos_token_id if self.model.module.generation_config else None
            ends = [ends] if isinstance(ends, int) else list(ends or [])
            if self.model.tokenizer.eos_token_id is not None:
                ends.append(self.model.tokenizer.eos_token_id)
            return frozenset(ends), ()
        stops = [params.stop] if isinstance(params.stop, str) else list(params.stop)
        strings = tuple(s for s in stops if isinstance(s, str))
        if "" in strings:
            raise ValueError("sample: an empty stop string would end every answer at once")
        if wrong := [s for s in stops if not isinstance(s, (str, int))]:
            raise ValueError(f"sample: stop holds {wrong[0]!r:.80}, expected strings or token ids (whole numbers)")
        return frozenset(s for s in stops if isinstance(s, int)), strings

    def advance(self) -> list[Request]:
        """One step of everything that runs, and the requests that ended with it, answered or failed.

        Whoever else asks for a result of this engine advances too: then look at `request.done`.
        """
        with self.lock:
            return self._sampler.advance()

    @property
    def idle(self) -> bool:
        """Whether no request is waiting or running."""
        return self._sampler.idle

    def cancel(self, request: Request) -> None:
        """Drop what is left of a request, which then has failed; what runs beside it goes on untouched."""
        with self.lock:
            self._sampler.cancel(request)

    def release(self) -> None:
        """Give back the memory that sampling holds and does not use: for a server, when nothing runs for a while."""
        with self.lock:
            self._sampler.release()
            heap.give_back()

    def sample(
        self, snapshot: Snapshot, prompt: ModelInput, count: int, params: SamplingParams, **wanted: Any
    ) -> LazyFuture[SampleResponse]:
        """`enqueue`, as a future that advances the engine until its own request is done."""
        request = self.enqueue(snapshot, prompt, count, params, **wanted)
        return LazyFuture(lambda: self._finish(request), lambda: self._further(request), lambda: request.done)

    def _further(self, request: Request) -> bool:
        with self.lock:
            if not request.done:
                assert not self.idle, "a request that is not done is in no line"
                self._sampler.advance()
        return request.done

    def _finish(self, request: Request) -> SampleResponse:
        with self.lock:
            while not self._further(request):
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
        between: Callable[[], None] | None = None,
    ) -> ForwardBackwardOutput:
        with self.lock:
            self._known(policy)
            return self._learner.forward_backward(policy, data, loss_fn, config, backward=backward, between=between)

    def optim_step(self, policy: Policy, adam: AdamParams) -> OptimStepResponse:
        with self.lock:
            self._known(policy)
            return self._learner.optim_step(policy, adam)

    def _known(self, policy: Policy) -> None:
        if self.policies.get(policy.name) is not policy:
            raise ValueError(f"policy {policy.name!r} was dropped and cannot be trained; create one and load its state")

    def logprobs(
        self, snapshot: Snapshot, prompt: ModelInput, temperature: float = 1.0
    ) -> LazyFuture[list[float | None]]:
        """Queue the log-probs of every token given those before it; None for the first. Checked as a row of training.

        As with `sample`, everything queued when a result is first asked for is computed together.
        """
        tokens = prompt.to_ints()
        asked = Question(snapshot, temperature, None, [None for _ in tokens])
        if len(tokens) > 1:
            row = Datum(ModelInput(tokens[:-1]), {"target_tokens": TensorData.of(tokens[1:])})
            [row] = supervised_view([row])
            checked([row], "cross_entropy", {"temperature": temperature}, self.model)
            asked = Question(snapshot, temperature, row)
        with self.lock:
            self._questions.append(weakref.ref(asked))
        return LazyFuture(lambda: self._answer(asked))

    def _answer(self, asked: Question) -> list[float | None]:
        with self.lock:
            if not asked.done:
                waiting = [q for ref in self._questions if (q := ref()) is not None and not q.done]
                self._compute(
                    [q for q in waiting if (q.snapshot, q.temperature) == (asked.snapshot, asked.temperature)]
                )
                self._questions = [weakref.ref(q) for q in waiting if not q.done]
        if asked.error is not None:
            raise asked.error
        assert asked.answer is not None
        return asked.answer

    def _compute(self, questions: list[Question]) -> None:
        """Answers are set when all are there: who is interrupted asks again."""
        first, rows = questions[0], [q.row for q in questions if q.row is not None]
        try:
            found = self._learner.logprobs(first.snapshot, rows, first.temperature)
        except Exception as error:
            for q in questions:
                q.error = error
            return
        for q, logprobs in zip(questions, found, strict=True):
            q.answer = [None, *logprobs.tolist()]


@dataclass(eq=False)
class Question:
    """Log-probs that somebody waits for; `row` is None where no token has one before it, and the answer is known."""

    snapshot: Snapshot
    temperature: float
    row: Datum | None
    answer: list[float | None] | None = None
    error: Exception | None = None

    @property
    def done(self) -> bool:
        return self.answer is not None or self.error is not None
