"""The core of the Tinker server: order, repetition, blame, fairness, and the bits of many runs at once."""

from __future__ import annotations

import asyncio
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("google.protobuf")

from rlvr.clients.local import LocalTrainingClient
from rlvr.core.messages import ModelInput, SamplingParams, TensorData
from rlvr.engine.engine_options import LoraConfig
from rlvr.engine.lora import lora_targets
from rlvr.tinker_server.backend.quotas import OwnerQuotas
from rlvr.tinker_server.backend.request_futures import JsonResult, Outcome, Pending, ProtoResult
from rlvr.tinker_server.backend.runs.run_operations import OptimStep, RejectedOperation, SaveForSampler, SaveWeights
from rlvr.tinker_server.backend.tinker_backend import TinkerBackend
from rlvr.tinker_server.protocol import proto
from rlvr.tinker_server.protocol.errors import Busy, GoneError, NotFound, UserError
from rlvr.tinker_server.protocol.server_limits import ServerLimits
from tests.kit.tinker_backend import (
    ADAM,
    MODEL,
    BackendClient,
    ServerFactory,
    assert_failed,
    counters,
    forward_backward,
    read_logprobs,
    sampled_tokens,
    tiny_engine,
    train,
)
from tests.kit.tiny import data


def test_a_run_has_the_bits_of_the_client_in_process(new_server: ServerFactory, tmp_path: Path) -> None:
    """Log-probs, gradient norms and weights: the server adds nothing and takes nothing."""
    client = BackendClient(new_server())
    assert isinstance(client.make(rank=4, seed=1), JsonResult)
    told = train(client, 2, seed=0)
    client.save_weights(7, "end")

    engine = tiny_engine()
    config = LoraConfig(4, 32.0, lora_targets(engine.model, attn=True, mlp=True, unembed=True))
    local = LocalTrainingClient(engine, engine.create_policy("p", lora=config, seed=1), tmp_path / "local")
    expected: list[Any] = []
    for i in range(2):
        expected += [local.forward_backward(data(seed=i), loss).result() for loss in ("cross_entropy", "ppo")]
        expected.append(local.optim_step(ADAM).result())
    for given, own in zip(told, expected, strict=True):
        if isinstance(given, JsonResult):
            assert given.value["metrics"] == own.metrics
        else:
            assert read_logprobs(given) == [row["logprobs"].tolist() for row in own.loss_fn_outputs]
    assert counters(tmp_path, client.run, "end")["weights_sha256"] == local.policy.sha256()


def test_requests_run_in_order_of_seq_id_however_they_arrive(new_server: ServerFactory) -> None:
    client, other = BackendClient(backend := new_server()), BackendClient(backend)
    client.make(), other.make()
    in_order = train(client, 2, seed=0)
    asked = {
        1: forward_backward(other.run, 1, data(seed=0)),
        2: forward_backward(other.run, 2, data(seed=0), "ppo"),
        3: OptimStep(ADAM),
        4: forward_backward(other.run, 4, data(seed=1)),
        5: forward_backward(other.run, 5, data(seed=1), "ppo"),
        6: OptimStep(ADAM),
    }
    ids = {seq: other.send(seq, asked[seq]) for seq in (3, 2, 6, 5, 4)}
    time.sleep(0.2)
    assert all(isinstance(asyncio.run(backend.result("anna", i, 0)), Pending) for i in ids.values()), "1 is missing"
    ids[1] = other.send(1, asked[1])
    assert [other.wait(ids[seq]) for seq in sorted(ids)] == in_order


def test_a_repeated_request_is_the_same_one_and_another_is_refused(new_server: ServerFactory, tmp_path: Path) -> None:
    client = BackendClient(new_server(snapshot_steps=1, snapshot_share=1e6))
    client.make()
    for _ in range(3):  # while it waits, when it is done, when it has left the log
        assert client.gradients(1) == f"{client.run}:1" and client.step(2) == f"{client.run}:2"
        first = [client.wait(f"{client.run}:{seq}") for seq in (1, 2)]
    assert [client.wait(client.gradients(1)), client.wait(client.step(2))] == first
    for _ in range(2):
        with pytest.raises(UserError, match="was used for another request"):
            client.gradients(1, seed=5)
        client.backend = new_server()
    client.save_weights(3, "end")
    assert counters(tmp_path, client.run, "end")["version"] == 1
    assert (
        client.backend.runs.create_model("anna", client.session, 0, MODEL, {"rank": 4, "seed": 1}) == f"{client.run}:0"
    )
    with pytest.raises(UserError, match="names the training run"):
        client.backend.runs.create_model("anna", client.session, 0, MODEL, {"rank": 8, "seed": 1})


