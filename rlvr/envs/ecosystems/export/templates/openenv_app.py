"""A server of OpenEnv over the tasks in `tasks`: an action is a turn of the policy, in words.

    python -m server.app --port 8000

The task API has the splits train and test; `reset` takes `split` and `index`, or a `seed`, which chooses a task to
train on. What could not be judged is an error of the session, and no zero.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any
from uuid import uuid4

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from rlvr.envs.ecosystems.export.task_package import PackageEpisode, TaskPackage, write_prompt

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = TaskPackage.load(ROOT / "tasks")
SPLITS = {"train": "train", "test": "heldout"}
SESSIONS = int(os.environ.get("MAX_CONCURRENT_ENVS", "16"))


class RlvrAction(Action):
    message: str


class RlvrObservation(Observation):
    text: str = ""


class RlvrEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id=str(uuid4()), step_count=0)
        self._episode: PackageEpisode | None = None

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, split: str = "train", index: int | None = None,
        **options: Any,
    ) -> RlvrObservation:  # fmt: skip
        if split not in SPLITS:
            raise ValueError(f"split={split!r}, expected train or test")
        self.close()
        side = SPLITS[split]
        place = (seed or 0) % max(1, len(PACKAGE.tasks[side])) if index is None else index
        task = PACKAGE.find(side, place)
        self._state = State(episode_id=episode_id or str(uuid4()), step_count=0)
        self._episode = PACKAGE.open(task)
        return RlvrObservation(text=write_prompt(task, self._episode.begin()), done=False, reward=None)

    def step(self, action: RlvrAction, timeout_s: float | None = None, **options: Any) -> RlvrObservation:
        if self._episode is None:
            raise ValueError("no episode has begun; reset comes first")
        self._state.step_count += 1
        said = self._episode.step(action.message)
        return RlvrObservation(text=said.text, done=said.done, reward=said.reward)

    def close(self) -> None:
        if self._episode is not None:
            self._episode.close()
            self._episode = None

    @property
    def state(self) -> State:
        return self._state

    def list_splits(self) -> list[str]:
        return [split for split, side in SPLITS.items() if PACKAGE.tasks[side]]

    def num_tasks(self, split: str) -> int:
        return len(PACKAGE.tasks[SPLITS[split]])

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        return {"id": f"{split}-{PACKAGE.find(SPLITS[split], index).id}", "index": index}

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[Any]:
        return [self.get_task(split, index) for index in range(self.num_tasks(split))[start:stop]]

    def list_tasks(self, split: str) -> list[Any]:
        return self.get_task_range(split)


app = create_app(
    RlvrEnvironment, RlvrAction, RlvrObservation, env_name=ROOT.name, max_concurrent_envs=SESSIONS
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    uvicorn.run(app, host=given.host, port=given.port)


if __name__ == "__main__":
    main()
