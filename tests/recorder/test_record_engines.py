"""`rlvr record` in front of an engine elsewhere: its token ids are recorded, and an engine without them is refused."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra [serve] is not installed")
pytest.importorskip("transformers", reason="the extra [train] is not installed")
pytest.importorskip("httpx2", reason="the extra [vllm] is not installed")

from rlvr.core.messages import ModelInput, SamplingParams
from rlvr.engine.engine import Engine
from rlvr.engine.model_loading import load_model
from rlvr.engine.tokenizer import load_tokenizer
from rlvr.recorder.recording import read_recording
from rlvr.recorder.rows import make_rows
from rlvr.runs.record_traffic import open_to_sample
from tests.kit.chat_rows import qwen_folder
from tests.kit.open_server import TOOLS_TEMPLATE
from tests.kit.recorder import chat, post, read_message, recorder_process
from tests.kit.vllm_server import FakeVllm, serve_vllm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen_folder(tmp_path_factory.mktemp("models") / "small", TOOLS_TEMPLATE)


@pytest.fixture
def fake(model: Path) -> FakeVllm:
    name = str(model)

    def make_engine() -> Engine:
        return Engine(load_model(name, load_tokenizer(name), device="cpu", dtype="float32"))

    return FakeVllm(make_engine, max_model_len=512)


def without_weights(model: Path, folder: Path) -> Path:
    """The tokenizer of a model alone."""
    load_tokenizer(str(model)).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_vllm_samples_and_the_recording_is_of_its_tokens(model: Path, fake: FakeVllm, tmp_path: Path) -> None:
    path, words = tmp_path / "calls.jsonl", without_weights(model, tmp_path / "words")
    with serve_vllm(fake) as url:
        settings = ("sampler.name=vllm", f"sampler.urls=[{url}]")
        with recorder_process(words, path, *settings) as (program, base):
            message = read_message(chat(base, "go", max_tokens=5, temperature=0.7))
            read_message(chat(base, "go", message, "on", max_tokens=5, temperature=0.7, n=2))
            status, answer = chat(base, "go", top_p=0.5)
            assert status == 400 and "top_p" in answer["error"]["message"]
            fake.fault = lambda path, body, given: drop_ids(given) if path.endswith("generate") else given
            status, answer = chat(base, "again", max_tokens=5)
            assert status == 500 and "0 tokens" in answer["error"]["message"]
            assert post(base.removesuffix("/v1") + "/reward", {"reward": 1})[0] == 200
            program.send_signal(signal.SIGTERM)
            assert program.wait(60) == 0
    (rollout,) = read_recording(path).rollouts
    assert len(rollout.calls) == 2 and {call.policy for call in rollout.calls} == {"base@default"}
    (row,) = make_rows(rollout)
    engine = fake.make_engine()
    own = engine.logprobs(engine.base_snapshot(), ModelInput(row.full_tokens), 0.7).result()[len(row.prompt_tokens) :]
    expected = [value if is_sampled else 0.0 for value, is_sampled in zip(own, row.action_mask, strict=True)]
    assert row.logprobs == pytest.approx(expected, abs=1e-4) and row.reward == 1.0


def drop_ids(answer: Any) -> Any:
    return {**answer, "choices": [{**choice, "token_ids": None} for choice in answer["choices"]]}


def sample(model: Path, *urls: str, count: int = 1, **more: Any) -> Any:
    settings = ["sampler.name=vllm", f"sampler.urls=[{','.join(urls)}]", "sampler.wait_s=0.2"]
    with open_to_sample(str(model), settings, lambda text: None) as sampler:
        return sampler.sample(ModelInput([5, 6]), count, SamplingParams(**{"max_tokens": 4, **more})).result()


def test_the_servers_model_is_sampled_without_its_weights_here(model: Path, fake: FakeVllm, tmp_path: Path) -> None:
    with serve_vllm(fake) as url, serve_vllm(fake) as second:
        answer = sample(without_weights(model, tmp_path / "words"), url, second, count=3, seed=1)
    assert answer.fingerprint == "base@default" and len(answer.sequences) == 3
    assert all(len(one.logprobs) == len(one.tokens) for one in answer.sequences)
    assert not fake.adapters, "nothing was loaded into the servers"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda fake: fake.missing.add("/inference/v1/generate"), "--enable-scale-out"),
        (lambda fake: setattr(fake, "fault", lambda path, body, given: untold(given)), "weight_versions"),
        (lambda fake: fake.missing.add("/v1/models"), "/v1/models"),
    ],
)
def test_an_engine_that_returns_no_token_ids_is_refused(
    model: Path, fake: FakeVllm, spoil: Callable[[FakeVllm], Any], words: str
) -> None:
    spoil(fake)
    with serve_vllm(fake) as url, pytest.raises((ValueError, RuntimeError), match=words):
        sample(model, url)


def untold(answer: Any) -> Any:
    """As an engine that does not say which weights sampled."""
    if not isinstance(answer, dict) or "choices" not in answer:
        return answer
    return {**answer, "choices": [{**choice, "weight_versions": None} for choice in answer["choices"]]}


def test_another_tokenizer_other_weights_and_an_adapter_are_refused(
    model: Path, fake: FakeVllm, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    other = AutoTokenizer.from_pretrained(model).train_new_from_iterator(["xyz xyz xyz" * 9], 300)
    other.save_pretrained(tmp_path / "other")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(f'{{"base_model_name_or_path": "{model}"}}')
    newer = FakeVllm(fake.make_engine, max_model_len=512)
    newer.version = "step-7"
    with serve_vllm(fake) as url, serve_vllm(newer) as second:
        with pytest.raises(ValueError, match="another tokenizer"):
            sample(tmp_path / "other", url)
        with pytest.raises(ValueError, match=r"different weights.*base@step-7"):
            sample(model, url, second)
        with pytest.raises(ValueError, match=r"is an adapter.*rlvr export"):
            sample(adapter, url)


def test_an_endpoint_of_text_is_refused_with_what_to_give() -> None:
    with (
        pytest.raises(ValueError, match=r"is an address.*sampler\.name=vllm"),
        open_to_sample("https://api.openai.com/v1", [], lambda text: None),
    ):
        pass


def test_a_recorder_that_is_started_again_samples_anew(model: Path, tmp_path: Path) -> None:
    from rlvr.chat.conversation import ChatTemplate
    from rlvr.chat.dialects.forms import ChatRequest
    from rlvr.recorder.open_rollouts import OpenRollouts
    from rlvr.recorder.recording import RecordingFile
    from rlvr.recorder.recording_server import RecordingPolicy, RecordingServer

    answers: list[list[int]] = []
    for number in range(2):
        path = tmp_path / f"{number}.jsonl"
        with open_to_sample(str(model), [], lambda text: None) as sampler, RecordingFile(path, "m") as file:
            template = ChatTemplate(sampler.get_tokenizer())
            policy = RecordingPolicy(sampler, file, template)
            session = RecordingServer(policy, file, template, "m").open()
            rollout = OpenRollouts().open(lambda call, to=policy, of=session: to.submit(of, call))
            call = ChatRequest("any", [{"role": "user", "content": "go"}], max_tokens=12)
            answers.append(list(rollout.offer(call, "chat", {}).answers.result(60)[0].tokens))
            policy.stop()
    assert answers[0] != answers[1]
