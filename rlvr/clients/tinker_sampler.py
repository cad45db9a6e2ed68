"""Sampling and scoring at a server of the Tinker protocol."""

from __future__ import annotations

from typing import Any

from rlvr.clients.client_options import AtServer
from rlvr.clients.tinker_sdk import (
    RemoteFuture,
    check_logprobs,
    end_session,
    import_sdk,
    to_input,
    translate_errors,
    wait_for,
)
from rlvr.core.futures import Future
from rlvr.core.messages import ModelInput, SampledSequence, SampleResponse, SamplingParams
from rlvr.core.types import StopReason

TIMEOUT = AtServer.answer_timeout_s


class TinkerSamplingClient:
    """Samples from weights on a server. `fingerprint` says which, as far as this process knows."""

    def __init__(self, client: Any, fingerprint: str, tokenizer: Any = None, timeout_s: float = TIMEOUT) -> None:
        self._client, self.fingerprint, self._tokenizer, self._timeout_s = client, fingerprint, tokenizer, timeout_s

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
    ) -> Future[SampleResponse]:
        types, asked = import_sdk().types, sampling_params
        if asked.min_p:
            raise ValueError(f"sample: min_p={asked.min_p} is not supported by the Tinker protocol; use top_p or top_k")
        params = types.SamplingParams(
            max_tokens=asked.max_tokens,
            seed=asked.seed,
            stop=asked.stop,
            temperature=asked.temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
        )
        future = self._client.sample(to_input(prompt), num_samples, params, include_prompt_logprobs)
        scored = prompt.length if include_prompt_logprobs else None
        return RemoteFuture(future, lambda response: self._response(response, scored), self._timeout_s)

    def _response(self, response: Any, scored: int | None) -> SampleResponse:
        """`scored`: how many log-probs of the prompt were asked for."""
        sequences = [
            SampledSequence(
                StopReason(s.stop_reason), s.tokens, check_logprobs(s.logprobs, len(s.tokens), "completion")
            )
            for s in response.sequences
        ]
        known = None if scored is None else self._prompt_logprobs(response.prompt_logprobs, scored)
        return SampleResponse(sequences, known, self.fingerprint)

    def compute_logprobs(self, prompt: ModelInput, temperature: float = 1.0) -> Future[list[float | None]]:
        if temperature != 1.0:
            raise ValueError(
                f"compute_logprobs: a Tinker server scores at temperature 1, not {temperature:g}; sample at "
                "rollout.temperature=1, or leave out what compares with a reference (algorithm.kl_coef)"
            )
        length = prompt.length
        future = self._client.compute_logprobs(to_input(prompt))
        return RemoteFuture(future, lambda known: self._prompt_logprobs(known, length), self._timeout_s)

    def _prompt_logprobs(self, known: Any, length: int) -> list[float | None]:
        return check_logprobs(known, length, "prompt")

    def get_tokenizer(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer = self._client.get_tokenizer()
        return self._tokenizer


class TinkerSamplers:
    """Samplers of saved weights, in one session at a server and without a training run.

    `base_url` and `api_key` None: where the SDK itself looks.
    """

    def __init__(self, base_url: str | None = None, api_key: str | None = None, timeout_s: float = TIMEOUT) -> None:
        tinker, self._timeout_s = import_sdk(), timeout_s
        try:
            self._service = tinker.ServiceClient(base_url=base_url, api_key=api_key)
        except tinker.TinkerError as error:
            raise ValueError(f"client=tinker: {error}") from error

    def open(self, path: str) -> TinkerSamplingClient:
        """A sampler of what `save_weights_for_sampler` returned as `path`."""
        with translate_errors():
            client = wait_for(lambda: self._service.create_sampling_client(model_path=path), self._timeout_s)
        return TinkerSamplingClient(client, path, timeout_s=self._timeout_s)

    def close(self) -> None:
        """End the session at the server."""
        end_session(self._service)
