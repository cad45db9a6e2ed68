"""Decides which rows run next. No tensors: the runner computes.

Requests wait in order of arrival. A request's completions become rows as soon as there is room; rows of different
requests, callers and adapters share a batch; a finished completion's place goes to the next one in line (continuous
batching). Completions of a request are one row for as long as they draw the same tokens. What runs together depends
only on what was asked for and on the tokens drawn, never on time, so the same requests give the same batches again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from rlvr import draws
from rlvr.engine.options import EngineLimits
from rlvr.engine.policy import Snapshot
from rlvr.messages import NonFiniteError, SampledSequence, SampleResponse, SamplingParams
from rlvr.types import StopReason


@dataclass(eq=False)
class Request:
    """One `sample` call: `count` completions of one prompt under one snapshot. `budget` is tokens per completion."""

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
    started: int = 0
    finished: dict[int, SampledSequence] = field(default_factory=dict[int, SampledSequence])
    prompt_scores: tuple[list[float], list[list[tuple[int, float]]]] | None = None
    error: Exception | None = None

    @property
    def done(self) -> bool:
        return self.error is not None or len(self.finished) == self.count

    @property
    def reach(self) -> int:
        """The tokens that a row of it may come to hold."""
        return len(self.prompt) + self.budget

    @property
    def scores_prompt(self) -> bool:
        """Whether its prompt's log-probs are asked for and not there yet."""
        return (self.prompt_logprobs or self.topk_prompt > 0) and self.prompt_scores is None

    def response(self) -> SampleResponse:
        """What was asked for; raises the error if it failed."""
        if self.error is not None:
            raise self.error
        assert self.done
        logprobs, likeliest = self.prompt_scores or ([], [])
        return SampleResponse(
            [self.finished[i] for i in range(self.count)],
            [None, *logprobs] if self.prompt_logprobs else None,
            self.snapshot.fingerprint,
            [None, *likeliest] if self.topk_prompt else None,
        )


@dataclass(frozen=True)
class Completion:
    """One completion of a request. Its draws are a function of (the request's seed, `index`, token position)."""

    index: int
    key: int


