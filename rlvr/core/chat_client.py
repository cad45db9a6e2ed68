"""A client of chat-completions endpoints: one completion with retries, or the reason why there is none.

    endpoint = Endpoint("http://127.0.0.1:8000/v1", "my-model", key_variable="MODEL_KEY")
    async with ChatClient(endpoint) as client:
        reply = await client.ask({"messages": messages, "temperature": 0}, cost)      # raises ChatError

Dialects: OpenAI's chat completions, a plain one, `{"prompt": ...}` in and `{"text": ...}` out, and OpenAI's older
completions, whose answers the caller reads (`fetch`). Retried are
refused and broken connections, 408, 429, 5xx and malformed replies, after growing random waits or after `Retry-After`;
a time-out is retried once. Everything else is final. Redirects are never followed: they would carry the key and the
texts elsewhere. The key comes from an environment variable and is redacted in what the endpoint says.

Used by the judge (`rlvr.reward.judge`), the sampler of text endpoints (`rlvr.clients.endpoint`) and a teacher behind an
endpoint (`rlvr.clients.teacher`). Left out on purpose: streaming, tools, images, and limits by tokens per minute (the
endpoint answers 429).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from enum import Enum
from functools import cache
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies
from weakref import WeakKeyDictionary

from rlvr.core.fair_queue import current_owner, in_turn_of
from rlvr.core.fair_slots import FairSlots

T = TypeVar("T")

MAX_REPLY = 4 << 20  # bytes of one reply, unpacked
FIRST_WAIT, LONGEST_WAIT = 0.5, 8.0  # seconds before the second attempt, and between any two
CONNECT_SECONDS = 10.0
MOST_TOKENS = 1 << 30  # of one reply, as an endpoint counts them
_TEXTS = ("text", "response", "generated_text", "content")  # where the plain dialect may have its text
MAX_RETRY_AFTER = 60.0  # seconds; an endpoint that asks for more counts as down

DOWN = ("unreachable", "rate_limited", "redirected", "refused")  # reasons that hold for every request
_TOO_LONG = ("context_length", "context length", "too long", "maximum context", "too many tokens")


class ChatError(Exception):
    """There is no usable reply; `reason` is a short code.

    `unreachable` (no connection), `rate_limited` (429, or a Retry-After that is too long), `failed` (5xx, 408),
    `timeout`, `redirected`, `refused` (the key, the path, the model), `rejected` (this text), `bad_reply` (out of
    form), `empty` (no text), `unfinished` (its tokens ran out before any text).

    `text_at_fault` says that the text sent may be what caused it (a filter, a length, a model that never stopped):
    whether
    it is, only another text can tell. `retry_after` is how long the endpoint asked to be left alone.
    """

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        text_at_fault: bool = False,
        too_long: bool = False,
        retry_after: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.reason, self.text_at_fault, self.too_long, self.retry_after = reason, text_at_fault, too_long, retry_after


@dataclass(frozen=True)
class ChatReply:
    """The text of a reply and its token counts. `ended` is the endpoint's finish reason ("" if it gives none);
    `counted`: it reported token counts."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ended: str = ""
    counted: bool = False