def test_a_missing_seq_id_is_named_after_others_waited_for_it(new_server: ServerFactory) -> None:
    client = BackendClient(new_server(gap_seconds=0.4))
    client.make()
    late = client.step(2)
    assert_failed(client.wait(late), "seq_id 1", "never came")
    client.backend = new_server(gap_seconds=0.4)  # the failure is remembered: 2 does not run when 1 comes
    client.wait(client.gradients(1))
    assert_failed(client.wait(client.step(2)), "seq_id 1")
    assert isinstance(client.wait(client.step(3)), JsonResult)


BAD: list[tuple[str, Callable[[str, int], Any], str]] = [
    ("unknown loss", lambda run, n: forward_backward(run, n, data(), "reinforced"), "loss_fn 'reinforced' is unknown"),
    ("no such setting", lambda run, n: forward_backward(run, n, data(), "ppo", beta=1.0), "beta has no effect"),
    ("no data", lambda run, n: forward_backward(run, n, []), "data is empty"),
    ("unpublished loss", lambda run, n: forward_backward(run, n, data(), "stable_reinforce"), "not published"),
    ("unreadable", lambda run, n: RejectedOperation("data[3]: tensor of 5 bytes"), "tensor of 5 bytes"),
    ("a step without gradients", lambda run, n: OptimStep(ADAM), "no gradients"),
    ("a name that is a path", lambda run, n: SaveWeights("../up"), "checkpoint name"),
    ("an unknown kind", lambda run, n: SaveForSampler(None, 3, kind="live"), "kind='live'"),
]


def test_a_request_that_is_wrong_fails_alone_and_the_next_one_runs(new_server: ServerFactory, tmp_path: Path) -> None:
    """Mistakes use up their seq_ids, change no bit of the run, and are the same mistakes after a restart."""
    client, clean = BackendClient(backend := new_server()), BackendClient(backend)
    client.make(), clean.make()
    seq = 0
    for _, make, words in BAD:
        seq += 1
        assert_failed(client.do(seq, make(client.run, seq)), words)
    wrong = data()
    wrong[2].loss_fn_inputs["weights"] = TensorData(np.full(2, np.nan, np.float32))
    assert_failed(client.do(seq + 1, forward_backward(client.run, seq + 1, wrong)), "datum 2", "nan")
    wrong[2].loss_fn_inputs.update(data()[2].loss_fn_inputs, target_tokens=TensorData.of([3, 999]))
    assert_failed(client.do(seq + 2, forward_backward(client.run, seq + 2, wrong)), "999")
    told = train(client, 1, seed=0, first=seq + 3)
    assert told == train(clean, 1, seed=0)
    client.backend = new_server()
    assert_failed(client.wait(f"{client.run}:1"), "is unknown")
    client.save_weights(seq + 6, "end")
    clean.backend = client.backend
    clean.save_weights(4, "end")
    hashes = [counters(tmp_path, c.run, "end")["weights_sha256"] for c in (client, clean)]
    assert hashes[0] == hashes[1]


