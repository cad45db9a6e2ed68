"""What a choice of strategy is credited with: gains, the baseline they are compared with, and the schedule.

`rlvr.service.loop.strategy_policy` learns from them. `python -m pytest tests/test_strategies.py` exercises it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlvr.reward.blend import session_reward
from rlvr.reward.feedback import Feedback
from rlvr.store.records import Experience

DISCOUNT = 0.7  # an iteration costs a request: an improvement that comes one later is worth three tenths less
MAX_TASKS = 1000  # whose baselines are kept; the ones seen longest ago go first


def gains(rewards: Sequence[float | None], discount: float = DISCOUNT) -> list[float | None]:
    """What came of each choice of an episode: G_t = sum over k >= t of discount^(k - t) (r_k - r_(k-1)), r_0 = 0.

    It is the return (reward-to-go) of an episode whose rewards are improvements. r_k is what the k-th answer was worth,
    without anything for being the k-th (`session_reward(feedback, 1)`). So a choice is paid for its own improvement and
    for what became of it. At discount 1 the sum telescopes to r_T - r_(t-1): the final answer, less what was there
    before.

    Iterations are not paid for. One that changes nothing adds nothing, and puts off what comes after it; a detour down
    and back up costs. Summed by parts, G_1 is a weighted mean of r_1 to r_T (the weights (1 - discount) discount^(k-1),
    and discount^(T-1) for the last, add up to 1): no number of iterations makes it more than the best answer is worth.
    The sum of the r_k would grow with every one.

    An answer that nobody could judge (None) has no gain, and the next one is compared with the last that was judged.
    """
    found: list[float | None] = [None] * len(rewards)
    judged = [(i, reward) for i, reward in enumerate(rewards) if reward is not None]
    befores = [0.0, *(reward for _, reward in judged)]
    after, later = len(rewards), 0.0  # the judged answer that follows, and its gain
    for (i, reward), before in zip(reversed(judged), reversed(befores[:-1]), strict=True):
        later = reward - before + discount ** (after - i) * later
        found[i], after = later, i
    return found


def regained(episodes: Iterable[Experience]) -> dict[int, float]:
    """The gains of a session's experiences as they stand in the store, by id: after a person's rating has changed what
    an answer is worth, and with it its own gain and its neighbours'."""
    samples: dict[int, list[Experience]] = {}
    for e in sorted(episodes, key=lambda e: e.iteration):
        samples.setdefault(e.sample, []).append(e)
    return {
        e.id: gain
        for episode in samples.values()
        if episode[0].iteration == 1  # else what came before was pruned, and nothing can be compared with it
        for e, gain in zip(episode, gains([worth_of(e) for e in episode]), strict=True)
        if e.id is not None and gain is not None
    }


def worth_of(e: Experience) -> float | None:
    """The reward that it would have as a first answer, with what ratings added to it."""
    errors = tuple(e.feedback.get("error_types") or ())
    worth = session_reward(Feedback(e.confidence, e.correctness, e.quality, error_types=errors), 1)
    if worth is None or e.reward is None or e.verified_reward is None:
        return worth
    return worth + e.reward - e.verified_reward


@dataclass
class Plateau:
    """A factor of the learning rate: less of it after `patience` windows of sessions in a row that ended no better than
    the best, and as much again with a window that does.

    `best` is the highest mean result of a window since the factor last fell, `stale` how many windows have not risen
    above it by `enough`. What a service is asked changes: after a fall a new level counts, not an easy week long ago.
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
        """Count a session's result; at the end of a window, decide."""
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
    """V: a number per task, and one for tasks that are new. Each follows the mean of the gains seen for it."""

    shared: float | None = None
    tasks: dict[str, float] = field(default_factory=dict[str, float])

    def __call__(self, task_id: str) -> float:
        return self.tasks.get(task_id, self.shared or 0.0)

    def begin(self, gains_N: np.ndarray, weights_N: np.ndarray) -> None:
        """Where nothing is known yet: at the mean of the first gains, not at 0."""
        if self.shared is None:
            self.shared = float(np.average(gains_N, weights=weights_N))

    def learn(self, task_ids: Sequence[str], gains_N: np.ndarray, weights_N: np.ndarray, step: float) -> None:
        """A gradient step of size `step` on the weighted mean of (G - V)^2 / 2: for a task over its own gains, and for
        `shared` over all. A task that is new begins at `shared`."""
        self.begin(gains_N, weights_N)
        assert self.shared is not None
        mean = float(np.average(gains_N, weights=weights_N))
        step = min(1.0, step)  # beyond it would overshoot
        for task_id in dict.fromkeys(task_ids):
            own_N = np.array([other == task_id for other in task_ids])
            before = self.tasks.pop(task_id, self.shared)
            error = float(np.average(gains_N[own_N], weights=weights_N[own_N])) - before
            self.tasks[task_id] = before + step * error  # at the end: the newest
        self.shared += step * (mean - self.shared)
        while len(self.tasks) > MAX_TASKS:
            del self.tasks[next(iter(self.tasks))]
