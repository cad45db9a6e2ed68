"""Rows that a resources server of NeMo-Gym verifies (`nemo_gym:http://127.0.0.1:8000`). Tried with 0.4.

    env: {name: "nemo_gym:http://127.0.0.1:8000", kwargs: {rows: train.jsonl, heldout_rows: validation.jsonl}}

A row has `responses_create_params` with its messages and tools, and fields for the verifier. An episode is a session of
the server: `/seed_session` begins it, a call of a tool is a request of its own, and what was said and called comes to
`/verify` as an OpenAI response with the row, which gives `reward`. What the server fails at is an error of the episode,
never a zero; only what it answers to a call is for the policy to read.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rlvr.core.episode_slots import EpisodeSlots
from rlvr.core.protocols import Env, TaskSource
from rlvr.core.types import Task
from rlvr.envs.ecosystems.json_server import HttpStatusError, JsonServer
from rlvr.envs.gym.gym_session import PRINTABLE, Gym, GymSession, Observation
from rlvr.envs.gym.gym_source import GymSource
from rlvr.envs.limited_calls import EpisodeError
from rlvr.envs.row_files import FileRow, read_rows
from rlvr.envs.row_source import HELDOUT_FRACTION, RowSource, choose_heldout
from rlvr.envs.tools.environment_class import ToolEnvironment, ToolSession, call_user_code
from rlvr.envs.tools.tool import ServerTool, Tool, ToolProblem
from rlvr.envs.tools.tool_source import ToolSource
from rlvr.envs.wrapped_source import WrappedSource
from rlvr.reward.reward_options import check_integer

PARAMS = "responses_create_params"
_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}
_OWN_PATHS = ("seed_session", "verify", "aggregate_metrics", "mcp")  # no tools
Json = dict[str, Any]


class NemoRow:
    """The session of one episode: what was said and called in it, in the order of an OpenAI response."""

    def __init__(self, server: JsonServer) -> None:
        self._server, self._task = server.begin_session(), Task("", "")
        self._output: list[Json] = []

    async def seed(self, task: Task) -> None:
        self._task = task
        answer = await self._post("/seed_session", task.meta["row"])
        if isinstance(answer, dict) and answer.get("mcp"):
            raise EpisodeError(
                f"{self._what('/seed_session')}: the server's tools are served by MCP, which is not supported"
            )

    async def verify(self) -> tuple[float, Json]:
        """The reward of the episode, and what else the server says of it."""
        row = self._task.meta["row"]
        answer = await self._post("/verify", {**row, "response": make_response(self._output, row[PARAMS])})
        reward = answer.get("reward") if isinstance(answer, dict) else None
        if isinstance(reward, bool) or not isinstance(reward, (int, float)) or not math.isfinite(reward):
            raise EpisodeError(f"{self._what('/verify')}: reward={reward!r:.80}, expected a finite number")
        return reward, {name: value for name, value in answer.items() if name not in row and name != "reward"}

    def say(self, text: str) -> None:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        fields = {"role": "assistant", "status": "completed", "content": content}
        self._output.append({"id": f"msg_{len(self._output)}", "type": "message", **fields})

    def call(self, name: str, arguments: Json) -> str:
        """What the server answers to a call of a tool. Blocks."""
        call_id = f"call_{len(self._output)}"
        fields = {"name": name, "arguments": json.dumps(arguments), "status": "completed"}
        self._output.append({"id": f"fc_{call_id}", "type": "function_call", "call_id": call_id, **fields})
        problem = None
        try:
            said = json.dumps(self._server.post(f"/{name}", arguments), ensure_ascii=False)
        except HttpStatusError as error:
            problem = said = str(error)
        self._output.append({"type": "function_call_output", "call_id": call_id, "output": said})
        if problem is not None:
            raise ToolProblem(problem)
        return said

    def _what(self, path: str) -> str:
        return f"nemo_gym: {self._server.url}{path}: task {self._task.id!r}"

    async def _post(self, path: str, body: Json) -> Any:
        return await call_user_code(self._what(path), self._server.seconds + 1, lambda: self._server.post(path, body))


class NemoGym(Gym):
    """Rows of one turn."""

    max_turns = 1
    vocabulary = PRINTABLE  # rows may have other characters too

    def __init__(self, server: JsonServer, slots: EpisodeSlots) -> None:
        self.server, self.slots = server, slots

    def open(self) -> GymSession:
        return _TextSession(self.server)


class _TextSession(GymSession):
    def __init__(self, server: JsonServer) -> None:
        self._row = NemoRow(server)

    async def reset(self, task: Task) -> Observation:
        await self._row.seed(task)
        return Observation("")

    async def step(self, action: str) -> Observation:
        self._row.say(action)
        reward, info = await self._row.verify()
        return Observation.of_step(("", reward, True, info), "nemo_gym")


class NemoTools(ToolEnvironment):
    """Rows with these tools."""

    tools: Sequence[ServerTool]
    has_reward = True

    def __init__(self, server: JsonServer, slots: EpisodeSlots, tools: Sequence[ServerTool]) -> None:
        self.server, self.slots, self.tools = server, slots, tools

    def open(self) -> ToolSession:
        return _ToolsSession(self)


class _ToolsSession(ToolSession):
    def __init__(self, environment: NemoTools) -> None:
        self._tools, self._row, self.slots = environment.tools, NemoRow(environment.server), environment.slots
        self._failure: EpisodeError | None = None

    async def reset(self, task: Task) -> str:
        await self._row.seed(task)
        return ""

    def note_turn(self, text: str) -> None:
        if text.strip():
            self._row.say(text)

    def list_tools(self) -> Sequence[Tool]:
        return [tool.bind(self._call) for tool in self._tools]

    def _call(self, name: str, arguments: Json) -> str:
        if self._failure is None:
            try:
                return self._row.call(name, arguments)
            except EpisodeError as failure:
                self._failure = failure
        raise ToolProblem("the environment has failed")

    async def get_reward(self) -> float:
        if self._failure:
            raise self._failure
        reward, _ = await self._row.verify()
        return reward


class NemoSource(WrappedSource):
    """The rows, each in an episode with its own tools, or of one turn where it has none."""

    def __init__(self, tasks: TaskSource, gym: NemoGym, max_turns: int) -> None:
        super().__init__(tasks)
        self._plain, self._turns, self.max_turns = GymSource("nemo_gym", gym, 1, tasks), max_turns, max_turns
        self._with_tools: dict[str, ToolSource] = {}

    def _choose(self, task: Task) -> GymSource | ToolSource:
        tools = task.meta["row"][PARAMS].get("tools")
        if not tools:
            return self._plain
        key, gym = json.dumps(tools, sort_keys=True), self._plain.gym
        assert isinstance(gym, NemoGym) and gym.slots
        if key not in self._with_tools:
            environment = NemoTools(
                gym.server, gym.slots, [ServerTool.of_environment(one, one.get("parameters")) for one in tools]
            )
            self._with_tools[key] = ToolSource(
                self.inner, max_turns=self._turns, call_seconds=gym.server.seconds, environment=environment
            )
        return self._with_tools[key]

    def env(self, task: Task, tokenizer: Any) -> Env:
        return self._choose(task).env(task, tokenizer)

    def complete_prompt(self, task: Task, tokenizer: Any) -> Task:
        return self._choose(task).complete_prompt(task, tokenizer)

    def demonstration(self, task: Task, key: int) -> None:
        return None


def make_response(output: Sequence[Json], params: Mapping[str, Any]) -> Json:
    """What was said and called as a response of OpenAI's Responses API."""
    return {
        "id": "resp_0", "object": "response", "created_at": time.time(), "model": params.get("model") or "policy",
        "status": "completed", "output": list(output), "parallel_tool_calls": False, "tool_choice": "auto",
        "tools": params.get("tools") or [],
    }  # fmt: skip


