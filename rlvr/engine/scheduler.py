"""Decides which rows run next. No tensors: the sampler computes.

Requests wait in order of arrival. A request's completions become rows as soon as there is room. Rows of different
requests, callers and adapters share a batch, and a finished completion's slot goes to the next request (continuous
batching). Completions of a request are one row for as long as they sample the same tokens. Which rows run together
depends only on the requests and on the sampled tokens, never on time, so the same requests give the same batches again
(a server whose callers take turns chooses among them).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from rlvr.core import rng
from rlvr.core.messages import (
    LikeliestTokens,
    NonFiniteError,
    PromptAlternatives,
    PromptTargets,
    SampledSequence,
    SampleResponse,
    SamplingParams,
)
from rlvr.core.types import StopReason
from rlvr.engine.engine_options import EngineLimits
from rlvr.engine.policy import Snapshot


class PromptScores(NamedTuple):
    """Log-probs of a prompt: of its own last tokens and the likeliest ones there, of targets, and of drawn tokens."""

    logprobs: list[float]
    likeliest: list[LikeliestTokens]
    targets: list[float]
    alternatives: PromptAlternatives | None = None


class SampledToken(NamedTuple):
    """A token of completion `index`; `likeliest` is empty unless the request has `topk_sample`."""

    index: int
    token: int
    logprob: float
    likeliest: Sequence[tuple[int, float]]


@dataclass(eq=False)
class SamplingRequest:
    """One `sample` call: `count` completions of one prompt under one snapshot, of at most `budget` tokens each.

    Of the prompt the last `scored_tokens` are scored; `alternatives` tokens are drawn in each place of the
    prompt but the first. `on_token` is called with every token, in the thread that samples: it must return
    at once and raise nothing.
    """

    prompt: list[int]
    count: int
    params: SamplingParams
    snapshot: Snapshot
    budget: int
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    prompt_logprobs: bool = False
    topk_prompt: int = 0
    topk_sample: int = 0
    prompt_targets: PromptTargets | None = None
    scored_tokens: int = 0
    alternatives: int = 0
    on_token: Callable[[SampledToken], None] | None = None
    started: int = 0
    finished: dict[int, SampledSequence] = field(default_factory=dict[int, SampledSequence])
    prompt_scores: PromptScores | None = None
    error: Exception | None = None

    @property
    def is_done(self) -> bool:
        return self.error is not None or len(self.finished) == self.count

    @property
    def reach(self) -> int:
        """The most tokens that a row of this request may have, prompt included."""
        return len(self.prompt) + self.budget

    @property
    def scores_prompt(self) -> bool:
        """Whether its prompt's log-probs are requested and not computed yet."""
        is_requested = self.scores_own_tokens or self.prompt_targets is not None or self.alternatives > 0
        return is_requested and self.prompt_scores is None

    @property
    def scores_own_tokens(self) -> bool:
        return self.prompt_logprobs or self.topk_prompt > 0

    def response(self) -> SampleResponse:
        """The result of a request that is done; raises its error if it failed."""
        if self.error is not None:
            raise self.error
        assert self.is_done
        scores = self.prompt_scores or PromptScores([], [], [])
        unscored = [None] * (len(self.prompt) - self.scored_tokens)
        return SampleResponse(
            [self.finished[i] for i in range(self.count)],
            [*unscored, *scores.logprobs] if self.prompt_logprobs else None,
            self.snapshot.fingerprint,
            [*unscored, *scores.likeliest] if self.topk_prompt else None,
            prompt_target_logprobs=None if self.prompt_targets is None else scores.targets,
            prompt_alternatives=scores.alternatives,
        )


@dataclass(frozen=True)
class PendingCompletion:
    """One completion of a request. Its random draws depend on the request's seed, `index` and the token position."""

    index: int
    key: int


