"""API keys, owners and checkpoints of the Tinker server: who may see what, and for how long it is there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("google.protobuf")

from rlvr.core.messages import ModelInput, SamplingParams
from rlvr.tinker_server.backend.quotas import KEY_PREFIX
from rlvr.tinker_server.backend.request_futures import JsonResult, ProtoResult, RequestFailure
from rlvr.tinker_server.backend.runs.run_operations import (
    LoadWeights,
    OptimStep,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
)
from rlvr.tinker_server.backend.tinker_backend import TinkerBackend
from rlvr.tinker_server.protocol.errors import GoneError, NotFound, UserError
from rlvr.web.auth import LOCAL_OWNER, ApiKeys, owner_of
from tests.kit.tinker_backend import (
    ADAM,
    MODEL,
    BackendClient,
    assert_failed,
    counters,
    forward_backward,
    tiny_engine,
)
from tests.kit.tiny import data


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def backend(tmp_path: Path, clock: Clock) -> Iterator[TinkerBackend]:
    backend = TinkerBackend({MODEL: tiny_engine()}, tmp_path, clock=clock)
    yield backend
    backend.close()


@pytest.fixture
def anna(backend: TinkerBackend) -> BackendClient:
    """Two steps of training, saved as `first` after one of them, and as `named` for samplers."""
    client = BackendClient(backend)
    client.make()
    for i in range(2):
        client.gradients(3 * i + 1, seed=i)
        client.step(3 * i + 2)
        client.do(3 * i + 3, (SaveWeights("first", metadata={"a": "b"}), SaveForSampler("named"))[i])
    return client


def path(client: BackendClient, kind: str = "weights", name: str = "first") -> str:
    return f"tinker://{client.run}/{kind}/{name}"


def test_an_owner_cannot_reach_anything_of_another(backend: TinkerBackend, anna: BackendClient) -> None:
    """Every call with anna's ids under bob's key: not found, as if they were not there."""
    anna.do(7, SaveForSampler(None, 0))  # the newest weights of the run have no path whose owner is looked up
    base = backend.sampling.create_sampler("anna", anna.session, 1, MODEL)
    asked = SamplingParams(max_tokens=2, stop=[])
    request, _ = backend.sampling.sample("anna", base, 1, ModelInput([1]), 1, asked)
    backend.sessions.create("bob")
    first = path(anna)
    attempts: list[Any] = [
        lambda: backend.sessions.heartbeat("bob", anna.session),
        lambda: backend.finish_session("bob", anna.session, "success"),
        lambda: backend.runs.create_model("bob", anna.session, 1, MODEL, {"rank": 4}),
        lambda: backend.runs.submit("bob", anna.run, 8, OptimStep(ADAM)),
        lambda: backend.runs.load_weights("bob", path=first, optimizer=False, session_id=anna.session, model_seq_id=9),
        lambda: backend.runs.load_weights("bob", path=first, optimizer=False, model_id=anna.run, seq_id=8),
        lambda: backend.sampling.create_sampler("bob", anna.session, 2, MODEL),
        lambda: backend.sampling.create_sampler("bob", backend.sessions.create("bob"), 2, model_path=first),
        lambda: backend.sampling.describe("bob", base),
        lambda: backend.sampling.sample("bob", base, 2, ModelInput([1]), 1, asked),
        lambda: backend.sampling.find_model("bob", anna.run),
        lambda: asyncio.run(backend.result("bob", f"{anna.run}:1", 0)),
        lambda: asyncio.run(backend.result("bob", request, 0)),
        lambda: asyncio.run(backend.sampling.wait_for_any("bob", base, 0, 0, [], 0)),
        lambda: backend.queries.training_run("bob", anna.run),
        lambda: backend.queries.model_info("bob", anna.run),
        lambda: backend.queries.weights_info("bob", first),
        lambda: backend.queries.checkpoints("bob", anna.run),
        lambda: backend.checkpoints.delete("bob", first),
        lambda: backend.checkpoints.publish("bob", first, True),
        lambda: backend.checkpoints.set_ttl("bob", first, 10.0),
        lambda: backend.queries.external_files("bob", anna.run, "first"),
        lambda: backend.queries.session("bob", anna.session),
    ]
    for attempt in attempts:
        with pytest.raises((NotFound, GoneError)):
            attempt()
    told: set[str] = set()
    for asked_for in (request, f"{anna.run}:1", f"{'0' * 32}:sample:0:1:abc"):  # the last has never been
        backend.sampling.cancel("bob", asked_for)
        with pytest.raises(GoneError) as gone:
            asyncio.run(backend.result("bob", asked_for, 0))
        told.add(str(gone.value).replace(asked_for, "this"))
    assert len(told) == 1, "the answer must not reveal that the id belongs to another client"
    assert isinstance(anna.wait(request), ProtoResult), "bob's cancel stopped it"
    assert (
        backend.queries.training_runs("bob")["training_runs"] == backend.queries.checkpoints("bob")["checkpoints"] == []
    )
    assert anna.session not in backend.queries.sessions("bob")
    assert backend.queries.weights_info("anna", first)["lora_rank"] == 4


def test_others_can_read_but_not_change_published_weights(backend: TinkerBackend, anna: BackendClient) -> None:
    bob = BackendClient(backend, "bob")
    backend.checkpoints.publish("anna", path(anna), True)
    made = bob.wait(
        backend.runs.load_weights("bob", path=path(anna), optimizer=True, session_id=bob.session, model_seq_id=0)
    )
    assert isinstance(made, JsonResult) and made.value["model_id"] == bob.run
    for change in (backend.checkpoints.delete, lambda who, what: backend.checkpoints.publish(who, what, False)):
        with pytest.raises(NotFound):
            change("bob", path(anna))
    backend.checkpoints.publish("anna", path(anna), False)
    with pytest.raises(NotFound):
        backend.queries.weights_info("bob", path(anna))


def test_a_run_from_saved_weights_goes_on_with_its_optimizer_or_without(
    backend: TinkerBackend, anna: BackendClient, tmp_path: Path
) -> None:
    """With it: the same bits as the run that was saved. Without: another step. In another session, or in place."""

    def rest(client: BackendClient, first: int) -> str:
        client.gradients(first, seed=1)
        client.step(first + 1)
        client.save_weights(first + 2, "rest")
        return counters(tmp_path, client.run, "rest")["weights_sha256"]

    anna.save_weights(7, "end")
    expected = counters(tmp_path, anna.run, "end")["weights_sha256"]
    found: list[str] = []
    for optimizer in (True, False):
        other = BackendClient(backend)
        ask = backend.runs.load_weights(
            "anna", path=path(anna), optimizer=optimizer, session_id=other.session, model_seq_id=0
        )
        assert isinstance(other.wait(ask), JsonResult)
        found.append(rest(other, 1))
    assert found[0] == expected != found[1]
    inside = BackendClient(backend)
    inside.make(seed=7)
    ask = backend.runs.load_weights("anna", path=path(anna), optimizer=True, model_id=inside.run, seq_id=1)
    assert isinstance(inside.wait(ask), JsonResult)
    assert rest(inside, 2) == expected
    small = BackendClient(backend)
    small.make(rank=2)
    outcome = small.do(1, LoadWeights(path(anna), True))
    assert isinstance(outcome, RequestFailure) and "rank" in outcome.error
    sampler_only = small.do(2, LoadWeights(path(anna, "sampler_weights", "named"), True))
    assert isinstance(sampler_only, RequestFailure)


def test_checkpoints_are_listed_deleted_and_forgotten_in_time(
    backend: TinkerBackend, anna: BackendClient, clock: Clock, tmp_path: Path
) -> None:
    assert isinstance(anna.do(7, SaveExternal("out", ttl=7_200.0)), JsonResult)
    listed = backend.queries.checkpoints("anna", anna.run)["checkpoints"]
    assert sorted(c["checkpoint_id"] for c in listed) == [
        "external_weights/out", "sampler_weights/named", "weights/first",
    ]  # fmt: skip
    first = next(c for c in listed if c["checkpoint_id"] == "weights/first")
    assert first["user_metadata"] == {"a": "b"} and first["size_bytes"] > 1000 and first["expires_at"] is None
    assert "adapter_model.safetensors" in backend.queries.external_files("anna", anna.run, "out")
    run = backend.queries.training_run("anna", anna.run)
    assert run["last_checkpoint"]["tinker_path"] == path(anna) and run["lora_rank"] == 4
    backend.checkpoints.set_ttl("anna", path(anna, "sampler_weights", "named"), 3_600.0)
    clock.now += 3_660
    with pytest.raises(NotFound):
        backend.sampling.create_sampler("anna", anna.session, 3, model_path=path(anna, "sampler_weights", "named"))
    clock.now += 3_600
    backend.checkpoints.sweep()
    kinds = tmp_path / "runs" / anna.run.replace(":", ".")
    assert not any((kinds / "external_weights" / "out").iterdir()) and any((kinds / "weights" / "first").iterdir())
    backend.checkpoints.delete("anna", path(anna))
    assert backend.queries.checkpoints("anna")["checkpoints"] == [] and not any((kinds / "weights" / "first").iterdir())
    with pytest.raises(NotFound):
        backend.checkpoints.delete("anna", path(anna))
    assert isinstance(anna.do(8, SaveWeights("first")), JsonResult), "the name is free again"
    for ttl in (0.0, -1.0, 3_599.0, 1e12, float("nan")):
        with pytest.raises(UserError, match=r"ttl_seconds .*expected 3600 \(1 hour\) to"):
            backend.checkpoints.set_ttl("anna", path(anna), ttl)


def test_a_name_is_overwritten_only_on_request(backend: TinkerBackend, anna: BackendClient, tmp_path: Path) -> None:
    before = counters(tmp_path, anna.run, "first")
    again = anna.do(7, SaveWeights("first"))
    assert isinstance(again, RequestFailure) and "exists already" in again.error
    assert counters(tmp_path, anna.run, "first") == before
    assert isinstance(anna.do(8, SaveWeights("first", overwrite=True)), JsonResult)
    assert counters(tmp_path, anna.run, "first")["version"] == 2


def test_a_run_that_could_not_be_made_is_listed_as_corrupted(backend: TinkerBackend, anna: BackendClient) -> None:
    lost = anna.backend.runs.load_weights(
        "anna", path=path(anna, "sampler_weights", "named"), optimizer=True, session_id=anna.session, model_seq_id=1
    )
    assert isinstance(anna.wait(lost), RequestFailure)
    listed = backend.queries.training_runs("anna")["training_runs"]
    assert {run["training_run_id"]: run["corrupted"] for run in listed} == {
        anna.run: False, f"{anna.session}:train:1": True,
    }  # fmt: skip


@pytest.mark.parametrize("wrong", ["", "tinker://", "tinker://a/b", "tinker://a/weights/../b", "/etc/passwd", "a/b/c"])
def test_an_invalid_path_is_a_user_error(backend: TinkerBackend, wrong: str) -> None:
    with pytest.raises(UserError):
        backend.queries.weights_info("anna", wrong)


def test_keys_come_from_a_file_and_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\ntml-anna-0123456789  # anna\n\ntml-bob-0123456789\n")
    monkeypatch.setenv("RLVR_API_KEYS", "tml-carl-0123456789, ")
    keys = ApiKeys.load(file, KEY_PREFIX)
    owners = {keys.owner(f"tml-{name}-0123456789") for name in ("anna", "bob", "carl")}
    assert len(owners) == 3 and None not in owners
    assert keys.owner("tml-anna-012345678") is keys.owner(None) is keys.owner("") is None
    assert "anna" not in owner_of("tml-anna-0123456789")
    monkeypatch.delenv("RLVR_API_KEYS")
    assert not ApiKeys.load(None) and ApiKeys.load(None).owner(None) == LOCAL_OWNER
    for bad in ("sk-0123456789", "tml-1", "tml-with-ü-in-it"):
        with pytest.raises(ValueError, match="API key"):
            ApiKeys([bad], KEY_PREFIX)
    file.write_text("# none\n")
    with pytest.raises(ValueError, match="holds no key"):
        ApiKeys.load(file, KEY_PREFIX)


def test_a_replayed_log_does_not_restore_deleted_weights(tmp_path: Path) -> None:
    """A restart runs the log again; a checkpoint that was saved, and deleted since, stays deleted."""
    backend = TinkerBackend({MODEL: tiny_engine()}, tmp_path)
    client = BackendClient(backend)
    client.make()
    client.do(1, forward_backward(client.run, 1, data()))
    client.save_weights(2, "gone")
    backend.checkpoints.delete("anna", path(client, name="gone"))
    close_without_snapshots(backend)
    client.backend = backend = TinkerBackend({MODEL: tiny_engine()}, tmp_path)
    assert isinstance(client.wait(f"{client.run}:2"), JsonResult)
    assert backend.queries.checkpoints("anna")["checkpoints"] == []
    assert not (tmp_path / "runs" / client.run.replace(":", ".") / "weights" / "gone").exists()
    backend.close()


def test_a_request_that_failed_is_not_made_again_by_a_replayed_log(tmp_path: Path) -> None:
    """What it missed is there at the restart: the client was told that nothing was loaded, and trained on. An error
    within the engine drops the adapter, whose log is then replayed in the same process."""
    backend = TinkerBackend({MODEL: tiny_engine()}, tmp_path)
    client = BackendClient(backend)
    client.make()
    assert isinstance(client.do(1, LoadWeights(path(client, name="later"), True)), RequestFailure)
    client.gradients(2)
    client.wait(client.step(3))
    client.save_weights(4, "later")
    close_without_snapshots(backend)
    engine = tiny_engine()
    client.backend = backend = TinkerBackend({MODEL: engine}, tmp_path)
    client.save_weights(5, "restarted")
    client.gradients(6)
    step, engine.optim_step = engine.optim_step, lambda *_: 1 / 0  # pyright: ignore[reportAttributeAccessIssue]
    assert_failed(client.wait(client.step(7)), category="server")
    engine.optim_step = step
    client.save_weights(8, "restored")
    backend.close()
    saved = [counters(tmp_path, client.run, name) for name in ("later", "restarted", "restored")]
    assert [one["version"] for one in saved] == [1, 1, 1] and len({one["weights_sha256"] for one in saved}) == 1


def close_without_snapshots(backend: TinkerBackend) -> None:
    """Leave what a kill leaves: the log alone."""
    for engine_thread, adapters in zip(backend._engine_threads.values(), backend._adapters.values(), strict=True):
        engine_thread.stop()
        adapters.close = lambda: None
    backend.close()
