"""Environments behind a server of OpenEnv, over its WebSocket sessions: `env.name=openenv:http://127.0.0.1:8000`.

An environment whose actions have a field for text is played turn by turn (Gym's contract); one that lists tools is
played by calls of them. The tasks are those of the server's task API, train and test split, or seeds. Tried with
openenv 0.10; nothing of it is installed here.

A server has so many sessions; more episodes wait for one. What the server refuses or fails at is an error of the
episode, never a zero.
"""

from __future__ import annotations

import importlib.util
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from pydantic import BaseModel

from rlvr.core import rng
from rlvr.core.episode_slots import EpisodeSlots
from rlvr.core.types import Task
from rlvr.envs.gym.gym_session import PRINTABLE, Gym, GymSession, Observation
from rlvr.envs.gym.gym_source import GymSource
from rlvr.envs.limited_calls import EpisodeError
from rlvr.envs.seeds import NumberedSource, SeedSource
from rlvr.envs.tools.environment_class import ToolEnvironment, ToolSession, call_user_code
from rlvr.envs.tools.tool import ServerTool, Tool, ToolProblem
from rlvr.envs.tools.tool_source import ToolSource
from rlvr.reward.reward_options import check_integer, check_number

HELDOUT_FRACTION = 0.1  # of the tasks of a server with one split
MAX_MESSAGE = 16 << 20  # bytes of an answer
_LOOK_SECONDS = 0.2  # between two attempts at a server that is full
_TEST_SPLITS = ("test", "validation", "val", "eval", "heldout", "dev")
_OWN = ("metadata", "reward", "done")  # of an observation, beside what the policy reads
Json = dict[str, Any]


class ServerFull(EpisodeError):
    """All sessions of the server are taken; it has `most`, if it said how many."""

    def __init__(self, text: str, most: int | None = None) -> None:
        super().__init__(text)
        self.most = most


class SessionEndError(EpisodeError):
    """The server closed the connection. A full server does, and what it said before may be lost."""


class OpenEnvServer:
    """The server at a URL: what it says of itself, and sessions of it. A request may take `seconds`."""

    def __init__(self, url: str, seconds: float) -> None:
        if "://" not in url:
            url = f"http://{url}"
        self.url, self.seconds = url.rstrip("/"), seconds

    def get(self, path: str, body: Json | None = None) -> Any:
        """A JSON answer; None where the server has no such path or does not support it."""
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(asked, timeout=self.seconds) as answer:
                return json.loads(answer.read(MAX_MESSAGE))
        except urllib.error.HTTPError as error:
            if error.code in (404, 405, 501):
                return None
            raise ValueError(f"openenv: {self.url}{path} answers {error.code} ({error.reason})") from error
        except (OSError, ValueError) as error:
            raise ValueError(
                f"openenv: {self.url}{path} cannot be read ({error}); is the server of the environment running?"
            ) from error

    def connect(self) -> OpenEnvConnection:
        return OpenEnvConnection(self)

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
            opening = connect(address, open_timeout=server.seconds, max_size=MAX_MESSAGE, proxy=None)
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
            answer = json.loads(self._socket.recv(timeout=self._seconds))
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
                raise ServerFull(said, data.get("max_sessions"))
            raise EpisodeError(said)
        return data

    def close(self) -> None:
        with suppress(Exception):  # it may be gone
            self._socket.send('{"type": "close"}')
        with suppress(Exception):
            self._opened.close()


class _Sessions:
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


class OpenEnvGym(Gym):
    """Sessions that take text: `action` with {text} in it is a step, `observation_field` what the policy reads."""

    vocabulary = PRINTABLE  # an environment may write other characters too

    def __init__(self, sessions: _Sessions, action: Mapping[str, Any], observation_field: str | None) -> None:
        self.sessions, self.action, self.observation_field = sessions, dict(action), observation_field
        self.slots = sessions.slots

    def open(self) -> GymSession:
        return _TextSession(self)

    def read(self, answer: Json, what: str) -> Observation:
        given = answer.get("observation")
        fields = {k: v for k, v in given.items() if k not in _OWN} if isinstance(given, dict) else {"": given}
        if (name := self.observation_field) is not None:
            if name not in fields:
                raise EpisodeError(f"{what}: the observation has no field {name!r}; it has {', '.join(fields)}")
            fields = {name: fields[name]}
        kept = {name: value for name, value in fields.items() if value not in (None, "", [], {})}
        texts = [value for value in kept.values() if isinstance(value, str)]
        said = texts[0] if len(texts) == len(kept) == 1 else kept or ""
        return Observation.of_step((said, answer.get("reward"), answer.get("done"), answer.get("metadata")), what)


