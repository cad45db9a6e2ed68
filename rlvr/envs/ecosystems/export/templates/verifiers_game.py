"""An environment of verifiers: episodes of several turns with a class, over the tasks beside this file in `tasks`.

An episode that fails is an error, and no zero.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import verifiers.v1 as vf

from rlvr.envs.ecosystems.export.task_package import TaskPackage, list_messages, write_prompt

PACKAGE = TaskPackage.load(Path(__file__).parent / "tasks")


class RlvrGameTaskData(vf.TaskData):
    side: str
    place: int


class RlvrGameTask(vf.Task[RlvrGameTaskData, vf.State, vf.TaskConfig]):
    pass


class RlvrGamesConfig(vf.TasksetConfig):
    side: Literal["heldout", "train"] = "heldout"
    """Held-out tasks, or those to train on."""


class RlvrGameConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class RlvrGame(vf.Env[RlvrGameConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        found = PACKAGE.find(task.data.side, task.data.place)
        episode = PACKAGE.open(found)
        try:
            text, total = write_prompt(found, await asyncio.to_thread(episode.begin)), 0.0
            if task.data.system_prompt:
                text = text.removeprefix(task.data.system_prompt).lstrip("\n")
            async with agents.agent.interaction(task) as game:
                while not (segment := await game.turn(text)).terminated:
                    said = await asyncio.to_thread(episode.step, segment.last_reply)
                    text, total = said.text, total + said.reward
                    if said.done:
                        break
            game.trace.record_reward("reward", total)
        finally:
            await asyncio.to_thread(episode.close)


class RlvrGameTaskset(vf.Taskset[RlvrGameTask, RlvrGamesConfig]):
    def load(self) -> Iterator[RlvrGameTask]:
        """Tasks without a prompt: the episode writes it."""
        side = self.config.side
        for place, task in enumerate(PACKAGE.tasks[side]):
            first = list_messages(task)[0]
            system = first["content"] if first["role"] == "system" else None
            data = RlvrGameTaskData(id=f"{side}-{task.id}", name=task.id, system_prompt=system, side=side, place=place)
            yield RlvrGameTask(data, self.config.task)
