"""An environment of verifiers: a game of several turns, with tasks without end that all begin alike."""

import itertools

import verifiers.v1 as vf


class CountData(vf.TaskData):
    start: int


class CountTask(vf.Task[CountData, vf.State, vf.TaskConfig]):
    pass


class CountConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class CountEnv(vf.Env[CountConfig]):
    """Says a number; the player counts down from it, a number a turn."""

    async def run(self, task, agents):
        right = 0
        async with agents.player.interaction(task) as game:
            segment = await game.turn()
            for number in range(task.data.start, 0, -1):
                segment = await game.turn(str(number))
                if segment.terminated:
                    break
                right += segment.last_reply == str(number - 1)
        game.trace.record_reward("right", right / task.data.start)


class CountTaskset(vf.Taskset[CountTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for number in itertools.count():
            yield CountTask(CountData(prompt="Count down.", start=1 + number % 3), self.config.task)


__all__ = ["CountEnv", "CountTaskset"]