class _TextSession(GymSession):
    def __init__(self, gym: OpenEnvGym) -> None:
        self._gym, self._what, self._has_reward = gym, "", False
        self._connection: OpenEnvConnection | None = None

    async def _call(self, function: Callable[[], Any], waits: float = 1) -> Any:
        limit = self._gym.sessions.server.seconds
        return await call_user_code(self._what, (1 + waits) * limit + 1, function)

    async def reset(self, task: Task) -> Observation:
        self._what = f"openenv: task {task.id!r}"

        def begin() -> Json:
            self._connection, answer = self._gym.sessions.begin(task)
            return answer

        return self._gym.read(await self._call(begin, waits=2), self._what)

    async def step(self, action: str) -> Observation:
        connection, data = self._connection, _fill(self._gym.action, action)
        assert connection
        answer = await self._call(lambda: connection.ask("step", data))
        self._has_reward |= answer.get("reward") is not None
        if answer.get("done") and not self._has_reward:  # NaN is null in its answers
            raise EpisodeError(f"{self._what}: the episode is over, and no step gave a reward")
        return self._gym.read(answer, self._what)

    async def close(self) -> None:
        if self._connection:
            await self._call(self._connection.close)


class OpenEnvTools(ToolEnvironment):
    """Sessions whose actions are calls of tools that the server lists."""

    has_reward = True

    def __init__(self, sessions: _Sessions, tools: Sequence[Json]) -> None:
        self.sessions, self.tools = sessions, [_make_tool(one, _call_nothing) for one in tools]

    def open(self) -> ToolSession:
        return _ToolsSession(self)


class _ToolsSession(ToolSession):
    def __init__(self, environment: OpenEnvTools) -> None:
        self._environment, self._reward, self._is_over = environment, 0.0, False
        self._connection: OpenEnvConnection | None = None
        self._failure: EpisodeError | None = None
        self.slots = environment.sessions.slots

    async def reset(self, task: Task) -> str:
        def begin() -> Json:
            self._connection, answer = self._environment.sessions.begin(task)
            return answer

        what, limit = f"openenv: task {task.id!r}", self._environment.sessions.server.seconds
        answer = await call_user_code(what, 3 * limit + 1, begin)
        given = answer.get("observation")
        kept = {k: v for k, v in given.items() if k not in _OWN and v} if isinstance(given, dict) else {}
        texts = [value for value in kept.values() if isinstance(value, str)]
        return texts[0] if len(texts) == len(kept) == 1 else json.dumps(kept, ensure_ascii=False) if kept else ""

    def list_tools(self) -> Sequence[Tool]:
        def function_of(name: str) -> Callable[..., str]:
            return lambda **arguments: self._call(name, arguments)

        return [
            ServerTool(
                tool.name, tool.description, function_of(tool.name), BaseModel, has_own_limit=True,
                ends_late_calls=True, parameters=tool.schema["function"]["parameters"],
            )
            for tool in self._environment.tools
        ]  # fmt: skip

    def _call(self, name: str, arguments: Json) -> str:
        assert self._connection
        if self._is_over:
            raise ToolProblem("the episode is over")
        try:
            data = {"type": "call_tool", "tool_name": name, "arguments": arguments}
            answer = self._connection.ask("step", data)
            step = Observation.of_step(("", answer.get("reward"), answer.get("done")), f"openenv: {name}")
        except EpisodeError as failure:
            self._failure, self._is_over = failure, True
            raise ToolProblem("the environment has failed") from failure
        self._reward, self._is_over = self._reward + step.reward, step.done
        observation = answer.get("observation") or {}
        if error := observation.get("error"):
            raise ToolProblem(str(error.get("message") if isinstance(error, dict) else error))
        return _read_result(observation.get("result"))

    async def get_reward(self) -> float:
        if self._failure:
            raise self._failure
        return self._reward

    async def close(self) -> None:
        if self._connection:
            self._connection.close()


def _call_nothing(**arguments: Any) -> str:
    raise ToolProblem("the episode has not begun")


def _make_tool(one: Json, function: Callable[..., str]) -> ServerTool:
    schema = one.get("input_schema") or one.get("inputSchema") or {"type": "object", "properties": {}}
    return ServerTool(one["name"], one.get("description") or one["name"], function, BaseModel, parameters=schema)


def _read_result(result: Any) -> str:
    """What a tool gave as text: an MCP result is its parts, or its structured content."""
    if isinstance(result, dict) and isinstance(result.get("content"), list):
        texts = [part["text"] for part in result["content"] if isinstance(part, dict) and "text" in part]
        if texts:
            return "\n".join(texts)
        result = result.get("structured_content", result.get("data"))
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def _fill(action: Any, text: str) -> Any:
    """An action with {text} replaced, at any depth."""
    if isinstance(action, str):
        return action.replace("{text}", text)
    if isinstance(action, Mapping):
        return {name: _fill(value, text) for name, value in action.items()}
    return [_fill(value, text) for value in action] if isinstance(action, list) else action


