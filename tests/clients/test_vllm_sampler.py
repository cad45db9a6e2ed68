"""`sampler.name=vllm`: completions of exactly the published weights, or an error that says what is wrong.

Against a small server with vLLM's HTTP (`vllm_server.py`); `test_vllm_real.py` runs against vLLM itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlvr.clients.samplers import SAMPLERS
from rlvr.clients.vllm import VllmOptions
from rlvr.clients.vllm.vllm_options import SamplerError
from rlvr.core.messages import ModelInput, SamplingParams
from tests.kit.tiny import WORDS
from tests.kit.vllm_runs import PROMPT, Run, make_engine
from tests.kit.vllm_server import FakeVllm, serve_vllm


@pytest.fixture
def serving() -> Iterator[Any]:
    with ExitStack() as stack:
        yield lambda fake, port=0: stack.enter_context(serve_vllm(fake, port))


@pytest.mark.parametrize("rank", [4, None], ids=["adapter", "all weights"])
def test_completions_and_logprobs_are_those_of_the_trainer_s_weights_after_every_step(
    serving: Any, tmp_path: Path, rank: int | None
) -> None:
    fake = FakeVllm(make_engine)
    run = Run(tmp_path, [fake], [serving(fake)], rank)
    for seed in range(3):
        run.step(seed)
        response = run.sample(temperature=0.7)
        assert response.fingerprint.endswith(run.trainer.weights_sha256()[:12])
        own = run.trainer.create_sampling_client()
        for s in response.sequences:
            expected = own.compute_logprobs(ModelInput(PROMPT + s.tokens), 0.7).result()[len(PROMPT) :]
            np.testing.assert_allclose(s.logprobs, np.asarray(expected, float), atol=1e-4)
        assert [s.tokens for s in run.sample(temperature=0.7).sequences] == [s.tokens for s in response.sequences]
    assert not fake.paused
    assert len(list(tmp_path.glob("published-*"))) == 2  # `keep`
    if rank:
        assert len(fake.adapters) == 2
    salts = {body["cache_salt"] for path, body in fake.requests if path.endswith("generate")} - {"check"}
    assert len(salts) == 3  # no prefix of other weights is used again
    run.client.close()
    assert not list(tmp_path.glob("published-*")) and not fake.adapters


def test_a_stop_string_stays_and_an_end_token_is_counted(serving: Any, tmp_path: Path) -> None:
    fake = FakeVllm(make_engine)
    run = Run(tmp_path, [fake], [serving(fake)])
    words = run.sample(stop=["7"], max_tokens=40).sequences
    assert all(run.trainer.get_tokenizer().decode(s.tokens).endswith("7") for s in words if s.stop_reason == "stop")
    assert {s.end_tokens for s in words} == {0}
    assert {s.end_tokens for s in run.sample(stop=[7], max_tokens=40).sequences if s.stop_reason == "stop"} <= {1}
    with pytest.raises(ValueError, match=r"top_p.*leave"):
        run.sample(top_p=0.9)
    with pytest.raises(ValueError, match="max-model-len=64"):
        run.client.create_sampling_client().sample(ModelInput([1] * 64), 1, SamplingParams())


def test_a_restarted_server_is_given_its_weights_again(serving: Any, tmp_path: Path) -> None:
    for rank in (4, None):
        fake = FakeVllm(make_engine)
        run = Run(tmp_path / str(rank), [fake], [serving(fake)], rank)
        run.step()
        before = run.sample()
        fake.restart()
        after = run.sample()
        assert (after.fingerprint, after.sequences) == (before.fingerprint, before.sequences)


def test_old_weights_are_an_error_with_both_fingerprints(serving: Any, tmp_path: Path) -> None:
    fake = FakeVllm(make_engine)
    run = Run(tmp_path, [fake], [serving(fake)], None)
    ours = run.sample().fingerprint
    fake.version = "policy-0-of-another-run"
    with pytest.raises(SamplerError, match=rf"policy-0-of-another-run.*{ours}"):
        run.sample()


def test_an_adapter_that_is_loaded_and_not_applied_is_caught_before_the_first_completion(
    serving: Any, tmp_path: Path
) -> None:
    fake = FakeVllm(make_engine)
    run = Run(tmp_path, [fake], [serving(fake)])
    run.sample()
    stale = next(iter(fake.adapters))
    run.step()

    def serve_stale(path: str, body: dict[str, Any], answer: Any) -> Any:
        if path == "/v1/load_lora_adapter":
            fake.adapters[body["lora_name"]] = fake.adapters[stale]
        return answer

    fake.fault = serve_stale
    with pytest.raises(SamplerError, match=rf"scores a probe as {stale} does"):
        run.sample()


@pytest.mark.parametrize("value", [-9999.0, None, math.nan])
def test_a_missing_logprob_names_the_flag(serving: Any, tmp_path: Path, value: float | None) -> None:
    fake = FakeVllm(make_engine)
    run = Run(tmp_path, [fake], [serving(fake)])

    def spoil(path: str, body: dict[str, Any], answer: Any) -> Any:
        if path.endswith("generate") and body["sampling_params"].get("n"):
            answer["choices"][1]["logprobs"]["content"][0]["logprob"] = value
        return answer

    fake.fault = spoil
    with pytest.raises(SamplerError, match="--logprobs-mode processed_logprobs"):
        run.sample()


def test_servers_that_cannot_serve_a_run_are_refused_at_the_start(serving: Any, tmp_path: Path) -> None:
    def raw(path: str, body: dict[str, Any], answer: Any) -> Any:
        if path.endswith("generate"):
            for entry in answer["choices"][0]["logprobs"]["content"]:
                entry["top_logprobs"] = [{"token_id": 3, "logprob": -1.25}]
        return answer

    fake = FakeVllm(make_engine)
    url = serving(fake)
    fake.fault = raw
    with pytest.raises(ValueError, match=r"raw log-probs.*--logprobs-mode"):
        Run(tmp_path, [fake], [url])
    fake.fault = lambda path, body, answer: answer
    fake.missing = {"/inference/v1/generate"}
    with pytest.raises(ValueError, match="--enable-scale-out"):
        Run(tmp_path, [fake], [url])
    fake.missing = {"/v1/load_lora_adapter"}
    with pytest.raises(SamplerError, match="--enable-lora"):
        Run(tmp_path, [fake], [url]).sample()
    fake.missing = set()
    with pytest.raises(SamplerError, match=r"rank 32.*--max-lora-rank"):
        Run(tmp_path, [fake], [url], rank=32).sample()
    other = FakeVllm(lambda: make_engine(words=[*reversed(WORDS)]))
    with pytest.raises(ValueError, match="another tokenizer"):
        Run(tmp_path, [other], [serving(other)])
    model = FakeVllm(lambda: make_engine(seed=9))
    with pytest.raises(SamplerError, match="another base model"):
        Run(tmp_path, [model], [serving(model)]).sample()
    with pytest.raises(SamplerError, match="cannot be reached"):
        Run(tmp_path, [], ["http://127.0.0.1:9"])


def test_a_dead_or_slow_server_is_left_for_the_next_and_all_dead_is_an_error(serving: Any, tmp_path: Path) -> None:
    fakes = [FakeVllm(make_engine), FakeVllm(make_engine)]
    with ExitStack() as stack:
        urls = [stack.enter_context(serve_vllm(fake)) for fake in fakes]
        run = Run(tmp_path, fakes, urls, timeout_s=1.5)
        whole = run.sample()
        busy = next(f for f in fakes if any(body.get("sampling_params", {}).get("n") for _, body in f.requests))
        assert sum(any(b.get("sampling_params", {}).get("n") for _, b in f.requests) for f in fakes) == 1  # sticky
        busy.delay = 3.0
        assert run.sample().sequences == whole.sequences
        busy.delay = 0.0
    with pytest.raises(SamplerError, match=r"no sampling server answers.*cannot be reached.*resumes"):
        run.sample()


def test_weights_whose_folder_is_gone_never_reach_the_server(serving: Any, tmp_path: Path) -> None:
    """vLLM's engine ends over a folder that is not there."""
    fake = FakeVllm(make_engine)
    run = Run(tmp_path, [fake], [serving(fake)], None)
    run.sample()
    fake.restart()
    next(tmp_path.glob("published-*")).rename(tmp_path / "moved")
    with pytest.raises(SamplerError, match="is missing"):
        run.sample()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({}, "sampler.urls"),
        ({"urls": ["localhost:8000"]}, "http://127"),
        ({"urls": ["http://u:p@h"]}, "expected an address"),
        ({"urls": ["http://h", "http://h"]}, "twice"),
        ({"urls": ["http://h"], "importance_cap": 0.5}, "at least 1"),
    ],
)
def test_mistakes_in_the_options_say_what_to_give(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        VllmOptions(**options)
    with pytest.raises(ValueError, match=r"sampler.name='sglang' is unknown; known: trainer, vllm"):
        SAMPLERS.find("sglang")
