"""A taskset of verifiers: tasks of one turn with the verifier of rlvr, beside this file in `tasks`.

An answer that could not be judged is an error of the episode, and no zero.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import verifiers.v1 as vf

from rlvr.envs.ecosystems.export.task_package import TaskPackage, list_messages

PACKAGE = TaskPackage.load(Path(__file__).parent / "tasks")


class RlvrRowData(vf.TaskData):
    side: str
    place: int


class RlvrRowTask(vf.Task[RlvrRowData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def reward(self, task: RlvrRowData, trace: vf.Trace) -> float:
        found = PACKAGE.find(task.side, task.place)
        score = await asyncio.to_thread(PACKAGE.judge, found, trace.last_reply)
        trace.info["judgement"] = {"outcome": score.outcome.value, "reason": score.reason, "detail": score.detail}
        if score.value is None:
            raise RuntimeError(f"the verifier could not judge: {score.reason} {score.detail}")
        for name, value in score.parts.items():
            trace.record_metric(name, value)
        return score.value


class RlvrRowsConfig(vf.TasksetConfig):
    side: Literal["heldout", "train"] = "heldout"
    """Held-out tasks, or those to train on."""


class RlvrRowTaskset(vf.Taskset[RlvrRowTask, RlvrRowsConfig]):
    def load(self) -> Iterator[RlvrRowTask]:
        side = self.config.side
        for place, task in enumerate(PACKAGE.tasks[side]):
            messages = list_messages(task)
            prompt = messages[0]["content"] if [one["role"] for one in messages] == ["user"] else messages
            data = RlvrRowData(id=f"{side}-{task.id}", name=task.id, prompt=prompt, side=side, place=place)
            yield RlvrRowTask(data, self.config.task)
