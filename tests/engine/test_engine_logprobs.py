"""Log-probs of given tokens: computed together, and the same as alone; each asker has its own answer or error."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from rlvr.core.messages import ModelInput
from tests.kit.rounding import close_logprobs
from tests.kit.tiny import PROMPTS, plain_logprobs


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_asked_for_together_are_those_asked_for_alone(
    kind: str, temperature: float, client: Callable[..., Any]
) -> None:
    """Prompts of 1 to 9 tokens, queued before one is read, in any order of reading: those of a plain pass."""
    trainer = client(kind)
    sampler = trainer.create_sampling_client()
    prompts = [*PROMPTS, [16]]
    queued = [sampler.compute_logprobs(ModelInput(p), temperature) for p in prompts]
    together = [future.result() for future in reversed(queued)][::-1]
    for prompt, found in zip(prompts, together, strict=True):
        assert found[0] is None and len(found) == len(prompt)
        assert found[1:] == close_logprobs(sampler.compute_logprobs(ModelInput(prompt), temperature).result()[1:])
        plain = plain_logprobs(trainer._engine.model.module, prompt[:1], prompt[1:], temperature)
        assert found[1:] == close_logprobs(plain)


def test_an_invalid_request_fails_for_its_own_caller(client: Callable[..., Any]) -> None:
    """A token that the model does not have fails one request; those queued beside it have their answers."""
    sampler = client("qwen3").create_sampling_client()
    good = sampler.compute_logprobs(ModelInput([1, 2, 3]))
    with pytest.raises(ValueError, match="token 99"):
        sampler.compute_logprobs(ModelInput([1, 99])).result()
    assert len(good.result()) == 3


def test_log_probs_that_were_interrupted_are_computed_when_asked_again(client: Callable[..., Any]) -> None:
    """Ctrl-C in the middle of the pass: no half answer, neither to who waited nor to those queued beside it."""
    trainer = client("qwen3")
    sampler = trainer.create_sampling_client()
    expected = sampler.compute_logprobs(ModelInput([1, 2, 3])).result()
    futures = [sampler.compute_logprobs(ModelInput([1, 2, 3])) for _ in range(2)]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = trainer._engine.model.module.base_model.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        futures[0].result()
    hook.remove()
    for future in futures:
        assert future.result()[1:] == close_logprobs(expected[1:])


def test_an_abandoned_result_keeps_no_weights_in_memory(client: Callable[..., Any]) -> None:
    """A question that was dropped unread, and its sampler with it: the next step copies nothing."""
    trainer = client("qwen3")
    sampler = trainer.create_sampling_client()
    sampler.compute_logprobs(ModelInput([1, 2, 3]))
    kept = weakref.ref(sampler._snapshot)
    del sampler
    gc.collect()
    assert kept() is None
