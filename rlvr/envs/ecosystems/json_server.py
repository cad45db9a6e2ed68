"""A server of another project that answers JSON over HTTP, read within the same limits for all kinds.

An answer has at most `MAX_BYTES` and arrives within the server's `seconds`, from its first byte to its last. Redirects,
NaN and Infinity, and what is no JSON are errors: `EpisodeError`, with the address and what to do. Nothing is fetched
through a proxy, as the servers of environments are near.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, NoReturn
from urllib.parse import urlsplit

from rlvr.envs.limited_calls import EpisodeError
from rlvr.reward.reward_options import check_number

MAX_BYTES = 16 << 20  # of an answer
_PIECE = 64 << 10  # bytes that are read before the time is looked at
_SHOWN = 500  # bytes of an error's answer


class HttpStatusError(EpisodeError):
    """The server answered with another status than success: `code`."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class JsonServer:
    """The server of the environments of a `kind` at a URL. A request may take `seconds`; `cookies` are kept."""

    def __init__(self, kind: str, url: str, seconds: float) -> None:
        check_number(f"{kind}: seconds", seconds, 0, above=True)
        self.kind, self.seconds = kind, seconds
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{kind}: {url!r} is no address of a server; give one such as http://127.0.0.1:8000")
        # A session is a cookie, which a server on a name without dots sets too.
        policy = DefaultCookiePolicy(strict_ns_domain=DefaultCookiePolicy.DomainLiberal)
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), _NoRedirects, urllib.request.HTTPCookieProcessor(CookieJar(policy))
        )

    def begin_session(self) -> JsonServer:
        """The same server, with cookies of its own."""
        return type(self)(self.kind, self.url, self.seconds)

    def get(self, path: str) -> Any:
        return self._request(path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._request(path, json.dumps(body).encode())

    def _request(self, path: str, data: bytes | None) -> Any:
        what, end = f"{self.kind}: {self.url}{path}", time.monotonic() + self.seconds
        asked = urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": "application/json"})
        try:
            with self._opener.open(asked, timeout=self.seconds) as answer:
                raw = _read_to_end(answer, end)
            return parse_answer(raw)
        except urllib.error.HTTPError as error:
            with error:
                said = " ".join(error.read(_SHOWN).decode("utf-8", "replace").split())
            raise HttpStatusError(f"{what}: {error.code} ({error.reason}) {said}".rstrip(), error.code) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise EpisodeError(f"{what}: {_describe(error)}") from error

    @contextmanager
    def while_loading(self) -> Iterator[None]:
        """Turns what the server fails at, and answers of other forms than expected, into ValueError: nothing was played
        yet."""
        try:
            yield
        except EpisodeError as error:
            is_away = isinstance(error.__cause__, OSError) and "running" not in str(error)
            hint = "; is the server of the environment running?" if is_away else ""
            raise ValueError(f"{error}{hint}") from error
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.kind}: {self.url} does not answer as a server of {self.kind} does ({type(error).__name__}: "
                f"{error}); check the address, and the version of the server"
            ) from error


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would turn a POST into a GET, or lead to another machine."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        place = urlsplit(newurl)
        raise ValueError(
            f"the server redirects to {newurl:.200}, which is not followed; give the address that answers itself, "
            "such as "
            f"{place.scheme}://{place.netloc}"
        )


def _read_to_end(answer: http.client.HTTPResponse, end: float) -> bytes:
    """All that an answer holds; ValueError for too much of it, TimeoutError if it is not there by `end`."""
    pieces, size = list[bytes](), 0
    while piece := answer.read1(_PIECE):
        pieces.append(piece)
        size += len(piece)
        if size > MAX_BYTES:
            raise ValueError(f"the server's answer has more than {MAX_BYTES >> 20} MB")
        if time.monotonic() > end:
            raise TimeoutError("timed out")
    return b"".join(pieces)


def parse_answer(raw: bytes | str) -> Any:
    """The JSON of an answer; ValueError with what is wrong with it."""
    try:
        return json.loads(raw, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"the server's answer is no JSON ({error}): {raw[:80]!r}") from error
    except RecursionError:
        raise ValueError("the server's answer is nested too deep") from None


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"the server's answer has {word}, which is no number of JSON")


def _describe(error: Exception) -> str:
    if isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError):
        return "no answer in time"
    return str(getattr(error, "reason", "") or error) or type(error).__name__
