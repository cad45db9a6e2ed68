"""One vLLM server: its HTTP calls, each with a deadline, and the reading of its completions.

Written against the HTTP of vLLM 0.32. Tokens go in and out at /inference/v1/generate, which the server has with
`--enable-scale-out`. Runs on one event loop. Left out on purpose: /v1/completions, whose answer does not say which
weights sampled.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlvr.clients.vllm.vllm_options import SamplerError, VllmOptions
from rlvr.core.messages import SampledSequence
from rlvr.core.types import StopReason

GENERATE = "/inference/v1/generate"
CONNECT_SECONDS = 5.0
MISSING = -9999.0  # what vLLM writes for a log-prob that it does not have
MODE_FLAG = "--logprobs-mode processed_logprobs"
WHOLE_PROMPTS = "--no-enable-chunked-prefill"  # vLLM 0.32 for CPUs crashes when it splits a prompt with a seed
PLAIN = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}  # whatever the server's own defaults are


class ServerDownError(SamplerError):
    """The server cannot be reached, did not answer in time or failed; another server may answer."""


class NoServerError(SamplerError):
    """No server answered within `wait_s`. The same request may be answered later."""


class ServerRefusedError(SamplerError):
    """The server answered with a client error, whose HTTP code is `status`."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class VllmServer:
    """The server at `url`. Opens its connections at the first call; `aclose` drops them.

    `loaded` are the fingerprints that this process gave it and believes to be there, after `loads` loads; `base` is the
    name of the model that it was started with, `base_version` the version of its weights at that moment.
    """

    def __init__(self, url: str, options: VllmOptions) -> None:
        import httpx2  # the extra `vllm`

        self.url, self.options, self._http = url.rstrip("/"), options, httpx2
        self.base, self.base_version, self.max_model_len = "", "", 0
        self.loaded, self.loads = set[str](), 0
        self.publishing = asyncio.Lock()
        self._gate = asyncio.Semaphore(options.concurrency)
        limits = httpx2.Limits(max_connections=options.concurrency + 4)
        patience = httpx2.Timeout(None, connect=min(CONNECT_SECONDS, options.timeout_s))
        self._client = httpx2.AsyncClient(
            timeout=patience, limits=limits, follow_redirects=False, verify=url.startswith("https:"), trust_env=False
        )

    async def aclose(self) -> None:
        await self._client.aclose()

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON of the answer, or its text. ServerDownError or ServerRefusedError if there is none."""
        where = self.url + path.partition("?")[0]
        content = None if body is None else json.dumps(body).encode()
        try:
            async with asyncio.timeout(self.options.timeout_s):
                head = {"content-type": "application/json"}
                response = await self._client.request(method, self.url + path, content=content, headers=head)
        except TimeoutError as error:
            late = f"{where} did not answer within {self.options.timeout_s:g} s (sampler.timeout_s)"
            raise ServerDownError(late) from error
        except (self._http.HTTPError, self._http.InvalidURL, self._http.StreamError) as error:
            raise ServerDownError(
                f"{where} cannot be reached ({type(error).__name__}: {error}); start the server, or correct its address"
            ) from error
        if response.status_code != 200:
            message = f"{where} answered {response.status_code}: {response.text.strip()[:500]}"
            if "EngineCore" in response.text:
                message += f"; its engine died, see its log. On CPUs, start it with {WHOLE_PROMPTS}"
            if 400 <= response.status_code < 500 and response.status_code not in (408, 429):
                raise ServerRefusedError(message, response.status_code)
            raise ServerDownError(message)
        try:
            return response.json()
        except ValueError:
            return response.text

    async def generate(self, model: str, tokens: Sequence[int], params: Mapping[str, Any], salt: str) -> dict[str, Any]:
        """Send one request to sample. `salt` separates prefix caches: give each version of the weights its own."""
        body = {"model": model, "token_ids": list(tokens), "sampling_params": {**PLAIN, **params}, "cache_salt": salt}
        async with self._gate:
            answer = await self.call("POST", GENERATE, body)
        if not isinstance(answer, dict) or not isinstance(answer.get("choices"), list):
            raise SamplerError(
                f"{self.url}{GENERATE} answered without `choices` ({str(answer)[:200]}); is it a vLLM server?"
            )
        return answer

    async def check(self) -> None:
        """Learn the server's model and its limits; ValueError for a server that cannot sample for training.

        SamplerError if it cannot be reached.
        """
        listed = await self.call("GET", "/v1/models")
        bases = [m for m in listed["data"] if m.get("parent") is None] if isinstance(listed, dict) else []
        if not bases or not isinstance(bases[0].get("max_model_len"), int):
            raise ValueError(f"{self.url}/v1/models lists no model with a max_model_len; is it a vLLM server?")
        self.base, self.max_model_len = str(bases[0]["id"]), bases[0]["max_model_len"]
        await self._check_generate()
        await self._check_logprob_mode()

    async def _check_generate(self) -> None:
        try:
            answer = await self.generate(self.base, [0], {"max_tokens": 1}, "check")
        except ServerRefusedError as error:
            if error.status in (404, 405):
                raise ValueError(
                    f"{self.url} has no {GENERATE}; start vLLM 0.32 or newer with --enable-scale-out"
                ) from error
            raise
        versions = read_versions(answer)
        if not versions:
            raise ValueError(
                f"{self.url} does not say which weights sampled (weight_versions): it may serve old ones unseen; use "
                "vLLM 0.32 or newer"
            )
        self.base_version = versions[0]

    async def _check_logprob_mode(self) -> None:
        """Compare the likeliest token's log-prob at two temperatures: raw ones ignore the temperature."""
        tables: list[dict[int, float]] = []
        for temperature in (1.0, 0.5):
            params = {"max_tokens": 1, "temperature": temperature, "logprobs": 5, "seed": 1, "ignore_eos": True}
            answer = await self.generate(self.base, [0], params, "check")
            entry = answer["choices"][0]["logprobs"]["content"][0]
            tables.append({top["token_id"]: float(top["logprob"]) for top in entry["top_logprobs"]})
        warm, cold = tables
        both = warm.keys() & cold.keys()
        if both and all(abs(warm[token] - cold[token]) < 1e-6 for token in both) and min(warm.values()) < -1e-3:
            raise ValueError(
                f"{self.url} gives raw log-probs, which ignore the temperature; training needs those of the "
                f"distribution that was sampled: start the server with {MODE_FLAG}"
            )

    async def score_next(self, model: str, prompt: Sequence[int], tokens: Sequence[int], salt: str) -> dict[int, float]:
        """The log-probs of `tokens`, each as the next after the prompt, at temperature 1.

        One may be missing, since vLLM makes room for the token that it samples. This does not use prompt log-probs:
        vLLM 0.32 for CPUs crashes on them while it samples from an adapter.
        """
        params = {"max_tokens": 1, "temperature": 1.0, "logprobs": len(tokens), "logprob_token_ids": list(tokens)}
        answer = await self.generate(model, prompt, params, salt)
        entries = (answer["choices"][0].get("logprobs") or {}).get("content") or [{}]
        scored = {top["token_id"]: _check_logprob(top.get("logprob")) for top in entries[0].get("top_logprobs", ())}
        found = {token: scored[token] for token in tokens if token in scored}
        if len(found) < len(tokens) - 1:
            raise SamplerError(
                f"{self.url} sent log-probs of {len(found)} tokens, {len(tokens)} were expected; use vLLM 0.32 or "
                f"newer, and leave --max-logprobs at {len(tokens)} or more"
            )
        return found


