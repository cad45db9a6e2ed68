"""Errors of the Tinker server, each with the HTTP status that makes the SDK raise at once.

The SDK retries 408, 409, 429 and every 5xx for five minutes, so only `Busy` and `LoadingError` use one of these. An
operation that was accepted and fails later is no exception: its future ends as a `RequestFailure`.
"""

from __future__ import annotations

from typing import Any

from rlvr.web.errors import MAX_DETAIL_CHARS, HttpError

MAX_PARAM_CHARS = 200  # it may be a name that the client sent


class TinkerServerError(HttpError):
    """An error of a request. `category` is `user` if the request is at fault, else `server`."""

    status = 400
    category = "user"
    code: str | None = None
    param: str | None = None  # the field at fault, for the clients of the open endpoints

    def content(self, request_id: str) -> dict[str, Any]:
        """What the Tinker SDK reads, and `error` for the clients of the open endpoints."""
        kind = "invalid_request_error" if self.category == "user" else "server_error"
        detail, param = str(self)[:MAX_DETAIL_CHARS], self.param and self.param[:MAX_PARAM_CHARS]
        error = {"message": detail, "type": kind, "param": param, "code": self.code}
        return {"detail": detail, "category": self.category, "request_id": request_id, "error": error}


class UserError(TinkerServerError):
    """The request is wrong, and stays wrong when it is repeated."""


class StatusError(TinkerServerError):
    """An error with a status of its own: 401, 406, 413, 415."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Forbidden(TinkerServerError):
    """The key does not permit this. (Objects of another key read as `NotFound`: their existence stays secret.)"""

    status = 403


class NotFound(TinkerServerError):
    status = 404
    code = "not_found"


class GoneError(TinkerServerError):
    """A session or a sampler existed and is gone; the SDK sends a sampling request again, and ends the heartbeat of a
    session."""

    status = 410


class ServerError(TinkerServerError):
    """The server's own fault, e.g. a full disk. Not a 5xx: the SDK would hang for minutes before it showed it."""

    status = 422
    category = "server"


class Busy(TinkerServerError):
    """A queue is full; the same request may be sent again after `retry_after` seconds."""

    status = 429

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class LoadingError(TinkerServerError):
    """The models are not loaded yet; the same request may be sent again after `retry_after` seconds."""

    status = 503
    category = "server"
    retry_after = 1.0

    def content(self, request_id: str) -> dict[str, Any]:
        return {**super().content(request_id), "status": "loading"}
