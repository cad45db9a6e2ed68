"""Sampling requests of the Tinker server that vLLM servers answer, in the order of a fair queue.

vLLM 0.32 samples with seeds, stops and log-probs. What it cannot give stays with the engine of this process: `top_k`
and `top_p` (its log-probs would be those after the cut), log-probs of prompts (they end vLLM for CPUs beside an
adapter) and of other tokens than the sampled, tokens as they are sampled, and lengths above `--max-model-len`.
Exercised by tests/test_tinker_vllm.py, and against vLLM itself by `make test-vllm`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections import Counter
from dataclasses import replace
from functools import partial

from rlvr.clients.vllm.vllm_options import SamplerError
from rlvr.clients.vllm.vllm_server import NoServerError
from rlvr.core.fair_queue import FairQueue
from rlvr.core.messages import SampleResponse
from rlvr.reward.coroutines import start_coroutine
from rlvr.tinker_server.backend.request_futures import (
    FutureRegistry,
    LiveOutcome,
    LostRequest,
    RequestFailure,
    ResultFuture,
)
from rlvr.tinker_server.backend.runs.engine_counters import EngineState
from rlvr.tinker_server.backend.runs.engine_thread import owner_places
from rlvr.tinker_server.backend.runs.executor import classify_error
from rlvr.tinker_server.backend.sampling.published_adapters import PublishedAdapters
from rlvr.tinker_server.backend.sampling.queued_sample import QueuedSample
from rlvr.tinker_server.backend.server_limits import ServerLimits
from rlvr.tinker_server.backend.storage.sampling_sessions import SamplingSessions

log = logging.getLogger(__name__)


class VllmSampler:
    """Answers sampling requests in the place of an `EngineThread`. Thread-safe."""

    def __init__(
        self, adapters: PublishedAdapters, sessions: SamplingSessions, futures: FutureRegistry, limits: ServerLimits
    ) -> None:
        self._adapters, self._sessions, self._futures, self._limits = adapters, sessions, futures, limits
        self._engine = adapters.engine
        self._lock = threading.RLock()
        self._waiting = FairQueue[QueuedSample]()
        self._running: dict[QueuedSample, concurrent.futures.Future[SampleResponse]] = {}
        self._is_closed = False
        self.sampled_tokens = 0

    def add_to(self, state: EngineState) -> EngineState:
        """The state of the engine, with the requests and tokens that are sampled here."""
        with self._lock:
            waiting, running = len(self._waiting), len(self._running)
        return replace(
            state,
            queued_samples=state.queued_samples + waiting,
            running_samples=state.running_samples + running,
            counters=replace(state.counters, sampled_tokens=state.counters.sampled_tokens + self.sampled_tokens),
        )

    def can_sample(self, sampling: QueuedSample) -> bool:
        """Whether vLLM gives all that is asked for."""
        params, context = sampling.params, self._engine.model.context
        reach = min(context, sampling.prompt.length + (params.max_tokens or context))
        is_cut = (params.top_k, params.top_p, params.min_p) != (-1, 1.0, 0.0)
        is_plain = not is_cut and not any(sampling.options.values()) and "snapshot" not in sampling.sampler
        return is_plain and reach <= self._adapters.max_model_len

    def sample(self, sampling: QueuedSample) -> None:
        with self._lock:
            self._waiting.add(sampling.owner, sampling.future.session, sampling)
            self._start_waiting()

    def _start_waiting(self) -> None:
        places = self._adapters.places
        running = Counter(sampling.owner for sampling in self._running)

        def fits(sampling: QueuedSample) -> bool:
            own = running[sampling.owner]  # one request at a time is always admitted
            return running.total() < places and (not own or own < owner_places(places, self._limits.owner_share))

        while not self._is_closed and (sampling := self._waiting.pop(fits)) is not None:
            running[sampling.owner] += 1
            task = self._running[sampling] = start_coroutine(self._sample(sampling))
            task.add_done_callback(partial(self._end, sampling))

    async def _sample(self, sampling: QueuedSample) -> SampleResponse:
        prompt, params = sampling.prompt, sampling.params
        self._engine.check_request(prompt, sampling.count, params)
        room = self._engine.model.context - prompt.length
        params = replace(params, max_tokens=min(params.max_tokens or room, room))
        row = sampling.sampler
        weights = await asyncio.to_thread(self._sessions.locate_weights, row)
        load = partial(self._sessions.read, weights, row["path"] or row["id"], self._engine)
        async with self._adapters.use(weights, load) as client:
            return await client.sample(prompt, sampling.count, params)

    def _end(self, sampling: QueuedSample, task: concurrent.futures.Future[SampleResponse]) -> None:
        outcome: LiveOutcome | LostRequest
        try:
            response = task.result()
            outcome = sampling.encode(response)
            self.sampled_tokens += sum(len(sequence.tokens) for sequence in response.sequences)
        except concurrent.futures.CancelledError:
            outcome = RequestFailure("cancelled by its client", "user")
        except NoServerError as error:
            log.warning("%s is to be sent again: %s", sampling.future.request_id, error)
            outcome = LostRequest()
        except SamplerError as error:
            log.error("%s failed: %s", sampling.future.request_id, error)
            # The error has addresses and paths, and may name the adapters of others.
            request = sampling.future.request_id
            outcome = RequestFailure(
                f"a sampling server did not give what was asked for; its log has {request}", "server"
            )
        except Exception as error:
            outcome, is_ours = classify_error(error)
            if is_ours:
                log.exception("%s failed", sampling.future.request_id)
        with self._lock:
            self._running.pop(sampling, None)
            self._start_waiting()
        if not self._is_closed:  # else the client sends it again, to the server that starts next
            sampling.release_quota()
            self._futures.resolve(sampling.future, outcome)

    def cancel(self, future: ResultFuture) -> None:
        with self._lock:
            waiting = self._waiting.remove(lambda sampling: sampling.future is future)
            running = [task for sampling, task in self._running.items() if sampling.future is future]
        for sampling in waiting:
            sampling.release_quota()
            self._futures.resolve(future, RequestFailure("cancelled by its client", "user"))
        for task in running:
            task.cancel()

    def close(self) -> None:
        """End what runs, without an outcome, and unload the adapters."""
        with self._lock:
            self._is_closed = True
            running = list(self._running.values())
        for task in running:
            task.cancel()
        self._adapters.close(self._limits.stop_seconds)
