"""Samples and scores groups of completions for a training step: the side of training that asks the policy.

The schedules decide when to call it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlvr.core import rng
from rlvr.core.messages import SamplingParams
from rlvr.core.protocols import SamplingClient
from rlvr.core.types import Task, Trajectory
from rlvr.rollout import Group, open_groups, play_group, rollout
from rlvr.rollout.scoring import CALLS, Scoring, score
from rlvr.training.errors import TrainingStoppedError
from rlvr.training.given_completions import make_given
from rlvr.training.parts import TrainerParts
from rlvr.training.verifier_noise import add_noise


@dataclass(frozen=True)
class ScoredGroups:
    """Scored trajectories, the seconds until the last was sampled, and those that scoring took longer."""

    trajectories: list[Trajectory]
    seconds_sampling: float
    seconds_scoring: float


class Collector:
    """Opens, plays and scores groups of episodes with the parts of a trainer."""

    def __init__(self, parts: TrainerParts) -> None:
        self.options, self.curriculum = parts.options, parts.curriculum
        self._parts = parts

    @property
    def can_overlap(self) -> bool:
        """Whether the client can sample while it trains."""
        return self._parts.client.capabilities.can_overlap

    @property
    def scoring_calls(self) -> int:
        """Groups that may be scored at the same time: one, unless all verifiers wait for other processes."""
        return CALLS if all(v.waits_for for v in (self._parts.reward, *self._parts.watched)) else 1

    def params(self, step: int) -> SamplingParams:
        """How the completions of a step are sampled: at its temperature."""
        given, end = self._parts.params, self.options.temperature_end
        if end is None:
            return given
        share = step / max(1, self.options.steps - 1)
        return replace(given, temperature=given.temperature + share * (end - given.temperature))

    def current_sampler(self) -> SamplingClient:
        """A sampler with the weights as they are now."""
        return self._parts.client.save_weights_and_get_sampling_client()

    def open_groups(self, tasks: Sequence[Task], prefix: str) -> list[Group]:
        """New episodes of the tasks, with group ids that begin with `prefix`."""
        tokenizer = self._parts.client.get_tokenizer()
        return open_groups(self._parts.source, tasks, self.options.group_size, tokenizer, prefix)

    def sample(self, groups: Sequence[Group], sampler: SamplingClient, version: int) -> ScoredGroups:
        """Sample and score all groups. A verifier that waits gets each group as soon as it is sampled."""
        began = time.perf_counter()
        if self.options.completions == "given":
            p = self._parts
            given = make_given(
                groups, p.source, sampler, p.reward.name, version, p.params.temperature, p.algorithm.loss.is_paired
            )
            self._apply_control(given)
            return ScoredGroups(given, time.perf_counter() - began, 0.0)
        with Scoring(self._parts.reward, self._parts.watched) as scoring:

            def score_early(group: list[Trajectory]) -> None:
                self.check_fingerprint(group, sampler)
                scoring.begin(group)

            sampled = rollout(
                groups,
                sampler,
                self.params(version),
                on_group_end=score_early if scoring.can_overlap else None,
                **self._rollout_options(version),
            )
            seconds_sampling = time.perf_counter() - began
            self.check_fingerprint(sampled, sampler)
            scoring.finish(sampled)
        self._apply_control(sampled)
        return ScoredGroups(sampled, seconds_sampling, time.perf_counter() - began - seconds_sampling)

    async def play_group(self, group: Group, sampler: SamplingClient, version: int) -> list[Trajectory]:
        """Sample one group on an event loop that has others to play meanwhile; nothing is scored."""
        return await play_group(group, sampler, self.params(version), **self._rollout_options(version))

    def score(self, trajectories: Sequence[Trajectory], sampler: SamplingClient) -> None:
        """Score sampled trajectories, after checking which weights sampled them."""
        self.check_fingerprint(trajectories, sampler)
        score(trajectories, self._parts.reward, self._parts.watched)
        self._apply_control(trajectories)

    def check_fingerprint(self, trajectories: Sequence[Trajectory], sampler: SamplingClient) -> None:
        """Raise TrainingStoppedError if a completion was sampled by other weights than the sampler's."""
        expected = sampler.fingerprint
        for t in trajectories:
            if expected and t.policy_fingerprint != expected and not t.is_empty:
                raise TrainingStoppedError(
                    f"step {t.policy_version + 1}: a completion was sampled by the weights {t.policy_fingerprint!r}, "
                    f"expected {expected!r}; does another process load weights into the same server?"
                )

    def _rollout_options(self, version: int) -> dict[str, Any]:
        limit = self.options.max_prompt_tokens
        return {"seed": rng.key("rollout", self._parts.seed), "version": version, "max_prompt_tokens": limit}

    def _apply_control(self, trajectories: Sequence[Trajectory]) -> None:
        if self.options.control == "random_reward":
            flip_coins(trajectories, self._parts.seed)
        if self.options.control == "equal_rewards":
            pay_equally(trajectories)
        if self.options.has_noise:
            add_noise(trajectories, self._parts.reward.name, self.options, self._parts.seed)


def flip_coins(trajectories: Sequence[Trajectory], seed: int) -> None:
    """Replace every known reward by 0 or 1 with equal chance, the same for all parts of a rollout (a control run)."""
    for t in trajectories:
        if t.reward is not None:
            t.turn_rewards, t.turn_credits, t.reward_parts = [], [], {}
            t.reward = float(rng.uniform(rng.key("coin", seed, t.rollout_id), 0) < 0.5)


def pay_equally(trajectories: Sequence[Trajectory]) -> None:
    """Replace every known reward by 1 (a control run)."""
    for t in trajectories:
        if t.reward is not None:
            t.turn_rewards, t.turn_credits, t.reward_parts, t.reward = [], [], {}, 1.0
