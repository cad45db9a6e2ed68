"""Sampling as clients see it: sampling sessions are opened, samples requested, awaited in groups, cancelled."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rlvr.core import rng
from rlvr.core.messages import ModelInput, SampleResponse, SamplingParams
from rlvr.core.registry import did_you_mean
from rlvr.tinker_server.backend.quotas import OwnerQuotas
from rlvr.tinker_server.backend.request_futures import (
    FinishedSamples,
    FutureRegistry,
    LostRequest,
    ProtoResult,
    ResultFuture,
    SampleResult,
)
from rlvr.tinker_server.backend.runs.engine_thread import EngineThread, QueuedSample
from rlvr.tinker_server.backend.sampling.served_runs import RunWeights
from rlvr.tinker_server.backend.sampling.vllm_sampling import VllmSampler
from rlvr.tinker_server.backend.storage.checkpoints import Checkpoints
from rlvr.tinker_server.backend.storage.client_sessions import ClientSessions, Heartbeats
from rlvr.tinker_server.backend.storage.pending_samples import PendingSamples
from rlvr.tinker_server.backend.storage.sampling_sessions import SamplingSessions
from rlvr.tinker_server.backend.storage.server_store import Row, ServerStore
from rlvr.tinker_server.protocol.errors import NotFound, UserError
from rlvr.tinker_server.protocol.server_limits import ServerLimits
from rlvr.tinker_server.protocol.wire import RequestedTargets, encode_samples

if TYPE_CHECKING:
    from rlvr.engine.engine import Engine

log = logging.getLogger(__name__)
CLONE_STRIDE = 1_000_000_000  # a sampling client copied to another process counts its requests from a multiple of this
# About how many bytes a request holds while it waits and runs: objects per prompt token, completion and top-k cell.
TOKEN_BYTES, COMPLETION_BYTES, LOGPROB_BYTES = 64, 1_024, 128
DIGESTED = 4_096  # tokens of a prompt at a time: no other thread runs meanwhile


def _encode_protobuf(targets: RequestedTargets | None, response: SampleResponse) -> ProtoResult:
    scores = response.prompt_target_logprobs
    return ProtoResult(encode_samples(response, targets and targets.encode(scores or [])))


@dataclass(eq=False)
class SampleRequests:
    _engines: dict[str, Engine]
    _threads: Mapping[str, EngineThread]
    _remote: Mapping[str, VllmSampler]
    _store: ServerStore
    _sessions: ClientSessions
    _sampling_sessions: SamplingSessions
    _checkpoints: Checkpoints
    _futures: FutureRegistry
    _pending: PendingSamples
    _quotas: OwnerQuotas
    _heartbeats: Heartbeats
    _limits: ServerLimits
    _served_runs: Mapping[str, RunWeights]

    def create_sampler(
        self,
        owner: str,
        session_id: str,
        seq_id: int,
        base_model: str | None = None,
        model_path: str | None = None,
    ) -> str:
        """Open a sampling session on a base model or on saved weights; a repeated request returns the same one."""
        self._sessions.find(owner, session_id)
        sampler, number = f"{session_id}:sample:{seq_id}", 0
        with self._store.transaction():  # the weights that are at the path now stay for this sampler
            if model_path is not None:
                _, row = self._checkpoints.find(owner, model_path)
                if base_model not in (None, row["base_model"]):
                    raise UserError(f"{model_path} belongs to {row['base_model']}, not to base_model {base_model!r}")
                base_model, number = row["base_model"], row["seq"]
            if base_model in self._served_runs:
                raise UserError(
                    f"base_model {base_model!r} is the policy of a training run, not a base model; sample from it "
                    "over /v1/completions"
                )
            if base_model not in self._engines:
                raise UserError(f"base_model {base_model!r} is not served here; served: {', '.join(self._engines)}")
            existing = self._sampling_sessions.find(sampler)
            if existing is None:
                self._sampling_sessions.create(sampler, session_id, owner, base_model, model_path, number)
            elif (existing["base_model"], existing["path"], existing["model"]) != (base_model, model_path, None):
                raise UserError(f"sampling_session_seq_id {seq_id} of this session is taken by another sampler")
        return sampler

    def describe(self, owner: str, sampler_id: str) -> dict[str, Any]:
        row = self._find(owner, sampler_id)
        fields = {"sampler_id": sampler_id, "base_model": row["base_model"]}
        return fields if row["path"] is None else {**fields, "model_path": row["path"]}

    def _find(self, owner: str, sampler_id: str) -> Row:
        row = self._sampling_sessions.find(sampler_id)
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
        options: Mapping[str, Any] | None = None,
        targets: RequestedTargets | None = None,
    ) -> tuple[str, list[str]]:
        """Queue `count` completions; returns (request id, one id per completion).

        `options`: those of `Engine.enqueue` about log-probs; `targets`: tokens to score in the prompt's places. The
        same message under the same seq_id is the same request. Without a seed its random draws are a function of the
        session and the seq_id.
        """
        row = self._find(owner, sampling_session_id)
        self._sampling_sessions.locate_weights(row)  # raises NotFound if they are gone
        if not 1 <= count <= self._limits.max_samples:
            raise UserError(f"num_samples={count}, expected 1 to {self._limits.max_samples}")
        targeted = 0 if targets is None else targets.ids_N.size
        size = self._size(row["base_model"], prompt, count, params, options or {}, targeted)
        digest, tokens = hashlib.sha256(repr((count, params, options)).encode()), prompt.to_ints()
        for start in range(0, len(tokens), DIGESTED):
            digest.update(repr(tokens[start : start + DIGESTED]).encode())
        if targets is not None:
            digest.update(targets.content)
        request_id = f"{sampling_session_id}:{seq_id}:{digest.hexdigest()[:12]}"
        sequences = [f"{request_id}:{i}" for i in range(count)]
        if params.seed is None:
            params = replace(params, seed=rng.key("sampling session", sampling_session_id, seq_id))
        self._heartbeats.record(row["session"])
        if self._futures.find(request_id) is None:
            self._quotas.acquire(owner, size, samples=1)
            release_quota = partial(self._quotas.release, owner, size, 1)
            group = f"{sampling_session_id}/{seq_id // CLONE_STRIDE}"
            if future := self._futures.create(request_id, owner, group=group, session=row["session"]):
                self._pending.add(future)
                wanted = dict(options or {}) | ({} if targets is None else {"prompt_targets": targets.targets})
                encode = partial(_encode_protobuf, targets)
                self._enqueue(QueuedSample(future, row, prompt, count, params, wanted, release_quota, encode))
            else:  # the same message arrived twice at once
                release_quota()
        return request_id, sequences

    def find_model(self, owner: str, name: str) -> Row:
        """The weights that a name stands for, in the form of a sampling session.

        A name is a base model, a `tinker://` path, or the id of a training run of the owner's, which stands for the
        weights that it saved last. Or it is a served run: the row then has the `snapshot` that its request keeps.
        """
        row = {"id": name, "owner": owner, "model": None, "path": None, "folder": None, "kind": "snapshot", "number": 0}
        if (served := self._served_runs.get(name)) is not None:
            snapshot = served.newest()
            return row | {"base_model": name, "folder": snapshot.fingerprint, "snapshot": snapshot}
        if name in self._engines:
            return row | {"base_model": name}
        run = self._store.fetch_one("SELECT base_model FROM models WHERE id = ? AND owner = ?", name, owner)
        if run is None and not name.startswith("tinker://"):
            raise NotFound(
                f"model {name[:200]!r} is not served here{did_you_mean(name[:200], self._engines)}; served: "
                f"{', '.join(self._engines)}, saved weights by their tinker:// path, and your training runs by "
                "their id"
            )
        sampler = self._store.fetch_one(
            "SELECT * FROM samplers WHERE model = ? AND folder != '' ORDER BY number DESC LIMIT 1", name
        )
        if run is not None:
            saved = self._store.fetch_one(
                "SELECT kind, name, seq FROM checkpoints WHERE run = ? AND deleted = 0 AND kind != 'external_weights' "
                "ORDER BY seq DESC LIMIT 1",
                name,
            )
            if saved is None and sampler is None:
                raise NotFound(f"training run {name[:200]!r} has not saved weights yet; save them for sampling first")
            if saved is None or (sampler is not None and sampler["number"] > saved["seq"]):
                return dict(sampler or {})
            name = f"tinker://{name}/{saved['kind']}/{saved['name']}"
        _, checkpoint = self._checkpoints.find(owner, name)
        if checkpoint["base_model"] not in self._engines:
            raise NotFound(f"{name} is on {checkpoint['base_model']}, which is not served at the moment")
        return row | {"base_model": checkpoint["base_model"], "path": name, "number": checkpoint["seq"]}

    def check_prompts(self, count: int) -> None:
        """UserError for more prompts than can ever wait; it costs nothing, unlike their tokens."""
        if count > self._limits.owner_samples:
            raise UserError(f"prompt: {count:,} prompts, expected at most {self._limits.owner_samples:,}; send several")

    def check_answer(
        self, row: Row, prompts: Sequence[ModelInput], count: int, params: SamplingParams, options: Mapping[str, Any]
    ) -> None:
        """UserError for a request of the open endpoints that can never be answered: too many prompts, completions,
        bytes or log-probs. The log-probs of a prompt are in the answer of each of its completions."""
        self.check_prompts(len(prompts))
        if not 1 <= count <= self._limits.max_samples:
            raise UserError(f"n={count}, expected 1 to {self._limits.max_samples}")
        context, top = self._engines[row["base_model"]].model.context, options.get("topk_sample", 0)
        longest = [min(params.max_tokens or context, max(1, context - prompt.length)) for prompt in prompts]
        scored = sum(prompt.length for prompt in prompts) if options.get("prompt_logprobs") else 0
        logprobs = count * (max(1, options.get("topk_prompt", 0)) * scored + top * sum(longest))
        if logprobs > self._limits.answer_logprobs:
            raise UserError(
                f"logprobs: the answer may have {logprobs:,} log-probs (logprobs={top}, n={count}, {scored:,} tokens "
                f"of prompts, at most {sum(longest):,} sampled ones for each n), expected at most "
                f"{self._limits.answer_logprobs:,} (limits.answer_logprobs); give a smaller logprobs, n or max_tokens, "
                "or fewer prompts"
            )
        size = sum(self._size(row["base_model"], prompt, count, params, options) for prompt in prompts)
        if size > self._limits.owner_bytes:
            raise UserError(
                f"n={count} for {len(prompts):,} prompts takes {size:,} bytes, expected at most "
                f"{self._limits.owner_bytes:,} (limits.owner_bytes); send several requests"
            )

    def sample_model(
        self, owner: str, row: Row, prompt: ModelInput, count: int, params: SamplingParams, options: Mapping[str, Any]
    ) -> ResultFuture:
        """Queue `count` completions outside of sampling sessions; the future gets a `SampleResult`.

        `row` is from `find_model`, and `check_answer` was called. The caller ends what it does not wait for with
        `cancel_future`.
        """
        size = self._size(row["base_model"], prompt, count, params, options)
        request_id = f"open-{secrets.token_hex(12)}"
        if params.seed is None:
            params = replace(params, seed=rng.key("open request", request_id))
        self._quotas.acquire(owner, size, samples=1)
        future = self._futures.create(request_id, owner)
        assert future is not None  # the id is new
        release_quota = partial(self._quotas.release, owner, size, 1)
        self._enqueue(QueuedSample(future, row, prompt, count, params, dict(options), release_quota, SampleResult))
        return future

    def _enqueue(self, queued: QueuedSample) -> None:
        """Let vLLM servers sample if there are any and they give all that is asked for, else the engine."""
        name = queued.sampler["base_model"]
        remote = self._remote.get(name)
        takes = self._threads[name] if remote is None or not remote.can_sample(queued) else remote
        takes.sample(queued)

    def _cancel(self, future: ResultFuture) -> None:
        for takes in (*self._threads.values(), *self._remote.values()):
            takes.cancel(future)

    def cancel_future(self, future: ResultFuture) -> None:
        """End what is still running of a request of `sample_model`, and forget its result."""
        if future.outcome is None:
            self._cancel(future)
        self._futures.discard(future)

    def _size(
        self,
        base_model: str,
        prompt: ModelInput,
        count: int,
        params: SamplingParams,
        options: Mapping[str, Any],
        targeted: int = 0,
    ) -> int:
        """About how many bytes a request holds; UserError if it asks for too many log-probs."""
        top_prompt, top_sample = options.get("topk_prompt", 0), options.get("topk_sample", 0)
        if top_sample > self._limits.max_topk:
            raise UserError(f"topk_sample_logprobs={top_sample}, expected at most {self._limits.max_topk}")
        context = self._engines[base_model].model.context
        scored, drawn = options.get("prompt_last") or prompt.length, options.get("prompt_alternatives", 0)
        logprobs = top_prompt * scored + drawn * prompt.length + targeted
        logprobs += top_sample * count * min(params.max_tokens or context, context)
        if logprobs > self._limits.request_logprobs:
            raise UserError(
                f"topk_prompt_logprobs={top_prompt} for {scored} tokens, prompt_alt_tokens_k={drawn} for "
                f"{prompt.length}, topk_sample_logprobs={top_sample} for "
                f"{count} samples (max_tokens={params.max_tokens}) and {targeted:,} target_prompt_logprobs may be "
                f"{logprobs:,} log-probs, expected at most {self._limits.request_logprobs:,} (limits.request_logprobs)"
                "; ask for fewer"
            )
        return TOKEN_BYTES * prompt.length + COMPLETION_BYTES * count + LOGPROB_BYTES * max(0, logprobs)

    async def wait_for_any(
        self, owner: str, sampling_session_id: str, clone: int, cursor: int, retrieved: list[str], timeout: float
    ) -> FinishedSamples:
        """The results that a sampling session finished after `cursor`."""
        row = await asyncio.to_thread(self._find, owner, sampling_session_id)
        self._heartbeats.record(row["session"])
        return await self._futures.wait_for_group(f"{sampling_session_id}/{clone}", cursor, retrieved, timeout)

    def cancel(self, owner: str, request_id: str) -> None:
        """End a sampling request; a finished or unknown one is left alone."""
        future = self._futures.find_owned(owner, request_id)
        if future is None or future.outcome is not None:
            return
        if not future.group:
            raise UserError(f"request {request_id[:200]!r} trains: it will run, and cannot be cancelled")
        self._cancel(future)

    def cancel_absent_clients(self) -> None:
        """Cancel the samples of sessions without heartbeats. A client that returns sends them again (`GoneError`)."""
        live = self._heartbeats.live_sessions()
        for future in self._futures.unfinished_samples():
            if future.session not in live:
                log.info("%s is cancelled: no heartbeat of its client", future.request_id)
                self._futures.resolve(future, LostRequest())
                self._cancel(future)
