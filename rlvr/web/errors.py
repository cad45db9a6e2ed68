"""The error type of both servers: an exception that becomes a JSON response.

    raise HttpProblem(404, "not_found", "session 's-1' is unknown here")

`HttpProblem` is the service's form (`rlvr.service.session_problems` has its codes);
`rlvr.tinker_server.protocol.errors` has the other.
"""

from __future__ import annotations

import json
from typing import Any

MAX_DETAIL_CHARS = 4_000  # a detail may quote what the client sent


class HttpError(Exception):
    """A response that is not the requested one. `str(error)` is its `detail`."""

    status = 500
    retry_after: float | None = None

    def content(self, request_id: str) -> dict[str, Any]:
        """The fields of the JSON body."""
        raise NotImplementedError

    def body(self, request_id: str) -> bytes:
        return json.dumps(self.content(request_id)).encode()

    def headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, round(self.retry_after)))
        if self.status in (408, 413):
            headers["connection"] = "close"
        return headers


class HttpProblem(HttpError):
    """`{"detail": ..., "code": ..., "request_id": ...}`: `code` is for programs, `detail` for people.

    `field` names the request's field that is at fault, of a 422 always: `body` for the body as a whole. `session_id`
    is a session that was started: its record is kept.
    """

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        field: str = "",
        session_id: str = "",
        retry_after: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status, self.code, self.detail = status, code, detail[:MAX_DETAIL_CHARS]
        self.field = field or ("body" if status == 422 else "")
        self.session_id, self.retry_after = session_id, retry_after
        self._headers = headers or {}

    def content(self, request_id: str) -> dict[str, Any]:
        content: dict[str, Any] = {"detail": self.detail, "code": self.code, "request_id": request_id}
        content |= {"field": self.field} if self.field else {}
        return content | ({"session_id": self.session_id} if self.session_id else {})

    def headers(self) -> dict[str, str]:
        headers = {**super().headers(), **self._headers}
        return {**headers, "www-authenticate": "Bearer"} if self.status == 401 else headers
