"""A session as a group of episodes to learn from: the reward of each trajectory, and what is known of its samples."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlvr.core.futures import Future, LazyFuture
from rlvr.core.messages import ModelInput, SampleResponse, SamplingParams
from rlvr.core.protocols import SamplingClient
from rlvr.core.types import Trajectory, group_by, mean
from rlvr.service.learning.credit import compute_gains
from rlvr.service.sessions.jobs import AnswerKey


def assign_rewards(
    trajectories: Sequence[Trajectory], rewards: dict[AnswerKey, float | None], session_id: str
) -> list[Trajectory]:
    """Turn the trajectories of a session into one group to learn from.

    If an episode is one trajectory of several turns, its reward is the gain of its first answer (`compute_gains`): the
    improvement of every turn, later ones discounted. If each turn is a trajectory of its own (the same prompt again),
    each is a sample of the group with its own reward.
    """
    group: list[Trajectory] = []
    for rollout_id, turns in group_by(trajectories, lambda t: t.rollout_id).items():
        sample = int(rollout_id.rpartition("/")[2])
        of_sample = [rewards[key] for key in sorted(rewards) if key[0] == sample]
        name = f"{session_id}/{sample}"
        if len(turns) == 1:
            reward = compute_gains(of_sample)[0] if of_sample else None
            group.append(replace(turns[0], group_id=session_id, rollout_id=name, reward=reward))
            continue
        for number, (trajectory, reward) in enumerate(zip(turns, of_sample, strict=True), 1):
            group.append(replace(trajectory, group_id=session_id, rollout_id=f"{name}/{number}", reward=reward))
    return group


def session_advantages(group: Sequence[Trajectory], answers: Collection[AnswerKey]) -> dict[AnswerKey, float]:
    """The advantage of each answer of a session: its reward minus the group's mean."""
    rewards = {t.rollout_id: t.reward for t in group if t.reward is not None}
    centre = mean(list(rewards.values()))
    session = group[0].group_id if group else ""
    advantages: dict[AnswerKey, float] = {}
    for sample, number in answers:
        reward = rewards.get(f"{session}/{sample}", rewards.get(f"{session}/{sample}/{number}"))
        if reward is not None:
            advantages[sample, number] = reward - centre
    return advantages


@dataclass(frozen=True)
class SampleRecord:
    """The log-probs of a sample, None if its client gives none, and the seconds from its request to its result."""

    logprobs: list[float] | None = None
    seconds: float = 0.0


class RecordingSampler:
    """A sampler that records its samples for one rollout: reviewers are given tokens only."""

    def __init__(self, sampler: SamplingClient) -> None:
        self.sampler = sampler
        self.fingerprint: str = sampler.fingerprint
        self._records: dict[tuple[tuple[int, ...], tuple[int, ...]], SampleRecord] = {}

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
    ) -> Future[SampleResponse]:
        began = time.perf_counter()
        future = self.sampler.sample(prompt, num_samples, sampling_params, include_prompt_logprobs)

        def result() -> SampleResponse:
            response = future.result()
            seconds = time.perf_counter() - began
            for sequence in response.sequences:
                logprobs = None if sequence.logprobs is None else list(sequence.logprobs)
                self._records[tuple(prompt.to_ints()), tuple(sequence.tokens)] = SampleRecord(logprobs, seconds)
            return response

        return LazyFuture(result)

    def record_of(self, prompt: Sequence[int], tokens: Sequence[int]) -> SampleRecord:
        return self._records.get((tuple(prompt), tuple(tokens)), SampleRecord())

    def compute_logprobs(self, prompt: ModelInput, temperature: float = 1.0) -> Future[list[float | None]]:
        return self.sampler.compute_logprobs(prompt, temperature)

    def get_tokenizer(self) -> Any:
        return self.sampler.get_tokenizer()