@dataclass
class Cost:
    """Requests, failed ones included, and tokens of one completion."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Dialect(str, Enum):
    """The protocol of an endpoint."""

    CHAT = "chat"  # POST {base_url}/chat/completions, as OpenAI has it
    PLAIN = "plain"  # POST {base_url}, {"prompt": ...} in, {"text": ...} out
    COMPLETIONS = "completions"  # POST {base_url}/completions, as OpenAI had it: here, to score tokens


@dataclass(frozen=True)
class Endpoint:
    """An endpoint's address and limits. `body` adds fields to every request; null removes a field.

    `retry_empty`: retry after an empty reply. Right for sampling, where it is chance; a judge must not, since the text
    that it judges may have caused it.
    """

    base_url: str
    model: str
    key_variable: str = ""
    body: dict[str, Any] = field(default_factory=dict[str, Any])
    timeout_s: float = 60.0
    retries: int = 4
    concurrency: int = 16
    dialect: Dialect = Dialect.CHAT
    retry_empty: bool = False

    @property
    def url(self) -> str:
        paths = {Dialect.CHAT: "/chat/completions", Dialect.COMPLETIONS: "/completions"}
        path = paths.get(self.dialect)
        return self.base_url.rstrip("/") + path if path else self.base_url

    @property
    def key(self) -> str:
        return os.environ.get(self.key_variable, "") if self.key_variable else ""

    def check(self, what: str) -> None:
        """ValueError if these settings cannot work; nothing is sent."""
        try:
            parts = urlsplit(self.base_url)
            sound = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except (ValueError, AttributeError, TypeError):
            parts, sound = None, False
        if not sound or parts is None or parts.query or parts.fragment:
            tail = "generate" if self.dialect is Dialect.PLAIN else "v1"
            raise ValueError(
                f"{what}: base_url={_bare(self.base_url)!r}, expected one like 'http://127.0.0.1:8000/{tail}'"
            )
        if "@" in parts.netloc:
            raise ValueError(
                f"{what}: base_url holds a password, which a run's files would show; put the key into an environment "
                "variable and name that with api_key_env"
            )
        if self.dialect is not Dialect.PLAIN and (not isinstance(self.model, str) or not self.model):
            raise ValueError(f"{what}: model={self.model!r}, expected the name under which {self.base_url} serves it")
        if self.key_variable and not self.key:
            raise ValueError(
                f"{what}: api_key_env={self.key_variable!r}, but no such environment variable is set here; export it, "
                "or leave api_key_env out for an endpoint without keys"
            )
        if self.key and not (self.key.isascii() and self.key.isprintable()):
            raise ValueError(
                f"{what}: the key in {self.key_variable} holds characters that are not allowed in a header"
            )
        for name, low, high in (("timeout_s", 0.01, 3600), ("retries", 0, 20), ("concurrency", 1, 1024)):
            given, kind = getattr(self, name), (int, float) if name == "timeout_s" else int
            if isinstance(given, bool) or not isinstance(given, kind) or not low <= given <= high:
                raise ValueError(f"{what}: {name}={given!r}, expected a number from {low:g} to {high:g}")


def _bare(url: Any) -> str:
    """A URL for messages, without a possible password or key."""
    return str(url).partition("?")[0].rpartition("@")[2][:200]


class ChatClient:
    """Connections to an endpoint, on the event loop of the caller.

    With `remember_failure` it serves one batch: once the endpoint is down, later requests fail at once. Without, it may
    live for good, and every request tries anew.
    """

    def __init__(self, endpoint: Endpoint, *, remember_failure: bool = True) -> None:
        import httpx2  # the extras `judge` and `serve`

        self.endpoint, self._http, self._remembers = endpoint, httpx2, remember_failure
        self._down: ChatError | None = None
        headers = {"authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
        limits = httpx2.Limits(max_connections=endpoint.concurrency)
        # One deadline per attempt besides the connect timeout: a server that drips bytes resets any other.
        patience = httpx2.Timeout(None, connect=min(CONNECT_SECONDS, endpoint.timeout_s))
        self._client = httpx2.AsyncClient(
            headers=headers,
            follow_redirects=False,
            timeout=patience,
            limits=limits,
            verify=_load_certificates() if _needs_tls(endpoint.base_url) else False,
        )

    @property
    def where(self) -> str:
        return self.endpoint.url

    async def __aenter__(self) -> ChatClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._client.aclose()

    async def ask(self, request: Mapping[str, Any], cost: Cost) -> ChatReply:
        """The reply, never empty; ChatError once no further attempt is allowed or would help."""
        reply = await self.fetch(request, self._read, cost)
        cost.prompt_tokens += reply.prompt_tokens
        cost.completion_tokens += reply.completion_tokens
        return reply

    async def fetch(self, request: Mapping[str, Any], read: Callable[[bytes], T | ChatError], cost: Cost) -> T:
        """What `read` makes of the body of the answer; ChatError as for `ask`, or as `read` returns it."""
        named = {"model": self.endpoint.model} if self.endpoint.model else {}
        fields = {**named, **request, **self.endpoint.body}
        content = json.dumps({name: value for name, value in fields.items() if value is not None}).encode()
        late = 0
        for attempt in range(self.endpoint.retries + 1):
            async with _gate(self.endpoint).hold(current_owner()):
                if self._down is not None:
                    raise self._down
                cost.requests += 1
                with in_turn_of(""):  # a thread looks up the host's name: this request had its turn
                    reply, wait = await self._once(content, read)
            if not isinstance(reply, ChatError):
                return reply
            late += reply.reason == "timeout"
            if wait is None or attempt == self.endpoint.retries or late == 2:
                if reply.reason in DOWN and self._remembers:
                    self._down = reply
                raise reply
            await asyncio.sleep(max(wait, random.uniform(0.5, 1) * min(LONGEST_WAIT, FIRST_WAIT * 2**attempt)))
        raise AssertionError("the last attempt returns or raises")

    async def _once(self, content: bytes, read: Callable[[bytes], T | ChatError]) -> tuple[T | ChatError, float | None]:
        """One attempt: a reply, or an error and the least wait before the next attempt; None if it is final."""
        where, http = self.endpoint.url, self._http
        try:
            async with asyncio.timeout(self.endpoint.timeout_s):
                head = {"content-type": "application/json"}
                async with self._client.stream("POST", where, content=content, headers=head) as response:
                    body = bytearray()  # grows in place: a reply may come byte by byte
                    async for chunk in response.aiter_bytes():
                        body += chunk
                        if len(body) > MAX_REPLY:
                            return ChatError("bad_reply", f"{where} sent more than {MAX_REPLY:,} bytes"), None
        except TimeoutError:
            late = f"{where} did not answer within {self.endpoint.timeout_s:g} s (timeout_s)"
            return ChatError("timeout", late, text_at_fault=True), 0.0
        except http.TransportError as error:
            detail = self._redact(str(error)) or "connection broken"
            return ChatError("unreachable", f"{where} cannot be reached: {type(error).__name__}: {detail}"), 0.0
        except (http.HTTPError, http.InvalidURL, http.StreamError) as error:
            return ChatError("bad_reply", f"{where}: {type(error).__name__}: {self._redact(str(error))}"), None
        status, detail = response.status_code, self._show(body)
        if status == 200:
            reply = read(bytes(body))
            return reply, 0.0 if isinstance(reply, ChatError) and self._again(reply) else None
        if 300 <= status < 400:
            return ChatError("redirected", f"{where} answered {status}, a redirect, which is not followed"), None
        message = f"{where} answered {status}: {detail}"
        if status in (401, 403) and self.endpoint.key_variable:  # its words may quote a part of the key
            message = f"{where} answered {status}: it may reject the API key in {self.endpoint.key_variable}"
        if status in (408, 429) or status >= 500:
            asked = _retry_after(response.headers.get("retry-after", ""))
            if asked > MAX_RETRY_AFTER:
                message += f" (come back in {asked:.0f} s)"
                return ChatError("rate_limited", message, retry_after=asked), None
            return ChatError("rate_limited" if status == 429 else "failed", message, retry_after=asked), asked
        if status in (400, 403, 413, 422, 451):  # 403 also comes from a firewall that dislikes the text
            long = status == 413 or any(mark in detail.lower() for mark in _TOO_LONG)
            return ChatError("rejected", message, text_at_fault=True, too_long=long), None
        return ChatError("refused", message), None  # 401, 404: the key, the path, the model

    async def ping(self) -> ChatError | None:
        """Check that a server answers: what is wrong, or None. Sends one GET without retries."""
        where, http = self.endpoint.url, self._http
        try:
            async with asyncio.timeout(min(CONNECT_SECONDS, self.endpoint.timeout_s)):
                async with self._client.stream("GET", where) as response:  # most answer 405, and that is an answer
                    status = response.status_code
        except TimeoutError:
            return ChatError("timeout", f"{where} does not answer")
        except (http.HTTPError, http.InvalidURL, http.StreamError) as error:
            detail = self._redact(str(error)) or "connection broken"
            return ChatError("unreachable", f"{where} cannot be reached: {type(error).__name__}: {detail}")
        return ChatError("unreachable", f"{where} answered {status}") if status in (502, 503, 504) else None

    def _read(self, body: bytes) -> ChatReply | ChatError:
        where, dialect, detail = self.endpoint.url, self.endpoint.dialect, self._show(body)
        try:
            message = json.loads(body)
            text, ended = _text_of(message, dialect)
            usage = message.get("usage") or {}
            counts = [int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")]
            counts = [count if 0 <= count <= MOST_TOKENS else 0 for count in counts]  # anything else is not a count
            if text is not None and not isinstance(text, str):
                raise TypeError(f"content is of type {type(text).__name__}")
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            what = "chat completion" if dialect is Dialect.CHAT else "text"
            return ChatError("bad_reply", f"{where} sent no {what} ({type(error).__name__}: {error}): {detail[:200]}")
        if text and ended != "content_filter":
            return ChatReply(text, *counts, ended=ended if isinstance(ended, str) else "", counted=counts[1] > 0)
        message = f"{where} sent an empty message (finish_reason {ended!r})"
        if ended == "content_filter":
            return ChatError("rejected", message, text_at_fault=True)
        if ended == "length":
            return ChatError("unfinished", f"{message}: max_tokens ran out before any text", text_at_fault=True)
        return ChatError("empty", message, text_at_fault=True)

    def _again(self, failure: ChatError) -> bool:
        """Whether a 200 without a usable reply is worth another request."""
        if failure.reason == "refused":
            return False
        return self.endpoint.retry_empty if failure.reason == "empty" else not failure.text_at_fault

    def _show(self, body: bytes | bytearray) -> str:
        """The beginning of an answer, for messages."""
        return self._redact(body[:2000].decode("utf-8", "replace")).strip()[:500]

    def _redact(self, text: str) -> str:
        key = self.endpoint.key
        return text.replace(key, "[key]") if key else text


def _needs_tls(url: str) -> bool:
    """Whether a connection can be encrypted: loading the certificates takes 5 MB and more time than most requests."""
    return any(address.startswith("https:") for address in (url.lower(), *getproxies().values()))


@cache
def _load_certificates() -> Any:
    """The certificates of all clients of this process: each would take 20 ms of its event loop to load them."""
    import httpx2

    return httpx2.create_ssl_context()


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
    """The seconds of a `Retry-After` header, a number or a date; 0 if it is neither."""
    try:
        return max(0.0, float(header)) if header.strip()[:1].isdigit() else max(0.0, _until(header))
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _until(date: str) -> float:
    return parsedate_to_datetime(date).timestamp() - time.time()


# One for each event loop and endpoint, shared by concurrent batches and dropped with the loop.
_gates: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, int], FairSlots]] = WeakKeyDictionary()


def _gate(endpoint: Endpoint) -> FairSlots:
    gates = _gates.setdefault(asyncio.get_running_loop(), {})
    return gates.setdefault((endpoint.url, endpoint.concurrency), FairSlots(endpoint.concurrency))
