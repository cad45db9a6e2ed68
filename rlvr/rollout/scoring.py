"""Scores rollouts: all at once (`score`), or group by group while others are still sampled (`Scoring`).

    with Scoring(reward, watched) as scoring:
        trajectories = rollout(
            groups, sampler, params, seed=1, on_group_end=scoring.begin if scoring.can_overlap else None
        )
        scoring.finish(trajectories)

Verifiers that wait for processes or the network (`Reward.waits_for`) are called on threads, one group per call, so
their time overlaps with sampling. Verifiers that compute in this process are called at the end, once for everything,
since threads would only compete for the interpreter. The verdicts are the same either way; but if a verifier raises,
the error spoils the verdicts of one group here and those of all completions there.

Left out on purpose: scoring part of a group.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

from rlvr.core.cancellation import run_with
from rlvr.core.turn_tree import share_credit
from rlvr.core.types import Score, Trajectory, group_by
from rlvr.core.verdict_reasons import EPISODE_FAILED
from rlvr.reward import Reward
from rlvr.reward.environment import NAME, combine, split_reward

CALLS = 32  # at once, one group each: enough to keep many workers busy while one completion of a group never ends


@dataclass
class _Call:
    """A running call of a verifier about some trajectories."""

    verifier: Reward
    trajectories: list[Trajectory]
    verdicts: Future[list[Score]]


class Scoring:
    """The verifiers of a batch; those in `watched` judge too, and change no reward."""

    def __init__(self, reward: Reward, watched: Sequence[Reward] = ()) -> None:
        self.reward = reward
        self.verifiers = _verifiers(reward, watched)
        self._waiting = [verifier for verifier in self.verifiers if verifier.waits_for]
        self._threads = ThreadPoolExecutor(CALLS, "rlvr-scoring") if self._waiting else None
        self._calls: list[_Call] = []
        self._cancel = threading.Event()

    @property
    def can_overlap(self) -> bool:
        """Whether some verifier can begin before the last completion is sampled."""
        return self._threads is not None

    def begin(self, group: Sequence[Trajectory]) -> None:
        """Call the verifiers that wait about a group whose rollouts have ended."""
        last = list(_last_trajectories(group).values())
        for verifier in self._waiting:
            assert self._threads is not None
            verdicts = self._threads.submit(run_with, self._cancel, judge, verifier, last)
            self._calls.append(_Call(verifier, last, verdicts))

    def finish(self, trajectories: Sequence[Trajectory]) -> None:
        """Wait for all verdicts and write them into the trajectories, as `score` does."""
        last = _last_trajectories(trajectories)
        begun = {id(t) for call in self._calls for t in call.trajectories}
        if self._waiting:
            for group in group_by([t for t in last.values() if id(t) not in begun], lambda t: t.group_id).values():
                self.begin(group)
        for verifier in self.verifiers:
            if verifier.waits_for:
                for call in self._calls:
                    if call.verifier is verifier:
                        _record(verifier, call.trajectories, call.verdicts.result())
            else:
                _record(verifier, list(last.values()), judge(verifier, list(last.values())))
        _add_rewards(trajectories, last, self.reward)

    def __enter__(self) -> Scoring:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the threads; after an error or Ctrl-C, cancel their work first."""
        if self._threads is None:
            return
        if error is not None:
            self._cancel.set()
        self._threads.shutdown(wait=True, cancel_futures=error is not None)


def score(trajectories: Sequence[Trajectory], reward: Reward, watched: Sequence[Reward] = ()) -> None:
    """Let a verifier judge the last trajectory of every rollout and share its reward with the earlier ones.

    Of several roles each has the reward of its own branch. What the environment gave counts as `reward` declares
    (`Reward.plus_environment`). After an `error` or `invalid` outcome the reward of the whole rollout is None. The
    verifiers in `watched` judge too, and change no reward.
    """
    last = _last_trajectories(trajectories)
    for verifier in _verifiers(reward, watched):
        _record(verifier, list(last.values()), judge(verifier, list(last.values())))
    _add_rewards(trajectories, last, reward)


