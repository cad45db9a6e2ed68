"""A taskset of verifiers whose reward does what its option `fault` says."""

import asyncio
import math
import time

import verifiers.v1 as vf


class FaultyTaskConfig(vf.TaskConfig):
    fault: str = ""


class FaultyTask(vf.Task[vf.TaskData, vf.State, FaultyTaskConfig]):
    @vf.reward
    async def judge(self, trace) -> float:
        match self.config.fault:
            case "raise":
                raise KeyError("answer")
            case "nan":
                return math.nan
            case "wait":
                await asyncio.sleep(1000)
            case "block":
                time.sleep(1000)
        return 0.5


class FaultyConfig(vf.TasksetConfig):
    task: FaultyTaskConfig = FaultyTaskConfig()


class FaultyTaskset(vf.Taskset[FaultyTask, FaultyConfig]):
    def load(self):
        return [FaultyTask(vf.TaskData(prompt=f"{number}?"), self.config.task) for number in range(5)]


__all__ = ["FaultyTaskset"]
