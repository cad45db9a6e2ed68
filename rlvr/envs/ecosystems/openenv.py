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
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from rlvr.core import rng
from rlvr.core.types import Task
from rlvr.envs.ecosystems.openenv_server import (
    Json,
    OpenEnvConnection,
    OpenEnvServer,
    OpenEnvSessions,
    ServerFull,
    SessionEndError,
)
from rlvr.envs.gym.gym_session import PRINTABLE, Gym, GymSession, Observation
from rlvr.envs.gym.gym_source import GymSource
from rlvr.envs.limited_calls import EpisodeError
from rlvr.envs.seeds import NumberedSource, SeedSource
from rlvr.envs.tools.environment_class import ToolEnvironment, ToolSession, call_user_code
from rlvr.envs.tools.tool import ServerTool, Tool, ToolProblem
from rlvr.envs.tools.tool_source import ToolSource
from rlvr.reward.reward_options import check_integer

HELDOUT_FRACTION = 0.1  # of the tasks of a server with one split
MOST_TASKS = 1_000_000  # of a split: the first of more
_TEST_SPLITS = ("test", "validation", "val", "eval", "heldout", "dev")
_SCALARS = ("string", "integer", "number", "boolean")  # types that a server reads from text
_OWN = ("metadata", "reward", "done")  # of an observation, beside what the policy reads


class OpenEnvGym(Gym):
    """Sessions that take text: `action` with {text} in it is a step, `observation_field` what the policy reads."""

    vocabulary = PRINTABLE  # an environment may write other characters too

    def __init__(
        self,
        sessions: OpenEnvSessions,
        action: Mapping[str, Any],
        observation_field: str | None,
        choices: Sequence[str] = (),
    ) -> None:
        self.sessions, self.action, self.observation_field = sessions, dict(action), observation_field
        self.choices = choices
        self.slots = sessions.slots

    def open(self) -> GymSession:
        return _TextSession(self)

    def read(self, answer: Json, what: str) -> Observation:
        said = _read_observation(answer, self.observation_field, what)
        return Observation.of_step((said, answer.get("reward"), answer.get("done"), answer.get("metadata")), what)


def _read_observation(answer: Json, field: str | None, what: str) -> Any:
    """What the policy reads of an answer: a `field`, or all that say something; text where one does."""
    given = answer.get("observation")
    fields = {k: v for k, v in given.items() if k not in _OWN} if isinstance(given, dict) else {"": given}
    if field is not None:
        if field not in fields:
            raise EpisodeError(f"{what}: the observation has no field {field!r}; it has {', '.join(fields)}")
        fields = {field: fields[field]}
    kept = {name: value for name, value in fields.items() if value not in (None, "", [], {})}
    texts = [value for value in kept.values() if isinstance(value, str)]
    return texts[0] if len(texts) == len(kept) == 1 else kept or ""


async def _begin(sessions: OpenEnvSessions, task: Task, what: str) -> tuple[OpenEnvConnection, Json]:
    """A session and the answer to its reset; a full server may be waited for, and then be slow."""
    return await call_user_code(what, 3 * sessions.server.seconds + 1, lambda: sessions.begin(task))


class _TextSession(GymSession):
    def __init__(self, gym: OpenEnvGym) -> None:
        self._gym, self._what, self._has_reward = gym, "", False
        self._connection: OpenEnvConnection | None = None

    async def _call(self, function: Callable[[], Any]) -> Any:
        return await call_user_code(self._what, 2 * self._gym.sessions.server.seconds + 1, function)

    async def reset(self, task: Task) -> Observation:
        self._what = f"openenv: task {task.id!r}"
        self._connection, answer = await _begin(self._gym.sessions, task, self._what)
        return self._gym.read(answer, self._what)

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

    def __init__(self, sessions: OpenEnvSessions, tools: Sequence[Json]) -> None:
        self.sessions = sessions
        self.tools: Sequence[ServerTool] = [
            ServerTool.of_environment(one, one.get("input_schema") or one.get("inputSchema")) for one in tools
        ]

    def open(self) -> ToolSession:
        return _ToolsSession(self)


class _ToolsSession(ToolSession):
    def __init__(self, environment: OpenEnvTools) -> None:
        self._environment, self._reward, self._is_over = environment, 0.0, False
        self._connection: OpenEnvConnection | None = None
        self._failure: EpisodeError | None = None
        self.slots = environment.sessions.slots

    async def reset(self, task: Task) -> str:
        what = f"openenv: task {task.id!r}"
        self._connection, answer = await _begin(self._environment.sessions, task, what)
        return Observation.of_reset(_read_observation(answer, None, what), what).text

    def list_tools(self) -> Sequence[Tool]:
        return [tool.bind(self._call) for tool in self._environment.tools]

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


