"""Gives vLLM servers new weights, and asks them for completions of exactly these weights.

Weights travel in a folder that every server can read: an adapter is loaded under a new name for each version, all
weights by `reload_weights`. After each publish the servers and the trainer score the same few tokens, which shows an
adapter that is listed but not applied, old weights and another base model. A server that restarted is given its weights
again. Left out on purpose: transfer by NCCL.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rlvr.clients.vllm.vllm_options import SamplerError, VllmOptions
from rlvr.clients.vllm.vllm_server import (
    NoServerError,
    ServerDownError,
    ServerRefusedError,
    VllmServer,
    read_versions,
)

T = TypeVar("T")

FOLDER = "published-"  # begins the names of published folders, beside the run's checkpoints
PROBE_GAP = 0.5  # nats a token between server and trainer after a publish; one step of a bfloat16 logit of 30 is 0.125
CLOSE_SECONDS = 15.0  # for unloading what was published
LEAST_GAP = 1e-6  # nats a token: less is rounding in float32, whichever version scored the probe
STALE_FACTOR = 4.0  # a probe that fits an older version this much better than the new one was scored by the older
FIRST_WAIT, LONGEST_WAIT = 0.25, 4.0  # seconds before servers that are all down are asked again
STARTED = "default"  # the version of a server that was given no weights since its start
LOADING = "loading-"  # begins the version of a server while its weights are replaced


@dataclass(frozen=True)
class PublishedWeights:
    """A folder of weights, and the trainer's log-probs of some tokens after `probe_prompt` [N] with these weights.

    Without a folder they are the weights that the servers were started with, and without log-probs nothing is compared.
    """

    fingerprint: str
    folder: Path | None
    is_adapter: bool
    probe_prompt: Sequence[int]
    probe_logprobs: Mapping[int, float]


class VllmPublisher:
    """The servers of a run and the weights published to them. Coroutines of one event loop use it.

    At most `keep` versions stay: older ones are unloaded and their folders deleted.
    """

    def __init__(
        self,
        servers: Sequence[VllmServer],
        options: VllmOptions,
        keep: int,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.servers, self._options, self._keep, self._warn = list(servers), options, keep, warn
        self._down = set[str]()  # the servers that are known to be down
        self.published: dict[str, PublishedWeights] = {}
        self._known = {STARTED}  # versions that this process or a fresh start may have left at a server
        self._first: PublishedWeights | None = None  # an adapter that does nothing yet, in a new run

    async def check(self) -> None:
        """Check every server, waiting `wait_s` for those that start; SamplerError or ValueError if one cannot serve."""
        await asyncio.gather(*(self._try_each([server], lambda server: server.check()) for server in self.servers))
        self._known |= {server.base_version for server in self.servers}

    async def publish(self, weights: PublishedWeights) -> None:
        """Give the weights to every server that can be reached, and verify that they serve them."""
        if self._first is None:
            self._first = weights
            if weights.folder is not None:
                await self.drop_leftovers(weights.folder.parent, weights.folder)
        self.published[weights.fingerprint] = weights
        self._known |= {weights.fingerprint, LOADING + weights.fingerprint}
        results = await asyncio.gather(*(self._provide(s, weights) for s in self.servers), return_exceptions=True)
        wrong = [error for error in results if isinstance(error, BaseException)]
        for error in wrong:
            if not isinstance(error, ServerDownError):
                raise error
        while len(self.published) > self._keep:
            await self.retire(next(iter(self.published)))

    async def drop_leftovers(self, parent: Path, new: Path | None = None) -> None:
        """Delete what a killed attempt published: the folders in `parent` but `new`, and the adapters of them."""
        for server in self.servers:
            listed = await _try(server.call("GET", "/v1/models"))
            for model in listed["data"] if isinstance(listed, dict) else ():
                place = Path(str(model.get("root")))
                if model.get("parent") and place.parent == parent and place.name.startswith(FOLDER):
                    await _try(server.call("POST", "/v1/unload_lora_adapter", {"lora_name": model["id"]}))
        for folder in parent.glob(f"{FOLDER}*"):
            if folder != new:
                shutil.rmtree(folder, ignore_errors=True)

    async def retire(self, fingerprint: str) -> None:
        """Unload a version everywhere and delete its folder."""
        weights = self.published.pop(fingerprint)
        for server in self.servers:
            if weights.is_adapter and fingerprint in server.loaded:
                await _try(server.call("POST", "/v1/unload_lora_adapter", {"lora_name": fingerprint}))
            server.loaded.discard(fingerprint)
        if weights.folder is not None:
            shutil.rmtree(weights.folder, ignore_errors=True)

    async def generate(
        self, fingerprint: str, tokens: Sequence[int], params: Mapping[str, Any], place: int
    ) -> dict[str, Any]:
        """Completions by exactly these weights. The server at `place` is asked first, then the others in turn."""
        weights = self.published.get(fingerprint)
        if weights is None:
            raise SamplerError(f"the weights {fingerprint} were replaced at the servers; take a new sampling client")
        first = place % len(self.servers)
        order = self.servers[first:] + self.servers[:first]
        return await self._try_each(order, lambda server: self._generate_at(server, weights, tokens, params))

    async def _try_each(self, order: Sequence[VllmServer], ask: Callable[[VllmServer], Awaitable[T]]) -> T:
        until, wait = math.inf, FIRST_WAIT
        while True:
            failures: list[str] = []
            for server in order:
                try:
                    answer = await ask(server)
                except ServerDownError as error:
                    failures.append(str(error))
                    self._report_down(server, error)
                else:
                    self._report_up(server)
                    return answer
            until = min(until, time.monotonic() + self._options.wait_s)  # from the first time that no server answered
            if time.monotonic() + wait > until:
                raise NoServerError(
                    f"no sampling server answers (sampler.wait_s={self._options.wait_s:g}): {'; '.join(failures)}. "
                    "Start one at sampler.urls, then run the same command: it resumes (`rlvr doctor --vllm URL` checks "
                    "a server)"
                )
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)

    def _report_down(self, server: VllmServer, error: ServerDownError) -> None:
        if server.url not in self._down:
            self._down.add(server.url)
            self._warn(f"{error}; trying again, for {self._options.wait_s:g} s where no other server answers")

    def _report_up(self, server: VllmServer) -> None:
        if server.url in self._down:
            self._down.discard(server.url)
            self._warn(f"{server.url} answers again")

    async def _generate_at(
        self, server: VllmServer, weights: PublishedWeights, tokens: Sequence[int], params: Mapping[str, Any]
    ) -> dict[str, Any]:
        expected, served = weights.fingerprint, ""
        for _ in range(2):
            await self._provide(server, weights)
            loads = server.loads
            try:
                answer = await server.generate(_model_name(server, weights), tokens, params, expected)
            except ServerDownError:
                if weights.folder is None:  # it may restart with another model, which no missing adapter shows
                    _forget(server, expected, loads)
                raise
            except ServerRefusedError as error:
                if error.status != 404:
                    raise
                _forget(server, expected, loads)  # the server restarted, or another process unloaded it
                served = "no such weights"
                continue
            served = describe_served(server, answer, weights)
            if served == expected:
                return answer
            if served not in self._known:
                break
            _forget(server, expected, loads)
        raise SamplerError(
            f"{server.url} sampled with the weights {served!r}, expected {expected!r}; does another process load "
            "weights into this server? Give each run with all weights a server of its own"
        )

    async def _provide(self, server: VllmServer, weights: PublishedWeights) -> None:
        """Load and verify the weights at a server, unless it has them."""
        is_replaced = weights.folder is not None and not weights.is_adapter  # by the next load of all weights
        if weights.fingerprint in server.loaded and not is_replaced:
            return  # others may be loading theirs
        async with server.publishing:
            if weights.fingerprint in server.loaded:
                return
            if weights.folder is not None:
                if not weights.folder.is_dir():  # vLLM's engine would end over a missing folder
                    raise SamplerError(
                        f"the folder {weights.folder} is missing, so {server.url} cannot load the weights "
                        f"{weights.fingerprint}"
                    )
                await (_load_adapter if weights.is_adapter else _load_all)(server, weights)
            await self._verify(server, weights)
            if is_replaced:
                server.loaded.clear()
            server.loaded.add(weights.fingerprint)
            server.loads += 1

    async def _verify(self, server: VllmServer, weights: PublishedWeights) -> None:
        """SamplerError unless the server scores the probe as the trainer does, and not as with older weights."""
        if not weights.probe_logprobs:
            return
        model, tokens = _model_name(server, weights), list(weights.probe_logprobs)
        scored = await server.score_next(model, weights.probe_prompt, tokens, weights.fingerprint)
        gap = _mean_gap(weights.probe_logprobs, scored)
        others = {w.fingerprint: w for w in (self._first, *self.published.values()) if w and w is not weights}
        for old in others.values():
            if gap > LEAST_GAP and STALE_FACTOR * _mean_gap(old.probe_logprobs, scored) < gap:
                raise SamplerError(
                    f"{server.url} was given the weights {weights.fingerprint} and scores a probe as "
                    f"{old.fingerprint} does: it serves old weights. Restart it; if that does not help, check that it "
                    f"reads the files as they are now ({weights.folder})"
                )
        if not gap <= PROBE_GAP:
            raise SamplerError(
                f"{server.url} was given the weights {weights.fingerprint} and scores a probe {gap:.3g} nats a token "
                f"apart from the trainer (at most {PROBE_GAP:g} is rounding): it serves other weights or another "
                "base model. Start it with the model that is trained here, and with its dtype"
            )

    async def aclose(self) -> None:
        """Retire everything, as far as the servers answer in time, and drop the connections."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                for fingerprint in list(self.published):
                    await self.retire(fingerprint)
        for server in self.servers:
            await server.aclose()


