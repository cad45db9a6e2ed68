"""Sampling requests that vLLM servers answer, in the order of a fair queue, and the weights at these servers.

vLLM 0.32 samples with seeds, stops and log-probs. What it cannot give stays with the engine of this process: `top_k`
and `top_p` (its log-probs would be those after the cut), log-probs of prompts (they end vLLM for CPUs beside an
adapter) and of other tokens than the sampled, tokens as they are sampled, and lengths above `--max-model-len`.

`PublishedAdapters` has at the servers the model that they were started with, and adapters as requests ask for them.
Every version is copied to a folder of its own under a name that was never used, and loaded under that name. Adapters
that no request uses are unloaded: those whose weights were deleted, and the least recently used beyond a number.
Coroutines of one event loop use it (`rlvr.reward.coroutines`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import logging
import shutil
import tempfile
import threading
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlvr.clients.endpoint import RequestFuture
from rlvr.clients.vllm.vllm_clients import VllmSamplingClient, check_tokenizer, draw_probe
from rlvr.clients.vllm.vllm_options import SamplerError
from rlvr.clients.vllm.vllm_publisher import FOLDER, PublishedWeights, VllmPublisher
from rlvr.clients.vllm.vllm_server import NoServerError
from rlvr.core.fair_queue import FairQueue
from rlvr.core.files import lock_file, new_folder, sha256
from rlvr.core.messages import AdamParams, Datum, ModelInput, SampleResponse
from rlvr.reward.coroutines import start_coroutine
from rlvr.tinker_server.backend.request_futures import (
    FutureRegistry,
    LiveOutcome,
    LostRequest,
    RequestFailure,
    ResultFuture,
)
from rlvr.tinker_server.backend.runs.engine_thread import EngineState, QueuedSample, owner_places
from rlvr.tinker_server.backend.runs.executor import classify_error
from rlvr.tinker_server.backend.storage.sampling_sessions import SamplerWeights, SamplingSessions
from rlvr.tinker_server.protocol.server_limits import ServerLimits

if TYPE_CHECKING:
    from rlvr.engine.engine import Engine
    from rlvr.engine.policy import Snapshot

log = logging.getLogger(__name__)
WEIGHTS = "adapter_model.safetensors"
TRIAL = "trial"
CLOSE_SECONDS = 5.0
TRIAL_RATE = 0.01  # of a step that changes log-probs by much more than rounding


@dataclass(eq=False)
class AdapterVersion:
    publication: asyncio.Task[VllmSamplingClient]
    users: int = 0  # requests


class PublishedAdapters:
    """The adapters that the vLLM servers have. `engine` scores what is published, to `folder` and the servers of
    `publisher`; `most` adapters stay."""

    def __init__(self, engine: Engine, publisher: VllmPublisher, folder: Path, most: int) -> None:
        self.engine, self._publisher, self._folder, self._most = engine, publisher, folder.absolute(), most
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_file(folder / "lock")
        if lock is None:
            raise ValueError(f"sampler.folder={folder} is in use by another server; give this one a folder of its own")
        self._lock = lock
        self._base: VllmSamplingClient | None = None
        self._versions: OrderedDict[str, AdapterVersion] = OrderedDict()  # least recently used first
        self._numbers = itertools.count(1)

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self._publisher.servers]

    @property
    def max_requests(self) -> int:
        """How many requests the servers take at once."""
        return sum(server.options.concurrency for server in self._publisher.servers)

    @property
    def max_model_len(self) -> int:
        return min(server.max_model_len for server in self._publisher.servers)

    def check(self, rank: int) -> None:
        """Publish the base model, and for a trial an adapter of `rank` that was trained by one step. SamplerError or
        ValueError if a server has another tokenizer, base model or dtype, takes no such adapter, or cannot read the
        folder; then this is closed."""
        from rlvr.engine.adapter_files import write_adapter
        from rlvr.engine.engine_options import LoraConfig

        try:
            check_tokenizer(self._publisher, self.engine.model.tokenizer)
            policy = self.engine.create_policy(TRIAL, lora=LoraConfig(rank))
            row = Datum.from_completion([1, 2, 3], [4, 5, 6])
            self.engine.forward_backward(policy, [row], "cross_entropy", None)
            self.engine.optim_step(policy, AdamParams(learning_rate=TRIAL_RATE))
            with tempfile.TemporaryDirectory() as place:
                write_adapter(Path(place), policy, self.engine.model)
                RequestFuture(start_coroutine(self._check(Path(place), self.engine.snapshot(policy)))).result()
            self.engine.drop_policy(TRIAL)
        except BaseException:
            self.close(CLOSE_SECONDS)
            raise

    async def _check(self, trial: Path, snapshot: Snapshot) -> None:
        await self._publisher.drop_leftovers(self._folder)
        self._base = await self._publish(None, self.engine.base_snapshot)
        client = await self._publish(trial, lambda: snapshot)
        await self._publisher.retire(client.fingerprint)

    @asynccontextmanager
    async def use(self, weights: SamplerWeights, load: Callable[[], Snapshot]) -> AsyncIterator[VllmSamplingClient]:
        """A client for the weights, which stay published while the block runs. `load` reads what is not published."""
        if weights.folder is None:
            assert self._base is not None, "check() publishes the base model"
            yield self._base
            return
        version = self._versions.get(weights.key)
        if version is None:
            publication = asyncio.create_task(self._publish_new(weights.key, weights.folder, load))
            version = self._versions[weights.key] = AdapterVersion(publication)
        self._versions.move_to_end(weights.key)
        version.users += 1
        try:
            yield await asyncio.shield(version.publication)  # a cancelled request leaves it to the others
        finally:
            version.users -= 1

    async def _publish_new(self, key: str, folder: Path, load: Callable[[], Snapshot]) -> VllmSamplingClient:
        try:
            client = await self._publish(folder, load)
        except BaseException:
            del self._versions[key]
            raise
        try:
            await self._retire_unused()
        except Exception:  # the new weights are there all the same
            log.exception("adapters that no request uses were not unloaded")
        return client

    async def _publish(self, folder: Path | None, load: Callable[[], Snapshot]) -> VllmSamplingClient:
        tokenizer = self.engine.model.tokenizer
        prompt, tokens = draw_probe(self._publisher, tokenizer)
        scores = await asyncio.to_thread(self._score, load, prompt, tokens)
        if folder is None:
            weights = PublishedWeights("base", None, False, prompt, scores)
        else:
            digest = await asyncio.to_thread(sha256, folder / WEIGHTS)
            name = f"adapter-{next(self._numbers)}-{digest[:12]}"  # clients read it: it names no run
            copied = await asyncio.to_thread(self._copy, folder, name)
            weights = PublishedWeights(name, copied, True, prompt, scores)
            log.info("%s is published as %s", folder, name)
        try:
            await self._publisher.publish(weights)
        except BaseException:
            await self._publisher.retire(weights.fingerprint)
            raise
        return VllmSamplingClient(self._publisher, weights.fingerprint, tokenizer, log.warning)

    def _score(self, load: Callable[[], Snapshot], prompt: list[int], tokens: list[int]) -> dict[int, float]:
        snapshot = load()
        futures = {token: self.engine.logprobs(snapshot, ModelInput([*prompt, token])) for token in tokens}
        return {token: float(future.result()[-1] or 0.0) for token, future in futures.items()}

    def _copy(self, folder: Path, name: str) -> Path:
        place = self._folder / f"{FOLDER}{name}"
        with new_folder(place) as new:
            for file in ("adapter_config.json", WEIGHTS):
                shutil.copyfile(folder / file, new / file)
        return place

    async def _retire_unused(self) -> None:
        for key, version in list(self._versions.items()):
            if self._versions.get(key) is not version:
                continue  # another publication retired it while this one waited
            is_idle = version.publication.done() and not version.users
            if is_idle and (len(self._versions) > self._most or not Path(key).is_dir()):
                del self._versions[key]
                await self._publisher.retire(version.publication.result().fingerprint)

    def close(self, seconds: float) -> None:
        """Unload everything, for that long at most; the next start deletes what is left."""
        with suppress(TimeoutError):
            RequestFuture(start_coroutine(self._publisher.aclose())).result(seconds)
        self._lock.close()


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
        places = self._adapters.max_requests
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
