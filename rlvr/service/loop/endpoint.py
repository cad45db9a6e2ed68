"""A generator whose model is behind a URL: its weights are out of reach, so what learns is how it is asked.

Each episode asks by its own view of one client, guided by the strategies that all sessions share
(`rlvr.service.loop.strategies`), and is played by the project's rollout on the service's event loop.
`python -m pytest tests/test_sessions.py` exercises it against a scripted endpoint.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rlvr import draws
from rlvr.clients.endpoint import EndpointError, EndpointSamplingClient
from rlvr.envs.critics import Bench, BlendCritic
from rlvr.envs.refine import Attempt, RefineEnv
from rlvr.http_line import Endpoint
from rlvr.messages import SamplingParams
from rlvr.reward.blend import session_reward
from rlvr.reward.feedback import Feedback
from rlvr.rollout import Group, play
from rlvr.service.loop.credit import gains
from rlvr.service.loop.jobs import Job, Outcome, SessionFailure, experience_of
from rlvr.service.loop.strategies import Guide
from rlvr.service.loop.strategy_policy import ReplayStore, StrategyLearner
from rlvr.service.options import TrainingConfig
from rlvr.store import StoreDown
from rlvr.types import Task

SEEN_S = 30.0  # after which an endpoint is looked at again, when somebody asks for its health
LOOK_S = 5.0  # between two looks


class EndpointGenerator:
    """Nothing is asked before `start`."""

    kind = "endpoint"

    def __init__(
        self, endpoint: Endpoint, store: ReplayStore, config: TrainingConfig, *, max_tokens: int, seed: int = 0
    ) -> None:
        self.client = EndpointSamplingClient(endpoint)
        self.name = self.client.fingerprint
        self._params, self._seed = SamplingParams(max_tokens=max_tokens), seed
        self.strategies = StrategyLearner(store, config)
        self._looked = -math.inf

    def start(self) -> None:
        self._look()

    def health(self) -> dict[str, Any]:
        seen = self.client.seen
        if seen is None or time.time() - seen.at > SEEN_S:
            self._look()
        state, detail = ("ready", "") if seen is None or seen.error is None else ("down", str(seen.error))
        return {"kind": self.kind, "name": self.name, "state": state, "detail": detail, "learns": "strategies"}

    def _look(self) -> None:
        """Ask whether it is there; who asks for its health next is told."""
        if time.monotonic() - self._looked > LOOK_S:
            self._looked = time.monotonic()
            self.client.look()

    def posed(self, text: str) -> tuple[Task, str] | None:
        return None

    def decode(self, tokens: Sequence[int]) -> str | None:
        return None

    async def run(self, job: Job) -> Outcome:
        with suppress(StoreDown):  # what was learned elsewhere is worth having, and no session fails without it
            await asyncio.to_thread(self.strategies.refresh)
        outcome = Outcome()
        episodes = [asyncio.create_task(self._episode(job, i, outcome)) for i in range(job.samples or 1)]
        try:
            await asyncio.gather(*episodes)
        except EndpointError as error:
            raise SessionFailure(error.code, str(error), retry_after=error.retry_after or None) from error
        finally:
            for episode in episodes:  # after one has failed the others are of no use
                episode.cancel()
            await asyncio.gather(*episodes, return_exceptions=True)
        told = self.strategies.learning()
        outcome.loss, outcome.entropy = told["training_loss"] if job.learn else None, told["policy_entropy"]
        return outcome

    async def _episode(self, job: Job, sample: int, outcome: Outcome) -> None:
        view = self.client.view()
        name = job.session_id if job.seed is None else f"{job.task.id}/{job.seed}"
        guide = Guide(self.strategies, view, draws.key("episode", self._seed, name, sample))
        rewards: list[float | None] = []
        began, counted = time.time(), 0

        async def record(attempt: Attempt, feedback: Feedback) -> None:
            nonlocal began, counted
            choice = guide.choices[attempt.number - 1]
            rewards.append(session_reward(feedback, 1))
            e = experience_of(
                job,
                attempt,
                feedback,
                sample=sample,
                began=began,
                num_tokens=view.usage.completion_tokens - counted,
                action=choice.strategy.name,
                action_logprob=choice.logprob,
                policy_version=self.strategies.policy.updates,
                policy_fingerprint=self.name,
            )
            await job.record(e, feedback)
            began, counted = time.time(), view.usage.completion_tokens

        critic = BlendCritic(
            Bench(job.case.blend),
            min_confidence=job.min_confidence,
            convergence_threshold=job.convergence_threshold,
            record=record,
            cancelled=job.cancelled,
        )
        env = RefineEnv(job.task, view.get_tokenizer(), critic, compose=guide.compose, max_turns=job.max_iterations)
        version = self.strategies.policy.updates
        await play(Group(name, job.task, [env]), view, self._params, seed=self._seed + sample, version=version)
        outcome.ended[sample] = env.ended
        for number, gain in enumerate(gains(rewards), 1):
            if gain is not None:
                outcome.gains[sample, number] = gain

    async def learn(self, result: float | None) -> None:
        """One update of the strategies from the store, where there is enough in it."""
        await asyncio.to_thread(self.strategies.learn, result)

    def learning(self) -> dict[str, Any]:
        return self.strategies.learning()

    async def close(self) -> None:
        await asyncio.to_thread(self.client.close)