def _choose_action(server: OpenEnvServer) -> Json:
    """The action whose one field for text is what the policy says; ValueError if the fields leave a choice."""
    schema = (server.get("/schema") or {}).get("action") or {}
    fields = {k: v for k, v in (schema.get("properties") or {}).items() if k != "metadata"}
    texts = [name for name, one in fields.items() if one.get("type") == "string" and "enum" not in one]
    needed = [name for name in schema.get("required") or [] if name in fields]
    texts = [name for name in texts if name in needed] or texts
    if len(texts) != 1 or any(name not in texts for name in needed):
        raise ValueError(
            f"openenv: an action of {server.url} has the fields {', '.join(fields) or '(none)'}; say where the text "
            f"of the policy goes: env.kwargs.action={{{(texts or list(fields) or ['message'])[0]}: '{{text}}'}}"
        )
    return {texts[0]: "{text}"}


def _list_tools(server: OpenEnvServer) -> list[Json]:
    """The tools of an environment of tools; [] of any other."""
    connection = server.connect()
    try:
        observation = connection.ask("step", {"type": "list_tools"}).get("observation") or {}
        return [one for one in observation.get("tools") or [] if isinstance(one, dict) and "name" in one]
    except (ServerFull, SessionEndError):
        raise
    except EpisodeError:  # an action that this environment does not have
        return []
    finally:
        connection.close()


def _make_tasks(server: OpenEnvServer, prompt: str, heldout: int) -> NumberedSource:
    """The tasks of the server's task API, or seeds."""
    names = server.get("/list_environments") or []
    name = str(names[0]) if names else ""
    splits = [str(one["name"]) for one in (server.get(f"/{name}/splits") or [])] if name else []
    if not splits:
        return SeedSource(prompt, heldout=heldout)
    test = next((one for one in _TEST_SPLITS if one in splits), None)
    train = next((one for one in splits if one != test), None)
    counts = {
        split: int((server.get(f"/{name}/num_tasks", {"split": split}) or {})["num_tasks"])
        for split in (train, test)
        if split
    }

    def make(split: str, index: int) -> Task:
        return Task(f"{split}-{index}", prompt, {"reset": {"split": split, "index": index}})

    if test and train:
        return NumberedSource(lambda n: make(train, n), counts[train], lambda n: make(test, n), counts[test])
    split = train or test or ""
    if not counts[split]:
        raise ValueError(f"openenv: the split {split!r} of {server.url} has no tasks")
    if not train:
        return NumberedSource(lambda n: make(split, n), 0, lambda n: make(split, n), counts[split])
    order = rng.permutation(counts[split], rng.key("openenv", split))
    held = max(1, int(HELDOUT_FRACTION * len(order)))
    return NumberedSource(
        lambda n: make(split, order[held + n]), len(order) - held, lambda n: make(split, order[n]), held
    )


def openenv_source(
    url: str,
    action: Mapping[str, Any] | None = None,
    observation_field: str | None = None,
    reset: Mapping[str, Any] | None = None,
    prompt: str = "",
    max_turns: int = 16,
    seconds: float = 60.0,
    max_concurrent: int = 16,
) -> GymSource | ToolSource:
    """The environment that a server of OpenEnv at `url` runs.

    `action` is a step, with {text} where the policy's turn goes; by default the one field of its schema that takes
    text. The policy reads `observation_field`, or all fields. `reset` are options of each episode, beside its seed or
    task; `prompt` stands before what the episode says. At most `max_concurrent` sessions are used, fewer where the
    server has fewer. A request may take `seconds`.
    """
    if importlib.util.find_spec("websockets") is None:
        raise ValueError("openenv: websockets is not installed; it needs the extra: pip install 'rlvr[openenv]'")
    check_number("openenv: seconds", seconds, 0, above=True)
    check_integer("openenv: max_concurrent", max_concurrent, 1)
    server = OpenEnvServer(url, seconds)
    tasks = _make_tasks(server, prompt, heldout=100)
    try:
        tools = [] if action else _list_tools(server)
    except ServerFull as full:
        raise ValueError(f"{full}; wait until a session is free, or raise the server's max_concurrent_envs") from full
    except EpisodeError as error:
        raise ValueError(str(error)) from error
    sessions = _Sessions(server, reset or {}, max_concurrent)
    if tools:
        return ToolSource(tasks, max_turns=max_turns, call_seconds=seconds, environment=OpenEnvTools(sessions, tools))
    gym = OpenEnvGym(sessions, action or _choose_action(server), observation_field)
    return GymSource("openenv", gym, max_turns, tasks)
