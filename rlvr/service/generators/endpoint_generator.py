"""A generator with a model behind a URL: its weights cannot be trained, so the prompting strategy learns.

Each episode samples through its own view of one client, with strategies that all sessions share
(`rlvr.service.learning.strategies`), and is played by the project's rollout. All of it, the requests too, is on the
service's event loop; a thread judges and stores each answer.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlvr.clients.endpoint import EndpointError, EndpointSamplingClient
from rlvr.core import rng
from rlvr.core.chat_client import Endpoint
from rlvr.core.messages import SamplingParams
from rlvr.envs.refine import RefineEnv
from rlvr.envs.reviewers import JudgedAttempt
from rlvr.reward.blend import session_reward
from rlvr.rollout import Group, play_group
from rlvr.service.learning.credit import compute_gains
from rlvr.service.learning.strategy_policy import EvidenceStore, StrategyLearner, StrategyPrompter
from rlvr.service.service_options import TrainingConfig
from rlvr.service.sessions.jobs import SessionFailure, SessionJob, SessionOutcome, build_experience
from rlvr.service.sessions.verification import EnvironmentTask
from rlvr.store.records import Experience
from rlvr.web.logs import get_logger

STATUS_TTL_S = 30.0  # an older status of the endpoint is refreshed when its health is read
PING_INTERVAL_S = 5.0  # the least time between two pings
WORDS = {  # for the client; the endpoint's own words may quote its address, and go to the log
    "endpoint_unreachable": "the generator's endpoint cannot be reached",
    "endpoint_timeout": "the generator's endpoint did not answer in time",
    "endpoint_rate_limited": "the generator's endpoint has too many requests",
    "endpoint_refused": "the generator's endpoint refused the request",
    "endpoint_bad_reply": "the generator's endpoint sent no completion",
    "empty_answer": "the generator's endpoint sent an empty completion",
}
log = get_logger("rlvr.service.generators")


class EndpointGenerator:
    """Sends no request before `start`."""

    kind = "endpoint"

    def __init__(
        self, endpoint: Endpoint, store: EvidenceStore, config: TrainingConfig, *, max_tokens: int, seed: int = 0
    ) -> None:
        self.client = EndpointSamplingClient(endpoint, is_awaited=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.name = self.client.fingerprint
        self._params, self._seed = SamplingParams(max_tokens=max_tokens), seed
        self.strategies = StrategyLearner(store, config)
        self._last_ping = -math.inf

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ping()

    def health(self) -> dict[str, Any]:
        seen = self.client.status
        if seen is None or time.time() - seen.at > STATUS_TTL_S:
            self._ping()
        state, detail = ("ready", "") if seen is None or seen.error is None else ("down", str(seen.error))
        return {"kind": self.kind, "name": self.name, "state": state, "detail": detail, "learns": "strategies"}

    async def check(self) -> None:
        seen = self.client.status
        if seen is None or seen.error is not None or time.time() - seen.at > PING_INTERVAL_S:
            self._last_ping = time.monotonic()
            await self.client.ping()

    def refresh(self) -> None:
        self.strategies.refresh()

    def _ping(self) -> None:
        """Check whether the endpoint answers; the next `health`, which any thread may call, shows the result."""
        if self._loop is not None and self._loop.is_running() and time.monotonic() - self._last_ping > PING_INTERVAL_S:
            self._last_ping = time.monotonic()
            self._loop.call_soon_threadsafe(self._start_ping)

    def _start_ping(self) -> None:
        self._pinging = self.client.ping()  # an event loop keeps only weak references to its tasks

    def task_from_prompt(self, text: str) -> EnvironmentTask | None:
        return None

    def decode(self, tokens: Sequence[int]) -> str | None:
        return None

    async def run(self, job: SessionJob) -> SessionOutcome:
        outcome = SessionOutcome()
        episodes = [asyncio.create_task(self._episode(job, i, outcome)) for i in range(job.samples or 1)]
        try:
            await asyncio.gather(*episodes)
        except EndpointError as error:
            log.warning("the generator's endpoint failed", session_id=job.session_id, reason=str(error))
            raise SessionFailure(
                error.code, f"{WORDS[error.code]}; the service's log says why", retry_after=error.retry_after or None
            ) from error
        finally:
            for episode in episodes:  # if one failed, the others are of no use
                episode.cancel()
            await asyncio.gather(*episodes, return_exceptions=True)
        learning = self.strategies.learning()
        outcome.loss = learning["training_loss"] if job.learn else None
        outcome.entropy = learning["policy_entropy"]
        return outcome

    async def _episode(self, job: SessionJob, sample: int, outcome: SessionOutcome) -> None:
        view = self.client.view()
        prompter = StrategyPrompter(self.strategies, view, rng.key("episode", self._seed, job.draw_name, sample))
        rewards: list[float | None] = []
        began, counted = time.time(), replace(view.usage)

        def record(judged: Sequence[JudgedAttempt]) -> None:
            nonlocal began, counted
            (one,) = judged
            choice = prompter.choices[one.attempt.number - 1]
            rewards.append(session_reward(one.feedback, 1))
            usage = view.usage
            completion_tokens = usage.completion_tokens - counted.completion_tokens
            prompt_tokens = usage.prompt_tokens - counted.prompt_tokens
            job.metrics.observe_generation(usage.seconds - counted.seconds, prompt_tokens, completion_tokens)
            e = build_experience(
                job,
                one,
                began=began,
                num_tokens=completion_tokens,
                action=choice.strategy.name,
                action_logprob=choice.logprob,
                policy_version=self.strategies.policy.updates,
                policy_fingerprint=self.name,
            )
            job.record([(e, one.feedback)])
            began, counted = time.time(), replace(usage)

        reviewer = job.open_reviewer(job.open_judge(record), sample, job.is_cancelled)
        env = RefineEnv(
            job.task, view.get_tokenizer(), reviewer, compose=prompter.compose, max_turns=job.max_iterations
        )
        version = self.strategies.policy.updates
        await play_group(
            Group(job.draw_name, job.task, [env]), view, self._params, seed=self._seed + sample, version=version
        )
        outcome.end_reasons[sample] = env.ended
        for number, gain in enumerate(compute_gains(rewards), 1):
            if gain is not None:
                outcome.gains[sample, number] = gain

    def learn(self, answers: Sequence[Experience]) -> None:
        """Update the strategies once."""
        self.strategies.learn(answers)

    def learning(self) -> dict[str, Any]:
        return self.strategies.learning()

    async def close(self) -> None:
        await asyncio.to_thread(self.client.close)