def _model_name(server: VllmServer, weights: PublishedWeights) -> str:
    return weights.fingerprint if weights.is_adapter else server.base


def _forget(server: VllmServer, fingerprint: str, loads: int) -> None:
    """Note that the server lost the weights after `loads` loads, unless another request has loaded them since."""
    if server.loads == loads:
        server.loaded.discard(fingerprint)


def describe_served(server: VllmServer, answer: Mapping[str, Any], weights: PublishedWeights) -> str:
    """The fingerprint of the weights that sampled an answer, as the answer has it; other text if they are unknown."""
    versions = "+".join(read_versions(answer)) or "unknown"
    if weights.folder is not None and not weights.is_adapter:
        return versions
    model = str(answer.get("model"))
    model = weights.fingerprint if model == _model_name(server, weights) else model
    return model if versions == server.base_version else f"{model} on the base weights {versions}"


async def _load_adapter(server: VllmServer, weights: PublishedWeights) -> None:
    body = {"lora_name": weights.fingerprint, "lora_path": str(weights.folder)}
    # The name may be there from an earlier attempt of the run, or hold something else.
    await _try(server.call("POST", "/v1/unload_lora_adapter", {"lora_name": weights.fingerprint}))
    try:
        await server.call("POST", "/v1/load_lora_adapter", body)
    except (ServerRefusedError, ServerDownError) as error:
        text = str(error)
        has_no_route = isinstance(error, ServerRefusedError) and error.status == 404 and "No adapter found" not in text
        if has_no_route or "LoRA is not enabled" in text:
            remedy = "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
        elif "max_lora_rank" in text or "LoRA rank" in text:
            remedy = "start it with a larger --max-lora-rank, or lower model.lora.rank (limits.max_rank of a server)"
        elif "target modules" in text:
            remedy = "vLLM has no adapters for these layers: train others (train_attn, train_mlp, train_unembed)"
        elif isinstance(error, ServerDownError):
            raise
        else:
            remedy = "every server must read this folder by the same path (a shared file system)"
        raise SamplerError(f"{server.url} does not take the adapter {weights.fingerprint}: {text}; {remedy}") from error


async def _load_all(server: VllmServer, weights: PublishedWeights) -> None:
    """Replace all weights between pause and resume. While they are half replaced, the version says so."""
    try:
        await server.call("POST", "/pause?mode=wait")
        await server.call("POST", "/update_weight_version", {"new_version": LOADING + weights.fingerprint})
        arguments = {"method": "reload_weights", "kwargs": {"weights_path": str(weights.folder)}}
        await server.call("POST", "/collective_rpc", arguments)
        await server.call("POST", "/update_weight_version", {"new_version": weights.fingerprint})
    except ServerRefusedError as error:
        raise SamplerError(
            f"{server.url} does not take new weights: {error}; start it with VLLM_SERVER_DEV_MODE=1, on a network that "
            "only you can reach"
        ) from error
    finally:
        await _try(server.call("POST", "/resume"))


def _mean_gap(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float:
    """The mean difference of the log-probs of the tokens in `theirs`, in nats."""
    return sum(abs(ours[token] - value) for token, value in theirs.items()) / len(theirs)


async def _try(call: Awaitable[T]) -> T | None:
    """The answer to a call that may fail, or None."""
    with suppress(SamplerError):
        return await call
