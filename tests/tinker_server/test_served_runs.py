"""Training runs behind the open endpoints: the newest whole checkpoint answers, as the run itself samples from it."""

from __future__ import annotations

import gc
import http.client
import json
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")
pytest.importorskip("google.protobuf", reason="the extra [serve] is not installed")

from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.core.files import write_atomic
from rlvr.core.messages import ModelInput, SamplingParams
from rlvr.runs.assembly import assemble
from rlvr.tinker_server.backend.sampling.served_runs import RunWeights
from rlvr.tinker_server.http.tinker_middleware import TinkerMiddleware
from rlvr.tinker_server.protocol.errors import UserError
from rlvr.tinker_server.serve_engine import ServeOptions, load_backend, named_models
from rlvr.training.best_checkpoint import resolve_best
from rlvr.training.journal import list_checkpoints, newest_checkpoint
from rlvr.web.auth import ApiKeys
from tests.kit.open_server import events, request
from tests.kit.slow_cases import mark_slow_but
from tests.kit.tinker_server import TinkerServer, serving
from tests.kit.tiny_run import TINY, RunKilled, attempt

LORA = "model.lora={rank: 2}"
PROMPT = [1, 2, 3]
# Every group has signal, so every step changes the weights.
REWARD = ["reward.type=length_penalty", "training.optimizer.learning_rate=0.05"]


def train(folder: Path, *words: str, killed_at: int = 0, config: str = TINY) -> Path:
    """Train, or go on training, the tiny run."""
    file = folder / "tiny.yaml"
    file.write_text(config)
    try:
        attempt(str(file), f"run.root={folder}", "run.name=mine", *REWARD, *words, killed_at=killed_at)
    except RunKilled:
        assert killed_at
    return folder / "mine"


@contextmanager
def served(folder: Path, *models: str) -> Iterator[tuple[Any, int]]:
    """(backend, port), built as `rlvr serve engine` builds it."""
    options = ServeOptions(list(models), state=folder / "state", device="cpu", dtype="float32")
    middleware = TinkerMiddleware(ApiKeys([]), options.settings.limits)
    backend, app = load_backend(named_models(list(models)), options, middleware, lambda text: None)
    middleware.open(app)
    try:
        with serving(middleware) as port:
            yield backend, port
    finally:
        backend.close()


def complete(port: int, model: str, **more: Any) -> tuple[list[list[int]], list[float], str]:
    """(ids of each completion, log-probs of the first, which checkpoint)."""
    body = {
        "model": model,
        "prompt": PROMPT,
        "n": 4,
        "max_tokens": 6,
        "seed": 7,
        "logprobs": 0,
        "return_token_ids": True,
    }
    status, answer = request(port, "/v1/completions", body | more)
    assert status == 200, answer
    choices = answer["choices"]
    return (
        [choice["token_ids"] for choice in choices],
        choices[0]["logprobs"]["token_logprobs"],
        answer["system_fingerprint"],
    )


def sample_locally(run: Path, checkpoint: Path) -> tuple[list[list[int]], list[float]]:
    """What the run's own sampler gives."""
    config = build_config(load(None, str(run / "resolved.yaml"), []))
    client = assemble(config).build_client(run / "none", lambda text: None, lambda text: None, fresh=False)
    client.load_state(str(checkpoint)).result()
    sampler = client.create_sampling_client()
    response = sampler.sample(ModelInput(PROMPT), 4, SamplingParams(max_tokens=6, seed=7)).result()
    return [one.tokens for one in response.sequences], list(response.sequences[0].logprobs or ())


@pytest.mark.parametrize("words", [[], [LORA]], ids=["all weights", "adapter"])
def test_a_run_is_served_while_it_trains(tmp_path: Path, words: list[str]) -> None:
    """Each request gets the newest checkpoint, with the tokens that the run samples from it; earlier ones are freed."""
    run = train(tmp_path, *words, killed_at=1)
    first = newest_checkpoint(run)
    assert first is not None
    expected = sample_locally(run, first)
    with served(tmp_path, f"policy={run}", f"fixed={first}") as (backend, port):
        ids, logprobs, checkpoint = complete(port, "policy")
        assert ids == expected[0] and logprobs == pytest.approx(expected[1], abs=1e-5)
        assert checkpoint.startswith(f"mine/{first.name}@")
        assert [card["id"] for card in request(port, "/v1/models")[1]["data"]] == ["policy", "fixed"]
        body = {"model": "policy", "prompt": PROMPT, "stream": True, "max_tokens": 3}
        chunks = events(request(port, "/v1/completions", body)[1])
        assert {chunk["system_fingerprint"] for chunk in chunks} == {checkpoint}

        train(tmp_path, *words)  # it goes on to its end
        last = newest_checkpoint(run)
        assert last is not None and last != first
        later = sample_locally(run, last)
        ids, logprobs, checkpoint = complete(port, "policy")
        assert ids == later[0] and logprobs == pytest.approx(later[1], abs=1e-5) != expected[1]
        assert checkpoint.startswith(f"mine/{last.name}@")
        fixed = f"mine/{first.name}@" if words else "fixed"  # a folder with all weights is a model like any other
        ids, logprobs, checkpoint = complete(port, "fixed")
        assert ids == expected[0] and logprobs == pytest.approx(expected[1], abs=1e-5) and checkpoint.startswith(fixed)
        gc.collect()
        assert len(backend.served_runs["policy"]._alive) == 1

        shutil.rmtree(run)
        assert complete(port, "policy")[0] == later[0], "what is in memory is still served"