def test_stable_reinforce_is_refused_without_an_alias(new_server: ServerFactory) -> None:
    client = BackendClient(new_server())
    client.make()
    assert_failed(client.do(1, forward_backward(client.run, 1, data(), "stable_reinforce")), "cispo", "--alias")
    client.backend = new_server(aliases={"stable_reinforce": "cispo"})
    aliased = client.do(2, forward_backward(client.run, 2, data(), "stable_reinforce", kl_coeff=0.0))
    assert isinstance(aliased, ProtoResult)
    told = proto.ForwardBackwardOutput.FromString(aliased.body)
    assert told.metrics.pop("stable_reinforce_computed_as_cispo:max") == 1.0
    assert ProtoResult(told.SerializeToString()) == client.do(3, forward_backward(client.run, 3, data(), "cispo"))
    with_kl = forward_backward(client.run, 4, data(), "stable_reinforce", kl_coeff=0.1)
    assert_failed(client.do(4, with_kl), "kl_coeff=0.1", "cispo", "no effect")
    stepped = client.do(5, OptimStep(ADAM))
    assert isinstance(stepped, JsonResult) and stepped.value["metrics"]["stable_reinforce_computed_as_cispo"] == 1.0
    for aliases in ({"stable_reinforce": "x"}, {"ppo": "cispo"}):
        with pytest.raises(ValueError, match="alias"):
            new_server(aliases=aliases)


def test_concurrent_runs_have_the_bits_of_a_run_alone(new_server: ServerFactory, tmp_path: Path) -> None:
    """Five clients at once, one sending garbage, and so little room that adapters go to disk and come back."""
    alone = {}
    backend = new_server()
    for seed in range(4):
        client = BackendClient(backend)
        client.make(seed=seed)
        alone[seed] = train(client, 3, seed=10 * seed)
    backend = new_server(live_policies=2, snapshot_steps=2, snapshot_share=1e6)
    clients = [BackendClient(backend, f"owner{seed}") for seed in range(5)]
    told: dict[int, list[Outcome]] = {}

    def work(seed: int) -> None:
        clients[seed].make(seed=seed)
        if seed < 4:
            told[seed] = train(clients[seed], 3, seed=10 * seed)
        else:
            for seq in range(1, 20):
                assert_failed(clients[seed].do(seq, forward_backward(clients[seed].run, seq, data(), "nonsense")))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told == alone


def test_a_long_queue_of_one_client_lets_another_in_between(new_server: ServerFactory) -> None:
    """Each run has its turn: a single request waits for at most the ones that run, not for a queue of a hundred."""
    busy, quick = BackendClient(backend := new_server()), BackendClient(backend, "bob")
    busy.make(), quick.make()
    queue = [busy.gradients(seq, seed=seq) for seq in range(1, 101)]
    quick.wait(quick.gradients(1))
    still = [i for i in queue if isinstance(asyncio.run(backend.result("anna", i, 0)), Pending)]
    assert len(still) >= 20
    busy.wait(queue[-1])


def test_results_are_kept_for_a_while(new_server: ServerFactory) -> None:
    """From memory, then from the records, then an error that says so."""
    client = BackendClient(new_server(result_bytes=1, snapshot_steps=1, snapshot_share=1e6))
    client.make()
    told = train(client, 1, seed=0)
    client.save_weights(4, "after")
    assert client.backend._futures.find(f"{client.run}:1") is None
    assert client.wait(f"{client.run}:1") == told[0]
    client.backend._store.delete_results(time.time() + 1)
    with pytest.raises(GoneError, match="send the request again"):
        client.wait(f"{client.run}:1")
    assert client.gradients(1) == f"{client.run}:1", "it is not run again"


def test_a_full_disk_fails_the_save(new_server: ServerFactory, tmp_path: Path) -> None:
    """The save fails and says why, in time; the run goes on, and saves when there is room."""
    client = BackendClient(new_server())
    client.make()
    train(client, 1, seed=0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (900_000, hard))  # the records fit, an adapter of rank 256 does not
    try:
        big = BackendClient(client.backend, "bob")
        big.make(rank=256)
        assert_failed(big.do(1, SaveWeights("big")), "nothing was saved", category="server")
        assert isinstance(client.do(4, SaveWeights("small")), JsonResult)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(big.do(2, SaveWeights("big")), JsonResult)