def make_task(row: FileRow) -> Task:
    """The task of a row; ValueError for a row that is no question."""
    params = row.values.get(PARAMS)
    given = params.get("input") if isinstance(params, dict) else None
    if not isinstance(params, dict) or not isinstance(given, (str, list)) or not given:
        raise ValueError(f"nemo_gym: {row.place}: expected {PARAMS} with input, a text or a list of messages")
    _check_tools(params.get("tools") or [], row.place)
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if params.get("instructions"):
        messages = [{"role": "system", "content": params["instructions"]}, *messages]
    read = [_read_message(one, row.place) for one in messages]
    is_text = [one["role"] for one in read] == ["user"] and not params.get("tools")
    return Task(row.id, read[0]["content"] if is_text else read, {"row": row.values})


def _check_tools(tools: Any, place: str) -> None:
    names = [one.get("name") if isinstance(one, dict) else one for one in tools] if isinstance(tools, list) else [tools]
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", name) or name in _OWN_PATHS:
            raise ValueError(
                f"nemo_gym: {place}: the row has the tool {name!r:.80}, expected functions with a name each"
            )


def _read_message(one: Any, place: str) -> dict[str, str]:
    role = _ROLES.get(one.get("role", "")) if isinstance(one, dict) else None
    content = one.get("content") if isinstance(one, dict) else None
    if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
        content = "".join(str(part["text"]) for part in content)
    if role is None or not isinstance(content, str):
        raise ValueError(f"nemo_gym: {place}: the input has {one!r:.200}, expected messages with a role and text")
    return {"role": role, "content": content}


