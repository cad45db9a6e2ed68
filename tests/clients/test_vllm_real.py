"""The client of vLLM against vLLM itself: `make test-vllm` sets RLVR_VLLM to the python of that environment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.vllm_process import ADAPTERS, MISSING, PYTHON, RAW, VllmProcess
from rlvr.cli.doctor_vllm import check_vllm
from rlvr.clients.local import LocalTrainingClient
from rlvr.clients.vllm import VllmOptions
from rlvr.clients.vllm.vllm_clients import sample_from_vllm
from rlvr.clients.vllm.vllm_options import SamplerError
from rlvr.core.futures import LazyFuture
from rlvr.core.messages import ModelInput, SamplingParams, SaveWeightsResponse
from rlvr.core.protocols import TrainingClient
from rlvr.engine.engine import Engine
from rlvr.engine.engine_options import LoraConfig
from rlvr.engine.model_loading import build_model, load_model
from rlvr.engine.policy import Policy
from rlvr.engine.tokenizer import build_tokenizer, load_tokenizer
from tests.kit.tiny import END, LLAMA_LIKE, PAD, WORDS

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason=MISSING)]
MODEL = {**LLAMA_LIKE, "model_type": "qwen3", "hidden_size": 64, "head_dim": 32, "tie_word_embeddings": False}
PROMPT = [1, 10, 2, 13]
RANKS = pytest.mark.parametrize("rank", [8, None], ids=["adapter", "all weights"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer("words", WORDS, end=END, pad=PAD)
    build_model(MODEL, tokenizer, seed=0, device="cpu", dtype="float32").module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int | None, VllmProcess]]:
    """One for adapters, one for all weights."""
    log = tmp_path_factory.mktemp("logs")
    with VllmProcess(model, log / "adapter", *ADAPTERS) as adapter, VllmProcess(model, log / "all") as weights:
        yield {8: adapter, None: weights}


class StaleTrainer:
    """Publishes the files of its first version under every new name, as a file system that is behind would."""

    def __init__(self, trainer: TrainingClient) -> None:
        self._trainer, self._first = trainer, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def save_weights_for_sampler(self, name: str) -> Any:
        future = self._trainer.save_weights_for_sampler(name)
        self._first = self._first or future.result().path
        return LazyFuture(lambda: SaveWeightsResponse(self._first))


def build_trainer(model: Path, folder: Path, rank: int | None) -> tuple[LocalTrainingClient, Policy]:
    engine = Engine(load_model(str(model), load_tokenizer(str(model)), device="cpu", dtype="float32"))
    policy = engine.create_policy("policy", lora=LoraConfig(rank) if rank else None, seed=1)
    return LocalTrainingClient(engine, policy, folder), policy


def take_step(policy: Policy, seed: int, size: float = 0.1) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.parameters.values():
            p.add_(size * torch.randn(p.shape, generator=generator))
    policy.version += 1


@RANKS
def test_completions_and_logprobs_are_those_of_the_trainer_s_weights_after_every_step(
    tmp_path: Path, model: Path, servers: dict[int | None, VllmProcess], rank: int | None
) -> None:
    trainer, policy = build_trainer(model, tmp_path, rank)
    client = sample_from_vllm(trainer, VllmOptions([servers[rank].url]), has_adapter=bool(rank), keep=2)
    for step in range(3):
        take_step(policy, step)
        sampler, own = client.save_weights_and_get_sampling_client(), trainer.create_sampling_client()
        for stop in (None, ["7"], [7]):
            asked = SamplingParams(max_tokens=20, seed=step, temperature=0.7, stop=stop)
            first, again = (sampler.sample(ModelInput(PROMPT), 4, asked, True).result() for _ in range(2))
            assert [s.tokens for s in first.sequences] == [s.tokens for s in again.sequences]
            assert len({tuple(s.tokens) for s in first.sequences}) > 1
            prompt = own.compute_logprobs(ModelInput(PROMPT)).result()
            np.testing.assert_allclose(first.prompt_logprobs[1:], prompt[1:], atol=1e-4)
            for s in first.sequences:
                expected = own.compute_logprobs(ModelInput(PROMPT + s.tokens), 0.7).result()[len(PROMPT) :]
                np.testing.assert_allclose(s.logprobs, np.asarray(expected, float), atol=1e-4)
    client.close()


@RANKS
def test_tokens_are_drawn_with_the_probabilities_of_the_trainer_at_the_temperature(
    tmp_path: Path, model: Path, servers: dict[int | None, VllmProcess], rank: int | None
) -> None:
    """Chi-square of 4,000 first tokens against the trainer's distribution: 17 tokens, below 39.3 in 999 of 1,000."""
    trainer, policy = build_trainer(model, tmp_path, rank)
    take_step(policy, 5)
    client = sample_from_vllm(trainer, VllmOptions([servers[rank].url]), has_adapter=bool(rank), keep=2)
    sampler, own = client.save_weights_and_get_sampling_client(), trainer.create_sampling_client()
    futures = [
        sampler.sample(ModelInput(PROMPT), 100, SamplingParams(max_tokens=1, seed=seed, temperature=0.7, stop=[]))
        for seed in range(40)
    ]
    tokens = [s.tokens[0] for future in futures for s in future.result().sequences]
    counts = np.bincount(tokens, minlength=len(trainer.get_tokenizer()))
    scored = [own.compute_logprobs(ModelInput([*PROMPT, t]), 0.7).result()[-1] for t in range(len(counts))]
    expected = len(tokens) * np.exp(np.asarray(scored, float))
    assert expected.sum() == pytest.approx(len(tokens), rel=1e-4) and expected.min() > 5
    assert (((counts - expected) ** 2) / expected).sum() < 39.3
    client.close()


