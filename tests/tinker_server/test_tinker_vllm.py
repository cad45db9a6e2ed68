"""The Tinker server whose samples come from vLLM servers: which weights answer, and what happens when a server fails.

Against a small server with vLLM's HTTP (`vllm_server.py`); test_vllm_real.py does it with vLLM itself.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")
pytest.importorskip("google.protobuf", reason="the extra [serve] is not installed")

from rlvr.cli.main import run
from rlvr.clients.vllm.vllm_clients import connect_servers
from rlvr.clients.vllm.vllm_options import SamplerError
from rlvr.core.messages import Datum, ModelInput, SamplingParams
from rlvr.tinker_server.backend.request_futures import JsonResult, ProtoResult
from rlvr.tinker_server.backend.runs.run_operations import SaveForSampler
from rlvr.tinker_server.backend.sampling.vllm_sampling import PublishedAdapters
from rlvr.tinker_server.backend.tinker_backend import TinkerBackend
from rlvr.tinker_server.http.app import create_app
from rlvr.tinker_server.protocol import proto
from rlvr.tinker_server.protocol.errors import GoneError
from rlvr.tinker_server.protocol.server_limits import ServerLimits
from rlvr.tinker_server.server_settings import ServerSamplers
from rlvr.web.auth import ApiKeys
from tests.kit.model_shell import write_model_shell
from tests.kit.open_server import request
from tests.kit.rounding import close_logprobs
from tests.kit.tinker_backend import (
    MODEL,
    BackendClient,
    assert_failed,
    forward_backward,
    read_logprobs,
    sampled_tokens,
    tiny_engine,
    train,
)
from tests.kit.tinker_server import serving
from tests.kit.tiny import WORDS
from tests.kit.vllm_runs import make_engine
from tests.kit.vllm_server import BASE, FakeVllm, serve_vllm

PROMPT = [1, 10, 2, 13]
PLAIN = SamplingParams(max_tokens=8, seed=3, stop=[])


class Server:
    """Fake vLLM servers, and Tinker servers that sample by them: starting another closes the one before."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.stack, self.fakes, self.urls = folder, stack, list[FakeVllm](), list[str]()
        self.backend: TinkerBackend | None = None

    def add(self, fake: FakeVllm | None = None) -> FakeVllm:
        self.fakes.append(fake or FakeVllm(tiny_engine, max_model_len=256))
        self.urls.append(self.stack.enter_context(serve_vllm(self.fakes[-1])))
        return self.fakes[-1]

    def connect(self, rank: int = 8, **options: Any) -> PublishedAdapters:
        servers = ServerSamplers(self.urls, **{"wait_s": 0.2, "timeout_s": 5.0, **options})
        publisher = connect_servers(servers.options(), keep=sys.maxsize)
        adapters = PublishedAdapters(tiny_engine(), publisher, self.folder / "published", servers.adapters)
        adapters.check(rank)
        return adapters

    def start(self, owner_samples: int = 100, **options: Any) -> TinkerBackend:
        self.close()
        adapters = self.connect(**options)
        limits = ServerLimits(stop_seconds=1.0, owner_samples=owner_samples)
        self.backend = TinkerBackend(
            {MODEL: adapters.engine}, self.folder / "state", samplers={MODEL: adapters}, limits=limits
        )
        return self.backend

    @property
    def published(self) -> list[str]:
        """The adapters' folders."""
        return sorted(path.name for path in (self.folder / "published").glob("published-*"))

    def close(self) -> None:
        if self.backend is not None:
            self.backend.close()
            self.backend = None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with ExitStack() as stack:
        made = Server(tmp_path, stack)
        yield made
        made.close()


class Tenant(BackendClient):
    """Saves its weights for sampling, and samples from them. Numbers the requests."""

    def __init__(self, backend: TinkerBackend, owner: str, steps: int = 1, **options: Any) -> None:
        super().__init__(backend, owner)
        self.seq, self.samples = 0, 0  # of the run, and of the session
        self.make(**options)
        self.train(steps)

    def train(self, steps: int = 1) -> None:
        train(self, steps, seed=len(self.owner), first=self.seq + 1)
        self.seq += 3 * steps

    def save(self, name: str = "mine") -> str:
        self.seq += 1
        outcome = self.do(self.seq, SaveForSampler(name))
        assert isinstance(outcome, JsonResult)
        return self.open(outcome.value["path"])

    def open(self, path: str | None = None) -> str:
        self.samples += 1
        base = MODEL if path is None else None
        return self.backend.sampling.create_sampler(self.owner, self.session, self.samples, base, path)

    def ask(self, sampler: str, params: SamplingParams = PLAIN, count: int = 2, **options: Any) -> str:
        self.samples += 1
        asked = self.backend.sampling.sample
        return asked(self.owner, sampler, self.samples, ModelInput(PROMPT), count, params, options)[0]

    def sample(self, sampler: str, params: SamplingParams = PLAIN, **options: Any) -> Any:
        return self.wait(self.ask(sampler, params, **options))

    def score(self, tokens: list[int]) -> list[float]:
        """The log-probs of a completion by the weights as they are, computed by the server itself."""
        self.seq += 1
        row = Datum.from_completion(PROMPT, tokens)
        asked = forward_backward(self.run, self.seq, [row], forward_only=True)
        return read_logprobs(self.do(self.seq, asked))[0][len(PROMPT) - 1 :]


