"""Our servers and a whole run by vLLM itself: `make test-vllm` sets RLVR_VLLM to the python of that environment."""

from __future__ import annotations

import json
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.vllm_process import ADAPTERS, MISSING, PYTHON, VllmProcess
from rlvr.clients.local import LocalTrainingClient
from rlvr.clients.vllm import VllmOptions
from rlvr.clients.vllm.vllm_clients import sample_from_vllm
from rlvr.core.messages import AdamParams, Datum, ModelInput, SamplingParams
from rlvr.engine.engine import Engine
from rlvr.engine.engine_options import LoraConfig
from rlvr.engine.model_loading import build_model, load_model
from rlvr.engine.tokenizer import build_tokenizer, load_tokenizer
from tests.kit.rlvr_service import RlvrService
from tests.kit.tinker_model import tokenizer as bytes_tokenizer
from tests.kit.tinker_server import TinkerServer
from tests.kit.tiny import END, LLAMA_LIKE, PAD, WORDS
from tests.kit.tiny_run import attempt, stored_steps

tinker = pytest.importorskip("tinker", reason="the extra [tinker] is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason=MISSING),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # the SDK leaves connections to the collector
]
MODEL = {**LLAMA_LIKE, "model_type": "qwen3", "hidden_size": 64, "head_dim": 32, "tie_word_embeddings": False}
PROMPT = [1, 10, 2, 13]
ROUNDING = 5e-6  # nats, of a mean over the tokens of a tenant; docs/dev/log.md has 1.3e-06 as the largest
RUN = """
seed: 3
env: {name: rpn_arithmetic, kwargs: {p: 5, complexity: [1, 2], flaw: 0.3}}
model: {name: MODEL, device: cpu, lora: {rank: 8}}
sampler: {name: vllm, urls: [URLS], wait_s: 60}
rollout: {max_tokens: 6}
training: {steps: 12, prompts_per_step: 4, group_size: 4, control: random_reward}
evaluation: {tasks: 8, samples: 2}
engine: {threads: 1}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer("words", WORDS, end=END, pad=PAD)
    build_model(MODEL, tokenizer, seed=0, device="cpu", dtype="float32").module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def vllm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmProcess]:
    with VllmProcess(model, tmp_path_factory.mktemp("log") / "log", *ADAPTERS) as server:
        yield server


def list_adapters(server: VllmProcess) -> list[str]:
    with urllib.request.urlopen(f"{server.url}/v1/models", timeout=60) as answer:
        return [m["id"] for m in json.load(answer)["data"] if m["parent"] is not None]


@pytest.mark.parametrize("ranks", [0, 2], ids=["one process", "2 ranks"])
def test_two_tenants_of_the_tinker_sdk_are_sampled_by_vllm_with_the_trainers_logprobs(
    tmp_path: Path, model: Path, vllm: VllmProcess, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """Both train at once and save three times: six adapters, of which vLLM takes four into one batch (`--max-loras`).

    With ranks the server is `rlvr serve engine --trainers 2 --samplers URL`, and they compute what `forward` returns.
    """
    keys = ("tml-alice-0001", "tml-robert-0002")
    options = ("--samplers", vllm.url, "--samplers-folder", str(tmp_path / "shared"), "limits.max_rank=16")
    samplers, before = list[Any](), list[list[list[int]]]()

    def start(sampler: Any) -> Any:
        asked = tinker.SamplingParams(max_tokens=12, seed=5)
        return sampler.sample(tinker.ModelInput.from_ints(PROMPT), num_samples=8, sampling_params=asked)

    if ranks:
        options += ("--trainers", str(ranks))
        monkeypatch.setattr("tests.kit.tinker_server.PATIENCE", 300.0)
    with TinkerServer({"tiny": model}, tmp_path / "state", *options, keys=",".join(keys)) as server:
        assert f"vLLM samples at {vllm.url}" in server.said
        assert (f"trained by {ranks} processes" in server.said) is bool(ranks)
        services = [tinker.ServiceClient(base_url=server.url, api_key=key) for key in keys]
        trainers = [
            service.create_lora_training_client(base_model="tiny", rank=8, seed=tenant).result()
            for tenant, service in enumerate(services)
        ]
        for step in range(3):
            trained: list[Any] = []
            for tenant, trainer in enumerate(trainers):
                trainer.forward_backward([to_datum([1 + tenant, 2, 3], 1.0)], "cross_entropy")
                trained.append(trainer.optim_step(tinker.AdamParams(learning_rate=2e-2)))
            for future in trained:
                future.result()
            for tenant, (service, trainer) in enumerate(zip(services, trainers, strict=True)):
                path = trainer.save_weights_for_sampler(name=f"step{step}").result().path
                samplers.append(service.create_sampling_client(model_path=path).result())
                sequences = start(samplers[-1]).result().sequences
                before.append([list(s.tokens) for s in sequences])
                data = [to_datum(tokens, 0.0) for tokens in before[-1]]
                rows = trainer.forward(data, "cross_entropy").result().loss_fn_outputs
                ours = np.concatenate([row["logprobs"].to_numpy()[len(PROMPT) - 1 :] for row in rows])
                gaps = np.abs(ours - np.concatenate([s.logprobs for s in sequences]))
                print(
                    f"{keys[tenant]}: {len(gaps)} tokens, difference {gaps.mean():.2e}, at most {gaps.max():.2e} nats"
                )
                assert gaps.mean() < ROUNDING and gaps.max() < 1e-4
        scored = samplers[-1].compute_logprobs(tinker.ModelInput.from_ints(PROMPT)).result()
        assert len(scored) == len(PROMPT)  # by the engine: vLLM for CPUs would die of it
        assert len(list_adapters(vllm)) == 6
        together = [start(sampler) for sampler in samplers]
        assert [[list(s.tokens) for s in future.result().sequences] for future in together] == before
        assert len({str(texts) for texts in before}) == 6
        for service in services:
            service.close("success").result()
    assert list_adapters(vllm) == [] and not list((tmp_path / "shared").glob("published-*"))


def to_datum(tokens: list[int], weight: float) -> Any:
    row = Datum.from_completion(PROMPT, tokens, weight)
    inputs = {name: tinker.TensorData.from_numpy(value.to_numpy()) for name, value in row.loss_fn_inputs.items()}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(row.model_input.to_ints()), loss_fn_inputs=inputs)


def test_a_session_of_the_service_is_answered_by_vllm_and_verified(tmp_path: Path) -> None:
    """The model answers 7 to everything, so that the first answer of the first session is right."""
    words = bytes_tokenizer()
    config = {**MODEL, "vocab_size": len(words), "max_position_embeddings": 4096}
    engine = Engine(build_model(config, words, seed=0, device="cpu", dtype="float32"))
    policy = engine.create_policy("weights")
    answer = words.encode("7<|im_end|>")
    chats = [[{"role": "user", "content": f"What is {n} + {n + 1}?"}] for n in range(16)]
    prompts = [words.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    rows = [Datum.from_completion(prompt, answer) for prompt in prompts]
    for _ in range(40):
        engine.forward_backward(policy, rows, "cross_entropy", {})
        engine.optim_step(policy, AdamParams(learning_rate=3e-3, grad_clip_norm=1.0))
    engine.model.module.save_pretrained(tmp_path / "model")
    words.save_pretrained(tmp_path / "model")
    task = {"task_id": "sum", "prompt": "What is 3 + 4?", "answer": "7", "max_iterations": 2}
    with (
        VllmProcess(tmp_path / "model", tmp_path / "log", max_model_len=4096) as server,
        RlvrService(tmp_path / "state", LLM_ENDPOINT=f"{server.url}/v1", LLM_MODEL="base") as service,
    ):
        session = service.post("/train", task, timeout=300).json()
        assert session["final_solution"] == "7" and session["confidence"] == 1.0, session
        wrong = service.post("/train", {**task, "answer": "8"}, timeout=300).json()
        assert wrong["confidence"] == 0.0 and wrong["iterations"] == 2, wrong
    assert (tmp_path / "log").read_text().count("POST /v1/chat/completions") >= 3


def test_a_run_samples_by_two_servers_and_goes_on_when_one_is_killed(
    tmp_path: Path, model: Path, vllm: VllmProcess
) -> None:
    log = tmp_path / "log"
    with VllmProcess(model, log, *ADAPTERS) as other:

        def count() -> int:
            return log.read_text().count("POST /inference/v1/generate")

        engine = Engine(load_model(str(model), load_tokenizer(str(model)), device="cpu", dtype="float32"))
        trainer = LocalTrainingClient(engine, engine.create_policy("policy", lora=LoraConfig(8)), tmp_path / "client")
        client = sample_from_vllm(trainer, VllmOptions([vllm.url, other.url]), has_adapter=True, keep=2)
        sampler, shares = client.save_weights_and_get_sampling_client(), list[int]()
        for first in range(8):
            before = count()
            for seed in (1, 2):
                sampler.sample(ModelInput([first, 10, 2]), 4, SamplingParams(max_tokens=4, seed=seed)).result()
            shares.append(count() - before)
        assert set(shares) == {0, 2}, "every prompt has its server, and each server has prompts"
        client.close()

        (tmp_path / "run.yaml").write_text(RUN.replace("MODEL", str(model)).replace("URLS", f"{vllm.url}, {other.url}"))
        metrics = tmp_path / "runs" / "run" / "metrics.jsonl"
        steps_at_kill = list[int]()

        def kill_after_two_steps() -> None:
            while not metrics.exists() or len(rows := metrics.read_text().splitlines()) < 2:
                time.sleep(0.05)
            other.stop(signal.SIGKILL)
            steps_at_kill.append(len(rows))

        killer, before = threading.Thread(target=kill_after_two_steps, daemon=True), count()
        killer.start()
        attempt(str(tmp_path / "run.yaml"), f"run.root={tmp_path / 'runs'}")
        killer.join()
        assert count() > before, "it had its share until then"
    assert steps_at_kill[0] < 12 == len(stored_steps(metrics.parent))
    assert list_adapters(vllm) == []
