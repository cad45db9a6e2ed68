"""One completion from a model's HTTP endpoint, asked again where that can help, or the reason why not.

    endpoint = Endpoint("http://127.0.0.1:8000/v1", "my-model", key_variable="MODEL_KEY")
    async with Line(endpoint) as line:
        reply = await line.ask({"messages": messages, "temperature": 0}, cost)      # raises NoReply

Two dialects: OpenAI's chat completions, and a plain one, `{"prompt": ...}` in and `{"text": ...}` out. Asked again:
refused and broken connections, 408, 429, 5xx and replies out of form, after growing random waits or what `Retry-After`
says; a time-out once. Everything else is final. Redirects are never followed: they would carry the key and the texts
elsewhere. The key stands in an environment variable and in the request, and is blotted out of what the endpoint says.

The judge (`rlvr.reward.judge`) and the sampler of text endpoints (`rlvr.clients.endpoint`) ask this way. Left out on
purpose: streaming, tools, images, and limits by tokens per minute (the endpoint's 429 says it better).
`python -m pytest tests/test_reward_judge.py tests/test_clients_endpoint.py` exercises it against real servers.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

MAX_REPLY = 4 << 20  # bytes of one reply, unpacked
FIRST_WAIT, LONGEST_WAIT = 0.5, 8.0  # seconds before the second attempt, and between any two
CONNECT_SECONDS = 10.0
MOST_TOKENS = 1 << 30  # of one reply, as an endpoint counts them
_TEXTS = ("text", "response", "generated_text", "content")  # where the plain dialect may have its text
LONGEST_ASKED = 60.0  # seconds that an endpoint may ask for by Retry-After; one that asks for more is down

DOWN = ("unreachable", "rate_limited", "redirected", "refused")  # what one request met, all will meet
_TOO_LONG = ("context_length", "context length", "too long", "maximum context", "too many tokens")


class NoReply(Exception):
    """No usable reply, and why: `reason` is a short code.

    `unreachable` (no connection), `rate_limited` (429, or a Retry-After beyond patience), `failed` (5xx, 408),
    `timeout`, `redirected`, `refused` (the key, the path, the model), `rejected` (this text), `bad_reply` (out of
    form), `empty` (no text in it), `unfinished` (none before its tokens ran out).

    `of_text` says that the text sent may be what caused it (a filter, a length, a model that never stopped): whether
    it is, only another text can tell. `retry_after` is how long the endpoint asked to be left alone.
    """

    def __init__(
        self, reason: str, message: str, *, of_text: bool = False, too_long: bool = False, retry_after: float = 0.0
    ) -> None:
        super().__init__(message)
        self.reason, self.of_text, self.too_long, self.retry_after = reason, of_text, too_long, retry_after


@dataclass(frozen=True)
class Reply:
    """`ended` is the endpoint's word for why it stopped ("" where it says nothing); `counted`: it counted tokens."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ended: str = ""
    counted: bool = False