def read_samples(outcome: Any) -> list[tuple[list[int], list[float]]]:
    assert isinstance(outcome, ProtoResult), outcome
    sequences = proto.SampleResponse.FromString(outcome.body).sequences
    return [(np.frombuffer(s.tokens, "<i4").tolist(), np.frombuffer(s.logprobs, "<f4").tolist()) for s in sequences]


def models_asked(fake: FakeVllm) -> list[str]:
    """The models that clients sampled from, in order."""
    return [body["model"] for _, body in fake.requests if "n" in body.get("sampling_params", {})]


def test_each_tenant_is_sampled_by_its_own_adapter_at_the_servers(server: Server) -> None:
    fake = server.add()
    backend = server.start()
    anna, bob = Tenant(backend, "anna", steps=0), Tenant(backend, "robert", steps=2)  # a fresh adapter is sampled too
    for tenant in (anna, bob):
        samples = read_samples(tenant.sample(tenant.save()))
        assert [len(tokens) for tokens, _ in samples] == [8, 8]
        for tokens, logprobs in samples:
            assert logprobs == close_logprobs(tenant.score(tokens))
    first, second = models_asked(fake)
    assert {first, second} == set(fake.adapters) and len(server.published) == 2
    read_samples(anna.sample(anna.open()))
    assert models_asked(fake)[2:] == [BASE]
    [state] = backend.describe_engines()
    assert state.counters.sampled_tokens == 3 * 2 * 8
    server.close()
    assert not fake.adapters and not server.published


def test_new_weights_get_a_new_name_and_the_least_recently_used_are_unloaded(server: Server) -> None:
    fake = server.add()
    anna = Tenant(server.start(adapters=2), "anna")
    samplers = [anna.save(name) for name in ("a", "b", "c")]
    before = [sampled_tokens(anna.sample(sampler)) for sampler in samplers]
    a, b, c = models_asked(fake)
    assert set(fake.adapters) == {b, c} and [f"published-{name}" for name in (b, c)] == server.published
    assert sampled_tokens(anna.sample(samplers[0])) == before[0]  # published again
    again = models_asked(fake)[-1]
    assert set(fake.adapters) == {c, again} and again not in (a, b, c)


def test_weights_that_their_owner_deleted_are_unloaded_with_the_next_publish(server: Server) -> None:
    fake = server.add()
    anna = Tenant(backend := server.start(), "anna")
    anna.sample(anna.save("old"))
    backend.checkpoints.delete("anna", f"tinker://{anna.run}/sampler_weights/old")
    anna.sample(anna.save("new"))
    assert list(fake.adapters) == models_asked(fake)[1:] and len(server.published) == 1


@pytest.mark.parametrize(
    ("params", "options"),
    [
        ({"top_k": 3}, {}),
        ({"top_p": 0.5}, {}),
        ({"max_tokens": 100}, {}),  # of 64 at the server
        ({}, {"prompt_logprobs": True}),
        ({}, {"topk_sample": 2}),
        ({}, {"topk_prompt": 2}),
    ],
)
def test_what_vllm_cannot_give_comes_from_the_engine(server: Server, params: Any, options: Any) -> None:
    fake = server.add(FakeVllm(tiny_engine, max_model_len=64))
    anna = Tenant(server.start(), "anna")
    sampler = anna.save()
    given = {"max_tokens": 8, "seed": 3, "stop": [], **params}
    assert len(sampled_tokens(anna.sample(sampler, SamplingParams(**given), **options))) == 2
    assert models_asked(fake) == []


def test_a_wrong_request_is_the_users_and_never_reaches_a_server(server: Server) -> None:
    fake = server.add()
    anna = Tenant(server.start(), "anna")
    assert_failed(anna.sample(anna.open(), SamplingParams(max_tokens=8, stop=[""])), "empty stop string")
    assert models_asked(fake) == []


def test_a_restarted_server_gets_its_adapters_again(server: Server) -> None:
    fake = server.add()
    anna = Tenant(server.start(), "anna")
    sampler = anna.save()
    before = sampled_tokens(anna.sample(sampler))
    fake.restart()
    assert sampled_tokens(anna.sample(sampler)) == before


