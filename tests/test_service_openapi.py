"""No request that the OpenAPI document allows, and none of many that it does not, causes an internal error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")
pytest.importorskip("schemathesis", reason="the extra [dev] is not installed")
from rlvr_service import RlvrService
from text_endpoint import serving

# What fits the document may still be refused: limits are settings, and of some fields one excludes the other.
LEFT_OUT = "positive_data_acceptance"


@pytest.mark.slow
def test_no_request_is_a_server_error(tmp_path: Path):
    """Every operation, alone and after others, with data that fits the document and data that does not: each answer
    has a status, a type and a shape that the document names, and none is a 5xx."""
    with (
        serving(lambda asked: "An answer of some length, which rules accept.") as endpoint,
        RlvrService(tmp_path / "state", LLM_ENDPOINT=endpoint.plain_url, RLVR_REQUESTS_PER_MINUTE="0") as service,
    ):
        command = [
            sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run",
            f"{service.url}/openapi.json", "--checks", "all", "--exclude-checks", LEFT_OUT, "--max-examples", "10",
            "--seed", "1", "--no-color", "--request-timeout", "30", "--suppress-health-check", "all",
        ]  # fmt: skip
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        print(done.stdout[-20_000:])
        assert done.returncode == 0, done.stderr[-2_000:]
        assert not [line for line in service.log_records() if line["level"] == "error"]
        assert service.get("/health").json()["status"] == "ok"
