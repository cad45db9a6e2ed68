"""A taskset of verifiers: one turn. Say the letter that the prompt shows."""

import verifiers.v1 as vf


class LetterData(vf.TaskData):
    answer: str


class LetterTask(vf.Task[LetterData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == task.answer)

    @vf.reward(weight=0.25)
    async def short(self, trace) -> float:
        return float(len(trace.last_reply) == 1)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))


class LetterConfig(vf.TasksetConfig):
    letters: str = "ab"
    first: int = 0
    count: int = 20


class LetterTaskset(vf.Taskset[LetterTask, LetterConfig]):
    def load(self):
        for number in range(self.config.first, self.config.first + self.config.count):
            for letter in self.config.letters:
                data = LetterData(name=f"{number}{letter}", prompt=f"{number} {letter}", answer=letter)
                yield LetterTask(data, self.config.task)


__all__ = ["LetterTaskset"]
