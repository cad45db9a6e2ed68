"""Tasks of one turn that a resources server of NeMo-Gym verifies (`nemo_gym:http://127.0.0.1:8000`).

    env: {name: "nemo_gym:http://127.0.0.1:8000", kwargs: {rows: train.jsonl, heldout_rows: validation.jsonl}}

A row has `responses_create_params` with its messages, and fields for the verifier. An episode is a session of the
server: what the policy says comes to `/verify` as an OpenAI response with the row, and `reward` comes back. What the
server refuses or fails at is an error of the episode, never a zero. Rows with tools are refused.
"""

from __future__ import annotations

import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

from rlvr.core.episode_slots import EpisodeSlots
from rlvr.core.types import Task
from rlvr.envs.gym.gym_session import Gym, GymSession, Observation
from rlvr.envs.gym.gym_source import GymSource
from rlvr.envs.limited_calls import EpisodeError
from rlvr.envs.row_files import FileRow, read_rows
from rlvr.envs.row_source import HELDOUT_FRACTION, RowSource, choose_heldout
from rlvr.envs.tools.environment_class import call_user_code
from rlvr.reward.reward_options import check_integer, check_number

MAX_ANSWER = 16 << 20  # bytes
PARAMS = "responses_create_params"
_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}
Json = dict[str, Any]


class NemoGym(Gym):
    """Sessions of the resources server at a URL. A request may take `seconds`."""

    max_turns = 1

    def __init__(self, url: str, seconds: float, max_concurrent: int) -> None:
        self.url, self.seconds = (url if "://" in url else f"http://{url}").rstrip("/"), seconds
        self.slots = EpisodeSlots(max_concurrent)
        try:
            with urllib.request.urlopen(f"{self.url}/openapi.json", timeout=seconds) as answer:
                paths = json.loads(answer.read(MAX_ANSWER)).get("paths", {})
        except (OSError, ValueError, AttributeError) as error:
            raise ValueError(f"nemo_gym: {self.url} cannot be read ({error}); is the server running?") from error
        if "/verify" not in paths:
            raise ValueError(f"nemo_gym: {self.url} has no /verify; give the URL of a resources server")

    def open(self) -> GymSession:
        return _RowSession(self)


class _RowSession(GymSession):
    def __init__(self, gym: NemoGym) -> None:
        self._gym, self._task = gym, Task("", "")
        # The session is a cookie, which a server on a name without dots sets too.
        policy = DefaultCookiePolicy(strict_ns_domain=DefaultCookiePolicy.DomainLiberal)
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar(policy)))

    async def reset(self, task: Task) -> Observation:
        self._task = task
        await self._post("/seed_session", task.meta["row"])
        return Observation("")

    async def step(self, action: str) -> Observation:
        row = self._task.meta["row"]
        answer = await self._post("/verify", {**row, "response": make_response(action, row[PARAMS])})
        reward = answer.get("reward") if isinstance(answer, dict) else None
        if isinstance(reward, bool) or not isinstance(reward, (int, float)) or not math.isfinite(reward):
            raise EpisodeError(f"{self._what('/verify')}: reward={reward!r:.80}, expected a finite number")
        info = {name: value for name, value in answer.items() if name not in row and name != "reward"}
        return Observation.of_step(("", reward, True, info), self._what("/verify"))

    def _what(self, path: str) -> str:
        return f"nemo_gym: {self._gym.url}{path}: task {self._task.id!r}"

    async def _post(self, path: str, body: Json) -> Any:
        data = json.dumps(body).encode()
        asked = urllib.request.Request(f"{self._gym.url}{path}", data, {"Content-Type": "application/json"})

        def post() -> Any:
            try:
                with self._opener.open(asked, timeout=self._gym.seconds) as answer:
                    return json.loads(answer.read(MAX_ANSWER))
            except urllib.error.HTTPError as error:
                said = error.read(500).decode("utf-8", "replace")
                raise EpisodeError(f"{self._what(path)}: {error.code} {said}") from error
            except (OSError, ValueError) as error:
                raise EpisodeError(f"{self._what(path)}: {error}") from error

        return await call_user_code(self._what(path), self._gym.seconds + 1, post)


def make_response(text: str, params: Mapping[str, Any]) -> Json:
    """What the policy said as a response of OpenAI's Responses API."""
    content = [{"type": "output_text", "text": text, "annotations": []}]
    message = {"id": "msg_0", "type": "message", "role": "assistant", "status": "completed", "content": content}
    return {
        "id": "resp_0", "object": "response", "created_at": time.time(), "model": params.get("model") or "policy",
        "status": "completed", "output": [message], "parallel_tool_calls": False, "tool_choice": "auto", "tools": [],
    }  # fmt: skip


def make_task(row: FileRow) -> Task:
    """The task of a row; ValueError for a row that is no question of one turn."""
    params = row.values.get(PARAMS)
    given = params.get("input") if isinstance(params, dict) else None
    if not isinstance(params, dict) or not isinstance(given, (str, list)) or not given:
        raise ValueError(f"nemo_gym: {row.place}: expected {PARAMS} with input, a text or a list of messages")
    if params.get("tools"):
        raise ValueError(f"nemo_gym: {row.place}: it has tools; only rows of one turn are supported")
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if params.get("instructions"):
        messages = [{"role": "system", "content": params["instructions"]}, *messages]
    read = [_read_message(one, row.place) for one in messages]
    is_text = [one["role"] for one in read] == ["user"]
    return Task(row.id, read[0]["content"] if is_text else read, {"row": row.values})


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
    seconds: float = 60.0,
    max_concurrent: int = 32,
) -> GymSource:
    """The rows of the files `rows`, verified by the resources server at `url`.

    `heldout_rows` are held out, or without them `heldout_fraction` of the rows. A request may take `seconds`, and at
    most `max_concurrent` sessions are open.
    """
    check_number("nemo_gym: seconds", seconds, 0, above=True)
    check_integer("nemo_gym: max_concurrent", max_concurrent, 1)
    gym = NemoGym(url, seconds, max_concurrent)
    train = [make_task(row) for row in read_rows(rows)]
    if heldout_rows is None:
        held = choose_heldout(train, heldout_fraction, rows)
        chosen = {task.id for task in held}
        train = [task for task in train if task.id not in chosen]
    else:
        held = [make_task(row._replace(id=f"heldout-{row.id}")) for row in read_rows(heldout_rows)]
    return GymSource("nemo_gym", gym, 1, RowSource("nemo_gym", train, held, "environment"))
