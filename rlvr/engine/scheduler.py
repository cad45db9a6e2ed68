"""Decides which rows run next. No tensors: the runner computes.

Requests wait in order of arrival. A request's completions become rows as soon as there is room; rows of different
requests, callers and adapters share a batch; a finished row's place goes to the next one in line (continuous
batching). What runs together depends only on what was asked for and on the tokens drawn, never on time, so the same
requests give the same batches again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlvr import draws
from rlvr.engine.policy import Snapshot
from rlvr.futures import LazyFuture
from rlvr.messages import SampledSequence, SampleResponse, SamplingParams
from rlvr.types import StopReason


@dataclass(eq=False)
class Request:
    """One `sample` call: `count` completions of one prompt under one snapshot. `budget` is tokens per completion."""

    prompt: list[int]
    count: int
    params: SamplingParams
    snapshot: Snapshot
    budget: int
    stop_tokens: frozenset[int]
    stop_strings: tuple[str, ...]
    started: int = 0
    finished: dict[int, SampledSequence] = field(default_factory=dict[int, SampledSequence])
    error: Exception | None = None
    future: LazyFuture[SampleResponse] | None = None

    @property
    def done(self) -> bool:
        return self.error is not None or len(self.finished) == self.count

    def response(self) -> SampleResponse:
        return SampleResponse([self.finished[i] for i in range(self.count)], fingerprint=self.snapshot.fingerprint)


@dataclass(eq=False)
class Row:
    """One completion being sampled. Its draws are a function of (the request's seed, `index`, token position)."""

    request: Request
    index: int
    key: int
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])

    @property
    def length(self) -> int:
        """Tokens in the cache once the last sampled one is fed."""
        return len(self.request.prompt) + len(self.tokens)


class Scheduler:
    def __init__(self, max_rows: int, prefill_tokens: int) -> None:
        self.max_rows = max_rows
        self.prefill_tokens = prefill_tokens
        self.waiting: deque[Request] = deque()
        self.rows: list[Row] = []

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def admit(self) -> list[list[Row]]:
        """New rows by request, as many as fit: within `max_rows`, `prefill_tokens` (padded), and one set of weights."""
        chosen: list[list[Row]] = []
        free, longest = self.max_rows - len(self.rows), 0
        weights = self.rows[0].request.snapshot.batch_key if self.rows else None
        while self.waiting and free:
            request = self.waiting[0]
            longest = max(longest, len(request.prompt))
            if weights is None:
                weights = request.snapshot.batch_key
            if request.snapshot.batch_key != weights:
                break
            if chosen and longest * (len(chosen) + 1) > self.prefill_tokens:
                break
            take = min(free, request.count - request.started)
            seed = request.params.seed
            assert seed is not None
            indices = range(request.started, request.started + take)
            chosen.append([Row(request, i, draws.key("sample", seed, i)) for i in indices])
            request.started += take
            free -= take
            if request.started == request.count:
                self.waiting.popleft()
        return chosen

    def advance(
        self, rows: Sequence[Row], tokens: Sequence[int], logprobs: Sequence[float], tokenizer: Any
    ) -> list[int]:
        """Record one new token per row; the positions (in `rows`) of those that ended with it."""
        ended: list[int] = []
        for i, (row, token, logprob) in enumerate(zip(rows, tokens, logprobs, strict=True)):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            request = row.request
            end_tokens = int(token in request.stop_tokens)
            if end_tokens or (request.stop_strings and ends_with_stop(tokenizer, row.tokens, request.stop_strings)):
                reason = StopReason.STOP
            elif len(row.tokens) >= request.budget:
                reason = StopReason.LENGTH
            else:
                continue
            request.finished[row.index] = SampledSequence(reason, row.tokens, row.logprobs, end_tokens)
            ended.append(i)
        return ended

    def retire(self, ended: Sequence[int]) -> tuple[list[int], list[int]]:
        """Drop the ended rows; (source, target) of the moves that close the gaps they leave."""
        gone, size = set(ended), len(self.rows) - len(ended)
        targets = [i for i in ended if i < size]
        sources = [i for i in range(size, len(self.rows)) if i not in gone]
        for source, target in zip(sources, targets, strict=True):
            self.rows[target] = self.rows[source]
        del self.rows[size:]
        return sources, targets

    def abandon(self, error: Exception, newcomers: Sequence[Row] = ()) -> None:
        """Fail every request that was under way: its rows' cache is in an unknown state.

        `newcomers` were admitted and have no seat yet.
        """
        for request in {row.request for row in (*self.rows, *newcomers)} | {r for r in self.waiting if r.started}:
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
