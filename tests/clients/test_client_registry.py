"""Training clients by name: registered ones, ones at a path, and what a wrong name is told."""

from __future__ import annotations

from typing import Any

import pytest

from rlvr.clients.client_spec import ClientSpec
from rlvr.clients.mock.mock_client import MOCK, MockTrainingClient
from rlvr.clients.registry import CLIENTS, check_client, close_client, known_clients, register_client, resolve_client
from rlvr.clients.tinker import TinkerTrainingClient
from rlvr.core.protocols import TrainingClient


def test_every_built_in_client_declares_its_own_name() -> None:
    """Messages and the table of what works on which client name it by its capabilities."""
    assert known_clients()[:3] == ["local", "mock", "tinker"]
    assert {name: resolve_client(name).capabilities.name for name in CLIENTS} == {name: name for name in CLIENTS}


def test_the_clients_implement_the_whole_protocol() -> None:
    members = [name for name in dir(TrainingClient) if not name.startswith("_")]
    from rlvr.clients.local import LocalTrainingClient

    for client in (LocalTrainingClient, MockTrainingClient, TinkerTrainingClient):
        assert [name for name in members if not hasattr(client, name)] == []


def test_a_client_of_your_own_is_registered_once_or_named_by_its_path() -> None:
    spec = ClientSpec(MOCK.capabilities, MOCK.build, MOCK.describe)
    register_client("test_mine", spec)
    register_client("test_mine", spec)
    check_client("test_mine")
    assert resolve_client("test_mine") is spec
    with pytest.raises(ValueError, match="'mock' is registered already; choose another name"):
        register_client("mock", spec)
    assert resolve_client("rlvr.clients.mock.mock_client:MOCK") is MOCK
    with pytest.raises(ValueError, match="expected a ClientSpec"):
        resolve_client("rlvr.clients.mock.mock_client:MockTrainingClient")


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(ValueError, match=r"client='moc' \(did you mean 'mock'\?\); expected local, mock, tinker"):
        check_client("moc")


def test_closing_a_client_whose_server_is_gone_is_no_error() -> None:
    class UnreachableClient:
        def close(self) -> None:
            raise RuntimeError("the server cannot be reached")

    gone: Any = UnreachableClient()
    close_client(gone)
