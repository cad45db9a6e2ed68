"""API keys, owners and checkpoints of the Tinker server: who may see what, and for how long it is there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("google.protobuf")

from tinker_core import ADAM, MODEL, Client, counters, forward_backward, tiny_engine
from tiny import data

from rlvr.messages import ModelInput, SamplingParams
from rlvr.service.keys import NOBODY, Keys, owner_of
from rlvr.service.tinker_api.core import Core
from rlvr.service.tinker_api.errors import Gone, NotFound, UserError
from rlvr.service.tinker_api.operations import LoadWeights, OptimStep, SaveExternal, SaveForSampler, SaveWeights
from rlvr.service.tinker_api.promises import Failed, Json, Proto
from rlvr.service.tinker_api.tenants import PREFIX


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def core(tmp_path: Path, clock: Clock) -> Iterator[Core]:
    core = Core({MODEL: tiny_engine()}, tmp_path, clock=clock)
    yield core
    core.close()


@pytest.fixture
def anna(core: Core) -> Client:
    """Two steps of training, saved as `first` after one of them, and as `named` for samplers."""
    client = Client(core)
    client.make()
    for i in range(2):
        client.gradients(3 * i + 1, seed=i)
        client.step(3 * i + 2)
        client.do(3 * i + 3, (SaveWeights("first", metadata={"a": "b"}), SaveForSampler("named"))[i])
    return client


def path(client: Client, kind: str = "weights", name: str = "first") -> str:
    return f"tinker://{client.run}/{kind}/{name}"


def test_nothing_of_one_owner_can_be_reached_by_another(core: Core, anna: Client) -> None:
    """Every call with anna's ids under bob's key: not found, as if they were not there."""
    base = core.create_sampler("anna", anna.session, 1, MODEL)
    asked = SamplingParams(max_tokens=2, stop=[])
    request, _ = core.sample("anna", base, 1, ModelInput([1]), 1, asked)
    core.create_session("bob")
    first = path(anna)
    attempts: list[Any] = [
        lambda: core.heartbeat("bob", anna.session),
        lambda: core.finish_session("bob", anna.session, "success"),
        lambda: core.create_model("bob", anna.session, 1, MODEL, {"rank": 4}),
        lambda: core.submit("bob", anna.run, 7, OptimStep(ADAM)),
        lambda: core.load_weights("bob", path=first, optimizer=False, session_id=anna.session, model_seq_id=9),
        lambda: core.load_weights("bob", path=first, optimizer=False, model_id=anna.run, seq_id=7),
        lambda: core.create_sampler("bob", anna.session, 2, MODEL),
        lambda: core.create_sampler("bob", core.create_session("bob"), 2, model_path=first),
        lambda: core.sampler("bob", base),
        lambda: core.sample("bob", base, 2, ModelInput([1]), 1, asked),
        lambda: asyncio.run(core.result("bob", f"{anna.run}:1", 0)),
        lambda: asyncio.run(core.result("bob", request, 0)),
        lambda: asyncio.run(core.completions("bob", base, 0, 0, [], 0)),
        lambda: core.training_run("bob", anna.run),
        lambda: core.model_info("bob", anna.run),
        lambda: core.weights_info("bob", first),
        lambda: core.checkpoints("bob", anna.run),
        lambda: core.delete_checkpoint("bob", first),
        lambda: core.publish("bob", first, True),
        lambda: core.set_ttl("bob", first, 10.0),
        lambda: core.external_files("bob", anna.run, "first"),
        lambda: core.session("bob", anna.session),
    ]
    for attempt in attempts:
        with pytest.raises((NotFound, Gone)):
            attempt()
    told: set[str] = set()
    for asked_for in (request, f"{anna.run}:1", f"{'0' * 32}:sample:0:1:abc"):  # the last has never been
        core.cancel("bob", asked_for)
        with pytest.raises(Gone) as gone:
            asyncio.run(core.result("bob", asked_for, 0))
        told.add(str(gone.value).replace(asked_for, "this"))
    assert len(told) == 1, "an id says by its answer that it is somebody's"
    assert isinstance(anna.wait(request), Proto), "bob's cancel stopped it"
    assert core.training_runs("bob")["training_runs"] == core.checkpoints("bob")["checkpoints"] == []
    assert anna.session not in core.sessions("bob")
    assert core.weights_info("anna", first)["lora_rank"] == 4


def test_published_weights_can_be_read_and_not_changed_by_others(core: Core, anna: Client) -> None:
    bob = Client(core, "bob")
    core.publish("anna", path(anna), True)
    made = bob.wait(core.load_weights("bob", path=path(anna), optimizer=True, session_id=bob.session, model_seq_id=0))
    assert isinstance(made, Json) and made.value["model_id"] == bob.run
    for change in (core.delete_checkpoint, lambda who, what: core.publish(who, what, False)):
        with pytest.raises(NotFound):
            change("bob", path(anna))
    core.publish("anna", path(anna), False)
    with pytest.raises(NotFound):
        core.weights_info("bob", path(anna))


def test_a_run_from_saved_weights_goes_on_with_its_optimizer_or_without(
    core: Core, anna: Client, tmp_path: Path
) -> None:
    """With it: the same bits as the run that was saved. Without: another step. In another session, or in place."""

    def rest(client: Client, first: int) -> str:
        client.gradients(first, seed=1)
        client.step(first + 1)
        client.saved(first + 2, "rest")
        return counters(tmp_path, client.run, "rest")["weights_sha256"]

    anna.saved(7, "end")
    expected = counters(tmp_path, anna.run, "end")["weights_sha256"]
    found: list[str] = []
    for optimizer in (True, False):
        other = Client(core)
        ask = core.load_weights("anna", path=path(anna), optimizer=optimizer, session_id=other.session, model_seq_id=0)
        assert isinstance(other.wait(ask), Json)
        found.append(rest(other, 1))
    assert found[0] == expected != found[1]
    inside = Client(core)
    inside.make(seed=7)
    ask = core.load_weights("anna", path=path(anna), optimizer=True, model_id=inside.run, seq_id=1)
    assert isinstance(inside.wait(ask), Json)
    assert rest(inside, 2) == expected
    small = Client(core)
    small.make(rank=2)
    outcome = small.do(1, LoadWeights(path(anna), True))
    assert isinstance(outcome, Failed) and "rank" in outcome.error
    sampler_only = small.do(2, LoadWeights(path(anna, "sampler_weights", "named"), True))
    assert isinstance(sampler_only, Failed)


def test_checkpoints_are_listed_deleted_and_forgotten_in_time(
    core: Core, anna: Client, clock: Clock, tmp_path: Path
) -> None:
    assert isinstance(anna.do(7, SaveExternal("out", ttl=100.0)), Json)
    listed = core.checkpoints("anna", anna.run)["checkpoints"]
    assert sorted(c["checkpoint_id"] for c in listed) == [
        "external_weights/out", "sampler_weights/named", "weights/first",
    ]  # fmt: skip
    first = next(c for c in listed if c["checkpoint_id"] == "weights/first")
    assert first["user_metadata"] == {"a": "b"} and first["size_bytes"] > 1000 and first["expires_at"] is None
    assert "adapter_model.safetensors" in core.external_files("anna", anna.run, "out")
    run = core.training_run("anna", anna.run)
    assert run["last_checkpoint"]["tinker_path"] == path(anna) and run["lora_rank"] == 4
    core.set_ttl("anna", path(anna, "sampler_weights", "named"), 50.0)
    clock.now += 60
    with pytest.raises(NotFound):
        core.create_sampler("anna", anna.session, 3, model_path=path(anna, "sampler_weights", "named"))
    clock.now += 60
    core._checkpoints.sweep()
    kinds = tmp_path / "runs" / anna.run.replace(":", ".")
    assert not any((kinds / "external_weights" / "out").iterdir()) and any((kinds / "weights" / "first").iterdir())
    core.delete_checkpoint("anna", path(anna))
    assert core.checkpoints("anna")["checkpoints"] == [] and not any((kinds / "weights" / "first").iterdir())
    with pytest.raises(NotFound):
        core.delete_checkpoint("anna", path(anna))
    assert isinstance(anna.do(8, SaveWeights("first")), Json), "the name is free again"
    for ttl in (0.0, -1.0, 1e12, float("nan")):
        with pytest.raises(UserError, match="ttl_seconds"):
            core.set_ttl("anna", path(anna), ttl)


def test_a_name_is_overwritten_only_when_that_is_asked_for(core: Core, anna: Client, tmp_path: Path) -> None:
    before = counters(tmp_path, anna.run, "first")
    again = anna.do(7, SaveWeights("first"))
    assert isinstance(again, Failed) and "exists already" in again.error
    assert counters(tmp_path, anna.run, "first") == before
    assert isinstance(anna.do(8, SaveWeights("first", overwrite=True)), Json)
    assert counters(tmp_path, anna.run, "first")["version"] == 2


def test_a_run_that_could_not_be_made_is_listed_as_corrupted(core: Core, anna: Client) -> None:
    lost = anna.core.load_weights(
        "anna", path=path(anna, "sampler_weights", "named"), optimizer=True, session_id=anna.session, model_seq_id=1
    )
    assert isinstance(anna.wait(lost), Failed)
    listed = core.training_runs("anna")["training_runs"]
    assert {run["training_run_id"]: run["corrupted"] for run in listed} == {
        anna.run: False, f"{anna.session}:train:1": True,
    }  # fmt: skip


@pytest.mark.parametrize("wrong", ["", "tinker://", "tinker://a/b", "tinker://a/weights/../b", "/etc/passwd", "a/b/c"])
def test_a_path_that_is_none_is_a_mistake_of_the_user(core: Core, wrong: str) -> None:
    with pytest.raises(UserError):
        core.weights_info("anna", wrong)


def test_keys_come_from_a_file_and_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\ntml-anna-0123456789  # anna\n\ntml-bob-0123456789\n")
    monkeypatch.setenv("RLVR_API_KEYS", "tml-carl-0123456789, ")
    keys = Keys.load(file, PREFIX)
    owners = {keys.owner(f"tml-{name}-0123456789") for name in ("anna", "bob", "carl")}
    assert len(owners) == 3 and None not in owners
    assert keys.owner("tml-anna-012345678") is keys.owner(None) is keys.owner("") is None
    assert "anna" not in owner_of("tml-anna-0123456789")
    monkeypatch.delenv("RLVR_API_KEYS")
    assert not Keys.load(None) and Keys.load(None).owner(None) == NOBODY
    for bad in ("sk-0123456789", "tml-1", "tml-with-ü-in-it"):
        with pytest.raises(ValueError, match="API key"):
            Keys([bad], PREFIX)
    file.write_text("# none\n")
    with pytest.raises(ValueError, match="holds no key"):
        Keys.load(file, PREFIX)


def test_what_was_deleted_does_not_come_back_with_the_log(tmp_path: Path) -> None:
    """A restart runs the log again; a checkpoint that was saved, and deleted since, stays deleted."""
    core = Core({MODEL: tiny_engine()}, tmp_path)
    client = Client(core)
    client.make()
    client.do(1, forward_backward(client.run, 1, data()))
    client.saved(2, "gone")
    core.delete_checkpoint("anna", path(client, name="gone"))
    for worker, policies in zip(core._workers.values(), core._policies.values(), strict=True):
        worker.stop()  # and no snapshot: as after a kill
        policies.close = lambda: None
    core.close()
    client.core = core = Core({MODEL: tiny_engine()}, tmp_path)
    assert isinstance(client.wait(f"{client.run}:2"), Json)
    assert core.checkpoints("anna")["checkpoints"] == []
    assert not (tmp_path / "runs" / client.run.replace(":", ".") / "weights" / "gone").exists()
    core.close()