def choose_action(schema: Json, url: str) -> Json:
    """The action whose one field for text is what the policy says, or whose one field that is needed is; ValueError if
    the fields leave a choice."""
    fields = _list_fields(schema)
    texts = [name for name, one in fields.items() if one.get("type") == "string" and "enum" not in one]
    needed = [name for name in schema.get("required") or [] if name in fields]
    texts = [name for name in texts if name in needed] or texts
    if len(needed) == 1 and (fields[needed[0]].get("type") in _SCALARS or "enum" in fields[needed[0]]):
        texts = needed
    if len(texts) != 1 or any(name not in texts for name in needed):
        raise ValueError(
            f"openenv: an action of {url} has the fields {', '.join(fields) or '(none)'}; say where the text "
            f"of the policy goes: env.kwargs.action={{{(texts or list(fields) or ['message'])[0]}: '{{text}}'}}"
        )
    return {texts[0]: "{text}"}


def _list_fields(schema: Json) -> dict[str, Json]:
    """The fields of an action, with what they refer to in the same schema."""
    shared = schema.get("$defs") or {}
    fields = {k: v for k, v in (schema.get("properties") or {}).items() if k != "metadata"}
    return {name: {**shared.get(str(one.get("$ref")).rpartition("/")[2], {}), **one} for name, one in fields.items()}


def list_choices(schema: Json, action: Mapping[str, Any]) -> list[str]:
    """The turns that are actions, where the field of the policy's text takes a few words alone."""
    named = [one for name, one in _list_fields(schema).items() if action.get(name) == "{text}"]
    return [str(one) for one in named[0].get("enum") or ()] if len(named) == 1 else []


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
    counts = server.count_tasks(_choose_splits, MOST_TASKS)
    if not counts:
        return SeedSource(prompt, heldout=heldout)
    train, test = _choose_splits(counts)

    def make(split: str, index: int) -> Task:
        return Task(f"{split}-{index}", prompt, {"reset": {"split": split, "index": index}})

    if not any(counts.values()):
        raise ValueError(f"openenv: {server.url} has no tasks: its splits {', '.join(counts)} are empty")
    if test and train:
        return NumberedSource(lambda n: make(train, n), counts[train], lambda n: make(test, n), counts[test])
    split = train or test or ""
    if not train:
        return NumberedSource(lambda n: make(split, n), 0, lambda n: make(split, n), counts[split])
    order = rng.permutation(counts[split], rng.key("openenv", split))
    held = max(1, int(HELDOUT_FRACTION * len(order)))
    return NumberedSource(
        lambda n: make(split, order[held + n]), len(order) - held, lambda n: make(split, order[n]), held
    )


def _choose_splits(names: Collection[str]) -> tuple[str | None, str | None]:
    """The splits to train on and to hold out, of those that there are."""
    test = next((one for one in _TEST_SPLITS if one in names), None)
    return next((one for one in names if one != test), None), test


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
    text, or the one that is needed. The policy reads `observation_field`, or all fields. `reset` are options of each
    episode, beside its seed or task; `prompt` stands before what the episode says. At most `max_concurrent` sessions
    are used, fewer where the server has fewer. A request may take `seconds`.
    """
    if importlib.util.find_spec("websockets") is None:
        raise ValueError("openenv: websockets is not installed; it needs the extra: pip install 'rlvr[openenv]'")
    check_integer("openenv: max_concurrent", max_concurrent, 1)
    server = OpenEnvServer(url, seconds)
    with server.while_loading():
        tasks = _make_tasks(server, prompt, heldout=100)
        tools = [] if action else _list_tools(server)
        schema = {} if tools else (server.find("/schema") or {}).get("action") or {}
        action = action or ({} if tools else choose_action(schema, server.url))
        choices = list_choices(schema, action)
        sessions = OpenEnvSessions(server, reset or {}, max_concurrent)
    if tools:
        return ToolSource(tasks, max_turns=max_turns, call_seconds=seconds, environment=OpenEnvTools(sessions, tools))
    return GymSource("openenv", OpenEnvGym(sessions, action, observation_field, choices), max_turns, tasks)