@pytest.mark.parametrize("words", mark_slow_but(1, [[], [LORA]]), ids=["all weights", "adapter"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, words: list[str]) -> None:
    run = train(tmp_path, *words, killed_at=2)
    with served(tmp_path, f"policy={run}") as (_, port):
        before = complete(port, "policy")
        train(tmp_path, *words, killed_at=3)
        newest = newest_checkpoint(run)
        assert newest is not None and newest.name not in before[2]
        for file in newest.glob("*.safetensors"):
            file.write_bytes(file.read_bytes()[:-1])
        assert complete(port, "policy") == before
        (run / "journal.jsonl").write_text("{broken\n{}\n")
        assert complete(port, "policy") == before
    with pytest.raises(ValueError, match="not JSON"):
        named_models([f"policy={run}"])


@pytest.mark.parametrize("words", mark_slow_but(1, [[], [LORA]]), ids=["all weights", "adapter"])
def test_a_checkpoint_that_could_not_be_read_is_tried_again(tmp_path: Path, words: list[str]) -> None:
    """Nothing is written between the two requests: a file is out of reach for a while."""
    run = train(tmp_path, *words, killed_at=2)
    with served(tmp_path, f"policy={run}") as (backend, port):
        before = complete(port, "policy")
        train(tmp_path, *words, killed_at=3)
        newest = newest_checkpoint(run)
        assert newest is not None and newest.name not in before[2]
        (newest / "policy.json").rename(tmp_path / "away")
        assert complete(port, "policy") == before
        (tmp_path / "away").rename(newest / "policy.json")
        assert complete(port, "policy") == before, "it is not read with every request"
        backend.served_runs["policy"].retry_seconds = 0.0
        backend.served_runs["policy"]._retry_at = 0.0
        assert complete(port, "policy")[2].startswith(f"mine/{newest.name}@")


def test_memory_that_is_used_up_leaves_the_older_checkpoint_in_service(tmp_path: Path) -> None:
    """torch's errors of memory are RuntimeErrors. The engine has none until it is told otherwise."""
    run = train(tmp_path, LORA, killed_at=1)
    with served(tmp_path, f"policy={run}") as (backend, _):
        engine = backend.engines["policy"]

        class Scarce:
            policies, is_out = engine.policies, False

            def load_snapshot(self, folder: Path) -> Any:
                if self.is_out:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                return engine.load_snapshot(folder)

        scarce: Any = Scarce()
        weights = RunWeights(run, scarce)
        weights.retry_seconds = 0.0
        first = weights.newest()
        train(tmp_path, LORA)
        scarce.is_out = True
        assert weights.newest() is first
        scarce.is_out = False
        assert weights.newest() is not first


@pytest.mark.parametrize("words", mark_slow_but(1, [[], [LORA]]), ids=["all weights", "adapter"])
def test_a_checkpoint_without_checksums_is_not_served(tmp_path: Path, words: list[str]) -> None:
    run = train(tmp_path, *words, killed_at=2)
    with served(tmp_path, f"policy={run}") as (_, port):
        before = complete(port, "policy")
        train(tmp_path, *words, killed_at=3)
        newest = newest_checkpoint(run)
        assert newest is not None
        (newest / "checksums.json").unlink()
        assert complete(port, "policy") == before


def test_a_damaged_checkpoint_is_not_served_by_its_own_folder(tmp_path: Path) -> None:
    folder = newest_checkpoint(train(tmp_path, killed_at=1))
    assert folder is not None
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with (
        pytest.raises(ValueError, match=r"--model .*model\.safetensors is cut short"),
        served(tmp_path, f"policy={folder}"),
    ):
        pass


def test_a_request_keeps_the_weights_that_it_began_with(tmp_path: Path) -> None:
    """A snapshot that is held stays as it was when a later checkpoint becomes the model's weights."""
    run = train(tmp_path, killed_at=1)
    with served(tmp_path, f"policy={run}") as (backend, port):
        row = backend.sampling.find_model("local", "policy")
        held = {name: weight.clone() for name, weight in row["snapshot"].tensors.items()}
        train(tmp_path)
        complete(port, "policy")
        assert row["snapshot"].copy is not None
        assert all(weight.equal(held[name]) for name, weight in row["snapshot"].tensors.items())
        newest = backend.sampling.find_model("local", "policy")["snapshot"]
        assert newest.copy is None and any(not w.equal(held[name]) for name, w in newest.tensors.items())


def test_a_base_model_is_shared_with_the_adapters_trained_on_it(tmp_path: Path) -> None:
    from tests.kit.tinker_model import write_model

    write_model(tmp_path / "base")
    head, _, tail = TINY.partition("model:\n")
    model = f"model: {{name: {tmp_path / 'base'}, device: cpu, lora: {{rank: 2}}}}\n"
    run = train(tmp_path, "sft.steps=0", config=head + model + tail[tail.index("rollout:") :])
    with served(tmp_path, f"base={tmp_path / 'base'}", f"policy={run}") as (backend, port):
        assert backend.engines["base"] is backend.engines["policy"]
        assert complete(port, "policy")[1] != complete(port, "base")[1]
        assert [model["model_name"] for model in backend.queries.capabilities()] == ["base"]
        session = backend.sessions.create("local")
        with pytest.raises(UserError, match="not a base model"):
            backend.sampling.create_sampler("local", session, 0, base_model="policy")


def test_a_run_without_a_checkpoint_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "resolved.yaml").write_text("{}")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="no checkpoint yet"):
        named_models([f"policy={tmp_path}"])


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("words", [[], [LORA]], ids=["all weights", "adapter"])
def test_the_best_checkpoint_is_served_beside_the_newest(tmp_path: Path, words: list[str]) -> None:
    """`rlvr serve engine` with a run and its best checkpoint: they share a model, and neither changes the other."""
    run = train(tmp_path, *words, "evaluation.every=1")
    place = run / "checkpoints" / "best"
    newest, *earlier = [folder for folder in list_checkpoints(run) if folder.exists()]
    last, best, first = (sample_locally(run, folder) for folder in (newest, resolve_best(place), earlier[-1]))
    assert last[1] != first[1]
    with TinkerServer({"policy": run, "best": place}, tmp_path / "state", "--device", "cpu") as server:
        port = int(server.url.rpartition(":")[2])
        assert f"best is the policy of {place}, now mine/{resolve_best(place).name}@" in server.said
        for _ in range(2):
            for name, expected in (("policy", last), ("best", best)):
                ids, logprobs, _ = complete(port, name)
                assert ids == expected[0] and logprobs == pytest.approx(expected[1], abs=1e-5)
        write_atomic(place.with_suffix(".json"), json.dumps({"checkpoint": earlier[-1].name}))
        ids, logprobs, checkpoint = complete(port, "best")
        assert ids == first[0] and logprobs == pytest.approx(first[1], abs=1e-5)
        assert checkpoint.startswith(f"mine/{earlier[-1].name}@")
        assert complete(port, "policy")[:2] == (last[0], pytest.approx(last[1], abs=1e-5))


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], [LORA]], ids=["all weights", "adapter"])
def test_a_checkpoint_that_arrives_during_a_stream_does_not_change_it(tmp_path: Path, words: list[str]) -> None:
    config = TINY.replace("max_position_embeddings: 24", "max_position_embeddings: 1024")
    run = train(tmp_path, *words, killed_at=1, config=config)
    now = shutil.copytree(run, tmp_path / "now" / "mine")
    train(tmp_path, *words, config=config)
    long = {"max_tokens": 1000, "n": 8, "ignore_eos": True}
    with served(tmp_path, f"policy={now}") as (backend, port):
        expected, _, before = complete(port, "policy", **long)
        body = {"model": "policy", "prompt": PROMPT, "seed": 7, "stream": True, "return_token_ids": True, **long}
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            with connection.getresponse() as answer:
                said = answer.readline().decode()
                shutil.copytree(run, now, dirs_exist_ok=True)
                backend.sampling.find_model("local", "policy")  # reads it, as the next request would
                [thread] = backend._engine_threads.values()
                assert thread._running, "the stream ended before the checkpoint arrived: make it longer"
                _, _, after = complete(port, "policy")
                chunks = events(said + answer.read().decode())
        assert after != before == chunks[0]["system_fingerprint"]
        assert {chunk["system_fingerprint"] for chunk in chunks} == {before}
        streamed = [list[int]() for _ in expected]
        for chunk in chunks:
            streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["token_ids"]
        assert streamed == expected