@dataclass
class Cost:
    """What an answer took: every request, those that failed too."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Dialect(str, Enum):
    """How an endpoint is spoken to."""

    CHAT = "chat"  # POST {base_url}/chat/completions, as OpenAI has it
    PLAIN = "plain"  # POST {base_url}, {"prompt": ...} in, {"text": ...} out


@dataclass(frozen=True)
class Endpoint:
    """Where to ask and how often. `body` is what every request says beside its own; null takes a field away.

    `empty_again`: an empty reply is chance, and worth another request (where a model samples), instead of an answer
    that somebody made it give (where a model judges).
    """

    base_url: str
    model: str
    key_variable: str = ""
    body: dict[str, Any] = field(default_factory=dict[str, Any])
    timeout_s: float = 60.0
    retries: int = 4
    concurrency: int = 16
    dialect: Dialect = Dialect.CHAT
    empty_again: bool = False

    @property
    def url(self) -> str:
        return self.base_url.rstrip("/") + "/chat/completions" if self.dialect is Dialect.CHAT else self.base_url

    @property
    def key(self) -> str:
        return os.environ.get(self.key_variable, "") if self.key_variable else ""

    def check(self, what: str) -> None:
        """ValueError where these settings cannot work; nothing is sent."""
        try:
            parts = urlsplit(self.base_url)
            sound = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except (ValueError, AttributeError, TypeError):
            parts, sound = None, False
        if not sound or parts is None or parts.query or parts.fragment:
            tail = "v1" if self.dialect is Dialect.CHAT else "generate"
            raise ValueError(
                f"{what}: base_url={_bare(self.base_url)!r}, expected one like 'http://127.0.0.1:8000/{tail}'"
            )
        if "@" in parts.netloc:
            raise ValueError(
                f"{what}: base_url holds a password, which a run's files would show; put the key into an environment "
                "variable and name that with api_key_env"
            )
        if self.dialect is Dialect.CHAT and (not isinstance(self.model, str) or not self.model):
            raise ValueError(f"{what}: model={self.model!r}, expected the name under which {self.base_url} serves it")
        if self.key_variable and not self.key:
            raise ValueError(
                f"{what}: api_key_env={self.key_variable!r}, but no such environment variable is set here; export it, "
                "or leave api_key_env out for an endpoint without keys"
            )
        if self.key and not (self.key.isascii() and self.key.isprintable()):
            raise ValueError(f"{what}: the key in {self.key_variable} holds characters that no header can carry")
        for name, low, high in (("timeout_s", 0.01, 3600), ("retries", 0, 20), ("concurrency", 1, 1024)):
            given, kind = getattr(self, name), (int, float) if name == "timeout_s" else int
            if isinstance(given, bool) or not isinstance(given, kind) or not low <= given <= high:
                raise ValueError(f"{what}: {name}={given!r}, expected a number from {low:g} to {high:g}")


def _bare(url: Any) -> str:
    """A URL for a message, without what may be a password or a key in it."""
    return str(url).partition("?")[0].rpartition("@")[2][:200]


class Line:
    """Connections to an endpoint, on the event loop that asks.

    With `remembers` it is for one batch: once the endpoint is found down, nobody else waits for it. Without, it may
    stay for good: every request finds out anew.
    """

    def __init__(self, endpoint: Endpoint, *, remembers: bool = True) -> None:
        import httpx2  # the extras `judge` and `serve`

        self.endpoint, self._http, self._remembers = endpoint, httpx2, remembers
        self._down: NoReply | None = None
        headers = {"authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
        limits = httpx2.Limits(max_connections=endpoint.concurrency)
        # Beside the time to connect, one deadline of our own per attempt: a server that drips bytes resets any other.
        patience = httpx2.Timeout(None, connect=min(CONNECT_SECONDS, endpoint.timeout_s))
        self._client = httpx2.AsyncClient(headers=headers, follow_redirects=False, timeout=patience, limits=limits)

    @property
    def where(self) -> str:
        return self.endpoint.url

    async def __aenter__(self) -> Line:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._client.aclose()

    async def ask(self, request: Mapping[str, Any], cost: Cost) -> Reply:
        """What the endpoint says, never empty; NoReply once no further attempt is allowed or would help."""
        named = {"model": self.endpoint.model} if self.endpoint.model else {}
        fields = {**named, **request, **self.endpoint.body}
        content = json.dumps({name: value for name, value in fields.items() if value is not None}).encode()
        late = 0
        for attempt in range(self.endpoint.retries + 1):
            async with _gate(self.endpoint):
                if self._down is not None:
                    raise self._down
                cost.requests += 1
                reply, wait = await self._once(content)
            if isinstance(reply, Reply):
                cost.prompt_tokens += reply.prompt_tokens
                cost.completion_tokens += reply.completion_tokens
                return reply
            late += reply.reason == "timeout"
            if wait is None or attempt == self.endpoint.retries or late == 2:
                if reply.reason in DOWN and self._remembers:
                    self._down = reply
                raise reply
            await asyncio.sleep(max(wait, random.uniform(0.5, 1) * min(LONGEST_WAIT, FIRST_WAIT * 2**attempt)))
        raise AssertionError("the last attempt returns or raises")

    async def _once(self, content: bytes) -> tuple[Reply | NoReply, float | None]:
        """One attempt: a reply, or why there is none and how long to wait at least; None where no wait will help."""
        where, http = self.endpoint.url, self._http
        try:
            async with asyncio.timeout(self.endpoint.timeout_s):
                head = {"content-type": "application/json"}
                async with self._client.stream("POST", where, content=content, headers=head) as response:
                    body = b""
                    async for chunk in response.aiter_bytes():
                        body += chunk
                        if len(body) > MAX_REPLY:
                            return NoReply("bad_reply", f"{where} sent more than {MAX_REPLY:,} bytes"), None
        except TimeoutError:
            late = f"{where} did not answer within {self.endpoint.timeout_s:g} s (timeout_s)"
            return NoReply("timeout", late, of_text=True), 0.0
        except http.TransportError as error:
            said = self._blot(str(error)) or "connection broken"
            return NoReply("unreachable", f"{where} cannot be reached: {type(error).__name__}: {said}"), 0.0
        except (http.HTTPError, http.InvalidURL, http.StreamError) as error:
            return NoReply("bad_reply", f"{where}: {type(error).__name__}: {self._blot(str(error))}"), None
        status, said = response.status_code, self._blot(body[:2000].decode("utf-8", "replace")).strip()[:500]
        if status == 200:
            read = self._read(body, said)
            return read, 0.0 if isinstance(read, NoReply) and self._again(read) else None
        if 300 <= status < 400:
            return NoReply("redirected", f"{where} answered {status}, a redirect, which is not followed"), None
        message = f"{where} answered {status}: {said}"
        if status in (408, 429) or status >= 500:
            asked = _retry_after(response.headers.get("retry-after", ""))
            if asked > LONGEST_ASKED:
                message += f" (come back in {asked:.0f} s)"
                return NoReply("rate_limited", message, retry_after=asked), None
            return NoReply("rate_limited" if status == 429 else "failed", message, retry_after=asked), asked
        if status in (400, 403, 413, 422, 451):  # 403 also comes from a firewall that dislikes the text
            long = status == 413 or any(mark in said.lower() for mark in _TOO_LONG)
            return NoReply("rejected", message, of_text=True, too_long=long), None
        return NoReply("refused", message), None  # 401, 404: the key, the path, the model

    async def knock(self) -> NoReply | None:
        """Whether somebody is there, without asking for anything: what is wrong, or None. Never asked again."""
        where, http = self.endpoint.url, self._http
        try:
            async with asyncio.timeout(min(CONNECT_SECONDS, self.endpoint.timeout_s)):
                async with self._client.stream("GET", where) as response:  # most answer 405, and that is an answer
                    status = response.status_code
        except TimeoutError:
            return NoReply("timeout", f"{where} does not answer")
        except (http.HTTPError, http.InvalidURL, http.StreamError) as error:
            said = self._blot(str(error)) or "connection broken"
            return NoReply("unreachable", f"{where} cannot be reached: {type(error).__name__}: {said}")
        return NoReply("unreachable", f"{where} answered {status}") if status in (502, 503, 504) else None

    def _read(self, body: bytes, said: str) -> Reply | NoReply:
        where, dialect = self.endpoint.url, self.endpoint.dialect
        try:
            message = json.loads(body)
            text, ended = _text_of(message, dialect)
            usage = message.get("usage") or {}
            counts = [int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")]
            counts = [count if 0 <= count <= MOST_TOKENS else 0 for count in counts]  # nonsense is no count
            if text is not None and not isinstance(text, str):
                raise TypeError(f"content is a {type(text).__name__}")
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            what = "chat completion" if dialect is Dialect.CHAT else "text"
            return NoReply("bad_reply", f"{where} sent no {what} ({type(error).__name__}: {error}): {said[:200]}")
        if text and ended != "content_filter":
            return Reply(text, *counts, ended=ended if isinstance(ended, str) else "", counted=counts[1] > 0)
        message = f"{where} sent an empty message (finish_reason {ended!r})"
        if ended == "content_filter":
            return NoReply("rejected", message, of_text=True)
        if ended == "length":
            return NoReply("unfinished", f"{message}: max_tokens ran out before it said anything", of_text=True)
        return NoReply("empty", message, of_text=True)

    def _again(self, failure: NoReply) -> bool:
        """Whether a 200 without a usable reply is worth another request."""
        return self.endpoint.empty_again if failure.reason == "empty" else not failure.of_text

    def _blot(self, text: str) -> str:
        key = self.endpoint.key
        return text.replace(key, "[key]") if key else text


def _text_of(message: Any, dialect: Dialect) -> tuple[Any, Any]:
    """The text and why it ended."""
    if dialect is Dialect.CHAT:
        choice = message["choices"][0]
        return choice["message"].get("content"), choice.get("finish_reason")
    name = next((name for name in _TEXTS if name in message), None)
    if name is None:
        raise ValueError(f"expected one of {', '.join(_TEXTS)}")
    return message[name], message.get("finish_reason")


def _retry_after(header: str) -> float:
    """Seconds that a `Retry-After` asks for, as a number or a date; 0 where it says nothing of use."""
    try:
        return max(0.0, float(header)) if header.strip()[:1].isdigit() else max(0.0, _until(header))
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _until(date: str) -> float:
    return parsedate_to_datetime(date).timestamp() - time.time()


# One gate per event loop and endpoint, shared by batches that are judged at once; a loop that is gone takes its along.
_gates: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, int], asyncio.Semaphore]] = WeakKeyDictionary()


def _gate(endpoint: Endpoint) -> asyncio.Semaphore:
    gates = _gates.setdefault(asyncio.get_running_loop(), {})
    return gates.setdefault((endpoint.url, endpoint.concurrency), asyncio.Semaphore(endpoint.concurrency))
