"""Sampling in steps: what the scheduler lets in is computed together, one prompt pass or one token a row at a time.

One `advance` is one forward pass. Requests of any number of callers and adapters share it; a request that fails by its
own doing (its stop strings, its weights' logits) ends alone, and only what the pass itself cannot survive (memory, a
device error) ends all that ran. Exercised by `tests/test_engine_sampling.py` and `tests/test_engine_stepping.py`. Left
out on purpose: threads and locks (`rlvr.engine.engine` holds the lock).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager

import torch
from torch import Tensor

from rlvr.engine.lora import LoraBank, running
from rlvr.engine.model import LanguageModel
from rlvr.engine.options import EngineLimits
from rlvr.engine.packed import PackedLinears
from rlvr.engine.policy import Snapshot
from rlvr.engine.runner import KeyValues, RowCache, behind, prefill, recompute
from rlvr.engine.sampling import best, sample, score_prompt
from rlvr.engine.scheduler import Request, Row, Scheduler
from rlvr.messages import NonFiniteError


class Sampler:
    """The running rows of one model, their cache, and the requests in line for a row."""

    def __init__(self, model: LanguageModel, limits: EngineLimits) -> None:
        self.model = model
        self.bank: LoraBank | None = None
        self.scheduler = Scheduler(limits)
        self.cache = RowCache(limits.cache_tokens)
        self.packed = PackedLinears(model)
        self.chunk = max(1, limits.logit_elements // model.vocabulary)

    @property
    def idle(self) -> bool:
        return not self.scheduler.rows and not self.scheduler.waiting

    @torch.inference_mode()
    def advance(self) -> list[Request]:
        """One step: admit and prefill newcomers, or one token for each running row. Who ended with it comes back."""
        scheduler, newcomers = self.scheduler, list[Row]()
        under_way = [row.request for row in scheduler.rows]
        try:
            if newcomers := scheduler.admit(self.cache.held):
                under_way += [row.request for row in newcomers]
                self._prefill(newcomers)
            elif scheduler.rows:
                self._decode(list(scheduler.rows))
        except BaseException as error:
            known = isinstance(error, Exception)
            cause = error if known else RuntimeError(f"sampling was interrupted by {type(error).__name__}")
            scheduler.abandon(cause, newcomers)
            self._forget()
            # Who keeps the error would keep what the failed pass held of the device's memory.
            traceback.clear_frames(error.__traceback__)
            if not known:
                raise
        if self.idle:
            self.packed.drop()
        return [request for request in dict.fromkeys(under_way) if request.done]

    @torch.inference_mode()
    def cancel(self, request: Request) -> None:
        """Drop what is left of a request; the others go on untouched. One that is done stays as it is."""
        if not request.done:
            request.error = CancelledError("the request was cancelled")
            self._retire()

    @torch.inference_mode()
    def release(self) -> None:
        """Give back the cache's memory: all of it when nothing runs, else what the running rows do not fill."""
        if rows := self.scheduler.rows:
            if self.model.caches:
                self.cache.shrink([row.length for row in rows], self.scheduler.seats)
        else:
            self._forget()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _forget(self) -> None:
        self.cache = RowCache(self.cache.most)
        self.packed.drop()

    @contextmanager
    def _weights(
        self, rows: Sequence[Row], snapshots: Sequence[Snapshot], tokens: int
    ) -> Iterator[Callable[[Tensor], Tensor]]:
        """Run a pass over `tokens` tokens with the weights of `snapshots`; the head with theirs comes back.

        What `rows` may still sample says whether weights are packed for it.
        """
        left = [(row.request.budget - len(row.tokens), len(row.completions)) for row in rows]
        steps, tokens = max(left)[0], tokens + sum(each * count for each, count in left)
        first = rows[0].request.snapshot
        with running(self.model, self.bank, snapshots) as head:
            # Weights that are trained as a whole have a version; under adapters they stay.
            name = first.fingerprint if first.full else ""
            with self.packed.used(name, steps=steps, tokens=tokens):
                yield head

    def _decode(self, rows: Sequence[Row]) -> None:
        with self._weights(rows, [row.request.snapshot for row in rows], 0) as head:
            if self.model.caches:
                last = torch.tensor([row.tokens[-1] for row in rows])
                at = torch.tensor([row.length - 1 for row in rows])
                hidden_RD = self.cache.decode(self.model, last, at, self.scheduler.seats)
            else:
                texts = [row.request.prompt + row.tokens for row in rows]
                hidden_RD = behind(recompute(self.model, texts), texts)
            parted = [(i, row) for i, row in self._extend(rows, head(hidden_RD)) if not row.over]
        if parted:
            if self.model.caches:
                self.cache.part([i for i, _ in parted])
            self.scheduler.rows += [row for _, row in parted]
        self._retire()

    def _prefill(self, rows: list[Row]) -> None:
        """Compute each newcomer's prompt once, draw first tokens for its completions, and seat those that go on."""
        prompts = [row.request.prompt for row in rows]
        snapshots = [row.request.snapshot for row in rows]
        tokens = sum(map(len, prompts))
        with self._weights(rows, snapshots, tokens) as head:
            if self.model.caches:
                hidden_PLD, layers = prefill(self.model, prompts)
            else:
                hidden_PLD, layers = recompute(self.model, prompts), []
            logits_PV = head(behind(hidden_PLD, prompts))
        for row, hidden_LD in zip(rows, hidden_PLD, strict=True):
            if row.request.scores_prompt:
                self._score(row.request, hidden_LD)
        parted = self._extend(rows, logits_PV)
        self._retire()
        self._seat([*rows, *(row for _, row in parted)], layers, [*range(len(rows)), *(i for i, _ in parted)])

    def _seat(self, rows: list[Row], layers: KeyValues, source: list[int]) -> None:
        staying = [i for i, row in enumerate(rows) if not row.over]
        running_rows = self.scheduler.rows
        if staying and self.model.caches:
            reaches = [rows[i].request.reach for i in staying]
            seats = [len(rows[i].completions) for i in staying]
            self.cache.place(
                layers,
                [source[i] for i in staying],
                [len(rows[i].request.prompt) for i in staying],
                rows=range(len(running_rows), len(running_rows) + len(staying)),
                seats=seats,
                capacity=self.scheduler.seats + sum(seats),
                length=min(max(reaches), 2 * max(len(row.request.prompt) for row in rows) + 64),
                reaches=reaches,
                share=self.model.shares,
            )
        running_rows.extend(rows[i] for i in staying)

    def _score(self, request: Request, hidden_LD: Tensor) -> None:
        """The log-probs of a prompt's own tokens, from the pass that fills the cache."""
        tokens = torch.tensor(request.prompt[1:], device=hidden_LD.device, dtype=torch.long)
        with running(self.model, self.bank, [request.snapshot]) as head:
            try:
                request.prompt_scores = score_prompt(
                    head, hidden_LD[: len(tokens)], tokens, self.chunk, request.topk_prompt
                )
            except NonFiniteError as error:
                request.error = error

    def _extend(self, rows: Sequence[Row], logits_RV: Tensor) -> list[tuple[int, Row]]:
        """Draw a token for every completion of the rows; which rows part from which."""
        device = self.model.device
        params = [row.request.params for row in rows]

        def column(name: str, dtype: torch.dtype | None = None) -> Tensor:
            return torch.tensor([getattr(p, name) for p in params], device=device, dtype=dtype)

        filters = None
        if any(p.top_k != -1 or p.top_p < 1 or p.min_p > 0 for p in params):
            filters = (column("top_k"), column("top_p", torch.float64), column("min_p", torch.float64))
        keys = [completion.key for row in rows for completion in row.completions]
        of = [i for i, row in enumerate(rows) for _ in row.completions]
        tokens, logprobs, table_RV = sample(
            logits_RV,
            column("temperature"),
            torch.tensor(keys, device=device),
            torch.tensor([len(rows[i].tokens) for i in of], device=device),
            filters,
            torch.tensor(of, device=device) if len(of) > len(rows) else None,
        )
        if asking := [i for i, row in enumerate(rows) if row.request.topk_sample]:
            most = max(rows[i].request.topk_sample for i in asking)
            for i, likeliest in zip(asking, best(table_RV[torch.tensor(asking, device=device)], most), strict=True):
                rows[i].likeliest.append(likeliest[: rows[i].request.topk_sample])
        return self.scheduler.advance(rows, tokens.tolist(), logprobs.tolist(), self.model.tokenizer)

    def _retire(self) -> None:
        failed = [i for i, row in enumerate(self.scheduler.rows) if row.request.error is not None]
        if failed and self.model.caches:
            self.cache.wipe(failed)  # who has the place next, in any request, must not fail by it
        sources, targets = self.scheduler.retire()
        if self.model.caches:
            self.cache.close(sources, targets, [row.length for row in self.scheduler.rows])
