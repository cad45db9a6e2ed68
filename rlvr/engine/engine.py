"""The engine: one model, many policies on it, one lock around the chip.

Sampling requests queue up and are computed by the thread that first asks for one of their results; all that is queued
by then runs together. A loop that submits a whole batch before it reads a result therefore gets the same batches,
and the same bits, every time. Training calls run under the same lock, in the order they are asked for.

`rlvr.clients.local` speaks the Tinker protocol over this; nothing above the clients uses it directly.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rlvr import draws
from rlvr.engine.lora import LoraBank
from rlvr.engine.model import LanguageModel
from rlvr.engine.options import EngineLimits, LoraConfig
from rlvr.engine.policy import Policy, Snapshot, weights_of
from rlvr.engine.runner import RowCache, prefill, recompute
from rlvr.engine.sampling import sample
from rlvr.engine.scheduler import Request, Row, Scheduler
from rlvr.engine.step import Learner, checked, routed, supervised_view
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
        self.model = model
        self.limits = limits
        self.lock = threading.RLock()
        self.bank: LoraBank | None = None
        self.policies: dict[str, Policy] = {}
        self._scheduler = Scheduler(limits.max_rows, limits.micro_tokens)
        self._cache = RowCache()
        self._learner = Learner(model, None, limits.micro_tokens, limits.logit_elements)
        self._unseeded = itertools.count()
        self._questions: list[weakref.ref[Question]] = []  # weak: an answer nobody waits for holds no weights

    def create_policy(self, name: str, *, lora: LoraConfig | None = None, seed: int = 0) -> Policy:
        """A trainable set of weights: an adapter with `lora`, else the model itself (then the only policy)."""
        if name in self.policies:
            raise ValueError(f"a policy named {name!r} exists already")
        if any(p.lora is None or lora is None for p in self.policies.values()):
            raise ValueError("full fine-tuning changes the base weights and cannot share an engine; give it its own")
        with self.lock:
            if lora is None:
                parameters = self.model.parameters()
                for p in parameters.values():
                    p.requires_grad_(True)
            else:
                for p in self.model.parameters().values():
                    p.requires_grad_(False)
                if self.bank is None:
                    self.bank = self._learner.bank = LoraBank(self.model.module)
                parameters = self.bank.new(lora, seed)
            self.policies[name] = Policy(name, parameters, lora)
        return self.policies[name]

    # Sampling

    def sample(
        self, snapshot: Snapshot, prompt: ModelInput, count: int, params: SamplingParams
    ) -> LazyFuture[SampleResponse]:
        """Queue `count` completions of one prompt. Without a seed in the params each call draws anew."""
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
        if params.seed is None:
            params = replace(params, seed=draws.key("unseeded", snapshot.fingerprint, next(self._unseeded)))
        ids, strings = self._stops(params)
        budget = min(params.max_tokens or room, room)
        request = Request(tokens, count, params, snapshot, budget, ids, strings)
        request.future = LazyFuture(lambda: self._finish(request))
        with self.lock:
            self._scheduler.add(request)
        return request.future

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
        return frozenset(s for s in stops if isinstance(s, int)), strings

    def _finish(self, request: Request) -> SampleResponse:
        with self.lock:
            while not request.done:
                self._advance()
        if request.error is not None:
            raise request.error
        return request.response()

    @torch.inference_mode()
    def _advance(self) -> None:
        """One step of everything that runs: admit and prefill newcomers, or one token for each running row."""
        scheduler, groups = self._scheduler, []
        try:
            if groups := scheduler.admit():
                self._prefill(groups)
            else:
                rows = scheduler.rows
                with self._weights(rows):
                    if self.model.caches:
                        last = torch.tensor([row.tokens[-1] for row in rows])
                        at = torch.tensor([row.length - 1 for row in rows])
                        hidden = self._cache.decode(self.model, last, at)
                    else:
                        hidden = recompute(self.model, [row.request.prompt + row.tokens for row in rows])
                    ended = self._extend(rows, hidden)
                self._retire(ended)
        except BaseException as error:
            known = isinstance(error, Exception)
            cause = error if known else RuntimeError(f"sampling was interrupted by {type(error).__name__}")
            scheduler.abandon(cause, [row for group in groups for row in group])
            if not known:
                raise

    def _prefill(self, groups: list[list[Row]]) -> None:
        """Compute each newcomer's prompt once, draw first tokens for all its rows, and seat those that go on."""
        rows = [row for group in groups for row in group]
        source = [g for g, group in enumerate(groups) for _ in group]
        prompts = [group[0].request.prompt for group in groups]
        with self._weights([group[0] for group in groups]):
            if self.model.caches:
                hidden, layers = prefill(self.model, prompts)
            else:
                hidden, layers = recompute(self.model, prompts), []
            ended = set(self._extend(rows, hidden[torch.tensor(source, device=hidden.device)]))
        staying = [i for i in range(len(rows)) if i not in ended]
        running = self._scheduler.rows
        if staying and self.model.caches:
            seats = range(len(running), len(running) + len(staying))
            needed = max(len(row.request.prompt) + row.request.budget for row in rows)
            self._cache.place(
                layers,
                [source[i] for i in staying],
                [len(rows[i].request.prompt) for i in staying],
                rows=list(seats),
                capacity=len(running) + len(staying),
                length=min(needed, 2 * max(len(row.request.prompt) for row in rows) + 64),
            )
        running.extend(rows[i] for i in staying)

    def _extend(self, rows: Sequence[Row], hidden_RD: torch.Tensor) -> list[int]:
        device = self.model.device
        params = [row.request.params for row in rows]

        def column(name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
            return torch.tensor([getattr(p, name) for p in params], device=device, dtype=dtype)

        filters = None
        if any(p.top_k != -1 or p.top_p < 1 or p.min_p > 0 for p in params):
            filters = (column("top_k"), column("top_p", torch.float64), column("min_p", torch.float64))
        tokens, logprobs = sample(
            self.model.head(hidden_RD),
            column("temperature"),
            torch.tensor([row.key for row in rows], device=device),
            torch.tensor([len(row.tokens) for row in rows], device=device),
            filters,
        )
        return self._scheduler.advance(rows, tokens.tolist(), logprobs.tolist(), self.model.tokenizer)

    def _retire(self, ended: list[int]) -> None:
        sources, targets = self._scheduler.retire(ended)
        if self.model.caches:
            self._cache.move(sources, targets)

    def _weights(self, rows: Sequence[Row]):
        from contextlib import ExitStack

        stack = ExitStack()
        stack.enter_context(weights_of(self.model, rows[0].request.snapshot))
        stack.enter_context(routed(self.bank, [row.request.snapshot for row in rows]))
        return stack

    # Training

    def forward_backward(
        self,
        policy: Policy,
        data: Sequence[Datum],
        loss_fn: str,
        config: dict[str, float] | None,
        *,
        backward: bool = True,
    ) -> ForwardBackwardOutput:
        with self.lock:
            return self._learner.forward_backward(policy, data, loss_fn, config, backward=backward)

    def optim_step(self, policy: Policy, adam: AdamParams) -> OptimStepResponse:
        with self.lock:
            return self._learner.optim_step(policy, adam)

    def snapshot(self, policy: Policy) -> Snapshot:
        """The weights as they are now; under the lock, so never in the middle of a step."""
        with self.lock:
            return policy.snapshot()

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
        settings = {"temperature": first.temperature}
        try:
            output = self._learner.forward_backward(
                first.snapshot.policy, rows, "cross_entropy", settings, backward=False, snapshot=first.snapshot
            )
        except Exception as error:
            for q in questions:
                q.error = error
            return
        for q, out in zip(questions, output.loss_fn_outputs, strict=True):
            q.answer = [None, *out["logprobs"].tolist()]


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
