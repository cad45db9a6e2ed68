"""What the OpenAPI document allows is accepted, what it does not is refused, and nothing causes an internal error."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")
import jsonschema

from rlvr.reward.registry import options_of
from rlvr.service.sessions.verifier_options import OPTIONS
from tests.kit.rlvr_service import RlvrService
from tests.kit.text_endpoint import serving

HOOKS = str(Path(__file__).parents[1] / "kit" / "schemathesis_hooks.py")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RlvrService]:
    with (
        serving(lambda asked: "An answer of some length, which rules accept.") as endpoint,
        RlvrService(
            tmp_path_factory.mktemp("state"), LLM_ENDPOINT=endpoint.plain_url, RLVR_REQUESTS_PER_MINUTE="0",
            RLVR_MOST_ITERATIONS="12", RLVR_MAX_SAMPLES="3", RLVR_MAX_PROMPT_CHARS="1000",
        ) as running,
    ):  # fmt: skip
        yield running


@pytest.mark.slow
@pytest.mark.timeout(1_560)  # ten minutes of requests, and more beside other work
def test_schemathesis_finds_nothing_with_all_checks(service: RlvrService, tmp_path: Path):
    """Every operation, alone and after others, with data that fits the document and data that does not: data that fits
    is accepted, other data is refused, and each answer has a status, a type and a shape that the document names."""
    pytest.importorskip("schemathesis", reason="the extra [dev] is not installed")
    command = [
        sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run",
        f"{service.url}/openapi.json", "--checks", "all", "--max-examples", "10", "--seed", "1", "--no-color",
        "--request-timeout", "300", "--max-response-time", "300", "--suppress-health-check", "all",
    ]  # fmt: skip
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": HOOKS}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1_500, env=environment)
    found = re.search(r"^=+ (?:ERRORS|FAILURES) =+$", done.stdout, re.MULTILINE)
    late = [line for line in service.log_records() if line.get("seconds", 0) > 20]
    told = f"{done.stdout[found.start() if found else 0 :][:6_000]}{done.stderr[-2_000:]}\nrequests of 20 s: {late}"
    assert done.returncode == 0, told
    assert not [line for line in service.log_records() if line["level"] == "error"]
    assert service.get("/health").json()["status"] == "ok"


def test_the_option_schemas_are_those_of_the_verifiers():
    for name, options in OPTIONS.items():
        assert options <= (options_of(name) or set()), name


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/train", {"max_iterations": 13}),
        ("/train", {"samples": 4}),
        ("/train", {"prompt": "x" * 1001}),
        ("/train", {"context": "x" * 1001}),
        ("/train", {"verifiers": ["math"]}),
        ("/train", {"verifiers": ["code"]}),
        ("/train", {"verifiers": ["judge"]}),
        ("/train", {"verifiers": [{"name": "draft", "weight": 0}]}),
        ("/train", {"verifiers": ["required_words"]}),
        ("/train", {"verifiers": [{"name": "regex", "options": {"pattern": "a", "seconds": 3}}]}),
        ("/train", {"tests": ["assert f(1) == 2", {"input": "1", "output": "2"}]}),
        ("/train", {"item": {"x": 1}}),
        ("/train", {"answer": "1", "grader": {"type": "python", "source": "def grade(sample, item): return 1"}}),
        ("/train", {"grader": {"type": "score_model", "model": "m", "input": [{"role": "user", "content": "x"}]}}),
        ("/feedback", {"rating": 1.0}),
        ("/feedback", {"rating": 1.0, "session_id": "s"}),
        ("/feedback", {"rating": 1.0, "session_id": "s", "iteration": 1, "experience_id": 1}),
        ("/grade", {}),
        ("/grade", {"answers": []}),
        ("/grade", {"answers": ["a"], "items": [{"sample": {}}]}),
        ("/grade", {"answers": ["a"], "verifiers": ["math"]}),
        ("/grade", {"items": [{"sample": {}}]}),
        ("/grade", {"items": [], "grader": {"type": "python", "source": "def grade(sample, item): return 1"}}),
    ],
)
def test_what_is_refused_is_not_promised(service: RlvrService, path: str, body: dict[str, Any]):
    """With limits that are not the defaults: the document is that of the running service."""
    body = {"task_id": "t", "prompt": "p", **body} if path == "/train" else body
    assert not fits(service, path, body)
    assert service.post(path, body).status_code == 422


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/train", {"max_iterations": 12, "samples": 3, "prompt": "x" * 1000, "min_confidence": 0}),
        ("/train", {"answer": "1", "verifiers": ["math", {"name": "length", "weight": 0, "options": {"at_most": 9}}]}),
        ("/train", {"grader": {"type": "string_check", "operation": "eq", "input": "{{ sample.output_text }}",
                               "reference": "{{ item.rows[0].answer }}"}, "item": {"rows": [{"answer": "x"}]}}),
        ("/grade", {"answers": ["def f(): return 1"], "tests": ["assert f() == 1"], "verifiers": ["code"]}),
        ("/grade", {"items": [{"sample": {"output_text": "x"}}], "grader": {
            "type": "multi", "calculate_output": "2 * same", "graders": {
                "same": {"type": "string_check", "operation": "eq", "input": "a", "reference": "a"}}}}),
    ],
)  # fmt: skip
def test_what_is_promised_is_accepted(service: RlvrService, path: str, body: dict[str, Any]):
    body = {"task_id": "t", "prompt": "p", "max_iterations": 1, **body} if path == "/train" else body
    assert fits(service, path, body)
    answer = service.post(path, body)
    assert answer.status_code == 200, answer.text


def fits(service: RlvrService, path: str, body: dict[str, Any]) -> bool:
    document = service.get("/openapi.json").json()
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return jsonschema.Draft202012Validator({**document, **schema}).is_valid(body)
