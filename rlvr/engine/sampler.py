"""Sampling in steps: runs what the scheduler admits, one prompt pass or one token a row at a time.

One `advance` is one forward pass. Requests of any number of callers and adapters share it. A request that fails by its
own fault (its stop strings, its weights' logits) ends alone; only an error of the pass itself (memory, the device) ends
everything that ran. Left out on purpose: threads and locks (`rlvr.engine.engine` holds the lock).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager

import torch
from torch import Tensor

from rlvr.core import rng
from rlvr.core.messages import NonFiniteError
from rlvr.engine.engine_options import EngineLimits
from rlvr.engine.kv_cache import KeyValues, KVCache, NewRow, count_cache_tokens, last_hidden, prefill, recompute
from rlvr.engine.lora import LoraBank, use_weights
from rlvr.engine.model import LanguageModel
from rlvr.engine.policy import Snapshot
from rlvr.engine.prepacked_linear import PrepackedLinears
from rlvr.engine.sampling import draw_alternatives, sample, score_prompt, score_targets, top_tokens
from rlvr.engine.scheduler import PromptScores, SampleRow, SamplingRequest, Scheduler

CACHE_SHARE = 0.7  # of a GPU's free memory, for the KV cache; the rest is for passes, and for its growth by copying


class Sampler:
    """The running rows of one model, their KV cache, and the queue of requests."""

    def __init__(self, model: LanguageModel, bank: LoraBank, limits: EngineLimits) -> None:
        self.model = model
        self.bank = bank
        self.scheduler = Scheduler(limits)
        self.cache = KVCache(limits.cache_tokens)
        # A processor can use the disk where it needs more; on a GPU the cache would end the run.
        self.has_own_limit = model.device.type == "cuda" and not limits.cache_tokens
        self.prepacked = PrepackedLinears(model)
        self.chunk = max(1, limits.logit_elements // model.vocabulary)

    @property
    def idle(self) -> bool:
        return not self.scheduler.rows and not self.scheduler.waiting

    @torch.inference_mode()
    def advance(self, chosen: Callable[[SamplingRequest], bool] = lambda _: True) -> list[SamplingRequest]:
        """Prefill new rows, or else decode one token for each running row. Returns the requests that ended.

        Only requests that are `chosen` go on, unless none of them can: then all do, which makes room for them.
        """
        scheduler, newcomers = self.scheduler, list[SampleRow]()
        if self.has_own_limit and not scheduler.rows:
            rows, length = self.cache.shape
            self.cache.max_tokens = scheduler.cache_tokens = count_cache_tokens(self.model, CACHE_SHARE, rows * length)
        requests = [row.request for row in scheduler.rows]
        try:
            if newcomers := scheduler.admit(self.cache.shared_tokens, chosen):
                requests += [row.request for row in newcomers]
                self._prefill(newcomers)
            elif scheduler.rows:
                self._decode(self._collect([i for i, request in enumerate(requests) if chosen(request)]))
        except BaseException as error:
            is_failure = isinstance(error, Exception)
            cause = error if is_failure else RuntimeError(f"sampling was interrupted by {type(error).__name__}")
            scheduler.abandon(cause, newcomers)
            self._reset()
            traceback.clear_frames(error.__traceback__)  # they would keep the failed pass's device memory alive
            if not is_failure:
                raise
        if self.idle:
            self.prepacked.drop()
        return [request for request in dict.fromkeys(requests) if request.is_done]

    @torch.inference_mode()
    def cancel(self, request: SamplingRequest) -> None:
        """Fail a request that is not done. The others go on unchanged."""
        if not request.is_done:
            request.error = CancelledError("the request was cancelled")
            self._retire()

    @torch.inference_mode()
    def release(self) -> None:
        """Free memory of the KV cache: the whole cache when nothing runs, else the part without running rows."""
        if rows := self.scheduler.rows:
            if self.model.can_cache:
                self.cache.shrink([row.length for row in rows], self.scheduler.running_completions)
        else:
            self._reset()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def make_room_for_training(self) -> None:
        """On a GPU, whose memory both need, free what `release` does before a pass of training."""
        if self.model.device.type == "cuda" and self.cache.layers:
            self.release()

    def _reset(self) -> None:
        self.cache = KVCache(self.cache.max_tokens)
        self.prepacked.drop()

    @contextmanager
    def _weights(
        self, rows: Sequence[SampleRow], snapshots: Sequence[Snapshot], tokens: int
    ) -> Iterator[Callable[[Tensor], Tensor]]:
        """Run a pass over `tokens` tokens with the weights of `snapshots`; yields the head with its adapters.

        How much `rows` may still sample decides whether weights are prepacked.
        """
        left = [(row.request.budget - len(row.tokens), len(row.completions)) for row in rows]
        steps, tokens = max(left)[0], tokens + sum(each * count for each, count in left)
        first = rows[0].request.snapshot
        with use_weights(self.model, self.bank, snapshots) as head:
            # Fully trained weights change with their version; the base weights under adapters never do.
            name = first.fingerprint if first.is_full else ""
            with self.prepacked.use(name, steps=steps, tokens=tokens):
                yield head

    def _collect(self, chosen: Sequence[int]) -> range:
        """Move the rows at the indices `chosen` to the front, or to the back if they are fewer than the others.

        Returns their new indices: those of all rows if none is chosen.
        """
        count, chosen_rows = len(self.scheduler.rows), set(chosen)
        size = len(chosen) or count
        indices = range(size) if 2 * size > count else range(count - size, count)
        outside = [i for i in chosen if i not in indices]
        if outside:
            others = [i for i in indices if i not in chosen_rows]
            self.scheduler.swap(outside, others)
            if self.model.can_cache:
                self.cache.swap(outside, others)
        return indices

    def _decode(self, indices: range) -> None:
        """Decode one token for the running rows at `indices`."""
        rows = [self.scheduler.rows[i] for i in indices]
        with self._weights(rows, [row.request.snapshot for row in rows], 0) as head:
            if self.model.can_cache:
                last = torch.tensor([row.tokens[-1] for row in rows])
                at = torch.tensor([row.length - 1 for row in rows])
                capacity = self.scheduler.running_completions
                hidden_RD = self.cache.decode(self.model, last, at, capacity, indices.start)
            else:
                texts = [row.request.prompt + row.tokens for row in rows]
                hidden_RD = last_hidden(recompute(self.model, texts), texts)
            forks = [(i, row) for i, row in self._sample_tokens(rows, head(hidden_RD)) if not row.is_finished]
        if forks:
            if self.model.can_cache:
                self.cache.fork([indices[i] for i, _ in forks])
            self.scheduler.rows += [row for _, row in forks]
        self._retire()

    def _prefill(self, rows: list[SampleRow]) -> None:
        """Compute each new row's prompt once, sample the first token of its completions, and insert the rows."""
        prompts = [row.request.prompt for row in rows]
        snapshots = [row.request.snapshot for row in rows]
        tokens = sum(map(len, prompts))
        with self._weights(rows, snapshots, tokens) as head:
            if self.model.can_cache:
                hidden_PLD, layers = prefill(self.model, prompts)
            else:
                hidden_PLD, layers = recompute(self.model, prompts), []
            logits_PV = head(last_hidden(hidden_PLD, prompts))
        for row, hidden_LD in zip(rows, hidden_PLD, strict=True):
            if row.request.scores_prompt:
                self._score_prompt(row.request, hidden_LD)
        forks = self._sample_tokens(rows, logits_PV)
        self._retire()
        self._insert(layers, [*enumerate(rows), *forks])

    def _insert(self, layers: KeyValues, rows: Sequence[tuple[int, SampleRow]]) -> None:
        """Add the unfinished of `rows`, each with the index of its prompt in `layers`, to the running ones."""
        staying = [(prompt, row) for prompt, row in rows if not row.is_finished]
        if staying and self.model.can_cache:
            new = [
                NewRow(prompt, len(row.request.prompt), row.request.reach, len(row.completions))
                for prompt, row in staying
            ]
            longest = max(len(row.request.prompt) for _, row in rows)
            self.cache.insert(
                layers,
                new,
                capacity=self.scheduler.running_completions + sum(row.slots for row in new),
                length=min(max(row.reach for row in new), 2 * longest + 64),
                share=self.model.can_share_prompts,
            )
        self.scheduler.rows.extend(row for _, row in staying)

    def _score_prompt(self, request: SamplingRequest, hidden_LD: Tensor) -> None:
        """Compute the log-probs of a prompt's own tokens, of targets and of drawn tokens, from the pass that fills the
        cache."""
        first, last = len(request.prompt) - request.scored_tokens, len(request.prompt) - 1
        tokens = torch.tensor(request.prompt[first:], device=hidden_LD.device, dtype=torch.long)
        scores = PromptScores([], [], [])
        with use_weights(self.model, self.bank, [request.snapshot]) as head:
            try:
                if request.scores_own_tokens:
                    own, likeliest = score_prompt(
                        head, hidden_LD[first - 1 : last], tokens, self.chunk, request.topk_prompt
                    )
                    scores = scores._replace(logprobs=own, likeliest=likeliest)
                if request.prompt_targets is not None:
                    scores = scores._replace(targets=score_targets(head, hidden_LD, request.prompt_targets, self.chunk))
                if request.alternatives:
                    count, params = request.alternatives, request.params
                    key = rng.key("prompt alternatives", params.seed or 0)
                    drawn = draw_alternatives(head, hidden_LD[:last], count, key, params.temperature, self.chunk)
                    scores = scores._replace(alternatives=drawn)
                request.prompt_scores = scores
            except NonFiniteError as error:
                request.error = error

    def _sample_tokens(self, rows: Sequence[SampleRow], logits_RV: Tensor) -> list[tuple[int, SampleRow]]:
        """Sample a token for every completion of the rows; returns (i, new row) for each fork of row i."""
        device = self.model.device
        params = [row.request.params for row in rows]

        def column(name: str, dtype: torch.dtype | None = None) -> Tensor:
            return torch.tensor([getattr(p, name) for p in params], device=device, dtype=dtype)

        filters = None
        if any(p.top_k != -1 or p.top_p < 1 or p.min_p > 0 for p in params):
            filters = (column("top_k"), column("top_p", torch.float64), column("min_p", torch.float64))
        keys = [completion.key for row in rows for completion in row.completions]
        row_of = [i for i, row in enumerate(rows) for _ in row.completions]
        tokens, logprobs, table_RV = sample(
            logits_RV,
            column("temperature"),
            torch.tensor(keys, device=device),
            torch.tensor([len(rows[i].tokens) for i in row_of], device=device),
            filters,
            torch.tensor(row_of, device=device) if len(row_of) > len(rows) else None,
        )
        if requesting := [i for i, row in enumerate(rows) if row.request.topk_sample]:
            most = max(rows[i].request.topk_sample for i in requesting)
            for i, likeliest in zip(
                requesting, top_tokens(table_RV[torch.tensor(requesting, device=device)], most), strict=True
            ):
                rows[i].likeliest.append(likeliest[: rows[i].request.topk_sample])
        return self.scheduler.record(rows, tokens.tolist(), logprobs.tolist(), self.model.tokenizer)

    def _retire(self) -> None:
        failed = [i for i, row in enumerate(self.scheduler.rows) if row.request.error is not None]
        if failed and self.model.can_cache:
            self.cache.clear_rows(failed)  # the next row in their place, of any request, must not fail too
        sources, targets = self.scheduler.retire()
        if self.model.can_cache:
            self.cache.compact(sources, targets, [row.length for row in self.scheduler.rows])
