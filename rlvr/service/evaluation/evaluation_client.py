"""The evaluation suite as a client of a running service: it starts sessions and polls them until they end.

    async with EvaluationClient(url, key) as client:
        await client.reach()
        outcome = await client.work(task, options)

Nothing of the service is imported, so the suite measures what any client would see. A session survives a broken
connection; one that takes longer than `timeout_s` is cancelled and counted as an error. It uses `/evaluate`, not
`/train`: a service that had learned the tasks would be measured wrongly.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rlvr.service.evaluation.evaluation_tasks import EvalTask

FIRST_POLL_S, LONGEST_POLL_S = 0.1, 2.0  # between two reads of a session
PATIENCE_S = 30.0  # how long a service that answered before may be down
LONGEST_BUSY_S = 900.0  # how long it may be too busy for another session, or loading its model
RETRIED = {True: (429, 503), False: (429, 502, 503, 504)}  # statuses, by whether the request may start a session
FINAL = ("done", "failed", "cancelled", "interrupted")


class Unreachable(RuntimeError):
    """No service that can run sessions answers at this address."""


class NoKey(ValueError):
    """The service needs an API key, or the given one is unknown."""


class RefusedRequest(ValueError):
    """The service refused a request."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True)
class SessionOptions:
    """The options of every session."""

    target: float
    max_iterations: int | None
    timeout_s: float
    judge: bool


@dataclass(frozen=True)
class SuiteSession:
    """The result of one session: the `metrics` of /evaluate, and an `error` {"code", "message"} if it failed."""

    session_id: str
    status: str
    metrics: dict[str, Any]
    error: dict[str, str] | None
    judged: bool  # also by a model


