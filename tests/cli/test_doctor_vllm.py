"""`rlvr doctor --vllm URL`: what a server can do, and with a config what the run needs of it, with a trial publish."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rlvr.cli.doctor_vllm import check_vllm
from rlvr.cli.main import run
from rlvr.engine.engine import Engine
from tests.kit.tiny import WORDS
from tests.kit.vllm_runs import MODEL, make_engine
from tests.kit.vllm_server import FakeVllm, serve_vllm

CONFIG = """
env: {name: rpn_arithmetic, kwargs: {complexity: [1, 1], flaw: 0.0}}
model: {name: MODEL, device: cpu}
rollout: {max_tokens: 8}
engine: {threads: 1}
"""


@pytest.fixture
def serving() -> Iterator[Any]:
    with ExitStack() as stack:
        yield lambda fake: stack.enter_context(serve_vllm(fake))


@pytest.fixture
def config(tmp_path: Path) -> list[str]:
    """The words of a config whose model is a folder."""
    save_model(make_own(), tmp_path / "model")
    (tmp_path / "mine.yaml").write_text(CONFIG.replace("MODEL", str(tmp_path / "model")))
    return [f"--config={tmp_path / 'mine.yaml'}", f"run.root={tmp_path / 'runs'}"]


def read_output(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join("".join(capsys.readouterr()).split())


def save_model(engine: Engine, folder: Path) -> None:
    engine.model.module.save_pretrained(folder)
    engine.model.tokenizer.save_pretrained(folder)


def make_own() -> Engine:
    return make_engine(words=[*WORDS, "10", "11", "12"])


def test_doctor_says_what_a_server_can_do(serving: Any) -> None:
    fake = FakeVllm(make_engine)
    url = serving(fake)
    said = {check.name: (check.state, check.detail) for check in check_vllm(url)}
    assert said["server"][0] == "ok" and "max_model_len 64" in said["server"][1]
    assert "VLLM_SERVER_DEV_MODE=1" in said["all weights"][1]  # the small server lists no paths
    fake.missing = {"/inference/v1/generate"}
    assert [(c.state, c.name) for c in check_vllm(url)] == [("fails", "server")]


@pytest.mark.parametrize("lora", [["model.lora.rank=4"], []], ids=["adapter", "all weights"])
def test_a_trial_publish_brings_changed_weights_and_takes_them_back(
    serving: Any, config: list[str], lora: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeVllm(make_own)
    code = run(["doctor", "--vllm", serving(fake), *config, *lora])
    said = read_output(capsys)
    assert code == 0, said
    assert "ok tokenizer" in said and "ok lengths" in said and "need 12 of 64" in said
    assert "policy-1-" in said and "was sampled after policy-0-" in said
    loads = [body for path, body in fake.requests if path in ("/v1/load_lora_adapter", "/collective_rpc")]
    assert len(loads) == (2 if lora else 3)  # an adapter of before is still there
    assert not fake.adapters and not fake.version.startswith("policy-1-")
    assert not list((tmp_path / "runs").iterdir())


def test_what_does_not_fit_the_run_fails_with_the_option_of_the_server(
    serving: Any, config: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lora = {"max_lora_rank": 2, "max_loras": 1}
    own = FakeVllm(make_own)
    url = serving(own)
    own.settings = {"lora_config": lora}

    def ask(*words: str, address: str = url) -> str:
        assert run(["doctor", "--vllm", address, *config, *words]) == 1
        return read_output(capsys)

    assert "the run has rank 4; --max-lora-rank 4" in ask("model.lora.rank=4")
    own.settings = {"device_config": {"device": "cpu"}, "scheduler_config": {"enable_chunked_prefill": True}}
    assert "FAILS prompts" in (said := ask()) and "--no-enable-chunked-prefill" in said
    own.settings = {}
    assert "rank 32" in ask("model.lora.rank=32") and not list((tmp_path / "runs").iterdir())
    assert "--max-model-len 104" in ask("rollout.max_tokens=100")
    other = FakeVllm(lambda: make_engine(words=[*WORDS, "12", "11", "10"]))
    assert "another tokenizer" in ask("model.lora.rank=4", address=serving(other))
    base = FakeVllm(lambda: make_engine(seed=9, words=[*WORDS, "10", "11", "12"]))
    assert "another base model" in ask("model.lora.rank=4", address=serving(base))
    silent = FakeVllm(make_own)
    answer = silent.answer

    def keep_old(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return (200, {}) if path == "/collective_rpc" and len(silent.requests) > 20 else answer(path, body)

    silent.answer = keep_old  # type: ignore[method-assign]
    assert "scores a probe" in ask(address=serving(silent))


def test_a_head_size_that_vllm_has_no_kernel_for_on_cpus_is_noted_even_where_no_server_answers(
    config: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert MODEL["head_dim"] == 16
    assert run(["doctor", "--vllm", "http://127.0.0.1:9", *config]) == 1
    said = read_output(capsys)
    assert "note head size 16: vLLM for CPUs supports 32, 64, 80" in said and "cannot be reached" in said


def test_a_run_that_samples_by_itself_and_settings_without_a_config_are_mistakes(
    config: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", *config]) == 2
    assert "sampler.name=vllm" in capsys.readouterr().err
    assert run(["doctor", "seed=3"]) == 2
    assert "--config-name" in capsys.readouterr().err
