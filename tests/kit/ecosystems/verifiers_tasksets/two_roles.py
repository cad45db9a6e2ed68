"""An environment of verifiers with two roles, which get the same prompt and each a reward of its own."""

import verifiers.v1 as vf


class RolesTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    pass


class RolesConfig(vf.EnvConfig):
    left: vf.AgentConfig = vf.AgentConfig()
    right: vf.AgentConfig = vf.AgentConfig()
    trains_right: bool = True


class RolesEnv(vf.Env[RolesConfig]):
    async def setup(self, agents):
        agents.right.trainable = self.config.trains_right

    async def run(self, task, agents):
        for agent in (agents.left, agents.right):
            trace = await agent.run(task)
            trace.record_reward("right", float(trace.last_reply == "a"))
            trace.record_metric("right", float(trace.last_reply == "a"))


class RolesTaskset(vf.Taskset[RolesTask, vf.TasksetConfig]):
    def load(self):
        return [RolesTask(vf.TaskData(prompt=f"{number}: say a."), self.config.task) for number in range(5)]


__all__ = ["RolesEnv", "RolesTaskset"]
