"""Who waits for samples of a server that was killed; a second server on the same state; a disk that is full."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("google.protobuf")

from tinker_core import MODEL, Client, Started, counters, failed, sampled, train
from tinker_model import write_model
from tinker_server import TinkerServer

from rlvr.messages import ModelInput, SamplingParams
from rlvr.service.tinker_api.errors import Gone, ServerError
from rlvr.service.tinker_api.promises import Json, Proto
from tests.forked import ran


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Started]:
    servers = Started(tmp_path)
    yield servers
    servers.close()


def test_after_a_restart_who_waits_is_told_what_is_lost(start: Started) -> None:
    """Also a client that waits with one poll, at the place where it was: what is new comes after it."""
    client = Client(core := start())
    base = core.create_sampler("anna", client.session, 1, MODEL)

    def ask(seq: int, tokens: int) -> str:
        asked = SamplingParams(max_tokens=tokens, stop=[])
        return client.core.sample("anna", base, seq, ModelInput([1, 2]), 1, asked)[0]

    async def finished(cursor: int, timeout: float = 5) -> tuple[int, list[tuple[str, bool]]]:
        cursor, told = await client.core.completions("anna", base, 0, cursor, [], timeout)
        return cursor, [(request, bad) for request, bad, _ in told]

    done = ask(1, 2)
    client.wait(done)
    cursor, told = asyncio.run(finished(0))
    assert told == [(done, False)]
    waiting = [ask(seq, 250) for seq in (2, 3)]
    client.core = start()
    later, told = asyncio.run(finished(cursor, 0))
    assert told == [(request, True) for request in waiting] and later > cursor
    for request in waiting:
        with pytest.raises(Gone):
            client.wait(request)
    again = ask(2, 250)
    assert again == waiting[0] and len(sampled(client.wait(again))[0]) == 250
    assert asyncio.run(finished(later))[1] == [(again, False)]
    client.core = start()
    assert [request for request, _ in asyncio.run(finished(0, 0))[1]] == [waiting[1]], "what was fetched is over"


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # the SDK's connections
@pytest.mark.timeout(240)
def test_the_sdk_gets_its_samples_over_a_kill_and_a_second_server_is_refused(tmp_path: Path) -> None:
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    tinker = pytest.importorskip("tinker", reason="the extra [tinker] is not installed")
    pytest.importorskip("fastapi", reason="the extra [serve] is not installed")
    write_model(tmp_path / "model")
    with TinkerServer({"tiny": tmp_path / "model"}, tmp_path / "state") as server:
        service = tinker.ServiceClient(base_url=server.url, api_key=server.key)
        sampler = service.create_sampling_client(base_model="tiny").result()
        asked = tinker.SamplingParams(max_tokens=200, stop=[], seed=1)
        futures = [sampler.sample(tinker.ModelInput.from_ints([n]), 8, asked) for n in range(6)]
        server.kill()
        server.start()
        assert [len(s.tokens) for f in futures for s in f.result(timeout=90).sequences] == [200] * 48

        command = ["-m", "rlvr.cli", "serve", "engine", "--model", str(tmp_path / "model")]
        command += ["--state", str(tmp_path / "state"), "--port", "0", "--device", "cpu"]
        second = ran(command, timeout=90)
        assert second.returncode == 2 and "in use by another server" in second.stderr
        assert "Traceback" not in second.stderr
        service.close("success").result()
    del service, sampler, futures
    gc.collect()  # here, where its warnings are expected


def test_a_log_that_cannot_be_written_is_an_answer_and_the_server_goes_on(start: Started, tmp_path: Path) -> None:
    """Nothing is lost or made twice: not for others, not for who sends it again, not for who goes on without it."""
    core = start(snapshot_steps=10_000)
    clients = [Client(core, owner) for owner in ("anna", "bob", "carl")]
    base = core.create_sampler("bob", clients[1].session, 1, MODEL)
    for client in clients:
        client.make()
        train(client, 1, seed=0)
    anna, bob, carl = clients
    running = [carl.gradients(seq, seed=seq) for seq in (4, 5, 6)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_096, hard))
    try:
        for client in (anna, bob):
            with pytest.raises(ServerError, match="is its disk full"):
                client.gradients(4, seed=5)
        with pytest.raises(ServerError, match="is its disk full"):
            core.create_session("dora")
        assert all(isinstance(carl.wait(request), Proto) for request in running)
        asked = core.sample("bob", base, 1, ModelInput([1]), 1, SamplingParams(max_tokens=3, stop=[]))[0]
        assert len(sampled(bob.wait(asked))[0]) == 3
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    failed(anna.wait(anna.step(5)), "no gradients")  # 4 was refused and did not come again
    failed(anna.wait(f"{anna.run}:4"), "disk", category="server")
    assert isinstance(anna.wait(anna.gradients(6, seed=5)), Proto) and isinstance(anna.wait(anna.step(7)), Json)
    assert isinstance(bob.wait(bob.gradients(4, seed=5)), Proto) and isinstance(bob.wait(bob.step(5)), Json)
    anna.saved(8, "end"), bob.saved(6, "end")
    ends = [counters(tmp_path, client.run, "end") for client in (anna, bob)]
    assert ends[0]["weights_sha256"] == ends[1]["weights_sha256"] and ends[0]["version"] == 2

    core = start()  # the log is read again, refused requests and all
    for client, seq in ((anna, 9), (bob, 7)):
        client.core = core
        client.saved(seq, "again")
        assert counters(tmp_path, client.run, "again") == counters(tmp_path, client.run, "end")
