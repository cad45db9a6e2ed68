"""A server of OpenEnv with one of three environments of ours, run by an interpreter that has `openenv`.

python openenv_server.py count|tools|tasks PORT SESSIONS
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any, ClassVar

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class SayAction(Action):
    message: str


class SayObservation(Observation):
    text: str = ""


class Count(Environment):
    """Count down from the number that the seed gives. `boom` raises, `nan` and `long` answer nonsense."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._state = State(episode_id="e", step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> SayObservation:
        time.sleep(kwargs.get("hang", 0))
        self.next = 1 + (seed or 0) % 3
        return SayObservation(text=str(self.next), done=False, reward=None)

    def step(self, action: SayAction, **kwargs: Any) -> SayObservation:  # type: ignore[override]
        if action.message == "boom":
            raise RuntimeError("it broke")
        if action.message == "nan":
            return SayObservation(text="", done=True, reward=float("inf"))
        if action.message == "long":
            return SayObservation(text="x" * 200_000, done=False, reward=0.0)
        self.next -= 1
        if action.message.strip() != str(self.next):
            return SayObservation(text="wrong", done=True, reward=0.0)
        return SayObservation(text="go", done=self.next == 0, reward=0.25)

    @property
    def state(self) -> State:
        return self._state


class Numbered(Count):
    """The same with tasks: the number is that of the task. After `tasks N` the server has N of each split, and
    `exit` ends it."""

    counts: ClassVar[dict[str, int]] = {"train": 5, "test": 3}

    def reset(self, seed: int | None = None, split: str = "", index: int = 0, **kwargs: Any) -> SayObservation:  # type: ignore[override]
        said = super().reset(index)
        return SayObservation(text=f"{split} {said.text}", done=False, reward=None)

    def step(self, action: SayAction, **kwargs: Any) -> SayObservation:  # type: ignore[override]
        if action.message.startswith("tasks "):
            Numbered.counts = dict.fromkeys(self.counts, int(action.message[6:]))
        if action.message == "exit":
            os._exit(3)
        return super().step(action)

    def list_splits(self) -> list[Any]:
        return ["train", "test"]

    def num_tasks(self, split: str) -> int:
        return self.counts[split]

    def list_tasks(self, split: str) -> list[Any]:
        return [self.get_task(split, index) for index in range(self.num_tasks(split))]

    def get_task(self, split: str, index: int) -> Any:
        return {"id": f"{split}-{index}", "index": index}

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[Any]:
        return self.list_tasks(split)[start:stop]


def make_tools() -> Any:
    from fastmcp import FastMCP

    server = FastMCP("safe")

    @server.tool()
    def press(digit: int) -> str:
        """Press a digit."""
        return f"pressed {digit}"

    class Tools(MCPEnvironment):
        """Press 4, then 2. 7 takes the tool away."""

        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__(server)
            self._state, self._pressed = State(episode_id="e", step_count=0), list[int]()

        def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
            self._pressed = []
            return Observation(done=False, reward=None)

        def _step_impl(self, action: Any, **kwargs: Any) -> Observation:
            raise ValueError("only tools")

        def step(self, action: Any, **kwargs: Any) -> Observation:
            return self._judge(action, super().step(action, **kwargs))

        async def step_async(self, action: Any, **kwargs: Any) -> Observation:
            return self._judge(action, await super().step_async(action, **kwargs))

        def _judge(self, action: Any, given: Observation) -> Observation:
            if isinstance(action, CallToolAction) and isinstance(given, CallToolObservation) and not given.error:
                self._pressed.append(int(action.arguments["digit"]))
                if self._pressed[-1] == 7:
                    server.local_provider.remove_tool("press")
                given.reward = 1.0 if self._pressed == [4, 2] else 0.0
                given.done = self._pressed == [4, 2]
            return given

        @property
        def state(self) -> State:
            return self._state

    return Tools


if __name__ == "__main__":
    kind, port, sessions = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if kind == "tools":
        app = create_app(make_tools(), CallToolAction, CallToolObservation, "safe", max_concurrent_envs=sessions)
    else:
        made = Numbered if kind == "tasks" else Count
        app = create_app(made, SayAction, SayObservation, "count", max_concurrent_envs=sessions)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