def read_versions(answer: Mapping[str, Any]) -> list[str]:
    """The versions of the weights that the completions were sampled by, each once."""
    spans = [span for choice in answer["choices"] for span in choice.get("weight_versions") or []]
    return list(dict.fromkeys(str(span["version"]) for span in spans))


def read_prompt_logprobs(answer: Mapping[str, Any], tokens: Sequence[int]) -> list[float]:
    """The log-prob of every token of a prompt but the first; SamplerError if one is missing."""
    rows = answer.get("prompt_logprobs")
    if not isinstance(rows, list) or len(rows) != len(tokens):
        raise SamplerError("vLLM sent no prompt log-probs; are they turned off at the server (--max-logprobs)?")
    pairs = zip(rows[1:], tokens[1:], strict=True)
    return [_check_logprob((row or {}).get(str(token), {}).get("logprob")) for row, token in pairs]


def read_completion(choice: Mapping[str, Any]) -> SampledSequence:
    """One completion; its stop token is among the tokens. SamplerError for a log-prob that is missing."""
    tokens = [int(token) for token in choice.get("token_ids") or []]
    entries = (choice.get("logprobs") or {}).get("content") or []
    if not tokens or len(entries) != len(tokens):
        raise SamplerError(f"vLLM sent {len(tokens)} tokens with {len(entries)} log-probs; start it with {MODE_FLAG}")
    reason = choice.get("finish_reason")
    if reason not in ("stop", "length"):
        raise ServerDownError(f"vLLM ended a completion early (finish_reason {reason!r})")
    is_token = reason == "stop" and not isinstance(choice.get("stop_reason"), str)
    logprobs = [_check_logprob(entry.get("logprob")) for entry in entries]
    return SampledSequence(StopReason(reason), tokens, logprobs, end_tokens=int(is_token))


def _check_logprob(value: Any) -> float:
    if not isinstance(value, (int, float)) or not math.isfinite(value) or value <= MISSING or value > 1e-3:
        raise SamplerError(
            f"vLLM sent {value!r} as a log-prob, expected a number of at most 0; start it with {MODE_FLAG}"
        )
    return float(value)
