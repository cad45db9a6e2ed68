"""A trainer whose completions come from stand-ins of vLLM servers (`tests/kit/vllm_server.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rlvr.clients.local import LocalTrainingClient
from rlvr.clients.vllm import VllmOptions
from rlvr.clients.vllm.vllm_clients import sample_from_vllm
from rlvr.core.messages import ModelInput, SamplingParams
from rlvr.engine.engine import Engine
from rlvr.engine.engine_options import LoraConfig
from rlvr.engine.model_loading import build_model
from rlvr.engine.tokenizer import build_tokenizer
from tests.kit.tiny import END, LLAMA_LIKE, PAD, WORDS
from tests.kit.vllm_server import FakeVllm

MODEL = {"model_type": "qwen3", **LLAMA_LIKE, "head_dim": 16, "tie_word_embeddings": False, "initializer_range": 0.2}
PROMPT = [1, 10, 2, 13]


def make_engine(seed: int = 0, words: list[str] = WORDS) -> Engine:
    tokenizer = build_tokenizer("words", words, end=END, pad=PAD)
    return Engine(build_model(MODEL, tokenizer, seed=seed, device="cpu", dtype="float32"))


class Run:
    """The trainer, the fake servers, and the client over both."""

    def __init__(self, folder: Path, fakes: list[FakeVllm], urls: list[str], rank: int | None = 4, **options: Any):
        self.engine = make_engine()
        lora = LoraConfig(rank) if rank else None
        self.policy = self.engine.create_policy("policy", lora=lora, seed=1)
        self.trainer = LocalTrainingClient(self.engine, self.policy, folder)
        self.fakes, self.folder = fakes, folder
        settings = {"wait_s": 0.2, "timeout_s": 5.0, **options}
        self.client = sample_from_vllm(
            self.trainer, VllmOptions(urls, **settings), has_adapter=rank is not None, keep=2
        )

    def step(self, seed: int = 0, size: float = 0.2) -> None:
        """Change the weights, by default by much more than an optimizer step does."""
        self.policy.preserve_snapshots()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in self.policy.parameters.values():
                p.add_(size * torch.randn(p.shape, generator=generator))
        self.policy.version += 1
        self.policy.note_change()

    def sample(self, **more: Any) -> Any:
        sampler = self.client.save_weights_and_get_sampling_client()
        params = SamplingParams(**{"max_tokens": 8, "seed": 3, **more})
        return sampler.sample(ModelInput(PROMPT), 3, params).result()
