"""Who waits for samples of a server that was killed; a second server on the same state; a disk that is full."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
from pathlib import Path

import pytest

pytest.importorskip("google.protobuf")

from rlvr.core.messages import ModelInput, SamplingParams
from rlvr.tinker_server.backend.request_futures import JsonResult, ProtoResult
from rlvr.tinker_server.backend.runs.run_operations import decode, encode
from rlvr.tinker_server.backend.storage.server_store import LogEntry
from rlvr.tinker_server.protocol.errors import GoneError, ServerError
from tests.kit.forked_process import run_forked
from tests.kit.tinker_backend import MODEL, BackendClient, ServerFactory, assert_failed, counters, sampled_tokens, train
from tests.kit.tinker_model import write_model
from tests.kit.tinker_server import TinkerServer

# Entries as an earlier version wrote them, with the beginning of their digests: a server goes on with such a log.
LOGGED = [
    ("optim_step", "6b8896f014f5", '{"adam": {"learning_rate": 0.5, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, '
     '"weight_decay": 0.0, "grad_clip_norm": 0.0}}'),
    ("save_weights", "322ac2b75fee", '{"name": "w", "ttl": 3600.0, "overwrite": true, "metadata": {"a": 1}}'),
    ("save_for_sampler", "d1b224a6cba7",
     '{"name": null, "sampling_session_seq_id": 2, "kind": "snapshot", "ttl": null, "metadata": null}'),
    ("save_external", "3f234d61a2cf", '{"name": "e", "ttl": null, "recipients": ["age1"]}'),
    ("load_weights", "b2a1dabd0619", '{"path": "tinker://r/weights/w", "optimizer": true}'),
    ("broken", "ddb91691da9a", '{"reason": "no", "category": "user"}'),
    ("create", "eda20deb261e", '{"rank": 4, "alpha": 32.0, "seed": 7, "attn": true, "mlp": true, "unembed": false, '
     '"path": null, "optimizer": false, "critic": true}'),
]  # fmt: skip


@pytest.mark.parametrize(("name", "digest", "body"), LOGGED)
def test_an_entry_of_an_older_log_is_read_and_written_the_same(name: str, digest: str, body: str) -> None:
    entry = encode("run", 1, decode(LogEntry("run", 1, name, "", body.encode())))
    assert (entry.kind, entry.digest[:12], entry.body.decode()) == (name, digest, body)


@pytest.mark.slow
def test_after_a_restart_clients_learn_which_samples_are_lost(new_server: ServerFactory) -> None:
    """Also a client that waits with one poll, at the place where it was: what is new comes after it."""
    client = BackendClient(backend := new_server())
    base = backend.sampling.create_sampler("anna", client.session, 1, MODEL)

    def ask(seq: int, tokens: int) -> str:
        asked = SamplingParams(max_tokens=tokens, stop=[])
        return client.backend.sampling.sample("anna", base, seq, ModelInput([1, 2]), 1, asked)[0]

    async def list_finished(cursor: int, timeout: float = 5) -> tuple[int, list[tuple[str, bool]]]:
        cursor, told = await client.backend.sampling.wait_for_any("anna", base, 0, cursor, [], timeout)
        return cursor, [(request, bad) for request, bad, _ in told]

    done = ask(1, 2)
    client.wait(done)
    cursor, told = asyncio.run(list_finished(0))
    assert told == [(done, False)]
    waiting = [ask(seq, 250) for seq in (2, 3)]
    client.backend = new_server()
    later, told = asyncio.run(list_finished(cursor, 0))
    assert told == [(request, True) for request in waiting] and later > cursor
    for request in waiting:
        with pytest.raises(GoneError):
            client.wait(request)
    again = ask(2, 250)
    assert again == waiting[0] and len(sampled_tokens(client.wait(again))[0]) == 250
    assert asyncio.run(list_finished(later))[1] == [(again, False)]
    client.backend = new_server()
    assert [request for request, _ in asyncio.run(list_finished(0, 0))[1]] == [waiting[1]], "what was fetched is over"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # the SDK's connections
@pytest.mark.timeout(240)
def test_the_sdk_gets_its_samples_despite_a_kill_and_a_second_server_is_refused(tmp_path: Path) -> None:
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

        command = ["-m", "rlvr.cli.main", "serve", "engine", "--model", str(tmp_path / "model")]
        command += ["--state", str(tmp_path / "state"), "--port", "0", "--device", "cpu"]
        second = run_forked(command, timeout=90)
        assert second.returncode == 2 and "in use by another server" in second.stderr
        assert "Traceback" not in second.stderr
        service.close("success").result()
    del service, sampler, futures
    gc.collect()  # here, where its warnings are expected


def test_a_log_that_cannot_be_written_fails_the_request_only(new_server: ServerFactory, tmp_path: Path) -> None:
    """Nothing is lost or made twice: not for others, not for who sends it again, not for who goes on without it."""
    backend = new_server(snapshot_steps=10_000)
    clients = [BackendClient(backend, owner) for owner in ("anna", "bob", "carl")]
    base = backend.sampling.create_sampler("bob", clients[1].session, 1, MODEL)
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
            backend.sessions.create("dora")
        assert all(isinstance(carl.wait(request), ProtoResult) for request in running)
        asked = backend.sampling.sample("bob", base, 1, ModelInput([1]), 1, SamplingParams(max_tokens=3, stop=[]))[0]
        assert len(sampled_tokens(bob.wait(asked))[0]) == 3
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_failed(anna.wait(anna.step(5)), "no gradients")  # 4 was refused and did not come again
    assert_failed(anna.wait(f"{anna.run}:4"), "disk", category="server")
    assert isinstance(anna.wait(anna.gradients(6, seed=5)), ProtoResult) and isinstance(
        anna.wait(anna.step(7)), JsonResult
    )
    assert isinstance(bob.wait(bob.gradients(4, seed=5)), ProtoResult) and isinstance(bob.wait(bob.step(5)), JsonResult)
    anna.save_weights(8, "end"), bob.save_weights(6, "end")
    ends = [counters(tmp_path, client.run, "end") for client in (anna, bob)]
    assert ends[0]["weights_sha256"] == ends[1]["weights_sha256"] and ends[0]["version"] == 2

    backend = new_server()  # the log is read again, refused requests and all
    for client, seq in ((anna, 9), (bob, 7)):
        client.backend = backend
        client.save_weights(seq, "again")
        assert counters(tmp_path, client.run, "again") == counters(tmp_path, client.run, "end")
