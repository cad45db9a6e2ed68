"""The local clients keep the protocols, and a sampler is bound to the weights of its moment."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlvr.core.messages import AdamParams, ModelInput
from rlvr.core.protocols import SamplingClient, TrainingClient
from rlvr.engine.engine_options import LoraConfig
from tests.kit.devices import ON_DEVICES, WITH_A_GPU
from tests.kit.tiny import data, params, texts

LORA = LoraConfig(rank=4, alpha=8.0)
PROMPT = ModelInput([1, 2, 3, 4])


def step(trainer: Any, seed: int = 0, rate: float = 5e-2) -> None:
    trainer.forward_backward(data(seed=seed), "cross_entropy")
    trainer.optim_step(AdamParams(rate))


def logprobs(sampler: Any) -> list[float]:
    return sampler.compute_logprobs(PROMPT).result()[1:]


def test_the_clients_implement_the_protocols(client: Callable[..., Any]) -> None:
    """Every method is there; the tokenizer is the model's."""
    trainer = client("qwen3")
    assert isinstance(trainer, TrainingClient)
    sampler = trainer.save_weights_and_get_sampling_client()
    assert isinstance(sampler, SamplingClient)
    assert sampler.get_tokenizer() is trainer.get_tokenizer()


@ON_DEVICES
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_a_sampler_keeps_the_weights_of_its_moment(lora: Any, client: Callable[..., Any]) -> None:
    """Made before a step, it gives the old answers after two more and after loading; a new one gives new ones."""
    trainer = client("qwen3", lora=lora)
    path = trainer.save_state("start").result().path
    step(trainer)
    old = trainer.create_sampling_client()
    twin = trainer.create_sampling_client()
    before = logprobs(old), texts(old.sample(PROMPT, 2, params()).result())
    step(trainer, 1)
    step(trainer, 2)
    new = trainer.create_sampling_client()
    for sampler in (old, twin):
        assert (logprobs(sampler), texts(sampler.sample(PROMPT, 2, params()).result())) == before
    after = logprobs(new)
    assert max(abs(a - b) for a, b in zip(after, before[0], strict=True)) > 0.01
    trainer.load_state(path).result()
    assert logprobs(new) == after
    assert logprobs(old) == before[0]
    assert len({old.fingerprint, new.fingerprint, trainer.create_sampling_client().fingerprint}) == 3
    assert old.fingerprint == twin.fingerprint
    assert old.sample(PROMPT, 1, params()).result().fingerprint == old.fingerprint


@ON_DEVICES
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_an_answer_under_way_is_finished_with_its_own_weights(lora: Any, client: Callable[..., Any]) -> None:
    """A step between submitting (or half computing) a request and reading it changes nothing in it."""
    expected = None
    for half_way in (False, True):
        trainer = client("qwen3", lora=lora, name=f"{half_way}")
        sampler = trainer.create_sampling_client()
        expected = expected or texts(sampler.sample(PROMPT, 2, params()).result())
        future = sampler.sample(PROMPT, 2, params())
        if half_way:
            for _ in range(4):
                trainer._engine.advance()
        step(trainer)
        newer = trainer.create_sampling_client().sample(PROMPT, 2, params())
        assert texts(newer.result()) != expected  # the new weights' rows do not join the old ones' batch
        assert texts(future.result()) == expected


