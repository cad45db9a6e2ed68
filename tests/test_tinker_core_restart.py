"""Who waits for samples of a server that was killed; a second server on the same state; a disk that is full."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("google.protobuf")

from tinker_core import MODEL, Client, Started, sampled
from tinker_model import write_model
from tinker_server import TinkerServer

from rlvr.messages import ModelInput, SamplingParams
from rlvr.service.tinker_api.errors import Gone


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

        command = [sys.executable, "-m", "rlvr.cli", "serve", "engine", "--model", str(tmp_path / "model")]
        command += ["--state", str(tmp_path / "state"), "--port", "0", "--device", "cpu"]
        second = subprocess.run(command, capture_output=True, text=True, timeout=90)
        assert second.returncode == 2 and "in use by another server" in second.stderr
        assert "Traceback" not in second.stderr
        service.close("success").result()
    del service, sampler, futures
    gc.collect()  # here, where its warnings are expected
