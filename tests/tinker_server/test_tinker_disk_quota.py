"""The disk space of an owner: counted as it is on the disk, bounded by a quota, shown to the owner."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("google.protobuf")

from rlvr.tinker_server.backend.request_futures import JsonResult
from rlvr.tinker_server.backend.runs.adapter_cache import measure_adapter
from rlvr.tinker_server.backend.runs.run_operations import SaveExternal, SaveForSampler, SaveWeights
from rlvr.tinker_server.backend.storage.disk_usage import DiskUsage, format_bytes
from rlvr.tinker_server.backend.tinker_backend import TinkerBackend
from rlvr.tinker_server.protocol.errors import NotFound, UserError
from tests.kit.tinker_backend import BackendClient, ServerFactory, assert_failed, counters


def trained(backend: TinkerBackend, owner: str = "anna") -> BackendClient:
    """A run with one step and a checkpoint, `first`."""
    client = BackendClient(backend, owner)
    client.make()
    client.wait(client.gradients(1, seed=1))
    client.wait(client.step(2))
    client.save_weights(3, "first")
    return client


def measure_folder(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_usage_is_what_lies_on_the_disk(new_server: ServerFactory, tmp_path: Path) -> None:
    backend = new_server(snapshot_steps=1, snapshot_share=1e6)
    client = trained(backend)
    client.do(4, SaveForSampler("named"))
    client.do(5, SaveForSampler(None, sampling_session_seq_id=7))
    client.do(6, SaveExternal("out"))
    client.gradients(7, seed=2)
    client.wait(client.step(8))
    client.save_weights(9, "second")
    run = tmp_path / "runs" / client.run.replace(":", ".")
    kinds = ("weights", "sampler_weights", "external_weights")
    used = backend.disk.measure_owner("anna")
    assert (
        used.checkpoints
        == sum(measure_folder(run / kind) for kind in kinds)
        == sum(c["size_bytes"] for c in backend.queries.checkpoints("anna")["checkpoints"])
    )
    assert used.unnamed == measure_folder(run / "ephemeral") > 0
    stored = backend._store.fetch_all("SELECT body FROM log UNION ALL SELECT body FROM results")
    assert used.runs == measure_folder(run / "live") + sum(len(row["body"]) for row in stored)
    backend.checkpoints.delete("anna", f"tinker://{client.run}/weights/second")
    after = backend.disk.measure_owner("anna")
    assert after.checkpoints == sum(measure_folder(run / kind) for kind in kinds) < used.checkpoints
    assert backend.disk.measure_owner("bob") == DiskUsage()
    assert set(backend.disk.measure_owners()) == {"anna"}


def test_a_save_over_the_quota_is_refused_and_nothing_is_lost(new_server: ServerFactory, tmp_path: Path) -> None:
    client = trained(new_server())
    backend = new_server()  # after a stop, with a snapshot of the run
    used = backend.disk.measure_owner("anna").total
    before = counters(tmp_path, client.run, "first")
    backend = client.backend = new_server(owner_disk_bytes=used + 10_000)
    path = f"tinker://{client.run}/weights/first"
    for seq, save in enumerate((SaveWeights("second"), SaveExternal("out")), 4):
        assert_failed(client.do(seq, save), "quota", path, "limits.owner_disk_bytes", "not saved")
    assert not list((tmp_path / "runs" / client.run.replace(":", ".")).glob("*/second/*"))
    assert counters(tmp_path, client.run, "first") == before, "what was saved before is there"
    client.gradients(6, seed=2)
    assert isinstance(client.wait(client.step(7)), JsonResult), "and the run goes on"
    backend.checkpoints.delete("anna", path)
    client.save_weights(8, "second")
    assert counters(tmp_path, client.run, "second")["version"] == 2


def test_a_save_that_replaces_another_needs_no_room(new_server: ServerFactory) -> None:
    """A name that is overwritten, and unnamed weights of which the oldest are dropped."""
    backend = new_server(ephemeral_samplers=2)
    client = trained(backend)
    for seq in (4, 5):
        client.do(seq, SaveForSampler(None, sampling_session_seq_id=seq))
    used = new_server(ephemeral_samplers=2).disk.measure_owner("anna").total
    client.backend = new_server(ephemeral_samplers=2, owner_disk_bytes=used - 10_000)
    assert isinstance(client.do(6, SaveWeights("first", overwrite=True)), JsonResult)
    for seq in (7, 8, 9):
        assert isinstance(client.do(seq, SaveForSampler(None, sampling_session_seq_id=seq)), JsonResult)
    assert_failed(client.do(10, SaveWeights("another")), "quota")


def test_a_quota_is_per_owner_and_a_refusal_survives_a_restart(new_server: ServerFactory) -> None:
    anna = trained(backend := new_server())
    limit = backend.disk.measure_owner("anna").total + 1_000
    anna.backend = backend = new_server(owner_disk_bytes=limit)
    bob = BackendClient(backend, "bob")
    bob.make()
    assert bob.save_weights(1, "his"), "bob has room of his own"
    told = anna.do(4, SaveWeights("second"))
    assert_failed(told, "quota")
    anna.backend = new_server()
    assert anna.wait(f"{anna.run}:4") == told, "a replay does not save what was refused"


def test_an_owner_without_room_gets_no_new_run(new_server: ServerFactory) -> None:
    anna = trained(backend := new_server())
    used = backend.disk.measure_owner("anna").total
    backend = anna.backend = new_server(owner_disk_bytes=used)
    with pytest.raises(UserError, match="a new training run was not made"):
        BackendClient(backend, "anna").make()
    anna.gradients(4, seed=2)
    assert isinstance(anna.wait(anna.step(5)), JsonResult), "the run that there is goes on"
    backend.checkpoints.delete("anna", f"tinker://{anna.run}/weights/first")
    BackendClient(backend, "anna").make()


def test_an_owner_reads_its_usage(new_server: ServerFactory) -> None:
    backend = new_server(owner_disk_bytes=10**9)
    client = trained(backend)
    found: dict[str, Any] = backend.disk.describe("anna")
    assert found["limit_bytes"] == 10**9
    assert found["used_bytes"] == sum(found[f"{kind}_bytes"] for kind in ("checkpoints", "unnamed", "runs"))
    [largest] = found["largest_checkpoints"]
    assert largest == {"tinker_path": f"tinker://{client.run}/weights/first", "size_bytes": found["checkpoints_bytes"]}
    assert backend.disk.describe("bob")["used_bytes"] == 0


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_000, "1.0 kB"),
        (1_234_567, "1.2 MB"),
        (50 * 10**9, "50.0 GB"),
        (2 * 10**15, "2000.0 TB"),
    ],
)
def test_sizes_are_written_in_powers_of_a_thousand(size: int, text: str) -> None:
    assert format_bytes(size) == text


def assert_deleted(backend: TinkerBackend, client: BackendClient, folder: Path) -> None:
    """Only the checkpoint of the client's run is left, and can be loaded."""
    client.backend = backend
    used = backend.disk.measure_owner("anna")
    assert used[1:] == (0, 0) and used.checkpoints == measure_folder(folder) > 0
    for call in (
        lambda: client.gradients(6, seed=3),
        lambda: backend.runs.delete("anna", client.run),
        lambda: backend.queries.training_run("anna", client.run),
    ):
        with pytest.raises(NotFound):
            call()
    assert backend.queries.training_runs("anna")["training_runs"] == []
    [kept] = backend.queries.checkpoints("anna")["checkpoints"]
    other = BackendClient(backend, "anna")
    path, session = kept["tinker_path"], other.session
    made = backend.runs.load_weights("anna", path=path, optimizer=True, session_id=session, model_seq_id=0)
    assert isinstance(other.wait(made), JsonResult)
    backend.runs.delete("anna", other.run)