def test_what_a_killed_server_left_is_deleted_at_the_next_start(server: Server) -> None:
    fake = server.add()
    anna = Tenant(server.start(), "anna")
    anna.sample(anna.save())
    [name] = fake.adapters
    kept = server.folder / "published" / f"published-{name}"
    shutil.copytree(kept, left := kept.with_name("published-adapter-9-0123456789ab"))
    server.close()
    fake.answer("/v1/load_lora_adapter", {"lora_name": "adapter-9-0123456789ab", "lora_path": str(left)})
    server.connect().close(5.0)
    assert not fake.adapters and not server.published


WENT_WRONG = "a sampling server did not give what was asked for; its log has"


def test_stale_weights_are_the_servers_failure_and_both_names_are_in_its_log(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    fake = server.add()
    anna = Tenant(server.start(), "anna")
    anna.sample(anna.save("old"))
    [old], given = fake.adapters, fake.answer

    def serve_old(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/load_lora_adapter":
            body = {**body, "lora_path": str(server.folder / "published" / f"published-{old}")}
        return given(path, body)

    fake.answer = serve_old  # type: ignore[method-assign]
    anna.train()
    sampler = anna.save("new")
    assert_failed(anna.sample(sampler), WENT_WRONG, category="server")
    assert "given the weights adapter-" in caplog.text and f"as {old} does" in caplog.text
    fake.answer = given  # type: ignore[method-assign]
    assert len(sampled_tokens(anna.sample(sampler))) == 2  # the next request publishes them anew
    new = models_asked(fake)[-1]
    fake.fault = lambda path, body, answer: {**answer, "model": old} if body.get("model") == new else answer
    assert_failed(anna.sample(sampler), WENT_WRONG, category="server")
    assert f"weights {old!r}" in caplog.text and f"expected {new!r}" in caplog.text


def test_a_rank_above_the_servers_is_refused_with_the_option_to_change(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.add()
    with pytest.raises(SamplerError, match=r"rank 32.*--max-lora-rank"):
        server.connect(rank=32)
    anna = Tenant(server.start(), "anna", rank=32)
    assert_failed(anna.sample(anna.save()), WENT_WRONG, category="server")
    assert "--max-lora-rank" in caplog.text
    assert not server.published


class SlowCalls:
    """Calls of `path` for adapters that `is_slow` are counted, and wait until `release` is set, or for `seconds`."""

    def __init__(self, fake: FakeVllm, path: str, is_slow: Callable[[str], bool], seconds: float) -> None:
        self.release, self.count = threading.Event(), 0
        given = fake.answer

        def answer(asked: str, body: dict[str, Any]) -> tuple[int, Any]:
            if asked == path and is_slow(body["lora_name"]):
                self.count += 1
                self.release.wait(seconds)
            return given(asked, body)

        fake.answer = answer  # type: ignore[method-assign]

    def wait_for(self, count: int) -> None:
        while self.count < count:
            time.sleep(0.01)


def test_two_publications_that_unload_the_same_adapters_do_not_meet(server: Server) -> None:
    fake = server.add()
    backend = server.start()
    tenants = Tenant(backend, "anna"), Tenant(backend, "robert", steps=2)
    for tenant in tenants:
        tenant.sample(tenant.save("old"))
    for tenant in tenants:
        backend.checkpoints.delete(tenant.owner, f"tinker://{tenant.run}/sampler_weights/old")
    samplers = [tenant.save("new") for tenant in tenants]
    SlowCalls(fake, "/v1/unload_lora_adapter", set(fake.adapters).__contains__, 0.5)
    asked = [tenant.ask(sampler) for tenant, sampler in zip(tenants, samplers, strict=True)]
    for tenant, sampler, one in zip(tenants, samplers, asked, strict=True):
        sampled_tokens(tenant.wait(one))
        sampled_tokens(tenant.sample(sampler))
    assert len(fake.adapters) == 2


def test_an_adapter_that_is_loaded_samples_while_another_is_being_loaded(server: Server) -> None:
    fake = server.add()
    backend = server.start()
    anna, bob = Tenant(backend, "anna"), Tenant(backend, "robert", steps=2)
    mine = anna.save()
    anna.sample(mine)
    slow = SlowCalls(fake, "/v1/load_lora_adapter", lambda name: True, 4.0)
    other = bob.ask(bob.save())
    slow.wait_for(1)
    sampled_tokens(anna.sample(mine))
    assert len(fake.adapters) == 1, "the other one is still being loaded"
    slow.release.set()
    sampled_tokens(bob.wait(other))


def test_with_all_servers_down_the_client_sends_its_request_again(server: Server) -> None:
    server.add()
    anna = Tenant(server.start(), "anna")
    sampler = anna.save()
    server.stack.close()
    with pytest.raises(GoneError, match="no sampling server answered"):
        anna.sample(sampler)


@pytest.mark.slow
def test_a_server_that_dies_is_left_for_the_next_and_with_all_dead_the_client_sends_again(server: Server) -> None:
    fakes = [server.add(), server.add()]
    anna = Tenant(server.start(timeout_s=1.0), "anna")
    sampler = anna.save()
    before = sampled_tokens(anna.sample(sampler))
    [busy] = [fake for fake in fakes if models_asked(fake)]
    busy.delay = 2.0  # beyond the deadline
    assert sampled_tokens(anna.sample(sampler)) == before
    for fake in fakes:
        fake.delay = 2.0
    asked = anna.ask(sampler)
    with pytest.raises(GoneError):
        anna.wait(asked)
    for fake in fakes:
        fake.delay = 0.0
    anna.samples -= 1
    assert anna.ask(sampler) == asked and sampled_tokens(anna.wait(asked)) == before


def test_a_cancelled_sample_ends_and_gives_its_quota_back(server: Server) -> None:
    fake = server.add()
    anna = Tenant(backend := server.start(concurrency=1, owner_samples=3), "anna")
    sampler = anna.open()
    fake.delay = 0.5
    asked = [anna.ask(sampler) for _ in range(3)]
    for sample in asked[:2]:  # one runs, one waits
        backend.sampling.cancel("anna", sample)
        assert_failed(anna.wait(sample, 0.4), "cancelled")
    asked += [anna.ask(sampler) for _ in range(2)]  # `Busy` if the cancelled ones still counted
    assert len(sampled_tokens(anna.wait(asked[-1]))) == 2


def test_many_requests_of_one_owner_leave_room_for_another(server: Server) -> None:
    fake = server.add()
    anna, bob = (Tenant(server.backend or server.start(concurrency=2), owner) for owner in ("anna", "bob"))
    samplers = [tenant.open() for tenant in (anna, bob)]
    fake.delay = 0.05
    many = [anna.ask(samplers[0]) for _ in range(12)]
    bob.sample(samplers[1], replace(PLAIN, temperature=0.5))
    for sample in many:
        anna.wait(sample)
    asked = [body["sampling_params"] for _, body in fake.requests if "n" in body.get("sampling_params", {})]
    assert len(asked) == 13 and [params["temperature"] for params in asked].index(0.5) < 10


def test_the_open_endpoints_sample_at_the_servers_and_ask_their_clients_to_repeat(server: Server) -> None:
    fake = server.add()
    with serving(create_app(server.start(), ApiKeys([]))) as port:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "seed": 1}
        assert request(port, "/v1/completions", body)[0] == 200 and models_asked(fake) == [BASE]
        server.stack.close()
        status, told = request(port, "/v1/completions", body)
        assert status == 429 and "send the request again" in told["error"]["message"]


@pytest.mark.parametrize("wrong", ["model", "words"])
def test_a_server_with_another_model_is_refused_at_the_start(server: Server, wrong: str) -> None:
    server.add(FakeVllm(make_engine if wrong == "model" else lambda: make_engine(words=[*WORDS[1:], "x"])))
    with pytest.raises((SamplerError, ValueError), match="another base model" if wrong == "model" else "tokenizer"):
        server.connect()


def test_two_servers_cannot_publish_to_one_folder(server: Server) -> None:
    server.add()
    server.start()
    with pytest.raises(ValueError, match=r"sampler.folder=.*in use by another server"):
        server.connect()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--samplers", "http://127.0.0.1:9"], 1, "http://127.0.0.1:9/v1/models cannot be reached"),
        (["--samplers", "localhost:8790"], 2, "expected an address without a path, such as"),
        (["--samplers-folder", "shared"], 2, "sampler.folder=shared has no effect without sampler.urls"),
        (["--samplers", "http://h:1", "--model", "other=OTHER"], 2, "2 base models are given"),
        (["sampler.urls=[http://127.0.0.1:9]", "sampler.wait_s=-1"], 2, "sampler.wait_s=-1"),
        (["sampler.adapters=0"], 2, "greater than 0"),
    ],
)
def test_a_mistake_is_one_message_before_a_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, said: str
) -> None:
    for name in ("model", "other"):
        write_model_shell(tmp_path / name)  # nothing here gets as far as loading it
    words = [word.replace("OTHER", str(tmp_path / "other")) for word in words]
    start = ["serve", "engine", "--model", str(tmp_path / "model"), "--port", "0", "--state", str(tmp_path / "state")]
    assert run([*start, *words]) == code
    told = capsys.readouterr().err
    assert said in told and "Traceback" not in told