def test_no_copy_is_made_when_no_sampler_is_alive(client: Callable[..., Any]) -> None:
    """A loop that drops its sampler before the step pays nothing; two samplers of one moment share one copy."""
    trainer = client("qwen3")
    sampler = trainer.create_sampling_client()
    sampler.sample(PROMPT, 1, params()).result()
    parameter = next(iter(trainer.policy.parameters.values()))
    assert next(iter(sampler._snapshot.tensors.values())) is parameter
    del sampler
    gc.collect()
    clones: list[int] = []
    real = torch.Tensor.clone

    def counting(self: torch.Tensor, **how: Any) -> torch.Tensor:
        clones.append(1)
        return real(self, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", counting)
        trainer.forward_backward(data(), "cross_entropy")
        clones.clear()
        trainer.optim_step(AdamParams(1e-3))
        assert not clones
        one, other = trainer.create_sampling_client(), trainer.create_sampling_client()
        trainer.forward_backward(data(), "cross_entropy")
        clones.clear()
        trainer.optim_step(AdamParams(1e-3))
        assert len(clones) == len(trainer.policy.parameters)
    assert one._snapshot.copy is other._snapshot.copy is not None


def test_old_weights_leave_with_their_sampler(client: Callable[..., Any]) -> None:
    """Sampling with a copy puts the live weights back, also after an error, and training goes on with them."""
    trainer = client("qwen3")
    old = trainer.create_sampling_client()
    step(trainer)
    live = trainer.policy.sha256()
    logprobs(old)
    old.sample(PROMPT, 2, params()).result()
    assert trainer.policy.sha256() == live
    hook = trainer._engine.model.module.base_model.register_forward_pre_hook(lambda *_: 1 / 0)
    for ask in (lambda: old.sample(PROMPT, 2, params()).result(), lambda: logprobs(old)):
        with pytest.raises(ZeroDivisionError):
            ask()
        assert trainer.policy.sha256() == live
    hook.remove()
    step(trainer)


def test_a_fingerprint_names_the_weights_and_comes_back_with_them(client: Callable[..., Any]) -> None:
    """Every step gives a new one; restored weights have the one they were saved under, as in an unbroken run."""
    trainer = client("qwen3")
    seen = [trainer.policy.fingerprint]
    path = trainer.save_state("a").result().path
    for _ in range(2):
        step(trainer)
        seen.append(trainer.policy.fingerprint)
    assert len(set(seen)) == 3
    trainer.load_state_with_optimizer(path).result()
    assert trainer.policy.fingerprint == seen[0]
    step(trainer)
    assert trainer.policy.fingerprint == seen[1]
    trainer.forward(data(), "ppo")
    trainer.forward_backward(data(), "ppo")
    assert trainer.policy.fingerprint == seen[1]


def test_saving_for_a_sampler_by_name_writes_and_samples(client: Callable[..., Any]) -> None:
    """With a name the weights are on disk too; without optimizer state."""
    trainer = client("qwen3")
    sampler = trainer.save_weights_and_get_sampling_client("step-1")
    folder = trainer._folder / "step-1"
    assert (folder / "model.safetensors").exists()
    assert not (folder / "optimizer.safetensors").exists()
    assert len(logprobs(sampler)) == 3


def test_training_and_sampling_threads_do_not_mix_weights(client: Callable[..., Any]) -> None:
    """While one thread takes steps, samplers made by others give the same log-probs each time they are asked."""
    trainer = client("qwen3")
    stop, wrong = threading.Event(), []

    def sampling() -> None:
        while not stop.is_set():
            sampler = trainer.create_sampling_client()
            first = logprobs(sampler)
            sampler.sample(PROMPT, 2, params(tokens=3)).result()
            if logprobs(sampler) != first:
                wrong.append(sampler.fingerprint)

    threads = [threading.Thread(target=sampling) for _ in range(2)]
    for thread in threads:
        thread.start()
    for i in range(15):
        step(trainer, i)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert trainer.policy.version == 15


@WITH_A_GPU
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_a_sampler_of_saved_weights_is_unaffected_by_later_training(lora: Any, client: Callable[..., Any]) -> None:
    """Log-probs, answers, fingerprint and every tensor are those of the moment of saving; live training goes on."""
    trainer, twin = client("qwen3", lora=lora, name="a"), client("qwen3", lora=lora, name="b")
    for one in (trainer, twin):
        step(one)
    then = trainer.create_sampling_client()
    expected = logprobs(then), texts(then.sample(PROMPT, 2, params()).result()), then.fingerprint
    weights = {name: p.detach().clone() for name, p in trainer.policy.parameters.items()}
    path = trainer.save_weights_for_sampler("kept").result().path
    for one in (trainer, twin):
        step(one, 1)
    saved = trainer.create_sampling_client(path)
    assert (logprobs(saved), texts(saved.sample(PROMPT, 2, params()).result()), saved.fingerprint) == expected
    assert all(torch.equal(saved._snapshot.tensors[name], p) for name, p in weights.items())
    for one in (trainer, twin):
        step(one, 2)
    assert logprobs(saved) == expected[0]
    assert trainer.policy.sha256() == twin.policy.sha256(), "reading saved weights must not touch the live ones"
    assert max(abs(a - b) for a, b in zip(logprobs(trainer.create_sampling_client()), expected[0], strict=True)) > 0.01


@WITH_A_GPU
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_live_and_saved_weights_answer_side_by_side(lora: Any, client: Callable[..., Any]) -> None:
    """Requests to both, queued before one is read: each has its own weights' answers."""
    trainer = client("qwen3", lora=lora)
    path = trainer.save_weights_for_sampler("kept").result().path
    step(trainer)
    saved, live = trainer.create_sampling_client(path), trainer.create_sampling_client()
    expected = [logprobs(saved), logprobs(live), texts(saved.sample(PROMPT, 2, params()).result())]
    expected.append(texts(live.sample(PROMPT, 2, params()).result()))
    asked = [s.compute_logprobs(PROMPT) for s in (saved, live)]
    sampled = [s.sample(PROMPT, 2, params()) for s in (saved, live)]
    assert [f.result()[1:] for f in asked] + [texts(f.result()) for f in sampled] == expected
    assert expected[0] != expected[1]


def test_saved_weights_that_are_missing_damaged_or_anothers_are_refused(client: Callable[..., Any]) -> None:
    """Naming the folder; the policy stays as it is."""
    full, adapter = client("qwen3", name="full"), client("qwen3", name="adapter", lora=LORA)
    before = full.policy.sha256()
    with pytest.raises(ValueError, match="checkpoint nowhere is damaged"):
        full.create_sampling_client("nowhere")
    other = adapter.save_weights_for_sampler("a").result().path
    with pytest.raises(ValueError, match="checkpoint"):
        full.create_sampling_client(other)
    path = full.save_weights_for_sampler("a").result().path
    with open(f"{path}/policy.json", "a") as file:
        file.write(" ")
    with pytest.raises(ValueError, match="damaged"):
        full.create_sampling_client(path)
    assert full.policy.sha256() == before
