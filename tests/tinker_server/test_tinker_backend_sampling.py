"""The core of the Tinker server as a sampler: which weights answer, beside whom, and for how long they are kept."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

pytest.importorskip("google.protobuf")

from rlvr.core.messages import ModelInput, SamplingParams
from rlvr.tinker_server.backend.request_futures import JsonResult, Pending
from rlvr.tinker_server.backend.runs.run_operations import SaveForSampler, SaveWeights
from rlvr.tinker_server.backend.storage.paths import CheckpointPath
from rlvr.tinker_server.backend.tinker_backend import TinkerBackend
from rlvr.tinker_server.protocol.errors import GoneError, NotFound
from tests.kit.tinker_backend import (
    MODEL,
    BackendClient,
    ServerFactory,
    counters,
    forward_backward,
    sampled_tokens,
    tiny_engine,
    train,
)
from tests.kit.tiny import data


def test_sampling_goes_on_during_training(new_server: ServerFactory) -> None:
    client, sampler = BackendClient(backend := new_server()), BackendClient(backend, "bob")
    client.make()
    base = backend.sampling.create_sampler("bob", sampler.session, 1, MODEL)
    queue = [client.gradients(seq, seed=seq) for seq in range(1, 61)]
    request, ids = backend.sampling.sample(
        "bob", base, 1, ModelInput([1, 2, 3]), 2, SamplingParams(max_tokens=8, stop=[])
    )
    assert [len(tokens) for tokens in sampled_tokens(sampler.wait(request))] == [8, 8] and len(set(ids)) == 2
    assert isinstance(asyncio.run(backend.result("anna", queue[-1], 0)), Pending)
    client.wait(queue[-1])


@pytest.mark.slow
def test_sampling_goes_on_within_a_long_request_and_changes_no_bit_of_it(new_server: ServerFactory) -> None:
    """A sampling request waits for one micro-batch, not for all; gradients are those of an idle server."""
    rows = data(lengths=[9] * 400)

    def train_policy(backend: TinkerBackend) -> tuple[BackendClient, str]:
        client = BackendClient(backend)
        client.make()
        return client, client.send(1, forward_backward(client.run, 1, rows, "ppo"))

    client, long = train_policy(backend := new_server(engine=tiny_engine(micro_tokens=18)))
    base = backend.sampling.create_sampler("anna", client.session, 1, MODEL)
    before: list[bool] = []
    for seq in range(3):
        asked = SamplingParams(max_tokens=4, stop=[], seed=seq)
        client.wait(backend.sampling.sample("anna", base, seq, ModelInput([1, 2]), 2, asked)[0])
        before.append(isinstance(asyncio.run(backend.result("anna", long, 0)), Pending))
    assert before == [True] * 3
    told = [client.wait(long), client.wait(client.step(2))]
    quiet, same = train_policy(new_server(engine=tiny_engine(micro_tokens=18)))
    assert [quiet.wait(same), quiet.wait(quiet.step(2))] == told


def test_samples_come_from_the_weights_of_their_session(new_server: ServerFactory) -> None:
    """The base model's, those of a save, those of a moment: the same before and after a restart."""
    client = BackendClient(new_server())
    client.make()
    train(client, 2, seed=0)
    client.do(7, SaveForSampler(None, 5))
    named = client.do(8, SaveForSampler("named"))
    assert isinstance(named, JsonResult)
    train(client, 1, seed=3, first=9)
    client.do(12, SaveForSampler(None, 6))
    backend = client.backend
    sessions = [
        backend.sampling.create_sampler("anna", client.session, 7, MODEL),
        backend.sampling.create_sampler("anna", client.session, 8, model_path=named.value["path"]),
        *(f"{client.session}:sample:{n}" for n in (5, 6)),
    ]

    def metadata_texts(seed: int) -> list[list[list[int]]]:
        asked = SamplingParams(max_tokens=12, seed=seed, stop=[])
        ids = [client.backend.sampling.sample("anna", s, seed, ModelInput([1, 2, 3]), 4, asked)[0] for s in sessions]
        return [sampled_tokens(client.wait(i)) for i in ids]

    base, save, moment, later = first = metadata_texts(1)
    assert save == moment and len({str(t) for t in (base, moment, later)}) == 3
    lost = backend.sampling.sample("anna", sessions[0], 99, ModelInput([1]), 1, SamplingParams(max_tokens=2))[0]
    client.backend = new_server()
    with pytest.raises(GoneError):
        client.wait(lost)
    assert metadata_texts(1) == first
    assert client.backend.sampling.describe("anna", sessions[1])["model_path"] == named.value["path"]


def test_a_sample_that_is_over_leaves_its_place_to_the_owners_next_one(new_server: ServerFactory) -> None:
    client = BackendClient(new_server(owner_samples=1))
    base = client.backend.sampling.create_sampler("anna", client.session, 1, MODEL)
    for seq in range(3):
        assert len(sampled_tokens(client.wait(asks(client.backend, base, seq, tokens=2)))) == 4