def test_an_update_that_fails_half_way_is_undone(new_server: ServerFactory, tmp_path: Path) -> None:
    """After an error of ours the adapter comes back from its snapshot and log, as if the request had not been."""
    engine = tiny_engine()
    client, clean = BackendClient(backend := new_server(engine=engine)), BackendClient(backend)
    client.make(), clean.make()
    train(client, 2, seed=0), train(clean, 2, seed=0)
    client.wait(client.gradients(7, seed=5)), clean.wait(clean.gradients(7, seed=5))
    sound = engine._learner.optim_step

    def raise_error(policy: Any, adam: Any) -> Any:
        next(iter(policy.parameters.values())).data.add_(1.0)
        raise MemoryError

    engine._learner.optim_step = raise_error
    assert_failed(client.wait(client.step(8)), "memory", category="server")
    engine._learner.optim_step = sound
    assert client.wait(client.step(9)) == clean.wait(clean.step(8))
    client.save_weights(10, "end"), clean.save_weights(9, "end")
    hashes = [counters(tmp_path, c.run, "end")["weights_sha256"] for c in (client, clean)]
    assert hashes[0] == hashes[1]


def test_queues_are_bounded_and_the_awaited_request_always_gets_in(new_server: ServerFactory) -> None:
    client = BackendClient(new_server(lane_requests=3, owner_bytes=20_000, owner_samples=2))
    client.make()
    sent = [client.gradients(2), client.gradients(3, seed=1)]
    with pytest.raises(Busy):
        for seq in (4, 5, 6, 7):
            sent.append(client.gradients(seq, seed=seq))
    sent.append(client.gradients(1, seed=9))
    assert all(isinstance(client.wait(i), ProtoResult) for i in sent)
    base = client.backend.sampling.create_sampler("anna", client.session, 1, MODEL)
    long = SamplingParams(max_tokens=200, stop=[])
    asked = [client.backend.sampling.sample("anna", base, n, ModelInput([1, 2]), 4, long)[0] for n in range(2)]
    with pytest.raises(Busy):
        client.backend.sampling.sample("anna", base, 9, ModelInput([1, 2]), 4, long)
    for request in asked:
        client.backend.sampling.cancel("anna", request)
        assert_failed(client.wait(request), "cancelled")
    again = client.backend.sampling.sample(
        "anna", base, 10, ModelInput([1, 2]), 1, SamplingParams(max_tokens=2, stop=[])
    )[0]
    assert len(sampled_tokens(client.wait(again))[0]) == 2


def test_the_quota_of_bytes_lets_the_awaited_request_in_and_forgets_what_is_over() -> None:
    quotas = OwnerQuotas(ServerLimits(owner_bytes=100, owner_samples=2))
    assert quotas.acquire("anna", 120) == 120, "the only one is never too large"
    with pytest.raises(Busy, match="120 bytes"):
        quotas.acquire("anna", 1)
    assert quotas.acquire("anna", 30, awaited=True) == 150 and quotas.acquire("boris", 90, samples=2) == 90
    with pytest.raises(Busy, match="2 of your sampling requests"):
        quotas.acquire("boris", 1, samples=1)
    quotas.release("anna", 150)
    quotas.release("boris", 90, 1)
    assert quotas.acquire("anna", 100) == 100 and quotas.acquire("boris", 1, samples=1) == 1


def test_requests_parked_in_the_log_run_like_the_others(new_server: ServerFactory) -> None:
    """Beyond `parsed_bytes` a waiting request is read from the log when its turn comes."""
    client = BackendClient(new_server(parsed_bytes=1))
    client.make()
    parked = train(client, 3, seed=0)
    roomy = BackendClient(new_server())
    roomy.make()
    assert train(roomy, 3, seed=0) == parked


def test_a_state_folder_has_one_server(new_server: ServerFactory, tmp_path: Path) -> None:
    new_server()
    with pytest.raises(ValueError, match="in use by another server"):
        TinkerBackend({MODEL: tiny_engine()}, tmp_path)


def test_an_unknown_model_is_named_with_those_that_are_served(new_server: ServerFactory) -> None:
    client = BackendClient(backend := new_server())
    with pytest.raises(UserError, match=f"'big' is not served here; served: {MODEL}"):
        backend.runs.create_model("anna", client.session, 0, "big", {"rank": 4})
    with pytest.raises(UserError, match="rank 100000"):
        backend.runs.create_model("anna", client.session, 0, MODEL, {"rank": 100_000})
    with pytest.raises(GoneError, match="session"):
        backend.runs.create_model("anna", "nowhere", 0, MODEL, {"rank": 4})
    with pytest.raises(NotFound):
        client.step(1)
