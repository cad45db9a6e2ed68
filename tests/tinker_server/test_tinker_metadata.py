"""What users may write to sessions, runs and checkpoints, of which a page of a list has a thousand."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")
pytest.importorskip("google.protobuf", reason="the extra [serve] is not installed")

from rlvr.tinker_server.backend import request_futures
from rlvr.tinker_server.backend.request_futures import FutureRegistry, JsonResult
from rlvr.tinker_server.http import dependencies
from rlvr.tinker_server.protocol.schemas import (
    MAX_METADATA,
    CreateModelRequest,
    CreateSessionRequest,
    SaveWeightsRequest,
)
from tests.kit.open_server import NAME, open_endpoints, request, text_engine

RUN = {"session_id": "s", "model_seq_id": 1, "base_model": NAME}
SAVE = {"model_id": "s:train:1", "path": "a", "seq_id": 1}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, int]]:
    with open_endpoints({NAME: text_engine()}, tmp_path_factory.mktemp("state")) as found:
        yield found


@pytest.mark.parametrize(
    "metadata",
    [
        {"a": "b" * MAX_METADATA},
        {"k" * MAX_METADATA: 1},
        {str(number): "" for number in range(MAX_METADATA // 8)},
        {"a": [{"b": "c" * 100}] * (MAX_METADATA // 100)},
        {"a": 10 ** (MAX_METADATA // 3)},
    ],
)
def test_long_metadata_is_refused(metadata: Any) -> None:
    for kind, fields in ((CreateSessionRequest, {}), (CreateModelRequest, RUN), (SaveWeightsRequest, SAVE)):
        with pytest.raises(ValidationError, match=r"user_metadata(.|\n)*more than 16,384 characters"):
            kind.model_validate({**fields, "user_metadata": metadata})


def test_metadata_of_a_usual_size_are_taken() -> None:
    metadata = {"config": "x" * 10_000, "nested": {"a": [1, 2.5, None, True, {"b": "c"}]}}
    assert CreateSessionRequest.model_validate({"user_metadata": metadata}).user_metadata == metadata
    assert CreateSessionRequest.model_validate({"tags": ["t" * 500] * 32}).tags == ["t" * 500] * 32
    with pytest.raises(ValidationError, match=r"tags(.|\n)*500,000 characters together, expected at most 16,384"):
        CreateSessionRequest.model_validate({"tags": ["t" * 500] * 1_000})


def test_lists_are_written_off_the_event_loop(server: tuple[Any, int], monkeypatch: pytest.MonkeyPatch) -> None:
    port, real, on_loop = server[1], dependencies.dump_json, list[bool]()

    def dump(value: Any) -> bytes:
        on_loop.append(asyncio._get_running_loop() is not None)
        return real(value)

    monkeypatch.setattr(dependencies, "dump_json", dump)
    for path, key in (("training_runs", "training_runs"), ("checkpoints", "checkpoints")):
        status, answer = request(port, f"/api/v1/{path}?limit=5")
        assert status == 200 and answer == {key: [], "cursor": {"offset": 0, "limit": 5, "total_count": 0}}
    assert on_loop == [False, False]


def test_a_poll_for_many_samples_has_some_of_them_and_the_next_one_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_futures, "MOST_FINISHED", 3)

    async def run() -> None:
        futures = FutureRegistry(60.0, 1 << 30)
        for number in range(7):
            future = futures.create(f"s:{number}", "anna", group="s/0", session="s")
            assert future is not None
            futures.resolve(future, JsonResult({}))
        cursor, found = 0, list[list[str]]()
        for _ in range(3):
            finished = await futures.wait_for_group("s/0", cursor, [], 0.1)
            cursor = finished.cursor
            found.append([sample.request_id for sample in finished.samples])
        assert found == [["s:0", "s:1", "s:2"], ["s:3", "s:4", "s:5"], ["s:6"]]
        assert (await futures.wait_for_group("s/0", cursor, [], 0.01)).samples == []

    asyncio.run(run())
