"""Credit for a choice of strategy: gains, the baseline they are compared with, and the learning rate's schedule.

`rlvr.service.learning.strategy_policy` learns from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rlvr.reward.blend import session_reward
from rlvr.reward.feedback import Feedback
from rlvr.store.records import Experience

DISCOUNT = 0.7  # per iteration, because each costs a request
MAX_TASKS = 1000  # with a baseline of their own; the least recently seen is dropped first


def compute_gains(rewards: Sequence[float | None], discount: float = DISCOUNT) -> list[float | None]:
    """The gain of each choice of an episode: G_t = sum over k >= t of discount^(k - t) (r_k - r_(k-1)), with r_0 = 0.

    This is the return (reward-to-go) of an episode whose rewards are improvements. r_k is the reward that the k-th
    answer would have as a first one (`session_reward(feedback, 1)`). A choice is credited with its own improvement and
    with later ones. At discount 1 the sum telescopes to r_T - r_(t-1): the final answer minus the one before the
    choice.

    Iterations themselves earn nothing: one without a change adds nothing and delays the later ones, and a detour down
    and up again costs. Summed by parts, G_1 is a weighted mean of r_1 to r_T (the weights (1 - discount)
    discount^(k-1), and discount^(T-1) for the last, add up to 1), so more iterations cannot raise it above the best
    answer's reward. The sum of the r_k would grow with every iteration.

    An answer that could not be judged (None) has no gain; the next one is compared with the last judged answer.
    """
    gains: list[float | None] = [None] * len(rewards)
    judged = [(i, reward) for i, reward in enumerate(rewards) if reward is not None]
    befores = [0.0, *(reward for _, reward in judged)]
    next_place, gain = len(rewards), 0.0  # the judged answer that follows, and its gain
    for (i, reward), before in zip(reversed(judged), reversed(befores[:-1]), strict=True):
        gain = reward - before + discount ** (next_place - i) * gain
        gains[i], next_place = gain, i
    return gains


def recompute_gains(experiences: Iterable[Experience]) -> dict[int, float]:
    """The gains of a session's stored experiences, by id. A person's rating changes the reward of an answer, and so its
    own gain and those of its neighbours."""
    samples: dict[int, list[Experience]] = {}
    for e in sorted(experiences, key=lambda e: e.iteration):
        samples.setdefault(e.sample, []).append(e)
    return {
        e.id: gain
        for episode in samples.values()
        if episode[0].iteration == 1  # otherwise the earlier answers were pruned, and there is nothing to compare with
        for e, gain in zip(episode, compute_gains([first_answer_reward(e) for e in episode]), strict=True)
        if e.id is not None and gain is not None
    }


def first_answer_reward(e: Experience) -> float | None:
    """The reward that it would have as a first answer, with the change by ratings."""
    errors = tuple(e.feedback.get("error_types") or ())
    reward = session_reward(Feedback(e.confidence, e.correctness, e.quality, error_types=errors), 1)
    if reward is None or e.reward is None or e.verified_reward is None:
        return reward
    return reward + e.reward - e.verified_reward


@dataclass
class Plateau:
    """A factor for the learning rate: lowered after `patience` windows of sessions in a row without an improvement, and
    raised again by a window with one.

    `best` is the highest mean result of a window since the factor was lowered last, `stale` the number of windows that
    did not exceed it by `enough`. The tasks that a service gets change: after a reduction a new level counts, and not
    an easy week long ago.
    """

    scale: float = 1.0
    best: float | None = None
    stale: int = 0
    count: int = 0
    total: float = 0.0
    window: int = 50
    patience: int = 3
    enough: float = 0.01
    factor: float = 0.5
    least: float = 0.1

    def observe(self, result: float) -> None:
        """Count a session's result; adapt the factor at the end of a window."""
        self.count, self.total = self.count + 1, self.total + result
        if self.count < self.window:
            return
        mean, self.count, self.total = self.total / self.count, 0, 0.0
        if self.best is None or mean >= self.best + self.enough:
            self.best, self.stale, self.scale = mean, 0, min(1.0, self.scale / self.factor)
            return
        self.stale += 1
        if self.stale == self.patience:
            self.scale, self.stale, self.best = max(self.least, self.scale * self.factor), 0, mean


@dataclass
class Baseline:
    """V: a value per task, with the number of its gains, and one for new tasks. Each is the mean of its first gains,
    and then follows them."""

    shared: list[float] = field(default_factory=lambda: [0.0, 0])
    tasks: dict[str, list[float]] = field(default_factory=dict[str, list[float]])

    def __call__(self, task_id: str, first: float = 0.0) -> float:
        """The value of a task; `first` before the first gain of any task."""
        value, number = self.tasks.get(task_id, self.shared)
        return value if number else first

    def learn(self, task_id: str, gain: float, step: float) -> None:
        """Move V by `step` of its distance to a gain, by more while it is the mean of fewer gains. A new task starts at
        `shared`."""
        self.tasks[task_id] = _move(self.tasks.pop(task_id, self.shared), gain, step)  # last: the most recent
        self.shared = _move(self.shared, gain, step)
        if len(self.tasks) > MAX_TASKS:
            del self.tasks[next(iter(self.tasks))]


def _move(known: list[float], gain: float, step: float) -> list[float]:
    value, number = known
    return [value + min(1.0, max(step, 1 / (number + 1))) * (gain - value), number + 1]