def test_a_deleted_run_gives_its_room_back_and_keeps_its_checkpoints(new_server: ServerFactory, tmp_path: Path) -> None:
    backend = new_server(snapshot_steps=1, snapshot_share=1e6)
    client = trained(backend)
    client.do(4, SaveForSampler(None, sampling_session_seq_id=7))
    client.wait(client.gradients(5, seed=2))
    with pytest.raises(NotFound):
        backend.runs.delete("bob", client.run)
    backend.runs.delete("anna", client.run)
    until = time.monotonic() + 10
    while backend.disk.measure_owner("anna")[1:] != (0, 0) and time.monotonic() < until:
        time.sleep(0.01)
    folder = tmp_path / "runs" / client.run.replace(":", ".")
    assert_deleted(backend, client, folder)
    assert_deleted(new_server(), client, folder)


def test_a_run_with_waiting_requests_is_not_deleted(new_server: ServerFactory) -> None:
    client = trained(backend := new_server())
    with next(iter(backend.engines.values())).lock:  # the engine computes nothing
        waiting = client.gradients(4, seed=2)
        with pytest.raises(UserError, match=r"1 requests of .* wait or run"):
            backend.runs.delete("anna", client.run)
    client.wait(waiting)
    assert isinstance(client.wait(client.step(5)), JsonResult)


