"""A judge behind a URL that fails, over HTTP: no confidence, never a zero, and nothing of its address in an answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")
from tests.kit.rlvr_service import RlvrService
from tests.kit.text_endpoint import EndpointReply, EndpointRequest, serving

FAILURES = {
    "status": EndpointReply("secret-of-the-judge", status=500, headers={"retry-after": "0"}),
    "garbage": EndpointReply(raw='{"secret-of-the-judge": [', status=200),
    "no verdict": EndpointReply("secret-of-the-judge: a fine answer."),
    "broken": EndpointReply("secret-of-the-judge", close="within"),
    "too long": EndpointReply("secret-of-the-judge", status=413),
}


@pytest.mark.slow
def test_a_failing_judge_gives_no_value_and_no_address(tmp_path: Path):
    def answer(asked: EndpointRequest) -> EndpointReply | str:
        if not asked.chat:
            return "A long enough answer in two sentences. It satisfies rules on form."
        return next(reply for name, reply in FAILURES.items() if f"case: {name}" in asked.prompt)

    with serving(answer) as endpoint:
        hidden = ("secret-of-the-judge", f"127.0.0.1:{endpoint.port}", endpoint.chat_url, endpoint.plain_url)
        with RlvrService(
            tmp_path, LLM_ENDPOINT=endpoint.plain_url, JUDGE_ENDPOINT=endpoint.chat_url, JUDGE_MODEL="judge-1"
        ) as service:
            for name in FAILURES:
                body = {"task_id": "t", "prompt": f"Say something. case: {name}", "max_iterations": 1}
                trained = service.post("/train", body)
                graded = service.post("/grade", {"prompt": body["prompt"], "answers": ["a"], "verifiers": ["judge"]})
                assert trained.status_code == graded.status_code == 200, (name, trained.text, graded.text)
                assert trained.json()["confidence"] is None, name
                assert any(text.startswith("unverified") for text in trained.json()["warnings"]), name
                (result,) = graded.json()["results"]
                assert (result["value"], result["outcome"], graded.json()["mean"]) == (None, "error", None), name
                stored = service.get("/experiences/t").json()
                assert all(row["reward"] is None for row in stored["experiences"]), name
                said = trained.text + graded.text + json.dumps(stored)
                assert not [text for text in hidden if text in said], name
        with RlvrService(
            tmp_path, LLM_ENDPOINT=endpoint.plain_url, JUDGE_ENDPOINT="http://127.0.0.1:9/v1", JUDGE_MODEL="judge-1"
        ) as service:  # nothing listens there
            trained = service.post("/train", {"task_id": "u", "prompt": "Say something.", "max_iterations": 1})
            assert trained.status_code == 200 and trained.json()["confidence"] is None
            assert "127.0.0.1" not in trained.text
