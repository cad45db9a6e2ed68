"""A session as a group of episodes to learn from: what each trajectory is worth, and the log-probs of what was said.

Exercised by tests/test_service_learning.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from rlvr.futures import Future, LazyFuture
from rlvr.messages import ModelInput, SampleResponse, SamplingParams
from rlvr.protocols import SamplingClient
from rlvr.service.loop.credit import gains
from rlvr.types import Trajectory, group_by, mean


def worth(
    played: Sequence[Trajectory], rewards: dict[tuple[int, int], float | None], session_id: str
) -> list[Trajectory]:
    """The trajectories of a session as one group to learn from, each with its reward.

    Where an episode is one trajectory of several turns, its reward is what its first answer is credited with (`gains`):
    the improvement of every turn, later ones discounted. Where each turn is a trajectory of its own (the same question
    again), each is a sample of the group, worth what it was worth.
    """
    made: list[Trajectory] = []
    for rollout_id, turns in group_by(played, lambda t: t.rollout_id).items():
        sample = int(rollout_id.rpartition("/")[2])
        known = [rewards[key] for key in sorted(rewards) if key[0] == sample]
        if len(turns) == 1:
            made.append(
                replace(
                    turns[0],
                    group_id=session_id,
                    rollout_id=f"{session_id}/{sample}",
                    reward=gains(known)[0] if known else None,
                )
            )
            continue
        for number, (trajectory, reward) in enumerate(zip(turns, known, strict=True), 1):
            name = f"{session_id}/{sample}/{number}"
            made.append(replace(trajectory, group_id=session_id, rollout_id=name, reward=reward))
    return made


def advantages(group: Sequence[Trajectory], turns: Collection[tuple[int, int]]) -> dict[tuple[int, int], float]:
    """What each answer of a session is learned with, by (sample, iteration): its reward less the group's mean."""
    known = {t.rollout_id: t.reward for t in group if t.reward is not None}
    centre = mean(list(known.values()))
    session = group[0].group_id if group else ""
    found: dict[tuple[int, int], float] = {}
    for sample, number in turns:
        reward = known.get(f"{session}/{sample}", known.get(f"{session}/{sample}/{number}"))
        if reward is not None:
            found[sample, number] = reward - centre
    return found


class Heard:
    """A sampler that remembers the log-probs of what it said in one rollout: a critic sees only tokens."""

    def __init__(self, sampler: SamplingClient) -> None:
        self.sampler = sampler
        self.fingerprint: str = getattr(sampler, "fingerprint", "")
        self._said: dict[tuple[tuple[int, ...], tuple[int, ...]], list[float]] = {}

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
    ) -> Future[SampleResponse]:
        asked = self.sampler.sample(prompt, num_samples, sampling_params, include_prompt_logprobs)

        def heard() -> SampleResponse:
            response = asked.result()
            for sequence in response.sequences:
                if sequence.logprobs is not None:
                    self._said[tuple(prompt.to_ints()), tuple(sequence.tokens)] = list(sequence.logprobs)
            return response

        return LazyFuture(heard)

    def logprobs(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[float] | None:
        return self._said.get((tuple(prompt), tuple(tokens)))

    def compute_logprobs(self, prompt: ModelInput) -> Future[list[float | None]]:
        return self.sampler.compute_logprobs(prompt)

    def get_tokenizer(self) -> Any:
        return self.sampler.get_tokenizer()
