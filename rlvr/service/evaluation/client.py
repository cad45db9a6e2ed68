"""The suite as a client of a running service: sessions in the background, asked for until they are over.

    async with ServiceClient(url, key) as client:
        await client.reach()
        outcome = await client.work(task, ask)

Nothing of the service is imported: what is measured is what any client would see. A session outlives a connection that
breaks; one that takes longer than `timeout_s` is cancelled and counted as an error. `/evaluate` is asked, not `/train`:
tasks that the service had learned would measure nothing. `python -m pytest tests/test_service_evaluation.py` exercises
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rlvr.service.evaluation.tasks import EvalTask

FIRST_LOOK, LONGEST_LOOK = 0.1, 2.0  # seconds between two looks at a session
PATIENCE = 30.0  # seconds that a service which answered before may be away
LONGEST_BUSY = 900.0  # or too busy for another session, or still loading its model
AGAIN = {True: (429, 503), False: (429, 502, 503, 504)}  # by whether the request may begin a session
FINAL = ("done", "failed", "cancelled", "interrupted")


class Unreachable(RuntimeError):
    """There is no service at this address, or none that can run sessions."""


class NoKey(ValueError):
    """The service wants an API key, or another."""


class Refused(ValueError):
    """The service understood, and will not."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True)
class Ask:
    """What every session is asked for."""

    target: float
    max_iterations: int | None
    timeout_s: float
    judge: bool


@dataclass(frozen=True)
class Worked:
    """What became of one session: `metrics` are /evaluate's, `error` what it failed of, {"code", "message"}."""

    session_id: str
    status: str
    metrics: dict[str, Any]
    error: dict[str, str] | None
    judged: bool  # by a model too


