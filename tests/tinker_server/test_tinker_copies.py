"""Copies of weights, custom losses and searches of several owners: who sees what, what is kept, what is done once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("google.protobuf", reason="the extra [serve] is not installed")

from rlvr.tinker_server.backend.request_futures import JsonResult, ProtoResult, RequestFailure
from rlvr.tinker_server.backend.runs.run_operations import ForwardBackward, SaveWeights
from rlvr.tinker_server.backend.storage.session_search import SessionFilter, read_cursor
from rlvr.tinker_server.protocol.errors import GoneError, NotFound, UserError
from rlvr.tinker_server.protocol.schemas import SearchSessionsRequest
from tests.kit.tinker_backend import MODEL, BackendClient, ServerFactory
from tests.kit.tiny import data

INPUTS = [{"name": "logprobs", "rank": 1}]
SUM: dict[str, Any] = {
    "nodes": [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
        {"op": "call_method", "name": "sum", "target": "sum", "args": [{"ref": "logprobs"}]},
        {"op": "output", "name": "o", "target": "output", "args": [{"tuple": [{"ref": "sum"}, {"dict": {}}]}]},
    ]
}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[ServerFactory]:
    servers = ServerFactory(tmp_path / "state")
    yield servers
    servers.close()


def custom(loss_id: str) -> ForwardBackward:
    return ForwardBackward(data(), "custom", {"loss_id": loss_id})


def test_a_copy_is_made_once_of_what_may_be_read(start: ServerFactory, tmp_path: Path) -> None:
    backend = start()
    anna, bert = BackendClient(backend), BackendClient(backend, "bert")
    anna.make()
    path = anna.save_weights(1, "saved")
    copy = backend.copies.copy
    for wrong in ({}, {"session_id": bert.session}, {"destination_project_id": "p", "session_id": bert.session,
                                                     "model_seq_id": 1}):  # fmt: skip
        with pytest.raises(UserError, match="either destination_project_id, or session_id and model_seq_id"):
            copy("bert", path, **wrong)
    with pytest.raises(NotFound, match="no checkpoint"):
        copy("bert", path, destination_project_id="p")
    with pytest.raises(GoneError, match="unknown"):
        copy("anna", path, session_id=bert.session, model_seq_id=1)
    backend.checkpoints.publish("anna", path, True)
    one = copy("bert", path, destination_project_id="p", request_key="k")
    assert copy("bert", path, destination_project_id="p", request_key="k") == one
    assert copy("anna", path, destination_project_id="p", request_key="k") != one  # a key is of its owner
    other = copy("bert", path, session_id=bert.session, model_seq_id=7)
    assert other == f"tinker://{bert.session}:train:7/weights/saved"
    assert copy("bert", path, session_id=bert.session, model_seq_id=7) == other
    second = anna.save_weights(2, "second")
    backend.checkpoints.publish("anna", second, True)
    with pytest.raises(UserError, match="model_seq_id names the training run"):
        copy("bert", second, session_id=bert.session, model_seq_id=7)
    assert backend.queries.training_runs("bert")["cursor"]["total_count"] == 2

    files = [file for file in (tmp_path / "state" / "runs").rglob("adapter_model.safetensors") if "saved" in str(file)]
    assert len(files) == 4 and len({file.stat().st_ino for file in files}) == 1  # links: no bytes of their own
    backend.checkpoints.delete("anna", path)
    backend = start()
    loaded = backend.runs.load_weights("bert", path=one, optimizer=True, session_id=bert.session, model_seq_id=8)
    assert isinstance(BackendClient(backend, "bert", bert.session).wait(loaded), JsonResult)
    run = other.removeprefix("tinker://").partition("/")[0]
    for seq in (1, 5):
        with pytest.raises(UserError, match=r"is a copy of tinker://.*cannot be trained"):
            backend.runs.submit("bert", run, seq, SaveWeights("x"))
    with pytest.raises(UserError, match=r"cannot be trained|names the training run"):
        backend.runs.create_model("bert", bert.session, 7, MODEL, {"rank": 4})
    with pytest.raises(NotFound):
        backend.runs.submit("anna", run, 1, SaveWeights("x"))
    backend.runs.delete("bert", run)
    assert backend.checkpoints.find("bert", other)  # named checkpoints of a deleted run stay


def test_a_copy_counts_in_the_quota_of_its_owner(start: ServerFactory) -> None:
    backend = start(owner_disk_bytes=200_000)
    anna = BackendClient(backend)
    anna.make()
    path = anna.save_weights(1, "saved")
    used = backend.disk.measure_owner("anna").checkpoints
    backend.copies.copy("anna", path, destination_project_id="p")
    assert backend.disk.measure_owner("anna").checkpoints == pytest.approx(2 * used, rel=0.01)
    with pytest.raises(UserError, match="disk quota"):
        for _ in range(99):
            backend.copies.copy("anna", path, destination_project_id="p")


def test_a_custom_loss_is_of_its_session_and_kept_while_a_log_needs_it(start: ServerFactory) -> None:
    backend = start()
    anna, bert = BackendClient(backend), BackendClient(backend, "bert")
    loss = backend.losses.create("anna", anna.session, 0, "total", INPUTS, SUM)
    assert backend.losses.create("anna", anna.session, 0, "total", INPUTS, SUM) == loss
    with pytest.raises(UserError, match="names another loss of this session"):
        backend.losses.create("anna", anna.session, 0, "other", INPUTS, SUM)
    with pytest.raises(GoneError):
        backend.losses.create("bert", anna.session, 1, "total", INPUTS, SUM)
    assert anna.wait(loss) == JsonResult({"loss_id": loss, "type": "create_custom_loss"})
    with pytest.raises(GoneError):
        bert.wait(loss)
    for client in (anna, bert):
        client.make()
    assert isinstance(anna.do(1, custom(loss)), ProtoResult)
    failed = bert.do(1, custom(loss))
    assert isinstance(failed, RequestFailure) and "unknown in this session" in failed.error
    backend.finish_session("anna", anna.session, "success")
    backend.losses.sweep()
    assert isinstance(anna.do(2, custom(loss)), ProtoResult)  # the log of the run names it
    backend.runs.delete("anna", anna.run)
    start()  # closes the first, which deletes the run
    backend = start()
    backend.losses.sweep()
    with pytest.raises(NotFound, match="unknown in this session"):
        backend.losses.read(anna.session, loss)


def test_custom_losses_of_an_owner_are_limited(start: ServerFactory) -> None:
    backend = start(owner_loss_bytes=1_000)
    anna, bert = BackendClient(backend), BackendClient(backend, "bert")
    with pytest.raises(UserError, match="owner_loss_bytes"):
        for seq in range(9):
            backend.losses.create("anna", anna.session, seq, "total", INPUTS, SUM)
    backend.losses.create("bert", bert.session, 0, "total", INPUTS, SUM)


def test_a_search_finds_sessions_of_its_owner_only(start: ServerFactory) -> None:
    backend = start()
    own = [BackendClient(backend).session for _ in range(5)]
    BackendClient(backend, "bert")
    found = backend.searches.search("anna", SessionFilter(limit=3))
    assert [one["session_id"] for one in found["sessions"]] == own[:1:-1]
    cursor = SearchSessionsRequest.model_validate({"cursor": found["next_cursor"]}).cursor
    assert cursor is not None
    after = read_cursor(cursor.last_created_at, cursor.last_session_id)
    rest = backend.searches.search("anna", SessionFilter(limit=3, after=after))
    assert [one["session_id"] for one in rest["sessions"]] == own[1::-1] and rest["next_cursor"] is None
    assert backend.searches.search("bert", SessionFilter(session_id=own[0]))["sessions"] == []
    with pytest.raises(NotFound):
        backend.sessions.set_project("bert", own[0], "p")
    assert found["sessions"][0]["status"] == {"type": "active"}


@pytest.mark.parametrize(
    "body",
    [
        {"limit": 0},
        {"limit": 201},
        {"limit": 10**30},
        {"display_name": ""},
        {"statuses": []},
        {"statuses": [{"type": "asleep"}]},
        {"owner": {"type": "user"}},
        {"owner": {"type": "own", "owner_urns": ["x"]}},
        {"cursor": {"last_created_at": "yesterday", "last_session_id": "x"}},
        {"cursor": {"last_created_at": 1e300, "last_session_id": "x"}},
        {"user_metadata": {"a": 1}},
        {"user_metadata": {str(i): "x" for i in range(101)}},
    ],
)
def test_a_search_that_makes_no_sense_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        SearchSessionsRequest.model_validate(body)


@pytest.mark.parametrize("at", ["0001-01-01T00:00:00Z", "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59"])
def test_a_cursor_of_any_time_gives_a_page(start: ServerFactory, at: str) -> None:
    backend = start()
    BackendClient(backend)
    cursor = SearchSessionsRequest.model_validate({"cursor": {"last_created_at": at, "last_session_id": "x"}}).cursor
    assert cursor is not None
    after = read_cursor(cursor.last_created_at, cursor.last_session_id)
    assert len(backend.searches.search("anna", SessionFilter(after=after))["sessions"]) == int(at.startswith("9"))