def test_the_weights_that_were_sampled_from_last_stay_in_memory(
    new_server: ServerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two saves and room for one: each is read from its file when another was sampled from before it, else not."""
    engine, read = tiny_engine(), list[str]()
    load = engine.load_snapshot
    monkeypatch.setattr(engine, "load_snapshot", lambda folder: read.append(Path(folder).name) or load(folder))
    client = BackendClient(new_server(engine=engine, loaded_samplers=1))
    client.make()
    for number, seq in enumerate((1, 4)):
        client.gradients(seq, seed=number), client.step(seq + 1)
        client.do(seq + 2, SaveForSampler(None, number))
    first, second = (f"{client.session}:sample:{number}" for number in range(2))
    client.wait(asks(client.backend, first, 1, tokens=2))
    read.clear()
    for seq, sampler in enumerate((first, second, second, first, first)):
        client.wait(asks(client.backend, sampler, seq + 2, tokens=2))
    assert read == ["6", "3"]


def test_weights_saved_again_under_their_name_are_the_ones_sampled_from(new_server: ServerFactory) -> None:
    """And a run whose adapter went to disk meanwhile leaves its samplers as they were."""
    client = BackendClient(new_server(live_policies=1))
    client.make()
    asked = SamplingParams(max_tokens=12, seed=1, stop=[])
    told: list[list[list[int]]] = []
    for n in range(2):
        train(client, 2, seed=n, first=7 * n + 1)
        saved = client.do(7 * n + 7, SaveForSampler("mine"))
        assert isinstance(saved, JsonResult)
        sampler = client.backend.sampling.create_sampler("anna", client.session, n, model_path=saved.value["path"])
        request = client.backend.sampling.sample("anna", sampler, 1, ModelInput([1, 2, 3]), 4, asked)[0]
        told.append(sampled_tokens(client.wait(request)))
    assert told[0] != told[1]
    client.do(15, SaveForSampler(None, 50))
    other = BackendClient(client.backend, "bob")
    other.make()
    train(other, 1, seed=3)
    request = client.backend.sampling.sample("anna", f"{client.session}:sample:50", 1, ModelInput([1, 2, 3]), 4, asked)[
        0
    ]
    assert sampled_tokens(client.wait(request)) == told[1]


def test_a_session_keeps_the_weights_it_was_opened_on_when_their_name_is_saved_to_again(
    new_server: ServerFactory,
) -> None:
    """Before and after a restart; what no open session samples from goes, and of the others the newest few stay."""
    limits = {"replaced_samplers": 2, "snapshot_steps": 1, "snapshot_share": 1e6}
    client = BackendClient(new_server(**limits))
    client.make()
    asked = SamplingParams(max_tokens=12, seed=1, stop=[])

    def text(n: int, seq: int) -> list[list[int]]:
        sampler = f"{client.session}:sample:{n}"
        return sampled_tokens(
            client.wait(client.backend.sampling.sample("anna", sampler, seq, ModelInput([1, 2, 3]), 4, asked)[0])
        )

    def saved_and_opened(n: int) -> None:
        train(client, 2, seed=n, first=7 * n + 1)
        saved = client.do(7 * n + 7, SaveForSampler("mine"))
        assert isinstance(saved, JsonResult)
        client.backend.sampling.create_sampler("anna", client.session, n, model_path=saved.value["path"])

    saved_and_opened(0)
    first = text(0, 1)
    saved_and_opened(1)
    second = text(1, 1)
    assert first == text(0, 2) != second
    client.backend = new_server(**limits)
    assert (text(0, 3), text(1, 3)) == (first, second)
    saved_and_opened(2)
    saved_and_opened(3)
    with pytest.raises(NotFound, match="more than 2 times"):
        text(0, 4)
    assert text(1, 4) == second
    folder = client.backend.checkpoints.folder(CheckpointPath(client.run, "sampler_weights", "mine"), 28).parent
    assert {f.name for f in folder.iterdir()} == {"14", "21", "28"}
    client.backend.finish_session("anna", client.session, "success")
    client.do(29, SaveForSampler("mine"))
    assert [f.name for f in folder.iterdir()] == ["29"]


def test_a_replayed_log_neither_refuses_nor_reverts_saves(new_server: ServerFactory, tmp_path: Path) -> None:
    """Of two saves under a name the first was no overwrite; after a kill both replies are repeated unchanged."""
    client = BackendClient(new_server())
    client.make()
    told = [client.do(1, SaveWeights("mine"))]
    train(client, 1, seed=0, first=2)
    told.append(client.do(5, SaveWeights("mine", overwrite=True)))
    told.append(client.do(6, SaveWeights("once")))
    last = counters(tmp_path, client.run, "mine")
    for engine_thread, adapters in zip(
        client.backend._engine_threads.values(), client.backend._adapters.values(), strict=True
    ):
        engine_thread.stop()  # and no snapshot: as after a kill
        adapters.close = lambda: None
    client.backend = new_server()
    assert [client.wait(f"{client.run}:{seq}") for seq in (1, 5, 6)] == told
    assert counters(tmp_path, client.run, "mine") == last and last["version"] == 1


def test_only_the_newest_unnamed_samplers_are_kept_and_inflight_ones_follow(new_server: ServerFactory) -> None:
    client = BackendClient(new_server(ephemeral_samplers=2))
    client.make()
    client.do(1, SaveForSampler(None, 100, kind="inflight"))
    asked = SamplingParams(max_tokens=12, seed=1, stop=[])

    def text(n: int, seq: int) -> list[list[int]]:
        sampler = f"{client.session}:sample:{n}"
        return sampled_tokens(
            client.wait(client.backend.sampling.sample("anna", sampler, seq, ModelInput([1, 2, 3]), 4, asked)[0])
        )

    before = text(100, 1)
    train(client, 2, seed=0, first=2)
    client.do(8, SaveForSampler(None, 101, kind="inflight"))
    client.do(9, SaveForSampler(None, 102))
    client.do(10, SaveForSampler(None, 103))
    assert text(103, 1) == text(102, 1) != before
    with pytest.raises(NotFound, match="newest 2 saves"):
        text(100, 2)


def test_a_repeated_message_is_one_sample_and_its_draws_follow_its_number(new_server: ServerFactory) -> None:
    client = BackendClient(backend := new_server())
    base = backend.sampling.create_sampler("anna", client.session, 1, MODEL)
    asked = SamplingParams(max_tokens=10, stop=[])
    ids = [backend.sampling.sample("anna", base, n, ModelInput([1, 2]), 3, asked)[0] for n in (1, 1, 2)]
    assert ids[0] == ids[1] != ids[2]
    first, _, other = (sampled_tokens(client.wait(i)) for i in ids)
    assert first != other
    cursor, finished = asyncio.run(backend.sampling.wait_for_any("anna", base, 0, 0, [], 5))
    assert {r for r, bad, _ in finished} == {ids[0], ids[2]}
    assert asyncio.run(backend.sampling.wait_for_any("anna", base, 0, cursor, [ids[0]], 0)) == (cursor, [])


def asks(backend: TinkerBackend, sampler: str, seq: int = 1, tokens: int = 240) -> str:
    return backend.sampling.sample(
        "anna", sampler, seq, ModelInput([1, 2]), 4, SamplingParams(max_tokens=tokens, stop=[])
    )[0]


@pytest.mark.slow
def test_samples_of_a_vanished_client_are_cancelled_and_may_be_sent_again(new_server: ServerFactory) -> None:
    """Who is silent is gone after a while; a heartbeat, or asking for the result, is enough to be there."""
    backend = new_server(session_seconds=1.0)
    clients = [BackendClient(backend) for _ in range(4)]
    bases = [backend.sampling.create_sampler("anna", client.session, 1, MODEL) for client in clients]
    hold(backend)  # nothing is computed meanwhile
    silent, beating, polling, closed = requests = [asks(backend, base) for base in bases]
    backend.finish_session("anna", clients[3].session, "success")
    with pytest.raises(GoneError):
        clients[3].wait(closed)
    for _ in range(8):
        time.sleep(0.2)
        backend.sessions.heartbeat("anna", clients[1].session)
        assert isinstance(asyncio.run(backend.result("anna", polling, 0)), Pending)
    with pytest.raises(GoneError, match="send the request again"):
        clients[0].wait(silent)
    cursor, told = asyncio.run(backend.sampling.wait_for_any("anna", bases[0], 0, 0, [], 0))
    assert [(sample.request_id, sample.is_failed) for sample in told] == [(silent, True)], (
        "who waits for any hears of it"
    )
    assert asks(backend, bases[0]) == silent, "the same message is the same request, and runs now"
    assert asyncio.run(backend.sampling.wait_for_any("anna", bases[0], 0, cursor, [], 0)) == (cursor, [])
    let_go(backend)
    for request in (silent, beating, polling):
        while isinstance(outcome := asyncio.run(backend.result("anna", request, 0.2)), Pending):
            for client in clients[:3]:
                backend.sessions.heartbeat("anna", client.session)
        assert [len(tokens) for tokens in sampled_tokens(outcome)] == [240] * 4
    assert backend._quotas._samples == {} and len(set(requests)) == 4
    assert asyncio.run(backend.sampling.wait_for_any("anna", bases[0], 0, cursor, [], 0))[1][0][:2] == (silent, False)


def hold(backend: TinkerBackend) -> None:
    """Keep the engine's thread from computing."""
    for engine in backend.engines.values():
        engine.lock.acquire()


def let_go(backend: TinkerBackend) -> None:
    for engine in backend.engines.values():
        engine.lock.release()
