"""`sampler.name=vllm` when something fails: a full disk, kills, two runs at one server, old weights, wrong log-probs.

Against a small server with vLLM's HTTP (`tests/kit/vllm_server.py`).
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rlvr.clients.vllm.vllm_options import SamplerError, VllmOptions
from rlvr.clients.vllm.vllm_publisher import PublishedWeights, VllmPublisher
from rlvr.clients.vllm.vllm_server import NoServerError, VllmServer
from rlvr.core.messages import ModelInput, SamplingParams
from rlvr.engine.engine import Engine
from rlvr.engine.model_loading import build_model
from rlvr.engine.tokenizer import build_tokenizer
from rlvr.envs import resolve_environment
from rlvr.training.trainer import TrainingStoppedError
from tests.kit.tiny_run import TINY, RunKilled, attempt, stored_steps
from tests.kit.vllm_runs import Run, make_engine
from tests.kit.vllm_server import FakeVllm, serve_vllm

TINY_MODEL = {
    "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 24,
}  # fmt: skip


@pytest.fixture
def serving() -> Iterator[Any]:
    with ExitStack() as stack:
        yield lambda fake, port=0: stack.enter_context(serve_vllm(fake, port))


def make_tiny_engine() -> Engine:
    """The model of `tiny_run.TINY`, with other weights: a run gives the server its own."""
    source = resolve_environment("rpn_arithmetic", complexity=[1, 1], flaw=0.0)
    tokenizer = build_tokenizer("words", source.vocabulary, end=source.end_word, pad=source.pad_word)
    return Engine(build_model(TINY_MODEL, tokenizer, seed=9, device="cpu", dtype="float32"))


def write_config(folder: Path, url: str, more: str = "") -> str:
    folder.mkdir()
    sampler = f"sampler: {{name: vllm, urls: ['{url}'], wait_s: 1}}\n"
    (folder / "tiny.yaml").write_text(f"{TINY.replace('steps: 3,', 'steps: 4,')}{sampler}{more}")
    return str(folder / "tiny.yaml")


def test_a_full_disk_stops_before_the_server_is_asked_and_the_run_goes_on_after_it(
    serving: Any, tmp_path: Path
) -> None:
    fake = FakeVllm(make_engine)
    run = Run(tmp_path, [fake], [serving(fake)], None)
    before = run.sample()
    run.step()
    asked = len(fake.requests)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))  # what a disk's quota does to a file
    try:
        with pytest.raises(OSError, match="large"):
            run.sample()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(fake.requests) == asked and fake.version == before.fingerprint
    after = run.sample()
    assert after.fingerprint != before.fingerprint and fake.version == after.fingerprint
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(f"published-{r.fingerprint}" for r in (before, after))


@pytest.mark.slow
def test_a_run_and_a_server_killed_in_the_middle_of_steps_end_with_the_same_bits(serving: Any, tmp_path: Path) -> None:
    """The stand-in samples by seed alone, so that a step that was lost or trained twice would show in the weights."""
    fake = FakeVllm(make_tiny_engine, max_model_len=24)
    url = serving(fake)
    calm, killed = (write_config(tmp_path / name, url) for name in ("calm", "killed"))
    learns = "training.control=random_reward"  # so that every step changes the weights
    words = [f"run.root={tmp_path / 'killed' / 'runs'}", learns]
    expected = attempt(calm, f"run.root={tmp_path / 'calm' / 'runs'}", learns)
    count, restarts = 0, [4, 10, 13, 22]  # by the prompts answered: 8, then 2 a step, then 8

    def restart(path: str, body: dict[str, Any], answer: Any) -> Any:
        nonlocal count
        count += "n" in body.get("sampling_params", {}) and fake.version != "default"
        if restarts and count >= restarts[0]:
            restarts.pop(0)
            fake.restart()
        return answer

    fake.fault = restart
    for step in (1, 3):
        with pytest.raises(RunKilled):
            attempt(killed, *words, killed_at=step)
    folder = tmp_path / "killed" / "runs" / "tiny"
    orphan = folder / "checkpoints" / "published-policy-9-0123456789ab"
    orphan.mkdir()  # what a kill during a publish leaves
    summary = attempt(killed, *words)
    assert restarts == []
    assert summary["weights_sha256"] == expected["weights_sha256"]
    assert stored_steps(folder) == stored_steps(tmp_path / "calm" / "runs" / "tiny")
    assert not list((folder / "checkpoints").glob("published-*"))


@pytest.mark.parametrize("rank", [4, None], ids=["adapter", "all weights"])
def test_many_requests_that_find_a_restarted_server_load_its_weights_once(
    serving: Any, tmp_path: Path, rank: int | None
) -> None:
    fake = FakeVllm(make_engine)
    run = Run(tmp_path, [fake], [serving(fake)], rank)
    sampler = run.client.save_weights_and_get_sampling_client()
    params = SamplingParams(max_tokens=4, seed=1)
    before = [sampler.sample(ModelInput([1, i]), 1, params).result().sequences for i in range(8)]
    fake.restart()
    begun = len(fake.requests)
    futures = [sampler.sample(ModelInput([1, i]), 1, params) for i in range(8)]
    assert [future.result().sequences for future in futures] == before
    loads = [path for path, _ in fake.requests[begun:] if path in ("/v1/load_lora_adapter", "/collective_rpc")]
    assert len(loads) == 1


def test_two_runs_with_the_same_adapter_share_its_name_and_one_that_ends_does_not_stop_the_other(
    serving: Any, tmp_path: Path
) -> None:
    fake = FakeVllm(make_engine)
    url = serving(fake)
    one, other = (Run(tmp_path / name, [fake], [url]) for name in ("one", "other"))
    first, second = one.sample(), other.sample()
    assert first.fingerprint == second.fingerprint and first.sequences == second.sequences
    one.client.close()
    assert not fake.adapters
    assert other.sample().sequences == first.sequences
    other.step(1)
    assert other.sample().fingerprint != first.fingerprint


def test_two_runs_with_all_weights_at_one_server_are_told_of_each_other(serving: Any, tmp_path: Path) -> None:
    fake = FakeVllm(make_engine)
    url = serving(fake)
    one, other = (Run(tmp_path / name, [fake], [url], None) for name in ("one", "other"))
    one.step(1)
    other.step(2)
    ours, theirs = one.sample().fingerprint, other.sample().fingerprint
    with pytest.raises(SamplerError, match=rf"{theirs}.*{ours}.*server of its own"):
        one.sample()


@pytest.mark.parametrize("size", [0.2, 0.002])
@pytest.mark.parametrize("rank", [4, None], ids=["adapter", "all weights"])
def test_old_weights_under_the_new_name_are_named_even_after_a_small_step(
    serving: Any, tmp_path: Path, rank: int | None, size: float
) -> None:
    fake = FakeVllm(make_engine)
    run = Run(tmp_path, [fake], [serving(fake)], rank)
    run.step(1)
    old = run.sample().fingerprint
    run.step(2, size)
    given = fake.answer

    def serve_old(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/load_lora_adapter":
            body = {**body, "lora_path": str(tmp_path / f"published-{old}")}
        if path == "/collective_rpc":
            return 200, {"results": [None]}
        return given(path, body)

    fake.answer = serve_old  # type: ignore[method-assign]
    with pytest.raises(SamplerError, match=rf"given the weights policy-2-\w+ and scores a probe as {old} does"):
        run.sample()


def test_a_server_that_samples_at_another_temperature_stops_the_run_before_its_first_update(
    serving: Any, tmp_path: Path
) -> None:
    fake = FakeVllm(make_tiny_engine, max_model_len=24)
    config = write_config(tmp_path / "run", serving(fake), "algorithm: {name: grpo}\n")
    given = fake.answer

    def ignore_temperature(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        asked = body.get("sampling_params", {})
        if "n" in asked:
            body = {**body, "sampling_params": {**asked, "temperature": 1.0}}
        return given(path, body)

    fake.answer = ignore_temperature  # type: ignore[method-assign]
    words = (f"run.root={tmp_path / 'runs'}", "rollout.temperature=0.5", "model.config.initializer_range=0.5")
    words += ("training.control=random_reward",)
    with pytest.raises(TrainingStoppedError, match=r"step 1: .*gap_stop.*Sampled by policy-\d+-\w+, trained"):
        attempt(config, *words)


@pytest.mark.parametrize("value", [-9999.0, None, float("-inf")])
def test_weights_whose_probe_has_no_logprobs_are_not_sampled_from(
    serving: Any, tmp_path: Path, value: float | None
) -> None:
    fake = FakeVllm(make_engine)
    run = Run(tmp_path, [fake], [serving(fake)])

    def spoil(path: str, body: dict[str, Any], answer: Any) -> Any:
        if body.get("sampling_params", {}).get("logprob_token_ids"):
            answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"][2]["logprob"] = value
        return answer

    fake.fault = spoil
    with pytest.raises(SamplerError, match="as a log-prob, expected a number"):
        run.sample()
    assert not any("n" in body.get("sampling_params", {}) for _, body in fake.requests)


def test_a_server_whose_address_reads_as_an_answer_is_down_all_the_same(tmp_path: Path) -> None:
    url = "http://127.0.0.1:9/404-rank"  # nothing listens there; a free port may have 404 in it as well
    options = VllmOptions(["http://127.0.0.1:9"], wait_s=0.1)
    publisher = VllmPublisher([VllmServer(url, options)], options, keep=2)
    weights = PublishedWeights("policy-1", tmp_path, True, [1], {2: -1.0})

    async def publish_and_sample() -> None:
        await publisher.publish(weights)
        await publisher.generate("policy-1", [1], {}, place=0)

    with pytest.raises(NoServerError, match="cannot be reached"):
        asyncio.run(publish_and_sample())