def nemo_gym_source(
    url: str,
    rows: str,
    heldout_rows: str | None = None,
    heldout_fraction: float = HELDOUT_FRACTION,
    max_turns: int = 8,
    seconds: float = 60.0,
    max_concurrent: int = 32,
) -> GymSource | NemoSource:
    """The rows of the files `rows`, verified by the resources server at `url`.

    `heldout_rows` are held out, or without them `heldout_fraction` of the rows. An episode with tools has at most
    `max_turns` turns of the policy. A request may take `seconds`, and at most `max_concurrent` sessions are open.
    """
    check_integer("nemo_gym: max_concurrent", max_concurrent, 1)
    check_integer("nemo_gym: max_turns (a call and an answer)", max_turns, 2)
    server = JsonServer("nemo_gym", url, seconds)
    with server.while_loading():
        paths = server.get("/openapi.json")["paths"]
    if "/verify" not in paths:
        raise ValueError(f"nemo_gym: {server.url} has no /verify; give the URL of a resources server")
    train = [make_task(row) for row in read_rows(rows)]
    if heldout_rows is None:
        held = choose_heldout(train, heldout_fraction, rows, others="heldout_rows")
        chosen = {task.id for task in held}
        train = [task for task in train if task.id not in chosen]
    else:
        held = [make_task(row._replace(id=f"heldout-{row.id}")) for row in read_rows(heldout_rows)]
    called = {one["name"] for task in (*train, *held) for one in task.meta["row"][PARAMS].get("tools") or []}
    is_open = any("{" in path for path in paths)  # a path that takes any name
    if missing := sorted(name for name in called if f"/{name}" not in paths and not is_open):
        raise ValueError(
            f"nemo_gym: {server.url} has none of the tools {', '.join(missing)} of the rows; its paths are "
            f"{', '.join(paths)}. Give the URL of the server that the rows are for"
        )
    gym, tasks = NemoGym(server, EpisodeSlots(max_concurrent)), RowSource("nemo_gym", train, held, "environment")
    return NemoSource(tasks, gym, max_turns) if called else GymSource("nemo_gym", gym, 1, tasks)