def judge(verifier: Reward, trajectories: Sequence[Trajectory]) -> list[Score]:
    """The verdicts; a rollout whose episode failed has its error as verdict, and the verifier does not see it."""
    failed = {id(t): error for t in trajectories if (error := _episode_error(t)) is not None}
    if not failed:
        return verifier.score(trajectories)
    judged = iter(
        verifier.score([t for t in trajectories if id(t) not in failed]) if len(failed) < len(trajectories) else []
    )
    return [failed.get(id(t)) or next(judged) for t in trajectories]


def _episode_error(trajectory: Trajectory) -> Score | None:
    given = trajectory.scores.get(NAME)
    return given if given is not None and given.reason == EPISODE_FAILED else None


def _verifiers(reward: Reward, watched: Sequence[Reward]) -> list[Reward]:
    return [reward, *(other for other in watched if other.name != reward.name)]


def _last_trajectories(trajectories: Sequence[Trajectory]) -> dict[str, Trajectory]:
    """The trajectory to judge of each rollout, its last one, by `rollout_id`."""
    return {t.rollout_id: t for t in trajectories}


def _record(verifier: Reward, trajectories: Sequence[Trajectory], verdicts: Sequence[Score]) -> None:
    for trajectory, verdict in zip(trajectories, verdicts, strict=True):
        trajectory.scores[verifier.name] = verdict


def _add_rewards(trajectories: Sequence[Trajectory], last: Mapping[str, Trajectory], reward: Reward) -> None:
    for trajectory in last.values():
        trajectory.reward = combine(trajectory, reward)
        trajectory.reward_parts = split_reward(trajectory, reward)
    weight = 1.0 if reward.name == NAME else reward.environment_weight or 0.0
    for trajectory in trajectories:
        if trajectory is not last[trajectory.rollout_id]:
            trajectory.reward = last[trajectory.rollout_id].reward
            trajectory.reward_parts = dict(last[trajectory.rollout_id].reward_parts)
        trajectory.turn_rewards = [weight * given for given in trajectory.turn_rewards] if weight else []
    for id, judged in last.items():
        if turns := judged.scores[reward.name].turns:
            _add_turns([t for t in trajectories if t.rollout_id == id], turns, reward.name)
        if rewards := _branch_rewards(judged, reward.name, weight):
            paths = [branch.turns for branch in judged.branches]
            parts = [t for t in trajectories if t.rollout_id == id]
            for t, path in zip(parts, paths, strict=True):  # a trajectory has the turns that no earlier branch has
                t.turn_credits = share_credit(path[len(path) - len(t.turn_starts) :], paths, rewards)
                if t.role:
                    t.reward = t.turn_credits[-1]


def _branch_rewards(judged: Trajectory, name: str, weight: float) -> list[float]:
    """What each branch earned, by the verifier `name` and by the environment; [] if none has a reward of its own."""
    count, verdict = len(judged.branches), judged.scores[name]
    given = judged.scores.get(NAME) if weight and name != NAME else None
    if judged.reward is None or not (verdict.branches or (given and given.branches)):
        return []
    if verdict.branches and len(verdict.branches) != count:
        raise ValueError(
            f"the reward {name!r} scored {len(verdict.branches)} branches of an episode of {count} (Score.branches); "
            "expected one value for each of trajectory.branches, or none"
        )
    rewards = list(verdict.branches) or [verdict.value or 0.0] * count
    added = (given.branches or [given.value or 0.0] * count) if given else [0.0] * count
    return [one + weight * other for one, other in zip(rewards, added, strict=True)]


def _add_turns(parts: Sequence[Trajectory], turns: Sequence[float], name: str) -> None:
    """Add what a verifier says of each turn of a rollout to what the environment gave for it."""
    counts = [len(t.turn_starts or [0]) for t in parts]
    if len(turns) != sum(counts):
        raise ValueError(
            f"the reward {name!r} scored {len(turns)} turns of an episode of {sum(counts)} (Score.turns); expected one "
            "value for each turn, or none"
        )
    rest = iter(turns)
    for t, count in zip(parts, counts, strict=True):
        given = t.turn_rewards or [0.0] * count
        t.turn_rewards = [value + next(rest) for value in given]
