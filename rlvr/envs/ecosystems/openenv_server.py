"""Sessions of a server of OpenEnv: HTTP for what it says of itself, a WebSocket for each episode. Tried with 0.10.

A server has so many sessions; more episodes wait for one. What it refuses or fails at is an `EpisodeError`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from rlvr.core.episode_slots import EpisodeSlots
from rlvr.core.types import Task
from rlvr.envs.ecosystems.json_server import MAX_BYTES, HttpStatusError, JsonServer, parse_answer
from rlvr.envs.limited_calls import EpisodeError

_LOOK_SECONDS = 0.2  # between two attempts at a server that is full
_NOT_THERE = (404, 405, 501)
Json = dict[str, Any]


class ServerFull(EpisodeError):
    """All sessions of the server are taken; it has `most`, if it said how many."""

    def __init__(self, text: str, most: int | None = None) -> None:
        super().__init__(text)
        self.most = most


class SessionEndError(EpisodeError):
    """The server closed the connection. A full server does, and what it said before may be lost."""


class OpenEnvServer(JsonServer):
    """The server at a URL: what it says of itself, and sessions of it. A request may take `seconds`."""

    def __init__(self, url: str, seconds: float) -> None:
        super().__init__("openenv", url, seconds)

    def find(self, path: str, body: Json | None = None) -> Any:
        """A JSON answer; None where the server has no such path or does not support it."""
        try:
            return self.get(path) if body is None else self.post(path, body)
        except HttpStatusError as error:
            if error.code in _NOT_THERE:
                return None
            raise

    def connect(self) -> OpenEnvConnection:
        return OpenEnvConnection(self)

    def count_tasks(self, choose: Callable[[Sequence[str]], Iterable[str | None]], most: int) -> dict[str, int]:
        """How many tasks each split has of those that `choose` takes, at most `most`; {} without a task API."""
        names = self.find("/list_environments") or []
        splits = [str(one["name"]) for one in self.find(f"/{names[0]}/splits") or []] if names else []
        counts: dict[str, int] = {}
        for split in filter(None, choose(splits)):
            number = self.post(f"/{names[0]}/num_tasks", {"split": split})["num_tasks"]
            if type(number) is not int or number < 0:
                raise ValueError(
                    f"openenv: {self.url}: the split {split!r} has num_tasks={number!r:.80}, expected a number"
                )
            counts[split] = min(number, most)
        return counts

    def count_sessions(self, most: int) -> int:
        """How many sessions the server has free, at most `most`."""
        opened: list[OpenEnvConnection] = []
        try:
            for _ in range(most):
                opened.append(self.connect())
                opened[-1].ask("state", None)
        except ServerFull as full:
            return min(most, full.most or len(opened) - 1)
        except SessionEndError:
            return len(opened) - 1
        except EpisodeError:  # a server without a state answers with an error, in a session all the same
            return most
        finally:
            for one in opened:
                one.close()
        return most


class OpenEnvConnection:
    """A session. Its methods block."""

    def __init__(self, server: OpenEnvServer) -> None:
        from websockets.sync.client import connect

        address = f"ws{server.url.removeprefix('http')}/ws"
        self._seconds, self._name = server.seconds, server.url
        self._opened = ExitStack()
        try:
            opening = connect(address, open_timeout=server.seconds, max_size=MAX_BYTES, proxy=None)
            self._socket = self._opened.enter_context(opening)
        except Exception as error:  # of the network, the handshake, the address
            raise EpisodeError(
                f"openenv: {address} opened no session ({type(error).__name__}: {error}); is the server running?"
            ) from error

    def ask(self, kind: str, data: Json | None) -> Json:
        """The `data` of the answer to a message."""
        from websockets.exceptions import ConnectionClosed

        message = {"type": kind} if data is None else {"type": kind, "data": data}
        try:
            with suppress(ConnectionClosed):  # a full server says so before it closes
                self._socket.send(json.dumps(message))
            answer = parse_answer(self._socket.recv(timeout=self._seconds))
        except TimeoutError:
            raise EpisodeError(f"openenv: {self._name} did not answer {kind!r} within {self._seconds:g} s") from None
        except ConnectionClosed as error:
            raise SessionEndError(f"openenv: {self._name} closed the session in {kind!r} ({error})") from error
        except Exception as error:  # the network, an answer that is no JSON
            raise EpisodeError(f"openenv: {self._name} ended in {kind!r} ({type(error).__name__}: {error})") from error
        data = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(data, dict):
            raise EpisodeError(f"openenv: {self._name} answered {kind!r} with {answer!r:.200}, expected type and data")
        if answer.get("type") == "error":
            said = f"openenv: {self._name}: {kind}: {data.get('code')}: {str(data.get('message'))[:500]}"
            if data.get("code") == "CAPACITY_REACHED":
                raise ServerFull(
                    f"{said}; wait until a session is free, or raise the server's max_concurrent_envs",
                    data.get("max_sessions"),
                )
            raise EpisodeError(said)
        return data

    def close(self) -> None:
        with suppress(Exception):  # it may be gone
            self._socket.send('{"type": "close"}')
        with suppress(Exception):
            self._opened.close()


class OpenEnvSessions:
    """Opens sessions and begins their episodes: by `reset`, with the options of the task."""

    def __init__(self, server: OpenEnvServer, options: Mapping[str, Any], max_concurrent: int) -> None:
        self.server, self._options = server, dict(options)
        self.slots = EpisodeSlots(max(1, server.count_sessions(max_concurrent)))

    def begin(self, task: Task) -> tuple[OpenEnvConnection, Json]:
        """A session and the answer to its reset. A full server is waited for, as long as a request may take."""
        deadline = time.monotonic() + self.server.seconds
        given = {**self._options, **task.meta.get("reset", {"seed": task.meta.get("seed")})}
        while True:
            connection = self.server.connect()
            try:
                return connection, connection.ask("reset", given)
            except (ServerFull, SessionEndError):
                connection.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(_LOOK_SECONDS)
            except BaseException:
                connection.close()
                raise
