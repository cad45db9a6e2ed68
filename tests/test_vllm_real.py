"""The client of vLLM against vLLM itself: `make test-vllm` sets RLVR_VLLM to the python of that environment."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import END, LLAMA_LIKE, PAD, WORDS

from rlvr.clients.local import LocalTrainingClient
from rlvr.clients.vllm import SamplerOptions
from rlvr.clients.vllm.vllm_clients import sample_from_vllm
from rlvr.core.messages import ModelInput, SamplingParams
from rlvr.engine.engine import Engine
from rlvr.engine.engine_options import LoraConfig
from rlvr.engine.model_loading import build_model, load_model
from rlvr.engine.tokenizer import build_tokenizer, load_tokenizer

PYTHON = os.environ.get("RLVR_VLLM", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="RLVR_VLLM names no python with vLLM: make test-vllm installs one (3.4 GB)"),
]
MODEL = {**LLAMA_LIKE, "model_type": "qwen3", "hidden_size": 64, "head_dim": 32, "tie_word_embeddings": False}
PROMPT = [1, 10, 2, 13]
START_SECONDS = 300


@contextmanager
def start_vllm(model: Path, log: Path, *flags: str, mode: str = "processed_logprobs") -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "--model": str(model), "--served-model-name": "base", "--host": "127.0.0.1", "--port": str(port),
        "--dtype": "float32", "--max-model-len": "128", "--logprobs-mode": mode,
    }  # fmt: skip
    words = [word for option in options.items() for word in option]
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", *words, "--enforce-eager", "--enable-scale-out"]
    with open(log, "w") as out:
        process = subprocess.Popen(
            [*command, *flags], env=environment | settings, stdout=out, stderr=subprocess.STDOUT, cwd=log.parent
        )
    try:
        until = time.monotonic() + START_SECONDS
        while True:
            assert process.poll() is None and time.monotonic() < until, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                break
            except OSError:
                time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer("words", WORDS, end=END, pad=PAD)
    build_model(MODEL, tokenizer, seed=0, device="cpu", dtype="float32").module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("rank", [8, None], ids=["adapter", "all weights"])
def test_completions_and_logprobs_are_those_of_the_trainer_s_weights_after_every_step(
    tmp_path: Path, model: Path, rank: int | None
) -> None:
    flags = ("--enable-lora", "--max-lora-rank", "16", "--max-loras", "3") if rank else ()
    with start_vllm(model, tmp_path / "log", *flags) as url:
        engine = Engine(load_model(str(model), load_tokenizer(str(model)), device="cpu", dtype="float32"))
        policy = engine.create_policy("policy", lora=LoraConfig(rank) if rank else None, seed=1)
        trainer = LocalTrainingClient(engine, policy, tmp_path / "checkpoints")
        options = SamplerOptions("vllm", [url])
        client = sample_from_vllm(trainer, options, has_adapter=rank is not None, keep=2)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            with torch.no_grad():
                for p in policy.parameters.values():
                    p.add_(0.1 * torch.randn(p.shape, generator=generator))
            policy.version += 1
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


def test_raw_logprobs_are_refused_at_the_start(tmp_path: Path, model: Path) -> None:
    with start_vllm(model, tmp_path / "log", mode="raw_logprobs") as url:
        engine = Engine(load_model(str(model), load_tokenizer(str(model)), device="cpu", dtype="float32"))
        trainer = LocalTrainingClient(engine, engine.create_policy("policy"), tmp_path)
        with pytest.raises(ValueError, match="processed_logprobs"):
            sample_from_vllm(trainer, SamplerOptions("vllm", [url]), has_adapter=False, keep=2)
