"""Answers of Tinker servers that are not ours are refused where a number would be wrong, and older SDKs are read."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("tinker")

from rlvr.clients.tinker import TinkerSamplingClient
from rlvr.clients.tinker_sdk import RemoteFuture, from_output, wait_for
from rlvr.core.messages import ModelInput, SamplingParams


def finished(answer: Any) -> Future[Any]:
    """The future of `concurrent.futures` that the sampling clients of the SDK 0.25 return."""
    future: Future[Any] = Future()
    future.set_result(answer)
    return future


def sampler(logprobs: Any, prompt: Any) -> TinkerSamplingClient:
    answered = SimpleNamespace(
        sequences=[SimpleNamespace(stop_reason="length", tokens=[5, 6], logprobs=logprobs)], prompt_logprobs=prompt
    )
    client = SimpleNamespace(sample=lambda *a: finished(answered), compute_logprobs=lambda *a: finished(prompt))
    return TinkerSamplingClient(client, "weights")


PARAMS = SamplingParams(max_tokens=2)


def test_whole_answers_are_read():
    read = sampler([-1.0, -2.0], [None, -0.5, -0.25])
    response = read.sample(ModelInput([1, 2, 3]), 1, PARAMS, True).result()
    assert response.sequences[0].logprobs == [-1.0, -2.0] and response.prompt_logprobs == [None, -0.5, -0.25]
    assert read.compute_logprobs(ModelInput([1, 2, 3])).result() == [None, -0.5, -0.25]


@pytest.mark.parametrize("logprobs", [None, [-1.0], [-1.0, None], [-1.0, float("nan")]])
def test_missing_logprobs_of_a_completion_are_an_error(logprobs: Any):
    with pytest.raises(RuntimeError, match=r"of 2 log-probs of a completion"):
        sampler(logprobs, None).sample(ModelInput([1, 2, 3]), 1, PARAMS).result()


@pytest.mark.parametrize("prompt", [None, [None, None, -1.0], [-0.5, -0.25], [None, -0.5, float("-inf")]])
def test_missing_logprobs_of_a_prompt_are_an_error(prompt: Any):
    """None, a hole, and one value fewer than tokens, which would shift every token's log-prob by one."""
    read = sampler([-1.0, -2.0], prompt)
    with pytest.raises(RuntimeError, match=r"of 3 log-probs of a prompt.*algorithm\.kl_coef"):
        read.compute_logprobs(ModelInput([1, 2, 3])).result()
    with pytest.raises(RuntimeError, match=r"of 3 log-probs of a prompt"):
        read.sample(ModelInput([1, 2, 3]), 1, PARAMS, True).result()


def test_a_server_without_the_sum_of_its_loss_is_refused():
    output = SimpleNamespace(loss_fn_outputs=[], metrics={}, loss_fn_output_type="scalar")
    with pytest.raises(ValueError, match=r"no metric loss:sum.*other-servers"):
        from_output(output)


def test_clients_and_futures_of_older_sdks_are_read():
    assert wait_for(lambda: "client", 60) == "client" and wait_for(lambda: finished("client"), 60) == "client"

    async def read() -> int:
        return await RemoteFuture(finished([1, 2]), len, 60)

    assert asyncio.run(read()) == 2