@dataclass(eq=False)
class SampleRow:
    """Completions of a request whose tokens are the same so far, computed as one row until they differ."""

    request: SamplingRequest
    completions: list[PendingCompletion]
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    likeliest: list[LikeliestTokens] = field(default_factory=list[LikeliestTokens])

    @property
    def length(self) -> int:
        """Tokens in the cache once the last sampled one was fed."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def is_finished(self) -> bool:
        return self.request.error is not None or not self.completions

    def fork(self, completions: list[PendingCompletion]) -> SampleRow:
        """A new row for some of the completions, with their tokens so far."""
        return SampleRow(self.request, completions, list(self.tokens), list(self.logprobs), list(self.likeliest))


class Scheduler:
    def __init__(self, limits: EngineLimits) -> None:
        self.max_rows = limits.max_rows
        self.one_request = limits.one_request
        self.cache_tokens = limits.cache_tokens
        self.prefill_tokens = limits.micro_tokens
        self.waiting: deque[SamplingRequest] = deque()
        self.rows: list[SampleRow] = []

    def add(self, request: SamplingRequest) -> None:
        self.waiting.append(request)

    @property
    def running_completions(self) -> int:
        """Completions of the running rows. Each may need a row of its own."""
        return sum(len(row.completions) for row in self.rows)

    def admit(
        self, shared_tokens: int = 0, chosen: Callable[[SamplingRequest], bool] = lambda _: True
    ) -> list[SampleRow]:
        """Take new rows from the queue, one for each `chosen` request, with as many completions as fit.

        The limits: `max_rows`; `prefill_tokens` (padded); `cache_tokens`, counted as if each completion had a row of
        the greatest reach, beside the `shared_tokens` of shared prompts; and one set of weights. Where a request has a
        share (`one_request`), those without a row come first.
        """
        admitted: list[SampleRow] = []
        free, longest = self.max_rows - self.running_completions, 0
        reach = max((row.request.reach for row in self.rows), default=0)
        weights = self.rows[0].request.snapshot.batch_key if self.rows else None
        if self.one_request < 1 and any(request.started for request in self.waiting):
            # Large requests that wait with most of their completions would take every row that becomes free.
            running = {row.request for row in self.rows}
            self.waiting = deque(sorted(self.waiting, key=running.__contains__))
        position = 0  # in the queue
        while position < len(self.waiting) and free:
            request = self.waiting[position]
            if not chosen(request):
                position += 1
                continue
            if (left := self._share_left(request, max(reach, request.reach))) < 1:
                position += 1
                continue
            longest = max(longest, len(request.prompt))
            if weights is None:
                weights = request.snapshot.batch_key
            if request.snapshot.batch_key != weights:
                break
            if admitted and longest * (len(admitted) + 1) > self.prefill_tokens:
                break
            take = min(free, request.count - request.started, left)
            reach = max(reach, request.reach)
            if self.cache_tokens:
                take = min(take, (self.cache_tokens - shared_tokens) // reach - (self.max_rows - free))
                if take < 1:
                    if self.rows or admitted:
                        break
                    take = 1
            seed = request.params.seed
            assert seed is not None
            indices = range(request.started, request.started + take)
            admitted.append(SampleRow(request, [PendingCompletion(i, rng.key("sample", seed, i)) for i in indices]))
            request.started += take
            free -= take
            if request.started == request.count:
                del self.waiting[position]
            else:
                position += 1
        return admitted

    def _share_left(self, request: SamplingRequest, reach: int) -> int:
        """How many more rows a request may have by its share, `one_request`, of all."""
        if self.one_request == 1:
            return request.count
        most = min(self.max_rows, self.cache_tokens // reach) if self.cache_tokens else self.max_rows
        has = sum(len(row.completions) for row in self.rows if row.request is request) if request.started else 0
        return max(1, int(most * self.one_request)) - has

    def record(
        self, rows: Sequence[SampleRow], tokens: Sequence[int], logprobs: Sequence[float], tokenizer: Any
    ) -> list[tuple[int, SampleRow]]:
        """Record one new token per completion, row by row; returns (i, new row) for each fork of row i.

        A row keeps the completions that sampled what its first one did. An error of one token fails its request alone.
        """
        drawn, forks = iter(zip(tokens, logprobs, strict=True)), list[tuple[int, SampleRow]]()
        for i, row in enumerate(rows):
            if len(row.completions) == 1:  # soon true of most rows
                self._record(row, *next(drawn), tokenizer)
                continue
            by_token: dict[int, tuple[float, list[PendingCompletion]]] = {}
            for completion, (token, logprob) in zip(row.completions, islice(drawn, len(row.completions)), strict=True):
                by_token.setdefault(token, (logprob, []))[1].append(completion)
            children = [row.fork(completions) for _, completions in [*by_token.values()][1:]]
            row.completions = next(iter(by_token.values()))[1]
            for one, (token, (logprob, _)) in zip((row, *children), by_token.items(), strict=True):
                self._record(one, token, logprob, tokenizer)
            forks += ((i, child) for child in children)
        return forks

    def _record(self, row: SampleRow, token: int, logprob: float, tokenizer: Any) -> None:
        request = row.request
        if request.error is not None:
            return
        if math.isnan(logprob):
            request.error = NonFiniteError("a logit of the policy", [])
            return
        row.tokens.append(token)
        row.logprobs.append(logprob)
        if request.on_token is not None:
            likeliest = row.likeliest[-1] if request.topk_sample else ()
            for completion in row.completions:
                request.on_token(SampledToken(completion.index, token, logprob, likeliest))
        end_tokens = int(token in request.stop_tokens)
        try:
            stops = request.stop_strings
            stopped = end_tokens or (stops and ends_with_stop(tokenizer, row.tokens, stops))
        except Exception as error:
            request.error = error
            return
        if stopped or len(row.tokens) >= request.budget:
            reason = StopReason.STOP if stopped else StopReason.LENGTH
            for completion in row.completions:
                likeliest = list(row.likeliest) if request.topk_sample else None
                request.finished[completion.index] = SampledSequence(
                    reason, list(row.tokens), list(row.logprobs), end_tokens, likeliest
                )
            row.completions = []

    def retire(self) -> tuple[list[int], list[int]]:
        """Drop the finished rows; returns the sources and targets of the moves that close their gaps.

        The queued part of a failed request is dropped too.
        """
        finished = [i for i, row in enumerate(self.rows) if row.is_finished]
        size = len(self.rows) - len(finished)
        targets = [i for i in finished if i < size]
        sources = [i for i in range(size, len(self.rows)) if not self.rows[i].is_finished]
        for source, target in zip(sources, targets, strict=True):
            self.rows[target] = self.rows[source]
        del self.rows[size:]
        if any(r.error is not None for r in self.waiting):
            self.waiting = deque(r for r in self.waiting if r.error is None)
        return sources, targets

    def swap(self, some: Sequence[int], others: Sequence[int]) -> None:
        """Swap two equally long lists of running rows."""
        for i, j in zip(some, others, strict=True):
            self.rows[i], self.rows[j] = self.rows[j], self.rows[i]

    def abandon(self, error: Exception, newcomers: Sequence[SampleRow] = ()) -> None:
        """Fail every request that has rows or `newcomers` (admitted, not yet running): the cache's state is unknown.

        A request whose last completion had just ended is complete and stays so.
        """
        for request in {row.request for row in (*self.rows, *newcomers)} | {r for r in self.waiting if r.started}:
            if not request.is_done:
                request.error = error
        self.rows.clear()
        self.waiting = deque(r for r in self.waiting if r.error is None)


def ends_with_stop(tokenizer: Any, tokens: Sequence[int], stops: tuple[str, ...]) -> bool:
    """Whether the text contains a stop string. Decodes the tail first, and the whole only after a hit there."""
    tail = tokens[-(max(len(s.encode()) for s in stops) + 8) :]
    text = tokenizer.decode(tail, skip_special_tokens=False)
    return any(s in text for s in stops) and any(
        s in tokenizer.decode(tokens, skip_special_tokens=False) for s in stops
    )