def test_an_owner_has_a_quota_of_the_disk_and_of_runs_by_default(new_server: ServerFactory, tmp_path: Path) -> None:
    backend = new_server()
    size = shutil.disk_usage(tmp_path).total
    assert backend.disk.limit == size // 2 and backend.limits.owner_runs == 1_000
    backend.close()
    backend = new_server(owner_runs=2, owner_disk_share=0.25)
    assert backend.disk.limit == size // 4
    first = trained(backend)
    BackendClient(backend, "anna").make()
    BackendClient(backend, "berta").make()
    refusal = r"2 training runs.*DELETE /api/v1/training_runs/ID.*limits\.owner_runs"
    with pytest.raises(UserError, match=refusal):
        BackendClient(backend, "anna").make()
    backend.runs.delete("anna", first.run)
    BackendClient(backend, "anna").make()


def test_adapters_in_memory_are_bounded_by_their_bytes(new_server: ServerFactory) -> None:
    """As many as fit with gradients and two moments; the last one stays, and the others go on from the disk."""
    backend = new_server()
    trained(backend)
    [cache] = set(backend._adapters.values())
    size = measure_adapter(next(iter(cache._in_memory.values())))
    backend.close()
    backend = new_server(live_bytes=2 * size + 1)
    [cache] = set(backend._adapters.values())
    clients = [trained(backend) for _ in range(3)]
    assert len(cache) == 2
    for client in clients:
        client.wait(client.gradients(4, seed=2))
        client.wait(client.step(5))
        assert len(cache) == 2
    assert len({counters(backend.state, client.run, "first")["weights_sha256"] for client in clients}) == 1


def test_a_long_look_at_the_tables_keeps_no_other_call_waiting(
    new_server: ServerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a connection of its own, and is not begun again for every owner who asks."""
    backend = new_server()
    trained(backend)
    used, store, scans = backend.disk.measure_owner("anna"), backend._store, list[str]()
    with store._lock, ThreadPoolExecutor(1) as pool:  # of every other call
        query = "SELECT model, sum(length(body)) AS size FROM log GROUP BY model"
        assert len(pool.submit(store.scan, query).result(timeout=30)) == 1
    real = store.scan

    def scan_slowly(query: str) -> Any:
        scans.append(query)
        time.sleep(0.05)
        return real(query)

    monkeypatch.setattr(store, "scan", scan_slowly)
    for _ in range(3):
        assert backend.disk.measure_owner("anna") == used and backend.disk.measure_owner("bob") == DiskUsage()
    assert len(scans) == 2  # the log and the results, once
    monkeypatch.setattr(backend.disk, "_measure_at", time.monotonic())
    assert backend.disk.measure_owner("anna") == used and len(scans) == 4
