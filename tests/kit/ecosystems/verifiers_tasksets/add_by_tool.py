"""A taskset of verifiers with a tool, which a server of its own offers."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == task.answer)

    @vf.metric
    async def tool_results(self, trace) -> float:
        return float(len(trace.tool_messages))


class Adder(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for number in range(12):
            data = SumData(prompt=f"{number} + 5?", system_prompt="Use the tool.", answer=str(number + 5))
            yield SumTask(data, self.config.task)

    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.SharedToolsetConfig())]


__all__ = ["SumTaskset"]

if __name__ == "__main__":
    Adder.run()
