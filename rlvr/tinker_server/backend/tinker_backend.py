"""The Tinker server without HTTP. Every method is thread-safe and returns soon.

    backend = TinkerBackend({"Qwen/Qwen3-8B": engine}, Path("state"))
    session = backend.sessions.create("local")
    request = backend.runs.create_model("local", session, 0, "Qwen/Qwen3-8B", {"rank": 32})
    outcome = await backend.result("local", request, timeout=30)

A request to a training run is written to the log before it is answered (`server_store.py`), executed in order of its
seq_id by the engine thread (`engine_thread.py`, `executor.py`), and replayed from a snapshot after a kill
(`adapter_cache.py`). Everything belongs to the owner who made it; another owner's id reads as not found. `http/app.py`
serves it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rlvr.core.files import lock_file
from rlvr.engine.malloc import KEPT_BYTES, TRIM_SECONDS, release_free_memory
from rlvr.tinker_server.backend.quotas import OwnerQuotas
from rlvr.tinker_server.backend.request_futures import (
    FutureRegistry,
    JsonResult,
    LiveOutcome,
    Outcome,
    Pending,
    lost_error,
)
from rlvr.tinker_server.backend.runs.adapter_cache import AdapterCache
from rlvr.tinker_server.backend.runs.engine_thread import EngineState, EngineThread
from rlvr.tinker_server.backend.runs.executor import RunExecutor
from rlvr.tinker_server.backend.runs.run_worker import UNPUBLISHED_LOSS, RunWorker
from rlvr.tinker_server.backend.runs.training_runs import TrainingRuns
from rlvr.tinker_server.backend.sampling.sample_requests import SampleRequests
from rlvr.tinker_server.backend.sampling.served_runs import RunWeights
from rlvr.tinker_server.backend.sampling.vllm_sampling import PublishedAdapters, VllmSampler
from rlvr.tinker_server.backend.storage.checkpoints import Checkpoints
from rlvr.tinker_server.backend.storage.client_sessions import ClientSessions, Heartbeats
from rlvr.tinker_server.backend.storage.custom_losses import CustomLosses
from rlvr.tinker_server.backend.storage.disk_usage import DiskAccounts
from rlvr.tinker_server.backend.storage.pending_samples import PendingSamples
from rlvr.tinker_server.backend.storage.queries import ServerQueries
from rlvr.tinker_server.backend.storage.sampling_sessions import SamplingSessions
from rlvr.tinker_server.backend.storage.server_store import RECORDS, ServerStore
from rlvr.tinker_server.backend.storage.session_search import SessionSearch
from rlvr.tinker_server.backend.storage.weight_copies import WeightCopies
from rlvr.tinker_server.protocol.server_limits import ServerLimits

if TYPE_CHECKING:
    from rlvr.engine.engine import Engine

log = logging.getLogger(__name__)


class TinkerBackend:
    """The state of a Tinker server. `sessions`, `runs`, `losses` and `sampling` take requests, `queries` reads,
    `checkpoints` changes."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        state: Path,
        *,
        aliases: Mapping[str, str] | None = None,
        tokenizers: Mapping[str, str] | None = None,
        served_runs: Mapping[str, RunWeights] | None = None,
        samplers: Mapping[str, PublishedAdapters] | None = None,
        limits: ServerLimits = ServerLimits(),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`engines` by the names of clients, which may share one; `tokenizers`: where clients find a model's tokenizer,
        if not under the model's name. `served_runs`: the names among them that stand for the policy of a training run,
        which the open endpoints sample from; the Tinker protocol has base models only. `samplers`: the vLLM servers
        that sample for an engine, by its names."""
        if not engines:
            raise ValueError("a server needs at least one model")
        self.engines, self.served_runs = dict(engines), dict(served_runs or {})
        engines = self.engines
        bases = {name: engine for name, engine in engines.items() if name not in self.served_runs}
        aliases = validate_aliases(aliases or {})
        self.limits, self.state, self.started = limits, state, time.time()
        state.mkdir(mode=0o700, parents=True, exist_ok=True)  # training data is private
        lock = lock_file(state / "lock")
        if lock is None:
            raise ValueError(f"{state} is in use by another server; give this one a folder of its own (--state)")
        self._lock = lock
        try:
            self._store = store = ServerStore(state / RECORDS)
        except BaseException:
            lock.close()
            raise
        self._futures = futures = FutureRegistry(limits.result_seconds, limits.result_bytes)
        self._pending_samples = PendingSamples(state / "samples.db")
        self._pending_samples.resolve_leftovers(futures)
        futures.on_discard = self._pending_samples.remove
        self._quotas, self._heartbeats = OwnerQuotas(limits), Heartbeats(limits.session_seconds)
        self.disk = DiskAccounts(store, state, limits)
        self.checkpoints = Checkpoints(store, state, limits, self.disk, clock)
        self.checkpoints.clean_up()
        self._sampling_sessions = sampling_sessions = SamplingSessions(store, self.checkpoints, limits, clock)
        self.sessions = ClientSessions(store, self._heartbeats, clock)
        self.losses = CustomLosses(store, self.sessions, limits, clock)
        self._adapters: dict[str, AdapterCache] = {}
        self._engine_threads: dict[str, EngineThread] = {}
        for names in group_names(engines):
            engine = engines[names[0]]
            adapters = AdapterCache(engine, store, futures, state, limits, self.disk)
            worker = RunWorker(
                engine, adapters, self.checkpoints, sampling_sessions, self.disk, self.losses, state, aliases
            )
            executor = RunExecutor(store, futures, adapters, self.checkpoints, worker)
            thread = EngineThread(engine, executor, adapters, sampling_sessions, futures, limits)
            self._adapters |= dict.fromkeys(names, adapters)
            self._engine_threads |= dict.fromkeys(names, thread)
        found = {s: VllmSampler(s, sampling_sessions, futures, limits) for s in (samplers or {}).values()}
        self._remote = {name: found[adapters] for name, adapters in (samplers or {}).items()}
        self.copies = WeightCopies(store, self.checkpoints, self.sessions, self.disk, clock)
        self.queries = ServerQueries(store, self.checkpoints, bases, tokenizers or {})
        self.searches = SessionSearch(store, limits.session_seconds, clock)
        trained = {name: thread for name, thread in self._engine_threads.items() if name in bases}
        self.runs = TrainingRuns(
            store, self.sessions, futures, self._quotas, self.checkpoints, self.disk, trained, limits, clock
        )
        self.sampling = SampleRequests(
            engines, self._engine_threads, self._remote, store, self.sessions, sampling_sessions, self.checkpoints,
            futures, self._pending_samples, self._quotas, self._heartbeats, limits, self.served_runs,
        )  # fmt: skip
        self.runs.resume()
        for thread in dict.fromkeys(self._engine_threads.values()):
            thread.start()
        self._closing = threading.Event()
        self._janitor = threading.Thread(target=self._clean, name="janitor", daemon=True)
        self._janitor.start()

    @property
    def is_alive(self) -> bool:
        """Whether every engine's thread runs."""
        return all(thread.is_alive for thread in self._engine_threads.values())

    def describe_engines(self) -> list[EngineState]:
        queued = self.runs.count_queued()
        states: list[EngineState] = []
        for names in group_names(self.engines):
            model, waiting = ", ".join(names), sum(queued[name] for name in names)
            state = self._engine_threads[names[0]].describe_state(model, waiting)
            remote = next((self._remote[name] for name in names if name in self._remote), None)
            states.append(state if remote is None else remote.add_to(state))
        return states

    @property
    def weights_in_memory(self) -> int:
        return self._sampling_sessions.weights_in_memory

    def close(self) -> None:
        """Finish the current request, write a snapshot of every run, stop."""
        self._closing.set()
        for remote in dict.fromkeys(self._remote.values()):
            remote.close()
        for name, thread in self._engine_threads.items():
            thread.stop()
            self._adapters[name].close()
        self._janitor.join()
        self._store.close()
        self._pending_samples.close()
        self._lock.close()

    def _clean(self) -> None:
        trimmed_at = time.monotonic()
        while not self._closing.wait(min(5.0, self.limits.session_seconds / 4)):
            try:
                # An engine gives memory back when it is idle, which may be never.
                if time.monotonic() - trimmed_at > TRIM_SECONDS:
                    trimmed_at = time.monotonic()
                    release_free_memory(KEPT_BYTES)
                self.sampling.cancel_absent_clients()
                self._futures.trim()
                self.checkpoints.sweep()
                self.losses.sweep()
                self._store.delete_results(time.time() - self.limits.result_seconds)
            except Exception:
                log.exception("cleaning up failed; it is tried again")

    def finish_session(self, owner: str, session_id: str, reason: str) -> None:
        self.sessions.finish(owner, session_id, reason)
        self.sampling.cancel_absent_clients()

    async def result(self, owner: str, request_id: str, timeout: float) -> LiveOutcome | Pending:
        """Wait up to `timeout` seconds for the outcome of a request; GoneError if it is not known any more."""
        future = self._futures.find_owned(owner, request_id)
        if future is not None:
            if future.session:
                self._heartbeats.record(future.session)
            outcome = await self._futures.wait(future, timeout)
            if future.session and not isinstance(outcome, Pending):
                self._pending_samples.remove(future)
            return outcome
        # On a thread: a read may have to wait for a write to the disk.
        if stored := await asyncio.to_thread(self._find_stored, owner, request_id):
            return stored
        raise lost_error(request_id)

    def _find_stored(self, owner: str, request_id: str) -> Outcome | None:
        if self.losses.is_owned(owner, request_id):
            return JsonResult({"loss_id": request_id, "type": "create_custom_loss"})
        model, _, seq = request_id.rpartition(":")
        own = self._store.fetch_one("SELECT 1 FROM models WHERE id = ? AND owner = ?", model, owner)
        stored = self._store.find_result(model, int(seq[:18])) if own and seq.isdecimal() else None
        return stored.outcome if stored else None


def group_names(engines: Mapping[str, Engine]) -> list[list[str]]:
    """The names of each engine."""
    found: dict[Engine, list[str]] = {}
    for name, engine in engines.items():
        found.setdefault(engine, []).append(name)
    return list(found.values())


def validate_aliases(aliases: Mapping[str, str]) -> dict[str, str]:
    """Check the losses that stand for another one: only the one whose formula is not published may have one."""
    from rlvr.algorithms.loss_specs import LOSS_SPECS

    for name, loss in aliases.items():
        if name != UNPUBLISHED_LOSS or loss not in LOSS_SPECS:
            raise ValueError(
                f"alias {name}={loss}: expected {UNPUBLISHED_LOSS}=<one of {', '.join(sorted(LOSS_SPECS))}>"
            )
    return dict(aliases)
