"""Refusals of the Tinker server, each with the HTTP status that the SDK turns into an error at once.

`status` was chosen with the SDK's retries in mind: it repeats 408, 409, 429 and every 5xx, for five minutes, so only
`Busy` uses one of these. An operation that was accepted and fails later is no exception: its future ends as `Failed`
(see `promises.py`). Exercised by tests/test_tinker_core.py.
"""

from __future__ import annotations


class CoreError(Exception):
    """What a client is told instead of an answer; `category` is `user` where the request was at fault."""

    status = 400
    category = "user"


class UserError(CoreError):
    """The request is wrong, and will be as wrong when it is repeated."""


class Forbidden(CoreError):
    """This key may not do this. (What belongs to another key reads as `NotFound`: its existence is not told.)"""

    status = 403


class NotFound(CoreError):
    status = 404


class Gone(CoreError):
    """It was there and is not any more; the SDK asks again for samples, and stops the heartbeat of a session."""

    status = 410


class ServerError(CoreError):
    """The server's own fault, e.g. a full disk. Not 5xx: the SDK would look hung for minutes before it said why."""

    status = 422
    category = "server"


class Busy(CoreError):
    """A queue is full; the same request may be sent again after `retry_after` seconds."""

    status = 429

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after
