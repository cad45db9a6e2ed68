"""The server without HTTP: sessions, training runs, sampling, results. Every method is thread-safe and returns soon.

    core = Core({"Qwen/Qwen3-8B": engine}, Path("state"))
    session = core.create_session("local")
    request = core.create_model("local", session, 0, "Qwen/Qwen3-8B", {"rank": 32})
    outcome = await core.result("local", request, timeout=30)

What a client asks of a training run is written to the log before it is answered (`store.py`), run in order of its
seq_id by the engine's thread (`worker.py`, `training.py`), and run again from a snapshot after a kill (`policies.py`).
Everything belongs to the owner who made it: another's id reads as not found. `app.py` puts HTTP before it. Exercised
by tests/test_tinker_core*.py.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvr import draws
from rlvr.messages import ModelInput, SamplingParams
from rlvr.service.tinker_api.catalog import Catalog
from rlvr.service.tinker_api.checkpoints import Checkpoints
from rlvr.service.tinker_api.errors import NotFound, UserError
from rlvr.service.tinker_api.limits import ServerLimits
from rlvr.service.tinker_api.line import Sampling
from rlvr.service.tinker_api.policies import Policies
from rlvr.service.tinker_api.presence import Presence
from rlvr.service.tinker_api.promises import Lost, Outcome, Pending, Promises, lost
from rlvr.service.tinker_api.runs import Runs
from rlvr.service.tinker_api.samplers import Samplers
from rlvr.service.tinker_api.store import Row, Store
from rlvr.service.tinker_api.tenants import Quota
from rlvr.service.tinker_api.training import UNPUBLISHED, Training
from rlvr.service.tinker_api.unanswered import Unanswered
from rlvr.service.tinker_api.worker import Worker

if TYPE_CHECKING:
    from rlvr.engine.engine import Engine

log = logging.getLogger(__name__)
CLONE = 1_000_000_000  # a sampling client that was copied to another process counts its requests from a multiple of it


class Core:
    def __init__(
        self,
        engines: Mapping[str, Engine],
        state: Path,
        *,
        aliases: Mapping[str, str] | None = None,
        tokenizers: Mapping[str, str] | None = None,
        limits: ServerLimits = ServerLimits(),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`tokenizers`: where clients find that of a model, if not under its name."""
        if not engines:
            raise ValueError("a server needs at least one model")
        self._engines, self._limits, self._clock = dict(engines), limits, clock
        aliases = checked_aliases(aliases or {})
        state.mkdir(mode=0o700, parents=True, exist_ok=True)  # what clients train on is nobody else's business
        self._claim = open(state / "lock", "w")  # noqa: SIM115 - held, and thereby locked, as long as we live
        try:
            fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._claim.close()
            raise ValueError(f"{state} is in use by another server; give this one a folder of its own") from None
        try:
            self._store = Store(state / "records.db")
        except BaseException:
            self._claim.close()
            raise
        self._promises = Promises(limits.result_seconds, limits.result_bytes, clock)
        self._unanswered = Unanswered(state / "samples.db")
        self._unanswered.lose(self._promises)
        self._promises.dropped = self._unanswered.drop
        self._quota = Quota(limits)
        self._presence = Presence(limits.session_seconds)
        self._checkpoints = Checkpoints(self._store, state, limits, clock)
        self._checkpoints.tidy()
        self._samplers = Samplers(self._store, self._checkpoints, limits, clock)
        self._policies: dict[str, Policies] = {}
        self._workers: dict[str, Worker] = {}
        for name, engine in self._engines.items():
            policies = Policies(engine, self._store, self._promises, state, limits)
            training = Training(
                engine, self._store, self._promises, policies, self._checkpoints, self._samplers, state, aliases
            )
            self._policies[name] = policies
            self._workers[name] = Worker(engine, training, policies, self._samplers, self._promises, limits)
        self._runs = runs = Runs(
            self._store, self._promises, self._quota, self._checkpoints, self._workers, limits, clock
        )
        runs.resume()
        for worker in self._workers.values():
            worker.start()
        self._closing = threading.Event()
        self._janitor = threading.Thread(target=self._clean, name="janitor", daemon=True)
        self._janitor.start()
        self.create_model, self.load_weights, self.submit = runs.create_model, runs.load_weights, runs.submit
        # What is only read, and what is done to saved weights.
        catalog = Catalog(self._store, self._checkpoints, self._engines, tokenizers or {})
        self.capabilities = catalog.capabilities
        self.model_info, self.weights_info = catalog.model_info, catalog.weights_info
        self.training_run, self.training_runs = catalog.training_run, catalog.training_runs
        self.checkpoints, self.external_files = catalog.checkpoints, catalog.external_files
        self.sessions, self.session = catalog.sessions, catalog.session
        self.delete_checkpoint, self.publish = self._checkpoints.delete, self._checkpoints.publish
        self.set_ttl = self._checkpoints.set_ttl

    @property
    def alive(self) -> bool:
        """Whether every engine's thread runs."""
        return all(worker.alive for worker in self._workers.values())

    def close(self) -> None:
        """Finish the request that runs, write a snapshot of every run, stop."""
        self._closing.set()
        for name, worker in self._workers.items():
            worker.stop()
            self._policies[name].close()
        self._janitor.join()
        self._store.close()
        self._unanswered.close()
        self._claim.close()

    def _clean(self) -> None:
        while not self._closing.wait(min(5.0, self._limits.session_seconds / 4)):
            try:
                self._give_up_samples()
                self._promises.trim()
                self._checkpoints.sweep()
                self._store.forget_results(time.time() - self._limits.result_seconds)
            except Exception:
                log.exception("cleaning up failed; it is tried again")

    def _give_up_samples(self) -> None:
        """Of clients that are gone. One that was not, after all, sends them again: they read as `Gone`."""
        present = self._presence.present()
        for promise in self._promises.samples():
            if promise.session not in present:
                log.info("%s is given up: its client has not been heard of", promise.request_id)
                self._promises.resolve(promise, Lost())
                for worker in self._workers.values():
                    worker.cancel(promise)

    # Sessions

    def create_session(
        self,
        owner: str,
        *,
        tags: list[str] | None = None,
        user_metadata: dict[str, Any] | None = None,
        sdk_version: str = "",
        project_id: str | None = None,
        display_name: str | None = None,
    ) -> str:
        session, now = uuid.uuid4().hex, self._clock()
        info = {
            "tags": tags or [], "user_metadata": user_metadata, "sdk_version": sdk_version, "project_id": project_id,
            "display_name": display_name,
        }  # fmt: skip
        row = {"id": session, "owner": owner, "created": now, "heartbeat": now, "info": json.dumps(info)}
        self._store.insert("sessions", row)
        return session

    def heartbeat(self, owner: str, session_id: str) -> None:
        self._runs.session(owner, session_id)
        self._presence.heard(session_id)
        self._store.run("UPDATE sessions SET heartbeat = ? WHERE id = ?", self._clock(), session_id)

    def finish_session(self, owner: str, session_id: str, reason: str) -> None:
        self._runs.session(owner, session_id)
        self._store.run("UPDATE sessions SET finished = ? WHERE id = ?", reason[:1000], session_id)
        self._presence.left(session_id)
        self._give_up_samples()

    # Sampling

    def create_sampler(
        self,
        owner: str,
        session_id: str,
        seq_id: int,
        base_model: str | None = None,
        model_path: str | None = None,
    ) -> str:
        """A sampling session on a base model or on saved weights; asked again, it is the same one."""
        self._runs.session(owner, session_id)
        sampler, number = f"{session_id}:sample:{seq_id}", 0
        with self._store.transaction():  # what is at the path now is what is kept for it
            if model_path is not None:
                _, row = self._checkpoints.find(owner, model_path)
                if base_model not in (None, row["base_model"]):
                    raise UserError(
                        f"{model_path} is of {row['base_model']}, and base_model {base_model!r} is asked for"
                    )
                base_model, number = row["base_model"], row["seq"]
            if base_model not in self._engines:
                raise UserError(f"base_model {base_model!r} is not served here; served: {', '.join(self._engines)}")
            known = self._samplers.row(sampler)
            if known is None:
                self._samplers.create(sampler, session_id, owner, base_model, model_path, number)
            elif (known["base_model"], known["path"], known["model"]) != (base_model, model_path, None):
                raise UserError(f"sampling_session_seq_id {seq_id} of this session is taken by another sampler")
        return sampler

    def sampler(self, owner: str, sampler_id: str) -> dict[str, Any]:
        row = self._sampler(owner, sampler_id)
        found = {"sampler_id": sampler_id, "base_model": row["base_model"]}
        return found if row["path"] is None else {**found, "model_path": row["path"]}

    def _sampler(self, owner: str, sampler_id: str) -> Row:
        row = self._samplers.row(sampler_id)
        if row is None or row["owner"] != owner:
            raise NotFound(f"sampling session {sampler_id[:200]!r} is unknown")
        if row["base_model"] not in self._engines:
            raise NotFound(f"{sampler_id} is on {row['base_model']}, which is not served at the moment")
        return row

    def sample(
        self,
        owner: str,
        sampling_session_id: str,
        seq_id: int,
        prompt: ModelInput,
        count: int,
        params: SamplingParams,
        wants: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[str]]:
        """Queue `count` completions; (request id, an id for each). `wants`: prompt_logprobs, topk_prompt, topk_sample.

        The same message under the same seq_id is the same request. Without a seed its draws are a function of the
        session and the seq_id.
        """
        row = self._sampler(owner, sampling_session_id)
        self._samplers.place(row)  # its weights are still there, or NotFound
        if not 1 <= count <= self._limits.max_samples:
            raise UserError(f"num_samples={count}, expected 1 to {self._limits.max_samples}")
        cells = self._cells(row["base_model"], prompt, count, params, wants or {})
        asked = hashlib.sha256(repr((prompt.to_ints(), count, params, wants)).encode()).hexdigest()[:12]
        request_id = f"{sampling_session_id}:{seq_id}:{asked}"
        sequences = [f"{request_id}:{i}" for i in range(count)]
        if params.seed is None:
            params = replace(params, seed=draws.key("sampling session", sampling_session_id, seq_id))
        self._presence.heard(row["session"])
        size = 64 * prompt.length + 1_024 * count + 128 * cells
        if self._promises.find(request_id) is None:
            self._quota.take(owner, size, samples=1)
            over = partial(self._quota.give, owner, size, 1)
            group = f"{sampling_session_id}/{seq_id // CLONE}"
            if promise := self._promises.open(request_id, owner, group=group, session=row["session"]):
                self._unanswered.add(promise)
                sampling = Sampling(promise, row, prompt, count, params, dict(wants or {}), over)
                self._workers[row["base_model"]].sample(sampling)
            else:  # the same message came twice at once
                over()
        return request_id, sequences

    def _cells(
        self, base_model: str, prompt: ModelInput, count: int, params: SamplingParams, wants: Mapping[str, Any]
    ) -> int:
        """How many likeliest tokens are asked for, in all places; UserError for more than there is room for."""
        top_prompt, top_sample = wants.get("topk_prompt", 0), wants.get("topk_sample", 0)
        if top_sample > self._limits.max_topk:
            raise UserError(f"topk_sample_logprobs={top_sample}, expected at most {self._limits.max_topk}")
        context = self._engines[base_model].model.context
        cells = top_prompt * prompt.length + top_sample * count * min(params.max_tokens or context, context)
        if cells > self._limits.max_cells:
            raise UserError(
                f"topk_prompt_logprobs={top_prompt} for {prompt.length} tokens and topk_sample_logprobs={top_sample} "
                f"for {count} samples (max_tokens={params.max_tokens}) may be {cells:,} log-probs, expected at most "
                f"{self._limits.max_cells:,}; ask for fewer"
            )
        return max(0, cells)

    # Results

    async def result(self, owner: str, request_id: str, timeout: float) -> Outcome | Pending:
        """What became of a request; waits up to `timeout` seconds for it. Gone where that is not known any more."""
        promise = self._promises.of(owner, request_id)
        if promise is not None:
            if promise.session:
                self._presence.heard(promise.session)
            outcome = await self._promises.wait(promise, timeout)
            if promise.session and not isinstance(outcome, Pending):
                self._unanswered.drop(promise)
            return outcome
        # On a thread: who reads the records may have to wait for one who writes them.
        if stored := await asyncio.to_thread(self._stored, owner, request_id):
            return stored
        raise lost(request_id)

    def _stored(self, owner: str, request_id: str) -> Outcome | None:
        model, _, seq = request_id.rpartition(":")
        own = self._store.one("SELECT 1 FROM models WHERE id = ? AND owner = ?", model, owner)
        found = self._store.result(model, int(seq[:18])) if own and seq.isdecimal() else None
        return found[1] if found else None

    async def completions(
        self, owner: str, sampling_session_id: str, clone: int, cursor: int, retrieved: list[str], timeout: float
    ) -> tuple[int, list[tuple[str, bool, int]]]:
        """(new cursor, [(request id, failed, bytes)]) of what a sampling session finished after `cursor`."""
        row = await asyncio.to_thread(self._sampler, owner, sampling_session_id)
        self._presence.heard(row["session"])
        return await self._promises.completions(f"{sampling_session_id}/{clone}", cursor, retrieved, timeout)

    def cancel(self, owner: str, request_id: str) -> None:
        """End a sampling request; one that is over already, or unknown, needs nothing."""
        promise = self._promises.of(owner, request_id)
        if promise is None or promise.outcome is not None:
            return
        if not promise.group:
            raise UserError(f"request {request_id[:200]!r} trains: it will run, and cannot be cancelled")
        for worker in self._workers.values():
            worker.cancel(promise)


def checked_aliases(aliases: Mapping[str, str]) -> dict[str, str]:
    """Names of losses that stand for another one: only for the one whose formula is not published."""
    from rlvr.engine.losses import LOSSES

    for name, loss in aliases.items():
        if name != UNPUBLISHED or loss not in LOSSES:
            raise ValueError(f"alias {name}={loss}: expected {UNPUBLISHED}=<one of {', '.join(sorted(LOSSES))}>")
    return dict(aliases)
