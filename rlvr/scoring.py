"""Verdicts on rollouts: all at once (`score`), or group by group while others are still sampled (`Scoring`).

    with Scoring(reward, watched) as scoring:
        answers = rollout(groups, sampler, params, seed=1, over=scoring.begin if scoring.waits else None)
        scoring.finish(answers)

A verifier that waits, for processes or the network (`Reward.waits`), is asked on threads, a group a call, so its time
passes beside the sampling. What computes in this process is asked at the end, about all answers in one call: threads
would only fight for the interpreter. Which verdict an answer gets, and what becomes of it, is the same either way; only
a verifier that raises about a whole call spoils a group's verdicts here, and all answers' there.

Left out on purpose: answers of a group that others of it still lack. Exercised by `tests/test_overlap.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from rlvr.halt import under
from rlvr.reward import Reward
from rlvr.types import Score, Trajectory, group_by

CALLS = 32  # at once, each with a group: enough to keep many workers busy when one answer of a group never ends


class Scoring:
    """The verifiers of a batch; those in `watched` judge too, and change no reward."""

    def __init__(self, reward: Reward, watched: Sequence[Reward] = ()) -> None:
        self.reward = reward
        self.verifiers = _verifiers(reward, watched)
        self._waiting = [verifier for verifier in self.verifiers if verifier.waits]
        self._threads = ThreadPoolExecutor(CALLS, "rlvr-scoring") if self._waiting else None
        self._asked: list[tuple[Reward, list[Trajectory], Future[list[Score]]]] = []
        self._halt = threading.Event()

    @property
    def waits(self) -> bool:
        """Whether there is anything to begin before the last answer is there."""
        return self._threads is not None

    def begin(self, group: Sequence[Trajectory]) -> None:
        """Ask the verifiers that wait about a group whose rollouts are over."""
        judged = list(_last(group).values())
        for verifier in self._waiting:
            assert self._threads is not None
            asked = self._threads.submit(under, self._halt, verifier.score, judged)
            self._asked.append((verifier, judged, asked))

    def finish(self, trajectories: Sequence[Trajectory]) -> None:
        """Wait for all verdicts and write them into the trajectories, as `score` does."""
        last = _last(trajectories)
        begun = {id(t) for _, judged, _ in self._asked for t in judged}
        if self._waiting:
            for group in group_by([t for t in last.values() if id(t) not in begun], lambda t: t.group_id).values():
                self.begin(group)
        for verifier in self.verifiers:
            if verifier.waits:
                for judged, asked in ((judged, asked) for of, judged, asked in self._asked if of is verifier):
                    _note(verifier, judged, asked.result())
            else:
                _note(verifier, list(last.values()), verifier.score(list(last.values())))
        _pay(trajectories, last, self.reward)

    def __enter__(self) -> Scoring:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Where something went wrong, Ctrl-C among it, nothing goes on behind its back."""
        if self._threads is None:
            return
        if error is not None:
            self._halt.set()
        self._threads.shutdown(wait=True, cancel_futures=error is not None)


def score(trajectories: Sequence[Trajectory], reward: Reward, watched: Sequence[Reward] = ()) -> None:
    """Let a verifier judge the last trajectory of every rollout and share its reward with the earlier ones.

    The verifier's value adds to what the environment gave. After an `error` or `invalid` outcome the reward of the
    whole rollout is None. The verifiers in `watched` judge too, and change no reward.
    """
    last = _last(trajectories)
    judged = list(last.values())
    for verifier in _verifiers(reward, watched):
        _note(verifier, judged, verifier.score(judged))
    _pay(trajectories, last, reward)


def _verifiers(reward: Reward, watched: Sequence[Reward]) -> list[Reward]:
    return [reward, *(other for other in watched if other.name != reward.name)]


def _last(trajectories: Sequence[Trajectory]) -> dict[str, Trajectory]:
    """What is judged of each rollout: its last trajectory."""
    return {t.rollout_id: t for t in trajectories}


def _note(verifier: Reward, judged: Sequence[Trajectory], verdicts: Sequence[Score]) -> None:
    for trajectory, verdict in zip(judged, verdicts, strict=True):
        trajectory.scores[verifier.name] = verdict


def _pay(trajectories: Sequence[Trajectory], last: Mapping[str, Trajectory], reward: Reward) -> None:
    for trajectory in last.values():
        verdict, earned = trajectory.scores[reward.name], trajectory.reward or 0.0
        trajectory.reward = None if verdict.value is None else earned + verdict.value
    for trajectory in trajectories:
        if trajectory is not last[trajectory.rollout_id]:
            trajectory.reward = last[trajectory.rollout_id].reward