class EvaluationClient:
    def __init__(self, url: str, key: str = "") -> None:
        import httpx2

        self.url, self._http = url.rstrip("/"), httpx2
        if not (key.isascii() and key.isprintable()):
            raise ValueError("RLVR_API_KEY has characters that are not allowed in a header")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        is_local = urlsplit(self.url).hostname in ("127.0.0.1", "localhost", "::1")  # without a proxy
        try:
            self._client = httpx2.AsyncClient(
                base_url=self.url, headers=headers, timeout=30.0, follow_redirects=False, trust_env=not is_local
            )
        except (httpx2.InvalidURL, UnicodeError, ValueError) as error:
            raise ValueError(f"--url {url!r}: {error}; expected one like http://127.0.0.1:3035") from None
        self._started: set[str] = set()
        self.no_judge = ""  # why designs are checked by rules only, once the service has refused a judge

    async def __aenter__(self) -> EvaluationClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def reach(self) -> dict[str, Any]:
        """The health of the service; Unreachable if it cannot run sessions."""
        try:
            response = await self._client.get("/health")
            health = response.json() if response.status_code == 200 else None
        except (self._http.HTTPError, self._http.InvalidURL, OSError) as error:
            raise Unreachable(
                f"no service answers at {self.url}: {_describe(error)}; start one with `rlvr serve`"
            ) from None
        except ValueError:
            health = None
        if response.status_code in (401, 403):
            raise NoKey(f"{self.url} needs an API key: set RLVR_API_KEY")
        if not isinstance(health, dict) or not isinstance(health.get("generator"), dict):
            raise Unreachable(f"{self.url} is not this service (GET /health: {response.status_code})")
        if health["generator"].get("state") == "absent":  # one that is down may recover: a session shows it
            raise Unreachable(f"{self.url} cannot run sessions: {health.get('detail') or health['generator']}")
        return health

    async def work(self, task: EvalTask, options: SessionOptions) -> SuiteSession:
        """One session from its start to its end."""
        judged = options.judge and not self.no_judge and bool(task.rubric)
        body = task.body(judged) | {"min_confidence": options.target}
        body |= {"max_iterations": options.max_iterations} if options.max_iterations else {}
        try:
            accepted = await self._send("POST", "/evaluate?background=true", body)
        except RefusedRequest as refusal:
            if not judged or refusal.field != "verifiers":
                raise
            self.no_judge = str(refusal)  # then rules decide alone, and the report says so
            return await self.work(task, options)
        try:
            session_id = str(accepted["session_id"])
            self._started.add(session_id)
            state = await self._wait_until_final(session_id, options.timeout_s)
            metrics = (await self._send("GET", f"/sessions/{session_id}/evaluation"))["detailed_metrics"]
            status = state["status"]
        except KeyError as missing:
            raise Unreachable(f"{self.url} is not this service: its response lacks {missing}") from None
        self._started.discard(session_id)  # `abandon` cancels the others
        error = state.get("error") or (None if status == "done" else {"code": status, "message": ""})
        return SuiteSession(session_id, status, metrics, error, judged)

    async def abandon(self) -> None:
        """Try to cancel all running sessions."""
        for session_id in list(self._started):
            with contextlib.suppress(self._http.HTTPError):
                await self._client.post(f"/sessions/{session_id}/cancel")

    async def _wait_until_final(self, session_id: str, timeout_s: float) -> dict[str, Any]:
        """The final state of the session; after `timeout_s` it is cancelled and has a timeout error."""
        end, pause = time.monotonic() + timeout_s, FIRST_POLL_S
        late = False
        while True:
            state = await self._send("GET", f"/sessions/{session_id}")
            if state["status"] in FINAL:
                return state | ({"error": _timeout_error(timeout_s)} if late else {})
            if time.monotonic() > end + PATIENCE_S:
                return state | {"error": _timeout_error(timeout_s)}
            if time.monotonic() > end and not late:
                late = True
                with contextlib.suppress(RefusedRequest):  # it may just have ended
                    await self._send("POST", f"/sessions/{session_id}/cancel")
            await asyncio.sleep(pause)
            pause = min(LONGEST_POLL_S, pause * 1.5)

    async def _send(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Send a request, repeat it while the service is busy or down for a while, and return its response."""
        start, pause = time.monotonic(), 0.5
        end = start + PATIENCE_S
        while True:
            try:
                response = await self._client.request(method, path, json=body)
                reply, status = _read(response), response.status_code
                if status < 300:
                    return reply
                why = f"{method} {path.partition('?')[0]}: {status} {reply.get('detail', '')}"
                if status not in RETRIED[body is not None] or reply.get("code") == "no_generator":
                    break
                if status == 429 or reply.get("code") == "generator_loading":
                    end = max(end, start + LONGEST_BUSY_S)
                wait = _retry_after(response.headers.get("retry-after", ""), pause)
            except self._http.TransportError as error:
                why, wait, reply, status = f"{method} {path}: {_describe(error)}", pause, {}, 0
                if (
                    method == "POST" and body is not None
                ):  # the session may have started: another would count the task twice
                    raise Unreachable(f"{self.url} stopped answering: {why}") from None
            if time.monotonic() + wait > end:
                raise Unreachable(f"{self.url} stopped answering: {why}")
            await asyncio.sleep(min(wait, PATIENCE_S))
            pause = min(5.0, pause * 2)
        if status in (401, 403):
            raise NoKey(f"{why}; set RLVR_API_KEY to a key of this service")
        if status >= 500:
            raise Unreachable(f"{self.url} cannot run sessions: {why}")
        raise RefusedRequest(why, str(reply.get("field", "")))


def _read(response: Any) -> dict[str, Any]:
    try:
        body = response.json()
    except ValueError:
        body = None
    return body if isinstance(body, dict) else {"detail": response.text[:200]}


def _retry_after(header: str, otherwise: float) -> float:
    """The seconds of a Retry-After header."""
    return min(PATIENCE_S, float(header)) if header.isascii() and header.isdigit() else otherwise


def _timeout_error(timeout_s: float) -> dict[str, str]:
    return {"code": "timeout", "message": f"not over after {timeout_s:g} s (--timeout)"}


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
