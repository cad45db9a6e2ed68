"""`rlvr doctor --tinker URL` says of a real server what a run would find, and of any other what to do."""

from __future__ import annotations

import gc
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("tinker")
pytest.importorskip("fastapi")

from rlvr.cli.doctor_tinker import check_tinker
from rlvr.cli.main import run
from rlvr.tinker_server.backend.tinker_backend import TinkerBackend
from rlvr.tinker_server.http.app import create_app
from rlvr.tinker_server.protocol.server_limits import ServerLimits
from rlvr.web.auth import ApiKeys
from tests.kit.tinker_server import serving

# The SDK leaves its connections to the garbage collector.
pytestmark = [pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"), pytest.mark.timeout(120)]
KEY = "tml-the-key-of-it"


@pytest.fixture(scope="module")
def url(fresh: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    backend = TinkerBackend({"tiny": fresh("qwen3")}, tmp_path_factory.mktemp("state"))
    with serving(create_app(backend, ApiKeys([KEY]), ServerLimits(poll_seconds=0.3))) as port:
        yield f"http://127.0.0.1:{port}"
    backend.close()
    gc.collect()


def test_a_server_that_works_passes_every_check(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    assert run(["doctor", "--tinker", url, "--rank", "4"]) == 0
    said = capsys.readouterr().out
    for line in (
        r"server .*SDK \d+\.\d+",
        r"model .*offered: tiny",
        r"adapter .*rank 4 of tiny.*key is accepted",
        rf"client .*client=tinker model\.base_url={url} model\.name=tiny",
        r"losses .*cross_entropy, importance_sampling, ppo, cispo, dro, gspo",
        r"sampling .*log-prob",
        r"prompt .*algorithm\.kl_coef",
    ):
        assert re.search(line, said), line


def test_a_wrong_model_rank_key_or_address_is_one_line_that_fails(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    wrong = [check_tinker(url, "other")[-1], check_tinker(url, rank=100_000)[-1]]
    assert [check.state for check in wrong] == ["fails"] * 2
    assert "model.name=tiny" in wrong[0].detail and "model.lora.rank" in wrong[1].detail
    monkeypatch.setenv("TINKER_API_KEY", "tml-of-someone-else")
    refused = check_tinker(url)
    assert (refused[-1].state, refused[-1].name) == ("fails", "key") and "TINKER_API_KEY" in refused[-1].detail
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening
        [gone] = check_tinker(f"http://127.0.0.1:{unused.getsockname()[1]}")
    assert gone.state == "fails" and "no server answers there" in gone.detail
