"""Errors that the REST API names: unknown ids, and the HTTP status of each way a session can end."""

from __future__ import annotations

from typing import Any

from rlvr.store import StoreDown
from rlvr.web.errors import HttpProblem
from rlvr.web.logs import get_logger

# The error code a session ended with -> the status of the response that waited for it. Codes of an endpoint begin with
# `endpoint_`.
SESSION_STATUS = {
    "endpoint_timeout": 504,
    "empty_answer": 502,
    "judge_failed": 502,
    "task_invalid": 422,
    "cancelled": 409,
    "interrupted": 503,
    "store_down": 503,
    "generator_loading": 503,
    "generator_down": 503,
    "generator_failed": 502,
    "prompt_not_understood": 422,
    "no_generator": 503,
    "busy": 429,
}
NO_GENERATOR = (
    "no generator is set up: set LLM_ENDPOINT (a text endpoint) or RLVR_MODEL (a folder, a hub name, a run), "
    "or start with --demo"
)
GENERATOR_DOWN = "the generator is down: GET /health says why"  # which may name hosts and paths
log = get_logger("rlvr.service.http")


def not_found(kind: str, name: object) -> HttpProblem:
    return HttpProblem(404, "not_found", f"{kind} {str(name)[:200]!r} is unknown here")


def stopping() -> HttpProblem:
    return HttpProblem(503, "stopping", "the service is stopping; try again when it is back", retry_after=10)


def verifier_unavailable(error: ValueError) -> HttpProblem:
    """The HTTP error for a verifier that cannot run on this machine; the reason may name paths, so only the log has
    it."""
    log.warning("a verifier cannot run here", reason=str(error))
    return HttpProblem(
        503, "verifier_unavailable", "this machine cannot run a verifier of the request; its log says why"
    )


def store_unavailable(error: StoreDown) -> HttpProblem:
    log.warning("a request met a database that is down", reason=str(error))
    detail = f"the database is {error.reason}; nothing was written in part; try again"
    return HttpProblem(503, "store_down", detail, retry_after=5)


def session_problem(session_id: str, error: dict[str, Any]) -> HttpProblem:
    """The error of a request that waited for a session that failed."""
    code = str(error.get("code", "failed"))
    status = SESSION_STATUS.get(code, 502 if code.startswith("endpoint_") else 500)
    retry_after = error.get("retry_after") if status in (429, 503) else None
    message = GENERATOR_DOWN if code == "generator_down" else error.get("message", code)
    detail = f"{message}; its answers are kept: GET /sessions/{session_id}"
    return HttpProblem(status, code, detail, session_id=session_id, retry_after=retry_after)