@dataclass(eq=False)
class Row:
    """Completions of a request whose tokens are the same so far: computed once, until they part."""

    request: Request
    completions: list[Completion]
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    likeliest: list[list[tuple[int, float]]] = field(default_factory=list[list[tuple[int, float]]])

    @property
    def length(self) -> int:
        """Tokens in the cache once the last sampled one is fed."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def over(self) -> bool:
        return self.request.error is not None or not self.completions

    def parted(self, completions: list[Completion]) -> Row:
        """A row of its own for some of the completions, with what they have so far."""
        return Row(self.request, completions, list(self.tokens), list(self.logprobs), list(self.likeliest))


class Scheduler:
    def __init__(self, limits: EngineLimits) -> None:
        self.max_rows = limits.max_rows
        self.one_request = limits.one_request
        self.cache_tokens = limits.cache_tokens
        self.prefill_tokens = limits.micro_tokens
        self.waiting: deque[Request] = deque()
        self.rows: list[Row] = []

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    @property
    def seats(self) -> int:
        """Completions that are under way: each may need a row of its own."""
        return sum(len(row.completions) for row in self.rows)

    def admit(self, held: int = 0) -> list[Row]:
        """New rows, one a request, with as many completions as fit: within `max_rows`, `prefill_tokens` (padded),
        `cache_tokens` (as if each had a row, times the longest they may become, beside the `held` of shared prompts),
        and one set of weights.
        """
        chosen: list[Row] = []
        free, longest = self.max_rows - self.seats, 0
        reach = max((row.request.reach for row in self.rows), default=0)
        weights = self.rows[0].request.snapshot.batch_key if self.rows else None
        place = 0  # in the line
        while place < len(self.waiting) and free:
            request = self.waiting[place]
            if (left := self._left(request, max(reach, request.reach))) < 1:
                place += 1
                continue
            longest = max(longest, len(request.prompt))
            if weights is None:
                weights = request.snapshot.batch_key
            if request.snapshot.batch_key != weights:
                break
            if chosen and longest * (len(chosen) + 1) > self.prefill_tokens:
                break
            take = min(free, request.count - request.started, left)
            reach = max(reach, request.reach)
            if self.cache_tokens:
                take = min(take, (self.cache_tokens - held) // reach - (self.max_rows - free))
                if take < 1:
                    if self.rows or chosen:
                        break
                    take = 1
            seed = request.params.seed
            assert seed is not None
            indices = range(request.started, request.started + take)
            chosen.append(Row(request, [Completion(i, draws.key("sample", seed, i)) for i in indices]))
            request.started += take
            free -= take
            if request.started == request.count:
                del self.waiting[place]
            else:
                place += 1
        return chosen

    def _left(self, request: Request, reach: int) -> int:
        """The rows that a request may have beside those it has, where it may not have all."""
        if self.one_request == 1:
            return request.count
        places = min(self.max_rows, self.cache_tokens // reach) if self.cache_tokens else self.max_rows
        has = sum(len(row.completions) for row in self.rows if row.request is request) if request.started else 0
        return max(1, int(places * self.one_request)) - has

    def advance(
        self, rows: Sequence[Row], tokens: Sequence[int], logprobs: Sequence[float], tokenizer: Any
    ) -> list[tuple[int, Row]]:
        """Record one new token per completion, row by row; the rows that part from row i of `rows`, as (i, row).

        A row keeps the completions that drew what its first one did. What goes wrong with a token is the failure of
        its own request alone.
        """
        drawn, parted = iter(zip(tokens, logprobs, strict=True)), list[tuple[int, Row]]()
        for i, row in enumerate(rows):
            if len(row.completions) == 1:  # as most are, soon
                self._record(row, *next(drawn), tokenizer)
                continue
            ways: dict[int, tuple[float, list[Completion]]] = {}
            theirs = islice(drawn, len(row.completions))
            for completion, (token, logprob) in zip(row.completions, theirs, strict=True):
                ways.setdefault(token, (logprob, []))[1].append(completion)
            children = [row.parted(completions) for _, completions in [*ways.values()][1:]]
            row.completions = next(iter(ways.values()))[1]
            for one, (token, (logprob, _)) in zip((row, *children), ways.items(), strict=True):
                self._record(one, token, logprob, tokenizer)
            parted += ((i, child) for child in children)
        return parted

    def _record(self, row: Row, token: int, logprob: float, tokenizer: Any) -> None:
        request = row.request
        if request.error is not None:
            return
        if math.isnan(logprob):
            request.error = NonFiniteError("a logit of the policy", [])
            return
        row.tokens.append(token)
        row.logprobs.append(logprob)
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
                likeliest = [list(best) for best in row.likeliest] if request.topk_sample else None
                request.finished[completion.index] = SampledSequence(
                    reason, list(row.tokens), list(row.logprobs), end_tokens, likeliest
                )
            row.completions = []

    def retire(self) -> tuple[list[int], list[int]]:
        """Drop the rows that are over; (source, target) of the moves that close the gaps they leave.

        A request that failed takes its waiting part along.
        """
        ended = [i for i, row in enumerate(self.rows) if row.over]
        gone, size = set(ended), len(self.rows) - len(ended)
        targets = [i for i in ended if i < size]
        sources = [i for i in range(size, len(self.rows)) if i not in gone]
        for source, target in zip(sources, targets, strict=True):
            self.rows[target] = self.rows[source]
        del self.rows[size:]
        if any(r.error is not None for r in self.waiting):
            self.waiting = deque(r for r in self.waiting if r.error is None)
        return sources, targets

    def abandon(self, error: Exception, newcomers: Sequence[Row] = ()) -> None:
        """Fail every request that was under way: its rows' cache is in an unknown state.

        `newcomers` were admitted and have no seat yet. A request whose last completion had just ended is whole.
        """
        for request in {row.request for row in (*self.rows, *newcomers)} | {r for r in self.waiting if r.started}:
            if not request.done:
                request.error = error
        self.rows.clear()
        self.waiting = deque(r for r in self.waiting if r.error is None)


def ends_with_stop(tokenizer: Any, tokens: Sequence[int], stops: tuple[str, ...]) -> bool:
    """Whether the text contains a stop string. Looks at the tail first; only a hit there decodes the whole."""
    tail = tokens[-(max(len(s.encode()) for s in stops) + 8) :]
    text = tokenizer.decode(tail, skip_special_tokens=False)
    return any(s in text for s in stops) and any(
        s in tokenizer.decode(tokens, skip_special_tokens=False) for s in stops
    )