@RANKS
@pytest.mark.parametrize("size", [0.1, 0.001])
def test_old_weights_under_a_new_name_are_an_error_with_both_fingerprints_before_the_first_completion(
    tmp_path: Path, model: Path, servers: dict[int | None, VllmProcess], rank: int | None, size: float
) -> None:
    trainer, policy = build_trainer(model, tmp_path, rank)
    take_step(policy, 6)
    stale: Any = StaleTrainer(trainer)
    client = sample_from_vllm(stale, VllmOptions([servers[rank].url]), has_adapter=bool(rank), keep=3)
    first = client.save_weights_and_get_sampling_client()
    assert first.sample(ModelInput(PROMPT), 1, SamplingParams(max_tokens=4, seed=1)).result().sequences
    take_step(policy, 7, size)
    with pytest.raises(
        SamplerError, match=rf"given the weights policy-2-\w+ and scores a probe as {first.fingerprint}"
    ):
        client.save_weights_and_get_sampling_client()
    client.close()


def test_another_process_that_loads_weights_is_found_at_the_next_completion(
    tmp_path: Path, model: Path, servers: dict[int | None, VllmProcess]
) -> None:
    options = VllmOptions([servers[None].url])
    clients: list[Any] = []
    for seed in (1, 2):
        trainer, policy = build_trainer(model, tmp_path / str(seed), None)
        take_step(policy, seed)
        clients.append(sample_from_vllm(trainer, options, has_adapter=False, keep=2))
    ours, theirs = [client.save_weights_and_get_sampling_client() for client in clients]
    with pytest.raises(SamplerError, match=rf"{theirs.fingerprint}.*{ours.fingerprint}"):
        ours.sample(ModelInput(PROMPT), 1, SamplingParams(max_tokens=4, seed=1)).result()
    for client in clients:
        client.close()


def test_a_publish_beside_completions_leaves_the_server_alive(
    tmp_path: Path, model: Path, servers: dict[int | None, VllmProcess]
) -> None:
    """vLLM 0.32 for CPUs dies of log-probs of a prompt beside completions of an adapter: the probe does without."""
    trainer, policy = build_trainer(model, tmp_path, 8)
    client = sample_from_vllm(trainer, VllmOptions([servers[8].url]), has_adapter=True, keep=2)
    policy.preserve_snapshots()
    old = client.save_weights_and_get_sampling_client()
    asked = SamplingParams(max_tokens=60, seed=1, stop=[])
    running = [old.sample(ModelInput([i]), 4, asked) for i in range(16)]
    take_step(policy, 8)
    new = client.save_weights_and_get_sampling_client()
    assert new.sample(ModelInput(PROMPT), 1, asked).result().fingerprint == new.fingerprint
    assert {future.result().fingerprint for future in running} == {old.fingerprint}
    client.close()


def test_more_tokens_of_prompts_than_a_step_takes_leave_the_server_alive(
    tmp_path: Path, model: Path, servers: dict[int | None, VllmProcess]
) -> None:
    """vLLM 0.32 for CPUs dies of a prompt with a seed that it splits: the servers here split none."""
    trainer, _ = build_trainer(model, tmp_path, 8)
    client = sample_from_vllm(trainer, VllmOptions([servers[8].url]), has_adapter=True, keep=2)
    sampler = client.save_weights_and_get_sampling_client()
    asked = SamplingParams(max_tokens=2, seed=1, stop=[])
    futures = [sampler.sample(ModelInput([i % 10] * 100), 4, asked) for i in range(32)]  # 12,800 tokens, 2,048 a step
    assert sum(len(future.result().sequences) for future in futures) == 128
    client.close()


def test_raw_logprobs_are_refused_at_the_start(tmp_path: Path, model: Path) -> None:
    with VllmProcess(model, tmp_path / "log", mode=RAW) as server:
        trainer, _ = build_trainer(model, tmp_path, None)
        with pytest.raises(ValueError, match="processed_logprobs"):
            sample_from_vllm(trainer, VllmOptions([server.url]), has_adapter=False, keep=2)
        assert [(check.state, check.name) for check in check_vllm(server.url)] == [("fails", "server")]
