"""A training client whose completions come from vLLM servers, and its sampling client.

    client = sample_from_vllm(trainer, VllmOptions(["http://127.0.0.1:8790"]), has_adapter=True, keep=2)

Everything but sampling is the trainer's own. A fingerprint is a hash of the weights, so that two runs at one server
cannot be mistaken for each other. Left out on purpose: `top_k`, `top_p` and `min_p`: vLLM's processed log-probs come
after them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlvr.clients.endpoint import RequestFuture
from rlvr.clients.vllm.vllm_options import VllmOptions
from rlvr.clients.vllm.vllm_publisher import FOLDER, PublishedWeights, VllmPublisher
from rlvr.clients.vllm.vllm_server import VllmServer, read_completion, read_prompt_logprobs
from rlvr.core import rng
from rlvr.core.futures import Future
from rlvr.core.messages import Datum, ModelInput, SampleResponse, SamplingParams
from rlvr.core.protocols import SamplingClient, TrainingClient
from rlvr.reward.coroutines import start_coroutine

PROBE_TOKENS = 16


class VllmSamplingClient:
    """Samples from one version of the weights at the servers. Satisfies `rlvr.core.protocols.SamplingClient`."""

    def __init__(self, publisher: VllmPublisher, fingerprint: str, tokenizer: Any, warn: Callable[[str], None]) -> None:
        self._publisher, self.fingerprint, self._tokenizer, self._warn = publisher, fingerprint, tokenizer, warn
        self._unseeded = itertools.count()

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
    ) -> Future[SampleResponse]:
        """One request for all samples, under way when this returns. Equal prompts go to the same server."""
        tokens, asked = prompt.to_ints(), sampling_params
        room = min(server.max_model_len for server in self._publisher.servers) - len(tokens)
        if num_samples < 1 or not tokens:
            raise ValueError(f"sample: {num_samples} samples of {len(tokens)} tokens; expected at least one of each")
        if room < 1:
            raise ValueError(
                f"sample: a prompt of {len(tokens)} tokens leaves no room in the servers' "
                f"--max-model-len={room + len(tokens)}; give a shorter prompt, or start the servers with a longer one"
            )
        if room < (asked.max_tokens or 0):
            self._warn(
                f"completions are cut after {room} tokens, not rollout.max_tokens={asked.max_tokens}: a prompt of "
                f"{len(tokens)} tokens leaves no more in the servers' --max-model-len={room + len(tokens)} (said once)"
            )
        for name, off in (("top_k", -1), ("top_p", 1.0), ("min_p", 0.0)):
            if (given := getattr(asked, name)) != off:
                raise ValueError(
                    f"sample: {name}={given} with sampler.name=vllm: its log-probs would be of the distribution that "
                    f"{name} has cut, which training cannot use; leave "
                    f"rollout.{name} out"
                )
        seed = asked.seed if asked.seed is not None else rng.key("unseeded", self.fingerprint, next(self._unseeded))
        params: dict[str, Any] = {
            "n": num_samples,
            "max_tokens": min(asked.max_tokens or room, room),
            "temperature": asked.temperature,
            "seed": rng.key("vllm", seed) >> 1,  # vLLM adds the sample's index to it
            "logprobs": 0,
            "skip_special_tokens": False,
            **_translate_stops(asked.stop),
        }
        place = rng.key("server", *tokens)
        return RequestFuture(start_coroutine(self._sample(tokens, params, place, include_prompt_logprobs)))

    async def _sample(self, tokens: list[int], params: dict[str, Any], place: int, scored: bool) -> SampleResponse:
        answer = await self._publisher.generate(self.fingerprint, tokens, params, place)
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        assert len(choices) == params["n"], "vLLM answers every sample of a request"
        # A request of its own: vLLM 0.32 for CPUs crashes on log-probs of a prompt beside completions of an adapter.
        prompt = await self._score(tokens) if scored else None
        return SampleResponse([read_completion(choice) for choice in choices], prompt, self.fingerprint)

    def compute_logprobs(self, prompt: ModelInput, temperature: float = 1.0) -> Future[list[float | None]]:
        if temperature != 1.0:
            raise ValueError(
                f"compute_logprobs: vLLM scores prompts at temperature 1, not {temperature:g}; score with the trainer "
                "(create_sampling_client(path))"
            )
        return RequestFuture(start_coroutine(self._score(prompt.to_ints())))

    async def _score(self, tokens: list[int]) -> list[float | None]:
        params = {"max_tokens": 1, "prompt_logprobs": 0}
        answer = await self._publisher.generate(self.fingerprint, tokens, params, rng.key("server", *tokens))
        return [None, *read_prompt_logprobs(answer, tokens)]

    def get_tokenizer(self) -> Any:
        return self._tokenizer


def _translate_stops(stop: str | Sequence[str] | Sequence[int] | None) -> dict[str, Any]:
    """vLLM's parameters for our engine's stops: a stop string stays in the tokens; None stops at the end token only."""
    if stop is None:
        return {}
    stops = [stop] if isinstance(stop, str) else list(stop)
    if "" in stops:
        raise ValueError("sample: an empty stop string would end every answer at its first token; leave it out")
    strings, ids = [s for s in stops if isinstance(s, str)], [s for s in stops if isinstance(s, int)]
    return {"ignore_eos": True, "stop": strings, "stop_token_ids": ids, "include_stop_str_in_output": True}


class VllmTrainingClient:
    """A trainer that samples elsewhere: `save_weights_and_get_sampling_client` publishes its weights to the servers.

    The trainer itself samples from a saved state (`create_sampling_client(path)`), such as a KL penalty's reference.
    """

    def __init__(
        self, trainer: TrainingClient, publisher: VllmPublisher, *, has_adapter: bool, warn: Callable[[str], None]
    ) -> None:
        self._trainer, self._publisher, self._has_adapter, self._warn = trainer, publisher, has_adapter, warn
        self._has_warned = False
        self._sampler: VllmSamplingClient | None = None
        # A server can hold several adapters. All weights are replaced in place, so the batch before must end first.
        self.capabilities = replace(trainer.capabilities, can_overlap=has_adapter)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    @property
    def servers(self) -> list[VllmServer]:
        return self._publisher.servers

    def create_sampling_client(self, model_path: str | None = None) -> SamplingClient:
        """A sampler at the servers for the weights as they are now, or the trainer's own for those at a path."""
        if model_path is not None:
            return self._trainer.create_sampling_client(model_path)
        return self.save_weights_and_get_sampling_client()

    def save_weights_and_get_sampling_client(self, name: str | None = None) -> VllmSamplingClient:
        """A sampler at the servers for the weights as they are now; the same one until they change."""
        if name is not None:
            self._trainer.save_weights_for_sampler(name).result()
        fingerprint = self._fingerprint()
        if self._sampler is None or self._sampler.fingerprint != fingerprint:
            weights = self._save(fingerprint)
            RequestFuture(start_coroutine(self._publisher.publish(weights))).result()
            tokenizer = self._trainer.get_tokenizer()
            self._sampler = VllmSamplingClient(self._publisher, fingerprint, tokenizer, self._warn_once)
        return self._sampler

    def _warn_once(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(text)

    def _fingerprint(self) -> str:
        if not (digest := self._trainer.weights_sha256()):
            raise ValueError(
                f"sampler.name=vllm: client={self.capabilities.name} keeps its weights at a server, and vLLM servers "
                "load them from folders; use client=local"
            )
        return f"{self._trainer.fingerprint.replace('@', '-')}-{digest[:12]}"  # "policy-12-..."

    def _save(self, fingerprint: str) -> PublishedWeights:
        path = Path(self._trainer.save_weights_for_sampler(FOLDER + fingerprint).result().path).absolute()
        prompt, tokens = draw_probe(self._publisher, self._trainer.get_tokenizer())
        rows = [Datum.from_completion(prompt, [token], weight=0.0) for token in tokens]
        outputs = self._trainer.forward(rows, "cross_entropy").result().loss_fn_outputs
        scores = {t: float(output["logprobs"].data[-1]) for t, output in zip(tokens, outputs, strict=True)}
        return PublishedWeights(fingerprint, path, self._has_adapter, prompt, scores)

    def close(self) -> None:
        """Unload the published weights, and close the trainer."""
        RequestFuture(start_coroutine(self._publisher.aclose())).result()
        self._trainer.close()


def sample_from_vllm(
    trainer: TrainingClient,
    options: VllmOptions,
    *,
    has_adapter: bool,
    keep: int,
    warn: Callable[[str], None] = lambda text: None,
) -> VllmTrainingClient:
    """Connect `trainer` to the servers of `options`, which keep up to `keep` versions of its weights.

    ValueError for a server that cannot sample for this trainer, SamplerError for one that does not answer.
    """
    publisher = connect_servers(options, keep, warn)
    try:
        check_tokenizer(publisher, trainer.get_tokenizer())
    except BaseException:
        RequestFuture(start_coroutine(publisher.aclose())).result()
        raise
    return VllmTrainingClient(trainer, publisher, has_adapter=has_adapter, warn=warn)


@contextmanager
def open_served_model(
    options: VllmOptions, tokenizer: Any, warn: Callable[[str], None] = lambda text: None
) -> Iterator[VllmSamplingClient]:
    """A sampler of the model that the servers of `options` were started with, whose weights need not be here.

    `tokenizer` is the model's. ValueError if a server has another, or the servers have different models.
    """
    publisher = connect_servers(options, 1, warn)
    try:
        check_tokenizer(publisher, tokenizer)
        served = {f"{server.base}@{server.base_version}": server.url for server in publisher.servers}
        if len(served) > 1:
            raise ValueError(f"sampler.urls serve different weights ({served}); give servers of one model")
        (fingerprint,) = served
        weights = PublishedWeights(fingerprint, None, False, [], {})
        RequestFuture(start_coroutine(publisher.publish(weights))).result()
        yield VllmSamplingClient(publisher, fingerprint, tokenizer, warn)
    finally:
        RequestFuture(start_coroutine(publisher.aclose())).result()


def draw_probe(publisher: VllmPublisher, tokenizer: Any) -> tuple[list[int], list[int]]:
    """A random prompt, and tokens to score, each as the next one after the prompt."""
    length = min(PROBE_TOKENS, *(server.max_model_len - 1 for server in publisher.servers))

    def draw(purpose: str, count: int) -> list[int]:
        return [rng.integer(len(tokenizer), rng.key(purpose), i) for i in range(count)]

    return draw("probe", length), draw("probe-next", PROBE_TOKENS)


def connect_servers(options: VllmOptions, keep: int, warn: Callable[[str], None] = lambda text: None) -> VllmPublisher:
    """Connect to the servers of `options`, which keep up to `keep` versions; `warn` reports later failures.

    ValueError for a server that cannot serve, SamplerError for one that does not answer within `wait_s`.
    """
    return RequestFuture(start_coroutine(_connect(options, keep, warn))).result()


async def _connect(options: VllmOptions, keep: int, warn: Callable[[str], None]) -> VllmPublisher:
    publisher = VllmPublisher([VllmServer(url, options) for url in options.urls], options, keep, warn)
    try:
        await publisher.check()
    except BaseException:
        await publisher.aclose()
        raise
    return publisher


def check_tokenizer(publisher: VllmPublisher, tokenizer: Any) -> None:
    """ValueError if a server's tokenizer decodes some tokens to another text than ours."""
    last = len(tokenizer) - 1
    tokens = sorted({*range(min(64, last + 1)), *(rng.integer(last + 1, rng.key("words"), i) for i in range(64)), last})
    ours = tokenizer.decode(tokens, skip_special_tokens=False)

    async def read() -> list[str]:
        bodies = [{"model": server.base, "tokens": tokens} for server in publisher.servers]
        calls = [s.call("POST", "/detokenize", body) for s, body in zip(publisher.servers, bodies, strict=True)]
        return [answer["prompt"] for answer in await asyncio.gather(*calls)]

    for server, theirs in zip(publisher.servers, RequestFuture(start_coroutine(read())).result(), strict=True):
        if theirs != ours:
            raise ValueError(
                f"{server.url} has another tokenizer: {len(tokens)} tokens decode to {theirs[:60]!r} there and "
                f"{ours[:60]!r} here; start it with the model that is trained here"
            )
