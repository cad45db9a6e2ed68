"""Prioritised replay: every task has the same share; within a task, draws follow the priorities.

Proportional prioritisation of Schaul et al. 2016 (https://arxiv.org/abs/1511.05952, section 3.3): P(i) = p_i^alpha /
sum_k p_k^alpha, one draw from each of n equal ranges of the total, so that a minibatch is spread over the buffer. Here
the sum is over the task of i, and the T tasks have 1 / T each: one that is asked for often does not crowd out the
others. The weight that takes the priorities out of an update again is (n P(i))^-beta, with n the experiences of the
task; the learner applies it, and n P(i) comes with each draw. Draws are counted (`rlvr.core.rng`): the same seed and
buffer give the same minibatch on every instance.

What is drawn are answers of the service's sessions whose `gain` is known; a training run learns on policy.
Exercised by tests/test_store_replay.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import sqlalchemy as sa

from rlvr.core import rng
from rlvr.store.connections import Database
from rlvr.store.records import Experience
from rlvr.store.tables import experiences

ALPHA = 0.6  # table 3 there, for proportional prioritisation
EPSILON = 1e-6  # every experience keeps a chance to be drawn
_TEXTS = ("prompt", "generated_output", "feedback", "scores", "tokens", "logprobs")
_CHOSEN = sa.select(*(column for column in experiences.c if column.name not in _TEXTS)).where(
    experiences.c.id.in_(sa.bindparam("ids", expanding=True))
)


@dataclass(frozen=True)
class ReplayBuffer:
    """How full the replay buffer is: `ready` of its `size` experiences have a gain and can be drawn."""

    size: int
    capacity: int
    ready: int

    @property
    def utilization(self) -> float:
        return self.size / self.capacity


class ReplayQueries(Database):
    """The part of an `ExperienceStore` that draws experiences for replay."""

    buffer_size: int

    def sample(self, n: int, seed: int, *, alpha: float = ALPHA) -> list[tuple[Experience, float]]:
        """`n` draws, with replacement, none from an empty buffer; each with how many times as probable its priority
        made it: 1 for an experience that is drawn as often as the mean one of its task. They come without their texts,
        tokens and verdicts."""
        assert n > 0 and alpha >= 0, (n, alpha)
        with self.read() as connection:
            rows = connection.execute(self._draw_query).all()
            if not rows:
                return []
            ids, priorities, tasks = zip(*rows, strict=True)
            p = probabilities(np.array(priorities), alpha)
            _, task, sizes = np.unique(tasks, return_inverse=True, return_counts=True)
            p /= np.bincount(task, weights=p)[task]  # within its task
            favour = p * sizes[task]
            key = rng.key("replay", seed)
            chosen = draw_stratified(p / len(sizes), [rng.uniform(key, position) for position in range(n)])
            wanted = {ids[i] for i in chosen}
            found = connection.execute(_CHOSEN, {"ids": list(wanted)}).mappings()
            drawn = {row["id"]: Experience(prompt="", generated_output="", **row) for row in found}
        # What another instance pruned between the two queries is left out.
        return [(drawn[ids[i]], float(favour[i])) for i in chosen if ids[i] in drawn]

    def buffer(self) -> ReplayBuffer:
        with self.read() as connection:
            size, ready = connection.execute(self._size_query).one()
        return ReplayBuffer(size, self.buffer_size, ready)

    def _window(self) -> sa.Select[*tuple[Any, ...]]:
        """The newest `buffer_size` answers of sessions."""
        e = experiences.c
        newest = sa.select(e.id, e.priority, e.gain, e.task_id).where(e.step.is_(None))
        return newest.order_by(e.id.desc()).limit(self.buffer_size)

    # Built once: every session that ends draws from the buffer.

    @cached_property
    def _draw_query(self) -> sa.Select[*tuple[Any, ...]]:
        w = self._window().subquery().c
        return sa.select(w.id, w.priority, w.task_id).where(w.gain.is_not(None)).order_by(w.id.desc())

    @cached_property
    def _size_query(self) -> sa.Select[*tuple[Any, ...]]:
        window = self._window().subquery()
        return sa.select(sa.func.count(), sa.func.count(window.c.gain)).select_from(window)


def probabilities(priorities_N: np.ndarray, alpha: float) -> np.ndarray:
    """P(i) = p_i^alpha / sum_k p_k^alpha, [N]. Priorities are scaled first: their powers must not leave a float."""
    top = float(priorities_N.max())
    weights_N = ((priorities_N / top if top > 0 else priorities_N) + EPSILON) ** alpha
    return weights_N / weights_N.sum()


def draw_stratified(p_N: np.ndarray, uniforms_n: list[float]) -> list[int]:
    """One index from each of n equal ranges of the cumulated probability."""
    n, ends_N = len(uniforms_n), np.cumsum(p_N)
    targets_n = (np.arange(n) + np.array(uniforms_n)) / n * ends_N[-1]
    return np.minimum(np.searchsorted(ends_N, targets_n, side="right"), len(p_N) - 1).tolist()
