"""Every refusal of the service, in one shape: `{"detail": ..., "code": ..., "request_id": ...}`.

`field` is there where one field of the request is at fault, `session_id` where a session was begun: what it had done
by then is kept under that id. Exercised by tests/test_service_mistakes.py.
"""

from __future__ import annotations

import json
from typing import Any

# What a session ended with -> the status of an answer that waited for it. Codes of an endpoint begin with `endpoint_`.
STATUS = {
    "endpoint_timeout": 504,
    "empty_answer": 502,
    "judge_failed": 502,
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
LONGEST = 4_000  # characters of a detail: it may quote what was sent
NO_GENERATOR = (
    "no generator is set up: set LLM_ENDPOINT (a text endpoint) or RLVR_MODEL (a folder, a hub name, a run), "
    "or start with --demo"
)


class Problem(Exception):
    """An answer that is not the one that was asked for. `code` is for programs, `detail` for people."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        field: str = "",
        session_id: str = "",
        retry_after: float | None = None,
    ) -> None:
        super().__init__(detail)
        self.status, self.code, self.detail = status, code, detail[:LONGEST]
        self.field, self.session_id, self.retry_after = field, session_id, retry_after

    def body(self, request_id: str) -> bytes:
        told: dict[str, Any] = {"detail": self.detail, "code": self.code, "request_id": request_id}
        told |= {"field": self.field} if self.field else {}
        told |= {"session_id": self.session_id} if self.session_id else {}
        return json.dumps(told).encode()

    def headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, round(self.retry_after)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.status in (408, 413):
            headers["connection"] = "close"
        return headers


def not_found(what: str, name: object) -> Problem:
    return Problem(404, "not_found", f"{what} {str(name)[:200]!r} is unknown here")


def of_session(session_id: str, error: dict[str, Any]) -> Problem:
    """What a caller who waited for a session is told where it did not end well."""
    code = str(error.get("code", "failed"))
    status = STATUS.get(code, 502 if code.startswith("endpoint_") else 500)
    after = error.get("retry_after")
    told = f"{error.get('message', code)}; what was done is kept: GET /sessions/{session_id}"
    return Problem(status, code, told, session_id=session_id, retry_after=after if status in (429, 503) else None)