class ServiceClient:
    def __init__(self, url: str, key: str = "") -> None:
        import httpx2

        self.url, self._http = url.rstrip("/"), httpx2
        if not (key.isascii() and key.isprintable()):
            raise ValueError("RLVR_API_KEY holds characters that no header can carry")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        own = urlsplit(self.url).hostname in ("127.0.0.1", "localhost", "::1")  # no proxy leads to this machine
        try:
            self._client = httpx2.AsyncClient(
                base_url=self.url, headers=headers, timeout=30.0, follow_redirects=False, trust_env=not own
            )
        except (httpx2.InvalidURL, UnicodeError, ValueError) as error:
            raise ValueError(f"--url {url!r}: {error}; expected one like http://127.0.0.1:3035") from None
        self._begun: set[str] = set()
        self.no_judge = ""  # why designs are checked by rules alone, once the service has said so

    async def __aenter__(self) -> ServiceClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def reach(self) -> dict[str, Any]:
        """What the service says of itself; Unreachable where nothing that can run sessions answers."""
        try:
            response = await self._client.get("/health")
            told = response.json() if response.status_code == 200 else None
        except (self._http.HTTPError, self._http.InvalidURL, OSError) as error:
            raise Unreachable(
                f"no service answers at {self.url}: {_named(error)}; start one with `rlvr serve`"
            ) from None
        except ValueError:
            told = None
        if response.status_code in (401, 403):
            raise NoKey(f"{self.url} wants an API key: set RLVR_API_KEY")
        if not isinstance(told, dict) or not isinstance(told.get("generator"), dict):
            raise Unreachable(f"{self.url} answers, but not as this service does (GET /health: {response.status_code})")
        if told["generator"].get("state") == "absent":  # one that is down may be back: a session finds out
            raise Unreachable(f"{self.url} cannot run sessions: {told.get('detail') or told['generator']}")
        return told

    async def work(self, task: EvalTask, ask: Ask) -> Worked:
        """One session from its start to its end."""
        judged = ask.judge and not self.no_judge and bool(task.rubric)
        body = task.body(judged) | {"min_confidence": ask.target}
        body |= {"max_iterations": ask.max_iterations} if ask.max_iterations else {}
        try:
            begun = await self._send("POST", "/evaluate?background=true", body)
        except Refused as refusal:
            if not judged or refusal.field != "verifiers":
                raise
            self.no_judge = str(refusal)  # rules alone decide then, and the report says so
            return await self.work(task, ask)
        try:
            session_id = str(begun["session_id"])
            self._begun.add(session_id)
            state = await self._over(session_id, ask.timeout_s)
            metrics = (await self._send("GET", f"/sessions/{session_id}/evaluation"))["detailed_metrics"]
            status = state["status"]
        except KeyError as missing:
            raise Unreachable(f"{self.url} does not answer as this service does: {missing} is missing") from None
        self._begun.discard(session_id)  # what was not seen to its end, `abandon` ends
        error = state.get("error") or (None if status == "done" else {"code": status, "message": ""})
        return Worked(session_id, status, metrics, error, judged)

    async def abandon(self) -> None:
        """End what is under way, as far as the service listens."""
        for session_id in list(self._begun):
            with contextlib.suppress(self._http.HTTPError):
                await self._client.post(f"/sessions/{session_id}/cancel")

    async def _over(self, session_id: str, timeout_s: float) -> dict[str, Any]:
        """The session once it is over; one that is late is cancelled, and says so."""
        end, pause = time.monotonic() + timeout_s, FIRST_LOOK
        late = False
        while True:
            state = await self._send("GET", f"/sessions/{session_id}")
            if state["status"] in FINAL:
                return state | ({"error": _late(timeout_s)} if late else {})
            if time.monotonic() > end + PATIENCE:
                return state | {"error": _late(timeout_s)}
            if time.monotonic() > end and not late:
                late = True
                with contextlib.suppress(Refused):  # it may have ended just now
                    await self._send("POST", f"/sessions/{session_id}/cancel")
            await asyncio.sleep(pause)
            pause = min(LONGEST_LOOK, pause * 1.5)

    async def _send(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """The reply to one request; asked again while the service is busy or away for a while."""
        start, pause = time.monotonic(), 0.5
        end = start + PATIENCE
        while True:
            try:
                response = await self._client.request(method, path, json=body)
                told, status = _read(response), response.status_code
                if status < 300:
                    return told
                why = f"{method} {path.partition('?')[0]}: {status} {told.get('detail', '')}"
                if status not in AGAIN[body is not None] or told.get("code") == "no_generator":
                    break
                if status == 429 or told.get("code") == "generator_loading":
                    end = max(end, start + LONGEST_BUSY)
                wait = _asked(response.headers.get("retry-after", ""), pause)
            except self._http.TransportError as error:
                why, wait, told, status = f"{method} {path}: {_named(error)}", pause, {}, 0
                if method == "POST" and body is not None:  # it may have begun: another would count the task twice
                    raise Unreachable(f"{self.url} went away: {why}") from None
            if time.monotonic() + wait > end:
                raise Unreachable(f"{self.url} went away: {why}")
            await asyncio.sleep(min(wait, PATIENCE))
            pause = min(5.0, pause * 2)
        if status in (401, 403):
            raise NoKey(f"{why}; set RLVR_API_KEY to a key of this service")
        if status >= 500:
            raise Unreachable(f"{self.url} cannot run sessions: {why}")
        raise Refused(why, str(told.get("field", "")))


def _read(response: Any) -> dict[str, Any]:
    try:
        told = response.json()
    except ValueError:
        told = None
    return told if isinstance(told, dict) else {"detail": response.text[:200]}


def _asked(header: str, otherwise: float) -> float:
    """Seconds that a Retry-After asks for."""
    return min(PATIENCE, float(header)) if header.isascii() and header.isdigit() else otherwise


def _late(timeout_s: float) -> dict[str, str]:
    return {"code": "timeout", "message": f"not over after {timeout_s:g} s (--timeout)"}


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
